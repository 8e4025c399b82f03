/* The arena's invariants.  Floor 7. */
#include <stdio.h>

#include "arena.h"

static size_t
arena_check_pages(const struct pya_arena *arena, const struct pya_range *range) {
    size_t n_wrong = 0;
    const struct pya_page *items = arena->card->pages.items;
    for (const struct pya_block *block = range->first; block != NULL; block = block->next) {
        size_t first = pya_range_slot(range, block->addr);
        size_t end = pya_range_slot(range, pya_block_end(block) + PYA_PAGE - 1);
        for (size_t s = first; s < end && s < range->n_slots; s++) {
            pya_page_id id = range->slots[s].page;
            bool is_home = id != PYA_NO_PAGE && items[id].range == range && items[id].slot == s;
            bool wants_home = block->state != PYA_BLOCK_HOLE && block->state != PYA_BLOCK_DEAD;
            bool is_hole = block->state == PYA_BLOCK_HOLE;
            if (is_home != wants_home || is_hole != (id == PYA_NO_PAGE)) {
                (void)fprintf(
                    stderr, "arena: slot %zu under a block in state %d has page %u, home %d\n", s,
                    block->state, id, is_home);
                n_wrong++;
            }
        }
    }
    return n_wrong;
}

/* A grain belongs to one arena as a whole. */
static size_t
arena_check_grains(const struct pya_arena *arena, const struct pya_range *range) {
    size_t n_wrong = 0;
    const struct pya_block *block = range->slots == NULL ? NULL : range->first;
    for (; block != NULL && block->next != NULL; block = block->next) {
        pya_page_id id = pya_range_page(range, block->next->addr);
        bool is_cut = id != PYA_NO_PAGE && arena->card->pages.items[id].place != 0;
        if (is_cut && block->next->arena != block->arena) {
            (void)fprintf(stderr, "arena: two arenas have parts of page %u's grain\n", id);
            n_wrong++;
        }
    }
    return n_wrong;
}

/* Sums the arena's free runs, in any range: streams take over parts of each other's ranges. */
struct sum {
    size_t n_free;
    size_t bytes;
    size_t pages;
};

static void
arena_sum_runs(const struct pya_arena *arena, const struct pya_range *range, struct sum *sum) {
    for (const struct pya_block *block = range->first; block != NULL; block = block->next) {
        if (pya_arena_has_run(arena, block)) {
            sum->n_free++;
            sum->bytes += block->bytes;
            sum->pages += range->slots == NULL ? 0 : pya_run_pages(block->addr, block->bytes);
        }
    }
}

size_t
pya_arena_check(const struct pya_arena *arena) {
    size_t n_wrong = pya_fit_check(&arena->fit);
    size_t n_runs = arena->fit.n_runs;
    if (arena->small_fit != NULL) {
        n_wrong += pya_fit_check(arena->small_fit);
        n_runs += arena->small_fit->n_runs;
    }
    struct sum sum = {0};
    for (const struct pya_arena *a = arena->card->arenas; a != NULL; a = a->next) {
        for (const struct pya_range *range = a->ranges; range != NULL; range = range->next) {
            arena_sum_runs(arena, range, &sum);
        }
    }
    for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        n_wrong += pya_range_check(range);
        n_wrong += range->slots == NULL ? 0 : arena_check_pages(arena, range);
        n_wrong += arena_check_grains(arena, range);
    }
    const struct pya_pool *pool = arena->pool;
    bool is_dropped = pool != NULL && pool->n_users == 0 && !pool->is_active;
    if (is_dropped && arena->parked == NULL && !arena->is_giving && pya_arena_gives(arena)) {
        (void)fprintf(stderr, "arena: its pages are offered to nobody\n");
        n_wrong++;
    }
    if (arena->fence->stream != arena->stream) {
        (void)fprintf(stderr, "arena: its fence is another stream's\n");
        n_wrong++;
    }
    if (sum.n_free != n_runs || sum.bytes != arena->free_bytes || sum.pages != arena->free_pages) {
        (void)fprintf(
            stderr, "arena: %zu free runs (index %zu), %zu bytes (%zu), %zu pages (%zu)\n",
            sum.n_free, n_runs, sum.bytes, arena->free_bytes, sum.pages, arena->free_pages);
        n_wrong++;
    }
    return n_wrong;
}
