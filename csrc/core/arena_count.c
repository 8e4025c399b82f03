/* Counts what is added to and removed from an arena: the pool's own count, segments, the trace.  Floor 6. */
#include "arena.h"

static void
stat_move(struct pya_stat *stat, int64_t bytes) {
    if (bytes >= 0) {
        pya_stat_add(stat, bytes);
    } else {
        pya_stat_sub(stat, -bytes);
    }
}

void
pya_arena_count_pool(struct pya_arena *arena, bool is_small, int64_t bytes) {
    if (arena->pool != NULL) {
        stat_move(&arena->pool->reserved[PYA_STAT_ALL], bytes);
        stat_move(&arena->pool->reserved[pya_stat_pool_of(is_small)], bytes);
    }
}

size_t
pya_arena_small_pages(
    const struct pya_arena *arena, const struct pya_range *range, pya_dptr addr, size_t n_pages) {
    const struct pya_slot *slots = range->slots + pya_range_slot(range, addr);
    size_t n_small = 0;
    for (size_t i = 0; i < n_pages && arena->pool != NULL; i++) {
        n_small += arena->card->pages.items[slots[i].page].is_small;
    }
    return n_small;
}

static void
arena_count_pages(struct pya_arena *arena, size_t n_pages, size_t n_small, int sign) {
    pya_arena_count_pool(arena, true, sign * (int64_t)(n_small * PYA_PAGE));
    pya_arena_count_pool(arena, false, sign * (int64_t)((n_pages - n_small) * PYA_PAGE));
}

void
pya_arena_note_mapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages) {
    struct pya_history *history = arena->card->history;
    pya_history_note(
        history, PYA_ACTION_SEGMENT_MAP, addr, n_pages * PYA_PAGE, pya_arena_place(arena));
    arena_count_pages(arena, n_pages, pya_arena_small_pages(arena, range, addr, n_pages), 1);
    if (range->n_mapped == 0) {
        pya_stats_add(&arena->card->stats, PYA_STAT_LARGE, PYA_STAT_segment, 1);
    }
    range->n_mapped += n_pages;
}

void
pya_arena_note_unmapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages,
    size_t n_small) {
    struct pya_history *history = arena->card->history;
    pya_history_note(
        history, PYA_ACTION_SEGMENT_UNMAP, addr, n_pages * PYA_PAGE, pya_arena_place(arena));
    arena_count_pages(arena, n_pages, n_small, -1);
    range->n_mapped -= n_pages;
    if (range->n_mapped == 0) {
        pya_stats_sub(&arena->card->stats, PYA_STAT_LARGE, PYA_STAT_segment, 1);
    }
}
