/* Scaled dot-product attention, backward: recomputes the scores block by block from each row's maximum and sum, which the
 * forward kept.  With P the probabilities, M the dropout factors and delta = sum(dO * O):
 *   dV = (P M)^T dO, dS = P (M dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q, dBias = dS. */
#include "attention_backward.h"
#include "attention_few.h"
#include "attention_scores.h"

struct backward_scratch {
    real *qt, *dot; /* [dim][ATT_LD], [dim_v][ATT_LD]: scaled queries and dO in lanes */
    real *q, *grad; /* the same in rows, as far apart as those of sums */
    real *s, *dp;   /* [ATT_K][ATT_LD] */
    real *dqt;      /* [dim][ATT_LD] */
    bool has_begun; /* else dqt holds nothing yet: the first product overwrites it */
    struct att_rows rows;
    bool once; /* each key meets one block of queries: its gradients are complete after that */
    struct att_keys sums; /* of the unit's keys, or if once of a block */
};

static void
backward_carve(
    struct backward_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a,
    ptrdiff_t keys) {
    const size_t d = (size_t)a->dim;
    const size_t dv = (size_t)a->dim_v;
    att_keys_carve(&w->sums, s, a, keys);
    w->qt = scratch_take(s, d * ATT_LD);
    w->dot = scratch_take(s, dv * ATT_LD);
    w->q = scratch_take(s, (size_t)(ATT_Q * w->sums.ld));
    w->grad = scratch_take(s, (size_t)(ATT_Q * w->sums.ldv));
    w->s = scratch_take(s, att_tile_size(a));
    w->dp = scratch_take(s, att_tile_size(a));
    w->dqt = scratch_take(s, d * ATT_LD);
    att_rows_carve(&w->rows, s);
}

static void
backward_load_queries(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const real *q = att_row(a->q, x.b, x.h, x.q0);
    const real *grad = att_row(a->grad, x.b, x.h, x.q0);
    att_pack_lanes(w->qt, q, a->q.s, x.nq, d, (real)(a->scale * att_log2e), VW);
    att_pack_lanes(w->dot, grad, a->grad.s, x.nq, dv, 1, VW);
    pack_rows(w->q, w->sums.ld, q, a->q.s, x.nq, d, pack_round(d, VW));
    pack_rows(w->grad, w->sums.ldv, grad, a->grad.s, x.nq, dv, pack_round(dv, VW));
    att_rows_load(a, &w->rows, x);
}

/* Turns scores into P in s, with dropout applied, and writes dS to dp. */
static inline void
backward_scores(const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x) {
    const uint32_t seed = att_seed(a, x);
    for (int q = 0; q < x.nq; q += VW) {
        const vr top = v_ld(w->rows.top + q);
        const vr inverse = v_ld(w->rows.inverse + q);
        const vr delta = v_ld(w->rows.delta + q);
        for (int k = 0; k < x.nk; k++) {
            real *s = w->s + k * ATT_LD + q;
            real *dp = w->dp + k * ATT_LD + q;
            vr p = v_mul(v_exp2(v_sub(v_ld(s), top)), inverse);
            vr g = v_ld(dp);
            vr kept = p;
            if (a->dropout > 0) {
                vr keep = att_keep(a, seed, x.q0 + q, x.k0 + k);
                kept = v_mul(p, keep);
                g = v_mul(g, keep);
            }
            v_st(s, kept);
            v_st(dp, v_mul(p, v_sub(g, delta)));
        }
    }
}

/* The block's queries see none of its keys. */
static void
backward_hidden(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x,
    const struct att_range *r) {
    if (w->once && r->want_kv) {
        att_keys_clear(&w->sums, x.nk);
        att_write_keys(a, &w->sums, x, x.k0 + x.nk);
    }
}

static void
backward_block(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x,
    const struct att_range *r) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    const int d = (int)a->dim;
    const int dv = (int)a->dim_v;
    if (att_is_hidden(a, x)) {
        backward_hidden(a, w, x, r);
        return;
    }
    att_scores(a, x, w->qt, w->s);
    struct pya_tile_a values = {att_row(a->v, x.b, kv, x.k0), a->v.s, 1};
    struct pya_tile_b dot = {w->dot, ATT_LD};
    struct pya_tile_c dp = {w->dp, ATT_LD, 0};
    tile_multiply(x.nk, x.nq, dv, values, dot, dp);
    backward_scores(a, w, x);
    if (r->want_q && a->d_bias.p != NULL) {
        att_write_bias(a, w->dp, x);
    }
    if (r->want_q && a->d_q.p != NULL) {
        struct pya_tile_a keys = {att_row(a->k, x.b, kv, x.k0), 1, a->k.s};
        struct pya_tile_b ds = {w->dp, ATT_LD};
        struct pya_tile_c dst = {w->dqt, ATT_LD, w->has_begun};
        tile_multiply(d, x.nq, x.nk, keys, ds, dst);
        w->has_begun = true;
    }
    if (r->want_kv) {
        const ptrdiff_t k = w->once ? 0 : x.k0 - r->k0;
        struct pya_tile_a p = {w->s, ATT_LD, 1};
        struct pya_tile_b grad = {w->grad, w->sums.ldv};
        struct pya_tile_c dst_v = {w->sums.dv + k * w->sums.ldv, w->sums.ldv, !w->once};
        tile_multiply(x.nk, dv, x.nq, p, grad, dst_v);
        struct pya_tile_a ds = {w->dp, ATT_LD, 1};
        struct pya_tile_b queries = {w->q, w->sums.ld};
        struct pya_tile_c dst_k = {w->sums.dk + k * w->sums.ld, w->sums.ld, !w->once};
        tile_multiply(x.nk, d, x.nq, ds, queries, dst_k);
        if (w->once) {
            att_write_keys(a, &w->sums, x, x.k0 + x.nk);
        }
    }
}

static void
backward_queries(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x,
    const struct att_range *r) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t visible = att_visible(a, x);
    const ptrdiff_t end = r->k1 < visible ? r->k1 : visible;
    backward_load_queries(a, w, x);
    w->has_begun = false;
    for (x.k0 = r->k0; x.k0 < end; x.k0 += ATT_K) {
        x.nk = (int)(end - x.k0 < ATT_K ? end - x.k0 : ATT_K);
        backward_block(a, w, x, r);
    }
    for (x.k0 = end > r->k0 ? end : r->k0; x.k0 < r->k1; x.k0 += ATT_K) {
        x.nk = (int)(r->k1 - x.k0 < ATT_K ? r->k1 - x.k0 : ATT_K);
        backward_hidden(a, w, x, r);
    }
    if (r->want_q && a->d_q.p != NULL) {
        if (!w->has_begun) {
            memset(w->dqt, 0, (size_t)(d * ATT_LD) * sizeof(real));
        }
        att_write_queries(a, w->dqt, x);
    }
}

static void
backward_unit(
    const struct pya_ops_attention *a, struct backward_scratch *w, const struct att_range *r) {
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    const ptrdiff_t n_kv = r->kv1 - r->kv0;
    for (ptrdiff_t n = 0; n < (r->b1 - r->b0) * n_kv; n++) {
        const ptrdiff_t b = r->b0 + n / n_kv;
        const ptrdiff_t kv = r->kv0 + n % n_kv;
        if (r->want_kv && !w->once) {
            att_keys_clear(&w->sums, r->k1 - r->k0);
        }
        for (ptrdiff_t h = kv * group; h < (kv + 1) * group; h++) {
            for (ptrdiff_t q0 = r->q0; q0 < r->q1; q0 += ATT_Q) {
                struct att_block x = {b, h, q0, 0, 0, 0};
                x.nq = (int)(r->q1 - q0 < ATT_Q ? r->q1 - q0 : ATT_Q);
                backward_queries(a, w, x, r);
            }
        }
        if (r->want_kv && !w->once) {
            const struct att_block first = {b, kv * group, 0, r->k0, 0, 0};
            att_write_keys(a, &w->sums, first, r->k1);
        }
    }
}

static int
backward_run(const struct pya_ops_attention *a, struct att_plan plan) {
    const bool once = a->n_h == a->n_kv && a->n_q <= ATT_Q;
    const ptrdiff_t keys = !plan.want_kv ? 0 : once && plan.k > ATT_K ? ATT_K : plan.k;
    int failed = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct backward_scratch w = {.once = once};
        struct pya_scratch s = {NULL, 0};
        backward_carve(&w, &s, a, keys);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            backward_carve(&w, &s, a, keys);
        }
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t u = 0; u < att_n_units(a, plan); u++) {
            const struct att_range r = att_unit(a, plan, u);
            if (s.base != NULL) {
                backward_unit(a, &w, &r);
            }
        }
        scratch_end(&s, &local);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}

int
PYA_FN(pya_attention_backward)(const struct pya_ops_attention *a) {
#ifndef PYA_ISA_scalar /* where a lane is one query, none is idle */
    if (att_is_few(a)) {
        return PYA_FN(pya_attention_few_backward)(a);
    }
#endif
    return att_divide(a, ATT_Q, backward_run);
}
