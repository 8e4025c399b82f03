#pragma once
/* The few calls of the CUDA driver that launching needs, found at run time.  Floor 2. */
#include "ops.h"

struct pya_driver_grid {
    uint64_t x, y;
    uint32_t threads; /* in a block */
    uint32_t shared;  /* bytes of shared memory beyond what the kernel declares */
};

/* Whether the module has the kernel and the device that much shared memory for it, which from then on
 * it may be launched with. */
bool pya_driver_allow(const struct pya_ops_target *to, const char *kernel, uint32_t shared);

/* Launches a kernel by name with one argument.  PYA_OPS_E_INVAL: the grid is larger than the device
 * takes; PYA_OPS_E_DRIVER: pya_ops_cuda_error() says what. */
int pya_driver_launch(
    const struct pya_ops_target *to, const char *kernel, struct pya_driver_grid grid,
    const void *argument);
