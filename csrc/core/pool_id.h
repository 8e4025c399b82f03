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

/* Decides which allocations go to a pool while it is active on a device.  match NULL: every one. */
struct pya_stream_filter {
    bool (*match)(void *arg, pya_stream stream);
    void (*drop)(void *arg); /* called once, when the filter is no longer used; may be NULL */
    void *arg;
};

#ifdef __cplusplus
}
#endif
