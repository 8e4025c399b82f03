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

size_t
pya_arena_check(const struct pya_arena *arena) {
    size_t n_wrong = pya_fit_check(&arena->fit);
    size_t n_runs = arena->fit.n_runs;
    if (arena->small_fit != NULL) {
        n_wrong += pya_fit_check(arena->small_fit);
        n_runs += arena->small_fit->n_runs;
    }
    size_t free_bytes = 0;
    size_t free_pages = 0;
    size_t n_free = 0;
    for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        n_wrong += pya_range_check(range);
        for (const struct pya_block *block = range->first; block != NULL; block = block->next) {
            if (block->state == PYA_BLOCK_FREE) {
                n_free++;
                free_bytes += block->bytes;
                free_pages += range->slots == NULL ? 0 : pya_run_pages(block->addr, block->bytes);
            }
        }
        if (range->slots != NULL) {
            n_wrong += arena_check_pages(arena, range);
        }
    }
    if (n_free != n_runs || free_bytes != arena->free_bytes || free_pages != arena->free_pages) {
        (void)fprintf(
            stderr, "arena: %zu free runs (index %zu), %zu bytes (%zu), %zu pages (%zu)\n", n_free,
            n_runs, free_bytes, arena->free_bytes, free_pages, arena->free_pages);
        n_wrong++;
    }
    return n_wrong;
}
