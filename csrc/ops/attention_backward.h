#pragma once
/* What the backward's kernels share: the parts that do not multiply matrices.  Floor 3. */
#include "attention_drop.h"
#include "attention_plan.h"

/* Per query of a block. */
struct att_rows {
    real *top, *inverse, *delta; /* [ATT_Q] */
};

static inline void
att_rows_carve(struct att_rows *w, struct pya_scratch *s) {
    w->top = scratch_take(s, ATT_Q);
    w->inverse = scratch_take(s, ATT_Q);
    w->delta = scratch_take(s, ATT_Q);
}

/* Number i, of the block's first query. */
static inline void
att_row_load(const struct pya_ops_attention *a, struct att_rows *w, int i, struct att_block x) {
    const real *o = att_row(a->out, x.b, x.h, x.q0);
    const real *g = att_row(a->grad, x.b, x.h, x.q0);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (ptrdiff_t j = 0; j < a->dim_v; j++) {
        sum += (double)o[j] * (double)g[j];
    }
    w->delta[i] = (real)sum;
    w->top[i] = att_tops(a, x)[0];
    w->inverse[i] = att_tops(a, x)[a->n_q];
}

static inline void
att_rows_load(const struct pya_ops_attention *a, struct att_rows *w, struct att_block x) {
    for (int i = 0; i < x.nq; i++, x.q0++) {
        att_row_load(a, w, i, x);
    }
    for (int i = x.nq; i < ATT_Q; i++) {
        w->delta[i] = 0;
        w->top[i] = (real)INFINITY; /* missing query: P = 0 */
        w->inverse[i] = 0;
    }
}

/* ds: [nk][ATT_LD] */
static inline void
att_write_bias(const struct pya_ops_attention *a, const real *ds, struct att_block x) {
    const struct pya_ops_scores o = a->d_bias;
    real *p = (real *)o.p + att_first_score(o, x);
    if (!a->d_bias_add && o.k == 1) {
        pack_transpose(p, o.q, ds, ATT_LD, x.nk, x.nq, x.nk);
        return;
    }
    for (int q = 0; q < x.nq; q++) {
        for (int k = 0; k < x.nk; k++) {
            p[q * o.q + k * o.k] += ds[k * ATT_LD + q];
        }
    }
}

/* dqt: [dim][ATT_LD], not yet scaled */
static inline void
att_write_queries(const struct pya_ops_attention *a, real *dqt, struct att_block x) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    for (ptrdiff_t j = 0; j < d; j++) {
        for (int q = 0; q < x.nq; q += VW) {
            real *p = dqt + j * ATT_LD + q;
            v_st(p, v_mul(v_ld(p), v_set((real)a->scale)));
        }
    }
    pack_transpose(att_row_out(a->d_q, x.b, x.h, x.q0), a->d_q.s, dqt, ATT_LD, d, x.nq, d);
}

/* Sums of gradients of keys and values; rows ld and ldv apart. */
struct att_keys {
    real *dk, *dv;
    ptrdiff_t ld, ldv;
};

static inline void
att_keys_carve(
    struct att_keys *w, struct pya_scratch *s, const struct pya_ops_attention *a, ptrdiff_t n) {
    w->ld = pack_stride(pack_round((ptrdiff_t)a->dim, VW));
    w->ldv = pack_stride(pack_round((ptrdiff_t)a->dim_v, VW));
    w->dk = scratch_take(s, (size_t)(n * w->ld));
    w->dv = scratch_take(s, (size_t)(n * w->ldv));
}

/* For n keys. */
static inline void
att_keys_clear(struct att_keys *w, ptrdiff_t n) {
    memset(w->dk, 0, (size_t)(n * w->ld) * sizeof(real));
    memset(w->dv, 0, (size_t)(n * w->ldv) * sizeof(real));
}

/* Writes the gradients of keys x.k0 to end; the sums begin with those of x.k0. */
static inline void
att_write_keys(
    const struct pya_ops_attention *a, const struct att_keys *w, struct att_block x,
    ptrdiff_t end) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    for (ptrdiff_t k = x.k0; k < end; k++) {
        if (a->d_k.p != NULL) {
            real *dst = att_row_out(a->d_k, x.b, kv, k);
            const real *src = w->dk + (k - x.k0) * w->ld;
            for (ptrdiff_t j = 0; j < a->dim; j++) {
                dst[j] = src[j] * (real)a->scale;
            }
        }
        if (a->d_v.p != NULL) {
            memcpy(
                att_row_out(a->d_v, x.b, kv, k), w->dv + (k - x.k0) * w->ldv,
                (size_t)a->dim_v * sizeof(real));
        }
    }
}
