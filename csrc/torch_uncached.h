/* Allocation without the cache: torch.cuda.memory.caching_allocator_enable(False), PYTORCH_NO_CUDA_MEMORY_CACHING.  Floor 5. */
#pragma once

#include <atomic>
#include <cstddef>

/* Is the cache in use, and how many uncached blocks are alive?  Every request and every free reads these; only
 * torch_uncached.cpp writes them. */
extern __attribute__((visibility("hidden"))) std::atomic<bool> pya_torch_is_cached;
extern __attribute__((visibility("hidden"))) std::atomic<size_t> pya_torch_n_uncached;

/* Straight from the device; throws if it has no memory.  NULL for 0 bytes. */
void *pya_torch_uncached_alloc(size_t bytes);
/* If ptr is an uncached block, calls `before` and frees it; else false.  Call it only if pya_torch_n_uncached > 0. */
bool pya_torch_uncached_free(void *ptr, void (*before)(const void *ptr));

/* Implement the virtual methods. */
void pya_torch_slot_enable(void *self, bool is_cached);
bool pya_torch_slot_is_enabled(const void *self);
