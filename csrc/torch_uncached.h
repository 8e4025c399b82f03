/* Memory past the cache: torch.cuda.memory.caching_allocator_enable(False) and PYTORCH_NO_CUDA_MEMORY_CACHING.  Floor 5. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Read on every allocation. */
bool pya_torch_is_cached(void);
/* Straight from the device; throws when it has none.  NULL for 0 bytes. */
void *pya_torch_uncached_alloc(size_t bytes);
/* Frees ptr if it came from there, and calls `before` first; false: it did not. */
bool pya_torch_uncached_free(void *ptr, void (*before)(const void *ptr));

/* The virtual methods. */
void pya_torch_slot_enable(void *self, bool is_cached);
bool pya_torch_slot_is_enabled(const void *self);

#ifdef __cplusplus
}
#endif
