/* Pages: which are free, giving them another home, and how new ones come.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* So many of each size. */
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

/* The wholly free grains of the arena; some_leave: pages are marked as leaving, wherever they are at home. */
struct pya_grains pya_grains_count(const struct pya_arena *arena, bool some_leave);
/* Lowers them to those that make up as much of n_most pages as they can; how much. */
size_t pya_grains_choose(struct pya_grains *grains, size_t n_most);
/* Collects so many wholly free grains, all of which are there, lowest addresses first. */
PYA_MUST_CHECK pya_status
pya_grains_pick(struct pya_arena *arena, const struct pya_grains *grains, pya_page_id *ids);
/* Collects up to n_most wholly free pages of the arena, in whole grains, that are not marked as leaving, lowest address
 * first, without those of the run `except`.  Where there are more, as many grains as possible of the largest size that
 * fits, and of the smaller ones to make up the rest.  taker: only pages that this arena may have (of a private pool in use
 * those that the pool has not touched since it was settled); NULL: all.  PYA_E_HOST_NOMEM: no room for a list of the runs. */
PYA_MUST_CHECK pya_status pya_pages_pick(
    struct pya_arena *arena, size_t n_most, const struct pya_arena *taker,
    const struct pya_block *except, pya_page_id *ids, size_t *n_out);
/* How many that would be, without a taker or an exception; some_leave: as above. */
size_t pya_pages_to_pick(const struct pya_arena *arena, size_t n_most, bool some_leave);
/* Gives pages, wholly free in any arena of the card, a new home at the start of a hole of `arena`.  The old
 * addresses stay mapped and dead.  Undoes itself on failure. */
PYA_MUST_CHECK pya_status pya_pages_move(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages);

/* pya_arena_grow() in grains as large as suit the card. */
PYA_MUST_CHECK pya_status
pya_pages_grow(struct pya_arena *arena, struct pya_block *hole, size_t n_pages, bool is_small);
/* The same where it is known that the card will have n_foreseen pages, these among them (0: it is not): then up to n_most are
 * made, to fill a grain, and none has to serve anything else. */
PYA_MUST_CHECK pya_status pya_pages_grow_foreseen(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, size_t n_most,
    size_t n_foreseen, bool is_small);

#ifdef __cplusplus
}
#endif
