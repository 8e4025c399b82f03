#include "pool.h"

#include "capture.h"
#include "memory.h"

#include <stdlib.h>

#define CHUNK_LEAST ((size_t)32 << 20)
#define STEP ((size_t)512)

/* The blocks of a chunk tile it, in order.  Two adjacent free blocks were freed in different streams. */
struct pool_block {
    uintptr_t start;
    size_t size;
    bool is_free;
    struct pya_hc_mark freed; /* when and where; stream 0: usable by every stream */
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
    int reuse[4];       /* by attribute number */
    size_t n_unsettled; /* free blocks that not every stream may use */
    struct pool_chunk *chunks;
};

/* cudaMemPoolAttr */
enum {
    ATTRIBUTE_FOLLOW_EVENTS = 1,
    ATTRIBUTE_OPPORTUNISTIC = 2,
    ATTRIBUTE_INTERNAL = 3,
    ATTRIBUTE_THRESHOLD = 4,
    ATTRIBUTE_RESERVED_HIGH = 6,
    ATTRIBUTE_USED_HIGH = 8,
};

static struct pya_hc_objects pools = {.object_bytes = sizeof(struct pya_hc_pool)};

static void pools_trim_locked(void);

static struct pya_hc_pool *
pool_new_locked(int device) {
    struct pya_hc_pool *pool = pya_hc_objects_get(&pools);
    if (pool != NULL) {
        pool->device = device;
        pool->reuse[ATTRIBUTE_FOLLOW_EVENTS] = 1;
        pool->reuse[ATTRIBUTE_OPPORTUNISTIC] = 1;
        pool->reuse[ATTRIBUTE_INTERNAL] = 1;
        pya_hc_after_sync_locked(pools_trim_locked);
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
        bool known = pya_hc_objects_has(&pools, pool) && pool->device == device;
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

static bool
block_is_settled(const struct pool_block *block) {
    return block->is_free && block->freed.stream_id == 0;
}

/* Merges adjacent free blocks of one stream, or of all; the later free counts. */
static void
block_join_next(struct pya_hc_pool *pool, struct pool_block *block) {
    struct pool_block *next = block->next;
    if (next == NULL || !block->is_free || !next->is_free ||
        block->freed.stream_id != next->freed.stream_id) {
        return;
    }
    if (next->freed.ticket > block->freed.ticket) {
        block->freed = next->freed;
    }
    pool->n_unsettled -= !block_is_settled(block);
    block->size += next->size;
    block->next = next->next;
    free(next);
}

static void
chunk_join(struct pya_hc_pool *pool, const struct pool_chunk *chunk) {
    struct pool_block *block = chunk->blocks;
    while (block != NULL) {
        struct pool_block *next = block->next;
        block_join_next(pool, block);
        block = block->next == next ? next : block;
    }
}

/* Free blocks whose mark satisfies is_one now count as freed at `now` (NULL: usable by every stream). */
static void
pool_settle_locked(
    struct pya_hc_pool *pool, bool (*is_one)(const struct pya_hc_mark *),
    const struct pya_hc_mark *now) {
    struct pool_chunk *chunk = pool->chunks;
    for (; chunk != NULL && pool->n_unsettled > 0; chunk = chunk->next) {
        for (struct pool_block *block = chunk->blocks; block != NULL; block = block->next) {
            if (block->is_free && !block_is_settled(block) && is_one(&block->freed)) {
                block->freed = now == NULL ? (struct pya_hc_mark){0} : *now;
                pool->n_unsettled -= now == NULL;
            }
        }
        chunk_join(pool, chunk);
    }
}

static bool
mark_any(const struct pya_hc_mark *mark) {
    (void)mark;
    return true;
}

/* Settles blocks whose work is over: known by waiting or, if the pool may reuse opportunistically, by asking. */
static void
pool_look_locked(struct pya_hc_pool *pool) {
    bool looks = pool->reuse[ATTRIBUTE_OPPORTUNISTIC] != 0;
    pool_settle_locked(
        pool, looks ? pya_hc_mark_is_done_locked : pya_hc_mark_is_waited_locked, NULL);
}

static void
pool_trim_locked(struct pya_hc_pool *pool, uint64_t keep) {
    pool_look_locked(pool);
    for (struct pool_chunk **at = &pool->chunks; *at != NULL && pool->reserved > keep;) {
        struct pool_chunk *chunk = *at;
        bool is_idle = block_is_settled(chunk->blocks) && chunk->blocks->next == NULL;
        if (is_idle && pool->reserved - chunk->region->mapped >= keep) {
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

void
pya_hc_pool_reset_locked(int device) {
    size_t cursor = 0;
    struct pya_hc_pool *pool = pya_hc_objects_next(&pools, &cursor);
    for (; pool != NULL; pool = pya_hc_objects_next(&pools, &cursor)) {
        struct pool_chunk *chunk = pool->device == device ? pool->chunks : NULL;
        for (; chunk != NULL; chunk = chunk->next) {
            for (struct pool_block *block = chunk->blocks; block != NULL; block = block->next) {
                pool->n_unsettled -= block->is_free && !block_is_settled(block);
                pool->used -= block->is_free ? 0 : block->size;
                block->is_free = true;
                block->freed = (struct pya_hc_mark){0};
            }
            chunk_join(pool, chunk);
        }
        if (pool->device == device) {
            pool_trim_locked(pool, 0);
        }
    }
}

static void
pools_trim_locked(void) {
    size_t cursor = 0;
    struct pya_hc_pool *pool = pya_hc_objects_next(&pools, &cursor);
    while (pool != NULL) {
        pool_trim_locked(pool, pool->threshold);
        pool = pya_hc_objects_next(&pools, &cursor);
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
        /* While blocks are allocated, the pool lives on; its slot is kept. */
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
block_take(struct pya_hc_pool *pool, struct pool_block *block, size_t size) {
    bool is_settled = block_is_settled(block);
    if (block->size > size) {
        struct pool_block *rest = malloc(sizeof *rest);
        if (rest == NULL) {
            return false;
        }
        *rest = *block;
        rest->start += size;
        rest->size -= size;
        block->next = rest;
        block->size = size;
    } else {
        pool->n_unsettled -= !is_settled;
    }
    block->is_free = false;
    return true;
}

static bool
block_serves(
    const struct pya_hc_pool *pool, const struct pool_block *block,
    const struct pya_hc_stream *stream) {
    if (!block->is_free) {
        return false;
    }
    bool is_own = block_is_settled(block) || block->freed.stream_id == stream->id;
    return is_own || (pool->reuse[ATTRIBUTE_FOLLOW_EVENTS] != 0 &&
                      pya_hc_mark_is_before_locked(&block->freed, stream));
}

static struct pool_block *
pool_find_free(const struct pya_hc_pool *pool, size_t size, const struct pya_hc_stream *stream) {
    for (struct pool_chunk *chunk = pool->chunks; chunk != NULL; chunk = chunk->next) {
        struct pool_block *block = chunk->blocks;
        while (block != NULL && !(block->size >= size && block_serves(pool, block, stream))) {
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
    *block = (struct pool_block){
        .start = chunk->region->start, .size = chunk->region->mapped, .is_free = true};
    chunk->blocks = block;
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    pool->reserved += block->size;
    if (pool->reserved > pool->reserved_high) {
        pool->reserved_high = pool->reserved;
    }
    return CU_OK;
}

/* A block that the stream may use: a free one, a new one, or if the device is full one of other streams, whose work it waits
 * for. NULL: none. */
static struct pool_block *
pool_obtain_locked(struct pya_hc_pool *pool, size_t size, struct pya_hc_stream *stream) {
    pool_look_locked(pool);
    struct pool_block *block = pool_find_free(pool, size, stream);
    if (block != NULL) {
        return block;
    }
    if (pool_grow_locked(pool, size) != CU_OK && pool->reuse[ATTRIBUTE_INTERNAL] != 0) {
        const struct pya_hc_mark now = pya_hc_mark_locked(stream);
        pool_settle_locked(pool, mark_any, &now);
    }
    return pool_find_free(pool, size, stream);
}

static int
pool_alloc_locked(struct pya_hc_pool *pool, size_t size, struct pya_hc_stream *stream, void **out) {
    size_t rounded = (size + STEP - 1) & ~(STEP - 1);
    if (rounded < size) {
        return CU_OUT_OF_MEMORY;
    }
    struct pool_block *block = pool_obtain_locked(pool, rounded, stream);
    if (block == NULL || !block_take(pool, block, rounded)) {
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
    error = pya_hc_objects_has(&pools, pool) ? pool_alloc_locked(pool, size, stream, out)
                                             : CU_INVALID_VALUE;
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

/* freed: the mark of the free in its stream; NULL: usable by every stream. */
static int
pool_give_locked(struct pya_hc_pool *pool, uintptr_t address, const struct pya_hc_mark *freed) {
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
    bool is_over = freed == NULL ||
                   (pool->reuse[ATTRIBUTE_OPPORTUNISTIC] != 0 && pya_hc_mark_is_done_locked(freed));
    block->freed = is_over ? (struct pya_hc_mark){0} : *freed;
    pool->n_unsettled += !is_over;
    block_join_next(pool, block);
    if (before != NULL) {
        block_join_next(pool, before);
    }
    return CU_OK;
}

int
pya_hc_pool_free_locked(struct pya_hc_pool *pool, uintptr_t address) {
    return pool_give_locked(pool, address, NULL);
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
            const struct pya_hc_mark freed = pya_hc_mark_locked(stream);
            error = pool_give_locked(region->owner, (uintptr_t)ptr, &freed);
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

static int
pool_get_locked(const struct pya_hc_pool *pool, int attribute, void *value) {
    if (attribute < ATTRIBUTE_FOLLOW_EVENTS || attribute > ATTRIBUTE_USED_HIGH) {
        return CU_INVALID_VALUE;
    }
    if (attribute <= ATTRIBUTE_INTERNAL) {
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
    if (attribute >= ATTRIBUTE_FOLLOW_EVENTS && attribute <= ATTRIBUTE_INTERNAL) {
        pool->reuse[attribute] = *(const int *)value;
        return CU_OK;
    }
    if (attribute == ATTRIBUTE_THRESHOLD) {
        pool->threshold = *(const uint64_t *)value;
        return CU_OK;
    }
    /* High-water marks can only be reset. */
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
    int error = pya_hc_capture_unsafe(); /* although it does not name a stream */
    if (error != CU_OK) {
        return error;
    }
    error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (value != NULL && pya_hc_objects_has(&pools, pool)) {
        error = pool_get_locked(pool, attribute, value);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_pool_set(struct pya_hc_pool *pool, int attribute, const void *value) {
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (value != NULL && pya_hc_objects_has(&pools, pool)) {
        error = pool_set_locked(pool, attribute, value);
    }
    pya_hc_unlock();
    return error;
}
