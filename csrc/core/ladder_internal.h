/* The steps of the ladder, which ladder.c puts in order: the interface of ladder_*.c.  Each file uses only the
 * functions above its own section.  PYA_OK with *out NULL: the step found nothing; try the next one.
 * Floor 11, private. */
#pragma once

#include "ladder.h"
#include "mosaic.h"
#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- ladder_home.c --- */

/* Tries the home runs again, with one record reserved for the cut.  Every refit goes through here. */
PYA_MUST_CHECK pya_status
pya_ladder_refit(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Finds the hole that needs the fewest new pages to form, with the free runs next to it, a run of `bytes`. */
PYA_MUST_CHECK pya_status pya_ladder_best_hole(
    struct pya_arena *arena, size_t bytes, struct pya_block **out, size_t *n_pages);
/* Adds to the best hole the n pages that `bytes` need, and more if there is room. */
PYA_MUST_CHECK pya_status pya_ladder_grow(
    struct pya_arena *arena, size_t bytes, struct pya_block *hole, size_t n, bool is_small);

/* --- ladder_stitch.c: these find a run for `bytes`, and set *out whenever they return PYA_OK --- */

/* New pages needed before `bytes` can be stitched. */
size_t pya_ladder_stitch_lacks(const struct pya_arena *arena, size_t bytes);
/* New pages needed to make `shorter` long enough: what it lacks, minus the pages that are free in whole grains
 * elsewhere. */
size_t pya_ladder_lengthen_lacks(
    const struct pya_arena *arena, size_t bytes, const struct pya_stitch *shorter);
/* shares: other live blocks may lie in the first and the last page. */
PYA_MUST_CHECK pya_status pya_ladder_stitch(
    struct pya_arena *arena, size_t bytes, bool is_small, bool shares, struct pya_block **out);
/* Stitches `bytes` by extending `shorter`, which lacks n_lacking pages.  If `shorter` is NULL or so many pages are
 * not available, stitches a new range. */
PYA_MUST_CHECK pya_status pya_ladder_join(
    struct pya_arena *arena, size_t bytes, bool is_small, const struct pya_mosaic *mosaic,
    struct pya_stitch *shorter, size_t n_lacking, struct pya_block **out);
/* Serves `bytes` in the way that needs the fewest new pages. */
PYA_MUST_CHECK pya_status
pya_ladder_save(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Moves free pages from holes to a place where they form one run of `bytes`, and adds the missing pages. */
PYA_MUST_CHECK pya_status
pya_ladder_move(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

/* --- ladder_borrow.c --- */

/* Which arenas may give pages to another? */
enum pya_transfer {
    PYA_TRANSFER_LEFT, /* settled pools without users; untouched pages of reused pools */
    PYA_TRANSFER_IDLE, /* other streams of the default pool, pools without users: idle memory only */
    PYA_TRANSFER_OPEN, /* the same, after a wait for the device */
    PYA_TRANSFER_LAST, /* also pools that lend before out of memory */
};

/* Polls how far those other streams have come that may give pages. */
void pya_ladder_poll(const struct pya_arena *arena);
/* Takes pages of other streams together with their addresses: no device call. */
PYA_MUST_CHECK pya_status
pya_ladder_annex(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Takes at most n_want pages of other arenas to the end of this arena. */
PYA_MUST_CHECK pya_status
pya_ladder_transfer(struct pya_arena *arena, size_t n_want, enum pya_transfer kind);
/* Takes pages of other arenas and serves the request with them if that is possible. */
PYA_MUST_CHECK pya_status pya_ladder_borrow(
    struct pya_arena *arena, size_t bytes, bool is_small, enum pya_transfer kind,
    struct pya_block **out);

/* --- ladder_squeeze.c --- */

/* Waits for the device, so that all free memory is idle.  Releases the lock meanwhile: the work may wait for another
 * process, which may need pya_share_export() to proceed. */
PYA_MUST_CHECK pya_status pya_ladder_wait(struct pya_arena *arena);
/* Gives n_bytes of free memory, of any arena, back to the device.  A pool's own allocator is called without the
 * lock. */
PYA_MUST_CHECK pya_status pya_ladder_give_back(struct pya_arena *arena, size_t n_bytes);
/* Serves a request at the capacity: if no whole pages are available, parts of pages may be enough. */
PYA_MUST_CHECK pya_status
pya_ladder_squeeze(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

#ifdef __cplusplus
}
#endif
