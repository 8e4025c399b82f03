/* An arena: the home memory of one (pool, stream) on one card.  Floor 6.
 *
 * With virtual memory an arena is one area of pages for all sizes, which grows page by page.  Without it, and in
 * pools that ask for this, an arena has plain segments, with separate indexes for small and large ones as in torch.
 * Long because every floor above works on arenas. */
#pragma once

#include "card.h"
#include "fence.h"
#include "fit.h"
#include "range.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A large request is a tensor that grows if each of the last PYA_GROWING_FROM was larger than the one before by at most
 * 1/PYA_GROWING_SHARE of it and one page. */
enum { PYA_GROWING_FROM = 2, PYA_GROWING_SHARE = 8 };

struct pya_repeat;
struct pya_stay;
struct pya_stitches;

/* free_bytes == sum of FREE runs; free_pages == sum of their wholly free pages.  Checked by pya_arena_check().
 * The fields that every request and every free reads come first. */
struct pya_arena {
    struct pya_card *card;
    struct pya_pool *pool; /* NULL: the default pool */
    pya_stream stream;
    /* The block freed last, not yet joined to its neighbours: its state is USED and it is in no index. */
    struct pya_block *parked;
    /* Where earlier requests lay: littles the small ones, repeat the large ones; stays how long the large ones lived
     * (repeat.h).  NULL before the first large request; littles and stays also until a period is known. */
    struct pya_littles *littles;
    struct pya_repeat *repeat;
    struct pya_stay *stays;
    size_t repeat_pause; /* large requests to skip because nothing repeats */
    size_t lacks_pages;  /* missing at the latest request's place in a layout (lay.h) */
    size_t free_bytes;
    size_t free_pages;
    uint64_t seq;    /* grows with every block that becomes free */
    bool is_parking; /* in the card's list of parking arenas; parked != NULL implies it */
    /* Private pools only: some free pages are marked is_left, that is, unused since the device was last waited for. */
    bool has_left;
    struct pya_fit *small_fit; /* plain segments of the small pool; NULL: the arena has pages */
    struct pya_fit fit; /* every FREE run; without virtual memory those of the large pool only */

    struct pya_arena *next;
    struct pya_arena *next_common; /* within the default pool */
    struct pya_arena *next_alike;  /* in the card's bucket */
    struct pya_fence *fence;       /* the stream's */
    struct pya_range *ranges;
    struct pya_block *holes; /* chain of HOLE blocks */
    struct pya_stitches *stitches;
    struct pya_arena *next_parking; /* in the card's list */
    struct pya_arena *next_giving;  /* in the card's list */
    bool is_giving;                 /* is in that list; see pya_arena_offer() */
    unsigned n_waiting;             /* unlocked requests in progress; they need arena and pool */
    /* All streams have finished the work they had when seq was idle_seq: runs with seq <= idle_seq are idle. */
    uint64_t idle_seq;
    uint64_t fence_seq;  /* value for idle_seq once the fences have passed */
    uint64_t almost_seq; /* like idle_seq, but ignoring the stream of the card's late fence */
    /* seq at the last observed change, and the number of the card's requests then. */
    uint64_t seen_seq;
    uint64_t seen_requests;
    double stitch_debt_ns;   /* what stitching has cost since patience last ran out (policy.c) */
    double transfer_debt_ns; /* the same for pages taken from other streams */
    size_t wasted_bytes;     /* bytes of live stitched ranges' pages that their blocks do not use */
    /* The last large request that no run fitted; how many in a row each were a little larger, or the same size
     * again. */
    size_t large_pages;
    unsigned n_grown;
    unsigned n_repeated;
    /* The balanced policy's latest saving and peak live at that time; and how many savings in a row were in vain,
     * because as much became live before the next one. */
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

/* Does the card have more than one arena?  Then streams and pools may take memory from one another. */
static inline bool
pya_card_is_shared(const struct pya_card *card) {
    return card->arenas->next != NULL;
}

/* Does this private pool's arena have pages for others?  Yes if the pool has no users, or its users left pages
 * untouched. */
static inline bool
pya_arena_gives(const struct pya_arena *arena) {
    const struct pya_pool *pool = arena->pool;
    return pool != NULL && arena->free_pages > 0 && (pool->n_users == 0 || arena->has_left);
}
/* Iterates over the arenas that may give pages to others: first those offered by private pools, then the default
 * pool's.  It does not visit all arenas, because there may be thousands of pools. */
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
/* Adds the arena to the card's list of givers if it has pages to give.  Call it whenever pages may have become free
 * and when the pool loses its last user. */
void pya_arena_offer(struct pya_arena *arena);
/* Removes arenas that no longer have pages to give from the list. */
void pya_givers_review(struct pya_card *card);

/* Was each of the last large requests slightly larger than the one before, as when one tensor grows? */
static inline bool
pya_arena_is_growing(const struct pya_arena *arena) {
    return arena->n_grown >= PYA_GROWING_FROM;
}
/* Could a tensor of n_before pages grow to n in one step? */
static inline bool
pya_grows_to(size_t n_before, size_t n) {
    return n >= n_before && n - n_before <= n_before / PYA_GROWING_SHARE + 1;
}

/* Creates an arena for the fence's stream. */
PYA_MUST_CHECK pya_status pya_arena_create(
    struct pya_card *card, struct pya_pool *pool, struct pya_fence *fence, struct pya_arena **out);
/* Unmaps and releases all memory of the arena, including live blocks.  Only for the end of the heap. */
void pya_arena_destroy(struct pya_arena *arena);

/* Splits `bytes` off the low end of a FREE run and returns them as a USED block.  The block is not yet in card->live
 * and its user fields are unset.  The caller has reserved one record in card->blocks. */
struct pya_block *pya_arena_take(struct pya_arena *arena, struct pya_block *run, size_t bytes);
/* The same from the high end; the run must be larger than `bytes`. */
struct pya_block *pya_arena_take_high(struct pya_arena *arena, struct pya_block *run, size_t bytes);
/* Cuts [addr, addr + bytes) out of a FREE run.  The returned piece has the given state and is in no index.  The
 * caller has reserved two records. */
struct pya_block *pya_arena_carve(
    struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes,
    enum pya_block_state state);
/* Is this neighbour a FREE run of the arena? */
static inline bool
pya_arena_has_run(const struct pya_arena *arena, const struct pya_block *block) {
    return pya_block_is(block, PYA_BLOCK_FREE) && block->arena == arena;
}
/* The taker may use memory of `from` that was freed at this seq or before: all streams except the taker's have
 * finished the work they had then.  0 for a pool that is not settled, because its graphs may have run on streams
 * without a fence. */
static inline uint64_t
pya_arena_idle_for(const struct pya_arena *from, const struct pya_arena *taker) {
    if (from->pool != NULL && !from->pool->is_settled) {
        return 0;
    }
    const struct pya_fence *late = from->card->late_fence;
    bool is_late = late != NULL && late->stream == taker->stream;
    return is_late && from->almost_seq > from->idle_seq ? from->almost_seq : from->idle_seq;
}
/* May the arena use this run now?  Yes for its own runs and, within the default pool, for idle runs of other
 * streams. */
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
/* The arena's pool is in use again.  Marks its idle pages, which no work uses any more: other arenas may take them
 * until this arena touches them. */
void pya_arena_leave(struct pya_arena *arena);
/* Makes a home block (USED, LENT, or one just mapped) FREE and joins it to its neighbours.
 * Returns the run it became part of. */
struct pya_block *pya_arena_give(struct pya_arena *arena, struct pya_block *block);

/* Transfers [addr, addr + bytes), whole grains of another arena's FREE run, to this arena without changing addresses.
 * The caller has reserved two records.  Returns the run it became part of. */
struct pya_block *
pya_arena_adopt(struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes);

/* Frees a USED home block but does not join it to its neighbours yet, because the next request often has the same
 * size.  Code that looks at free runs must unpark first. */
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

/* Maps n_pages new pages at the start of a hole and makes them FREE, in grains of size `grain` or smaller.  Undoes
 * itself on failure.  PYA_E_LIMIT: reserved_bytes would exceed the limit; the device was not called. */
PYA_MUST_CHECK pya_status pya_arena_grow(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, unsigned grain, bool is_small);
/* Makes the first n_pages slots of a hole the home of existing pages that have none, and makes them FREE.  The caller
 * must call pya_arena_note_mapped(). */
PYA_MUST_CHECK pya_status pya_arena_settle(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages);
/* Finds a hole of at least n_pages at the end of a range, or makes a new range. */
PYA_MUST_CHECK pya_status
pya_arena_last_hole(struct pya_arena *arena, size_t n_pages, struct pya_block **out);
/* Adds a range to the arena.  Returns the one block that covers it, which is in no index yet.  The caller has
 * reserved a record. */
struct pya_block *pya_arena_link_range(struct pya_arena *arena, struct pya_range *range);
/* Releases address space in which nothing is mapped. */
void pya_arena_drop_ranges(struct pya_arena *arena);
/* Turns a home block whose addresses are no longer mapped into a hole of the range's own arena and joins it to
 * adjacent holes. */
void pya_block_make_hole(struct pya_block *block);
/* Counts bytes that were added to (positive) or left the arena's pool.  The default pool has no count of its own. */
void pya_arena_count_pool(struct pya_arena *arena, bool is_small, int64_t bytes);
/* Bytes that the arena's pool may still reserve under its own limit; SIZE_MAX without a limit. */
static inline size_t
pya_arena_pool_room(const struct pya_arena *arena) {
    const struct pya_pool *pool = arena->pool;
    if (pool == NULL || pool->limit_bytes == 0) {
        return SIZE_MAX;
    }
    size_t reserved = (size_t)pool->reserved[PYA_STAT_ALL].current;
    return pool->limit_bytes > reserved ? pool->limit_bytes - reserved : 0;
}

/* How many of the n_pages mapped from addr on were created for small requests, as torch counts them. */
size_t pya_arena_small_pages(
    const struct pya_arena *arena, const struct pya_range *range, pya_dptr addr, size_t n_pages);
/* The n_pages of a range from addr on became home pages, or stopped being home pages.  n_small of them were created
 * for small requests. */
void pya_arena_note_mapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages);
void pya_arena_note_unmapped(
    struct pya_arena *arena, struct pya_range *range, pya_dptr addr, size_t n_pages,
    size_t n_small);

/* Finds out how far the streams have come (fence.h).  Never waits, and never reports busy memory as idle.  taker: the
 * arena that wants other arenas' memory; NULL: the memory is to go back to the device. */
void pya_card_poll(struct pya_card *card, const struct pya_arena *taker);
/* The device was waited for and nothing was freed since, so all free memory is idle.  No event is asked: one recorded
 * just now may not have completed yet. */
void pya_card_note_wait(struct pya_card *card);

size_t pya_arena_check(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
