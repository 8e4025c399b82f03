/* The steps of the ladder, which ladder.c puts in order: the body of ladder_*.c, each of which uses only what stands above
 * its own here.  Where one says PYA_OK and *out is NULL, it found nothing and the next is to be tried.
 * Floor 11, private. */
#pragma once

#include "ladder.h"
#include "mosaic.h"
#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- ladder_home.c --- */

/* Reserves one record for the cut that follows; every refit goes through here. */
PYA_MUST_CHECK pya_status
pya_ladder_refit(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* The hole that needs the fewest new pages to make a run of `bytes` with the free runs beside it. */
PYA_MUST_CHECK pya_status pya_ladder_best_hole(
    struct pya_arena *arena, size_t bytes, struct pya_block **out, size_t *n_pages);
/* The n pages that `bytes` need of their best hole, and more where there is room. */
PYA_MUST_CHECK pya_status pya_ladder_grow(
    struct pya_arena *arena, size_t bytes, struct pya_block *hole, size_t n, bool is_small);

/* --- ladder_stitch.c: a run for `bytes`, in *out wherever these say PYA_OK --- */

/* Pages to be made before so much can be stitched. */
size_t pya_ladder_stitch_lacks(const struct pya_arena *arena, size_t bytes);
/* Pages to be made before `shorter` is long enough: all that it lacks but what is free in whole grains beside it. */
size_t pya_ladder_lengthen_lacks(
    const struct pya_arena *arena, size_t bytes, const struct pya_stitch *shorter);
/* shares: other live blocks may sit in the first and the last page. */
PYA_MUST_CHECK pya_status pya_ladder_stitch(
    struct pya_arena *arena, size_t bytes, bool is_small, bool shares, struct pya_block **out);
/* Behind `shorter`, which lacks n_lacking; where it is NULL, or so many are not to be had, by themselves. */
PYA_MUST_CHECK pya_status pya_ladder_join(
    struct pya_arena *arena, size_t bytes, bool is_small, const struct pya_mosaic *mosaic,
    struct pya_stitch *shorter, size_t n_lacking, struct pya_block **out);
/* What gets by with the fewest new pages. */
PYA_MUST_CHECK pya_status
pya_ladder_save(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Moves free pages out of holes to where they make one run of `bytes`, adding what is missing. */
PYA_MUST_CHECK pya_status
pya_ladder_move(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

/* --- ladder_borrow.c --- */

/* Which arenas may give pages to another? */
enum pya_transfer {
    PYA_TRANSFER_LEFT, /* pools that lost their last user and were settled, and what the next ones did not touch of it */
    PYA_TRANSFER_IDLE, /* other streams of the default pool and pools without users, finished work only */
    PYA_TRANSFER_OPEN, /* the same; everything was waited for */
    PYA_TRANSFER_LAST, /* and pools that lend before out of memory */
};

/* How far have the other streams come that may give? */
void pya_ladder_poll(const struct pya_arena *arena);
/* Pages change streams with their addresses: no device call. */
PYA_MUST_CHECK pya_status
pya_ladder_annex(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* At most n_want pages of others, at the end of the arena. */
PYA_MUST_CHECK pya_status
pya_ladder_transfer(struct pya_arena *arena, size_t n_want, enum pya_transfer kind);
/* Pages of other arenas, and what they make possible. */
PYA_MUST_CHECK pya_status pya_ladder_borrow(
    struct pya_arena *arena, size_t bytes, bool is_small, enum pya_transfer kind,
    struct pya_block **out);

/* --- ladder_squeeze.c --- */

/* All that is free is idle then.  The work may wait for another process, and that for what pya_share_export() gives, so the
 * lock is given up. */
PYA_MUST_CHECK pya_status pya_ladder_wait(struct pya_arena *arena);
/* Free memory of all goes back to the device, so many bytes of it.  A pool's own allocator takes it without the lock. */
PYA_MUST_CHECK pya_status pya_ladder_give_back(struct pya_arena *arena, size_t n_bytes);
/* The capacity is reached.  Where no whole pages are to be had, parts of them may be enough. */
PYA_MUST_CHECK pya_status
pya_ladder_squeeze(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

#ifdef __cplusplus
}
#endif
