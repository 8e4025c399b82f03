/* Fences.  Floor 5. */
#include "fence.h"

#include <stdlib.h>

/* How long a foreign stream that was capturing when last asked is assumed to capture: the end may never be noticed. */
#define FENCE_CAPTURE_NS (UINT64_C(10) * 1000 * 1000 * 1000)
/* An announced capture begins within this time, or has failed to. */
#define FENCE_ANNOUNCED_NS (UINT64_C(1) * 1000 * 1000 * 1000)
/* Limits the waits, because other threads may free memory all the time. */
enum { FENCE_WAITS_MOST = 3 };
/* A thread whose capture grows its pool holds its card's lock for a few device calls.  Only a thread that waits for a
 * device holds it for a second, and then nothing captures. */
enum { FENCE_NAPS = 10000 };

static struct pya_fence *
fence_find(const struct pya_card *card, pya_stream stream) {
    struct pya_fence *fence = card->fences;
    while (fence != NULL && fence->stream != stream) {
        fence = fence->next;
    }
    return fence;
}

pya_status
pya_fences_add(struct pya_card *card, pya_stream stream, struct pya_fence **out) {
    struct pya_fence *fence = fence_find(card, stream);
    if (fence == NULL) {
        fence = calloc(1, sizeof *fence);
        if (fence == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        fence->stream = stream;
        fence->is_gone = true; /* replaced by the next line */
        fence->next = card->fences;
        card->fences = fence;
    }
    pya_fence_hear(card, fence);
    *out = fence;
    return PYA_OK;
}

/* May a graph capture be in progress on the device of another card?  That card's lock is not waited for, because its
 * holder may be trying the caller's lock for the same purpose. */
static bool
other_may_capture(struct pya_card *other, bool insists) {
    if (!pya_lock_try_for(&other->lock, insists ? FENCE_NAPS : 0)) {
        return !insists;
    }
    const bool is_capturing = pya_fences_are_capturing(other);
    pya_lock_release(&other->lock);
    return is_capturing;
}

/* The stream's device, if that is known: of foreign streams, and of default ones; else -1. */
static int
fence_device(const struct pya_fence *fence) {
    return fence->is_foreign ? fence->device : pya_stream_device(fence->stream);
}

/* The card of the stream's device; NULL: it could not be opened, when the stream was noted or since. */
static struct pya_card *
fence_card(const struct pya_card *card, const struct pya_fence *fence) {
    const int device = fence_device(fence);
    return device >= 0 && device < PYA_MAX_DEVICES ? pya_cards_get(card->cards, device) : NULL;
}

static pya_status
fence_sync_other(const struct pya_card *card, const struct pya_fence *fence, bool insists) {
    const int device = fence_device(fence);
    if (device == card->index || (!fence->is_foreign && device < 0)) {
        return PYA_OK;
    }
    struct pya_card *other = fence_card(card, fence);
    if (other == NULL) {
        return PYA_E_BUSY;
    }
    return other_may_capture(other, insists) ? PYA_E_CAPTURE : pya_device_sync(other->dev);
}

pya_status
pya_fence_sync(struct pya_card *card, const struct pya_fence *fence, bool insists) {
    pya_status st = fence_sync_other(card, fence, insists);
    return st == PYA_OK ? pya_device_sync(card->dev) : st;
}

/* May the stream be one of another device, which a wait for the card's own does not cover? */
static bool
fence_may_be_abroad(const struct pya_card *card, const struct pya_fence *fence) {
    return !fence->is_gone && !fence->is_leaving &&
           (fence->is_foreign ? fence->device != card->index : fence->is_recorded);
}

struct pya_fence *
pya_fences_foreign(const struct pya_card *card) {
    struct pya_fence *fence = card->fences;
    while (fence != NULL && (!fence->is_foreign || fence->is_gone)) {
        fence = fence->next;
    }
    return fence;
}

void
pya_fence_bury(struct pya_card *card, struct pya_fence *fence) {
    fence->is_gone = true;
    card->n_fences--;
    card->last_arena = NULL; /* it may belong to that stream, whose next request must be noticed */
}

/* Is a foreign stream capturing, as seen in a request or a free?  This covers captures begun by hand. */
static bool
fence_remembers(const struct pya_card *card, const struct pya_fence *fence) {
    return fence->was_capturing &&
           pya_device_clock_ns(card->dev) - fence->captured_at < FENCE_CAPTURE_NS;
}

/* Also covers torch's captures, which route requests to a pool, and a stream that joined a capture begun on another
 * one. */
static bool
fence_may_capture(const struct pya_card *card, const struct pya_fence *fence) {
    if (fence->is_gone) {
        return false;
    }
    if (fence_remembers(card, fence)) {
        return true;
    }
    const struct pya_pool *pool = card->pools;
    while (pool != NULL && !(pool->is_active && pool->filter.began_on == fence->stream)) {
        pool = pool->next;
    }
    return pool != NULL;
}

/* Is the stream capturing, as far as is known? */
static bool
fence_is_capturing(const struct pya_card *card, const struct pya_fence *fence) {
    bool is_capturing = false;
    if (fence->is_foreign) {
        return fence_may_capture(card, fence);
    }
    pya_status st = fence->is_gone
                        ? PYA_E_STREAM
                        : pya_device_is_capturing(card->dev, fence->stream, &is_capturing);
    return (st != PYA_OK && st != PYA_E_DEVICE && st != PYA_E_STREAM) || is_capturing;
}

static void
fence_note_capture(const struct pya_card *card, struct pya_fence *fence) {
    fence->was_capturing = true;
    fence->captured_at = pya_device_clock_ns(card->dev);
}

bool
pya_fences_note_foreign(struct pya_card *card, pya_stream stream, int device, pya_stream origin) {
    struct pya_fence *fence = fence_find(card, stream);
    if (fence == NULL || fence->is_gone) {
        return false;
    }
    bool is_capturing = false;
    (void)!pya_device_is_capturing(card->dev, stream, &is_capturing);
    const struct pya_fence *from = origin == stream ? NULL : fence_find(card, origin);
    fence->is_foreign = true;
    fence->device = device;
    fence->was_capturing = false;
    if (is_capturing && (from == NULL || !fence_is_capturing(card, from))) {
        fence_note_capture(card, fence);
    }
    return true;
}

bool
pya_fence_is_captured(struct pya_card *card, struct pya_fence *fence) {
    bool is_capturing = false;
    pya_status st = pya_device_is_capturing(card->dev, fence->stream, &is_capturing);
    is_capturing = is_capturing || st == PYA_E_CAPTURE;
    if (is_capturing && fence->is_foreign) {
        card->n_fences += fence->is_gone; /* it is not */
        fence->is_gone = false;
        fence_note_capture(card, fence);
    }
    return is_capturing;
}

void
pya_fence_ask_again(struct pya_card *card, struct pya_fence *fence) {
    if (fence->is_foreign && !fence->is_gone && fence_remembers(card, fence)) {
        fence->was_capturing = pya_fence_is_captured(card, fence);
    }
}

/* Was a capture announced that may not have begun yet? */
static bool
fences_are_warned(const struct pya_card *card) {
    const struct pya_pool *pool = card->n_active == 0 ? NULL : card->pools;
    while (pool != NULL &&
           !(pool->is_active && pool->is_announced &&
             pya_device_clock_ns(card->dev) - pool->began_at < FENCE_ANNOUNCED_NS)) {
        pool = pool->next;
    }
    return pool != NULL;
}

bool
pya_fences_are_capturing(struct pya_card *card) {
    const struct pya_fence *fence = card->fences;
    while (fence != NULL && !fence_is_capturing(card, fence)) {
        fence = fence->next;
    }
    return fence != NULL || fences_are_warned(card);
}

/* Records an event on the stream.  PYA_E_STREAM: the stream does not exist any more. */
static pya_status
fence_mark(struct pya_card *card, struct pya_fence *fence, pya_event *event) {
    bool is_capturing = false;
    pya_status st = pya_device_is_capturing(card->dev, fence->stream, &is_capturing);
    if (st == PYA_E_STREAM) {
        return st;
    }
    if (st == PYA_E_CAPTURE || is_capturing) {
        return PYA_E_CAPTURE; /* the record would become part of the graph, or end the capture */
    }
    st = pya_event_mark(card->dev, fence->stream, event);
    /* A capture may have begun meanwhile: querying an event that became part of the graph would end it. */
    return st == PYA_OK && pya_fence_is_captured(card, fence) ? PYA_E_CAPTURE : st;
}

/* Waits for the work that a stream has now.  An event is waited for, because that harms no capture that begins
 * meanwhile.  A destroyed stream, of which nothing tells any more, belonged to the card's device as far as is known. */
static pya_status
fence_wait_event(struct pya_card *card, struct pya_fence *fence, bool unlocks) {
    pya_event event = 0;
    pya_status st = fence_mark(card, fence, &event);
    if (st == PYA_OK) {
        if (unlocks) {
            pya_lock_release(&card->lock);
        }
        st = pya_device_event_sync(card->dev, event);
        if (unlocks) {
            pya_lock_acquire(&card->lock);
        }
    } else if (st == PYA_E_STREAM || st == PYA_E_DEVICE) {
        st = PYA_OK;
    }
    if (event != 0) {
        (void)!pya_device_event_destroy(card->dev, event);
    }
    return st;
}

pya_status
pya_fences_sync(struct pya_card *card, bool insists) {
    pya_status st = PYA_OK;
    for (struct pya_fence *fence = card->fences; fence != NULL && st == PYA_OK;
         fence = fence->next) {
        if (fence_may_be_abroad(card, fence)) {
            st = fence->is_foreign ? fence_sync_other(card, fence, insists)
                                   : fence_wait_event(card, fence, false);
        }
    }
    return st == PYA_OK ? pya_device_sync(card->dev) : st;
}

/* Waits for the card's device.  The lock is released meanwhile. */
static pya_status
card_wait(struct pya_card *card) {
    if (pya_fences_are_capturing(card)) {
        return PYA_E_CAPTURE;
    }
    if (card->n_waiting++ == 0) {
        pya_lock_acquire(&card->gate);
    }
    pya_lock_release(&card->lock);
    pya_status st = pya_device_sync(card->dev);
    pya_lock_acquire(&card->lock);
    if (--card->n_waiting == 0) {
        pya_lock_release(&card->gate);
    }
    return st;
}

/* Waits for the device of a foreign stream.  The lock is released meanwhile, and the other card's is waited for. */
static pya_status
fence_wait_other(struct pya_card *card, const struct pya_fence *fence) {
    struct pya_card *other = fence_card(card, fence);
    if (other == NULL) {
        return PYA_E_BUSY;
    }
    pya_lock_release(&card->lock);
    pya_lock_acquire(&other->lock);
    pya_status st = card_wait(other);
    pya_lock_release(&other->lock);
    pya_lock_acquire(&card->lock);
    return st;
}

/* Waits for the device and for known streams of others.  The lock is released meanwhile. */
static pya_status
fences_wait(struct pya_card *card) {
    pya_status st = pya_fences_are_capturing(card) ? PYA_E_CAPTURE : PYA_OK;
    for (struct pya_fence *fence = card->fences; fence != NULL && st == PYA_OK;
         fence = fence->next) {
        if (fence_may_be_abroad(card, fence)) {
            st = fence->is_foreign ? fence_wait_other(card, fence)
                                   : fence_wait_event(card, fence, true);
        }
    }
    return st == PYA_OK ? card_wait(card) : st;
}

pya_status
pya_fences_wait_unlocked(struct pya_card *card) {
    pya_lock_acquire(&card->lock);
    pya_status st = fences_wait(card);
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_fences_wait_meanwhile(struct pya_card *card, bool *is_idle) {
    void *current = card->history == NULL ? NULL : card->history->current;
    pya_status st = PYA_OK;
    *is_idle = false;
    for (int i = 0; i < FENCE_WAITS_MOST && st == PYA_OK && !*is_idle; i++) {
        const uint64_t n_given = pya_card_n_given(card);
        pya_history_set_current(card->history, NULL);
        st = fences_wait(card);
        pya_history_set_current(card->history, current);
        *is_idle = st == PYA_OK && pya_card_n_given(card) == n_given;
    }
    pya_status reserved = pya_ptrmap_reserve(&card->live);
    if (reserved != PYA_OK) {
        return reserved;
    }
    return st == PYA_OK && pya_fences_are_capturing(card) ? PYA_E_CAPTURE : st;
}

void
pya_fences_pass(struct pya_card *card) {
    while (card->n_waiting > 0) {
        pya_lock_release(&card->lock);
        pya_lock_acquire(&card->gate);
        pya_lock_release(&card->gate);
        pya_lock_acquire(&card->lock);
    }
}

pya_status
pya_event_mark(struct pya_device *dev, pya_stream stream, pya_event *event) {
    if (*event != 0) {
        pya_status st = pya_device_event_record(dev, *event, stream);
        if (st != PYA_E_DEVICE) {
            return st;
        }
        (void)!pya_device_event_destroy(dev, *event);
        *event = 0;
    }
    pya_status st = pya_device_event_create(dev, stream, event);
    return st == PYA_OK ? pya_device_event_record(dev, *event, stream) : st;
}

/* No event tells how far the stream is, so it is waited for, together with all others if it cannot be waited for
 * alone; ever more rarely. */
static pya_status
fence_wait(struct pya_card *card, struct pya_fence *fence) {
    if (!pya_fence_is_due(++fence->n_failed)) {
        return PYA_E_BUSY;
    }
    pya_status st = pya_device_stream_sync(card->dev, fence->stream);
    return st == PYA_E_DEVICE ? pya_device_sync(card->dev) : st;
}

/* PYA_E_STREAM: the stream does not exist any more.  Any other failure: nothing is known. */
static pya_status
fence_record(struct pya_card *card, struct pya_fence *fence) {
    pya_status st = fence_mark(card, fence, &fence->event);
    if (st == PYA_E_CAPTURE || st == PYA_E_STREAM) {
        return st;
    }
    fence->is_open = st == PYA_OK;
    if (st == PYA_OK) {
        fence->n_failed = 0;
        return PYA_OK;
    }
    return fence_wait(card, fence);
}

static bool
fences_fail(struct pya_card *card) {
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        fence->is_open = false;
    }
    return false;
}

/* The work of a destroyed stream continues.  Once all work was waited for, there is nothing left to ask about the
 * stream. */
static bool
fences_bury(struct pya_card *card) {
    bool is_due = false;
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        fence->n_failed += fence->is_leaving;
        is_due = is_due || (fence->is_leaving && pya_fence_is_due(fence->n_failed));
    }
    bool is_done = is_due && pya_fences_sync(card, false) == PYA_OK;
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        if (fence->is_leaving && is_done) {
            pya_fence_bury(card, fence);
        }
        fence->is_leaving = false;
    }
    return is_done;
}

bool
pya_fences_record(struct pya_card *card, bool *waited) {
    size_t n_leaving = 0;
    bool waits = *waited;
    *waited = false;
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        bool is_asked = !fence->is_gone && !fence->is_foreign;
        pya_status st = is_asked ? fence_record(card, fence) : PYA_OK;
        if (fence->is_foreign && fence_may_capture(card, fence)) {
            st = PYA_E_CAPTURE;
        }
        fence->is_leaving = st == PYA_E_STREAM;
        n_leaving += fence->is_leaving;
        if (st != PYA_OK && st != PYA_E_STREAM) {
            return fences_fail(card);
        }
    }
    /* One wait serves all of them, because each was destroyed before it. */
    if (n_leaving > 0 || waits) {
        *waited = n_leaving > 0 ? fences_bury(card) : pya_fences_sync(card, false) == PYA_OK;
    }
    return *waited || n_leaving == 0 || fences_fail(card);
}

bool
pya_fences_n_open(struct pya_card *card, size_t *n_open, struct pya_fence **last) {
    *n_open = 0;
    for (struct pya_fence *fence = card->fences; fence != NULL && *n_open < 2;
         fence = fence->next) {
        if (!fence->is_open) {
            continue;
        }
        bool is_done = false;
        pya_status st = pya_device_event_query(card->dev, fence->event, &is_done);
        /* An event that is part of a graph tells nothing until it is recorded again. */
        if (st == PYA_E_CAPTURE) {
            return fences_fail(card);
        }
        fence->is_open = st != PYA_OK || !is_done;
        if (fence->is_open) {
            ++*n_open;
            *last = fence;
        }
    }
    return true;
}

void
pya_fences_fini(struct pya_card *card) {
    while (card->fences != NULL) {
        struct pya_fence *fence = card->fences;
        card->fences = fence->next;
        if (fence->event != 0) {
            (void)!pya_device_event_destroy(card->dev, fence->event);
        }
        free(fence);
    }
}
