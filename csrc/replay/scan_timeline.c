/* The timeline: bins of events.  Whenever there are twice as many as requested, neighbours are merged in pairs. */
#include "scan_internal.h"

static void
bins_halve(struct pya_scan *s) {
    struct pya_scan_bin *bins = s->bins.items;
    size_t n = s->bins.n / 2;
    for (size_t i = 0; i < n; i++) {
        struct pya_scan_bin a = bins[2 * i];
        const struct pya_scan_bin *b = &bins[2 * i + 1];
        a.max_bytes = a.max_bytes > b->max_bytes ? a.max_bytes : b->max_bytes;
        a.min_bytes = a.min_bytes < b->min_bytes ? a.min_bytes : b->min_bytes;
        a.reserved_bytes =
            a.reserved_bytes > b->reserved_bytes ? a.reserved_bytes : b->reserved_bytes;
        a.last_bytes = b->last_bytes;
        a.max_event = bins[2 * i].max_bytes < b->max_bytes ? b->max_event : a.max_event;
        bins[i] = a;
    }
    s->bins.n = n;
    s->events_per_bin *= 2;
}

bool
scan_timeline_add(struct pya_scan *s, const struct pya_trace_event *e) {
    const struct pya_scan_settings *settings = s->settings;
    if (s->totals.n_events < settings->window_begin ||
        (settings->window_end > 0 && s->totals.n_events >= settings->window_end)) {
        return true;
    }
    const uint64_t number = s->totals.n_events - settings->window_begin;
    if (number % s->events_per_bin == 0) {
        if (s->bins.n == 2 * settings->n_bins) {
            bins_halve(s);
        }
        struct pya_scan_bin *bin = SCAN_ADD(s->bins, struct pya_scan_bin);
        if (bin == NULL) {
            return false;
        }
        *bin = (struct pya_scan_bin){
            .event = s->totals.n_events,
            .time_ns = e->time_ns,
            .min_bytes = s->allocated,
            .max_event = s->totals.n_events + 1,
            .phase = scan_current_phase(s),
            .step = s->step,
        };
    }
    struct pya_scan_bin *bin = SCAN_ITEM(s->bins, struct pya_scan_bin, s->bins.n - 1);
    if (s->allocated > bin->max_bytes) {
        bin->max_bytes = s->allocated;
        bin->max_event = s->totals.n_events + 1;
    }
    bin->min_bytes = bin->min_bytes < s->allocated ? bin->min_bytes : s->allocated;
    bin->reserved_bytes = bin->reserved_bytes > s->reserved ? bin->reserved_bytes : s->reserved;
    bin->last_bytes = s->allocated;
    return true;
}
