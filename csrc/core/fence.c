/* Fences.  Floor 5. */
#include "fence.h"

#include <stdlib.h>

pya_status
pya_fences_add(struct pya_card *card, pya_stream stream) {
    struct pya_fence *fence = card->fences;
    while (fence != NULL && fence->stream != stream) {
        fence = fence->next;
    }
    if (fence != NULL) {
        return PYA_OK;
    }
    fence = calloc(1, sizeof *fence);
    if (fence == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    fence->stream = stream;
    fence->next = card->fences;
    card->fences = fence;
    return PYA_OK;
}

bool
pya_fences_are_capturing(struct pya_card *card) {
    for (const struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        bool is_capturing = false;
        pya_status st = pya_device_is_capturing(card->dev, fence->stream, &is_capturing);
        if ((st != PYA_OK && st != PYA_E_DEVICE) || is_capturing) {
            return true;
        }
    }
    return false;
}

/* False: nothing is known of the stream. */
static bool
fence_record(struct pya_card *card, struct pya_fence *fence) {
    bool is_capturing = false;
    pya_status st = pya_device_is_capturing(card->dev, fence->stream, &is_capturing);
    if (st == PYA_E_CAPTURE || is_capturing) {
        return false; /* it would become part of the graph, or end the capture */
    }
    if (fence->event == 0 && pya_device_event_create(card->dev, &fence->event) != PYA_OK) {
        return false;
    }
    st = pya_device_event_record(card->dev, fence->event, fence->stream);
    if (st == PYA_OK) {
        fence->is_open = true;
        fence->n_failed = 0;
        return true;
    }
    if (st == PYA_E_CAPTURE) {
        return false;
    }
    /* All work is waited for instead, ever more rarely: a destroyed stream never answers again. */
    uint64_t n = ++fence->n_failed;
    return (n & (n - 1)) == 0 && pya_device_sync(card->dev) == PYA_OK;
}

bool
pya_fences_record(struct pya_card *card) {
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        if (!fence_record(card, fence)) {
            for (struct pya_fence *f = card->fences; f != fence; f = f->next) {
                f->is_open = false;
            }
            return false;
        }
    }
    return true;
}

size_t
pya_fences_n_open(struct pya_card *card, struct pya_fence **last) {
    size_t n_open = 0;
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        bool is_done = false;
        fence->is_open =
            fence->is_open &&
            (pya_device_event_query(card->dev, fence->event, &is_done) != PYA_OK || !is_done);
        if (fence->is_open) {
            n_open++;
            *last = fence;
        }
    }
    return n_open;
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
