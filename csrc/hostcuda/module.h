#pragma once
/* Kernels and device variables: names without code.  Floor 4 (uses memory.h).
 *
 * A function is known by an address only; what differs is how much shared memory its launches may ask for. */

#include "state.h"

/* Opaque, never followed; `name` is copied. */
void *pya_hc_function(const char *name);
/* The kernel of that name in a module: the same address every time; NULL without memory. */
void *pya_hc_kernel(const void *module, const char *name);
/* cuFuncSetAttribute; the largest dynamic shared memory is kept. */
int pya_hc_kernel_set(const void *function, int attribute, int value);
/* Are they no larger than a Hopper card takes, and not empty?  Three sizes each. */
bool pya_hc_launch_fits(const unsigned *grid, const unsigned *block);
/* CU_INVALID_VALUE where they do not fit, or for more shared memory than was allowed. */
int pya_hc_launch_check(
    const void *function, const unsigned *grid, const unsigned *block, size_t shared_bytes);
int pya_hc_function_attribute(int attribute, int *value);
void pya_hc_function_attributes(struct cuda_func_attributes *out);
/* Blocks that fit a multiprocessor by threads and by shared memory. */
int pya_hc_occupancy(int block_threads, size_t shared_bytes);

/* __cudaRegisterVar; memory is made when somebody asks for the address. */
void pya_hc_variable_register(const void *host, size_t size);
int pya_hc_variable_address(const void *host, void **address, size_t *size);
