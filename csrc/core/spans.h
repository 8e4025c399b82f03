/* Spans of addresses: which parts of a piece of memory others want, and what is left of it.  Floor 1. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_span {
    pya_dptr addr, end;
};

/* Starts as {.is_whole = true}.  The caller frees items. */
struct pya_spans {
    struct pya_span *items;
    size_t n, n_room;
    size_t n_added; /* calls of pya_spans_add(): spans may have been joined or left out */
    bool is_whole;  /* no span is missing for lack of host memory */
    /* Joined spans; a span that meets none of them is left out.  NULL: all spans are kept. */
    const struct pya_spans *within;
};

void pya_spans_add(struct pya_spans *spans, pya_dptr addr, size_t bytes);
/* Sorts the spans and joins those that touch. */
void pya_spans_join(struct pya_spans *spans);
/* The smallest part of `all` that holds `bytes` and lies outside the joined spans; the lowest of equal ones.
 * end == 0: there is none. */
struct pya_span pya_spans_leave(const struct pya_spans *spans, struct pya_span all, size_t bytes);

#ifdef __cplusplus
}
#endif
