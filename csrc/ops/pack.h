#pragma once
/* Scratch memory, and copying strided rows into it.  Floor 1. */
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

/* Splits one allocation into cache-line aligned arrays. */
struct pya_scratch {
    char *base;
    size_t used;
};

static inline size_t
pack_bytes(size_t n) {
    return (n * sizeof(real) + 63) / 64 * 64;
}

/* If base is NULL it only adds up the size, so that one function both measures and allocates. */
static inline real *
scratch_take(struct pya_scratch *s, size_t n) {
    char *p = s->base != NULL ? s->base + s->used : NULL;
    s->used += pack_bytes(n);
    return (real *)(void *)p;
}

/* Small problems keep their scratch on the stack: asking the heap costs more than computing them. */
struct pya_scratch_local {
    _Alignas(64) char bytes[96 << 10];
};

/* Call it after measuring: sets base to s->used bytes and used back to 0.  base NULL: out of memory. */
static inline void
scratch_begin(struct pya_scratch *s, struct pya_scratch_local *local) {
    const bool fits = s->used <= sizeof local->bytes;
    s->base = fits ? local->bytes : (char *)aligned_alloc(64, s->used);
    s->used = 0;
}

static inline void
scratch_end(struct pya_scratch *s, struct pya_scratch_local *local) {
    if (s->base != local->bytes) {
        free(s->base);
    }
}

static inline ptrdiff_t
pack_round(ptrdiff_t n, ptrdiff_t step) {
    return (n + step - 1) / step * step;
}

/* A row stride of an odd number of cache lines, so that rows spread over all cache sets. */
static inline ptrdiff_t
pack_stride(ptrdiff_t n) {
    ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    ptrdiff_t lines = (n + line - 1) / line;
    return (lines | 1) * line;
}

/* Rows of one t are far apart, so no hardware prefetcher follows.  The next unit of work mostly needs what comes right after
 * each of them: prefetch it while this unit computes. */
static inline void
pack_prefetch(const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n) {
    const ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < n && n <= 256; j += line) {
            __builtin_prefetch(src + r * src_row + n + j, 0, 2);
        }
    }
}

/* The same for part `step` of n_steps of the rows.  Prefetching all at once would wait for memory without computing. */
struct pack_part {
    int step, n_steps;
};

static inline void
pack_prefetch_part(
    const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n, struct pack_part part) {
    const ptrdiff_t begin = rows * part.step / part.n_steps;
    const ptrdiff_t end = rows * (part.step + 1) / part.n_steps;
    pack_prefetch(src + begin * src_row, src_row, end - begin, n);
}

/* rows x n; source rows are src_row apart; columns n..padded are set to zero */
static inline void
pack_rows(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n,
    ptrdiff_t padded) {
    for (ptrdiff_t r = 0; r < rows; r++) {
        memcpy(dst + r * dst_row, src + r * src_row, (size_t)n * sizeof(real));
        for (ptrdiff_t j = n; j < padded; j++) {
            dst[r * dst_row + j] = 0;
        }
    }
}
