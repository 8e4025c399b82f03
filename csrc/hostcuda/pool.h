#pragma once
/* The memory pools of cudaMallocAsync.  Floor 4 (uses memory.h, stream.h).
 *
 * Chunks of at least 32 MiB are split first-fit in steps of 512 bytes.  The stream in which memory was freed can reuse it at
 * once; another stream can once it has waited for that work by an event, or the work is done, or the device is full.  When the
 * host waits for something, wholly free chunks above the release threshold go back to the device. */

#include "region.h"

struct pya_hc_pool;

int pya_hc_pool_default(int device, struct pya_hc_pool **out);
int pya_hc_pool_current(int device, struct pya_hc_pool **out);
int pya_hc_pool_set_current(int device, struct pya_hc_pool *pool);
int pya_hc_pool_create(int device, struct pya_hc_pool **out);
int pya_hc_pool_destroy(struct pya_hc_pool *pool);

/* pool NULL: the current one of the stream's device.  During capture the call becomes a node. */
int pya_hc_pool_alloc(struct pya_hc_pool *pool, size_t size, const void *stream_handle, void **out);
int pya_hc_pool_free(void *ptr, const void *stream_handle);
int pya_hc_pool_trim(struct pya_hc_pool *pool, size_t keep);
/* Attributes are named by cudaMemPoolAttr's numbers. */
int pya_hc_pool_get(struct pya_hc_pool *pool, int attribute, void *value);
int pya_hc_pool_set(struct pya_hc_pool *pool, int attribute, const void *value);

int pya_hc_pool_free_locked(struct pya_hc_pool *pool, uintptr_t address);
int pya_hc_pool_range_locked(
    struct pya_hc_pool *pool, uintptr_t address, uintptr_t *base, size_t *size);
/* Frees an address in whichever pool has it; does nothing if none has. */
void pya_hc_pool_release_locked(uintptr_t address);
/* Empties every pool of the device. */
void pya_hc_pool_reset_locked(int device);
