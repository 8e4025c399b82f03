#pragma once
/* Tiles of PowerSpherical cosines, and recomputing those that are too coarse (ps_coarse.h).  Floor 1.
 * Long because every kernel variant compiles this arithmetic inline. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ps_coarse.h"
#include "tile.h"

/* A register tile of cosines. */
struct ps_product {
    struct pya_tile_a a;
    struct pya_tile_b b;
    struct pya_tile_c c;
    int rows, nv;
};

/* Computes the first k terms of each sum; the second function adds further terms.  Not inlined: among other variables the sums
 * would be spilled.  Two functions, because one with a flag is slower.  By pointer: a structure passed by value is copied with
 * loads wider than the stores that wrote it, which cannot be forwarded and wait until all earlier stores are done. */
static __attribute__((noinline, flatten, unused)) void
ps_panel(const struct ps_product *x, int k) {
    tile_panel(x->rows, x->nv, k, x->a, x->b, (struct pya_tile_c){x->c.p, x->c.row, 0});
}

static __attribute__((noinline, flatten, unused)) void
ps_panel_add(const struct ps_product *x, int k) {
    tile_panel(x->rows, x->nv, k, x->a, x->b, (struct pya_tile_c){x->c.p, x->c.row, 1});
}

enum { LONG_SUM = 256 };

/* Sums are computed in parts of LONG_SUM terms: the rounding errors of one long sum would show where a gradient's terms
 * cancel.  Returns the number of terms of the part that begins at `done`. */
static inline int
ps_terms(int k, int done) {
    return k - done < LONG_SUM ? k - done : LONG_SUM;
}

static inline void
ps_cosines(struct ps_product x, int k) {
    int n = ps_terms(k, 0);
    ps_panel(&x, n);
    for (int done = n; done < k; done += n) {
        x.a.p += n * x.a.k;
        x.b.p += n * x.b.k;
        n = ps_terms(k, done);
        ps_panel_add(&x, n);
    }
}

static inline vr
ps_clamp(vr u) {
    return v_min(v_set(1), v_max(v_set(-1), u));
}

/* The same for a cosine that is not too coarse.  It is well above -1, so 1 / (1 + u) is finite. */
static inline vr
ps_fine(vr u) {
    return v_min(v_set(1), u);
}

/* log((1 + u) / 2) of a clamped cosine; exactly 0 at 1, -inf at -1 */
static inline vr
ps_log_y(vr u) {
    return v_log1m(v_mul(v_sub(u, v_set(1)), v_set((real)0.5)));
}

static inline vr
ps_gap_log_y(vr gap) {
    const vr log_y = v_log_either(m_lt(v_set(0), gap), v_mul(v_set((real)0.5), gap));
    return v_sel(m_eq(gap, v_set(PS_BEHIND)), v_set((real)-INFINITY), log_y);
}

/* 1 + u; 0 beyond the antipode */
static inline vr
ps_gap_one_plus_u(vr gap) {
    const vr near = v_sel(m_eq(gap, v_set(PS_BEHIND)), v_set(0), gap);
    return v_sel(m_lt(v_set(0), gap), near, v_add(v_set(2), gap));
}

/* A tile's cosines below low or above their component's high are too coarse.  of_rows: components are rows of the tile. */
struct ps_limits {
    const real *high; /* NULL: no cosine is too high */
    real low;
    bool of_rows;
    int rows, lanes;
};

static inline vr
ps_high_of(struct ps_limits x, int i, int v) {
    return x.high == NULL ? v_set((real)INFINITY) : x.of_rows ? v_set(x.high[i]) : v_ld(x.high + v);
}

static inline bool
ps_is_coarse(vr u, vr low, vr high) {
    return m_any(m_lt(u, low)) || m_any(m_lt(high, u));
}

/* Is any cosine of a tile too coarse?  Usually none is, which takes few instructions to find out. */
static inline bool
ps_any_is_coarse(const real *u, ptrdiff_t row, struct ps_limits x) {
    vr least = v_set(1);
    for (int i = 0; i < x.rows; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < x.lanes; v += VW) {
            least = v_min(least, v_ld(u + i * row + v));
        }
    }
    bool found = m_any(m_lt(least, v_set(x.low)));
    for (int i = 0; i < x.rows && x.high != NULL && !found; i++) {
        for (int v = 0; v < x.lanes && !found; v += VW) {
            found = m_any(m_lt(ps_high_of(x, i, v), v_ld(u + i * row + v)));
        }
    }
    return found;
}

/* Turns a vector of cosines into gaps.  Those that are too coarse are recomputed; the others become u - 1, from which
 * ps_log_y's result follows bit by bit, so that forward and backward agree although their tiles differ. */
static inline void
ps_refine(real *u, vr high, int k, struct pya_tile_a a, struct pya_tile_b b, real low) {
    vwide sum;
    memset(&sum, 0, sizeof sum);
    for (int i = 0; i < k; i++) {
        sum = w_fma(v_set(a.p[i * a.k]), v_ld(b.p + i * b.k), sum);
    }
    double above[VW];
    double below[VW];
    real most[VW];
    w_st(above, sum, 1);
    w_st(below, sum, -1);
    v_st(most, high);
    for (int i = 0; i < VW; i++) { /* branch-free, so that the compiler vectorizes it */
        const real as_it_is = u[i] > 1 ? 0 : u[i] - 1;
        const real sharp = ps_gap(above[i], below[i]);
        u[i] = ((u[i] < low) | (u[i] > most[i])) ? sharp : as_it_is;
    }
}

/* Turns a whole tile into gaps, recomputing the cosines that are too coarse. */
static __attribute__((noinline, unused)) void
ps_refine_tile(
    int k, struct pya_tile_a a, struct pya_tile_b b, struct pya_tile_c c, struct ps_limits x) {
    for (int i = 0; i < x.rows; i++) {
        for (int v = 0; v < x.lanes; v += VW) {
            real *u = c.p + i * c.row + v;
            const vr high = ps_high_of(x, i, v);
            if (ps_is_coarse(v_ld(u), v_set(x.low), high)) {
                struct pya_tile_a ai = {a.p + i * a.row, 0, a.k};
                struct pya_tile_b bv = {b.p + v, b.k};
                ps_refine(u, high, k, ai, bv, x.low);
            } else {
                v_st(u, v_sub(ps_clamp(v_ld(u)), v_set(1)));
            }
        }
    }
}
