/* How much memory a device or a pool may hold, and how much it keeps.  Floor 12. */
#include "fence.h"
#include "heap.h"

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
    return st == PYA_OK ? pya_arena_grow(arena, hole, n_pages, false) : st;
}

pya_status
pya_set_fraction(struct pya_heap *heap, int device, double fraction) {
    struct pya_card *card;
    if (!(fraction >= 0 && fraction <= 1)) {
        return PYA_E_INVAL;
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
        st = PYA_E_NOMEM; /* before any list as long as the request is made */
    } else if (missing > 0) {
        st = pya_pool_arena(card, NULL, stream, &arena);
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
        if (card->reserved_bytes > card->limit_bytes) {
            st = pya_heap_trim_card(card, card->limit_bytes);
        }
    }
    pya_lock_release(&card->lock);
    return st;
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
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return heap->options.per_process_memory_fraction;
    }
    pya_lock_acquire(&card->lock);
    double fraction = card->options.per_process_memory_fraction;
    pya_lock_release(&card->lock);
    return fraction;
}

/* What is to be waited for under the lock is then what other threads queue meanwhile. */
static pya_status
card_wait_for_trim(struct pya_card *card, size_t bytes_left) {
    pya_lock_acquire(&card->lock);
    bool waits =
        card->reserved_bytes > (bytes_left > card->keep_bytes ? bytes_left : card->keep_bytes);
    pya_lock_release(&card->lock);
    pya_status st = waits ? pya_fences_wait_unlocked(card) : PYA_OK;
    return st == PYA_E_CAPTURE ? PYA_OK : st;
}

static pya_status
heap_trim_device(struct pya_heap *heap, int device, size_t bytes_left) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return PYA_OK;
    }
    pya_status st = card_wait_for_trim(card, bytes_left);
    if (st != PYA_OK) {
        return st;
    }
    void *here = pya_heap_capture(heap, PYA_RECORD_ALL);
    pya_lock_acquire(&card->lock);
    pya_history_set_current(card->history, here);
    st = pya_heap_trim_card(card, bytes_left);
    pya_history_set_current(card->history, NULL);
    pya_lock_release(&card->lock);
    pya_heap_drop_context(heap, here);
    return st;
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
    return pya_trim(heap, device, 0);
}
