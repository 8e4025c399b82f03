/* What reserved memory grew for: each piece of device memory, the request it was reserved for, and how long it stayed reserved.
 * Unlike in segments, pages mapped for several requests are separate pieces. */
#include "scan_internal.h"

#include <string.h>

static struct pya_scan_growth *
held_at(const struct pya_scan *s, size_t at) {
    return SCAN_ITEM(s->held, struct pya_scan_growth, at);
}

/* Index of the first held piece that ends after addr. */
static size_t
held_search(const struct pya_scan *s, uint64_t addr, int device) {
    size_t low = 0;
    size_t high = s->held.n;
    while (low < high) {
        const size_t mid = (low + high) / 2;
        const struct pya_scan_growth *g = held_at(s, mid);
        if (g->device < device || (g->device == device && g->addr + g->bytes <= addr)) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

static bool
held_insert(struct pya_scan *s, size_t at, struct pya_scan_growth piece) {
    struct pya_scan_growth *g = SCAN_INSERT(s->held, struct pya_scan_growth, at);
    if (g != NULL) {
        *g = piece;
    }
    return g != NULL;
}

static void
held_drop(struct pya_scan *s, size_t at) {
    scan_list_drop(&s->held, sizeof(struct pya_scan_growth), at);
}

static bool
growth_end(struct pya_scan *s, struct pya_scan_growth piece, uint64_t end) {
    if (s->growths.n == PYA_SCAN_SPANS) {
        scan_list_thin(
            &s->growths, sizeof(struct pya_scan_growth), offsetof(struct pya_scan_growth, bytes),
            &s->growth_bytes);
    }
    if (piece.bytes < s->growth_bytes) {
        return true;
    }
    struct pya_scan_growth *g = SCAN_ADD(s->growths, struct pya_scan_growth);
    if (g == NULL) {
        return false;
    }
    *g = piece;
    g->end = end;
    return true;
}

/* Were both mapped for the same request, and are they adjacent? */
static bool
are_one(const struct pya_scan_growth *a, const struct pya_scan_growth *b) {
    return a->is_mapped && b->is_mapped && a->device == b->device && a->stack == b->stack &&
           a->n_allocs == b->n_allocs && a->addr + a->bytes == b->addr;
}

bool
scan_growth_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (!scan_growth_remove(s, e)) {
        return false;
    }
    size_t at = held_search(s, e->addr, e->device);
    const struct pya_scan_growth piece = {
        .addr = e->addr,
        .bytes = e->bytes,
        .begin = s->totals.n_events,
        .n_allocs = s->totals.n_allocs,
        .stack = e->stack,
        .is_known = e->stack != 0,
        .device = e->device,
        .is_mapped = e->kind == PYA_TRACE_SEGMENT_MAP,
    };
    if (!held_insert(s, at, piece)) {
        return false;
    }
    s->is_asking[e->device] = true;
    /* A merged piece begins with its last page: only from then on all of it was reserved. */
    if (at + 1 < s->held.n && are_one(held_at(s, at), held_at(s, at + 1))) {
        held_at(s, at)->bytes += held_at(s, at + 1)->bytes;
        held_drop(s, at + 1);
    }
    if (at > 0 && are_one(held_at(s, at - 1), held_at(s, at))) {
        held_at(s, at - 1)->bytes += held_at(s, at)->bytes;
        held_at(s, at - 1)->begin = piece.begin;
        held_drop(s, at);
    }
    return true;
}

bool
scan_growth_remove(struct pya_scan *s, const struct pya_trace_event *e) {
    const uint64_t end = e->addr + e->bytes;
    size_t at = held_search(s, e->addr, e->device);
    while (at < s->held.n) {
        const struct pya_scan_growth old = *held_at(s, at);
        if (old.device != e->device || old.addr >= end) {
            break;
        }
        struct pya_scan_growth gone = old;
        gone.addr = old.addr > e->addr ? old.addr : e->addr;
        const uint64_t to = old.addr + old.bytes < end ? old.addr + old.bytes : end;
        gone.bytes = to - gone.addr;
        if (!growth_end(s, gone, s->totals.n_events)) {
            return false;
        }
        struct pya_scan_growth rest = old;
        rest.addr = to;
        rest.bytes = old.addr + old.bytes - to;
        if (gone.addr > old.addr) {
            held_at(s, at)->bytes = gone.addr - old.addr;
            at++;
            if (rest.bytes > 0) {
                return held_insert(s, at, rest);
            }
        } else if (rest.bytes > 0) {
            *held_at(s, at) = rest;
            return true;
        } else {
            held_drop(s, at);
        }
    }
    return true;
}

void
scan_growth_ask(struct pya_scan *s, const struct pya_trace_event *e) {
    if (!s->is_asking[e->device] || s->is_state) {
        return;
    }
    s->is_asking[e->device] = false;
    for (size_t i = 0; i < s->held.n; i++) {
        struct pya_scan_growth *g = held_at(s, i);
        if (g->device == e->device && !g->is_asked) {
            g->is_asked = g->is_known = true;
            g->stack = g->stack != 0 ? g->stack : e->stack;
            g->phase = scan_current_phase(s);
        }
    }
}

void
scan_growth_forget(struct pya_scan *s) {
    memset(s->is_asking, 0, sizeof s->is_asking);
    for (size_t i = 0; i < s->held.n; i++) {
        held_at(s, i)->is_asked = true;
        held_at(s, i)->is_known = held_at(s, i)->stack != 0;
        held_at(s, i)->phase = 0;
    }
}

bool
scan_growths_end(struct pya_scan *s) {
    for (size_t i = 0; i < s->held.n; i++) {
        if (!growth_end(s, *held_at(s, i), PYA_SCAN_NEVER)) {
            return false;
        }
    }
    return true;
}
