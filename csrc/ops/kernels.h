#pragma once
/* The table of kernels that each backend fills; ops.c picks one.  Only the thin kernels are not in it: PowerSpherical's other
 * kernels call them.  Floor 1. */
#include "ops.h"

struct pya_kernels {
    int (*ps_forward)(const struct pya_ops_ps *);
    int (*ps_backward)(const struct pya_ops_ps *);
    int (*ps_mixture_forward)(const struct pya_ops_ps *);
    int (*ps_mixture_backward)(const struct pya_ops_ps *);
    int (*additive_forward)(const struct pya_ops_additive *);
    int (*additive_backward)(const struct pya_ops_additive *);
    int (*attention_forward)(const struct pya_ops_attention *);
    int (*attention_backward)(const struct pya_ops_attention *);
};

#define PYA_KERNELS_DECLARE(isa)                                                                   \
    int pya_ps_forward_##isa(const struct pya_ops_ps *a);                                          \
    int pya_ps_backward_##isa(const struct pya_ops_ps *a);                                         \
    int pya_ps_mixture_forward_##isa(const struct pya_ops_ps *a);                                  \
    int pya_ps_mixture_backward_##isa(const struct pya_ops_ps *a);                                 \
    int pya_ps_thin_forward_##isa(const struct pya_ops_ps *a);                                     \
    int pya_ps_thin_backward_##isa(const struct pya_ops_ps *a);                                    \
    int pya_additive_forward_##isa(const struct pya_ops_additive *a);                              \
    int pya_additive_backward_##isa(const struct pya_ops_additive *a);                             \
    int pya_attention_forward_##isa(const struct pya_ops_attention *a);                            \
    int pya_attention_backward_##isa(const struct pya_ops_attention *a);

PYA_KERNELS_DECLARE(avx512)
PYA_KERNELS_DECLARE(avx2)
PYA_KERNELS_DECLARE(scalar)
PYA_KERNELS_DECLARE(f64)

int pya_attention_forward_amx(const struct pya_ops_attention *a);
int pya_attention_backward_amx(const struct pya_ops_attention *a);
