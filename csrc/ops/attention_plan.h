#pragma once
/* How the backward's work is divided among threads.  Floor 2. */
#include "attention_tile.h"

/* A unit's share: heads of one key head (or of all that share a bias), with ranges of queries and keys. */
struct att_range {
    ptrdiff_t b0, b1, kv0, kv1, q0, q1, k0, k1;
    bool want_q, want_kv; /* want_q includes the gradient of the bias */
};

/* How many entries of each index one unit takes. */
struct att_plan {
    ptrdiff_t b, kv, q, k;
    bool want_q, want_kv;
};

static inline ptrdiff_t
att_n_parts(int64_t n, ptrdiff_t step) {
    return ((ptrdiff_t)n + step - 1) / step;
}

static inline void
att_part(ptrdiff_t index, ptrdiff_t step, int64_t n, ptrdiff_t *begin, ptrdiff_t *end) {
    *begin = index * step;
    *end = *begin + step < n ? *begin + step : (ptrdiff_t)n;
}

static inline ptrdiff_t
att_n_units(const struct pya_ops_attention *a, struct att_plan plan) {
    return att_n_parts(a->n_b, plan.b) * att_n_parts(a->n_kv, plan.kv) *
           att_n_parts(a->n_q, plan.q) * att_n_parts(a->n_k, plan.k);
}

static inline struct att_range
att_unit(const struct pya_ops_attention *a, struct att_plan plan, ptrdiff_t u) {
    const ptrdiff_t nk = att_n_parts(a->n_k, plan.k);
    const ptrdiff_t nq = att_n_parts(a->n_q, plan.q);
    const ptrdiff_t nkv = att_n_parts(a->n_kv, plan.kv);
    struct att_range r = {.want_q = plan.want_q, .want_kv = plan.want_kv};
    att_part(u / (nkv * nq * nk), plan.b, a->n_b, &r.b0, &r.b1);
    att_part(u / (nq * nk) % nkv, plan.kv, a->n_kv, &r.kv0, &r.kv1);
    att_part(u / nk % nq, plan.q, a->n_q, &r.q0, &r.q1);
    att_part(u % nk, plan.k, a->n_k, &r.k0, &r.k1);
    return r;
}

/* If there are enough heads, each is one unit and every product is computed once.  If not, queries and keys are cut in two
 * passes that both compute the scores.  Heads that share a gradient of the bias stay in one unit, so that it is summed in a
 * fixed order without locks.  step: queries of a unit of the second pass. */
static inline int
att_divide(
    const struct pya_ops_attention *a, ptrdiff_t step,
    int (*run)(const struct pya_ops_attention *, struct att_plan)) {
    const bool bias = a->d_bias.p != NULL;
    const ptrdiff_t all_q = (ptrdiff_t)a->n_q;
    const ptrdiff_t all_k = (ptrdiff_t)a->n_k;
    struct att_plan whole = {1, 1, all_q, all_k, true, true};
    if (bias && a->d_bias.b == 0) {
        whole.b = (ptrdiff_t)a->n_b;
    }
    if (bias && a->d_bias.h == 0) {
        whole.kv = (ptrdiff_t)a->n_kv;
    }
    if (att_n_units(a, whole) >= a->n_threads || (all_q <= ATT_Q && all_k <= ATT_K)) {
        return run(a, whole);
    }
    struct att_plan keys = {1, 1, all_q, 4 * ATT_K, false, true};
    struct att_plan queries = {whole.b, whole.kv, bias && a->d_bias.q == 0 ? all_q : step,
                               all_k,   true,     false};
    const int status = run(a, keys);
    return status != PYA_OPS_OK ? status : run(a, queries);
}
