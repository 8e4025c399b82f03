/* Annexation.  Floor 7. */
#include "annex.h"

/* Limits of the runs examined in each arena and the blocks in each stretch, so that the cost of a miss is bounded;
 * and the least number of adjacent pages to take over at once. */
#ifdef PYA_TEST_TINY
enum { ANNEX_TRIES = 4, ANNEX_BLOCKS = 4, ANNEX_PAGES = 2 };
#else
enum { ANNEX_TRIES = 64, ANNEX_BLOCKS = 64, ANNEX_PAGES = 128 };
#endif

/* Adjacent free memory in one range: own runs whole, others from their first to their last whole grain. */
struct stretch {
    struct pya_block *first;
    pya_dptr start;
    pya_dptr end;
    size_t n_blocks;
};

/* The page of a run that begins at addr. */
static const struct pya_page *
page_at(const struct pya_block *run, pya_dptr addr) {
    return &run->arena->card->pages.items[pya_range_page(run->range, addr)];
}

/* Start of the first grain at or above a page's start in the run; or the run's end. */
static pya_dptr
grain_start(const struct pya_block *run, pya_dptr addr, pya_dptr end) {
    const struct pya_page *page = page_at(run, addr);
    size_t n = page->place == 0 ? 0 : pya_grain_pages(page->grain) - page->place;
    return n * PYA_PAGE < end - addr ? addr + n * PYA_PAGE : end;
}

static pya_dptr
run_start(const struct pya_arena *arena, const struct pya_block *run) {
    pya_dptr start = pya_round_up(run->addr, PYA_PAGE);
    pya_dptr end = pya_round_down(pya_block_end(run), PYA_PAGE);
    if (run->arena == arena) {
        return run->addr;
    }
    return start < end ? grain_start(run, start, end) : start;
}

/* End of the last whole grain in the run. */
static pya_dptr
run_end(const struct pya_arena *arena, const struct pya_block *run) {
    pya_dptr start = run_start(arena, run);
    pya_dptr end = pya_round_down(pya_block_end(run), PYA_PAGE);
    if (run->arena == arena) {
        return pya_block_end(run);
    }
    if (start >= end) {
        return end;
    }
    const struct pya_page *page = page_at(run, end - PYA_PAGE);
    size_t n = page->place + (size_t)1;
    n = n == pya_grain_pages(page->grain) ? 0 : n;
    return n * PYA_PAGE < end - start ? end - n * PYA_PAGE : start;
}

/* Is it a run of the arena itself, or of another stream that has finished with it? */
static bool
run_may_join(const struct pya_arena *arena, const struct pya_block *run) {
    return pya_arena_may_use(arena, run) &&
           (run->arena == arena || run_start(arena, run) < run_end(arena, run));
}

/* Extends from a run in both directions as far as free memory continues. */
static struct stretch
stretch_around(const struct pya_arena *arena, struct pya_block *run) {
    struct stretch s = {run, run_start(arena, run), run_end(arena, run), 1};
    struct pya_block *below = run->prev;
    while (s.start == s.first->addr && s.n_blocks < ANNEX_BLOCKS && run_may_join(arena, below) &&
           run_end(arena, below) == s.start) {
        s.first = below;
        s.start = run_start(arena, below);
        s.n_blocks++;
        below = below->prev;
    }
    struct pya_block *above = run->next;
    while (s.n_blocks < ANNEX_BLOCKS && run_may_join(arena, above) && above->addr == s.end) {
        s.end = run_end(arena, above);
        s.n_blocks++;
        above = above->next;
    }
    return s;
}

/* The smallest stretch that is large enough; first == NULL: none. */
static struct stretch
annex_find(struct pya_arena *arena, size_t bytes) {
    struct stretch best = {0};
    size_t most = SIZE_MAX; /* runs from this size on make longer stretches than the best one */
    for (struct pya_arena *from = arena->card->common; from != NULL; from = from->next_common) {
        if (from == arena || from->small_fit != NULL || from->free_pages == 0) {
            continue;
        }
        struct pya_block *run = pya_fit_find(&from->fit, PYA_PAGE);
        for (int i = 0; run != NULL && run->bytes < most && i < ANNEX_TRIES; i++) {
            if (run_may_join(arena, run)) {
                struct stretch s = stretch_around(arena, run);
                size_t room = (size_t)(s.end - s.start);
                if (room >= bytes && (best.first == NULL || room < best.end - best.start)) {
                    best = s;
                    most = room + 2 * PYA_PAGE * pya_grain_pages(PYA_N_GRAINS - 1);
                }
            }
            run = pya_fit_next(&from->fit, run);
        }
    }
    return best;
}

static void
annex_take(struct pya_arena *arena, const struct stretch *s, size_t bytes) {
    struct pya_block *block = s->first;
    size_t least = bytes > ANNEX_PAGES * PYA_PAGE ? bytes : ANNEX_PAGES * PYA_PAGE;
    pya_dptr end = s->end - s->start > least ? pya_round_up(s->start + least, PYA_PAGE) : s->end;
    while (block != NULL && block->addr < end) {
        if (block->arena != arena) {
            pya_dptr first = run_start(arena, block);
            pya_dptr last = run_end(arena, block);
            last = last <= end ? last : grain_start(block, end, last);
            arena->card->stats.scalar[PYA_STAT_pyalloc_page_transfers] +=
                (int64_t)((last - first) >> PYA_PAGE_SHIFT);
            block = pya_arena_adopt(arena, block, first, (size_t)(last - first));
        }
        block = block->next;
    }
}

pya_status
pya_arena_annex(struct pya_arena *arena, size_t bytes, bool *found) {
    struct pya_card *card = arena->card;
    *found = false;
    struct stretch s = annex_find(arena, bytes);
    if (s.first == NULL) {
        return PYA_OK;
    }
    pya_status st = pya_slab_reserve(&card->blocks, 2 * s.n_blocks);
    if (st == PYA_OK) {
        annex_take(arena, &s, bytes);
        *found = true;
    }
    return st;
}
