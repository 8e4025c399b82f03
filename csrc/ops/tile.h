#pragma once
/* C[rows x lanes] (+)= A[rows x k] B[k x lanes] on small blocks that are already in cache.
 * A is read one number at a time through two strides, so either factor may be transposed; B and C have contiguous lanes,
 * padded to whole vectors.  Floor 1.
 * Long because the register tile has two shapes. */
#include <stddef.h>

#include "simd.h"

struct pya_tile_a {
    const real *p;
    ptrdiff_t row, k; /* strides in elements */
};
struct pya_tile_b {
    const real *p;
    ptrdiff_t k;
};
struct pya_tile_c {
    real *p;
    ptrdiff_t row;
    int add; /* 0: overwrite */
};

enum { TILE_AHEAD = 8 };

/* One register tile; rows and nv are constants at every call, so that acc stays in registers. */
static inline __attribute__((always_inline)) void
tile_kernel(
    const int rows, const int nv, int k, struct pya_tile_a a, struct pya_tile_b b,
    struct pya_tile_c c) {
    vr acc[MR][2];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < nv; j++) {
            acc[i][j] = v_set(0);
        }
    }
    const real *pa = a.p;
    const real *pb = b.p;
    for (int n = 0; n < k; n++) {
        if (nv > 1 && a.k != 1) { /* a column crosses more rows than the L1 cache holds */
            __builtin_prefetch(pa + TILE_AHEAD * a.k, 0, 3);
        }
        vr b0 = v_ld(pb);
        vr b1 = nv > 1 ? v_ld(pb + VW) : b0;
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vr s = v_set(pa[i * a.row]);
            acc[i][0] = v_fma(s, b0, acc[i][0]);
            if (nv > 1) {
                acc[i][1] = v_fma(s, b1, acc[i][1]);
            }
        }
        pa += a.k;
        pb += b.k;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 2
        for (int j = 0; j < nv; j++) {
            /* add the previous contents last: long sums are then sums of short ones, with smaller errors */
            real *p = c.p + i * c.row + j * VW;
            v_st(p, c.add ? v_add(v_ld(p), acc[i][j]) : acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
tile_rows(
    int rows, const int nv, int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c) {
    switch (rows) {
    case 1:
        tile_kernel(1, nv, k, a, b, c);
        break;
    case 2:
        tile_kernel(2, nv, k, a, b, c);
        break;
    case 3:
        tile_kernel(3, nv, k, a, b, c);
        break;
#if !defined(PYA_ISA_scalar)
    case 4:
        tile_kernel(4, nv, k, a, b, c);
        break;
    case 5:
        tile_kernel(5, nv, k, a, b, c);
        break;
#endif
#if defined(PYA_ISA_avx512)
    case 6:
        tile_kernel(6, nv, k, a, b, c);
        break;
    case 7:
        tile_kernel(7, nv, k, a, b, c);
        break;
#endif
    default:
        tile_kernel(MR, nv, k, a, b, c);
        break;
    }
}

/* One panel of at most two vectors of lanes. */
static inline void
tile_panel(int rows, int nv, int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c) {
    while (rows > 0) {
        int step = rows < MR ? rows : MR;
        if (nv > 1) {
            tile_rows(step, 2, k, a, b, c);
        } else {
            tile_rows(step, 1, k, a, b, c);
        }
        a.p += step * a.row;
        c.p += step * c.row;
        rows -= step;
    }
}

#if defined(PYA_ISA_avx2)
enum { WIDE_ROWS = 3, WIDE_NV = 4 };

/* Sixteen registers hold 3 rows of 4 vectors as well as MR rows of 2.  The former needs 7 loads for 12 multiply-adds, the
 * latter 8.  That matters when instructions arrive slowly, as on a core that also runs another thread.  The factors of A
 * stay in registers, B passes through one. */
static inline __attribute__((always_inline)) void
tile_wide(const int rows, int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c) {
    vr acc[WIDE_ROWS][WIDE_NV];
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < WIDE_NV; j++) {
            acc[i][j] = v_set(0);
        }
    }
    const real *pa = a.p;
    const real *pb = b.p;
#pragma GCC unroll 4
    for (int n = 0; n < k; n++) {
        vr s[WIDE_ROWS];
#pragma GCC unroll 3
        for (int i = 0; i < rows; i++) {
            s[i] = v_set(pa[i * a.row]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < WIDE_NV; j++) {
            const vr x = v_ld(pb + j * VW);
#pragma GCC unroll 3
            for (int i = 0; i < rows; i++) {
                acc[i][j] = v_fma(s[i], x, acc[i][j]);
            }
        }
        pa += a.k;
        pb += b.k;
    }
#pragma GCC unroll 3
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < WIDE_NV; j++) {
            real *p = c.p + i * c.row + j * VW;
            v_st(p, c.add ? v_add(v_ld(p), acc[i][j]) : acc[i][j]);
        }
    }
}

static inline void
tile_panel_wide(int rows, int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c) {
    while (rows > 0) {
        /* the last four rows as two and two: a single row would wait for its own sums */
        const int step = rows == 3 || rows > 4 ? 3 : rows > 1 ? 2 : 1;
        if (step == 3) {
            tile_wide(3, k, a, b, c);
        } else if (step == 2) {
            tile_wide(2, k, a, b, c);
        } else {
            tile_wide(1, k, a, b, c);
        }
        a.p += step * a.row;
        c.p += step * c.row;
        rows -= step;
    }
}
#endif

/* lanes is rounded up to whole vectors; B and C must have that many. */
static inline void
tile_multiply(
    int rows, int lanes, int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c) {
    int j = 0;
#if defined(PYA_ISA_avx2)
    for (; j < lanes - (WIDE_NV - 1) * VW; j += WIDE_NV * VW) {
        struct pya_tile_b bj = {b.p + j, b.k};
        struct pya_tile_c cj = {c.p + j, c.row, c.add};
        tile_panel_wide(rows, k, a, bj, cj);
    }
#endif
    for (; j < lanes; j += 2 * VW) {
        struct pya_tile_b bj = {b.p + j, b.k};
        struct pya_tile_c cj = {c.p + j, c.row, c.add};
        tile_panel(rows, lanes - j > VW ? 2 : 1, k, a, bj, cj);
    }
}
