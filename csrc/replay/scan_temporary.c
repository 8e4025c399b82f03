/* Blocks that are freed soon, and the peak of each device without them.
 *
 * Only at its end do we know that a block was temporary.  So we keep the latest short_life requests, each with what was
 * allocated after it and how much of that has turned out to be temporary.  After short_life further requests that can no
 * longer change. It is enough to look at requests, since what lasts is at its maximum right after one. */
#include "scan_internal.h"

#include <stdlib.h>

static struct scan_point *
point_of(const struct pya_scan *s, int device, uint64_t request) {
    return &s->points[device][request % s->settings->short_life];
}

static void
point_settle(struct pya_scan *s, int device, uint64_t request) {
    const struct scan_point *point = point_of(s, device, request);
    uint64_t *most = &s->totals.device_peak_lasting[device];
    const uint64_t lasting = point->bytes - point->temporary;
    *most = lasting > *most ? lasting : *most;
}

bool
scan_temporary_ask(struct pya_scan *s, int device) {
    const uint64_t n = s->settings->short_life;
    const uint64_t request = s->n_requests[device] - 1;
    if (s->points[device] == NULL) {
        s->points[device] = calloc(n, sizeof(struct scan_point));
        if (s->points[device] == NULL) {
            return false;
        }
    }
    if (request >= n) {
        point_settle(s, device, request - n);
    }
    *point_of(s, device, request) = (struct scan_point){.bytes = s->allocated_of[device]};
    return true;
}

void
scan_temporary_end(struct pya_scan *s, const struct scan_live *live, uint64_t bytes) {
    const int device = live->row.device;
    for (uint64_t i = live->request; i < s->n_requests[device]; i++) {
        point_of(s, device, i)->temporary += bytes;
    }
}

void
scan_temporary_settle(struct pya_scan *s) {
    const uint64_t n = s->settings->short_life;
    for (int device = 0; device < PYA_MAX_DEVICES; device++) {
        const uint64_t end = s->points[device] == NULL ? 0 : s->n_requests[device];
        for (uint64_t i = end > n ? end - n : 0; i < end; i++) {
            point_settle(s, device, i);
        }
    }
}
