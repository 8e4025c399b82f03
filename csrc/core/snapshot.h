/* A snapshot of the heap: segments, blocks and trace as torch describes them, in flat arrays.  Floor 4.
 *
 * A segment is a mapped part of an arena, or a stitched range in use.  Together they contain every page exactly once
 * (a lent page lies in the stitched segment, not at home), so the sum of total_bytes equals reserved_bytes. */
#pragma once

#include "pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_BLOCK_TEXT_TABLE(X)                                                                    \
    X(ACTIVE, "active_allocated")                                                                  \
    X(PENDING, "active_pending_free")                                                              \
    X(INACTIVE, "inactive")

enum pya_snap_state {
#define X(name, text) PYA_SNAP_##name,
    PYA_BLOCK_TEXT_TABLE(X)
#undef X
};

struct pya_snap_block {
    pya_dptr addr;
    size_t bytes;
    size_t requested;
    int state;     /* enum pya_snap_state */
    void *context; /* the snapshot's own reference; NULL: none */
};

struct pya_snap_segment {
    int device;
    pya_dptr addr;
    size_t total_bytes;
    size_t allocated_bytes; /* of active_allocated blocks */
    size_t active_bytes;    /* also of active_pending_free blocks */
    size_t requested_bytes; /* of both kinds */
    pya_stream stream;
    struct pya_pool_id pool; /* {0, 0}: the default pool */
    bool is_small;
    bool is_expandable;
    size_t first_block;
    size_t n_blocks;
};

struct pya_snapshot {
    struct pya_snap_segment *segments;
    size_t n_segments;
    struct pya_snap_block *blocks;
    size_t n_blocks;
    struct pya_entry *entries; /* oldest first, device after device */
    size_t n_entries;
    size_t entries_end[PYA_MAX_DEVICES]; /* device d's end here and begin where d - 1's end */
    uint64_t now_ns[PYA_MAX_DEVICES];    /* the device's clock at the snapshot */
    struct pya_context_owner owner;
};

const char *pya_snap_state_text(int state);
/* pool NULL: all pools.  with_trace: entries too, and a snapshot entry is added to each trace afterwards. */
PYA_MUST_CHECK pya_status pya_snapshot_take(
    struct pya_heap *heap, const struct pya_pool_id *pool, bool with_trace,
    struct pya_snapshot *out);
void pya_snapshot_fini(struct pya_snapshot *snapshot);

#ifdef __cplusplus
}
#endif
