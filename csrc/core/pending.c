/* Recorded streams and their events.  Floor 8. */
#include "pending.h"

#include <stdlib.h>

#include "debug.h"
#include "fence.h"

/* Events kept for each stream.  After a burst the rest is given back. */
#ifdef PYA_TEST_TINY
enum { PENDING_SPARE = 2 };
#else
enum { PENDING_SPARE = 256 };
#endif

__attribute__((noinline, cold)) void
pya_block_trace_release(const struct pya_block *block) {
    struct pya_arena *arena = block->arena;
    pya_history_add(
        arena->card->history, PYA_ACTION_FREE_COMPLETED, block->addr, block->requested,
        pya_arena_place(arena), NULL);
}

static struct pya_pending *
pending_queue(struct pya_card *card, pya_stream stream) {
    struct pya_pending *queue = card->pending;
    while (queue != NULL && queue->stream != stream) {
        queue = queue->next;
    }
    return queue;
}

pya_status
pya_pending_record(struct pya_card *card, struct pya_block *block, pya_stream stream) {
    if (block->arena->stream == stream) {
        pya_fence_hear(card, block->arena->fence);
        return PYA_OK;
    }
    for (const struct pya_use *use = block->uses; use != NULL; use = use->next) {
        if (use->queue->stream == stream) {
            pya_fence_hear(card, use->queue->fence);
            return PYA_OK;
        }
    }
    pya_status st = pya_slab_reserve(&card->uses, 1);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_pending *queue = pending_queue(card, stream);
    if (queue != NULL) {
        pya_fence_hear(card, queue->fence);
    } else {
        struct pya_fence *fence;
        st = pya_fences_add(card, stream, &fence);
        queue = st == PYA_OK ? calloc(1, sizeof *queue) : NULL;
        if (queue == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        queue->stream = stream;
        queue->fence = fence;
        queue->next = card->pending;
        card->pending = queue;
    }
    queue->fence->is_recorded = true;
    struct pya_use *use = pya_slab_take(&card->uses);
    *use = (struct pya_use){.next = block->uses, .block = block, .queue = queue};
    block->uses = use;
    return PYA_OK;
}

/* On failure the use stays without an event, which means "busy".  An event recorded on a captured stream becomes part
 * of the graph, and querying it ends the capture; this includes a capture that began since the stream was asked. */
static void
use_mark(struct pya_card *card, struct pya_use *use) {
    struct pya_pending *queue = use->queue;
    if (pya_fence_is_captured(card, queue->fence)) {
        return;
    }
    struct pya_use *spare = queue->spare;
    pya_event fresh = 0;
    pya_event *event = spare != NULL ? &spare->event : &fresh;
    if (pya_event_mark(card->dev, queue->stream, event) != PYA_OK ||
        pya_fence_is_captured(card, queue->fence)) {
        if (fresh != 0) {
            (void)!pya_device_event_destroy(card->dev, fresh);
        }
        return;
    }
    use->event = *event;
    if (!queue->fence->is_foreign) { /* a foreign stream is waited for instead, which costs */
        queue->n_failed = 0;
    }
    if (spare != NULL) {
        queue->spare = spare->next;
        queue->n_spare--;
        pya_slab_put(&card->uses, spare);
    }
}

/* Retires a use that is complete. */
static void
use_retire(struct pya_card *card, struct pya_use *use) {
    struct pya_pending *queue = use->queue;
    if (use->event != 0 && queue->n_spare < PENDING_SPARE) {
        use->next = queue->spare;
        queue->spare = use;
        queue->n_spare++;
        return;
    }
    if (use->event != 0) {
        (void)!pya_device_event_destroy(card->dev, use->event);
    }
    pya_slab_put(&card->uses, use);
}

void
pya_pending_free(struct pya_card *card, struct pya_block *block) {
    PYA_ASSERT(block->uses != NULL);
    block->is_pending = true;
    block->n_events = 0;
    pya_stats_park(&card->stats, block->is_small, block->bytes, block->requested, 1);
    pya_device_begin(card->dev);
    while (block->uses != NULL) {
        struct pya_use *use = block->uses;
        block->uses = use->next;
        use->next = NULL;
        block->n_events++;
        card->n_pending++;
        struct pya_pending *queue = use->queue;
        if (queue->head == NULL) {
            queue->head = use;
        } else {
            queue->tail->next = use;
        }
        queue->tail = use;
        if (card->n_active == 0) {
            use_mark(card, use);
        }
        if (use->event == 0 && queue->unmarked == NULL) {
            queue->unmarked = use;
        }
    }
    pya_device_end(card->dev);
}

void
pya_pending_resume(struct pya_card *card) {
    pya_device_begin(card->dev);
    for (struct pya_pending *queue = card->pending; queue != NULL; queue = queue->next) {
        if (queue->fence->is_foreign) {
            continue;
        }
        struct pya_use *use = queue->unmarked;
        queue->unmarked = NULL;
        for (; use != NULL; use = use->next) {
            PYA_STEP();
            if (use->event == 0) {
                use_mark(card, use);
            }
            if (use->event == 0 && queue->unmarked == NULL) {
                queue->unmarked = use;
            }
        }
    }
    pya_device_end(card->dev);
}

/* Releases a block that nothing uses any more.  The trace shows the context of the call that found it complete or, as
 * in torch, of the allocation. */
static void
pending_release(struct pya_card *card, struct pya_block *block) {
    const struct pya_context_owner *owner = &card->contexts;
    void *const context = block->context;
    void *const current = card->history == NULL ? NULL : card->history->current;
    if (context == NULL) {
        pya_block_release(block);
        return;
    }
    if (current != NULL) {
        owner->retain(owner->arg, current);
    }
    void *const here = pya_context_of_free(owner, current, context);
    pya_history_set_current(card->history, here);
    pya_block_release(block);
    pya_history_set_current(card->history, current);
    owner->release(owner->arg, here);
    owner->release(owner->arg, context);
}

static void
queue_pop(struct pya_card *card, struct pya_pending *queue) {
    struct pya_use *use = queue->head;
    struct pya_block *block = use->block;
    queue->head = use->next;
    queue->unmarked = queue->unmarked == use ? use->next : queue->unmarked;
    use_retire(card, use);
    card->n_pending--;
    if (--block->n_events == 0) {
        struct pya_ptrmap_slot slot;
        (void)pya_ptrmap_find(&card->live, block->addr, &slot);
        pya_ptrmap_remove_at(&card->live, slot);
        pending_release(card, block);
        card->stats.scalar[PYA_STAT_pyalloc_event_frees]++;
    }
}

static void
queue_drain(struct pya_card *card, struct pya_pending *queue) {
    while (queue->head != NULL) {
        queue_pop(card, queue);
    }
}

/* The stream was, or may have been, destroyed.  There can be no event, but all work ever queued on it has now been
 * waited for. */
static bool
queue_is_over(struct pya_card *card, const struct pya_pending *queue) {
    bool is_capturing;
    bool is_gone = queue->fence->is_foreign ||
                   pya_device_is_capturing(card->dev, queue->stream, &is_capturing) == PYA_E_STREAM;
    return is_gone && !pya_fences_are_capturing(card) &&
           pya_fence_sync(card, queue->fence, false) == PYA_OK;
}

/* Tries again to mark what could not be marked, ever more rarely: the reason may have passed, or the stream is gone
 * for good. */
static bool
head_is_marked(struct pya_card *card, struct pya_pending *queue) {
    if (queue->head->event != 0) {
        return true;
    }
    if (!pya_fence_is_due(++queue->n_failed)) {
        return false;
    }
    if (!queue->fence->is_foreign) {
        use_mark(card, queue->head);
    }
    if (queue->head->event != 0) {
        return true;
    }
    if (queue_is_over(card, queue)) {
        queue_drain(card, queue);
    }
    return false;
}

/* An event recorded while someone captured the stream by hand became part of the graph and never completes. */
static bool
head_is_done(struct pya_card *card, struct pya_pending *queue) {
    bool is_done = false;
    pya_status st = pya_device_event_query(card->dev, queue->head->event, &is_done);
    if (st == PYA_E_CAPTURE) {
        (void)!pya_device_event_destroy(card->dev, queue->head->event);
        queue->head->event = 0;
        queue->unmarked = queue->head;
    }
    return st == PYA_OK && is_done;
}

void
pya_pending_poll(struct pya_card *card) {
    card->stats.scalar[PYA_STAT_pyalloc_event_polls]++;
    pya_device_begin(card->dev);
    for (struct pya_pending *queue = card->pending; queue != NULL; queue = queue->next) {
        while (queue->head != NULL && head_is_marked(card, queue) && head_is_done(card, queue)) {
            queue_pop(card, queue);
        }
    }
    pya_device_end(card->dev);
}

bool
pya_pending_must_not_wait(struct pya_card *card) {
    if (!pya_fences_are_capturing(card)) {
        return false;
    }
    for (struct pya_pending *queue = card->pending; queue != NULL; queue = queue->next) {
        if (queue->unmarked != NULL) {
            pya_fence_ask_again(card, queue->fence);
        }
    }
    return pya_fences_are_capturing(card);
}

/* The last event covers everything queued, whichever device the stream is on, unless it became part of a graph.
 * Without an event: a destroyed stream never answers again, and a foreign one may be destroyed. */
static pya_status
queue_wait(struct pya_card *card, const struct pya_pending *queue) {
    pya_status st = PYA_E_CAPTURE;
    if (queue->tail->event != 0) {
        st = pya_device_event_sync(card->dev, queue->tail->event);
    }
    if (st == PYA_E_CAPTURE) {
        st = queue->fence->is_foreign ? PYA_E_STREAM
                                      : pya_device_stream_sync(card->dev, queue->stream);
    }
    return st == PYA_E_DEVICE || st == PYA_E_STREAM ? pya_fence_sync(card, queue->fence, true) : st;
}

pya_status
pya_pending_sync(struct pya_card *card) {
    pya_status result = PYA_OK;
    for (struct pya_pending *queue = card->pending; queue != NULL; queue = queue->next) {
        pya_status st = queue->head == NULL ? PYA_OK : queue_wait(card, queue);
        if (st == PYA_OK) {
            queue_drain(card, queue);
        }
        if (st != PYA_OK && (st != PYA_E_CAPTURE || result == PYA_OK)) {
            result = st; /* a capture ends; other failures may not */
        }
    }
    pya_card_unpark(card);
    return result;
}

static void
uses_forget(struct pya_card *card, const struct pya_use *use) {
    for (; use != NULL; use = use->next) {
        if (use->event != 0) {
            (void)!pya_device_event_destroy(card->dev, use->event);
        }
    }
}

void
pya_pending_fini(struct pya_card *card) {
    while (card->pending != NULL) {
        struct pya_pending *queue = card->pending;
        card->pending = queue->next;
        uses_forget(card, queue->head);
        uses_forget(card, queue->spare);
        free(queue);
    }
}
