/* Scaled dot-product attention, backward, for few queries; the formulas are those of attention_backward.c. */
#include "attention_backward.h"
#include "attention_few.h"
#include "attention_few_tile.h"

enum { FEW_KEYS = 4 }; /* keys of a register tile of their gradients */

struct few_scratch {
    struct few_rows q;    /* scaled by scale / log 2 */
    struct few_rows grad; /* dO */
    struct few_rows dq;   /* not yet scaled */
    real *p, *ds;         /* [FEW_TOGETHER][ATT_K]: scores, then P; dO V^T, then dS */
    struct att_rows rows;
};

static void
few_carve(struct few_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    few_rows_carve(&w->q, s, a->dim);
    few_rows_carve(&w->grad, s, a->dim_v);
    few_rows_carve(&w->dq, s, a->dim);
    w->p = scratch_take(s, (size_t)ATT_K * FEW_TOGETHER);
    w->ds = scratch_take(s, (size_t)ATT_K * FEW_TOGETHER);
    att_rows_carve(&w->rows, s);
}

static void
few_start(const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u) {
    few_load(a, u, a->q, (ptrdiff_t)a->dim, a->scale * att_log2e, w->q);
    few_load(a, u, a->grad, (ptrdiff_t)a->dim_v, 1, w->grad);
    for (int i = 0; i < u.n; i++) {
        att_row_load(a, &w->rows, i, few_place(a, u, i));
    }
}

/* Turns scores of query i into P, and products of its dO with values into dS. */
static void
few_probabilities(struct few_scratch *w, int i, int n) {
    const vr top = v_set(w->rows.top[i]);
    const vr inverse = v_set(w->rows.inverse[i]);
    const vr delta = v_set(w->rows.delta[i]);
    for (int k = 0; k < n; k += VW) {
        real *p = w->p + i * ATT_K + k;
        real *ds = w->ds + i * ATT_K + k;
        const vr each = v_mul(v_exp2(v_sub(v_ld(p), top)), inverse);
        v_st(p, each);
        v_st(ds, v_mul(each, v_sub(v_ld(ds), delta)));
    }
}

static void
few_write_bias(const struct pya_ops_attention *a, const real *ds, struct att_block x) {
    const struct pya_ops_scores o = a->d_bias;
    real *p = (real *)o.p + att_first_score(o, x);
    if (!a->d_bias_add && o.k == 1) {
        memcpy(p, ds, (size_t)x.nk * sizeof(real));
        return;
    }
    for (int k = 0; k < x.nk; k++) {
        p[k * o.k] += ds[k];
    }
}

/* Gradients of a block's keys or values: scaled sums of rows of n_r queries, with weights for each key. */
struct few_sums {
    real *to; /* [][row]: those of its first key, and of the others */
    ptrdiff_t row, dim;
    const real *s; /* [n_r][ATT_K] */
    struct few_rows terms;
    real scale;
    int n_r;
    bool add; /* to what an earlier unit wrote */
};

static inline __attribute__((always_inline)) void
few_sum_tile(const struct few_sums *x, int k, ptrdiff_t d, const int nk, const int nv) {
    vr acc[FEW_KEYS][FEW_NV];
#pragma GCC unroll 4
    for (int j = 0; j < nk; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) {
            acc[j][v] = v_set(0);
        }
    }
    for (int i = 0; i < x->n_r; i++) {
        const real *term = x->terms.p + i * x->terms.row + d;
#pragma GCC unroll 4
        for (int j = 0; j < nk; j++) {
            const vr weight = v_set(x->s[i * ATT_K + k + j]);
#pragma GCC unroll 4
            for (int v = 0; v < nv; v++) {
                acc[j][v] = v_fma(weight, v_ld(term + v * VW), acc[j][v]);
            }
        }
    }
    const vr scale = v_set(x->scale);
#pragma GCC unroll 4
    for (int j = 0; j < nk; j++) {
#pragma GCC unroll 4
        for (int v = 0; v < nv; v++) {
            const ptrdiff_t at = d + v * VW;
            const int n = x->dim - at < VW ? (int)(x->dim - at) : VW;
            real *dst = x->to + (k + j) * x->row + at;
            const vr before = x->add ? v_ld_n(dst, n) : v_set(0);
            v_st_n(dst, v_fma(acc[j][v], scale, before), n);
        }
    }
}

static inline __attribute__((always_inline)) void
few_sum_vectors(const struct few_sums *x, int n, ptrdiff_t d, const int nv) {
    int k = 0;
    for (; k + FEW_KEYS <= n; k += FEW_KEYS) {
        few_sum_tile(x, k, d, FEW_KEYS, nv);
    }
    for (; k < n; k++) {
        few_sum_tile(x, k, d, 1, nv);
    }
}

/* Of n keys. */
static void
few_sum(const struct few_sums *x, int n) {
    ptrdiff_t d = 0;
    for (; d + (FEW_NV - 1) * VW < x->dim; d += FEW_NV * VW) {
        few_sum_vectors(x, n, d, FEW_NV);
    }
    for (; d < x->dim; d += VW) {
        few_sum_vectors(x, n, d, 1);
    }
}

static void
few_zeros(struct pya_ops_heads x, struct few_unit u, ptrdiff_t k, ptrdiff_t end, ptrdiff_t dim) {
    for (; x.p != NULL && k < end; k++) {
        memset(att_row_out(x, u.b, u.kv, k), 0, (size_t)dim * sizeof(real));
    }
}

/* Keys that no query of the unit sees; those to come may, and add to what the first one wrote. */
static void
few_unseen(
    const struct pya_ops_attention *a, struct few_unit u, const struct att_range *r, ptrdiff_t k,
    ptrdiff_t end) {
    if (r->want_kv && u.r0 == 0) {
        few_zeros(a->d_k, u, k, end, (ptrdiff_t)a->dim);
        few_zeros(a->d_v, u, k, end, (ptrdiff_t)a->dim_v);
    }
}

static void
few_block(
    const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u,
    const struct att_range *r, ptrdiff_t k0, int n, bool is_first) {
    const struct few_keys keys = {
        att_row(a->k, u.b, u.kv, k0), (ptrdiff_t)a->k.s, (ptrdiff_t)a->dim};
    const struct few_keys values = {
        att_row(a->v, u.b, u.kv, k0), (ptrdiff_t)a->v.s, (ptrdiff_t)a->dim_v};
    few_scores(w->q, w->p, u.n, keys, n);
    few_scores(w->grad, w->ds, u.n, values, n);
    for (int i = 0; i < u.n; i++) {
        few_adjust(a, few_part(a, u, i, k0, n), w->p + i * ATT_K);
    }
    for (int i = 0; i < u.n; i++) { /* not above: see few_adjust() */
        few_probabilities(w, i, n);
        if (r->want_q && a->d_bias.p != NULL) {
            few_write_bias(a, w->ds + i * ATT_K, few_part(a, u, i, k0, n));
        }
    }
    if (r->want_q && a->d_q.p != NULL) {
        few_values(w->ds, w->dq, u.n, keys, n, is_first);
    }
    struct few_sums sums = {.n_r = u.n, .add = u.r0 > 0};
    if (r->want_kv && a->d_v.p != NULL) {
        sums.to = att_row_out(a->d_v, u.b, u.kv, k0);
        sums.row = (ptrdiff_t)a->d_v.s;
        sums.dim = (ptrdiff_t)a->dim_v;
        sums.s = w->p;
        sums.terms = w->grad;
        sums.scale = 1;
        few_sum(&sums, n);
    }
    if (r->want_kv && a->d_k.p != NULL) {
        sums.to = att_row_out(a->d_k, u.b, u.kv, k0);
        sums.row = (ptrdiff_t)a->d_k.s;
        sums.dim = (ptrdiff_t)a->dim;
        sums.s = w->ds;
        sums.terms = w->q;
        sums.scale = (real)(1 / att_log2e); /* the queries have the rest */
        few_sum(&sums, n);
    }
}

static void
few_write_queries(const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u) {
    for (int i = 0; i < u.n; i++) {
        const struct att_block x = few_place(a, u, i);
        real *row = att_row_out(a->d_q, x.b, x.h, x.q0);
        few_store(row, w->dq.p + i * w->dq.row, (ptrdiff_t)a->dim, (real)a->scale);
    }
}

/* The queries of a key head that pass over its keys together. */
static void
few_queries(
    const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u,
    const struct att_range *r) {
    const ptrdiff_t visible = few_visible(a, u);
    const ptrdiff_t end = r->k1 < visible ? r->k1 : visible;
    bool is_first = true;
    few_start(a, w, u);
    for (ptrdiff_t k0 = r->k0; k0 < end; k0 += ATT_K) {
        const int n = (int)(end - k0 < ATT_K ? end - k0 : ATT_K);
        if (few_is_hidden(a, u, k0, n)) {
            few_unseen(a, u, r, k0, k0 + n);
            continue;
        }
        few_block(a, w, u, r, k0, n, is_first);
        is_first = false;
    }
    few_unseen(a, u, r, end > r->k0 ? end : r->k0, r->k1);
    if (r->want_q && a->d_q.p != NULL) {
        if (is_first) {
            few_clear(w->dq, u.n);
        }
        few_write_queries(a, w, u);
    }
}

static void
few_range(const struct pya_ops_attention *a, struct few_scratch *w, const struct att_range *r) {
    const ptrdiff_t n_rows = (ptrdiff_t)(a->n_q * (a->n_h / a->n_kv));
    for (ptrdiff_t b = r->b0; b < r->b1; b++) {
        for (ptrdiff_t kv = r->kv0; kv < r->kv1; kv++) {
            for (ptrdiff_t r0 = 0; r0 < n_rows; r0 += FEW_TOGETHER) {
                const ptrdiff_t n = n_rows - r0 < FEW_TOGETHER ? n_rows - r0 : FEW_TOGETHER;
                few_queries(a, w, (struct few_unit){b, kv, r0, (int)n}, r);
            }
        }
    }
}

static bool
few_share(const struct few_work *work, int part, int n_parts) {
    struct few_scratch w;
    struct pya_scratch s = {NULL, 0};
    few_carve(&w, &s, work->a);
    struct pya_scratch_local local;
    scratch_begin(&s, &local);
    const bool failed = s.base == NULL;
    if (!failed) {
        few_carve(&w, &s, work->a);
        for (ptrdiff_t u = part; u < att_n_units(work->a, work->plan); u += n_parts) {
            const struct att_range r = att_unit(work->a, work->plan, u);
            few_range(work->a, &w, &r);
        }
    }
    scratch_end(&s, &local);
    return failed;
}

static int
few_run_plan(const struct pya_ops_attention *a, struct att_plan plan) {
    return few_run((struct few_work){a, plan, few_share});
}

int
PYA_FN(pya_attention_few_backward)(const struct pya_ops_attention *a) {
    return att_divide(a, (ptrdiff_t)a->n_q, few_run_plan);
}
