/* An arena: the home memory of one (pool, stream) on one card.  Floor 6.
 *
 * With virtual memory an arena has one size-less area that grows page by page; without it, and in pools
 * that want it so, it has plain segments, small and large ones in indexes of their own as torch keeps them.
 * Long because every floor above works on arenas. */
#pragma once

#include "card.h"
#include "fence.h"
#include "fit.h"
#include "range.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_repeat;
struct pya_stay;
struct pya_stitches;

/* free_bytes == sum of FREE runs; free_pages == sum of their wholly free pages.
 * Checked by pya_arena_check(). First what every request and every free looks at. */
struct pya_arena {
    struct pya_card *card;
    struct pya_pool *pool; /* NULL: the default pool */
    pya_stream stream;
    /* Freed last, not yet joined to its neighbours; state USED, in no index. */
    struct pya_block *parked;
    /* Where smaller and larger requests lay, and how long the larger ones lived (repeat.h). NULL before the first large
     * request; littles and stays also before a period is known. */
    struct pya_littles *littles;
    struct pya_repeat *repeat;
    struct pya_stay *stays;
    size_t repeat_pause; /* large requests to let pass, since nothing repeats */
    size_t lacks_pages;  /* of the latest request's place in a layout (lay.h) */
    size_t free_bytes;
    size_t free_pages;
    uint64_t seq;    /* grows with every block that becomes free */
    bool is_parking; /* in the card's list; parked implies it */
    /* Of a private pool: free pages marked is_left were not used since the device was waited for. */
    bool has_left;
    struct pya_fit *small_fit; /* of plain segments only; NULL: pages */
    struct pya_fit fit;        /* every FREE run; without virtual memory those of the large pool */

    struct pya_arena *next;
    struct pya_arena *next_common; /* of the default pool */
    struct pya_fence *fence;       /* the stream's */
    struct pya_range *ranges;
    struct pya_block *holes; /* chain of HOLE blocks */
    struct pya_stitches *stitches;
    struct pya_arena *next_parking; /* of the card's list */
    struct pya_arena *next_giving;  /* of the card's list */
    bool is_giving;                 /* in that list; see pya_arena_offer() */
    unsigned n_waiting;             /* requests without the lock: it stays, and stays its pool's */
    /* What any stream had to do before idle_seq is finished: runs with seq <= idle_seq are idle. */
    uint64_t idle_seq;
    uint64_t fence_seq;  /* what idle_seq becomes when the fences have passed */
    uint64_t almost_seq; /* the same but for the stream of the card's late fence */
    /* seq when it was last seen to have changed, and the card's requests then. */
    uint64_t seen_seq;
    uint64_t seen_requests;
    double stitch_debt_ns; /* paid for stitching since the last growth (the balanced policy's W) */
    double transfer_debt_ns; /* the same for pages taken from other streams */
    size_t wasted_bytes;     /* of live stitched ranges' pages, what their blocks do not use */
    /* Of the last large request that no run fitted; how many in a row were the next larger one, or the same size again. */
    size_t large_pages;
    unsigned n_grown;
    unsigned n_repeated;
    /* What the latest of the balanced policy's choices could spare, peak live then, and how many in a row spared what
     * became live before the next. */
    size_t spared_bytes;
    size_t spared_at_peak;
    unsigned n_spared_in_vain;
};

static inline struct pya_place
pya_arena_place(const struct pya_arena *arena) {
    struct pya_place place = {arena->stream, {0, 0}};
    if (arena->pool != NULL) {
        place.pool = arena->pool->id;
    }
    return place;
}

/* Are there more arenas than one?  Streams and pools that share a card take memory from one another. */
static inline bool
pya_card_is_shared(const struct pya_card *card) {
    return card->arenas->next != NULL;
}

/* Has an arena of a private pool pages for others?  Where nobody uses the pool, and what its users did not touch yet. */
static inline bool
pya_arena_gives(const struct pya_arena *arena) {
    const struct pya_pool *pool = arena->pool;
    return pool != NULL && arena->free_pages > 0 && (pool->n_users == 0 || arena->has_left);
}
/* Walks the arenas that may give pages to others: first those that private pools offer, then the default pool's.  Not
 * all arenas: there may be thousands of pools. */
static inline struct pya_arena *
pya_givers(const struct pya_card *card) {
    return card->giving != NULL ? card->giving : card->common;
}
static inline struct pya_arena *
pya_givers_next(const struct pya_arena *arena) {
    if (arena->pool == NULL) {
        return arena->next_common;
    }
    return arena->next_giving != NULL ? arena->next_giving : arena->card->common;
}
/* Puts the arena into the card's list if it gives: whenever pages of it may have become free, or its pool lost its last
 * user. */
void pya_arena_offer(struct pya_arena *arena);
/* Drops those from the list that do not give any more. */
void pya_givers_review(struct pya_card *card);

/* For the fence's stream. */
PYA_MUST_CHECK pya_status pya_arena_create(
    struct pya_card *card, struct pya_pool *pool, struct pya_fence *fence, struct pya_arena **out);
/* Unmaps and releases everything it holds, live blocks too: for the end of the heap only. */
void pya_arena_destroy(struct pya_arena *arena);

/* Splits `bytes` off the low end of a FREE run and hands them out.  One record was reserved in
 * card->blocks.  The block is USED, not yet in card->live, its user fields unset. */
struct pya_block *pya_arena_take(struct pya_arena *arena, struct pya_block *run, size_t bytes);
/* The same off the high end of a run that has more. */
struct pya_block *pya_arena_take_high(struct pya_arena *arena, struct pya_block *run, size_t bytes);
/* Cuts [addr, addr + bytes) out of a FREE run; two records were reserved.  The piece comes back in `state`
 * and in no index. */
struct pya_block *pya_arena_carve(
    struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes,
    enum pya_block_state state);
/* Is this neighbour a FREE run of the arena? */
static inline bool
pya_arena_has_run(const struct pya_arena *arena, const struct pya_block *block) {
    return pya_block_is(block, PYA_BLOCK_FREE) && block->arena == arena;
}
/* The taker may have memory of `from` that was freed at this seq or before: all streams but the taker's have finished
 * what they had to do then.  0 for a pool that is not settled: its graphs may have run on streams no fence knows. */
static inline uint64_t
pya_arena_idle_for(const struct pya_arena *from, const struct pya_arena *taker) {
    if (from->pool != NULL && !from->pool->is_settled) {
        return 0;
    }
    const struct pya_fence *late = from->card->late_fence;
    bool is_late = late != NULL && late->stream == taker->stream;
    return is_late && from->almost_seq > from->idle_seq ? from->almost_seq : from->idle_seq;
}
/* May the arena use this run now?  True for its own runs, and within the default pool for idle ones of other streams. */
static inline bool
pya_arena_may_use(const struct pya_arena *arena, const struct pya_block *run) {
    if (!pya_block_is(run, PYA_BLOCK_FREE)) {
        return false;
    }
    const struct pya_arena *from = run->arena;
    return from == arena ||
           (arena->pool == NULL && from->pool == NULL && run->range->slots != NULL &&
            run->seq <= pya_arena_idle_for(from, arena));
}
/* The arena's pool is in use again.  Marks its idle pages, which no work uses any more: others may take them until this
 * arena touches them. */
void pya_arena_leave(struct pya_arena *arena);
/* Makes a home block (USED, LENT, or one just mapped) FREE and joins it to its neighbours.
 * Returns the run it became part of. */
struct pya_block *pya_arena_give(struct pya_arena *arena, struct pya_block *block);

/* [addr, addr + bytes), whole grains of another arena's FREE run, becomes this arena's, addresses and all.  Two
 * records were reserved.  Returns the run it became part of. */
struct pya_block *
pya_arena_adopt(struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes);

/* Frees a USED home block, but leaves the work for later: the next request often wants just this size.
 * Everything that looks at free runs unparks first. */
static inline void
pya_arena_park(struct pya_arena *arena, struct pya_block *block) {
    struct pya_block *before = arena->parked;
    arena->parked = block;
    if (before != NULL) {
        (void)pya_arena_give(arena, before);
    } else if (PYA_UNLIKELY(!arena->is_parking)) {
        arena->is_parking = true;
        arena->next_parking = arena->card->parking;
        arena->card->parking = arena;
    }
}
void pya_arena_unpark(struct pya_arena *arena);
void pya_card_unpark(struct pya_card *card);

/* Maps n_pages new pages, in grains of that size and smaller ones, at the start of a hole and makes them FREE.  Undoes
 * itself on failure.  PYA_E_LIMIT: reserved_bytes would pass the limit; nothing was asked of the device. */
PYA_MUST_CHECK pya_status pya_arena_grow(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, unsigned grain, bool is_small);
/* Gives existing pages that have no home the first n_pages slots of a hole as their home; FREE.
 * pya_arena_note_mapped() is left to the caller. */
PYA_MUST_CHECK pya_status pya_arena_settle(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages);
/* A hole of at least n_pages at the end of a range; makes a new range when there is none. */
PYA_MUST_CHECK pya_status
pya_arena_last_hole(struct pya_arena *arena, size_t n_pages, struct pya_block **out);
/* A range with addresses of its own becomes the arena's; returns the one block that covers it, which is in no index
 * yet.  A record was reserved. */
struct pya_block *pya_arena_link_range(struct pya_arena *arena, struct pya_range *range);
/* Gives back address space in which nothing is mapped. */
void pya_arena_drop_ranges(struct pya_arena *arena);
/* A home block whose addresses are no longer mapped becomes a hole of the range's own arena and joins the holes
 * beside it. */
void pya_block_make_hole(struct pya_block *block);
/* Bytes came to the arena's pool (positive) or left it; the default pool keeps no count of its own. */
void pya_arena_count_pool(struct pya_arena *arena, bool is_small, int64_t bytes);
/* Bytes the arena's pool may still get under its own limit; SIZE_MAX without one. */
static inline size_t
pya_arena_pool_room(const struct pya_arena *arena) {
    const struct pya_pool *pool = arena->pool;
    if (pool == NULL || pool->limit_bytes == 0) {
        return SIZE_MAX;
    }
    size_t reserved = (size_t)pool->reserved[PYA_STAT_ALL].current;
    return pool->limit_bytes > reserved ? pool->limit_bytes - reserved : 0;
}

/* How many of the n_pages mapped from addr on were made for small requests, as torch counts them. */
size_t pya_arena_small_pages(
    const struct pya_arena *arena, const struct pya_range *range, pya_dptr addr, size_t n_pages);
/* n_pages of a range from addr on became home, or stopped being it; n_small of them were made for small requests. */
void pya_arena_note_mapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages);
void pya_arena_note_unmapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages,
    size_t n_small);

/* Learns how far the streams' work has finished (fence.h); never waits, never errs on the side of idle.  taker: the
 * arena that would like memory of others; NULL: it is to go back to the device. */
void pya_card_poll(struct pya_card *card, const struct pya_arena *taker);
/* The device was waited for since anything was freed, so no event has to tell of it: one that was recorded just now may
 * not have passed yet. */
void pya_card_note_wait(struct pya_card *card);

size_t pya_arena_check(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
