#pragma once
/* Kernels and device variables: names without code.  Floor 4 (uses memory.h).
 *
 * A function is only an address; functions differ in how much shared memory their launches may request. */

#include "state.h"

/* An opaque handle, never dereferenced; `name` is copied. */
void *pya_hc_function(const char *name);
/* The kernel of that name in a module: the same address on every call; NULL if host memory is out. */
void *pya_hc_kernel(const void *module, const char *name);
/* cuFuncSetAttribute; only the largest dynamic shared memory is kept. */
int pya_hc_kernel_set(const void *function, int attribute, int value);
/* Are grid and block (three sizes each) non-empty and no larger than a Hopper card takes? */
bool pya_hc_launch_fits(const unsigned *grid, const unsigned *block);
/* CU_INVALID_VALUE if they do not fit, or for more shared memory than was allowed. */
int pya_hc_launch_check(
    const void *function, const unsigned *grid, const unsigned *block, size_t shared_bytes);
int pya_hc_function_attribute(int attribute, int *value);
void pya_hc_function_attributes(struct cuda_func_attributes *out);
/* Number of blocks that fit on a multiprocessor, by threads and by shared memory. */
int pya_hc_occupancy(int block_threads, size_t shared_bytes);

/* __cudaRegisterVar; the memory is allocated when the address is first asked for. */
void pya_hc_variable_register(const void *host, size_t size);
int pya_hc_variable_address(const void *host, void **address, size_t *size);
