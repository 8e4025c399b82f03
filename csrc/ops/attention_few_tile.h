#pragma once
/* Shared by scaled attention's kernels for few queries.  In attention_forward.c and attention_backward.c lanes hold queries, and
 * most would be idle; here they hold the numbers of a head, so that keys and values are read as they lie, once for all queries
 * of a group.  Floor 2.
 * Long because a register tile has a loop for each of its dimensions. */
#include <string.h>

#include "attention_mask.h"
#include "attention_plan.h"

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

/* Rows of numbers of a unit's queries, filled up with zeros. */
struct few_rows {
    real *p; /* [FEW_TOGETHER][row] */
    ptrdiff_t row;
};

/* Rows of keys or of values. */
struct few_keys {
    const real *p;
    ptrdiff_t row, dim;
};

static inline void
few_rows_carve(struct few_rows *x, struct pya_scratch *s, int64_t dim) {
    x->row = pack_round((ptrdiff_t)dim, VW);
    x->p = scratch_take(s, (size_t)x->row * FEW_TOGETHER);
}

static inline void
few_clear(struct few_rows x, int n) {
    memset(x.p, 0, (size_t)(n * x.row) * sizeof(real));
}

/* Query i of the unit, as a block without keys. */
static inline struct att_block
few_place(const struct pya_ops_attention *a, struct few_unit u, int i) {
    const ptrdiff_t n_q = (ptrdiff_t)a->n_q;
    const ptrdiff_t r = u.r0 + i;
    return (struct att_block){u.b, u.kv * (ptrdiff_t)(a->n_h / a->n_kv) + r / n_q, r % n_q, 0, 1,
                              0};
}

/* The same with nk keys. */
static inline struct att_block
few_part(const struct pya_ops_attention *a, struct few_unit u, int i, ptrdiff_t k0, int nk) {
    struct att_block x = few_place(a, u, i);
    x.k0 = k0;
    x.nk = nk;
    return x;
}

/* How many keys the unit's queries see. */
static inline ptrdiff_t
few_visible(const struct pya_ops_attention *a, struct few_unit u) {
    ptrdiff_t end = 0;
    for (int i = 0; i < u.n; i++) {
        const ptrdiff_t sees = att_visible(a, few_place(a, u, i));
        end = sees > end ? sees : end;
    }
    return end;
}

/* May these keys be left out, because a mask hides them from all of the unit's queries? */
static inline bool
few_is_hidden(const struct pya_ops_attention *a, struct few_unit u, ptrdiff_t k0, int nk) {
    bool is_hidden = true;
    for (int i = 0; is_hidden && i < u.n; i++) {
        is_hidden = att_is_hidden(a, few_part(a, u, i, k0, nk));
    }
    return is_hidden;
}

/* Loads the unit's rows of x, times scale. */
static inline void
few_load(
    const struct pya_ops_attention *a, struct few_unit u, struct pya_ops_heads x, ptrdiff_t dim,
    double scale, struct few_rows to) {
    for (int i = 0; i < u.n; i++) {
        const struct att_block at = few_place(a, u, i);
        const real *row = att_row(x, at.b, at.h, at.q0);
        for (ptrdiff_t d = 0; d < dim; d += VW) {
            const vr each = v_ld_n(row + d, dim - d < VW ? (int)(dim - d) : VW);
            v_st(to.p + i * to.row + d, v_mul(each, v_set((real)scale)));
        }
    }
    if (u.n % FEW_ROWS > FEW_ROWS / 2) { /* the tile of the last ones has more */
        const ptrdiff_t missing = FEW_ROWS - u.n % FEW_ROWS;
        memset(to.p + u.n * to.row, 0, (size_t)(missing * to.row) * sizeof(real));
    }
}

/* Writes dim numbers of a row, times factor. */
static inline void
few_store(real *dst, const real *row, ptrdiff_t dim, real factor) {
    for (ptrdiff_t d = 0; d < dim; d += VW) {
        const vr each = v_mul(v_ld(row + d), v_set(factor));
        v_st_n(dst + d, each, dim - d < VW ? (int)(dim - d) : VW);
    }
}

/* Scores of nr queries and VW / nr keys, of which n exist; the last of them takes the place of the others. */
static inline __attribute__((always_inline)) void
few_score_tile(
    struct few_rows q, real *s, struct few_keys keys, int n, const int nr, const bool is_whole) {
    const int nk = VW / nr;
    vr acc[VW];
#pragma GCC unroll 16
    for (int i = 0; i < VW; i++) {
        acc[i] = v_set(0);
    }
    for (ptrdiff_t d = 0; d < keys.dim; d += VW) {
        const int rest = keys.dim - d < VW ? (int)(keys.dim - d) : VW;
#pragma GCC unroll 16
        for (int j = 0; j < nk; j++) {
            const real *key = keys.p + (is_whole || j < n ? j : n - 1) * keys.row + d;
            const vr x = rest == VW ? v_ld(key) : v_ld_n(key, rest);
#pragma GCC unroll 4
            for (int i = 0; i < nr; i++) {
                acc[i * nk + j] = v_fma(v_ld(q.p + i * q.row + d), x, acc[i * nk + j]);
            }
        }
    }
    real sums[VW];
    v_st(sums, v_hsums(acc));
#pragma GCC unroll 4
    for (int i = 0; i < nr; i++) {
        memcpy(s + i * ATT_K, sums + i * nk, (size_t)nk * sizeof(real));
    }
}

static inline __attribute__((always_inline)) void
few_scores_of(struct few_rows q, real *s, struct few_keys keys, int n, const int nr) {
    const int nk = VW / nr;
    for (; n >= nk; n -= nk, s += nk, keys.p += nk * keys.row) {
        few_score_tile(q, s, keys, n, nr, true);
    }
    if (n > 0) {
        few_score_tile(q, s, keys, n, nr, false);
    }
}

/* s[i][k]: the product of row i of q and of key k. */
static inline void
few_scores(struct few_rows q, real *s, int n_r, struct few_keys keys, int n) {
    for (; n_r > FEW_ROWS / 2; n_r -= FEW_ROWS) {
        few_scores_of(q, s, keys, n, FEW_ROWS);
        q.p += FEW_ROWS * q.row;
        s += FEW_ROWS * ATT_K;
    }
    if (FEW_ROWS > 2 && n_r >= 2) {
        few_scores_of(q, s, keys, n, 2);
    } else if (n_r > 0) {
        few_scores_of(q, s, keys, n, 1);
    }
}

static inline void
few_apply_mask(const struct pya_ops_attention *a, struct att_block x, real *s) {
    const struct pya_ops_scores w = a->mask;
    const uint8_t *p = (const uint8_t *)w.p + att_first_score(w, x);
    for (int k = 0; w.k == 1 && k < x.nk; k += 64) {
        const uint64_t hidden = att_zeros(p + k, x.nk - k < 64 ? x.nk - k : 64);
        for (int j = 0; hidden != 0 && j < 64; j += VW) {
            v_st_where(s + k + j, v_set((real)-INFINITY), (unsigned)(hidden >> j));
        }
    }
    for (int k = 0; w.k != 1 && k < x.nk; k++) {
        s[k] = p[k * w.k] == 0 ? (real)-INFINITY : s[k];
    }
}

/* Applies bias and masks to a query's scores, and hides what fills up the last vector.  Who loads them as vectors does so after
 * all queries' turn: a load waits until the stores of its parts have left the processor's queue. */
static inline void
few_adjust(const struct pya_ops_attention *a, struct att_block x, real *s) {
    if (a->bias.p != NULL) {
        const struct pya_ops_scores w = a->bias;
        const real *p = (const real *)w.p + att_first_score(w, x);
        for (int k = 0; k < x.nk; k++) {
            s[k] = r_fma((real)att_log2e, p[k * w.k], s[k]);
        }
    }
    if (a->mask.p != NULL) {
        few_apply_mask(a, x, s);
    }
    const ptrdiff_t seen = att_causal_end(a, x) - x.k0;
    const ptrdiff_t end = pack_round(x.nk, VW);
    ptrdiff_t k = seen < 0 ? 0 : seen < x.nk ? seen : x.nk;
    for (; end - k >= VW; k += VW) {
        v_st(s + k, v_set((real)-INFINITY));
    }
    v_st_n(s + k, v_set((real)-INFINITY), (int)(end - k));
}

/* Results of some queries: which weights of keys they sum, and from which number on; the last vector has `last` of them. */
struct few_tile {
    const real *s; /* [][ATT_K] */
    struct few_rows o;
    ptrdiff_t d;
    int last;
    bool is_first;
};

static inline vr
few_value(const struct few_tile *t, const real *v, bool is_whole) {
    return is_whole ? v_ld(v) : v_ld_n(v, t->last);
}

/* Adds values of n keys to nv vectors of nr queries.  A single query's sums are two each, since one would wait for itself. */
static inline __attribute__((always_inline)) void
few_value_tile(
    const struct few_tile *t, struct few_keys values, int n, const int nr, const int nv,
    const bool is_whole) {
    vr acc[FEW_ROWS][FEW_NV];
    vr odd[FEW_NV];
    real *o = t->o.p + t->d;
#pragma GCC unroll 4
    for (int j = 0; j < nv; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < nr; i++) {
            acc[i][j] = t->is_first ? v_set(0) : v_ld(o + i * t->o.row + j * VW);
        }
        odd[j] = v_set(0);
    }
    for (int k = 0; k < n; k++) {
        const real *v = values.p + k * values.row + t->d;
        vr x[FEW_NV];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++) {
            x[j] = few_value(t, v + j * VW, is_whole || j < nv - 1);
        }
#pragma GCC unroll 4
        for (int i = 0; i < nr; i++) {
            const vr each = v_set(t->s[i * ATT_K + k]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++) {
                acc[i][j] = v_fma(each, x[j], acc[i][j]);
            }
        }
        if (nr == 1 && ++k < n) {
            const vr each = v_set(t->s[k]);
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
            v_st(o + i * t->o.row + j * VW, acc[i][j]);
        }
    }
}

static inline __attribute__((always_inline)) void
few_values_of(struct few_tile t, struct few_keys values, int n, const int nr) {
    for (; t.d + FEW_NV * VW <= values.dim; t.d += FEW_NV * VW) {
        few_value_tile(&t, values, n, nr, FEW_NV, true);
    }
    const int rest = (int)(values.dim - t.d);
    t.last = rest % VW == 0 ? VW : rest % VW;
    switch ((rest + VW - 1) / VW) {
    case 4:
        few_value_tile(&t, values, n, nr, 4, false);
        break;
    case 3:
        few_value_tile(&t, values, n, nr, 3, false);
        break;
    case 2:
        few_value_tile(&t, values, n, nr, 2, false);
        break;
    case 1:
        few_value_tile(&t, values, n, nr, 1, false);
        break;
    default:
        break;
    }
}

/* o[i] is or, unless is_first, grows by the sum of s[i][k] times value k. */
static inline void
few_values(
    const real *s, struct few_rows o, int n_r, struct few_keys values, int n, bool is_first) {
    struct few_tile t = {s, o, 0, VW, is_first};
    for (; n_r > FEW_ROWS / 2; n_r -= FEW_ROWS) {
        few_values_of(t, values, n, FEW_ROWS);
        t.s += FEW_ROWS * ATT_K;
        t.o.p += FEW_ROWS * o.row;
    }
    if (FEW_ROWS > 2 && n_r >= 2) {
        few_values_of(t, values, n, 2);
    } else if (n_r > 0) {
        few_values_of(t, values, n, 1);
    }
}

/* What a kernel has to do; share does every n_parts-th unit of it from `part` on.  True: out of memory. */
struct few_work {
    const struct pya_ops_attention *a;
    struct att_plan plan; /* of a backward */
    bool (*share)(const struct few_work *work, int part, int n_parts);
};

static inline int
few_run(struct few_work work) {
    const int n = work.a->n_threads;
    bool failed = false;
    if (n == 1) { /* a parallel region takes as long as the smallest calls */
        failed = work.share(&work, 0, 1);
    } else {
#pragma omp parallel for num_threads(n) schedule(static, 1) reduction(|| : failed)
        for (int i = 0; i < n; i++) {
            failed = work.share(&work, i, n) || failed;
        }
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
