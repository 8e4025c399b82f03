#pragma once
/* Small PowerSpherical problems in float, computed in double.  Floor 1. */
#include <stdbool.h>

#include "kernels.h"

bool pya_ps_is_small(const struct pya_ops_ps *ps);
/* Each runs the double kernel on copies; *ps holds floats. */
int pya_ps_small_forward(const struct pya_ops_ps *ps, const struct pya_kernels *f64);
int pya_ps_small_backward(const struct pya_ops_ps *ps, const struct pya_kernels *f64);
