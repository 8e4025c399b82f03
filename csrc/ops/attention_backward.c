/* Scaled dot-product attention, backward: recomputes the scores block by block from each row's maximum and sum, which the
 * forward kept.  With P the probabilities, M the dropout factors and delta = sum(dO * O):
 *   dV = (P M)^T dO, dS = P (M dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q, dBias = dS. */
#include "attention_drop.h"
#include "attention_tile.h"

/* A unit's share: heads of one key head (or of all that share a bias), with ranges of queries and keys. */
struct backward_range {
    ptrdiff_t b0, b1, kv0, kv1, q0, q1, k0, k1;
    bool want_q, want_kv; /* want_q includes the gradient of the bias */
    bool once; /* each key meets one block of queries: its gradients are complete after that */
};

struct backward_scratch {
    real *qt, *dot; /* [dim][ATT_LD], [dim_v][ATT_LD]: scaled queries and dO in lanes */
    real *q, *grad; /* [ATT_Q][ld], [ATT_Q][ldv]: the same in rows */
    real *s, *dp;   /* [ATT_K][ATT_LD] */
    real *dqt;      /* [dim][ATT_LD] */
    real *top, *inverse, *delta; /* [ATT_Q] */
    real *dk, *dv;               /* [n_k of the unit, or of a block if once][ld], [..][ldv] */
    ptrdiff_t ld, ldv;
};

static void
backward_carve(
    struct backward_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a,
    ptrdiff_t keys) {
    const size_t d = (size_t)a->dim;
    const size_t dv = (size_t)a->dim_v;
    w->ld = pack_stride(pack_round((ptrdiff_t)d, VW));
    w->ldv = pack_stride(pack_round((ptrdiff_t)dv, VW));
    w->qt = scratch_take(s, d * ATT_LD);
    w->dot = scratch_take(s, dv * ATT_LD);
    w->q = scratch_take(s, (size_t)(ATT_Q * w->ld));
    w->grad = scratch_take(s, (size_t)(ATT_Q * w->ldv));
    w->s = scratch_take(s, att_tile_size(a));
    w->dp = scratch_take(s, att_tile_size(a));
    w->dqt = scratch_take(s, d * ATT_LD);
    w->top = scratch_take(s, ATT_Q);
    w->inverse = scratch_take(s, ATT_Q);
    w->delta = scratch_take(s, ATT_Q);
    w->dk = scratch_take(s, (size_t)(keys * w->ld));
    w->dv = scratch_take(s, (size_t)(keys * w->ldv));
}

static void
backward_load_queries(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const real *q = att_row(a->q, x.b, x.h, x.q0);
    const real *grad = att_row(a->grad, x.b, x.h, x.q0);
    const real *top = att_tops(a, x);
    const real *inverse = top + a->n_q;
    att_pack_lanes(w->qt, q, a->q.s, x.nq, d, (real)(a->scale * att_log2e));
    att_pack_lanes(w->dot, grad, a->grad.s, x.nq, dv, 1);
    pack_rows(w->q, w->ld, q, a->q.s, x.nq, d, pack_round(d, VW));
    pack_rows(w->grad, w->ldv, grad, a->grad.s, x.nq, dv, pack_round(dv, VW));
    for (int i = 0; i < ATT_Q; i++) {
        w->delta[i] = 0;
        w->top[i] = (real)INFINITY; /* missing query: P = 0 */
        w->inverse[i] = 0;
        if (i >= x.nq) {
            continue;
        }
        const real *o = att_row(a->out, x.b, x.h, x.q0 + i);
        const real *g = w->grad + i * w->ldv;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (ptrdiff_t j = 0; j < dv; j++) {
            sum += (double)o[j] * (double)g[j];
        }
        w->delta[i] = (real)sum;
        w->top[i] = top[i];
        w->inverse[i] = inverse[i];
    }
}

/* Turns scores into P in s, with dropout applied, and writes dS to dp. */
static inline void
backward_scores(const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x) {
    const uint32_t seed = att_seed(a, x);
    for (int q = 0; q < x.nq; q += VW) {
        const vr top = v_ld(w->top + q);
        const vr inverse = v_ld(w->inverse + q);
        const vr delta = v_ld(w->delta + q);
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

static void
backward_bias(const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x) {
    const struct pya_ops_scores o = a->d_bias;
    real *p = (real *)o.p + x.b * o.b + x.h * o.h + x.q0 * o.q + x.k0 * o.k;
    if (!a->d_bias_add && o.k == 1) {
        pack_transpose(p, o.q, w->dp, ATT_LD, x.nk, x.nq, x.nk);
        return;
    }
    for (int q = 0; q < x.nq; q++) {
        for (int k = 0; k < x.nk; k++) {
            p[q * o.q + k * o.k] += w->dp[k * ATT_LD + q];
        }
    }
}

/* Writes the gradients of keys x.k0 to end; the scratch begins with those of x.k0. */
static void
backward_write_keys(
    const struct pya_ops_attention *a, const struct backward_scratch *w, struct att_block x,
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

/* For n keys. */
static void
backward_clear_keys(struct backward_scratch *w, ptrdiff_t n) {
    memset(w->dk, 0, (size_t)(n * w->ld) * sizeof(real));
    memset(w->dv, 0, (size_t)(n * w->ldv) * sizeof(real));
}

static void
backward_block(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x,
    const struct backward_range *r) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    const int d = (int)a->dim;
    const int dv = (int)a->dim_v;
    att_scores(a, x, w->qt, w->s);
    struct pya_tile_a values = {att_row(a->v, x.b, kv, x.k0), a->v.s, 1};
    struct pya_tile_b dot = {w->dot, ATT_LD};
    struct pya_tile_c dp = {w->dp, ATT_LD, 0};
    tile_multiply(x.nk, x.nq, dv, values, dot, dp);
    backward_scores(a, w, x);
    if (r->want_q && a->d_bias.p != NULL) {
        backward_bias(a, w, x);
    }
    if (r->want_q && a->d_q.p != NULL) {
        struct pya_tile_a keys = {att_row(a->k, x.b, kv, x.k0), 1, a->k.s};
        struct pya_tile_b ds = {w->dp, ATT_LD};
        struct pya_tile_c dst = {w->dqt, ATT_LD, 1};
        tile_multiply(d, x.nq, x.nk, keys, ds, dst);
    }
    if (r->want_kv) {
        const ptrdiff_t k = r->once ? 0 : x.k0 - r->k0;
        struct pya_tile_a p = {w->s, ATT_LD, 1};
        struct pya_tile_b grad = {w->grad, w->ldv};
        struct pya_tile_c dst_v = {w->dv + k * w->ldv, w->ldv, !r->once};
        tile_multiply(x.nk, dv, x.nq, p, grad, dst_v);
        struct pya_tile_a ds = {w->dp, ATT_LD, 1};
        struct pya_tile_b queries = {w->q, w->ld};
        struct pya_tile_c dst_k = {w->dk + k * w->ld, w->ld, !r->once};
        tile_multiply(x.nk, d, x.nq, ds, queries, dst_k);
        if (r->once) {
            backward_write_keys(a, w, x, x.k0 + x.nk);
        }
    }
}

static void
backward_queries(
    const struct pya_ops_attention *a, struct backward_scratch *w, struct att_block x,
    const struct backward_range *r) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t visible = att_visible(a, x.q0, x.nq);
    const ptrdiff_t end = r->k1 < visible ? r->k1 : visible;
    backward_load_queries(a, w, x);
    memset(w->dqt, 0, (size_t)(d * ATT_LD) * sizeof(real));
    for (x.k0 = r->k0; x.k0 < end; x.k0 += ATT_K) {
        x.nk = (int)(end - x.k0 < ATT_K ? end - x.k0 : ATT_K);
        backward_block(a, w, x, r);
    }
    if (r->once && r->want_kv) { /* no query sees the keys from end on */
        for (x.k0 = end > r->k0 ? end : r->k0; x.k0 < r->k1; x.k0 += ATT_K) {
            const ptrdiff_t n = r->k1 - x.k0 < ATT_K ? r->k1 - x.k0 : ATT_K;
            backward_clear_keys(w, n);
            backward_write_keys(a, w, x, x.k0 + n);
        }
    }
    if (!r->want_q || a->d_q.p == NULL) {
        return;
    }
    for (ptrdiff_t j = 0; j < d; j++) {
        for (int q = 0; q < x.nq; q += VW) {
            real *p = w->dqt + j * ATT_LD + q;
            v_st(p, v_mul(v_ld(p), v_set((real)a->scale)));
        }
    }
    pack_transpose(att_row_out(a->d_q, x.b, x.h, x.q0), a->d_q.s, w->dqt, ATT_LD, d, x.nq, d);
}

static void
backward_unit(
    const struct pya_ops_attention *a, struct backward_scratch *w, const struct backward_range *r) {
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    const ptrdiff_t n_kv = r->kv1 - r->kv0;
    for (ptrdiff_t n = 0; n < (r->b1 - r->b0) * n_kv; n++) {
        const ptrdiff_t b = r->b0 + n / n_kv;
        const ptrdiff_t kv = r->kv0 + n % n_kv;
        if (r->want_kv && !r->once) {
            backward_clear_keys(w, r->k1 - r->k0);
        }
        for (ptrdiff_t h = kv * group; h < (kv + 1) * group; h++) {
            for (ptrdiff_t q0 = r->q0; q0 < r->q1; q0 += ATT_Q) {
                struct att_block x = {b, h, q0, 0, 0, 0};
                x.nq = (int)(r->q1 - q0 < ATT_Q ? r->q1 - q0 : ATT_Q);
                backward_queries(a, w, x, r);
            }
        }
        if (r->want_kv && !r->once) {
            const struct att_block first = {b, kv * group, 0, r->k0, 0, 0};
            backward_write_keys(a, w, first, r->k1);
        }
    }
}

/* How many entries of each index one unit takes. */
struct backward_plan {
    ptrdiff_t b, kv, q, k;
    bool want_q, want_kv;
};

static inline ptrdiff_t
backward_parts(int64_t n, ptrdiff_t step) {
    return ((ptrdiff_t)n + step - 1) / step;
}

static inline void
backward_part(ptrdiff_t index, ptrdiff_t step, int64_t n, ptrdiff_t *begin, ptrdiff_t *end) {
    *begin = index * step;
    *end = *begin + step < n ? *begin + step : (ptrdiff_t)n;
}

static int
backward_run(const struct pya_ops_attention *a, struct backward_plan plan) {
    const ptrdiff_t nb = backward_parts(a->n_b, plan.b);
    const ptrdiff_t nkv = backward_parts(a->n_kv, plan.kv);
    const ptrdiff_t nq = backward_parts(a->n_q, plan.q);
    const ptrdiff_t nk = backward_parts(a->n_k, plan.k);
    const bool once = a->n_h == a->n_kv && a->n_q <= ATT_Q;
    const ptrdiff_t keys = !plan.want_kv ? 0 : once && plan.k > ATT_K ? ATT_K : plan.k;
    int failed = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct backward_scratch w;
        struct pya_scratch s = {NULL, 0};
        backward_carve(&w, &s, a, keys);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            backward_carve(&w, &s, a, keys);
        }
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t u = 0; u < nb * nkv * nq * nk; u++) {
            struct backward_range r = {
                .want_q = plan.want_q, .want_kv = plan.want_kv, .once = once};
            backward_part(u / (nkv * nq * nk), plan.b, a->n_b, &r.b0, &r.b1);
            backward_part(u / (nq * nk) % nkv, plan.kv, a->n_kv, &r.kv0, &r.kv1);
            backward_part(u / nk % nq, plan.q, a->n_q, &r.q0, &r.q1);
            backward_part(u % nk, plan.k, a->n_k, &r.k0, &r.k1);
            if (s.base != NULL) {
                backward_unit(a, &w, &r);
            }
        }
        scratch_end(&s, &local);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}

/* If there are enough heads, each is one unit and every product is computed once.  If not, queries and keys are cut in two
 * passes that both compute the scores.  Heads that share a gradient of the bias stay in one unit, so that it is summed in a
 * fixed order without locks. */
int
PYA_FN(pya_attention_backward)(const struct pya_ops_attention *a) {
    const bool bias = a->d_bias.p != NULL;
    const ptrdiff_t all_q = (ptrdiff_t)a->n_q;
    const ptrdiff_t all_k = (ptrdiff_t)a->n_k;
    struct backward_plan whole = {1, 1, all_q, all_k, true, true};
    if (bias && a->d_bias.b == 0) {
        whole.b = (ptrdiff_t)a->n_b;
    }
    if (bias && a->d_bias.h == 0) {
        whole.kv = (ptrdiff_t)a->n_kv;
    }
    const ptrdiff_t units = backward_parts(a->n_b, whole.b) * backward_parts(a->n_kv, whole.kv);
    if (units >= a->n_threads || (all_q <= ATT_Q && all_k <= ATT_K)) {
        return backward_run(a, whole);
    }
    struct backward_plan keys = {1, 1, all_q, 4 * ATT_K, false, true};
    struct backward_plan queries = {whole.b, whole.kv, bias && a->d_bias.q == 0 ? all_q : ATT_Q,
                                    all_k,   true,     false};
    int status = backward_run(a, keys);
    return status != PYA_OPS_OK ? status : backward_run(a, queries);
}
