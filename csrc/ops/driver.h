#pragma once
/* The few calls of the CUDA driver that a launch needs, looked up at run time.  Floor 2. */
#include "ops.h"

struct pya_driver_grid {
    uint64_t x, y;
    uint32_t threads; /* in a block */
    uint32_t shared;  /* bytes of shared memory beyond what the kernel declares */
};

/* Lets the kernel be launched with this much dynamic shared memory.  False if the module lacks the kernel or the device the
 * memory. */
bool pya_driver_allow(const struct pya_ops_target *to, const char *kernel, uint32_t shared);

/* Launches a kernel by name with one argument.  PYA_OPS_E_INVAL: the grid is larger than the device allows;
 * PYA_OPS_E_DRIVER: see pya_ops_cuda_error(). */
int pya_driver_launch(
    const struct pya_ops_target *to, const char *kernel, struct pya_driver_grid grid,
    const void *argument);
