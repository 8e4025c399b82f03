/* Device memory, as segments sorted by device and address. */
#include "scan_internal.h"

/* Index of the first segment that ends after addr. */
static size_t
segment_search(const struct pya_scan *s, uint64_t addr, int device) {
    size_t low = 0;
    size_t high = s->segments.n;
    while (low < high) {
        size_t mid = (low + high) / 2;
        const struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, mid);
        if (g->device < device || (g->device == device && g->addr + g->bytes <= addr)) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

static bool
segment_insert(struct pya_scan *s, size_t at, struct pya_scan_segment segment) {
    struct pya_scan_segment *item = SCAN_INSERT(s->segments, struct pya_scan_segment, at);
    if (item != NULL) {
        *item = segment;
    }
    return item != NULL;
}

static void
segment_drop(struct pya_scan *s, size_t at) {
    scan_list_drop(&s->segments, sizeof(struct pya_scan_segment), at);
}

/* Is the segment at index `at` mapped, and does it start at `end`? */
static bool
segment_follows(const struct pya_scan *s, size_t at, uint64_t end, int device) {
    if (at >= s->segments.n) {
        return false;
    }
    const struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    return g->is_mapped && g->device == device && g->addr == end;
}

static void
segment_count(struct pya_scan *s, const struct pya_trace_event *e) {
    uint64_t *own = &s->reserved_of[e->device];
    uint64_t *peak = &s->totals.device_peak_reserved[e->device];
    s->reserved += e->bytes;
    *own += e->bytes;
    *peak = *own > *peak ? *own : *peak;
}

/* Adjacent mappings are merged. */
bool
scan_segment_add(struct pya_scan *s, const struct pya_trace_event *e) {
    /* What we still have there was returned without an event. */
    if (!scan_segment_remove(s, e)) {
        return false;
    }
    segment_count(s, e);
    const size_t at = segment_search(s, e->addr, e->device);
    struct pya_scan_segment segment = {
        .addr = e->addr,
        .bytes = e->bytes,
        .stream = e->stream,
        .device = e->device,
        .is_mapped = e->kind == PYA_TRACE_SEGMENT_MAP,
    };
    if (!segment.is_mapped) {
        segment.stack = e->stack;
        return segment_insert(s, at, segment);
    }
    if (s->segments.n == 0) {
        return segment_insert(s, at, segment);
    }
    struct pya_scan_segment *next = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    const bool joins_next = segment_follows(s, at, e->addr + e->bytes, e->device);
    if (joins_next) {
        next->addr = e->addr;
        next->bytes += e->bytes;
        segment = *next;
    }
    struct pya_scan_segment *before = at > 0 ? next - 1 : NULL;
    if (before != NULL && before->is_mapped && before->device == e->device &&
        before->addr + before->bytes == e->addr && (!joins_next || before->pool == segment.pool)) {
        before->bytes += segment.bytes;
        before->is_used = before->is_used || segment.is_used;
        if (joins_next) {
            segment_drop(s, at);
        }
        return true;
    }
    return joins_next || segment_insert(s, at, segment);
}

/* Removes the known part of the range; the rest was reserved before the trace began. */
bool
scan_segment_remove(struct pya_scan *s, const struct pya_trace_event *e) {
    const uint64_t end = e->addr + e->bytes;
    size_t at = segment_search(s, e->addr, e->device);
    while (at < s->segments.n) {
        struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
        if (g->device != e->device || g->addr >= end) {
            break;
        }
        const struct pya_scan_segment old = *g;
        const uint64_t from = old.addr > e->addr ? old.addr : e->addr;
        const uint64_t to = old.addr + old.bytes < end ? old.addr + old.bytes : end;
        s->reserved -= to - from;
        s->reserved_of[e->device] -= to - from;
        if (from > old.addr) {
            g->bytes = from - old.addr;
            at++;
            if (to < old.addr + old.bytes) {
                struct pya_scan_segment rest = old;
                rest.addr = to;
                rest.bytes = old.addr + old.bytes - to;
                return segment_insert(s, at, rest);
            }
        } else if (to < old.addr + old.bytes) {
            g->addr = to;
            g->bytes = old.addr + old.bytes - to;
            break;
        } else {
            segment_drop(s, at);
        }
    }
    return true;
}

/* Splits a segment at an address inside it. */
static bool
segment_cut(struct pya_scan *s, size_t at, uint64_t addr) {
    struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    struct pya_scan_segment rest = *g;
    rest.addr = addr;
    rest.bytes = g->addr + g->bytes - addr;
    g->bytes = addr - g->addr;
    return segment_insert(s, at + 1, rest);
}

/* Merges the next segment into this one if both are mapped, adjacent and of one pool. */
static void
segment_join_next(struct pya_scan *s, size_t at) {
    struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    if (g->is_mapped && segment_follows(s, at + 1, g->addr + g->bytes, g->device) &&
        g[1].pool == g->pool) {
        g->bytes += g[1].bytes;
        g->is_used = g->is_used || g[1].is_used;
        segment_drop(s, at + 1);
    }
}

/* Is the block inside that segment, and does the segment already belong to its pool? */
static bool
segment_is_used(
    const struct pya_scan *s, size_t at, const struct pya_trace_event *e, uint32_t pool) {
    if (at >= s->segments.n) {
        return false;
    }
    const struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    return g->is_used && g->pool == pool && g->device == e->device && g->addr <= e->addr &&
           e->bytes <= g->bytes && e->addr - g->addr <= g->bytes - e->bytes;
}

/* Pages move from pool to pool, and a block can cover pages of several. */
bool
scan_segment_use(struct pya_scan *s, const struct pya_trace_event *e) {
    const uint32_t pool = s->routed[e->device];
    if (segment_is_used(s, s->last_used, e, pool)) {
        return true; /* the usual case: nothing changes */
    }
    size_t at = segment_search(s, e->addr, e->device);
    s->last_used = at;
    if (at == s->segments.n) {
        return true; /* not in the trace */
    }
    const struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
    if (g->device != e->device || g->addr > e->addr) {
        return true;
    }
    const uint64_t block_end = e->addr + e->bytes;
    const uint64_t first = pya_round_down(e->addr, PYA_PAGE);
    const uint64_t last = pya_round_up(block_end, PYA_PAGE);
    const size_t from = at;
    for (;; at++) {
        struct pya_scan_segment *piece = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
        const uint64_t end = piece->addr + piece->bytes;
        if (piece->is_mapped && piece->is_used && piece->pool != pool) {
            if (last > e->addr && last < end && !segment_cut(s, at, last)) {
                return false;
            }
            if (first > SCAN_ITEM(s->segments, struct pya_scan_segment, at)->addr &&
                !segment_cut(s, at++, first)) {
                return false;
            }
            piece = SCAN_ITEM(s->segments, struct pya_scan_segment, at);
        }
        if (!piece->is_used && !piece->is_mapped && !s->is_state) {
            /* A segment was reserved for the first request that it serves. */
            piece->stack = piece->stack != 0 ? piece->stack : e->stack;
            piece->phase = scan_current_phase(s);
            piece->is_known = true;
        }
        piece->is_used = true;
        piece->pool = pool;
        if (end >= block_end || !piece->is_mapped || !segment_follows(s, at + 1, end, e->device)) {
            break;
        }
    }
    /* Backwards, so that a join moves only what follows; if there is nothing to join, nothing moves. */
    for (size_t left = from == 0 ? 0 : from - 1, i = at + 1; i-- > left;) {
        segment_join_next(s, i);
    }
    return true;
}

void
scan_segments_forget(struct pya_scan *s) {
    for (size_t i = 0; i < s->segments.n; i++) {
        struct pya_scan_segment *g = SCAN_ITEM(s->segments, struct pya_scan_segment, i);
        g->is_used = g->is_used || !g->is_mapped;
    }
}
