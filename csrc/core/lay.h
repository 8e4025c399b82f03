/* Following a layout: requests still to come are treated like remembered ones.  Floor 8.
 *
 * The arena starts with the layout's requests as its earlier requests (repeat.h), at reserved addresses where nothing
 * is mapped yet.  A request that matches the layout gets its place; missing pages are created first.  A request that
 * does not match is served as usual, and a place that is already taken does no harm. */
#pragma once

#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Like pya_pool_arena(), but the card's first arena in the default pool follows the card's layout, if there is one.
 * If host memory or addresses are short, the arena does without the layout. */
PYA_MUST_CHECK pya_status pya_lay_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out);
/* Are pages missing at this place of the layout, and can they be created?  Stores their number in the arena. */
bool pya_lay_lacks(struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* Creates the pages missing at the latest request's place and returns that place.  *out NULL: there is no room for
 * the pages, or the place is still not free memory. */
PYA_MUST_CHECK pya_status
pya_lay_fill(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);
/* Counts the latest request, which got its place, if that place is from the layout. */
void pya_lay_count(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
