/* The id of a private pool, and the filter that decides which allocations go there.  Floor 1. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* torch's MempoolId_t; {0, 0} is the default pool. */
struct pya_pool_id {
    uint64_t first;
    uint64_t second;
};

/* A pool's own source of memory instead of the device (a torch.cuda.MemPool with its own allocator).  alloc and free
 * are called without the card's lock and may use the heap; drop is called under the lock. */
struct pya_segment_source {
    /* NULL: the device is the source.  Returns 0 when out of memory. */
    pya_dptr (*alloc)(void *arg, size_t bytes);
    void (*free)(void *arg, pya_dptr addr);
    void (*drop)(void *arg); /* called once, after the last segment was freed; may be NULL */
    void *arg;
};

/* The stream and pool that an event belongs to. */
struct pya_place {
    pya_stream stream;
    struct pya_pool_id pool;
};

/* Decides which allocations go to a pool while it is active on a device.  match NULL: all of them. */
struct pya_stream_filter {
    bool (*match)(void *arg, pya_stream stream);
    void (*drop)(void *arg); /* called once, when the filter is no longer used; may be NULL */
    void *arg;
    /* The stream on which the capture began; it may never request memory itself. */
    pya_stream began_on;
};

#ifdef __cplusplus
}
#endif
