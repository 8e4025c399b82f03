#pragma once
/* The end of attention's forward: results and statistics of one block of queries.  Floor 2. */
#include <string.h>

#include "attention_tile.h"

/* Of one block of queries. */
struct att_result {
    real *ot; /* [dim_v][ATT_LD]: sums of values, not yet divided by the sum of probabilities */
    real *top, *sum; /* [ATT_Q]: largest score, and sum of the unnormalised probabilities */
    bool has_begun;  /* else ot holds nothing yet: the first product overwrites it */
};

static inline void
att_result_carve(struct att_result *w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    w->ot = scratch_take(s, (size_t)a->dim_v * ATT_LD);
    w->top = scratch_take(s, ATT_Q);
    w->sum = scratch_take(s, ATT_Q);
}

static inline void
att_result_clear(struct att_result *w) {
    for (int q = 0; q < ATT_Q; q++) {
        w->top[q] = ATT_LEAST_TOP;
        w->sum[q] = 0;
    }
    w->has_begun = false;
}

static inline void
att_result_write(const struct pya_ops_attention *a, struct att_result *w, struct att_block x) {
    real *top = a->stats == NULL ? NULL : att_tops(a, x);
    if (!w->has_begun) { /* the mask hides all keys */
        memset(w->ot, 0, (size_t)a->dim_v * ATT_LD * sizeof(real));
    }
    for (int q = 0; q < x.nq; q += VW) {
        const vr sum = v_ld(w->sum + q);
        const vm none = m_eq(sum, v_set(0)); /* every key masked: zeros, not NaN */
        const vr inverse = v_sel(none, v_set(0), v_rcp(sum));
        if (top != NULL) {
            const int n = x.nq - q < VW ? x.nq - q : VW;
            v_st_n(top + q, v_ld(w->top + q), n);
            v_st_n(top + a->n_q + q, inverse, n);
        }
        for (ptrdiff_t d = 0; d < a->dim_v; d++) {
            v_st(w->ot + d * ATT_LD + q, v_mul(v_ld(w->ot + d * ATT_LD + q), inverse));
        }
    }
    pack_transpose(
        att_row_out(a->out, x.b, x.h, x.q0), a->out.s, w->ot, ATT_LD, (ptrdiff_t)a->dim_v, x.nq,
        (ptrdiff_t)a->dim_v);
}
