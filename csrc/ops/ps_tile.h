#pragma once
/* Shared by the PowerSpherical kernels: block sizes, one thread's scratch, and the arithmetic from a cosine to a
 * log-probability.  Floor 1.
 * Long because every kernel variant compiles this arithmetic inline. */
#include <math.h>

#include "ops.h"
#include "pack.h"
#include "ps_gap.h"
#include "special.h"

/* The scratch of one thread.  Lanes are components (rows are lm apart), rows are samples. */
struct ps_tile {
    ptrdiff_t lb, mb;         /* samples and components in a block */
    ptrdiff_t ld, lm;         /* row strides of a D-row and of a row of components or samples */
    real *value;              /* [lb][ld] */
    real *value_t;            /* [D][lm], the mixture's forward */
    real *loc;                /* [mb][ld] */
    real *loc_t;              /* [D][lm] */
    real *u;                  /* [lb][lm]: cosines, then W (ps_backward.c) */
    real *d_value;            /* [lb][ld] */
    real *d_loc;              /* [mb][ld] */
    real *kappa, *h, *dh, *a; /* [mb] padded to whole vectors */
    real *dh_far; /* dh - log 2, rounded once; NULL like dh if no gradient is computed */
    real *h_low;  /* rounding error of h */
    real *dh_low; /* rounding error of dh */
    /* For gradients in tiles: h - kappa log 2, and a with its own rounding error or that of h. */
    real *h_far, *a_far, *a_near;
    real *high;      /* [mb], cosines above are too coarse for the component (ps_coarse.h) */
    real low;        /* cosines below are too coarse for all components */
    real least_high; /* the least `high` of any component */
    bool has_high;   /* least_high is finite */
    real least, least_log_y;          /* 1 + u and log y of gradients at the antipode */
    double *all_g, *all_far, *all_gs; /* [mb], sums over the blocks */
    real *f, *grad;                   /* [lb] */
    /* Copies of the given gradients of several t, [t][n_l][n_m], if those of one t are scattered; NULL: read in place. */
    real *given;
    ptrdiff_t given_l, given_t; /* strides */
    ptrdiff_t first_t;          /* the first of these t */
};

/* If given gradients of successive t are adjacent, a cache line holds up to 16 of them.  So this many t are read together, or
 * as many as fit in the L2 cache. */
enum { GIVEN_MOST = 16, GIVEN_BYTES = 2 << 20 };

/* How many t are read together, so that each thread still gets at least two such groups; 1: read in place. */
static inline ptrdiff_t
ps_n_given(const struct pya_ops_ps *ps) {
    const bool is_apart = ps->log_weights.p == NULL && ps->grad_t == 1 && ps->grad_m != 1;
    const int64_t bytes = ps->n_l * pack_round((ptrdiff_t)ps->n_m, VW) * (int64_t)sizeof(real);
    const int64_t each = ps->n_t / (2 * ps->n_threads);
    int64_t n = is_apart && bytes > 0 ? GIVEN_BYTES / bytes : 1;
    n = each < n ? each : n;
    return n < 1 ? 1 : n < GIVEN_MOST ? (ptrdiff_t)n : GIVEN_MOST;
}

enum ps_use { PS_FORWARD, PS_MIXTURE, PS_BACKWARD };

/* With at most this many pairs of a sample and a component per t, a tile would be nearly empty (ps_thin.c). */
enum { THIN_PAIRS = 32 };

static inline bool
ps_is_thin(const struct pya_ops_ps *ps) {
    return ps->n_l <= THIN_PAIRS && ps->n_m <= THIN_PAIRS && ps->n_l * ps->n_m <= THIN_PAIRS;
}

static inline ptrdiff_t
ps_block(int64_t dim) {
    return dim <= 256 ? 128 : dim <= 1024 ? 64 : 32;
}

static inline ptrdiff_t
ps_n_blocks(int64_t n, ptrdiff_t block) {
    return (ptrdiff_t)((n + block - 1) / block);
}

/* Number of the block's rows that exist. */
static inline int
ps_count(int64_t n, ptrdiff_t start, ptrdiff_t block) {
    return (int)(n - start < block ? n - start : block);
}

static inline void
ps_tile_carve(
    struct ps_tile *w, struct pya_scratch *s, const struct pya_ops_ps *ps, enum ps_use use) {
    size_t d = (size_t)ps->dim;
    memset(w, 0, sizeof *w);
    w->lb = w->mb = ps_block(ps->dim);
    w->ld = pack_stride(pack_round((ptrdiff_t)ps->dim, VW));
    w->lm = pack_stride(w->mb);
    size_t rows = (size_t)(w->lb * w->ld);
    size_t lanes = d * (size_t)w->lm;
    size_t n = (size_t)pack_round(w->mb, VW);
    if (use == PS_MIXTURE) {
        w->value_t = scratch_take(s, lanes);
        w->loc = scratch_take(s, rows);
        w->f = scratch_take(s, n);
        w->grad = scratch_take(s, n);
    } else {
        w->value = scratch_take(s, rows);
        w->loc_t = scratch_take(s, lanes);
    }
    w->kappa = scratch_take(s, n);
    w->h = scratch_take(s, n);
    w->h_low = scratch_take(s, n);
    w->a = scratch_take(s, n);
    w->high = scratch_take(s, n);
    if (use == PS_BACKWARD) {
        w->dh = scratch_take(s, n);
        w->dh_far = scratch_take(s, n);
        w->dh_low = scratch_take(s, n);
        w->h_far = scratch_take(s, n);
        w->a_far = scratch_take(s, n);
        w->a_near = scratch_take(s, n);
        w->loc = scratch_take(s, rows);
        w->u = scratch_take(s, (size_t)(w->lb * w->lm));
        w->d_value = scratch_take(s, rows);
        w->d_loc = scratch_take(s, rows);
        w->all_g = (double *)(void *)scratch_take(s, n * (sizeof(double) / sizeof(real)));
        w->all_gs = (double *)(void *)scratch_take(s, n * (sizeof(double) / sizeof(real)));
        w->all_far = (double *)(void *)scratch_take(s, n * (sizeof(double) / sizeof(real)));
        w->f = scratch_take(s, n);
        w->grad = scratch_take(s, n);
        const ptrdiff_t n_given = ps_n_given(ps);
        w->given_l = pack_round((ptrdiff_t)ps->n_m, VW);
        w->given_t = pack_stride((ptrdiff_t)ps->n_l * w->given_l);
        w->given = n_given > 1 ? scratch_take(s, (size_t)(n_given * w->given_t)) : NULL;
    }
}

/* NULL if out of memory; the caller frees it. */
static inline void *
ps_tile_create(struct ps_tile *w, const struct pya_ops_ps *ps, enum ps_use use) {
    struct pya_scratch s = {NULL, 0};
    ps_tile_carve(w, &s, ps, use);
    s.base = (char *)aligned_alloc(64, s.used);
    s.used = 0;
    if (s.base != NULL) {
        ps_tile_carve(w, &s, ps, use);
    }
    return s.base;
}

static inline const real *
ps_row(struct pya_ops_view v, ptrdiff_t i, ptrdiff_t t) {
    return (const real *)v.p + i * v.i + t * v.t;
}

static inline real *
ps_row_out(struct pya_ops_view v, ptrdiff_t i, ptrdiff_t t) {
    return (real *)v.p + i * v.i + t * v.t;
}

/* 2 atanh(z) = log((1 + z) / (1 - z)) for |z| <= 1/3, to 1e-12 relative */
static inline double
ps_log_ratio(double z) {
    double q = z * z;
    double p = 1.0 / 23;
    for (int n = 21; n > 0; n -= 2) {
        p = p * q + 1.0 / n;
    }
    return 2 * z * p;
}

/* log c for c >= 0.75 */
static inline double
ps_log_above(double c) {
    uint64_t bits;
    memcpy(&bits, &c, sizeof bits);
    uint64_t e = (bits - UINT64_C(0x3fe8000000000000)) >> 52; /* c = m 2^e, m in [.75, 1.5) */
    bits -= e << 52;
    e += UINT64_C(0x4338000000000000); /* the integer e in the low bits of a double */
    double m;
    double exponent;
    memcpy(&m, &bits, sizeof m);
    memcpy(&exponent, &e, sizeof exponent);
    const double f = (m - 1.0) / (m + 1.0);
    return (exponent - 6755399441055744.0) * 0.69314718055994531 + ps_log_ratio(f);
}

/* The asymptotic series below are precise enough from PS_SHIFT on; smaller arguments are shifted up.  PS_SHIFT_PART steps at a
 * time, because their product fits in a double for any float. */
enum { PS_SHIFT = 12, PS_SHIFT_PART = 3 };

/* pya_special_normalizer() for many kappa >= 0 at once, without calls or branches so that the compiler vectorizes it; 1e-11
 * relative.  shift: PS_SHIFT, or 0 if b is at least that.  slope: dh is wanted. */
static inline __attribute__((always_inline)) void
ps_normalizers(struct ps_tile *w, int n, double dim, const int shift, const bool slope) {
    const double b = 0.5 * (dim - 1.0);
    real *restrict h = w->h;
    real *restrict h_low = w->h_low;
    real *restrict slopes = w->dh;
    real *restrict far = w->dh_far;
    real *restrict slopes_low = w->dh_low;
    const real *restrict kappa = w->kappa;
    for (int i = 0; i < n; i++) {
        double a = (double)kappa[i] + b;
        double inverse =
            1.0; /* 1 / the factor between the normalizers before and after the shift */
        double steps = 0.0;
#pragma GCC unroll 4
        for (int part = 0; part < shift; part += PS_SHIFT_PART) {
            double low = 1.0; /* products of a and a + b */
            double high = 1.0;
            double sum = 0.0; /* over low high: the sum of 1 / (a (a + b)) */
#pragma GCC unroll 3
            for (int k = 0; k < PS_SHIFT_PART; k++) {
                sum = sum * (a * (a + b)) + low * high;
                low *= a;
                high *= a + b;
                a += 1.0;
            }
            inverse *= high / low;
            steps += slope ? sum / (low * high) : 0;
        }
        double c = a + b;
        double log_c = ps_log_above(c);
        double ratio = ps_log_ratio(b / (a + c));
        double ra = 1.0 / a;
        double rc = 1.0 / c;
        double qa = ra * ra;
        double qc = rc * rc;
        double sa = ra * (1.0 / 12 - qa * (1.0 / 360 - qa * (1.0 / 1260)));
        double sc = rc * (1.0 / 12 - qc * (1.0 / 360 - qc * (1.0 / 1260)));
        double all = (a - 0.5) * ratio + b * (log_c - 3.53102424696929079) + sc - sa;
        all -= shift > 0 ? ps_log_above(inverse) : 0;
        h[i] = (real)all;
        h_low[i] = (real)(all - (double)h[i]);
        if (slope) {
            double ta = 0.5 * ra + qa * (1.0 / 12 - qa * (1.0 / 120 - qa * (1.0 / 252)));
            double tc = 0.5 * rc + qc * (1.0 / 12 - qc * (1.0 / 120 - qc * (1.0 / 252)));
            double dh = ratio - tc + ta + b * steps;
            slopes[i] = (real)dh;
            far[i] = (real)(dh - 0.69314718055994531);
            slopes_low[i] = (real)(dh - (double)slopes[i]);
        }
    }
}

/* Vectorized if possible; negative kappa are left to pya_special_normalizer(). */
static inline void
ps_normalize(struct ps_tile *w, int n, int64_t dim) {
    const bool slope = w->dh != NULL;
    if (VW > 1 && dim <= 2 * PS_SHIFT && slope) {
        ps_normalizers(w, n, (double)dim, PS_SHIFT, true);
    } else if (VW > 1 && dim <= 2 * PS_SHIFT) {
        ps_normalizers(w, n, (double)dim, PS_SHIFT, false);
    } else if (VW > 1 && slope) {
        ps_normalizers(w, n, (double)dim, 0, true);
    } else if (VW > 1) {
        ps_normalizers(w, n, (double)dim, 0, false);
    }
    for (int i = 0; i < n; i++) {
        if (VW > 1 && !(w->kappa[i] < 0)) {
            continue;
        }
        struct pya_special_norm norm = pya_special_normalizer((double)w->kappa[i], (double)dim);
        w->h[i] = (real)norm.h;
        w->h_low[i] = (real)(norm.h - (double)w->h[i]);
        if (slope) {
            w->dh[i] = (real)norm.dh;
            w->dh_far[i] = (real)(norm.dh - 0.69314718055994531);
            w->dh_low[i] = (real)(norm.dh - (double)w->dh[i]);
        }
    }
}

/* Computes what depends on kappa alone, and fills the padding with components of weight 0. */
static inline void
ps_tile_finish(struct ps_tile *w, int64_t dim, int n) {
    ps_normalize(w, n, dim);
    for (int i = n; i < (int)pack_round(n, VW); i++) {
        w->kappa[i] = w->h[i] = w->h_low[i] = 0;
        w->a[i] = (real)-INFINITY;
        if (w->dh != NULL) {
            w->dh[i] = w->dh_far[i] = w->dh_low[i] = 0;
        }
    }
    w->low = ps_low(dim);
    const real coarseness = (real)ps_coarseness(dim);
    w->least_high = (real)INFINITY;
    for (int i = 0; i < (int)pack_round(n, VW); i++) {
        w->high[i] = ps_high(coarseness, w->kappa[i], w->h[i]);
        w->least_high = w->high[i] < w->least_high ? w->high[i] : w->least_high;
    }
    w->has_high = w->least_high < 1;
}

/* Loads kappa, h, dh and the log-weights of n components. */
static inline void
ps_tile_components(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t m0, int n, ptrdiff_t t) {
    for (int i = 0; i < n; i++) {
        w->kappa[i] = *ps_row(ps->scale, m0 + i, t);
        w->a[i] = ps->log_weights.p != NULL ? *ps_row(ps->log_weights, m0 + i, t) : 0;
    }
    ps_tile_finish(w, ps->dim, n);
}

/* With kappa = 0 the distribution is uniform even at the antipode, where log y is -inf; NaN stays NaN. */
static inline vr
ps_log_prob(vr log_y, vr kappa, vr h) {
    const vr finite = v_max(v_set(-100), log_y);
    return v_fma(kappa, v_sel(m_eq(kappa, v_set(0)), finite, log_y), h);
}

/* log y + h' of a cosine.  In many dimensions most cosines are near 0: log y is then nearly -log 2 and h' nearly log 2, so
 * their sum would cancel.  log(1 + u) + (h' - log 2) keeps all digits. */
static inline vr
ps_slope(const struct ps_tile *w, int j, vr u) {
    const vm is_near = m_lt(v_set((real)0.5), u);
    const vr half = v_mul(v_sub(u, v_set(1)), v_set((real)0.5));
    const vr dh = v_sel(is_near, v_ld(w->dh + j), v_ld(w->dh_far + j));
    return v_add(v_log1m(v_sel(is_near, half, u)), dh);
}

/* The least 1 + u that a gradient divides by, at the antipode and beyond: one rounding step of the caller's numbers. */
static inline void
ps_set_least(struct ps_tile *w, int32_t dtype) {
    const double step = dtype == PYA_OPS_F64 ? 1.1102230246251565e-16 : 5.9604644775390625e-8;
    w->least = (real)step;
    w->least_log_y = (real)log(0.5 * step);
}

/* Units of work that a thread takes at a time: 1/32 of its share, from 1 to 64. */
static inline int
ps_chunk(ptrdiff_t units, int n_threads) {
    ptrdiff_t c = units / ((ptrdiff_t)n_threads * 32);
    return c < 1 ? 1 : c > 64 ? 64 : (int)c;
}
