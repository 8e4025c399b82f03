/* How much memory a device or a pool may hold, and how much is kept.  Floor 12. */
#include "fence.h"
#include "heap.h"
#include "lay.h"
#include "move.h"
#include "repeat.h"

pya_status
pya_pool_set_limit(struct pya_heap *heap, int device, struct pya_pool_id id, size_t bytes) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st == PYA_OK) {
        pool->limit_bytes = bytes;
        pya_lock_release(&card->lock);
    }
    return st;
}

static pya_status
reserve_pages(struct pya_arena *arena, size_t bytes) {
    struct pya_block *hole;
    size_t n_pages = pya_pages_for(bytes);
    pya_status st = pya_arena_last_hole(arena, n_pages, &hole);
    return st == PYA_OK ? pya_pages_grow(arena, hole, n_pages, false) : st;
}

pya_status
pya_set_fraction(struct pya_heap *heap, int device, double fraction) {
    struct pya_card *card;
    if (!(fraction >= 0 && fraction <= 1) || device < 0 || device >= PYA_MAX_DEVICES) {
        return PYA_E_INVAL;
    }
    if (pya_heap_is_forked(heap)) {
        return PYA_E_FORKED;
    }
    /* Do not open the card here: that would create the device's context, which a program that never uses the device
     * can do without. */
    pya_lock_acquire(&heap->lock);
    const bool is_open = pya_cards_get(&heap->cards, device) != NULL;
    if (!is_open) {
        heap->fractions[device] = fraction;
    }
    pya_lock_release(&heap->lock);
    if (!is_open) {
        return PYA_OK;
    }
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    pya_card_set_fraction(card, fraction);
    pya_lock_release(&card->lock);
    return PYA_OK;
}

pya_status
pya_reserve(struct pya_heap *heap, int device, size_t bytes, pya_stream stream) {
    struct pya_card *card;
    struct pya_arena *arena;
    if (bytes > PYA_REQUEST_MAX) {
        return PYA_E_TOO_LARGE;
    }
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    size_t missing = bytes > card->reserved_bytes ? bytes - card->reserved_bytes : 0;
    if (missing > card->caps.total_bytes) {
        st = PYA_E_NOMEM; /* before a list as long as the request is allocated */
    } else if (missing > 0) {
        st = pya_lay_arena(card, NULL, stream, &arena);
        if (st == PYA_OK) {
            pya_arena_unpark(arena);
            st = pya_card_has_vmm(card) ? reserve_pages(arena, missing)
                                        : pya_plain_grow(arena, missing, false);
        }
    }
    if (st == PYA_OK) {
        card->keep_bytes = pya_round_up(bytes, PYA_PAGE);
    }
    pya_lock_release(&card->lock);
    return st == PYA_E_LIMIT ? PYA_E_NOMEM : st;
}

/* ---- giving back ---- */

/* The larger of what the caller leaves and what pya_reserve() keeps. */
static size_t
card_left(const struct pya_card *card, size_t bytes_left) {
    return bytes_left > card->keep_bytes ? bytes_left : card->keep_bytes;
}

/* Free memory of a pool in use stays there, except what it has not touched since a wait. */
static bool
arena_has_spare(const struct pya_arena *arena) {
    const bool may_go = pya_pool_is_open(arena) || arena->has_left;
    if (may_go && (arena->free_pages > 0 || (arena->small_fit != NULL && arena->free_bytes > 0))) {
        return true;
    }
    const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
    while (s != NULL && !s->is_broken) {
        s = s->older;
    }
    return s != NULL;
}

/* Could anything be given back, now or after a wait for the device?  This includes what the device refused to take
 * earlier. */
static bool
card_has_spare(struct pya_card *card) {
    size_t n_at_home = 0;
    pya_card_unpark(card);
    pya_nest_open(card);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        if (arena_has_spare(arena)) {
            return true;
        }
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            n_at_home += r->slots == NULL ? 0 : r->n_mapped;
        }
    }
    return card->n_pending > 0 || n_at_home < card->pages.n_live;
}

/* Makes all free memory idle.  is_idle: the device was waited for without the lock, and nothing was freed since. */
static pya_status
card_wait(struct pya_card *card, bool is_idle) {
    pya_status st = pya_pending_sync(card);
    if (st == PYA_OK && !is_idle) {
        st = pya_fences_sync(card, true);
    }
    if (st == PYA_OK) {
        pya_card_note_wait(card);
    }
    return st;
}

/* A capture is not a failure, even one on another device whose stream a freed block waits for: nothing is given back
 * now. */
static pya_status
card_wait_result(pya_status st) {
    return st == PYA_E_CAPTURE ? PYA_OK : st;
}

static void
card_note_trim(struct pya_card *card, size_t n_freed) {
    for (struct pya_arena *arena = card->arenas; arena != NULL && n_freed > 0;
         arena = arena->next) {
        pya_repeat_note_trim(arena);
    }
}

static pya_status
card_give_back(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t bytes) {
    size_t n_freed;
    pya_status st = pya_trim_card(card, scope, pool, bytes, &n_freed);
    card_note_trim(card, n_freed);
    pya_pools_sweep(card);
    return st;
}

/* Gives back everything, or a part: then first what is least likely to be needed again.  !has_spare: nothing could be
 * given back, and no wait is needed. */
static pya_status
card_trim(struct pya_card *card, size_t bytes_left, bool has_spare, bool is_idle) {
    const size_t left = card_left(card, bytes_left);
    if (pya_fences_are_capturing(card)) {
        return PYA_OK;
    }
    /* torch counts only the waits of empty_cache(). */
    card->stats.scalar[PYA_STAT_num_sync_all_streams] += bytes_left == 0;
    if (card->reserved_bytes > left && has_spare) {
        pya_status st = card_wait(card, is_idle);
        if (st != PYA_OK) {
            return card_wait_result(st);
        }
        if (left > 0) {
            card_note_trim(card, pya_gc_collect(card, card->reserved_bytes - left, NULL, 0));
        }
    }
    if (card->reserved_bytes <= left || !has_spare) {
        pya_pools_sweep(card); /* other threads' requests may have taken the last of their memory */
        return PYA_OK;
    }
    const size_t excess = left == 0 ? SIZE_MAX : card->reserved_bytes - left;
    return card_give_back(card, PYA_TRIM_OPEN, NULL, excess);
}

/* A graph's kernels contain addresses of its pool, even where the memory is free now. */
static bool
pool_may_be_trimmed(const struct pya_pool *pool) {
    return pool != NULL && pool->n_users == 0;
}

/* How much of an unused pool's memory may be given back: not what pya_reserve() keeps, if others may have the pool's
 * pages. */
static size_t
card_spare(const struct pya_card *card, const struct pya_pool *pool) {
    if (card->keep_bytes == 0 || pya_pool_is_plain(pool) || !pya_card_has_vmm(card)) {
        return SIZE_MAX;
    }
    return card->reserved_bytes > card->keep_bytes ? card->reserved_bytes - card->keep_bytes : 0;
}

static pya_status
card_trim_pool(struct pya_card *card, const struct pya_pool *pool, bool is_idle) {
    if (!pool_may_be_trimmed(pool) || pya_fences_are_capturing(card)) {
        return PYA_OK;
    }
    pya_status st = card_wait(card, is_idle);
    return st == PYA_OK ? card_give_back(card, PYA_TRIM_POOL, pool, card_spare(card, pool))
                        : card_wait_result(st);
}

/* Gives back memory of the locked card: that of one pool or, if NULL, all open memory until bytes_left are reserved.
 * Releases the lock to wait for the device, then examines the memory again. */
static pya_status
card_trim_and_release(
    struct pya_heap *heap, struct pya_card *card, const struct pya_pool_id *pool,
    size_t bytes_left) {
    const bool waits =
        pool != NULL ? pool_may_be_trimmed(pya_pool_find(card, *pool))
                     : card->reserved_bytes > card_left(card, bytes_left) && card_has_spare(card);
    const uint64_t n_given = pya_card_n_given(card);
    pya_lock_release(&card->lock);
    pya_status st = waits ? pya_fences_wait_unlocked(card) : PYA_OK;
    const bool has_waited = waits && st == PYA_OK;
    if (st != PYA_OK && st != PYA_E_CAPTURE) {
        return st;
    }
    void *here = pya_heap_capture(heap, PYA_RECORD_ALL);
    pya_lock_acquire(&card->lock);
    const bool is_idle = has_waited && pya_card_n_given(card) == n_given;
    pya_history_set_current(card->history, here);
    st = pool != NULL ? card_trim_pool(card, pya_pool_find(card, *pool), is_idle)
                      : card_trim(card, bytes_left, waits, is_idle);
    pya_history_set_current(card->history, NULL);
    pya_lock_release(&card->lock);
    pya_heap_drop_context(heap, here);
    return st;
}

static pya_status
heap_trim_device(struct pya_heap *heap, int device, size_t bytes_left) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return PYA_OK;
    }
    pya_lock_acquire(&card->lock);
    return card_trim_and_release(heap, card, NULL, bytes_left);
}

pya_status
pya_set_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind, size_t bytes) {
    struct pya_card *card;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    if (kind == PYA_LIMIT_SOFT) {
        card->options.soft_limit = bytes;
    } else {
        card->options.limit = bytes;
        pya_card_set_fraction(card, card->options.per_process_memory_fraction);
    }
    const size_t most = card->limit_bytes;
    const bool is_over = kind == PYA_LIMIT_HARD && card->reserved_bytes > most;
    pya_lock_release(&card->lock);
    return is_over ? heap_trim_device(heap, device, most) : PYA_OK;
}

size_t
pya_get_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    bool is_soft = kind == PYA_LIMIT_SOFT;
    if (card == NULL) {
        return is_soft ? heap->options.soft_limit : heap->options.limit;
    }
    pya_lock_acquire(&card->lock);
    size_t bytes = is_soft ? card->options.soft_limit : card->options.limit;
    pya_lock_release(&card->lock);
    return bytes;
}

double
pya_get_fraction(struct pya_heap *heap, int device) {
    if (device < 0 || device >= PYA_MAX_DEVICES) {
        return heap->options.per_process_memory_fraction;
    }
    pya_lock_acquire(&heap->lock);
    struct pya_card *card = pya_cards_get(&heap->cards, device);
    double fraction = heap->fractions[device];
    pya_lock_release(&heap->lock);
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        fraction = card->options.per_process_memory_fraction;
        pya_lock_release(&card->lock);
    }
    return fraction;
}

pya_status
pya_trim(struct pya_heap *heap, int device, size_t bytes) {
    if (pya_heap_is_forked(heap)) {
        return PYA_E_FORKED;
    }
    if (device >= 0) {
        return heap_trim_device(heap, device, bytes);
    }
    pya_status st = PYA_OK;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        pya_status one = heap_trim_device(heap, i, bytes);
        st = st == PYA_OK ? one : st;
    }
    return st;
}

pya_status
pya_empty_cache(struct pya_heap *heap, int device) {
    pya_status st = pya_trim(heap, device, 0);
    if (st == PYA_OK) {
        pya_heap_unmap_imports(heap);
    }
    return st;
}

pya_status
pya_pool_trim(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    return st == PYA_OK ? card_trim_and_release(heap, card, &id, 0) : st;
}
