/* The ladder.  Floor 11.
 *
 * Home fit, a cached stitched range, idle memory of other streams where it lies, then their pages; then the policy weighs
 * growing against stitching; then, with the capacity reached, everything that gets by with fewer new pages.
 * Long because the order of the steps is one fact. */
#include "ladder.h"

#include <stdlib.h>

#include "annex.h"
#include "debug.h"
#include "lay.h"
#include "mosaic.h"
#include "move.h"
#include "policy.h"
#include "repeat.h"

/* From LADDER_LARGE on, the end of a run is chosen with care. */
#ifdef PYA_TEST_TINY
enum { LADDER_FIT_TRIES = 2, LADDER_LARGE = 4 << 20 };
#else
enum { LADDER_FIT_TRIES = 8, LADDER_LARGE = 64 << 20 };
#endif

/* What goes back to the driver for its own tables. */
enum { LADDER_DRIVER_PAGES = 16 };

/* Wholly free pages a run loses when `bytes` leave its low or high end. */
static size_t
pages_broken(const struct pya_block *run, size_t bytes, bool at_high_end) {
    size_t before = pya_run_pages(run->addr, run->bytes);
    pya_dptr addr = at_high_end ? run->addr : run->addr + bytes;
    return before - pya_run_pages(addr, run->bytes - bytes);
}

/* Of the n_tries best fitting runs, the end that breaks the fewest pages. */
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

/* The hole that needs the fewest new pages to make a run of `bytes` with the free runs beside it. */
static pya_status
ladder_best_hole(struct pya_arena *arena, size_t bytes, struct pya_block **out, size_t *n_pages) {
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

/* One record for the cut that follows; every refit goes through here. */
static pya_status
ladder_refit(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    pya_status st = pya_slab_reserve(&arena->card->blocks, 1);
    if (st == PYA_OK) {
        *out = pya_ladder_fit(arena, bytes, is_small);
    }
    return st;
}

/* The n pages that `bytes` need of their best hole, and more where there is room. */
static pya_status
ladder_grow(
    struct pya_arena *arena, size_t bytes, struct pya_block *hole, size_t n, bool is_small) {
    size_t n_least = pya_policy_step(arena, n);
    size_t n_padded = n > n_least ? n : n_least;
    size_t n_room = hole->bytes / PYA_PAGE;
    n_padded = n_padded < n_room ? n_padded : n_room;
    if (n_padded > n) {
        pya_status st = pya_pages_grow(arena, hole, n_padded, is_small);
        if (st != PYA_E_NOMEM && st != PYA_E_LIMIT) {
            return st;
        }
        /* Where undoing failed too, the hole may be none any more. */
        st = ladder_best_hole(arena, bytes, &hole, &n);
        if (st != PYA_OK) {
            return st;
        }
    }
    return pya_pages_grow(arena, hole, n, is_small);
}

/* New pages at the end of the arena, wherever they then lie. */
static pya_status
ladder_add_pages(struct pya_arena *arena, size_t n_pages, bool is_small) {
    struct pya_block *hole;
    pya_status st = pya_arena_last_hole(arena, n_pages, &hole);
    return st == PYA_OK ? pya_pages_grow(arena, hole, n_pages, is_small) : st;
}

/* Pages to be made before so much can be stitched. */
static size_t
stitch_lacks(const struct pya_arena *arena, size_t bytes) {
    return pya_mosaic_plan(arena, bytes, false).n_lacking;
}

/* New pages, where more are wanted than there are, and what they may have made possible. */
static pya_status
ladder_make_up(
    struct pya_arena *arena, size_t bytes, size_t n_lacking, bool is_small,
    struct pya_block **out) {
    if (n_lacking == 0) {
        return PYA_OK;
    }
    pya_status st = ladder_add_pages(arena, n_lacking, is_small);
    return st == PYA_OK ? ladder_refit(arena, bytes, is_small, out) : st;
}

/* Makes up the missing pages, then maps free ones side by side and hands them out. */
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

/* shares: other live blocks may sit in the first and the last page. */
static pya_status
ladder_stitch(
    struct pya_arena *arena, size_t bytes, bool is_small, bool shares, struct pya_block **out) {
    return ladder_map(arena, pya_mosaic_plan(arena, bytes, shares), bytes, is_small, shares, out);
}

/* Pages to be made before `shorter` is long enough: all that it lacks but what is free in whole grains beside it. */
static size_t
lengthen_lacks(const struct pya_arena *arena, size_t bytes, const struct pya_stitch *shorter) {
    const size_t n = pya_pages_for(bytes) - shorter->n_pages;
    pya_stitch_mark(shorter, true);
    const size_t n_there = pya_pages_to_pick(arena, n, true);
    pya_stitch_mark(shorter, false);
    return n - n_there;
}

/* The same behind an idle range; n_lacking: lengthen_lacks(). */
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
    st = st == PYA_OK ? pya_stitch_extend(&shorter, ids, n) : st;
    const size_t n_handles = st == PYA_OK ? pya_pages_handles(&arena->card->pages, ids, n) : 0;
    free(ids);
    if (st != PYA_OK) {
        return st;
    }
    pya_policy_pay(arena, n_handles);
    return pya_stitch_take(shorter, bytes, out);
}

/* Behind `shorter`, which lacks n_lacking; where it is NULL, or so many are not to be had, by themselves. */
static pya_status
ladder_join(
    struct pya_arena *arena, size_t bytes, bool is_small, const struct pya_mosaic *mosaic,
    struct pya_stitch *shorter, size_t n_lacking, struct pya_block **out) {
    if (shorter == NULL) {
        return ladder_map(arena, *mosaic, bytes, is_small, false, out);
    }
    pya_status st = ladder_lengthen(arena, bytes, is_small, shorter, n_lacking, out);
    return pya_is_shortage(st) ? ladder_stitch(arena, bytes, is_small, false, out) : st;
}

/* What gets by with the fewest new pages. */
static pya_status
ladder_save(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    const struct pya_mosaic mosaic = pya_mosaic_plan(arena, bytes, false);
    struct pya_stitch *shorter = pya_stitch_find_short(arena, bytes);
    const size_t n_lacking = shorter == NULL ? 0 : lengthen_lacks(arena, bytes, shorter);
    shorter = n_lacking <= mosaic.n_lacking ? shorter : NULL;
    return ladder_join(arena, bytes, is_small, &mosaic, shorter, n_lacking, out);
}

/* Moves free pages out of holes to where they make one run of `bytes`, adding what is missing. */
static pya_status
ladder_move(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
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
        /* What is left of the hole lies behind the new pages. */
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
    return ladder_refit(arena, bytes, is_small, out);
}

/* How far have the other streams come that may give? */
static void
ladder_poll(const struct pya_arena *arena) {
    const struct pya_arena *from = arena->card->common;
    for (; from != NULL; from = from->next_common) {
        if (from != arena && from->free_pages > 0) {
            pya_card_poll(arena->card, arena);
            return;
        }
    }
}

/* Pages change streams with their addresses: no device call. */
static pya_status
ladder_annex(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    bool found = false;
    if (arena->pool != NULL) {
        return PYA_OK;
    }
    pya_status st = pya_arena_annex(arena, bytes, &found);
    return st == PYA_OK && found ? ladder_refit(arena, bytes, is_small, out) : st;
}

/* Which arenas may give pages to this one? */
enum transfer_from {
    TRANSFER_LEFT, /* pools that lost their last user and were settled, and what the next ones did not touch of it */
    TRANSFER_IDLE, /* other streams of the default pool and pools without users, finished work only */
    TRANSFER_OPEN, /* the same; everything was waited for */
    TRANSFER_LAST, /* and pools that lend before out of memory */
};

static bool
transfer_allowed(const struct pya_arena *from, enum transfer_from kind) {
    if (kind == TRANSFER_LEFT) {
        return from->pool != NULL;
    }
    return pya_pool_is_open(from) || (kind == TRANSFER_LAST && from->pool->on_oom);
}

static pya_status
ladder_transfer(struct pya_arena *arena, size_t n_want, enum transfer_from kind) {
    struct pya_card *card = arena->card;
    size_t n = 0;
    pya_page_id *ids = NULL;
    pya_status st = PYA_OK;
    size_t n_room = pya_arena_pool_room(arena) / PYA_PAGE;
    n_want = n_want < n_room ? n_want : n_room;
    bool is_all = kind == TRANSFER_LAST;
    for (struct pya_arena *from = is_all ? card->arenas : pya_givers(card);
         from != NULL && n < n_want; from = is_all ? from->next : pya_givers_next(from)) {
        PYA_STEP();
        if (from == arena || from->free_pages == 0 || !transfer_allowed(from, kind)) {
            continue;
        }
        if (ids == NULL) {
            ids = malloc(n_want * sizeof *ids);
            if (ids == NULL) {
                return PYA_E_HOST_NOMEM;
            }
        }
        size_t n_here;
        const struct pya_arena *taker = kind <= TRANSFER_IDLE ? arena : NULL;
        st = pya_pages_pick(from, n_want - n, taker, NULL, ids + n, &n_here);
        if (st != PYA_OK) {
            goto done;
        }
        n += n_here;
    }
    if (n > 0) {
        struct pya_block *hole;
        st = pya_arena_last_hole(arena, n, &hole);
        if (st == PYA_OK) {
            st = pya_pages_move(arena, hole, ids, n);
        }
        if (st == PYA_OK) {
            card->stats.scalar[PYA_STAT_pyalloc_page_transfers] += (int64_t)n;
        }
        if (st == PYA_OK && kind != TRANSFER_LEFT) {
            pya_policy_pay_transfer(arena, pya_pages_handles(&card->pages, ids, n));
        }
    }
done:
    free(ids);
    return st;
}

/* Pages of other arenas, and what they make possible. */
static pya_status
ladder_borrow(
    struct pya_arena *arena, size_t bytes, bool is_small, enum transfer_from kind,
    struct pya_block **out) {
    pya_status st = ladder_transfer(arena, pya_pages_for(bytes), kind);
    if (pya_is_shortage(st)) {
        return PYA_OK; /* of addresses: there are other ways */
    }
    return st == PYA_OK ? ladder_refit(arena, bytes, is_small, out) : st;
}

/* A stitched range that may be extended, instead of a mosaic.  In a program that repeats itself whoever had it comes again, and
 * would find it too long and have another made, unless it is a tensor that grows.  That one takes some more pages rather than
 * ranges of parts, none of which could be extended the next time. */
static struct pya_stitch *
ladder_short(struct pya_arena *arena, const struct pya_mosaic *mosaic, struct pya_plea *plea) {
    bool is_growing = pya_policy_is_growing(arena);
    bool is_wanted = pya_repeat_is_known(arena) && !is_growing;
    struct pya_stitch *shorter = is_wanted ? NULL : pya_stitch_find_short(arena, plea->bytes);
    const size_t n_most = is_growing ? plea->n - 1 : mosaic->n_lacking;
    const size_t n_lacking = shorter == NULL ? 0 : lengthen_lacks(arena, plea->bytes, shorter);
    if (shorter == NULL || n_lacking > n_most) {
        return NULL;
    }
    plea->n_missing = n_lacking;
    plea->n_there = shorter->n_pages;
    plea->n_handles = pya_pages_for(plea->bytes) - shorter->n_pages;
    return shorter;
}

/* What the policy likes best while memory is there. */
static pya_status
ladder_extend(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_block *hole;
    size_t n;
    pya_status st = ladder_best_hole(arena, bytes, &hole, &n);
    if (st != PYA_OK) {
        return st;
    }
    enum pya_plan plan = PYA_PLAN_GROW;
    struct pya_stitch *shorter = NULL;
    struct pya_mosaic mosaic;
    struct pya_plea plea = {.bytes = bytes, .n = n};
    if (pya_policy_may_save(arena, bytes, n, &mosaic)) {
        plea.n_missing = mosaic.n_lacking;
        plea.n_handles = pya_mosaic_handles(&mosaic);
        shorter = ladder_short(arena, &mosaic, &plea);
        plan = pya_policy_plan(arena, &plea);
    }
    switch (plan) {
    case PYA_PLAN_STITCH:
        st = ladder_join(arena, bytes, is_small, &mosaic, shorter, plea.n_missing, out);
        if (st != PYA_E_NOMEM || stitch_lacks(arena, bytes) > 0) {
            return st;
        }
        /* It was not pages that ran out, but addresses. */
        st = ladder_best_hole(arena, bytes, &hole, &n);
        break;
    case PYA_PLAN_MOVE:
        return ladder_move(arena, bytes, is_small, out);
    case PYA_PLAN_GROW:
    default:
        break;
    }
    st = st == PYA_OK ? ladder_grow(arena, bytes, hole, n, is_small) : st;
    return st == PYA_OK ? ladder_refit(arena, bytes, is_small, out) : st;
}

/* All that is free is idle then.  The work may wait for another process, and that for what pya_share_export() gives, so the
 * lock is given up. */
static pya_status
squeeze_wait(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    bool is_idle;
    arena->n_waiting++;
    pya_status st = pya_fences_wait_meanwhile(card, &is_idle);
    arena->n_waiting--;
    pya_card_unpark(card);
    st = st == PYA_OK ? pya_pending_sync(card) : st;
    return st == PYA_OK && !is_idle ? pya_device_sync(card->dev) : st;
}

/* Pages that can still be made, as far as the device knows. */
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

/* Would what lacks beside all that the arena has be there, in larger grains of others and in what can still be made? */
static bool
squeeze_may_remake(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    size_t n_there = 0;
    size_t n_others = 0;
    for (const struct pya_arena *a = card->arenas; a != NULL && card->pages.n_grained > 0;
         a = a->next) {
        const size_t n = pya_pool_is_open(a) ? pya_pages_to_pick(a, SIZE_MAX, false) : 0;
        n_there += n;
        n_others += a == arena ? 0 : n;
    }
    const size_t n_lacking = n_there == 0 ? 0 : stitch_lacks(arena, bytes);
    return n_lacking > 0 && /* else it was not pages that ran out */
           n_others + squeeze_room(card) >= n_lacking;
}

/* What of pages is free at both ends of a range, and what of the last is not asked for, are less than three pages. */
static bool
squeeze_may_share(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    return card->options.shared_pages && stitch_lacks(arena, bytes) <= 2 + squeeze_room(card);
}

/* First what needs no waiting, then waiting, then other pools. */
static pya_status
squeeze_pages(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    size_t m = pya_pages_for(bytes);
    int64_t *scalar = card->stats.scalar;
    if (pya_arena_pool_room(arena) >= m * PYA_PAGE) {
        card->is_short = true;
        card->fits_carefully = true;
    }
    scalar[PYA_STAT_num_alloc_retries]++;
    pya_status st = ladder_save(arena, bytes, is_small, out);
    scalar[PYA_STAT_pyalloc_saved_by_stitch] += st == PYA_OK;
    if (!pya_is_shortage(st) || pya_pending_must_not_wait(card)) {
        return st;
    }
    card->stats.scalar[PYA_STAT_num_sync_all_streams]++;
    pya_status wait = squeeze_wait(arena);
    if (wait != PYA_OK && wait != PYA_E_CAPTURE) {
        return wait;
    }
    /* A capture began meanwhile, or on a stream nobody told us of: what others gave back serves, nothing else may be asked. */
    const bool is_open = wait == PYA_OK;
    const int last = is_open ? TRANSFER_LAST : TRANSFER_LEFT;
    int64_t n_transferred = scalar[PYA_STAT_pyalloc_page_transfers];
    for (int kind = TRANSFER_LEFT; kind <= last && pya_is_shortage(st); kind++) {
        st = ladder_refit(arena, bytes, is_small, out);
        size_t n_lacking = st == PYA_OK && *out == NULL ? stitch_lacks(arena, bytes) : 0;
        if (is_open && n_lacking > 0) {
            st = ladder_transfer(arena, n_lacking, (enum transfer_from)kind);
            if (st == PYA_OK || pya_is_shortage(st)) {
                st = ladder_refit(arena, bytes, is_small, out);
            }
        }
        if (st == PYA_OK && *out == NULL) {
            st = ladder_save(arena, bytes, is_small, out);
        }
    }
    if (pya_is_shortage(st) && is_open && pya_trim_addresses(card)) {
        st = ladder_refit(arena, bytes, is_small, out);
        st = st == PYA_OK && *out == NULL
                 ? ladder_borrow(arena, bytes, is_small, TRANSFER_OPEN, out)
                 : st;
        st = st == PYA_OK && *out == NULL ? ladder_save(arena, bytes, is_small, out) : st;
    }
    if (pya_is_shortage(st) && is_open &&
        stitch_lacks(arena, bytes + LADDER_DRIVER_PAGES * (size_t)PYA_PAGE) == 0) {
        /* Enough is free: what the driver keeps of mappings found no room, where it has to lie in the card's own memory. */
        size_t n_freed;
        st = pya_trim_card(
            card, PYA_TRIM_OPEN, NULL, LADDER_DRIVER_PAGES * (size_t)PYA_PAGE, &n_freed);
        st = st == PYA_OK ? ladder_save(arena, bytes, is_small, out) : st;
    }
    if (pya_is_shortage(st) && is_open && squeeze_may_remake(arena, bytes)) {
        /* Enough is free, in larger grains than what lacks: it comes again in smaller ones. */
        size_t n_freed;
        const size_t n_most = m + pya_grain_pages(PYA_N_GRAINS - 1);
        st = pya_trim_card(card, PYA_TRIM_OPEN, NULL, n_most * PYA_PAGE, &n_freed);
        st = st == PYA_OK ? ladder_save(arena, bytes, is_small, out) : st;
    }
    bool has_moved = scalar[PYA_STAT_pyalloc_page_transfers] > n_transferred;
    scalar[has_moved ? PYA_STAT_pyalloc_saved_by_transfer : PYA_STAT_pyalloc_saved_by_wait] +=
        st == PYA_OK;
    return st;
}

/* The capacity is reached.  Where no whole pages are to be had, parts of them may be enough. */
static pya_status
ladder_squeeze(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    pya_status st = squeeze_pages(arena, bytes, is_small, out);
    if (pya_is_shortage(st) && squeeze_may_share(arena, bytes)) {
        st = ladder_stitch(arena, bytes, is_small, true, out);
        card->stats.scalar[PYA_STAT_pyalloc_saved_by_stitch] += st == PYA_OK;
    }
    return st;
}

/* *is_last: everything was tried but ladder_squeeze().  Calls nobody's code but the device's. */
static pya_status
climb_at_ease(
    struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out, bool *is_last) {
    struct pya_card *card = arena->card;
    size_t m = pya_pages_for(bytes);
    struct pya_stitch *stitch;
    pya_status st = PYA_OK;
    if (arena->lacks_pages > 0) {
        bool is_full = pya_gc_would_press(card, arena->lacks_pages);
        st = is_full ? PYA_OK : pya_lay_fill(arena, bytes, is_small, out);
        st = st == PYA_OK && *out == NULL ? ladder_refit(arena, bytes, is_small, out) : st;
    }
    if (st != PYA_OK || *out != NULL) {
        return st;
    }
    ladder_poll(arena);
    st = pya_stitch_find(arena, bytes, &stitch);
    if (st != PYA_OK) {
        return st;
    }
    if (stitch != NULL) {
        pya_card_note_reuse(card);
        return pya_stitch_take(stitch, bytes, out);
    }
    st = ladder_annex(arena, bytes, is_small, out);
    if (st != PYA_OK || *out != NULL) {
        return st;
    }
    if (pya_card_is_shared(card)) {
        st = pya_trim_settle_meanwhile(card);
        /* Nobody wants what a pool left but who takes it: never put off, whatever transfers have cost. */
        st = st == PYA_OK ? ladder_borrow(arena, bytes, is_small, TRANSFER_LEFT, out) : st;
        if (st == PYA_OK && *out == NULL && pya_policy_may_transfer(arena, m)) {
            st = ladder_borrow(arena, bytes, is_small, TRANSFER_IDLE, out);
        }
        if (st != PYA_OK || *out != NULL) {
            return st;
        }
    }
    pya_gc_before_growth(arena, bytes, m > arena->free_pages ? m - arena->free_pages : 0);
    *is_last = true;
    return ladder_extend(arena, bytes, is_small, out);
}

static pya_status
climb_pages(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    bool is_last = false;
    pya_device_begin(card->dev);
    pya_status st = climb_at_ease(arena, bytes, is_small, out, &is_last);
    pya_device_end(card->dev);
    return is_last && pya_is_shortage(st) ? ladder_squeeze(arena, bytes, is_small, out) : st;
}

static pya_status
climb_plain(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    int64_t *scalar = card->stats.scalar;
    pya_gc_before_growth(arena, bytes, pya_pages_for(pya_plain_segment_bytes(bytes, is_small)));
    pya_status st = pya_plain_grow(arena, bytes, is_small);
    if (pya_is_shortage(st) && !pya_pending_must_not_wait(card)) {
        size_t n_freed;
        scalar[PYA_STAT_num_alloc_retries]++;
        scalar[PYA_STAT_num_sync_all_streams]++;
        pya_status wait = squeeze_wait(arena);
        if (wait != PYA_OK && wait != PYA_E_CAPTURE) {
            return wait;
        }
        st = ladder_refit(arena, bytes, is_small, out);
        if (st != PYA_OK || *out != NULL) {
            scalar[PYA_STAT_pyalloc_saved_by_wait] += st == PYA_OK;
            return st;
        }
        st = wait == PYA_OK ? pya_trim_card(card, PYA_TRIM_OPEN, NULL, SIZE_MAX, &n_freed) : wait;
        if (st != PYA_OK) {
            return st == PYA_E_CAPTURE ? PYA_E_NOMEM : st; /* a capture nobody told us of */
        }
        st = pya_plain_grow(arena, bytes, is_small);
        scalar[PYA_STAT_pyalloc_saved_by_release] += st == PYA_OK;
    }
    return st == PYA_OK ? ladder_refit(arena, bytes, is_small, out) : st;
}

/* While a pool is routed to, requests do not look at events, which a capture would forbid; before memory grows it is found
 * out whether there is one. */
static pya_status
ladder_reclaim(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    if (card->n_pending == 0 || card->n_active == 0 || pya_fences_are_capturing(card)) {
        return PYA_OK;
    }
    pya_pending_resume(card);
    pya_pending_poll(card);
    pya_card_unpark(card);
    return ladder_refit(arena, bytes, is_small, out);
}

/* Could nothing make room?  Then no page is asked for, no host memory taken, nothing given back, no policy changed.  A pool's
 * own allocator may have more than the card. */
static bool
climb_is_hopeless(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    const struct pya_pool *pool = arena->pool;
    bool is_of_card = pool == NULL || pool->source.alloc == NULL;
    size_t held = pool == NULL ? 0 : (size_t)pool->reserved[PYA_STAT_ALL].current;
    return (is_of_card && bytes > card->caps.total_bytes) ||
           (bytes > card->limit_bytes && bytes > card->reserved_bytes) ||
           (bytes > held && bytes - held > pya_arena_pool_room(arena));
}

pya_status
pya_ladder_climb(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_block *block = NULL;
    pya_pages_try_anew(&arena->card->pages);
    pya_card_unpark(arena->card);
    pya_status st = ladder_reclaim(arena, bytes, is_small, &block);
    if (st == PYA_OK && block == NULL) {
        st = PYA_E_NOMEM;
        if (climb_is_hopeless(arena, bytes)) {
            arena->card->stats.scalar[PYA_STAT_num_alloc_retries]++;
        } else {
            st = arena->small_fit != NULL ? climb_plain(arena, bytes, is_small, &block)
                                          : climb_pages(arena, bytes, is_small, &block);
        }
        st = pya_is_shortage(st) ? pya_plain_borrow(arena, bytes, is_small, &block) : st;
    }
    if (st != PYA_OK) {
        return st;
    }
    /* A growth always makes a run that fits; NULL here would be a broken promise of a lower floor. */
    PYA_ASSERT(block != NULL);
    if (block == NULL) {
        return PYA_E_NOMEM;
    }
    *out = block;
    return PYA_OK;
}
