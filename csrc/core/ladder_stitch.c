/* Steps of the ladder: free pages of the arena, mapped or moved so that they lie side by side.  Floor 11. */
#include "ladder_internal.h"

#include <stdlib.h>

#include "debug.h"
#include "move.h"
#include "policy.h"

/* Adds new pages at the end of the arena, wherever it lies. */
static pya_status
ladder_add_pages(struct pya_arena *arena, size_t n_pages, bool is_small) {
    struct pya_block *hole;
    pya_status st = pya_arena_last_hole(arena, n_pages, &hole);
    return st == PYA_OK ? pya_pages_grow(arena, hole, n_pages, is_small) : st;
}

size_t
pya_ladder_stitch_lacks(const struct pya_arena *arena, size_t bytes) {
    return pya_mosaic_plan(arena, bytes, false).n_lacking;
}

/* Creates the missing pages; if they make a home fit possible, takes it. */
static pya_status
ladder_make_up(
    struct pya_arena *arena, size_t bytes, size_t n_lacking, bool is_small,
    struct pya_block **out) {
    if (n_lacking == 0) {
        return PYA_OK;
    }
    pya_status st = ladder_add_pages(arena, n_lacking, is_small);
    return st == PYA_OK ? pya_ladder_refit(arena, bytes, is_small, out) : st;
}

/* Creates the missing pages, then maps free ones side by side and returns the block. */
static pya_status
ladder_map(
    struct pya_arena *arena, struct pya_mosaic mosaic, size_t bytes, bool is_small, bool shares,
    struct pya_block **out) {
    if (mosaic.n_lacking > 0) {
        pya_status st = ladder_make_up(arena, bytes, mosaic.n_lacking, is_small, out);
        if (st != PYA_OK || *out != NULL) {
            return st;
        }
        mosaic = pya_mosaic_plan(arena, bytes, shares);
    }
    struct pya_stitch *stitch;
    pya_status st = pya_mosaic_make(arena, &mosaic, &stitch);
    if (st != PYA_OK) {
        return st;
    }
    pya_policy_pay(arena, pya_mosaic_handles(&mosaic));
    return pya_stitch_take(stitch, bytes, out);
}

pya_status
pya_ladder_stitch(
    struct pya_arena *arena, size_t bytes, bool is_small, bool shares, struct pya_block **out) {
    return ladder_map(arena, pya_mosaic_plan(arena, bytes, shares), bytes, is_small, shares, out);
}

size_t
pya_ladder_lengthen_lacks(
    const struct pya_arena *arena, size_t bytes, const struct pya_stitch *shorter) {
    const size_t n = pya_pages_for(bytes) - shorter->n_pages;
    pya_stitch_mark(shorter, true);
    const size_t n_there = pya_pages_to_pick(arena, n, true);
    pya_stitch_mark(shorter, false);
    return n - n_there;
}

/* Like ladder_map(), behind an idle range.  n_lacking: from pya_ladder_lengthen_lacks(). */
static pya_status
ladder_lengthen(
    struct pya_arena *arena, size_t bytes, bool is_small, struct pya_stitch *shorter,
    size_t n_lacking, struct pya_block **out) {
    const size_t n_wanted = pya_pages_for(bytes) - shorter->n_pages;
    pya_status st = ladder_make_up(arena, bytes, n_lacking, is_small, out);
    if (st != PYA_OK || *out != NULL) {
        return st;
    }
    size_t n;
    pya_page_id *ids = malloc(n_wanted * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_stitch_mark(shorter, true);
    st = pya_pages_pick(arena, n_wanted, NULL, NULL, ids, &n);
    pya_stitch_mark(shorter, false);
    PYA_ASSERT(st != PYA_OK || n == n_wanted);
    st = st == PYA_OK ? pya_stitch_extend(shorter, ids, n, bytes, out) : st;
    if (st == PYA_OK) {
        pya_policy_pay(arena, pya_pages_handles(&arena->card->pages, ids, n));
    }
    free(ids);
    return st;
}

pya_status
pya_ladder_join(
    struct pya_arena *arena, size_t bytes, bool is_small, const struct pya_mosaic *mosaic,
    struct pya_stitch *shorter, size_t n_lacking, struct pya_block **out) {
    if (shorter == NULL) {
        return ladder_map(arena, *mosaic, bytes, is_small, false, out);
    }
    pya_status st = ladder_lengthen(arena, bytes, is_small, shorter, n_lacking, out);
    return pya_is_shortage(st) ? pya_ladder_stitch(arena, bytes, is_small, false, out) : st;
}

pya_status
pya_ladder_save(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    const struct pya_mosaic mosaic = pya_mosaic_plan(arena, bytes, false);
    struct pya_stitch *shorter = pya_stitch_find_short(arena, bytes);
    const size_t n_lacking = shorter == NULL ? 0 : pya_ladder_lengthen_lacks(arena, bytes, shorter);
    shorter = n_lacking <= mosaic.n_lacking ? shorter : NULL;
    return pya_ladder_join(arena, bytes, is_small, &mosaic, shorter, n_lacking, out);
}

pya_status
pya_ladder_move(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_block *hole;
    size_t n;
    pya_status st = pya_arena_last_hole(arena, pya_pages_for(bytes), &hole);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_block *tail = pya_arena_has_run(arena, hole->prev) ? hole->prev : NULL;
    size_t below = tail == NULL ? 0 : tail->bytes;
    n = below >= bytes ? 0 : pya_pages_for(bytes - below);
    pya_page_id *ids = malloc((n + 1) * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t n_moved;
    st = pya_pages_pick(arena, n, NULL, tail, ids, &n_moved);
    if (st == PYA_OK && n_moved < n) {
        /* The rest of the hole lies behind the new pages. */
        st = pya_pages_grow(arena, hole, n - n_moved, is_small);
    }
    if (st == PYA_OK && n_moved > 0) {
        st = pya_pages_move(arena, hole, ids, n_moved);
    }
    if (st == PYA_OK) {
        pya_policy_pay(arena, pya_pages_handles(&arena->card->pages, ids, n_moved));
    }
    free(ids);
    if (st != PYA_OK) {
        return st;
    }
    return pya_ladder_refit(arena, bytes, is_small, out);
}
