/* Additive attention.  The forward keeps the probabilities; the backward recomputes the tanh, so that per step only the
 * projected query and the probabilities must be kept.  One unit of work is one batch entry: its keys and values are read
 * once per query. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"

static inline const real *
additive_row(struct pya_ops_view v, ptrdiff_t i, ptrdiff_t b) {
    return (const real *)v.p + i * v.i + b * v.t;
}

static inline real *
additive_row_out(struct pya_ops_view v, ptrdiff_t i, ptrdiff_t b) {
    return (real *)v.p + i * v.i + b * v.t;
}

static inline bool
additive_is_on(const struct pya_ops_additive *a, ptrdiff_t b, ptrdiff_t s) {
    return a->mask == NULL || a->mask[b * a->mask_b + s * a->mask_s] != 0;
}

enum { STREAMED_BYTES = 32 << 20, PAGE_BYTES = 4096, TOUCH_ROWS = 4 };

/* Is there more than the caches hold?  Then keys come from memory, which is idle while rows of values are added, and no
 * hardware prefetcher knows the next block. */
static inline bool
additive_is_streamed(const struct pya_ops_additive *a) {
    return VW > 1 && a->keys.i == a->n_h &&
           a->n_b * a->n_s * (a->n_h + a->n_e) * (int64_t)sizeof(real) > STREAMED_BYTES;
}

/* Do prefetched lines go into L2 instead of L1?  From L1 most of them are evicted before they are used, but fetching directly
 * into L2 was a sixth slower (Zen 4).  An Intel core waits for 16 lines in L1 at most, so that what comes from memory comes
 * sooner into L2: the forward took 0.85 to 0.9 of the time (Xeon). */
static inline bool
additive_fetches_far(const struct pya_ops_additive *a) {
#if defined(__x86_64__)
    return additive_is_streamed(a) && __builtin_cpu_is("intel");
#else
    (void)a;
    return false;
#endif
}

static inline void
additive_fetch(const char *p, bool far) {
    if (far) {
        __builtin_prefetch(p, 0, 2);
    } else {
        __builtin_prefetch(p, 0, 3);
    }
}

/* The tanh keeps the arithmetic busy while memory idles; rows of values do the opposite.  So each vector of a loop over tanh
 * prefetches n_lines of the rows that are needed next. */
struct additive_ahead {
    const char *p;
    ptrdiff_t n_lines; /* per vector of the loop */
    bool far;
};

static inline void
additive_ask(struct additive_ahead ahead, ptrdiff_t vector) {
    for (ptrdiff_t i = 0; i < ahead.n_lines; i++) {
        additive_fetch(ahead.p + (vector * ahead.n_lines + i) * 64, ahead.far);
    }
}

static inline struct additive_ahead
additive_ahead_row(const struct pya_ops_additive *a, ptrdiff_t s, ptrdiff_t b, bool far) {
    struct additive_ahead none = {NULL, 0, false};
    if (VW == 1 || b >= a->n_b) {
        return none;
    }
    ptrdiff_t vectors = ((ptrdiff_t)a->n_h + VW - 1) / VW;
    ptrdiff_t lines = (ptrdiff_t)a->n_e * (ptrdiff_t)sizeof(real) / 64;
    struct additive_ahead row = {
        (const char *)(const void *)additive_row(a->values, s, b), (lines + vectors - 1) / vectors,
        far};
    return row.n_lines > 8 ? none : row;
}

/* Fetches one line of each page of the row of values that is prefetched TOUCH_ROWS rows later, so that its address is known by
 * then.  Prefetches of several lines per vector wait for the addresses of new pages: with touches the forward took 0.8 to 0.9
 * of the time, but up to 1.1 where one line per vector is enough (Xeon, a virtual machine).
 * Inlined always: GCC drops calls of functions that only prefetch. */
static inline __attribute__((always_inline)) void
additive_touch(
    const struct pya_ops_additive *a, ptrdiff_t s, ptrdiff_t b, struct additive_ahead ahead) {
    const ptrdiff_t bytes = (ptrdiff_t)a->n_e * (ptrdiff_t)sizeof(real);
    if (ahead.n_lines < 2 || bytes < PAGE_BYTES || s + TOUCH_ROWS >= a->n_s) {
        return;
    }
    const char *p = (const char *)(const void *)additive_row(a->values, s + TOUCH_ROWS, b);
    for (ptrdiff_t k = 0; k < bytes; k += PAGE_BYTES) {
        __builtin_prefetch(p + k, 0, 3);
    }
}

static inline real
additive_score(
    const real *key, const real *query, const real *v, ptrdiff_t n, struct additive_ahead ahead) {
    vr sum = v_set(0);
    ptrdiff_t k = 0;
    for (; k + VW <= n; k += VW) {
        additive_ask(ahead, k / VW);
        vr t = v_tanh(v_add(v_ld(key + k), v_ld(query + k)));
        sum = v_fma(v_ld(v + k), t, sum);
    }
    if (k < n) {
        int rest = (int)(n - k);
        vr t = v_tanh(v_add(v_ld_n(key + k, rest), v_ld_n(query + k, rest)));
        sum = v_fma(v_ld_n(v + k, rest), t, sum);
    }
    return v_hsum(sum);
}

/* How many of n numbers come before the first vector-aligned address. */
static inline ptrdiff_t
additive_lead(const real *p, ptrdiff_t n) {
    const uintptr_t past = (uintptr_t)p % (VW * sizeof(real)) / sizeof(real);
    const ptrdiff_t lead = (ptrdiff_t)((VW - past) % VW);
    return lead < n ? lead : n;
}

/* add: y += p x; otherwise y = p x, stored past the caches if past_cache */
static inline void
additive_axpy(real *y, const real *x, real p, ptrdiff_t n, bool add, bool past_cache) {
    const vr pv = v_set(p);
    const bool stream = !add && past_cache;
    ptrdiff_t k = stream ? additive_lead(y, n) : 0;
    if (k > 0) {
        v_st_n(y, v_mul(pv, v_ld_n(x, (int)k)), (int)k);
    }
    for (; stream && k + VW <= n; k += VW) {
        v_nt(y + k, v_mul(pv, v_ld(x + k)));
    }
    for (; k + VW <= n; k += VW) {
        v_st(y + k, add ? v_fma(pv, v_ld(x + k), v_ld(y + k)) : v_mul(pv, v_ld(x + k)));
    }
    if (k < n) {
        int rest = (int)(n - k);
        vr x0 = v_ld_n(x + k, rest);
        v_st_n(y + k, add ? v_fma(pv, x0, v_ld_n(y + k, rest)) : v_mul(pv, x0), rest);
    }
}

/* Memory to prefetch; empty: none. */
struct additive_stretch {
    const char *p, *end;
    bool far;
};

/* Rows of values that are added together, so that y is loaded and stored once for all of them. */
enum { GROUP_ROWS = 4 };
struct additive_group {
    const real *rows[GROUP_ROWS];
    real weights[GROUP_ROWS];
    int n;
};

/* One vector of y plus the group's sum, added in the order of the rows */
static inline __attribute__((always_inline)) vr
additive_group_vector(
    const real *const rows[GROUP_ROWS], const vr weights[GROUP_ROWS], ptrdiff_t k, vr y, int n) {
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_ROWS; i++) {
        y = v_fma(weights[i], v_ld_n(rows[i] + k, n), y);
    }
    return y;
}

/* y += the group's sum, n numbers; prefetches the stretch meanwhile. */
static inline void
additive_group_add(
    const struct additive_group *x, real *y, ptrdiff_t n, struct additive_stretch ask) {
    if (x->n < GROUP_ROWS) {
        for (int i = 0; i < x->n; i++) {
            additive_axpy(y, x->rows[i], x->weights[i], n, true, false);
        }
        return;
    }
    const real *rows[GROUP_ROWS];
    vr weights[GROUP_ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_ROWS; i++) {
        rows[i] = x->rows[i];
        weights[i] = v_set(x->weights[i]);
    }
    const ptrdiff_t lines = (ask.end - ask.p) / 64;
    const ptrdiff_t step = lines / (n / VW + 1) + 1; /* per vector */
    ptrdiff_t k = 0;
    for (; k + VW <= n; k += VW) {
        for (ptrdiff_t i = 0; i < step && ask.p < ask.end; i++, ask.p += 64) {
            additive_fetch(ask.p, ask.far);
        }
        v_st(y + k, additive_group_vector(rows, weights, k, v_ld(y + k), VW));
    }
    if (k < n) {
        const int rest = (int)(n - k);
        v_st_n(y + k, additive_group_vector(rows, weights, k, v_ld_n(y + k, rest), rest), rest);
    }
}

/* exp(score - top) of n scores, and their sum. */
static inline double
additive_weights(real *weights, const real *p, ptrdiff_t n, real top) {
    double sum = 0;
    for (ptrdiff_t s = 0; s < n; s += VW) {
        const int lanes = n - s < VW ? (int)(n - s) : VW;
        v_st_n(weights + s, v_exp(v_sub(v_ld_n(p + s, lanes), v_set(top))), lanes);
        for (int i = 0; i < lanes; i++) {
            sum += (double)weights[s + i];
        }
    }
    return sum;
}

/* Turns scores into probabilities in place; a row whose keys are all masked becomes zeros. */
static inline void
additive_softmax(const struct pya_ops_additive *a, ptrdiff_t b, real *p) {
    const ptrdiff_t n = (ptrdiff_t)a->n_s;
    real top = (real)-INFINITY;
    for (ptrdiff_t s = 0; s < n; s++) {
        if (!additive_is_on(a, b, s)) {
            p[s] = (real)-INFINITY;
        } else if (!(p[s] <= top)) {
            top = p[s];
        }
    }
    if (top < (real)-1e37) {
        memset(p, 0, (size_t)n * sizeof(real));
        return;
    }
    const double sum = additive_weights(p, p, n, top);
    const real scale = (real)(1 / sum);
    for (ptrdiff_t s = 0; s < n; s++) {
        p[s] *= scale;
    }
}

/* Units a thread takes at once.  Runs of units, so that what we or the processor prefetch is mostly for the same thread; single
 * units if there are few. */
static inline int
additive_run(ptrdiff_t units, int n_threads) {
    return units >= 16 * (ptrdiff_t)n_threads ? 4 : 1;
}

enum {
    BLOCK_ROWS = 256,
    BLOCK_BYTES = 256 << 10, /* well below an L2 cache, which the next keys share */
};

/* Keys that are scored before their rows of values are added: few enough for those to be still in cache.  Depends only on an
 * entry's own sizes, so that its sums do not depend on the batch. */
static inline ptrdiff_t
additive_block(const struct pya_ops_additive *a) {
    const int64_t fit = BLOCK_BYTES / ((a->n_h + a->n_e) * (int64_t)sizeof(real));
    const ptrdiff_t rows = fit < BLOCK_ROWS ? (ptrdiff_t)fit / GROUP_ROWS * GROUP_ROWS : BLOCK_ROWS;
    return rows < GROUP_ROWS ? GROUP_ROWS : rows;
}

/* Part of the keys that are scored next: rows of the entry's next block, or of the next entry. */
static inline struct additive_stretch
additive_next_keys(const struct pya_ops_additive *a, ptrdiff_t b, ptrdiff_t s, bool far) {
    struct additive_stretch next = {NULL, NULL, far};
    if (b < a->n_b && s < a->n_s && additive_is_on(a, b, s)) {
        const ptrdiff_t n = a->n_s - s < GROUP_ROWS ? (ptrdiff_t)a->n_s - s : GROUP_ROWS;
        next.p = (const char *)(const void *)additive_row(a->keys, s, b);
        next.end = next.p + n * (ptrdiff_t)a->n_h * (ptrdiff_t)sizeof(real);
    }
    return next;
}

static inline void
additive_scale(real *y, ptrdiff_t n, real factor) {
    for (ptrdiff_t k = 0; k < n; k += VW) {
        const int lanes = n - k < VW ? (int)(n - k) : VW;
        v_st_n(y + k, v_mul(v_set(factor), v_ld_n(y + k, lanes)), lanes);
    }
}

/* Keys begin .. end - 1 for one query. */
struct additive_span {
    ptrdiff_t b, q, begin, end;
};

/* Writes the scores, -inf for masked keys, and returns the largest; with NaN among them, any number. */
static inline real
additive_scores(const struct pya_ops_additive *a, struct additive_span x, real *p) {
    const real *query = additive_row(a->query, x.q, x.b);
    const bool far = additive_fetches_far(a);
    real best = (real)-INFINITY;
    for (ptrdiff_t s = x.begin; s < x.end; s++) {
        p[s] = (real)-INFINITY;
        if (additive_is_on(a, x.b, s)) {
            const struct additive_ahead values = additive_ahead_row(a, s, x.b, far);
            additive_touch(a, s, x.b, values);
            p[s] = additive_score(
                additive_row(a->keys, s, x.b), query, (const real *)a->v, (ptrdiff_t)a->n_h,
                values);
            best = p[s] > best ? p[s] : best;
        }
    }
    return best;
}

/* y += the weighted rows of values; weights start at the span's begin. */
static inline void
additive_add_rows(
    const struct pya_ops_additive *a, struct additive_span x, const real *weights, real *y) {
    const struct additive_stretch none = {NULL, NULL, false};
    const bool ask = additive_is_streamed(a);
    const bool far = additive_fetches_far(a);
    const bool is_last = x.end == a->n_s;
    const ptrdiff_t next_b = !is_last ? x.b : x.q + 1 < a->n_q ? (ptrdiff_t)a->n_b : x.b + 1;
    ptrdiff_t next = is_last ? 0 : x.end;
    struct additive_group group = {.n = 0};
    for (ptrdiff_t s = x.begin; s < x.end; s++) {
        const real weight = weights[s - x.begin];
        if (!(weight <= 0)) { /* skip masked rows, which may hold anything; a NaN weight counts */
            group.rows[group.n] = additive_row(a->values, s, x.b);
            group.weights[group.n++] = weight;
        }
        if (group.n == GROUP_ROWS || s == x.end - 1) {
            const struct additive_stretch keys =
                ask ? additive_next_keys(a, next_b, next, far) : none;
            additive_group_add(&group, y, (ptrdiff_t)a->n_e, keys);
            next += GROUP_ROWS;
            group.n = 0;
        }
    }
}

/* Many keys, in blocks: y is the sum of exp(score - top) * values, where top is the largest score so far. */
static void
additive_forward_blocks(
    const struct pya_ops_additive *a, ptrdiff_t b, ptrdiff_t q, real *p, real *y) {
    const ptrdiff_t n_s = (ptrdiff_t)a->n_s;
    const ptrdiff_t n_e = (ptrdiff_t)a->n_e;
    const ptrdiff_t block = additive_block(a);
    real weights[BLOCK_ROWS];
    real top = (real)-1e37;
    double sum = 0;
    for (ptrdiff_t s = 0; s < n_s; s += block) {
        const struct additive_span x = {b, q, s, n_s - s < block ? n_s : s + block};
        const real best = additive_scores(a, x, p);
        if (best > top) {
            const real before = top - best;
            additive_weights(weights, &before, 1, 0);
            additive_scale(y, n_e, weights[0]);
            sum *= (double)weights[0];
            top = best;
        }
        sum += additive_weights(weights, p + s, x.end - s, top);
        additive_add_rows(a, x, weights, y);
    }
    additive_scale(y, n_e, sum == 0 ? 0 : (real)(1 / sum));
    additive_softmax(a, b, p);
}

static void
additive_forward_row(const struct pya_ops_additive *a, ptrdiff_t b, ptrdiff_t q) {
    real *p = (real *)a->probs + (b * (ptrdiff_t)a->n_q + q) * (ptrdiff_t)a->n_s;
    real *y = additive_row_out(a->context, q, b);
    memset(y, 0, (size_t)a->n_e * sizeof(real));
    if (a->n_s > additive_block(a)) {
        additive_forward_blocks(a, b, q, p, y);
        return;
    }
    const struct additive_span all = {b, q, 0, (ptrdiff_t)a->n_s};
    (void)additive_scores(a, all, p);
    additive_softmax(a, b, p);
    additive_add_rows(a, all, p, y);
}

int
PYA_FN(pya_additive_forward)(const struct pya_ops_additive *a) {
    const ptrdiff_t units = (ptrdiff_t)(a->n_b * a->n_q);
#pragma omp parallel for num_threads(a->n_threads)                                                 \
    schedule(dynamic, additive_run(units, a->n_threads))
    for (ptrdiff_t k = 0; k < units; k++) {
        additive_forward_row(a, k / (ptrdiff_t)a->n_q, k % (ptrdiff_t)a->n_q);
    }
    return PYA_OPS_OK;
}

/* Where the gradients of one key row go; d_key may be NULL, d_query and d_v are added to. */
struct additive_sinks {
    real *d_query, *d_v, *d_key;
    bool add; /* d_key is added to as well */
};

struct additive_key {
    const real *key, *query, *v;
    real ds;
};

/* One vector of what the tanh t of a key row contributes: ds t to d_v, and ds v (1 - t^2) to d_query and d_key.
 * n: lanes that exist; stream: d_key is aligned and stored past the caches. */
static inline __attribute__((always_inline)) void
additive_key_vector(
    const struct additive_key *x, struct additive_sinks to, ptrdiff_t k, int n, bool stream) {
    const vr ds = v_set(x->ds);
    const vr t = v_tanh(v_add(v_ld_n(x->key + k, n), v_ld_n(x->query + k, n)));
    const vr slope = v_max(v_set(0), v_fnma(t, t, v_set(1))); /* t may round to above 1 */
    const vr g = v_mul(v_mul(ds, v_ld_n(x->v + k, n)), slope);
    v_st_n(to.d_v + k, v_fma(ds, t, v_ld_n(to.d_v + k, n)), n);
    v_st_n(to.d_query + k, v_add(g, v_ld_n(to.d_query + k, n)), n);
    if (stream) {
        v_nt(to.d_key + k, g);
    } else if (to.d_key != NULL) {
        v_st_n(to.d_key + k, to.add ? v_add(g, v_ld_n(to.d_key + k, n)) : g, n);
    }
}

static inline void
additive_key_gradient(
    const struct additive_key *x, ptrdiff_t n, struct additive_sinks to,
    struct additive_ahead ahead) {
    const bool stream = to.d_key != NULL && !to.add;
    ptrdiff_t k = stream ? additive_lead(to.d_key, n) : 0;
    if (k > 0) {
        additive_key_vector(x, to, 0, (int)k, false);
    }
    for (; k + VW <= n; k += VW) {
        additive_ask(ahead, k / VW);
        additive_key_vector(x, to, k, VW, stream);
    }
    if (k < n) {
        additive_key_vector(x, to, k, (int)(n - k), false);
    }
}

static void
additive_backward_row(const struct pya_ops_additive *a, ptrdiff_t b, ptrdiff_t q, real *dp) {
    const ptrdiff_t n_e = (ptrdiff_t)a->n_e;
    const bool add = a->accumulate != 0 || q > 0;
    const real *p = (const real *)a->probs + (b * (ptrdiff_t)a->n_q + q) * (ptrdiff_t)a->n_s;
    const real *grad = additive_row(a->grad, q, b);
    double mean = 0;
    for (ptrdiff_t s = 0; s < a->n_s; s++) {
        dp[s] = v_dot(grad, additive_row(a->values, s, b), n_e);
        if (a->grad_probs.p != NULL) {
            dp[s] += additive_row(a->grad_probs, q, b)[s];
        }
        mean += p[s] <= 0 ? 0 : (double)p[s] * (double)dp[s]; /* a NaN counts */
        if (a->d_values.p != NULL) {
            additive_axpy(additive_row_out(a->d_values, s, b), grad, p[s], n_e, add, true);
        }
    }
    const bool far = additive_fetches_far(a);
    real *d_query = additive_row_out(a->d_query, q, b);
    memset(d_query, 0, (size_t)a->n_h * sizeof(real));
    for (ptrdiff_t s = 0; s < a->n_s; s++) {
        const ptrdiff_t next_b = q + 1 < a->n_q ? b : b + 1;
        const struct additive_ahead values = additive_ahead_row(a, s, next_b, far);
        additive_touch(a, s, next_b, values);
        real ds = p[s] <= 0 ? 0 : (real)((double)p[s] * ((double)dp[s] - mean));
        real *d_key = a->d_keys.p != NULL ? additive_row_out(a->d_keys, s, b) : NULL;
        struct additive_sinks to = {d_query, (real *)a->d_v + b * (ptrdiff_t)a->n_h, d_key, add};
        struct additive_key x = {
            additive_row(a->keys, s, b), additive_row(a->query, q, b), (const real *)a->v, ds};
        additive_key_gradient(&x, (ptrdiff_t)a->n_h, to, values);
    }
}

int
PYA_FN(pya_additive_backward)(const struct pya_ops_additive *a) {
    int failed = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        real *dp = (real *)malloc((size_t)a->n_s * sizeof(real));
        failed |= dp == NULL;
#pragma omp for schedule(dynamic, additive_run((ptrdiff_t)a->n_b, a->n_threads))
        for (ptrdiff_t b = 0; b < a->n_b; b++) {
            memset((real *)a->d_v + b * (ptrdiff_t)a->n_h, 0, (size_t)a->n_h * sizeof(real));
            for (ptrdiff_t q = 0; q < a->n_q && dp != NULL; q++) {
                additive_backward_row(a, b, q, dp);
            }
        }
        free(dp);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
