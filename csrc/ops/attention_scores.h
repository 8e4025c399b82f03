#pragma once
/* Scores of one block, with bias and masks.  Floor 3. */
#include "attention_mask.h"

enum { ATT_STRIP = 8 };  /* queries whose biases are gathered together */
enum { ATT_TERMS = 64 }; /* of a score, summed at once: a sum of short sums loses fewer digits */

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
    if (w.q == 1) {
        for (int k = 0; k < x.nk; k++) {
            for (int q = 0; q < x.nq; q += VW) {
                real *dst = s + k * ATT_LD + q;
                const vr bias = v_ld_n(p + k * w.k + q, x.nq - q < VW ? x.nq - q : VW);
                v_st(dst, v_fma(v_set((real)att_log2e), bias, v_ld(dst)));
            }
        }
        return;
    }
    for (int q = 0; q < x.nq;
         q += ATT_STRIP) { /* as of a table (queries, keys, heads): its rows are read in order */
        real strip[ATT_STRIP * ATT_K];
        const int n = x.nq - q < ATT_STRIP ? x.nq - q : ATT_STRIP;
        for (int i = 0; i < n; i++) {
            for (int k = 0; k < x.nk; k++) {
                strip[i * ATT_K + k] = p[(q + i) * w.q + k * w.k];
            }
        }
        pack_add_transposed(s + q, ATT_LD, strip, ATT_K, n, x.nk, (real)att_log2e);
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
