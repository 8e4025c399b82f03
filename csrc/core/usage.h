/* Recent use: the largest live totals of the last windows, and the cost of giving memory back.  Floor 2.
 *
 * Memory above the largest live total of a window was not needed in it.  The request path keeps only one running
 * maximum; windows are advanced where something slow happens anyway. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The current window and the one before it. */
struct pya_window {
    size_t peak[2]; /* largest live bytes in each */
    uint64_t began; /* start of the current one, in requests or nanoseconds */
};

struct pya_usage {
    size_t recent_peak; /* largest live bytes since usage was last examined */
    struct pya_window by_requests;
    struct pya_window by_time;
    uint64_t last_call_ns;  /* latest request seen by the clock; 0: none yet */
    uint64_t wait;          /* length of a window, and distance of two collections, in requests */
    uint64_t collected_at;  /* requests at the last collection; 0: never */
    size_t collected_pages; /* given back by it */
    size_t owed_pages;      /* of those: not created again since */
    uint64_t recovery_at;   /* requests when a shortage was last examined again */
    size_t level_bytes;     /* reserved bytes should stay below this; SIZE_MAX: no level */
};

/* Folds the running maximum into both windows.  live: bytes live now. */
static inline void
pya_usage_fold(struct pya_usage *usage, size_t live) {
    struct pya_window *const windows[] = {&usage->by_requests, &usage->by_time};
    for (int i = 0; i < 2; i++) {
        size_t *peak = &windows[i]->peak[0];
        *peak = usage->recent_peak > *peak ? usage->recent_peak : *peak;
    }
    usage->recent_peak = live;
}

/* Starts a new window if the current one is at least `length` old.  True: it did. */
static inline bool
pya_window_roll(struct pya_window *window, uint64_t now, uint64_t length, size_t live) {
    if (now < window->began) { /* a clock that was set back */
        window->began = now;
    }
    if (now - window->began < length) {
        return false;
    }
    window->peak[1] = window->peak[0];
    window->peak[0] = live;
    window->began = now;
    return true;
}

static inline size_t
pya_window_peak(const struct pya_window *window) {
    return window->peak[0] > window->peak[1] ? window->peak[0] : window->peak[1];
}

#ifdef __cplusplus
}
#endif
