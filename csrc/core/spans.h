/* Spans of addresses: which of a piece of memory others want, and what they leave of it.  Floor 1. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_span {
    pya_dptr addr, end;
};

/* Begins as {.is_whole = true}; the caller frees the items. */
struct pya_spans {
    struct pya_span *items;
    size_t n, n_room;
    size_t n_added; /* calls of pya_spans_add(): spans may have been joined or left out */
    bool is_whole;  /* there was host memory for all */
    /* Joined; a span that meets none of these is left out.  NULL: all are taken. */
    const struct pya_spans *within;
};

void pya_spans_add(struct pya_spans *spans, pya_dptr addr, size_t bytes);
/* Puts them in order, none beside another. */
void pya_spans_join(struct pya_spans *spans);
/* The least part of `all` that holds `bytes` and that is in none of the joined spans, the lowest of several; its end is 0 if
 * there is none. */
struct pya_span pya_spans_leave(const struct pya_spans *spans, struct pya_span all, size_t bytes);

#ifdef __cplusplus
}
#endif
