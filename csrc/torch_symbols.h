/* Symbols of the torch libraries this process has loaded.  Floor 5. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In libc10, libc10_cuda, libtorch_cuda or libcudart, whichever has it; NULL where none does.  Loads nothing. */
void *pya_torch_symbol(const char *name);
/* Place of a key of core/stats.h among the values of pya_stats_get(); the key must exist. */
size_t pya_torch_stat_index(const char *key);

#ifdef __cplusplus
}
#endif
