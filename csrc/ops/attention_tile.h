#pragma once
/* Shared by scaled attention's kernels.  Scores are kept transposed, keys in rows and queries in lanes: K and V can then be
 * read in place, and the softmax's maxima and sums run down the rows without shuffles.  Floor 1. */
#include <math.h>

#include "kernels.h"
#include "pack.h"
#include "pack_transpose.h"
#include "tile.h"

enum {
    ATT_Q = 64,       /* queries in a block */
    ATT_K = 128,      /* keys in a block */
    ATT_LD = 64 + 16, /* row stride of a block of scores */
    ATT_TERMS = 64,   /* of a score, summed at once: a sum of short sums loses fewer digits */
};

/* Scores are kept in units of log 2, so that a probability is an exp2 without a multiplication. */
static const double att_log2e = 1.44269504088896341;
#define ATT_LEAST_TOP ((real)-1e37) /* the largest score where no key was seen */

/* One block of scores: its position, and how much of it exists. */
struct att_block {
    ptrdiff_t b, h, q0, k0;
    int nq, nk;
};

/* Where the block begins in a bias or mask. */
static inline ptrdiff_t
att_first_score(struct pya_ops_scores w, struct att_block x) {
    return x.b * w.b + x.h * w.h + x.q0 * w.q + x.k0 * w.k;
}

static inline const real *
att_row(struct pya_ops_heads x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t s) {
    return (const real *)x.p + b * x.b + h * x.h + s * x.s;
}

static inline real *
att_row_out(struct pya_ops_heads x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t s) {
    return (real *)x.p + b * x.b + h * x.h + s * x.s;
}

static inline size_t
att_tile_size(const struct pya_ops_attention *a) {
    return (size_t)(a->n_k < ATT_K ? a->n_k : ATT_K) * ATT_LD;
}

/* Where the largest scores of a block of queries are stored; the inverse sums are a->n_q further on. */
static inline real *
att_tops(const struct pya_ops_attention *a, struct att_block x) {
    return (real *)a->stats + (x.b * (ptrdiff_t)a->n_h + x.h) * 2 * (ptrdiff_t)a->n_q + x.q0;
}

/* Number of keys that a block of queries can see. */
static inline ptrdiff_t
att_visible(const struct pya_ops_attention *a, ptrdiff_t q0, int nq) {
    return a->causal && q0 + nq < (ptrdiff_t)a->n_k ? q0 + nq : (ptrdiff_t)a->n_k;
}

static inline void
att_add_bias(const struct pya_ops_attention *a, struct att_block x, real *s) {
    const struct pya_ops_scores w = a->bias;
    const real *p = (const real *)w.p + att_first_score(w, x);
    if (w.q == 0) {
        for (int k = 0; k < x.nk; k++) {
            const vr bias = v_set(p[k * w.k]);
            for (int q = 0; q < x.nq; q += VW) {
                real *dst = s + k * ATT_LD + q;
                v_st(dst, v_fma(v_set((real)att_log2e), bias, v_ld(dst)));
            }
        }
        return;
    }
    if (w.k == 1) {
        pack_add_transposed(s, ATT_LD, p, w.q, x.nq, x.nk, (real)att_log2e);
        return;
    }
    for (int k = 0; k < x.nk; k++) {
        for (int q = 0; q < x.nq; q++) {
            real *dst = s + k * ATT_LD + q;
            *dst = r_fma((real)att_log2e, p[q * w.q + k * w.k], *dst);
        }
    }
}

/* The bias of a block that will be computed next. */
static inline void
att_prefetch_bias(const struct pya_ops_attention *a, struct att_block x) {
    const struct pya_ops_scores w = a->bias;
    if (w.p != NULL && w.q != 0 && w.k == 1 && x.nk > 0) {
        pack_prefetch((const real *)w.p + att_first_score(w, x) - x.nk, w.q, x.nq, x.nk);
    }
}

static inline void
att_apply_mask(const struct pya_ops_attention *a, struct att_block x, real *s) {
    const struct pya_ops_scores w = a->mask;
    const uint8_t *p = (const uint8_t *)w.p + att_first_score(w, x);
    for (int q = 0; q < x.nq; q++) {
        for (int k = 0; k < x.nk; k++) {
            if (p[q * w.q + k * w.k] == 0) {
                s[k * ATT_LD + q] = (real)-INFINITY;
            }
        }
    }
}

/* Applies bias and masks to the transposed scores of one block. */
static inline void
att_adjust_scores(const struct pya_ops_attention *a, struct att_block x, real *s) {
    if (a->bias.p != NULL) {
        att_add_bias(a, x, s);
    }
    if (a->mask.p != NULL) {
        att_apply_mask(a, x, s);
    }
    if (a->causal && x.k0 + x.nk - 1 > x.q0) {
        for (int k = 0; k < x.nk; k++) {
            for (int q = 0; q < x.nq && x.q0 + q < x.k0 + k; q++) {
                s[k * ATT_LD + q] = (real)-INFINITY;
            }
        }
    }
}

/* The transposed scores of one block.  qt: [dim][ATT_LD], scaled by scale / log 2. */
static inline void
att_scores(const struct pya_ops_attention *a, struct att_block x, const real *qt, real *s) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    const int dim = (int)a->dim;
    for (int d = 0; d < dim; d += ATT_TERMS) {
        struct pya_tile_a keys = {att_row(a->k, x.b, kv, x.k0) + d, a->k.s, 1};
        struct pya_tile_b queries = {qt + d * ATT_LD, ATT_LD};
        struct pya_tile_c dst = {s, ATT_LD, d > 0};
        const int n = dim - d < ATT_TERMS ? dim - d : ATT_TERMS;
        tile_multiply(x.nk, x.nq, n, keys, queries, dst);
    }
    att_adjust_scores(a, x, s);
    x.k0 += x.nk;
    att_prefetch_bias(a, x);
}

/* dst[d][q] = scale * rows[q][d]; missing lanes are zero, up to a whole number of `whole` */
static inline void
att_pack_lanes(
    real *dst, const real *rows, ptrdiff_t row, int nq, ptrdiff_t d, real scale, ptrdiff_t whole) {
    const int lanes = (int)pack_round(nq, whole);
    pack_transpose(dst, ATT_LD, rows, row, nq, d, lanes);
    for (ptrdiff_t j = 0; j < d; j++) {
        for (int q = 0; q < lanes; q += VW) {
            v_st(dst + j * ATT_LD + q, v_mul(v_ld(dst + j * ATT_LD + q), v_set(scale)));
        }
    }
}
