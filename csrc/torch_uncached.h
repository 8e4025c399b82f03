/* Memory past the cache: torch.cuda.memory.caching_allocator_enable(False) and PYTORCH_NO_CUDA_MEMORY_CACHING.  Floor 5. */
#pragma once

#include <atomic>
#include <cstddef>

/* Do requests go to the cache, and how many blocks past it are alive?  Looked at by every request and every free; set in
 * torch_uncached.cpp alone. */
extern __attribute__((visibility("hidden"))) std::atomic<bool> pya_torch_is_cached;
extern __attribute__((visibility("hidden"))) std::atomic<size_t> pya_torch_n_uncached;

/* Straight from the device; throws when it has none.  NULL for 0 bytes. */
void *pya_torch_uncached_alloc(size_t bytes);
/* Frees ptr if it came from there, and calls `before` first; false: it did not.  Only while there are such blocks. */
bool pya_torch_uncached_free(void *ptr, void (*before)(const void *ptr));

/* The virtual methods. */
void pya_torch_slot_enable(void *self, bool is_cached);
bool pya_torch_slot_is_enabled(const void *self);
