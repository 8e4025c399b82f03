/* Pages: finding free ones, giving them another home, and creating new ones.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Number of grains of each size. */
struct pya_grains {
    size_t n[PYA_N_GRAINS];
};

static inline size_t
pya_grains_pages(const struct pya_grains *grains) {
    size_t n = 0;
    for (unsigned grain = 0; grain < PYA_N_GRAINS; grain++) {
        n += grains->n[grain] * pya_grain_pages(grain);
    }
    return n;
}

/* Counts the arena's wholly free grains.  some_leave: some pages, of any arena, are marked as leaving. */
struct pya_grains pya_grains_count(const struct pya_arena *arena, bool some_leave);
/* Reduces the counts to the choice that covers the most of n_most pages.  Returns how many it covers. */
size_t pya_grains_choose(struct pya_grains *grains, size_t n_most);
/* Collects as many wholly free grains as given, lowest addresses first.  The arena has them all. */
PYA_MUST_CHECK pya_status
pya_grains_pick(struct pya_arena *arena, const struct pya_grains *grains, pya_page_id *ids);
/* Collects up to n_most wholly free pages of the arena, in whole grains, lowest address first.  Skips pages marked as
 * leaving and those of the run `except`.  If there are more than n_most, takes as many as possible of the largest
 * grain size that fits, then smaller ones.  taker: only pages that this arena may have (from a private pool in use,
 * only pages it has not touched since it was settled); NULL: all.  PYA_E_HOST_NOMEM: no room for a list of the runs. */
PYA_MUST_CHECK pya_status pya_pages_pick(
    struct pya_arena *arena, size_t n_most, const struct pya_arena *taker,
    const struct pya_block *except, pya_page_id *ids, size_t *n_out);
/* How many pages pya_pages_pick() would collect, without a taker or exception.  some_leave: as above. */
size_t pya_pages_to_pick(const struct pya_arena *arena, size_t n_most, bool some_leave);
/* Gives wholly free pages, from any arenas of the card, a new home at the start of a hole of `arena`.  The old
 * addresses stay mapped and dead.  Undoes itself on failure. */
PYA_MUST_CHECK pya_status pya_pages_move(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages);

/* pya_arena_grow() with the grain size that suits the card. */
PYA_MUST_CHECK pya_status
pya_pages_grow(struct pya_arena *arena, struct pya_block *hole, size_t n_pages, bool is_small);
/* The same if the card is expected to have n_foreseen pages, including these (0: not known).  The grain size then
 * suits that many pages, and up to n_most are created, to fill a grain. */
PYA_MUST_CHECK pya_status pya_pages_grow_foreseen(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, size_t n_most,
    size_t n_foreseen, bool is_small);

#ifdef __cplusplus
}
#endif
