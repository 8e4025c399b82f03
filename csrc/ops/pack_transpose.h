#pragma once
/* Transposing copies between the caller's memory and scratch.  Floor 1. */
#include <stdbool.h>
#include <stddef.h>

#include "simd.h"

#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
/* Loads eight numbers of each of eight rows, transposed: out[j] is column j. */
static inline __attribute__((always_inline)) void
pack_columns_8x8(__m256 out[8], const real *src, ptrdiff_t src_row) {
    __m256 r[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const real *lo = src + i * src_row;
        const real *hi = src + (i + 4) * src_row;
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lo)), _mm_loadu_ps(hi), 1);
        r[i + 4] = _mm256_insertf128_ps(
            _mm256_castps128_ps256(_mm_loadu_ps(lo + 4)), _mm_loadu_ps(hi + 4), 1);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 8; h += 4) {
        const __m256 t0 = _mm256_unpacklo_ps(r[h], r[h + 1]);
        const __m256 t1 = _mm256_unpackhi_ps(r[h], r[h + 1]);
        const __m256 t2 = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
        const __m256 t3 = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
        out[h] = _mm256_shuffle_ps(t0, t2, 0x44);
        out[h + 1] = _mm256_shuffle_ps(t0, t2, 0xee);
        out[h + 2] = _mm256_shuffle_ps(t1, t3, 0x44);
        out[h + 3] = _mm256_shuffle_ps(t1, t3, 0xee);
    }
}

/* The same of fewer rows, or of fewer numbers; what is missing is zero. */
static inline void
pack_columns_part(__m256 out[8], const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n) {
    static const int there[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const __m256i mask = _mm256_loadu_si256((const __m256i *)(const void *)(there + 8 - n));
    _Alignas(32) real whole[64];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        _mm256_store_ps(
            whole + 8 * i,
            i < rows ? _mm256_maskload_ps(src + i * src_row, mask) : _mm256_setzero_ps());
    }
    pack_columns_8x8(out, whole, 8);
}

/* Returns how many columns there are, of at most eight rows and eight numbers of each. */
static inline __attribute__((always_inline)) ptrdiff_t
pack_columns(__m256 out[8], const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n) {
    if (rows < 8 || n < 8) {
        pack_columns_part(out, src, src_row, rows, n < 8 ? n : 8);
    } else {
        pack_columns_8x8(out, src, src_row);
    }
    return n < 8 ? n : 8;
}

static inline __attribute__((always_inline)) void
pack_transpose_8x8(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n) {
    __m256 x[8];
    const ptrdiff_t columns = pack_columns(x, src, src_row, rows, n);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (i < columns) {
            _mm256_storeu_ps(dst + i * dst_row, x[i]);
        }
    }
}

/* dst[j][i] += scale * src[i][j] */
static inline __attribute__((always_inline)) void
pack_add_8x8(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n,
    real scale) {
    __m256 x[8];
    const ptrdiff_t columns = pack_columns(x, src, src_row, rows, n);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if (i < columns) {
            real *p = dst + i * dst_row;
            _mm256_storeu_ps(p, _mm256_fmadd_ps(_mm256_set1_ps(scale), x[i], _mm256_loadu_ps(p)));
        }
    }
}
#endif

/* dst[j][i] = src[i][j] for rows x n; lanes rows..padded of dst are zero */
static inline void
pack_transpose(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n,
    ptrdiff_t padded) {
    ptrdiff_t i8 = 0;
#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
    i8 = (rows + 7) / 8 * 8;
    if (i8 > padded) { /* no room for a whole vector: the rest are single numbers */
        i8 = rows / 8 * 8;
    }
    /* walk along whole rows of the side with the larger row stride: fewer lines compete for each cache set */
    const bool by_rows = dst_row > src_row;
    for (ptrdiff_t far = 0; far < (by_rows ? n : i8); far += 8) {
        for (ptrdiff_t near = 0; near < (by_rows ? i8 : n); near += 8) {
            const ptrdiff_t i = by_rows ? near : far;
            const ptrdiff_t j = by_rows ? far : near;
            pack_transpose_8x8(
                dst + j * dst_row + i, dst_row, src + i * src_row + j, src_row, rows - i, n - j);
        }
    }
    for (; i8 + 8 <= padded; i8 += 8) {
        for (ptrdiff_t j = 0; j < n; j++) {
            _mm256_storeu_ps(dst + j * dst_row + i8, _mm256_setzero_ps());
        }
    }
#endif
    for (ptrdiff_t j = 0; i8 < padded && j < n; j++) {
        for (ptrdiff_t i = i8; i < padded; i++) {
            dst[j * dst_row + i] = i < rows ? src[i * src_row + j] : 0;
        }
    }
}

/* dst[j][i] += scale * src[i][j] for rows x n, with one rounding if the processor has FMA.  Lanes up to the next multiple of
 * eight are there, and may change. */
static inline void
pack_add_transposed(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows, ptrdiff_t n,
    real scale) {
#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
    for (ptrdiff_t i = 0; i < rows; i += 8) {
        for (ptrdiff_t j = 0; j < n; j += 8) {
            pack_add_8x8(
                dst + j * dst_row + i, dst_row, src + i * src_row + j, src_row, rows - i, n - j,
                scale);
        }
    }
#else
    for (ptrdiff_t j = 0; j < n; j++) {
        for (ptrdiff_t i = 0; i < rows; i++) {
            dst[j * dst_row + i] = r_fma(scale, src[i * src_row + j], dst[j * dst_row + i]);
        }
    }
#endif
}
