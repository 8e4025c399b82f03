/* Scaled dot-product attention, forward, for few queries.  In attention_forward.c lanes hold queries, and most would be idle;
 * here they hold the numbers of a head, so that keys and values are read as they lie, once for all queries of a group. */
#include "attention_few.h"

#include <string.h>

enum {
    FEW_ROWS = VW >= 8 ? VW / 4 : 1, /* queries of a register tile */
    FEW_TOGETHER = 8,                /* queries that pass over the keys together */
    FEW_NV = 4,                      /* vectors of a register tile of results */
};

/* Queries of the heads that share a key head: number r is query r % n_q of the group's head r / n_q. */
struct few_unit {
    ptrdiff_t b, kv, r0;
    int n;
};

struct few_scratch {
    real *q; /* [FEW_TOGETHER][q_row]: scaled by scale / log 2, filled up with zeros */
    real *s; /* [FEW_TOGETHER][ATT_K]: scores, then unnormalised probabilities */
    real *o; /* [FEW_TOGETHER][o_row]: sums of values */
    ptrdiff_t q_row, o_row;
    real top[FEW_TOGETHER], sum[FEW_TOGETHER]; /* largest score, and sum of probabilities */
};

/* Rows of keys or of values. */
struct few_keys {
    const real *p;
    ptrdiff_t row, dim;
};

static void
few_carve(struct few_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    w->q_row = pack_round((ptrdiff_t)a->dim, VW);
    w->o_row = pack_round((ptrdiff_t)a->dim_v, VW);
    w->q = scratch_take(s, (size_t)w->q_row * FEW_TOGETHER);
    w->o = scratch_take(s, (size_t)w->o_row * FEW_TOGETHER);
    w->s = scratch_take(s, (size_t)ATT_K * FEW_TOGETHER);
}

/* Query i of the unit, as a block without keys. */
static inline struct att_block
few_place(const struct pya_ops_attention *a, struct few_unit u, int i) {
    const ptrdiff_t n_q = (ptrdiff_t)a->n_q;
    const ptrdiff_t r = u.r0 + i;
    return (struct att_block){u.b, u.kv * (ptrdiff_t)(a->n_h / a->n_kv) + r / n_q, r % n_q, 0, 1,
                              0};
}

static void
few_start(const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u) {
    const vr scale = v_set((real)(a->scale * att_log2e));
    for (int i = 0; i < u.n; i++) {
        const struct att_block x = few_place(a, u, i);
        const real *row = att_row(a->q, x.b, x.h, x.q0);
        for (ptrdiff_t d = 0; d < (ptrdiff_t)a->dim; d += VW) {
            const ptrdiff_t rest = (ptrdiff_t)a->dim - d;
            const vr q = v_ld_n(row + d, rest < VW ? (int)rest : VW);
            v_st(w->q + i * w->q_row + d, v_mul(q, scale));
        }
        w->top[i] = ATT_LEAST_TOP;
        w->sum[i] = 0;
    }
    if (u.n % FEW_ROWS > FEW_ROWS / 2) { /* the tile of the last ones has more */
        const ptrdiff_t missing = FEW_ROWS - u.n % FEW_ROWS;
        memset(w->q + u.n * w->q_row, 0, (size_t)(missing * w->q_row) * sizeof(real));
    }
}

/* Scores of nr queries and VW / nr keys from k on, of which n exist; the last of them takes the place of the others. */
static inline __attribute__((always_inline)) void
few_score_tile(
    const struct few_scratch *w, int r, struct few_keys keys, int k, int n, const int nr,
    const bool is_whole) {
    const int nk = VW / nr;
    vr acc[VW];
#pragma GCC unroll 16
    for (int i = 0; i < VW; i++) {
        acc[i] = v_set(0);
    }
    const real *first = keys.p + k * keys.row;
    const real *q = w->q + r * w->q_row;
    for (ptrdiff_t d = 0; d < keys.dim; d += VW) {
        const int rest = keys.dim - d < VW ? (int)(keys.dim - d) : VW;
#pragma GCC unroll 16
        for (int j = 0; j < nk; j++) {
            const real *key = first + (is_whole || j < n ? j : n - 1) * keys.row + d;
            const vr x = rest == VW ? v_ld(key) : v_ld_n(key, rest);
#pragma GCC unroll 4
            for (int i = 0; i < nr; i++) {
                acc[i * nk + j] = v_fma(v_ld(q + i * w->q_row + d), x, acc[i * nk + j]);
            }
        }
    }
    real sums[VW];
    v_st(sums, v_hsums(acc));
#pragma GCC unroll 4
    for (int i = 0; i < nr; i++) {
        memcpy(w->s + (r + i) * ATT_K + k, sums + i * nk, (size_t)nk * sizeof(real));
    }
}

static inline __attribute__((always_inline)) void
few_scores_of(const struct few_scratch *w, int r, struct few_keys keys, int n, const int nr) {
    int k = 0;
    for (; k + VW / nr <= n; k += VW / nr) {
        few_score_tile(w, r, keys, k, n - k, nr, true);
    }
    if (k < n) {
        few_score_tile(w, r, keys, k, n - k, nr, false);
    }
}

static void
few_scores(const struct few_scratch *w, int n_r, struct few_keys keys, int n) {
    int r = 0;
    for (; n_r - r > FEW_ROWS / 2; r += FEW_ROWS) {
        few_scores_of(w, r, keys, n, FEW_ROWS);
    }
    if (FEW_ROWS > 2 && r + 2 <= n_r) {
        few_scores_of(w, r, keys, n, 2);
        r += 2;
    }
    if (r < n_r) {
        few_scores_of(w, r, keys, n, 1);
    }
}

/* Applies bias and masks to a query's scores, and hides what fills up the last vector. */
static void
few_adjust(const struct pya_ops_attention *a, struct att_block x, real *s) {
    if (a->bias.p != NULL) {
        const struct pya_ops_scores w = a->bias;
        const real *p = (const real *)w.p + att_first_score(w, x);
        for (int k = 0; k < x.nk; k++) {
            s[k] = r_fma((real)att_log2e, p[k * w.k], s[k]);
        }
    }
    if (a->mask.p != NULL) {
        const struct pya_ops_scores w = a->mask;
        const uint8_t *p = (const uint8_t *)w.p + att_first_score(w, x);
        for (int k = 0; k < x.nk; k++) {
            s[k] = p[k * w.k] == 0 ? (real)-INFINITY : s[k];
        }
    }
    const ptrdiff_t seen = att_visible(a, x.q0, 1) - x.k0;
    for (ptrdiff_t k = seen < 0 ? 0 : seen < x.nk ? seen : x.nk; k < pack_round(x.nk, VW); k++) {
        s[k] = (real)-INFINITY;
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
        for (ptrdiff_t d = 0; d < w->o_row; d += VW) {
            real *o = w->o + i * w->o_row + d;
            v_st(o, v_mul(v_ld(o), shrink));
        }
    }
    w->top[i] = top;
}

/* Results of queries from r on, numbers from d on; the last vector has `last` of them. */
struct few_tile {
    int r, last;
    ptrdiff_t d;
    bool is_first;
};

static inline vr
few_value(struct few_tile t, const real *v, bool is_whole) {
    return is_whole ? v_ld(v) : v_ld_n(v, t.last);
}

/* Adds values of n keys to the results of nr queries, nv vectors.  A single query's sums are two each, since one would wait for
 * itself. */
static inline __attribute__((always_inline)) void
few_value_tile(
    const struct few_scratch *w, struct few_tile t, struct few_keys values, int n, const int nr,
    const int nv, const bool is_whole) {
    vr acc[FEW_ROWS][FEW_NV];
    vr odd[FEW_NV];
    real *o = w->o + t.r * w->o_row + t.d;
    const real *p = w->s + t.r * ATT_K;
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < nr; i++) {
            acc[i][j] = t.is_first ? v_set(0) : v_ld(o + i * w->o_row + j * VW);
        }
        odd[j] = v_set(0);
    }
    for (int k = 0; k < n; k++) {
        const real *v = values.p + k * values.row + t.d;
        vr x[FEW_NV];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            x[j] = few_value(t, v + j * VW, is_whole || j < nv - 1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < nr; i++) {
            const vr each = v_set(p[i * ATT_K + k]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                acc[i][j] = v_fma(each, x[j], acc[i][j]);
            }
        }
        if (nr == 1 && ++k < n) {
            const vr each = v_set(p[k]);
            v += values.row;
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                odd[j] = v_fma(each, few_value(t, v + j * VW, is_whole || j < nv - 1), odd[j]);
            }
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
        if (nr == 1) {
            acc[0][j] = v_add(acc[0][j], odd[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < nr; i++) {
            v_st(o + i * w->o_row + j * VW, acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
few_values_of(
    const struct few_scratch *w, struct few_tile t, struct few_keys values, int n, const int nr) {
    for (; t.d + FEW_NV * VW <= values.dim; t.d += FEW_NV * VW) {
        few_value_tile(w, t, values, n, nr, FEW_NV, true);
    }
    const int rest = (int)(values.dim - t.d);
    t.last = rest % VW == 0 ? VW : rest % VW;
    switch ((rest + VW - 1) / VW) {
    case 4:
        few_value_tile(w, t, values, n, nr, 4, false);
        break;
    case 3:
        few_value_tile(w, t, values, n, nr, 3, false);
        break;
    case 2:
        few_value_tile(w, t, values, n, nr, 2, false);
        break;
    case 1:
        few_value_tile(w, t, values, n, nr, 1, false);
        break;
    default:
        break;
    }
}

static void
few_values(const struct few_scratch *w, int n_r, struct few_keys values, int n, bool is_first) {
    struct few_tile t = {.is_first = is_first};
    for (; n_r - t.r > FEW_ROWS / 2; t.r += FEW_ROWS) {
        few_values_of(w, t, values, n, FEW_ROWS);
    }
    if (FEW_ROWS > 2 && t.r + 2 <= n_r) {
        few_values_of(w, t, values, n, 2);
        t.r += 2;
    }
    if (t.r < n_r) {
        few_values_of(w, t, values, n, 1);
    }
}

static void
few_write(const struct pya_ops_attention *a, const struct few_scratch *w, struct few_unit u) {
    for (int i = 0; i < u.n; i++) {
        const struct att_block x = few_place(a, u, i);
        const real inverse = w->sum[i] == 0 ? 0 : 1 / w->sum[i]; /* every key hidden: zeros */
        real *row = att_row_out(a->out, x.b, x.h, x.q0);
        for (ptrdiff_t d = 0; d < (ptrdiff_t)a->dim_v; d += VW) {
            const ptrdiff_t rest = (ptrdiff_t)a->dim_v - d;
            const vr o = v_mul(v_ld(w->o + i * w->o_row + d), v_set(inverse));
            v_st_n(row + d, o, rest < VW ? (int)rest : VW);
        }
        if (a->stats != NULL) {
            real *top = att_tops(a, x);
            top[0] = w->top[i];
            top[a->n_q] = inverse;
        }
    }
}

static void
few_compute(const struct pya_ops_attention *a, struct few_scratch *w, struct few_unit u) {
    few_start(a, w, u);
    ptrdiff_t end = 0;
    for (int i = 0; i < u.n; i++) {
        const ptrdiff_t sees = att_visible(a, few_place(a, u, i).q0, 1);
        end = sees > end ? sees : end;
    }
    for (ptrdiff_t k0 = 0; k0 < end; k0 += ATT_K) {
        const int n = (int)(end - k0 < ATT_K ? end - k0 : ATT_K);
        const struct few_keys keys = {
            att_row(a->k, u.b, u.kv, k0), (ptrdiff_t)a->k.s, (ptrdiff_t)a->dim};
        const struct few_keys values = {
            att_row(a->v, u.b, u.kv, k0), (ptrdiff_t)a->v.s, (ptrdiff_t)a->dim_v};
        few_scores(w, u.n, keys, n);
        for (int i = 0; i < u.n; i++) {
            struct att_block x = few_place(a, u, i);
            x.k0 = k0;
            x.nk = n;
            few_adjust(a, x, w->s + i * ATT_K);
            few_softmax(w, i, n, k0 == 0);
        }
        few_values(w, u.n, values, n, k0 == 0);
    }
    few_write(a, w, u);
}

/* Every n_parts-th unit from `part` on. */
static int
few_share(const struct pya_ops_attention *a, int part, int n_parts) {
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
            const ptrdiff_t head = i / n_chunks;
            struct few_unit u = {
                head / (ptrdiff_t)a->n_kv, head % (ptrdiff_t)a->n_kv, i % n_chunks * FEW_TOGETHER,
                FEW_TOGETHER};
            u.n = (int)(n_rows - u.r0 < u.n ? n_rows - u.r0 : u.n);
            few_compute(a, &w, u);
        }
    }
    scratch_end(&s, &local);
    return failed;
}

int
PYA_FN(pya_attention_few)(const struct pya_ops_attention *a) {
    int failed = 0;
    if (a->n_threads == 1) { /* a parallel region takes as long as the smallest calls */
        failed = few_share(a, 0, 1);
    } else {
#pragma omp parallel for num_threads(a->n_threads) schedule(static, 1) reduction(| : failed)
        for (int i = 0; i < a->n_threads; i++) {
            failed |= few_share(a, i, a->n_threads);
        }
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
