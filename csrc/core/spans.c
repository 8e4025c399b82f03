/* Spans of addresses.  Floor 1. */
#include "spans.h"

#include <stdlib.h>

#include "debug.h"

/* The first of the joined spans that ends after the address; n: none. */
static size_t
spans_first(const struct pya_spans *spans, pya_dptr addr) {
    size_t i = 0;
    size_t n = spans->n;
    while (i < n) {
        size_t middle = i + (n - i) / 2;
        if (spans->items[middle].end > addr) {
            n = middle;
        } else {
            i = middle + 1;
        }
    }
    return i;
}

static bool
spans_meet(const struct pya_spans *spans, pya_dptr addr, pya_dptr end) {
    size_t i = spans_first(spans, addr);
    return i < spans->n && spans->items[i].addr < end;
}

void
pya_spans_add(struct pya_spans *spans, pya_dptr addr, size_t bytes) {
    PYA_STEP();
    spans->n_added++;
    if (spans->within != NULL && !spans_meet(spans->within, addr, addr + bytes)) {
        return;
    }
    if (spans->n > 0 && spans->items[spans->n - 1].end == addr) { /* usually adjacent pages */
        spans->items[spans->n - 1].end += bytes;
        return;
    }
    if (spans->n == spans->n_room) {
        size_t n_room = 2 * spans->n_room + 64;
        struct pya_span *items = realloc(spans->items, n_room * sizeof *items);
        if (items == NULL) {
            spans->is_whole = false;
            return;
        }
        spans->items = items;
        spans->n_room = n_room;
    }
    spans->items[spans->n++] = (struct pya_span){addr, addr + bytes};
}

static int
span_compare(const void *a, const void *b) {
    pya_dptr x = ((const struct pya_span *)a)->addr;
    pya_dptr y = ((const struct pya_span *)b)->addr;
    return (x > y) - (x < y);
}

void
pya_spans_join(struct pya_spans *spans) {
    size_t n = 0;
    if (spans->n > 0) {
        qsort(spans->items, spans->n, sizeof *spans->items, span_compare);
    }
    for (size_t i = 0; i < spans->n; i++) {
        struct pya_span span = spans->items[i];
        if (n == 0 || span.addr > spans->items[n - 1].end) {
            spans->items[n++] = span;
        } else if (span.end > spans->items[n - 1].end) {
            spans->items[n - 1].end = span.end;
        }
    }
    spans->n = n;
}

struct pya_span
pya_spans_leave(const struct pya_spans *spans, struct pya_span all, size_t bytes) {
    struct pya_span best = {0, 0};
    size_t i = spans_first(spans, all.addr);
    for (pya_dptr addr = all.addr; addr < all.end; addr = spans->items[i++].end) {
        bool is_last = i == spans->n || spans->items[i].addr >= all.end;
        pya_dptr end = is_last ? all.end : spans->items[i].addr;
        bool is_less = best.end == 0 || end - addr < best.end - best.addr;
        if (end >= addr + bytes && is_less) {
            best = (struct pya_span){addr, end};
        }
        if (is_last) {
            break;
        }
    }
    return best;
}
