/* The events of a few ranges, returned one by one, each with the block it is about. */
#include "scan_internal.h"

/* Is the current event in one of the ranges?  Advances past ranges that have ended. */
static bool
is_in_range(struct pya_scan *s) {
    const struct pya_scan_settings *settings = s->settings;
    while (s->next_range < settings->n_ranges &&
           settings->ranges[s->next_range].end <= s->totals.n_events) {
        s->next_range++;
    }
    return s->next_range < settings->n_ranges &&
           settings->ranges[s->next_range].begin <= s->totals.n_events;
}

bool
scan_told_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (!is_in_range(s) || scan_is_module(s, e)) {
        return true;
    }
    struct pya_scan_told *told = SCAN_ADD(s->told, struct pya_scan_told);
    if (told == NULL) {
        return false;
    }
    *told = (struct pya_scan_told){
        .kind = e->kind,
        .device = e->device,
        .event = s->totals.n_events,
        .time_ns = e->time_ns,
        .addr = e->addr,
        .bytes = e->bytes,
        .arg = e->arg,
        .stream = e->stream,
        .stack = e->stack,
        .text = e->text,
        .alloc_event = PYA_SCAN_NEVER,
    };
    if (e->kind == PYA_TRACE_ALLOC || e->kind == PYA_TRACE_SEGMENT_ALLOC ||
        e->kind == PYA_TRACE_SEGMENT_MAP) {
        told->pool = s->routed[e->device];
    }
    if (e->kind == PYA_TRACE_ALLOC) {
        told->alloc_event = s->totals.n_events;
        return true;
    }
    const struct pya_scan_block *block = scan_block_at(s, e);
    if (block != NULL) {
        told->alloc_event = block->alloc_event;
        told->bytes = block->bytes;
        told->pool = block->pool;
        told->stack = e->stack != 0 ? e->stack : block->stack;
    }
    return true;
}
