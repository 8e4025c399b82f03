/* Plain segments, for drivers without virtual memory calls and for pools with an allocator of their own: cudaMalloc in
 * torch's sizes.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Best fit of torch's rules (max_split_size included); NULL when nothing fits.  Stays in the index. */
struct pya_block *pya_plain_find(struct pya_arena *arena, size_t bytes, bool is_small);
/* Takes the run, splitting it where torch would.  One record was reserved in card->blocks. */
struct pya_block *
pya_plain_take(struct pya_arena *arena, struct pya_block *run, size_t bytes, bool is_small);
/* How large a segment for such a request is: a multiple of PYA_PAGE. */
size_t pya_plain_segment_bytes(size_t bytes, bool is_small);
/* One more segment that holds `bytes`. */
PYA_MUST_CHECK pya_status pya_plain_grow(struct pya_arena *arena, size_t bytes, bool is_small);
/* Serves a request of the default pool, before out of memory, from a segment of a private pool that lends its memory
 * (on_oom) and has the same stream; the block stays the pool's, since segments cannot change arenas by the page.
 * PYA_E_NOMEM: none has room. */
PYA_MUST_CHECK pya_status pya_plain_borrow(
    const struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Gives wholly free segments back until n_bytes went; *n_freed: how many did.  Waits for the device.  Only n_bytes ==
 * SIZE_MAX takes what is reserved for good too (pya_reserve()). */
PYA_MUST_CHECK pya_status pya_plain_trim(struct pya_arena *arena, size_t n_bytes, size_t *n_freed);
/* The same, but only segments the stream has finished with, the longest unused first. */
PYA_MUST_CHECK pya_status
pya_plain_trim_idle(struct pya_arena *arena, size_t n_bytes, size_t *n_freed);

#ifdef __cplusplus
}
#endif
