/* Free pages.  Floor 7. */
#include "move.h"

#include <stdlib.h>

#include "debug.h"

static int
run_compare(const void *a, const void *b) {
    const struct pya_block *const *left = a;
    const struct pya_block *const *right = b;
    return ((*left)->addr > (*right)->addr) - ((*left)->addr < (*right)->addr);
}

pya_status
pya_pages_pick(
    struct pya_arena *arena, size_t n_most, const struct pya_arena *taker,
    const struct pya_block *except, pya_page_id *ids, size_t *n_out) {
    size_t n_room = arena->fit.n_runs;
    *n_out = 0;
    bool only_left = taker != NULL && arena->pool != NULL && !arena->pool->is_settled;
    if (arena->free_pages == 0 || n_most == 0 || (only_left && !arena->has_left)) {
        return PYA_OK;
    }
    struct pya_block **runs = malloc(n_room * sizeof(struct pya_block *));
    if (runs == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t n_runs = 0;
    struct pya_block *run = pya_fit_find(&arena->fit, PYA_PAGE);
    for (; run != NULL; run = pya_fit_next(&arena->fit, run)) {
        bool is_free = taker == NULL || only_left || run->seq <= pya_arena_idle_for(arena, taker);
        if (is_free && run != except && pya_run_pages(run->addr, run->bytes) > 0) {
            runs[n_runs++] = run;
        }
    }
    qsort(runs, n_runs, sizeof(struct pya_block *), run_compare);
    size_t n = 0;
    for (size_t i = 0; i < n_runs && n < n_most; i++) {
        struct pya_range *range = runs[i]->range;
        size_t slot = pya_range_slot(range, pya_round_up(runs[i]->addr, PYA_PAGE));
        size_t n_here = pya_run_pages(runs[i]->addr, runs[i]->bytes);
        for (size_t k = 0; k < n_here && n < n_most; k++) {
            pya_page_id id = range->slots[slot + k].page;
            ids[n] = id;
            const struct pya_page *page = &arena->card->pages.items[id];
            n += !page->is_leaving && (!only_left || page->is_left);
        }
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
        left->state = PYA_BLOCK_DEAD;
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
