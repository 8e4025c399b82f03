/* Steps of the ladder: a free run of the arena, and new pages beside its runs.  Floor 11. */
#include "ladder_internal.h"

#include "plain.h"
#include "policy.h"

/* From LADDER_LARGE on, the end of the run to take from is chosen with care. */
#ifdef PYA_TEST_TINY
enum { LADDER_FIT_TRIES = 2, LADDER_LARGE = 4 << 20 };
#else
enum { LADDER_FIT_TRIES = 8, LADDER_LARGE = 64 << 20 };
#endif

/* Wholly free pages that a run loses if `bytes` are taken from its low or high end. */
static size_t
pages_broken(const struct pya_block *run, size_t bytes, bool at_high_end) {
    size_t before = pya_run_pages(run->addr, run->bytes);
    pya_dptr addr = at_high_end ? run->addr : run->addr + bytes;
    return before - pya_run_pages(addr, run->bytes - bytes);
}

/* Among the n_tries best fitting runs, takes the end that breaks the fewest pages. */
static struct pya_block *
fit_page_aware(struct pya_arena *arena, size_t bytes, int n_tries) {
    struct pya_block *best = NULL;
    size_t best_broken = SIZE_MAX;
    bool best_high = false;
    struct pya_block *run = pya_fit_find(&arena->fit, bytes);
    for (int i = 0; run != NULL; i++) {
        if (run->bytes == bytes) {
            return pya_arena_take(arena, run, bytes);
        }
        size_t low = pages_broken(run, bytes, false);
        size_t high = pages_broken(run, bytes, true);
        size_t broken = low <= high ? low : high;
        if (broken < best_broken) {
            best = run;
            best_broken = broken;
            best_high = high < low;
        }
        run = i + 1 < n_tries ? pya_fit_next(&arena->fit, run) : NULL;
    }
    if (best == NULL) {
        return NULL;
    }
    return best_high ? pya_arena_take_high(arena, best, bytes) : pya_arena_take(arena, best, bytes);
}

struct pya_block *
pya_ladder_fit_run(struct pya_arena *arena, size_t bytes, bool is_small) {
    const struct pya_card *card = arena->card;
    pya_arena_unpark(arena);
    if (PYA_UNLIKELY(arena->small_fit != NULL)) {
        struct pya_block *run = pya_plain_find(arena, bytes, is_small);
        return run == NULL ? NULL : pya_plain_take(arena, run, bytes, is_small);
    }
    if (PYA_UNLIKELY(card->fits_carefully || bytes >= LADDER_LARGE)) {
        return fit_page_aware(arena, bytes, card->fits_carefully ? LADDER_FIT_TRIES : 1);
    }
    struct pya_block *run = pya_fit_find(&arena->fit, bytes);
    return run == NULL ? NULL : pya_arena_take(arena, run, bytes);
}

pya_status
pya_ladder_best_hole(
    struct pya_arena *arena, size_t bytes, struct pya_block **out, size_t *n_pages) {
    struct pya_block *best = NULL;
    size_t best_n = SIZE_MAX;
    for (struct pya_block *hole = arena->holes; hole != NULL; hole = hole->next_gap) {
        size_t below = pya_arena_has_run(arena, hole->prev) ? hole->prev->bytes : 0;
        size_t above = pya_arena_has_run(arena, hole->next) ? hole->next->bytes : 0;
        size_t n = below >= bytes ? 1 : pya_pages_for(bytes - below);
        if (n * PYA_PAGE > hole->bytes) {
            if (below + hole->bytes + above < bytes) {
                continue;
            }
            n = hole->bytes / PYA_PAGE;
        }
        if (n < best_n || (n == best_n && hole->addr < best->addr)) {
            best = hole;
            best_n = n;
        }
    }
    if (best == NULL) {
        best_n = pya_pages_for(bytes);
        pya_status st = pya_arena_last_hole(arena, best_n, &best);
        if (st != PYA_OK) {
            return st;
        }
    }
    *out = best;
    *n_pages = best_n;
    return PYA_OK;
}

pya_status
pya_ladder_refit(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    pya_status st = pya_slab_reserve(&arena->card->blocks, 1);
    if (st == PYA_OK) {
        *out = pya_ladder_fit(arena, bytes, is_small);
    }
    return st;
}

pya_status
pya_ladder_grow(
    struct pya_arena *arena, size_t bytes, struct pya_block *hole, size_t n, bool is_small) {
    size_t n_least = pya_policy_step(arena, bytes, n);
    size_t n_padded = n > n_least ? n : n_least;
    size_t n_room = hole->bytes / PYA_PAGE;
    n_padded = n_padded < n_room ? n_padded : n_room;
    if (n_padded > n) {
        pya_status st = pya_pages_grow(arena, hole, n_padded, is_small);
        if (st != PYA_E_NOMEM && st != PYA_E_LIMIT) {
            return st;
        }
        /* If undoing failed too, the hole may no longer be one. */
        st = pya_ladder_best_hole(arena, bytes, &hole, &n);
        if (st != PYA_OK) {
            return st;
        }
    }
    return pya_pages_grow(arena, hole, n, is_small);
}
