/* The ladder: the order of its steps.  Floor 11.
 *
 * Home fit, a cached stitched range, idle memory of other streams at its addresses, then their pages.  Then the
 * policy weighs growing against stitching.  At the capacity, everything that needs fewer new pages is tried. */
#include "ladder.h"

#include "debug.h"
#include "ladder_internal.h"
#include "lay.h"
#include "plain.h"
#include "policy.h"
#include "repeat.h"

/* Finds a stitched range to extend instead of using a mosaic.  In a program that repeats itself, the range's earlier
 * user comes again, would find it too long and need another one; so this is done only for a tensor that grows.  That
 * takes some more pages, but avoids ranges of parts, which could not be extended the next time. */
static struct pya_stitch *
ladder_short(struct pya_arena *arena, const struct pya_mosaic *mosaic, struct pya_plea *plea) {
    bool is_growing = pya_arena_is_growing(arena);
    bool is_wanted = pya_repeat_is_known(arena) && !is_growing;
    struct pya_stitch *shorter = is_wanted ? NULL : pya_stitch_find_short(arena, plea->bytes);
    const size_t n_most = is_growing ? plea->n - 1 : mosaic->n_lacking;
    const size_t n_lacking =
        shorter == NULL ? 0 : pya_ladder_lengthen_lacks(arena, plea->bytes, shorter);
    if (shorter == NULL || n_lacking > n_most) {
        return NULL;
    }
    plea->n_missing = n_lacking;
    plea->n_there = shorter->n_pages;
    plea->n_handles = pya_pages_for(plea->bytes) - shorter->n_pages;
    return shorter;
}

/* The policy's preferred way while there is memory. */
static pya_status
ladder_extend(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_block *hole;
    size_t n;
    pya_status st = pya_ladder_best_hole(arena, bytes, &hole, &n);
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
        st = pya_ladder_join(arena, bytes, is_small, &mosaic, shorter, plea.n_missing, out);
        if (st != PYA_E_NOMEM || pya_ladder_stitch_lacks(arena, bytes) > 0) {
            return st;
        }
        /* Addresses ran out, not pages. */
        st = pya_ladder_best_hole(arena, bytes, &hole, &n);
        break;
    case PYA_PLAN_MOVE:
        return pya_ladder_move(arena, bytes, is_small, out);
    case PYA_PLAN_GROW:
    default:
        break;
    }
    st = st == PYA_OK ? pya_ladder_grow(arena, bytes, hole, n, is_small) : st;
    return st == PYA_OK ? pya_ladder_refit(arena, bytes, is_small, out) : st;
}

/* *is_last: everything except pya_ladder_squeeze() was tried.  Runs no code of others, except the device's. */
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
        st = st == PYA_OK && *out == NULL ? pya_ladder_refit(arena, bytes, is_small, out) : st;
    }
    if (st != PYA_OK || *out != NULL) {
        return st;
    }
    pya_ladder_poll(arena);
    st = pya_stitch_find(arena, bytes, &stitch);
    if (st != PYA_OK) {
        return st;
    }
    if (stitch != NULL) {
        pya_card_note_reuse(card);
        return pya_stitch_take(stitch, bytes, out);
    }
    st = pya_ladder_annex(arena, bytes, is_small, out);
    if (st != PYA_OK || *out != NULL) {
        return st;
    }
    if (pya_card_is_shared(card)) {
        st = pya_trim_settle_meanwhile(card);
        /* Only the taker wants what a pool left, so this is never put off, whatever transfers have cost. */
        st = st == PYA_OK ? pya_ladder_borrow(arena, bytes, is_small, PYA_TRANSFER_LEFT, out) : st;
        if (st == PYA_OK && *out == NULL && pya_policy_may_transfer(arena, m)) {
            st = pya_ladder_borrow(arena, bytes, is_small, PYA_TRANSFER_IDLE, out);
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
    if (is_last && pya_is_shortage(st) && card->hidden != NULL) {
        pya_nest_open(card);
        st = pya_ladder_refit(arena, bytes, is_small, out);
        st = st == PYA_OK && *out == NULL ? PYA_E_NOMEM : st;
    }
    return is_last && pya_is_shortage(st) ? pya_ladder_squeeze(arena, bytes, is_small, out) : st;
}

static pya_status
climb_plain(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    int64_t *scalar = card->stats.scalar;
    pya_gc_before_growth(arena, bytes, pya_pages_for(pya_plain_segment_bytes(bytes, is_small)));
    pya_status st = pya_plain_grow(arena, bytes, is_small);
    if (pya_is_shortage(st) && !pya_pending_must_not_wait(card)) {
        scalar[PYA_STAT_num_alloc_retries]++;
        scalar[PYA_STAT_num_sync_all_streams]++;
        pya_status wait = pya_ladder_wait(arena);
        if (wait != PYA_OK && wait != PYA_E_CAPTURE) {
            return wait;
        }
        st = pya_ladder_refit(arena, bytes, is_small, out);
        if (st != PYA_OK || *out != NULL) {
            scalar[PYA_STAT_pyalloc_saved_by_wait] += st == PYA_OK;
            return st;
        }
        if (pya_plain_segment_bytes(bytes, is_small) > pya_arena_pool_room(arena)) {
            return PYA_E_LIMIT; /* what others have cached does not help a pool that may not grow */
        }
        st = wait == PYA_OK ? pya_ladder_give_back(arena, SIZE_MAX) : wait;
        if (st != PYA_OK) {
            return st == PYA_E_CAPTURE ? PYA_E_NOMEM : st; /* a capture we were not told of */
        }
        st = pya_plain_grow(arena, bytes, is_small);
        scalar[PYA_STAT_pyalloc_saved_by_release] += st == PYA_OK;
    }
    return st == PYA_OK ? pya_ladder_refit(arena, bytes, is_small, out) : st;
}

/* While requests are routed to a pool they do not poll events, which a capture would forbid.  So before memory grows,
 * find out whether there is a capture, and poll if not. */
static pya_status
ladder_reclaim(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    if (card->n_pending == 0 || card->n_active == 0 || pya_fences_are_capturing(card)) {
        return PYA_OK;
    }
    pya_pending_resume(card);
    pya_pending_poll(card);
    pya_card_unpark(card);
    return pya_ladder_refit(arena, bytes, is_small, out);
}

/* What becomes of the nest (nest.h) when no free run fits? */
enum nest_fate {
    NEST_OPENS,  /* its tensor grows, or there is none */
    NEST_LENDS,  /* the request may have some of its bytes; the others are hidden again */
    NEST_SPARED, /* memory may grow a little instead */
};

static enum nest_fate
climb_nest(const struct pya_arena *arena, size_t bytes) {
    const struct pya_card *card = arena->card;
    const size_t n = pya_pages_for(bytes);
    const struct pya_stitch *nest = card->nest;
    if (card->hidden == NULL || nest == NULL || nest->arena != arena || n >= nest->n_pages) {
        return NEST_OPENS;
    }
    return pya_policy_spares_nest(card, bytes, n) ? NEST_SPARED : NEST_LENDS;
}

/* Can nothing make room?  Then no page is requested, no host memory taken, nothing given back and no policy changed.
 * A pool's own allocator may have more memory than the card. */
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
    const enum nest_fate fate = climb_nest(arena, bytes);
    pya_pages_try_anew(&arena->card->pages);
    pya_card_unpark(arena->card);
    if (fate != NEST_SPARED) {
        pya_nest_open(arena->card);
    }
    pya_status st = fate == NEST_LENDS ? pya_ladder_refit(arena, bytes, is_small, &block) : PYA_OK;
    st = st == PYA_OK && block == NULL ? ladder_reclaim(arena, bytes, is_small, &block) : st;
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
    /* A growth always makes a run that fits; NULL here would be a bug of a lower floor. */
    PYA_ASSERT(block != NULL);
    if (block == NULL) {
        return PYA_E_NOMEM;
    }
    if (fate == NEST_LENDS) {
        pya_nest_close(arena->card);
    }
    *out = block;
    return PYA_OK;
}
