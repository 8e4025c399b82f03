/* Scaled dot-product attention, forward, for few queries. */
#include "attention_few.h"
#include "attention_few_tile.h"

struct few_scratch {
    struct few_rows q; /* scaled by scale / log 2 */
    struct few_rows o; /* sums of values */
    real *s;           /* [FEW_TOGETHER][ATT_K]: scores, then unnormalised probabilities */
    real top[FEW_TOGETHER], sum[FEW_TOGETHER]; /* largest score, and sum of probabilities */
};

static void
few_carve(struct few_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    few_rows_carve(&w->q, s, a->dim);
    few_rows_carve(&w->o, s, a->dim_v);
    w->s = scratch_take(s, (size_t)ATT_K * FEW_TOGETHER);
}

static void
few_start(const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u) {
    few_load(a, u, a->q, (ptrdiff_t)a->dim, a->scale * att_log2e, w->q);
    for (int i = 0; i < u.n; i++) {
        w->top[i] = ATT_LEAST_TOP;
        w->sum[i] = 0;
    }
}

/* Turns a query's scores into unnormalised probabilities; earlier results are rescaled where the maximum grew. */
static void
few_softmax(struct few_scratch *w, int i, int n, bool is_first) {
    real *s = w->s + i * ATT_K;
    const real before = w->top[i];
    vr best = v_set(before);
    for (int k = 0; k < n; k += VW) {
        best = v_max(best, v_ld(s + k));
    }
    const real top = v_hmax(best); /* a NaN reaches the sum in any case */
    vr sum = v_set(0);             /* of this block alone: sums of sums lose fewer digits */
    for (int k = 0; k < n; k += VW) {
        const vr e = v_exp2(v_sub(v_ld(s + k), v_set(top)));
        v_st(s + k, e);
        sum = v_add(sum, e);
    }
    if (is_first || top == before) { /* v_exp2(0) is one rounding step above 1 */
        w->sum[i] += v_hsum(sum);
    } else {
        real lanes[VW];
        const vr shrink = v_exp2(v_set(before - top));
        v_st(lanes, shrink);
        w->sum[i] = r_fma(w->sum[i], lanes[0], v_hsum(sum));
        for (ptrdiff_t d = 0; d < w->o.row; d += VW) {
            real *o = w->o.p + i * w->o.row + d;
            v_st(o, v_mul(v_ld(o), shrink));
        }
    }
    w->top[i] = top;
}

static void
few_write(const struct pya_ops_attention *a, const struct few_scratch *w, struct few_unit u) {
    for (int i = 0; i < u.n; i++) {
        const struct att_block x = few_place(a, u, i);
        const real inverse = w->sum[i] == 0 ? 0 : 1 / w->sum[i]; /* every key hidden: zeros */
        real *row = att_row_out(a->out, x.b, x.h, x.q0);
        few_store(row, w->o.p + i * w->o.row, (ptrdiff_t)a->dim_v, inverse);
        if (a->stats != NULL) {
            real *top = att_tops(a, x);
            top[0] = w->top[i];
            top[a->n_q] = inverse;
        }
    }
}

/* Fetches a row of the next unit's queries, and the place of a row of results: with few keys there is less to compute than to
 * wait for. */
static inline void
few_fetch(const struct pya_ops_attention *a, struct few_unit u, struct few_unit next, int i) {
    const ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    if (i < next.n) {
        const struct att_block x = few_place(a, next, i);
        const real *row = att_row(a->q, x.b, x.h, x.q0);
        for (ptrdiff_t d = 0; d < (ptrdiff_t)a->dim; d += line) {
            __builtin_prefetch(row + d);
        }
    }
    const struct att_block x = few_place(a, u, i);
    const real *row = att_row_out(a->out, x.b, x.h, x.q0);
    for (ptrdiff_t d = 0; d < (ptrdiff_t)a->dim_v; d += line) {
        __builtin_prefetch(row + d, 1);
    }
}

static void
few_compute(
    const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u,
    struct few_unit next) {
    few_start(a, w, u);
    const ptrdiff_t end = few_visible(a, u);
    bool is_first = true;
    for (ptrdiff_t k0 = 0; k0 < end; k0 += ATT_K) {
        const int n = (int)(end - k0 < ATT_K ? end - k0 : ATT_K);
        if (few_is_hidden(a, u, k0, n)) {
            continue;
        }
        const struct few_keys keys = {
            att_row(a->k, u.b, u.kv, k0), (ptrdiff_t)a->k.s, (ptrdiff_t)a->dim};
        const struct few_keys values = {
            att_row(a->v, u.b, u.kv, k0), (ptrdiff_t)a->v.s, (ptrdiff_t)a->dim_v};
        few_scores(w->q, w->s, u.n, keys, n);
        for (int i = 0; i < u.n; i++) {
            few_adjust(a, few_part(a, u, i, k0, n), w->s + i * ATT_K);
            if (is_first) {
                few_fetch(a, u, next, i);
            }
        }
        for (int i = 0; i < u.n; i++) { /* not above: see few_adjust() */
            few_softmax(w, i, n, is_first);
        }
        few_values(w->s, w->o, u.n, values, n, is_first);
        is_first = false;
    }
    if (is_first) {
        few_clear(w->o, u.n);
    }
    few_write(a, w, u);
}

/* Unit i of all; n is 0 beyond the last one. */
static struct few_unit
few_unit_at(const struct pya_ops_attention *a, ptrdiff_t i, ptrdiff_t n_rows, ptrdiff_t n_chunks) {
    const ptrdiff_t head = i / n_chunks;
    struct few_unit u = {
        head / (ptrdiff_t)a->n_kv, head % (ptrdiff_t)a->n_kv, i % n_chunks * FEW_TOGETHER,
        FEW_TOGETHER};
    u.n = (int)(n_rows - u.r0 < u.n ? n_rows - u.r0 : u.n);
    u.n = u.b < (ptrdiff_t)a->n_b ? u.n : 0;
    return u;
}

static bool
few_share(const struct few_work *work, int part, int n_parts) {
    const struct pya_ops_attention *a = work->a;
    const ptrdiff_t n_rows = (ptrdiff_t)(a->n_q * (a->n_h / a->n_kv));
    const ptrdiff_t n_chunks = (n_rows + FEW_TOGETHER - 1) / FEW_TOGETHER;
    const ptrdiff_t n_units = (ptrdiff_t)(a->n_b * a->n_kv) * n_chunks;
    struct few_scratch w;
    struct pya_scratch s = {NULL, 0};
    few_carve(&w, &s, a);
    struct pya_scratch_local local;
    scratch_begin(&s, &local);
    const bool failed = s.base == NULL;
    if (!failed) {
        few_carve(&w, &s, a);
        for (ptrdiff_t i = part; i < n_units; i += n_parts) {
            few_compute(
                a, &w, few_unit_at(a, i, n_rows, n_chunks),
                few_unit_at(a, i + n_parts, n_rows, n_chunks));
        }
    }
    scratch_end(&s, &local);
    return failed;
}

int
PYA_FN(pya_attention_few_forward)(const struct pya_ops_attention *a) {
    return few_run((struct few_work){.a = a, .share = few_share});
}
