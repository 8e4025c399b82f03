/* Plain segments.  Floor 7. */
#include "plain.h"

#include <stdlib.h>

#include "debug.h"
#include "lock.h"
#include "segment.h"

/* torch's sizes, so that a program needs no more here than with torch's allocator. */
enum {
    PLAIN_SMALL_SEGMENT = 2 << 20,
    PLAIN_LARGE_SEGMENT = 20 << 20,
    PLAIN_LARGE_FROM = 10 << 20, /* requests of this size or more get their own segment */
};

size_t
pya_plain_segment_bytes(size_t bytes, bool is_small) {
    if (is_small) {
        return PLAIN_SMALL_SEGMENT;
    }
    return bytes < PLAIN_LARGE_FROM ? PLAIN_LARGE_SEGMENT : pya_round_up(bytes, PYA_PAGE);
}

/* As in torch, where the option must be larger, a fresh segment is never too large for its request. */
static size_t
plain_max_split(const struct pya_arena *arena) {
    size_t max_split = arena->card->options.max_split_size;
    return max_split == 0 || max_split > PLAIN_LARGE_SEGMENT ? max_split : PLAIN_LARGE_SEGMENT + 1;
}

/* Counts a segment that was added (sign 1) or is removed (-1). */
static void
plain_count_segment(struct pya_arena *arena, const struct pya_range *range, int sign) {
    struct pya_card *card = arena->card;
    enum pya_stat_pool pool = pya_stat_pool_of(range->is_small);
    struct pya_stat *oversize = &card->stats.single[PYA_STAT_oversize_segments];
    size_t max_split = plain_max_split(arena);
    bool is_oversize = max_split > 0 && range->bytes >= max_split;
    pya_card_reserved(card, range->is_small, sign * (int64_t)range->bytes);
    pya_arena_count_pool(arena, range->is_small, sign * (int64_t)range->bytes);
    if (sign > 0) {
        pya_stats_add(&card->stats, pool, PYA_STAT_segment, 1);
        pya_stat_add(oversize, is_oversize);
    } else {
        pya_stats_sub(&card->stats, pool, PYA_STAT_segment, 1);
        pya_stat_sub(oversize, is_oversize);
    }
}

static bool
plain_is_older(const struct pya_block *a, const struct pya_block *b) {
    return a->range->order < b->range->order || (a->range == b->range && a->addr < b->addr);
}

/* Among more runs than this, take the lowest: buffers for collectives are few, fragments between small blocks may be
 * thousands. */
enum { PLAIN_LIKE = 64 };

/* As in torch: among runs of one size, take the one in the oldest segment, not the lowest.  Ranks of a job that make
 * the same requests then get the same segments, wherever each one's allocator put them; symmetric memory relies on
 * it. */
static struct pya_block *
plain_oldest(const struct pya_fit *fit, struct pya_block *run) {
    struct pya_block *oldest = run;
    struct pya_block *next = pya_fit_next(fit, run);
    for (int i = 1; i < PLAIN_LIKE && next != NULL && next->bytes == run->bytes; i++) {
        PYA_STEP();
        oldest = plain_is_older(next, oldest) ? next : oldest;
        next = pya_fit_next(fit, next);
    }
    return oldest;
}

struct pya_block *
pya_plain_find(struct pya_arena *arena, size_t bytes, bool is_small) {
    const struct pya_fit *fit = is_small ? arena->small_fit : &arena->fit;
    struct pya_block *run = pya_fit_find(fit, bytes);
    if (run != NULL && arena->pool != NULL && arena->pool->source.alloc != NULL) {
        run = plain_oldest(fit, run);
    }
    size_t max_split = plain_max_split(arena);
    if (run == NULL || max_split == 0) {
        return run;
    }
    /* An oversize block serves only oversize requests, and then wastes at most one large segment. */
    if (bytes < max_split && run->bytes >= max_split) {
        return NULL;
    }
    if (bytes >= max_split && run->bytes >= bytes + PLAIN_LARGE_SEGMENT) {
        return NULL;
    }
    return run;
}

struct pya_block *
pya_plain_take(struct pya_arena *arena, struct pya_block *run, size_t bytes, bool is_small) {
    size_t rest = run->bytes - bytes;
    size_t max_split = plain_max_split(arena);
    bool is_whole = arena->pool != NULL && arena->pool->no_split;
    bool splits = is_small ? rest >= PYA_ALIGN
                           : rest > PYA_SMALL_MAX && (max_split == 0 || bytes < max_split);
    return pya_arena_take(arena, run, splits && !is_whole ? bytes : run->bytes);
}

/* ---- a pool's own allocator ----
 * It is called without the card's lock, because it may be written in Python: objects that it drops, or that the
 * collector finds meanwhile, are freed by this thread, and other threads may hold the interpreter while they wait for
 * the lock. */

static bool
plain_is_own(const struct pya_arena *arena) {
    return arena->pool != NULL && arena->pool->source.alloc != NULL;
}

/* Releases the lock; the arena and its pool stay meanwhile.  Returns the context of the request in progress. */
static void *
plain_leave(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    void *current = card->history == NULL ? NULL : card->history->current;
    pya_history_set_current(card->history, NULL);
    arena->n_waiting++;
    pya_lock_release(&card->lock);
    return current;
}

static void
plain_return(struct pya_arena *arena, void *current) {
    struct pya_card *card = arena->card;
    pya_lock_acquire(&card->lock);
    arena->n_waiting--;
    pya_history_set_current(card->history, current);
}

void
pya_plain_hand_back(struct pya_range *gone) {
    while (gone != NULL) {
        struct pya_range *range = gone;
        struct pya_arena *arena = range->arena;
        gone = range->next;
        void *current = plain_leave(arena);
        (void)!pya_segment_free(arena->card, arena->pool, range->base);
        plain_return(arena, current);
        arena->n_waiting--;
        free(range);
    }
}

/* Makes everything ready for a segment of this size before it is allocated. */
static pya_status
plain_prepare(const struct pya_arena *arena, size_t segment) {
    struct pya_card *card = arena->card;
    if (segment > pya_card_room(card) || segment > pya_arena_pool_room(arena)) {
        return PYA_E_LIMIT;
    }
    return pya_slab_reserve(&card->blocks, 1);
}

static pya_status
plain_ask(struct pya_arena *arena, size_t segment, struct pya_range *range) {
    struct pya_card *card = arena->card;
    if (!plain_is_own(arena)) {
        return pya_segment_alloc(card, arena->pool, segment, &range->base);
    }
    void *current = plain_leave(arena);
    pya_status st = pya_segment_alloc(card, arena->pool, segment, &range->base);
    plain_return(arena, current);
    if (st != PYA_OK) {
        return st;
    }
    /* Others may have used up what was prepared. */
    st = plain_prepare(arena, segment);
    st = st == PYA_OK ? pya_ptrmap_reserve(&card->live) : st;
    if (st != PYA_OK) {
        current = plain_leave(arena);
        (void)!pya_segment_free(card, arena->pool, range->base);
        plain_return(arena, current);
    }
    return st;
}

pya_status
pya_plain_grow(struct pya_arena *arena, size_t bytes, bool is_small) {
    struct pya_card *card = arena->card;
    size_t segment = pya_plain_segment_bytes(bytes, is_small);
    pya_status st = plain_prepare(arena, segment);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_range *range = calloc(1, sizeof *range);
    if (range == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    st = plain_ask(arena, segment, range);
    if (st != PYA_OK) {
        free(range);
        return st;
    }
    range->bytes = segment;
    range->is_small = is_small;
    range->n_mapped = 1;
    range->order = arena->seq;
    (void)pya_arena_give(arena, pya_arena_link_range(arena, range));
    plain_count_segment(arena, range, 1);
    pya_history_note(
        card->history, PYA_ACTION_SEGMENT_ALLOC, range->base, segment, pya_arena_place(arena));
    card->stats.scalar[PYA_STAT_num_device_alloc]++;
    card->stats.scalar[PYA_STAT_pyalloc_growths]++;
    return PYA_OK;
}

static bool
plain_lends(const struct pya_arena *from, const struct pya_arena *to) {
    const struct pya_pool *pool = from->pool;
    return from->small_fit != NULL && pool != NULL && pool->on_oom && from->stream == to->stream;
}

pya_status
pya_plain_borrow(
    const struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    struct pya_card *card = arena->card;
    struct pya_arena *from = arena->pool == NULL ? card->arenas : NULL;
    for (; from != NULL; from = from->next) {
        if (!plain_lends(from, arena)) {
            continue;
        }
        pya_arena_unpark(from);
        struct pya_block *run = pya_plain_find(from, bytes, is_small);
        pya_status st = run == NULL ? PYA_OK : pya_slab_reserve(&card->blocks, 1);
        if (st != PYA_OK) {
            return st;
        }
        if (run != NULL) {
            *out = pya_plain_take(from, run, bytes, is_small);
            card->stats.scalar[PYA_STAT_pyalloc_saved_by_transfer]++;
            return PYA_OK;
        }
    }
    return PYA_E_NOMEM;
}

/* Unlinks a segment.  The caller then owns the range. */
static struct pya_range *
plain_unlink(struct pya_arena *arena, struct pya_range **link) {
    struct pya_card *card = arena->card;
    struct pya_range *range = *link;
    struct pya_block *run = range->first;
    struct pya_block *block = pya_arena_take(arena, run, run->bytes);
    pya_range_unlink(range, block);
    pya_slab_put(&card->blocks, block);
    plain_count_segment(arena, range, -1);
    pya_history_note(
        card->history, PYA_ACTION_SEGMENT_FREE, range->base, range->bytes, pya_arena_place(arena));
    card->stats.scalar[PYA_STAT_num_device_free]++;
    card->stats.scalar[PYA_STAT_pyalloc_pages_released] += (int64_t)(range->bytes / PYA_PAGE);
    *link = range->next;
    range->next = NULL;
    return range;
}

static pya_status
plain_release(struct pya_arena *arena, struct pya_range **link) {
    pya_status st = pya_segment_free(arena->card, arena->pool, (*link)->base);
    if (st == PYA_OK) {
        free(plain_unlink(arena, link));
    }
    return st;
}

/* Is it wholly free, and not part of the memory kept by pya_reserve(), unless everything is wanted? */
static bool
plain_may_go(const struct pya_range *range, bool everything) {
    const struct pya_card *card = range->arena->card;
    bool is_free =
        range->slots == NULL && range->first->state == PYA_BLOCK_FREE && range->first->next == NULL;
    return is_free && (everything || card->reserved_bytes - range->bytes >= card->keep_bytes);
}

pya_status
pya_plain_trim_idle(struct pya_arena *arena, size_t n_bytes, size_t *n_freed) {
    *n_freed = 0;
    while (*n_freed < n_bytes) {
        struct pya_range **oldest = NULL;
        for (struct pya_range **link = &arena->ranges; *link != NULL; link = &(*link)->next) {
            const struct pya_range *range = *link;
            bool is_idle = plain_may_go(range, false) && range->first->seq <= arena->idle_seq;
            if (is_idle && (oldest == NULL || range->first->seq < (*oldest)->first->seq)) {
                oldest = link;
            }
        }
        if (oldest == NULL) {
            return PYA_OK;
        }
        size_t bytes = (*oldest)->bytes;
        pya_status st = plain_release(arena, oldest);
        if (st != PYA_OK) {
            return st;
        }
        *n_freed += bytes;
    }
    return PYA_OK;
}

pya_status
pya_plain_trim(struct pya_arena *arena, size_t n_bytes, size_t *n_freed, struct pya_range **gone) {
    const bool is_own = plain_is_own(arena);
    struct pya_range **link = &arena->ranges;
    *n_freed = 0;
    while (*link != NULL && *n_freed < n_bytes) {
        struct pya_range *range = *link;
        if (!plain_may_go(range, n_bytes == SIZE_MAX)) {
            link = &range->next;
            continue;
        }
        size_t bytes = range->bytes;
        if (is_own) {
            (void)plain_unlink(arena, link);
            range->next = *gone;
            *gone = range;
            arena->n_waiting++; /* it stays until then */
        } else {
            pya_status st = plain_release(arena, link);
            if (st != PYA_OK) {
                return st;
            }
        }
        *n_freed += bytes;
    }
    return PYA_OK;
}
