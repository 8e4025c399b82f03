/* Steps of the ladder at the capacity: everything that needs fewer new pages, then waiting, then other pools' memory,
 * then room for the driver's tables and larger grains, then parts of pages.  Floor 11. */
#include "ladder_internal.h"

/* Pages that are given back to make room for the driver's own tables. */
enum { LADDER_DRIVER_PAGES = 16 };

pya_status
pya_ladder_wait(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    bool is_idle;
    arena->n_waiting++;
    pya_status st = pya_fences_wait_meanwhile(card, &is_idle);
    arena->n_waiting--;
    pya_card_unpark(card); /* what others freed meanwhile; after a capture nothing below does it */
    st = st == PYA_OK ? pya_pending_sync(card) : st;
    return st == PYA_OK && !is_idle ? pya_fences_sync(card, true) : st;
}

pya_status
pya_ladder_give_back(struct pya_arena *arena, size_t n_bytes) {
    struct pya_card *card = arena->card;
    size_t n_freed;
    arena->n_waiting++;
    pya_status st = pya_trim_card(card, PYA_TRIM_OPEN, NULL, n_bytes, &n_freed);
    arena->n_waiting--;
    return st == PYA_OK ? pya_ptrmap_reserve(&card->live) : st;
}

/* Pages that can still be created, as far as the device knows. */
static size_t
squeeze_room(const struct pya_card *card) {
    size_t free_bytes;
    size_t total_bytes;
    size_t room = pya_card_room(card);
    if (pya_device_mem_info(card->dev, &free_bytes, &total_bytes) != PYA_OK) {
        return 0;
    }
    return (room < free_bytes ? room : free_bytes) / PYA_PAGE;
}

/* Could the pages that the arena lacks come from larger grains of other arenas and from new pages, and may its pool
 * have them? */
static bool
squeeze_may_remake(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    if (card->pages.n_grained == 0) {
        return false;
    }
    size_t n_there = squeeze_room(card);
    for (const struct pya_arena *a = card->arenas; a != NULL; a = a->next) {
        n_there += a != arena && pya_pool_is_open(a) ? pya_pages_to_pick(a, SIZE_MAX, false) : 0;
    }
    const size_t n_lacking = pya_ladder_stitch_lacks(arena, bytes);
    return n_lacking > 0 && /* otherwise pages are not what ran out */
           n_lacking <= pya_arena_pool_room(arena) / PYA_PAGE && n_there >= n_lacking;
}

/* Could shared pages be enough?  They save the free parts at both ends and the unused rest of the last page: less than
 * three pages. */
static bool
squeeze_may_share(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    return card->options.shared_pages &&
           pya_ladder_stitch_lacks(arena, bytes) <= 2 + squeeze_room(card);
}

/* Takes up to n_most pages from one kind of arenas, then tries to serve the request. */
static pya_status
squeeze_move(
    struct pya_arena *arena, size_t bytes, bool is_small, size_t n_pages, enum pya_transfer kind,
    struct pya_block **out) {
    pya_status st = pya_ladder_transfer(arena, n_pages, kind);
    if (st == PYA_OK || pya_is_shortage(st)) {
        st = pya_ladder_refit(arena, bytes, is_small, out);
    }
    return st == PYA_OK && *out == NULL ? pya_ladder_save(arena, bytes, is_small, out) : st;
}

/* Tries the memory that the wait made idle, then one kind of arenas after another. */
static pya_status
squeeze_others(
    struct pya_arena *arena, size_t bytes, bool is_small, bool is_open, struct pya_block **out) {
    const int last = is_open ? PYA_TRANSFER_LAST : PYA_TRANSFER_LEFT;
    pya_status st = PYA_E_NOMEM;
    for (int kind = PYA_TRANSFER_LEFT; kind <= last && pya_is_shortage(st); kind++) {
        st = pya_ladder_refit(arena, bytes, is_small, out);
        size_t n_lacking = st == PYA_OK && *out == NULL ? pya_ladder_stitch_lacks(arena, bytes) : 0;
        if (is_open && n_lacking > 0) {
            st = squeeze_move(arena, bytes, is_small, n_lacking, (enum pya_transfer)kind, out);
        } else if (st == PYA_OK && *out == NULL) {
            st = pya_ladder_save(arena, bytes, is_small, out);
        }
    }
    return st;
}

/* Gives free pages of all arenas back to the device and tries again.  A pool's own allocator is called without the
 * lock: what others freed meanwhile must be waited for before it is moved or unmapped.  PYA_E_CAPTURE: memory is
 * still short, and a capture forbids that wait. */
static pya_status
squeeze_remake(
    struct pya_arena *arena, size_t bytes, bool is_small, size_t n_pages, struct pya_block **out) {
    const uint64_t n_given = pya_card_n_given(arena->card);
    pya_status st = pya_ladder_give_back(arena, n_pages * PYA_PAGE);
    bool is_idle = pya_card_n_given(arena->card) == n_given;
    pya_status wait = st == PYA_OK && !is_idle ? pya_ladder_wait(arena) : st;
    if (wait != PYA_OK && wait != PYA_E_CAPTURE) {
        return wait;
    }
    st = pya_ladder_save(arena, bytes, is_small, out);
    return pya_is_shortage(st) && wait != PYA_OK ? wait : st;
}

/* For a shortage of something other than pages.  st: the shortage so far, returned if none of this applies.
 * PYA_E_CAPTURE: as squeeze_remake(). */
static pya_status
squeeze_mappings(
    struct pya_arena *arena, size_t bytes, bool is_small, pya_status st, struct pya_block **out) {
    if (pya_trim_addresses(arena->card)) {
        st = pya_ladder_refit(arena, bytes, is_small, out);
        st = st == PYA_OK && *out == NULL
                 ? pya_ladder_borrow(arena, bytes, is_small, PYA_TRANSFER_OPEN, out)
                 : st;
        st = st == PYA_OK && *out == NULL ? pya_ladder_save(arena, bytes, is_small, out) : st;
    }
    if (pya_is_shortage(st) &&
        pya_ladder_stitch_lacks(arena, bytes + LADDER_DRIVER_PAGES * (size_t)PYA_PAGE) == 0) {
        /* Enough is free: the driver had no room for its tables of mappings, which must lie in the card's own
         * memory. */
        st = squeeze_remake(arena, bytes, is_small, LADDER_DRIVER_PAGES, out);
    }
    if (pya_is_shortage(st) && squeeze_may_remake(arena, bytes)) {
        /* Enough is free, but in larger grains than are needed: release them and create smaller ones. */
        const size_t n_most = pya_pages_for(bytes) + pya_grain_pages(PYA_N_GRAINS - 1);
        st = squeeze_remake(arena, bytes, is_small, n_most, out);
    }
    return st;
}

/* Pages that were given back may be taken by another process.  In that case takes a whole grain of other arenas,
 * although more of it is free than is needed. */
static pya_status
squeeze_whole_grain(
    struct pya_arena *arena, size_t bytes, bool is_small, pya_status st, struct pya_block **out) {
    const size_t n_lacking = pya_ladder_stitch_lacks(arena, bytes);
    if (arena->card->pages.n_grained == 0 || n_lacking == 0) {
        return st;
    }
    const size_t n_most = n_lacking + pya_grain_pages(PYA_N_GRAINS - 1) - 1;
    return squeeze_move(arena, bytes, is_small, n_most, PYA_TRANSFER_LAST, out);
}

/* First what needs no wait, then waiting, then other pools. */
static pya_status
squeeze_pages(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    int64_t *scalar = card->stats.scalar;
    if (pya_arena_pool_room(arena) >= pya_pages_for(bytes) * PYA_PAGE) {
        card->is_short = true;
        card->fits_carefully = true;
    }
    scalar[PYA_STAT_num_alloc_retries]++;
    pya_status st = pya_ladder_save(arena, bytes, is_small, out);
    scalar[PYA_STAT_pyalloc_saved_by_stitch] += st == PYA_OK;
    if (!pya_is_shortage(st) || pya_pending_must_not_wait(card)) {
        return st;
    }
    scalar[PYA_STAT_num_sync_all_streams]++;
    pya_status wait = pya_ladder_wait(arena);
    if (wait != PYA_OK && wait != PYA_E_CAPTURE) {
        return wait;
    }
    /* A capture began meanwhile, or on a stream we were not told of: use what others gave back, but ask nothing
     * more. */
    bool is_open = wait == PYA_OK;
    int64_t n_transferred = scalar[PYA_STAT_pyalloc_page_transfers];
    st = squeeze_others(arena, bytes, is_small, is_open, out);
    if (pya_is_shortage(st) && is_open) {
        st = squeeze_mappings(arena, bytes, is_small, st, out);
        is_open = st != PYA_E_CAPTURE;
        st = is_open ? st : PYA_E_NOMEM;
    }
    if (pya_is_shortage(st) && is_open) {
        st = squeeze_whole_grain(arena, bytes, is_small, st, out);
    }
    bool has_moved = scalar[PYA_STAT_pyalloc_page_transfers] > n_transferred;
    scalar[has_moved ? PYA_STAT_pyalloc_saved_by_transfer : PYA_STAT_pyalloc_saved_by_wait] +=
        st == PYA_OK;
    return st;
}

pya_status
pya_ladder_squeeze(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    pya_status st = squeeze_pages(arena, bytes, is_small, out);
    if (pya_is_shortage(st) && squeeze_may_share(arena, bytes)) {
        st = pya_ladder_stitch(arena, bytes, is_small, true, out);
        card->stats.scalar[PYA_STAT_pyalloc_saved_by_stitch] += st == PYA_OK;
    }
    return st;
}
