#pragma once
/* Scratch memory and the copies that bring strided rows into it.  Floor 1. */
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

/* Carves one allocation into cache-line aligned arrays. */
struct pya_scratch {
    char *base;
    size_t used;
};

static inline size_t
pack_bytes(size_t n) {
    return (n * sizeof(real) + 63) / 64 * 64;
}

/* With base NULL it only adds up the size, so that one function both measures and carves. */
static inline real *
scratch_take(struct pya_scratch *s, size_t n) {
    char *p = s->base != NULL ? s->base + s->used : NULL;
    s->used += pack_bytes(n);
    return (real *)(void *)p;
}

/* Small problems find their scratch on the stack: asking the heap costs more than their sums. */
struct pya_scratch_local {
    _Alignas(64) char bytes[96 << 10];
};

/* base for s->used bytes, as measured, of which nothing is taken yet; NULL: no memory */
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

/* A row stride that is an odd number of cache lines: rows then spread over all cache sets. */
static inline ptrdiff_t
pack_stride(ptrdiff_t n) {
    ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    ptrdiff_t lines = (n + line - 1) / line;
    return (lines | 1) * line;
}

/* Rows of one t lie far apart, where no hardware prefetcher follows, while the next unit of work
 * mostly wants what lies just behind each of them: ask for it while this unit computes. */
static inline void
pack_prefetch(const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n) {
    const ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < n && n <= 256; j += line) {
            __builtin_prefetch(src + r * src_row + n + j, 0, 2);
        }
    }
}

/* rows x n, source rows src_row apart; the tail up to padded is zero */
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

#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
static inline void
pack_transpose_8x8(real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row) {
    __m256 r[8];
    __m256 t[8];
    for (int i = 0; i < 4; i++) {
        const real *lo = src + i * src_row;
        const real *hi = src + (i + 4) * src_row;
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lo)), _mm_loadu_ps(hi), 1);
        r[i + 4] = _mm256_insertf128_ps(
            _mm256_castps128_ps256(_mm_loadu_ps(lo + 4)), _mm_loadu_ps(hi + 4), 1);
    }
    for (int h = 0; h < 8; h += 4) {
        t[h] = _mm256_unpacklo_ps(r[h], r[h + 1]);
        t[h + 1] = _mm256_unpackhi_ps(r[h], r[h + 1]);
        t[h + 2] = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
        t[h + 3] = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
        _mm256_storeu_ps(dst + (h + 0) * dst_row, _mm256_shuffle_ps(t[h], t[h + 2], 0x44));
        _mm256_storeu_ps(dst + (h + 1) * dst_row, _mm256_shuffle_ps(t[h], t[h + 2], 0xee));
        _mm256_storeu_ps(dst + (h + 2) * dst_row, _mm256_shuffle_ps(t[h + 1], t[h + 3], 0x44));
        _mm256_storeu_ps(dst + (h + 3) * dst_row, _mm256_shuffle_ps(t[h + 1], t[h + 3], 0xee));
    }
}
#endif

/* dst[j][i] = src[i][j] for rows x n; lanes rows..padded of dst are zero */
static inline void
pack_transpose(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n,
    ptrdiff_t padded) {
    ptrdiff_t j0 = 0;
    ptrdiff_t i8 = 0;
#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
    i8 = rows / 8 * 8;
    j0 = n / 8 * 8;
    /* whole rows of the side whose rows lie further apart: fewer lines in flight for each cache set */
    if (dst_row > src_row) {
        for (ptrdiff_t j = 0; j < j0; j += 8) {
            for (ptrdiff_t i = 0; i < i8; i += 8) {
                pack_transpose_8x8(dst + j * dst_row + i, dst_row, src + i * src_row + j, src_row);
            }
        }
    } else {
        for (ptrdiff_t i = 0; i < i8; i += 8) {
            for (ptrdiff_t j = 0; j < j0; j += 8) {
                pack_transpose_8x8(dst + j * dst_row + i, dst_row, src + i * src_row + j, src_row);
            }
        }
    }
#endif
    for (ptrdiff_t j = 0; j < n; j++) {
        for (ptrdiff_t i = j < j0 ? i8 : 0; i < rows; i++) {
            dst[j * dst_row + i] = src[i * src_row + j];
        }
        for (ptrdiff_t i = rows; i < padded; i++) {
            dst[j * dst_row + i] = 0;
        }
    }
}
