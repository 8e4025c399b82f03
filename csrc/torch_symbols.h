/* Symbols of the torch libraries this process has loaded.  Floor 5. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In libc10, libc10_cuda, libtorch_cuda or libcudart, whichever has it; NULL where none does.  Loads nothing. */
void *pya_torch_symbol(const char *name);
/* The same anywhere in the process, as a function to be cast to its type. */
typedef void (*pya_torch_any_function)(void);
pya_torch_any_function pya_torch_function(const char *name);
/* Place of a key of core/stats.h among the values of pya_stats_get(); the key must exist. */
size_t pya_torch_stat_index(const char *key);

#ifdef __cplusplus
}
#endif
