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

/* Number of keys that causal attention shows to a block of queries. */
static inline ptrdiff_t
att_causal_end(const struct pya_ops_attention *a, struct att_block x) {
    const ptrdiff_t end = x.q0 + x.nq;
    return a->causal && end < (ptrdiff_t)a->n_k ? end : (ptrdiff_t)a->n_k;
}

/* May blocks be left out that a mask hides?  Not if the gradient of the bias is yet to be written there. */
static inline bool
att_may_skip(const struct pya_ops_attention *a) {
    return a->mask.p != NULL && (a->d_bias.p == NULL || a->d_bias_add != 0);
}

/* Number of keys, one at least, that the block can see: the same without those at the end that a mask hides from all queries, as
 * the padding of a batch. */
static inline ptrdiff_t
att_visible(const struct pya_ops_attention *a, struct att_block x) {
    const struct pya_ops_scores w = a->mask;
    ptrdiff_t end = att_causal_end(a, x);
    if (w.q != 0 || !att_may_skip(a)) {
        return end;
    }
    const uint8_t *p = (const uint8_t *)w.p + x.b * w.b + x.h * w.h;
    while (w.k == 1 && end > 64 && b_zeros(p + end - 64) == UINT64_MAX) {
        end -= 64;
    }
    while (end > 1 && p[(end - 1) * w.k] == 0) {
        end--;
    }
    return end;
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
