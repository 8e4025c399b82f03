/* Following a layout: requests that are still to come, remembered as if they had been.  Floor 8.
 *
 * The arena starts out with a layout's requests as its earlier ones (repeat.h), at addresses of its own where nothing is
 * mapped yet.  A request that is as foreseen gets its place; where pages are missing there, they are made first.  What the
 * layout does not have is served as always, and a place that is taken does no harm. */
#pragma once

#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* pya_pool_arena(); the card's first arena of the default pool follows the card's layout, if there is one.  Where host
 * memory or addresses are short it does without. */
PYA_MUST_CHECK pya_status pya_lay_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out);
/* Are pages missing at this place of the layout, and can they be made?  Notes it in the arena. */
bool pya_lay_lacks(struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* Makes the pages that the latest request lacks, and hands out its place; *out NULL: there is no room for these,
 * or it is no free memory all the same. */
PYA_MUST_CHECK pya_status
pya_lay_fill(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* The latest request gets its place: counts it, if that is of the layout. */
void pya_lay_count(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
