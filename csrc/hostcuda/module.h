#pragma once
/* Kernels and device variables: names without code.  Floor 4 (uses memory.h).
 *
 * A function is known by an address only; every function has the same attributes. */

#include "state.h"

/* Opaque, never followed; `name` is copied. */
void *pya_hc_function(const char *name);
int pya_hc_function_attribute(int attribute, int *value);
void pya_hc_function_attributes(struct cuda_func_attributes *out);
/* Blocks that fit a multiprocessor by threads and by shared memory. */
int pya_hc_occupancy(int block_threads, size_t shared_bytes);

/* __cudaRegisterVar; memory is made when somebody asks for the address. */
void pya_hc_variable_register(const void *host, size_t size);
int pya_hc_variable_address(const void *host, void **address, size_t *size);
