/* What names a private pool, and what decides which allocations go there.  Floor 1. */
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

/* Where a pool's memory comes from instead of the device (a torch.cuda.MemPool with an allocator of its own).
 * alloc and free are called without the card's lock, and may use the heap themselves; drop is called under it. */
struct pya_segment_source {
    /* Returns 0 when out of memory.  NULL: the device is the source. */
    pya_dptr (*alloc)(void *arg, size_t bytes);
    void (*free)(void *arg, pya_dptr addr);
    void (*drop)(void *arg); /* called once, after the last segment went back; may be NULL */
    void *arg;
};

/* Whose memory something happened to. */
struct pya_place {
    pya_stream stream;
    struct pya_pool_id pool;
};

/* Decides which allocations go to a pool while it is active on a device.  match NULL: every one. */
struct pya_stream_filter {
    bool (*match)(void *arg, pya_stream stream);
    void (*drop)(void *arg); /* called once, when the filter is no longer used; may be NULL */
    void *arg;
    /* Where it began: the stream of a capture, which may never ask for memory. */
    pya_stream began_on;
};

#ifdef __cplusplus
}
#endif
