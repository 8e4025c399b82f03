/* The allocator's public interface: private pools, and memory of a special kind.  Floor 3; floor 12 implements it. */
#pragma once

#include "base.h"
#include "pool_id.h"
#include "stats.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap;

/* Private pools (CUDA graphs, torch.cuda.MemPool).  begin counts a user of the pool and routes matching
 * allocations to it until end; release drops one user; at none, idle memory of the pool may go back. */
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

/* Fills at most n_room entries; returns how many pools the device has. */
size_t pya_pool_list(struct pya_heap *heap, int device, struct pya_pool_info *infos, size_t n_room);
/* Gives back the idle memory of one pool now, unless it has a user still; waits for the device. */
PYA_MUST_CHECK pya_status pya_pool_trim(struct pya_heap *heap, int device, struct pya_pool_id id);
/* Counts a user without routing anything (torch.cuda.MemPool); on_oom: others may take from it before OOM. */
PYA_MUST_CHECK pya_status
pya_pool_retain(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom);

/* Before the pool's first allocation: its memory comes from `source`, which the heap drops with the pool; also on
 * failure.  PYA_E_INVAL: there is no such pool, or it has memory or a source already. */
PYA_MUST_CHECK pya_status pya_pool_set_source(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_segment_source source);
/* Before the pool's first allocation: every block is a segment of its own. */
PYA_MUST_CHECK pya_status
pya_pool_set_no_split(struct pya_heap *heap, int device, struct pya_pool_id id);

/* A block as it was once: what pya_snapshot_take() said of it. */
struct pya_claim {
    pya_dptr addr;
    size_t bytes;
    size_t requested;
    pya_stream stream; /* of its segment */
};

/* Hands out this very block of a pool in use again; all of its bytes are free now (torch's CUDA-graph trees return to an
 * earlier state of a pool this way).  PYA_E_INVAL: they are not, or never were the pool's. */
PYA_MUST_CHECK pya_status pya_pool_claim(
    struct pya_heap *heap, int device, struct pya_pool_id id, const struct pya_claim *claim);

/* Lets device `peer` reach the memory of `device`, what is mapped now and what will be.  PYA_E_NOTSUP: it cannot.  After
 * a failure it reaches no memory mapped later, and `device` goes on as before. */
PYA_MUST_CHECK pya_status pya_enable_peer(struct pya_heap *heap, int device, int peer);

#ifdef __cplusplus
}
#endif
