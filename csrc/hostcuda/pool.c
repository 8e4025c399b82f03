#include "pool.h"

#include "capture.h"
#include "memory.h"

#include <stdlib.h>

#define CHUNK_LEAST ((size_t)32 << 20)
#define STEP ((size_t)512)

/* Blocks of a chunk tile it, in order; no two free ones touch. */
struct pool_block {
    uintptr_t start;
    size_t size;
    bool is_free;
    struct pool_block *next;
};

struct pool_chunk {
    struct pya_hc_region *region;
    struct pool_block *blocks;
    struct pool_chunk *next;
};

struct pya_hc_pool {
    int device;
    uint64_t threshold;
    uint64_t used, used_high, reserved, reserved_high;
    int reuse[4]; /* switches 1 to 3, kept only to be read back */
    struct pool_chunk *chunks;
};

static struct pya_hc_objects pools = {.object_bytes = sizeof(struct pya_hc_pool)};

static struct pya_hc_pool *
pool_new_locked(int device) {
    struct pya_hc_pool *pool = pya_hc_objects_get(&pools);
    if (pool != NULL) {
        pool->device = device;
        pool->reuse[1] = pool->reuse[2] = pool->reuse[3] = 1;
    }
    return pool;
}

static int
pool_of_device(int device, int which, struct pya_hc_pool **out) {
    struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    if (dev->pools[0] == NULL) {
        dev->pools[0] = dev->pools[1] = pool_new_locked(device);
    }
    struct pya_hc_pool *pool = dev->pools[which];
    pya_hc_unlock();
    if (pool == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    *out = pool;
    return CU_OK;
}

int
pya_hc_pool_default(int device, struct pya_hc_pool **out) {
    return pool_of_device(device, 0, out);
}

int
pya_hc_pool_current(int device, struct pya_hc_pool **out) {
    return pool_of_device(device, 1, out);
}

int
pya_hc_pool_set_current(int device, struct pya_hc_pool *pool) {
    struct pya_hc_pool *ignored = NULL;
    int error = pool_of_device(device, 0, &ignored);
    if (error == CU_OK) {
        pya_hc_lock();
        bool known = pya_hc_objects_has(&pools, pool);
        if (known) {
            pya_hc_device(device)->pools[1] = pool;
        }
        pya_hc_unlock();
        error = known ? CU_OK : CU_INVALID_VALUE;
    }
    return error;
}

int
pya_hc_pool_create(int device, struct pya_hc_pool **out) {
    if (pya_hc_device(device) == NULL || out == NULL) {
        return out == NULL ? CU_INVALID_VALUE : CU_INVALID_DEVICE;
    }
    pya_hc_lock();
    *out = pool_new_locked(device);
    pya_hc_unlock();
    return *out == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

static void
pool_trim_locked(struct pya_hc_pool *pool, uint64_t keep) {
    for (struct pool_chunk **at = &pool->chunks; *at != NULL && pool->reserved > keep;) {
        struct pool_chunk *chunk = *at;
        if (chunk->blocks->is_free && chunk->blocks->next == NULL) {
            *at = chunk->next;
            pool->reserved -= chunk->region->mapped;
            pya_hc_memory_free_locked(chunk->region);
            free(chunk->blocks);
            free(chunk);
        } else {
            at = &chunk->next;
        }
    }
}

int
pya_hc_pool_destroy(struct pya_hc_pool *pool) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (pya_hc_objects_has(&pools, pool) && pool != pya_hc_device(pool->device)->pools[0]) {
        struct pya_hc_device *dev = pya_hc_device(pool->device);
        if (dev->pools[1] == pool) {
            dev->pools[1] = dev->pools[0];
        }
        /* With blocks still out, the pool lives on until they are freed; its slot is kept. */
        pool->threshold = 0;
        pool_trim_locked(pool, 0);
        if (pool->chunks == NULL) {
            pya_hc_objects_put(&pools, pool);
        }
        error = CU_OK;
    }
    pya_hc_unlock();
    return error;
}

static bool
block_split(struct pool_block *block, size_t size) {
    if (block->size > size) {
        struct pool_block *rest = malloc(sizeof *rest);
        if (rest == NULL) {
            return false;
        }
        *rest = (struct pool_block){block->start + size, block->size - size, true, block->next};
        block->next = rest;
        block->size = size;
    }
    block->is_free = false;
    return true;
}

static struct pool_block *
pool_find_free(const struct pya_hc_pool *pool, size_t size) {
    for (struct pool_chunk *chunk = pool->chunks; chunk != NULL; chunk = chunk->next) {
        struct pool_block *block = chunk->blocks;
        while (block != NULL && !(block->is_free && block->size >= size)) {
            block = block->next;
        }
        if (block != NULL) {
            return block;
        }
    }
    return NULL;
}

static int
pool_grow_locked(struct pya_hc_pool *pool, size_t size) {
    struct pya_hc_device *dev = pya_hc_device(pool->device);
    struct pool_chunk *chunk = calloc(1, sizeof *chunk);
    struct pool_block *block = calloc(1, sizeof *block);
    int error = chunk == NULL || block == NULL ? CU_OUT_OF_MEMORY : CU_OK;
    if (error == CU_OK) {
        size_t most = size < CHUNK_LEAST ? CHUNK_LEAST : size;
        error = pya_hc_memory_alloc_locked(dev, REGION_CHUNK, most, &chunk->region);
        if (error == CU_OUT_OF_MEMORY) {
            pool_trim_locked(pool, 0);
            error = pya_hc_memory_alloc_locked(dev, REGION_CHUNK, size, &chunk->region);
        }
    }
    if (error != CU_OK) {
        free(chunk);
        free(block);
        return error;
    }
    chunk->region->owner = pool;
    *block = (struct pool_block){chunk->region->start, chunk->region->mapped, true, NULL};
    chunk->blocks = block;
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    pool->reserved += block->size;
    if (pool->reserved > pool->reserved_high) {
        pool->reserved_high = pool->reserved;
    }
    return CU_OK;
}

static int
pool_alloc_locked(struct pya_hc_pool *pool, size_t size, void **out) {
    size_t rounded = (size + STEP - 1) & ~(STEP - 1);
    if (rounded < size) {
        return CU_OUT_OF_MEMORY;
    }
    struct pool_block *block = pool_find_free(pool, rounded);
    if (block == NULL) {
        int error = pool_grow_locked(pool, rounded);
        if (error != CU_OK) {
            return error;
        }
        block = pool_find_free(pool, rounded);
    }
    if (block == NULL || !block_split(block, rounded)) {
        return CU_OUT_OF_MEMORY;
    }
    pool->used += rounded;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    *out = (void *)block->start;
    return CU_OK;
}

int
pya_hc_pool_alloc(struct pya_hc_pool *pool, size_t size, const void *stream_handle, void **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    if (size == 0) {
        *out = NULL;
        return CU_OK;
    }
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    int device = stream == NULL ? -1 : stream->device;
    pya_hc_unlock();
    if (stream == NULL) {
        return CU_INVALID_HANDLE;
    }
    int error = pool == NULL ? pya_hc_pool_current(device, &pool) : CU_OK;
    if (error != CU_OK) {
        return error;
    }
    pya_hc_lock();
    error =
        pya_hc_objects_has(&pools, pool) ? pool_alloc_locked(pool, size, out) : CU_INVALID_VALUE;
    if (error == CU_OK) {
        struct pya_hc_action action = {.type = NODE_ALLOC, .dst = *out, .size = size};
        bool captured = false;
        error = pya_hc_submit_locked(stream, &action, &captured);
        if (error != CU_OK) {
            (void)pya_hc_pool_free_locked(pool, (uintptr_t)*out);
        }
    }
    pya_hc_unlock();
    return error;
}

static struct pool_chunk *
pool_chunk_of(const struct pya_hc_pool *pool, uintptr_t address) {
    for (struct pool_chunk *chunk = pool->chunks; chunk != NULL; chunk = chunk->next) {
        if (address - chunk->region->start < chunk->region->mapped) {
            return chunk;
        }
    }
    return NULL;
}

int
pya_hc_pool_free_locked(struct pya_hc_pool *pool, uintptr_t address) {
    struct pool_chunk *chunk = pool_chunk_of(pool, address);
    struct pool_block *before = NULL;
    struct pool_block *block = chunk == NULL ? NULL : chunk->blocks;
    while (block != NULL && block->start != address) {
        before = block;
        block = block->next;
    }
    if (block == NULL || block->is_free) {
        return CU_INVALID_VALUE;
    }
    pool->used -= block->size;
    block->is_free = true;
    struct pool_block *after = block->next;
    if (after != NULL && after->is_free) {
        block->size += after->size;
        block->next = after->next;
        free(after);
    }
    if (before != NULL && before->is_free) {
        before->size += block->size;
        before->next = block->next;
        free(block);
    }
    pool_trim_locked(pool, pool->threshold);
    return CU_OK;
}

void
pya_hc_pool_release_locked(uintptr_t address) {
    struct pya_hc_region *region = pya_hc_region_at_locked(address);
    if (region != NULL && region->kind == REGION_CHUNK) {
        (void)pya_hc_pool_free_locked(region->owner, address);
    }
}

int
pya_hc_pool_range_locked(
    struct pya_hc_pool *pool, uintptr_t address, uintptr_t *base, size_t *size) {
    struct pool_chunk *chunk = pool_chunk_of(pool, address);
    struct pool_block *block = chunk == NULL ? NULL : chunk->blocks;
    while (block != NULL && address - block->start >= block->size) {
        block = block->next;
    }
    if (block == NULL || block->is_free) {
        return CU_INVALID_VALUE;
    }
    *base = block->start;
    *size = block->size;
    return CU_OK;
}

int
pya_hc_pool_free(void *ptr, const void *stream_handle) {
    if (ptr == NULL) {
        return CU_OK;
    }
    bool is_plain = false;
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (region != NULL && region->kind == REGION_CHUNK) {
        struct pya_hc_action action = {.type = NODE_FREE, .dst = ptr};
        bool captured = false;
        error = pya_hc_submit_locked(stream, &action, &captured);
        if (error == CU_OK && !captured) {
            error = pya_hc_pool_free_locked(region->owner, (uintptr_t)ptr);
        }
    } else {
        is_plain = region != NULL;
    }
    pya_hc_unlock();
    return is_plain ? pya_hc_memory_free(ptr) : error;
}

int
pya_hc_pool_trim(struct pya_hc_pool *pool, size_t keep) {
    pya_hc_lock();
    bool known = pya_hc_objects_has(&pools, pool);
    if (known) {
        pool_trim_locked(pool, keep);
    }
    pya_hc_unlock();
    return known ? CU_OK : CU_INVALID_VALUE;
}

/* cudaMemPoolAttr */
enum {
    ATTRIBUTE_REUSE_FIRST = 1,
    ATTRIBUTE_REUSE_LAST = 3,
    ATTRIBUTE_THRESHOLD = 4,
    ATTRIBUTE_RESERVED_HIGH = 6,
    ATTRIBUTE_USED_HIGH = 8,
};

static int
pool_get_locked(const struct pya_hc_pool *pool, int attribute, void *value) {
    if (attribute < ATTRIBUTE_REUSE_FIRST || attribute > ATTRIBUTE_USED_HIGH) {
        return CU_INVALID_VALUE;
    }
    if (attribute <= ATTRIBUTE_REUSE_LAST) {
        *(int *)value = pool->reuse[attribute];
        return CU_OK;
    }
    const uint64_t values[] = {
        pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    *(uint64_t *)value = values[attribute - ATTRIBUTE_THRESHOLD];
    return CU_OK;
}

static int
pool_set_locked(struct pya_hc_pool *pool, int attribute, const void *value) {
    if (attribute >= ATTRIBUTE_REUSE_FIRST && attribute <= ATTRIBUTE_REUSE_LAST) {
        pool->reuse[attribute] = *(const int *)value;
        return CU_OK;
    }
    if (attribute == ATTRIBUTE_THRESHOLD) {
        pool->threshold = *(const uint64_t *)value;
        return CU_OK;
    }
    /* The high-water marks may only be reset. */
    bool is_high = attribute == ATTRIBUTE_RESERVED_HIGH || attribute == ATTRIBUTE_USED_HIGH;
    if (!is_high || *(const uint64_t *)value != 0) {
        return CU_INVALID_VALUE;
    }
    if (attribute == ATTRIBUTE_RESERVED_HIGH) {
        pool->reserved_high = pool->reserved;
    } else {
        pool->used_high = pool->used;
    }
    return CU_OK;
}

int
pya_hc_pool_get(struct pya_hc_pool *pool, int attribute, void *value) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (value != NULL && pya_hc_objects_has(&pools, pool)) {
        error = pool_get_locked(pool, attribute, value);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_pool_set(struct pya_hc_pool *pool, int attribute, const void *value) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (value != NULL && pya_hc_objects_has(&pools, pool)) {
        error = pool_set_locked(pool, attribute, value);
    }
    pya_hc_unlock();
    return error;
}
