/* Plain segments: cudaMalloc in torch's sizes, for drivers without virtual memory calls and for pools with their own
 * allocator.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Best fit by torch's rules, including max_split_size.  NULL: nothing fits.  The run stays in the index. */
struct pya_block *pya_plain_find(struct pya_arena *arena, size_t bytes, bool is_small);
/* Takes the run and splits it where torch would.  The caller has reserved one record in card->blocks. */
struct pya_block *
pya_plain_take(struct pya_arena *arena, struct pya_block *run, size_t bytes, bool is_small);
/* Size of the segment for such a request: a multiple of PYA_PAGE. */
size_t pya_plain_segment_bytes(size_t bytes, bool is_small);
/* Adds a segment that holds `bytes`. */
PYA_MUST_CHECK pya_status pya_plain_grow(struct pya_arena *arena, size_t bytes, bool is_small);
/* Before out of memory: serves a request of the default pool from a segment of a private pool that lends its memory
 * (on_oom), on the same stream.  The block stays the pool's, because segments cannot be split between arenas.
 * PYA_E_NOMEM: none has room. */
PYA_MUST_CHECK pya_status pya_plain_borrow(
    const struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Gives back wholly free segments until n_bytes are released; *n_freed: bytes released.  Waits for the device.  Only
 * n_bytes == SIZE_MAX also gives back what pya_reserve() keeps.  Segments of a pool's own allocator only join *gone. */
PYA_MUST_CHECK pya_status
pya_plain_trim(struct pya_arena *arena, size_t n_bytes, size_t *n_freed, struct pya_range **gone);
/* Frees those segments.  The lock is released meanwhile, so what others freed by then was not waited for. */
void pya_plain_hand_back(struct pya_range *gone);
/* The same, but only for segments that the stream has finished with, longest unused first. */
PYA_MUST_CHECK pya_status
pya_plain_trim_idle(struct pya_arena *arena, size_t n_bytes, size_t *n_freed);

#ifdef __cplusplus
}
#endif
