/* The allocator's public interface: private pools and memory of a special kind.  Floor 3; floor 12 implements it. */
#pragma once

#include "base.h"
#include "pool_id.h"
#include "stats.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap;

/* Private pools (CUDA graphs, torch.cuda.MemPool).  begin adds a user to the pool and routes matching allocations to
 * it until end.  release removes one user; when none is left, the pool's idle memory may be given back. */
PYA_MUST_CHECK pya_status pya_pool_begin(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_stream_filter filter);
PYA_MUST_CHECK pya_status pya_pool_end(struct pya_heap *heap, int device, struct pya_pool_id id);
PYA_MUST_CHECK pya_status
pya_pool_release(struct pya_heap *heap, int device, struct pya_pool_id id);
PYA_MUST_CHECK pya_status
pya_pool_set_on_oom(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom);

struct pya_pool_info {
    struct pya_pool_id id;
    size_t n_users;
    bool is_active;
    struct pya_stat reserved_bytes[PYA_N_STAT_POOLS];
};

/* Fills at most n_room entries.  Returns the number of the device's pools. */
size_t pya_pool_list(struct pya_heap *heap, int device, struct pya_pool_info *infos, size_t n_room);
/* Gives back the idle memory of one pool now, unless the pool has users.  Waits for the device. */
PYA_MUST_CHECK pya_status pya_pool_trim(struct pya_heap *heap, int device, struct pya_pool_id id);
/* Adds a user without routing anything (torch.cuda.MemPool).  on_oom: others may take the pool's memory before out of
 * memory. */
PYA_MUST_CHECK pya_status
pya_pool_retain(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom);

/* Sets where the pool's memory comes from; call it before the first allocation.  The heap drops `source` together
 * with the pool, and also on failure.  PYA_E_INVAL: there is no such pool, or it already has memory or a source. */
PYA_MUST_CHECK pya_status pya_pool_set_source(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_segment_source source);
/* Makes every block a segment of its own; call it before the pool's first allocation. */
PYA_MUST_CHECK pya_status
pya_pool_set_no_split(struct pya_heap *heap, int device, struct pya_pool_id id);

/* A former block, as described by pya_snapshot_take(). */
struct pya_claim {
    pya_dptr addr;
    size_t bytes;
    size_t requested;
    pya_stream stream; /* the segment's */
};

/* Allocates exactly this block again in a pool in use; all of its bytes must be free.  torch's CUDA-graph trees
 * return to an earlier state of a pool this way.  PYA_E_INVAL: some bytes are not free, or never belonged to the
 * pool. */
PYA_MUST_CHECK pya_status pya_pool_claim(
    struct pya_heap *heap, int device, struct pya_pool_id id, const struct pya_claim *claim);

/* Gives device `peer` access to the memory of `device`, now and in future.  PYA_E_NOTSUP: not possible.  After a
 * failure `peer` cannot reach memory mapped later, and `device` works as before.
 * After success every block is accessible to the peer: if the driver refuses that for new memory, the request that
 * needs it fails with PYA_E_DEVICE.  A block without that access would be worse, because a kernel of the peer that
 * reads it makes the process's devices unusable. */
PYA_MUST_CHECK pya_status pya_enable_peer(struct pya_heap *heap, int device, int peer);
/* Was that refused, or not asked for?  False for memory that is not this heap's or not from virtual memory calls. */
bool pya_lacks_peer(struct pya_heap *heap, int device, int peer);

#ifdef __cplusplus
}
#endif
