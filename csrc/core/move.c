/* Free pages.  Floor 7. */
#include "move.h"

#include <stdlib.h>

#include "debug.h"

/* runs[i] down to its place in a binary heap, the lowest address on top: only as many are put in order as pages are
 * wanted of. */
static void
runs_sift(struct pya_block **runs, size_t n, size_t i) {
    struct pya_block *run = runs[i];
    for (size_t child = 2 * i + 1; child < n; child = 2 * i + 1) {
        PYA_STEP();
        child += child + 1 < n && runs[child + 1]->addr < runs[child]->addr;
        if (run->addr < runs[child]->addr) {
            break;
        }
        runs[i] = runs[child];
        i = child;
    }
    runs[i] = run;
}

/* Its whole pages, lowest first, that are not marked as leaving. */
static size_t
run_pick(const struct pya_block *run, bool only_left, size_t n_most, pya_page_id *ids) {
    const struct pya_page *items = run->arena->card->pages.items;
    const struct pya_range *range = run->range;
    size_t slot = pya_range_slot(range, pya_round_up(run->addr, PYA_PAGE));
    size_t end = slot + pya_run_pages(run->addr, run->bytes);
    size_t n = 0;
    for (; slot < end && n < n_most; slot++) {
        pya_page_id id = range->slots[slot].page;
        ids[n] = id;
        n += !items[id].is_leaving && (!only_left || items[id].is_left);
    }
    return n;
}

pya_status
pya_pages_pick(
    struct pya_arena *arena, size_t n_most, const struct pya_arena *taker,
    const struct pya_block *except, pya_page_id *ids, size_t *n_out) {
    *n_out = 0;
    bool only_left = taker != NULL && arena->pool != NULL && !arena->pool->is_settled;
    if (arena->free_pages == 0 || n_most == 0 || (only_left && !arena->has_left)) {
        return PYA_OK;
    }
    struct pya_block **runs = malloc(arena->fit.n_runs * sizeof(struct pya_block *));
    if (runs == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    bool is_any = taker == NULL || only_left;
    uint64_t idle_seq = is_any ? UINT64_MAX : pya_arena_idle_for(arena, taker);
    size_t n_all = pya_fit_list_pages(&arena->fit, runs);
    size_t n_runs = 0;
    for (size_t i = 0; i < n_all; i++) {
        struct pya_block *run = runs[i];
        bool is_free = run->seq <= idle_seq && run != except;
        runs[n_runs] = run;
        n_runs += is_free && pya_run_pages(run->addr, run->bytes) > 0;
    }
    for (size_t i = n_runs / 2; i-- > 0;) {
        runs_sift(runs, n_runs, i);
    }
    size_t n = 0;
    while (n_runs > 0 && n < n_most) {
        n += run_pick(runs[0], only_left, n_most - n, ids + n);
        runs[0] = runs[--n_runs];
        runs_sift(runs, n_runs, 0);
    }
    if (only_left && n == 0) {
        arena->has_left = false; /* nobody need look again */
    }
    free(runs);
    *n_out = n;
    return PYA_OK;
}

/* Where a page was before it moved. */
struct old_home {
    struct pya_range *range;
    size_t slot;
};

static void
pages_leave(const struct old_home *old, size_t n_pages) {
    for (size_t i = 0; i < n_pages;) {
        struct pya_range *range = old[i].range;
        struct pya_block *run = pya_range_free_run(range, old[i].slot);
        PYA_ASSERT(run != NULL);
        struct pya_arena *arena = run->arena;
        size_t end = pya_range_slot(range, pya_round_down(pya_block_end(run), PYA_PAGE));
        size_t k = 1;
        while (i + k < n_pages && old[i + k].range == range && old[i + k].slot == old[i].slot + k &&
               old[i + k].slot < end) {
            k++;
        }
        struct pya_block *left = pya_arena_carve(
            arena, run, pya_range_addr(range, old[i].slot), k * PYA_PAGE, PYA_BLOCK_USED);
        pya_range_kill(range, left);
        pya_dptr addr = pya_range_addr(range, old[i].slot);
        size_t n_small = pya_arena_small_pages(arena, range, addr, k);
        pya_arena_note_unmapped(arena, range, addr, k, n_small);
        i += k;
    }
}

pya_status
pya_pages_move(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages) {
    struct pya_card *card = arena->card;
    /* A cut of the hole and, per page at worst, a piece and the rest above it. */
    pya_status st = pya_slab_reserve(&card->blocks, 2 * n_pages + 2);
    if (st != PYA_OK) {
        return st;
    }
    struct old_home *old = malloc(n_pages * sizeof *old);
    if (old == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    for (size_t i = 0; i < n_pages; i++) {
        const struct pya_page *page = &card->pages.items[ids[i]];
        old[i] = (struct old_home){page->range, page->slot};
    }
    struct pya_range *range = hole->range;
    pya_dptr addr = hole->addr;
    st = pya_arena_settle(arena, hole, ids, n_pages);
    if (st == PYA_OK) {
        pages_leave(old, n_pages);
        /* Only now: counted at both homes, they would be a peak that never was. */
        pya_arena_note_mapped(arena, range, addr, n_pages);
        card->stats.scalar[PYA_STAT_pyalloc_page_moves] += (int64_t)n_pages;
    }
    free(old);
    return st;
}
