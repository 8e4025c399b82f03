/* Starting and stopping history on all cards.  Floor 12. */
#include <stdlib.h>

#include "heap.h"

pya_status
pya_heap_apply_history(struct pya_heap *heap, struct pya_card *card) {
    int level = __atomic_load_n(&heap->record_level, __ATOMIC_RELAXED);
    if (level < 0 || !heap->record_trace) {
        if (card->history != NULL) {
            pya_history_fini(card->history);
            card->history = NULL;
        }
        return PYA_OK;
    }
    if (card->history == NULL) {
        card->history = calloc(1, sizeof *card->history);
        if (card->history == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    } else if (card->history->max_entries != heap->record_entries) {
        pya_history_resize(card->history, heap->record_entries);
    }
    card->history->dev = card->dev;
    card->history->level = level;
    card->history->max_entries = heap->record_entries;
    card->history->skip_mask = heap->record_skip;
    card->history->owner = card->contexts;
    return PYA_OK;
}

static pya_status
history_apply_all(struct pya_heap *heap) {
    pya_status st = PYA_OK;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            pya_status one = pya_heap_apply_history(heap, card);
            pya_lock_release(&card->lock);
            st = st == PYA_OK ? one : st;
        }
    }
    return st;
}

pya_status
pya_history_start(
    struct pya_heap *heap, enum pya_record_level level, bool trace, size_t max_entries,
    uint32_t skip_mask) {
    bool has_contexts = heap->hooks.capture_context == NULL ||
                        (heap->hooks.retain_context != NULL && heap->hooks.release_context != NULL);
    if (!has_contexts || (int)level < PYA_RECORD_NEVER || level > PYA_RECORD_ALL) {
        return PYA_E_INVAL;
    }
    pya_lock_acquire(&heap->lock);
    heap->record_trace = trace;
    heap->record_entries = max_entries > 0 ? max_entries : 1;
    heap->record_skip = skip_mask;
    __atomic_store_n(&heap->record_level, (int)level, __ATOMIC_RELAXED);
    pya_status st = history_apply_all(heap);
    pya_lock_release(&heap->lock);
    return st;
}

void
pya_history_forget(struct pya_heap *heap) {
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            if (card->history != NULL) {
                pya_history_clear(card->history);
            }
            pya_lock_release(&card->lock);
        }
    }
}

void
pya_history_stop(struct pya_heap *heap) {
    pya_lock_acquire(&heap->lock);
    __atomic_store_n(&heap->record_level, -1, __ATOMIC_RELAXED);
    (void)!history_apply_all(heap);
    pya_lock_release(&heap->lock);
}

bool
pya_history_is_on(const struct pya_heap *heap) {
    return __atomic_load_n(&heap->record_level, __ATOMIC_RELAXED) >= 0;
}

bool
pya_history_take(
    struct pya_heap *heap, int device, struct pya_history_part *out, uint64_t *now_ns) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return false;
    }
    pya_lock_acquire(&card->lock);
    const bool is_recorded = card->history != NULL;
    if (is_recorded) {
        pya_history_move(card->history, out);
        *now_ns = pya_device_clock_ns(card->dev);
    }
    pya_lock_release(&card->lock);
    return is_recorded;
}

void *
pya_history_context(struct pya_heap *heap, pya_dptr ptr) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    void *context = NULL;
    if (card != NULL) {
        context = block->is_pending ? NULL : block->context;
        if (context != NULL) {
            heap->hooks.retain_context(heap->hooks.arg, context);
        }
        pya_lock_release(&card->lock);
    }
    return context;
}

pya_status
pya_history_annotate(struct pya_heap *heap, pya_dptr ptr, void *context) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL || block->is_pending) {
        if (card != NULL) {
            pya_lock_release(&card->lock);
        }
        return PYA_E_FOREIGN;
    }
    if (card->history != NULL) {
        pya_history_add(
            card->history, PYA_ACTION_ANNOTATE, block->addr, block->requested,
            pya_arena_place(block->arena), context);
    }
    pya_lock_release(&card->lock);
    return PYA_OK;
}
