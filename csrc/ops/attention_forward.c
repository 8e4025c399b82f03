/* Scaled dot-product attention, forward: each block of queries passes over all keys, keeping the running maximum and sum of
 * each query; scores never leave the cache.  Where a head's keys and values do not stay in the L2 cache, several blocks of
 * queries pass over them together. */
#include "attention_drop.h"
#include "attention_few.h"
#include "attention_scores.h"
#include "attention_write.h"

enum {
    FORWARD_MOST = 4,       /* blocks of queries that pass together */
    FORWARD_NEAR = 1 << 20, /* bytes of keys and values that stay in an L2 cache of 1 to 2 MB */
    FORWARD_SCRATCH = 512 << 10, /* and of scratch beside some blocks of them */
};

/* Of one block of queries, with its running softmax. */
struct forward_scratch {
    real *qt; /* [dim][ATT_LD] */
    real *s;  /* [ATT_K][ATT_LD], shared by all blocks */
    struct att_result r;
};

static void
forward_carve(
    struct forward_scratch *w, int n_w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    real *scores = scratch_take(s, att_tile_size(a));
    for (int i = 0; i < n_w; i++) {
        w[i].s = scores;
        w[i].qt = scratch_take(s, (size_t)a->dim * ATT_LD);
        att_result_carve(&w[i].r, s, a);
    }
}

/* Vectors of queries taken together.  Two with 8 lanes fill a cache line; with 16 lanes, a single vector's maxima would wait
 * for one another. */
enum { SOFTMAX_NV = VW == 8 ? 2 : VW == 16 ? 4 : 1 };

/* Turns scores of nv vectors of queries from q on into unnormalised probabilities; earlier results are rescaled where a maximum
 * grew. */
static inline __attribute__((always_inline)) void
forward_softmax_lanes(
    struct forward_scratch *w, struct att_block x, ptrdiff_t dim_v, int q, const int nv) {
    vr best[SOFTMAX_NV];
    vr shrink[SOFTMAX_NV];
    vr sum[SOFTMAX_NV]; /* of this block alone: sums of sums lose fewer digits */
    for (int j = 0; j < nv; j++) {
        best[j] = v_ld(w->r.top + q + j * VW);
        sum[j] = v_set(0);
    }
    for (int k = 0; k < x.nk; k++) {
        for (int j = 0; j < nv; j++) {
            best[j] = v_max(best[j], v_ld(w->s + k * ATT_LD + q + j * VW));
        }
    }
    for (int k = 0; k < x.nk; k++) {
        for (int j = 0; j < nv; j++) {
            real *s = w->s + k * ATT_LD + q + j * VW;
            const vr e = v_exp2(v_sub(v_ld(s), best[j]));
            v_st(s, e);
            sum[j] = v_add(sum[j], e);
        }
    }
    for (int j = 0; j < nv; j++) {
        real *top = w->r.top + q + j * VW;
        real *total = w->r.sum + q + j * VW;
        /* v_exp2(0) is one rounding step above 1; many blocks would multiply that error */
        const vr before = v_ld(top);
        shrink[j] = v_sel(m_eq(before, best[j]), v_set(1), v_exp2(v_sub(before, best[j])));
        v_st(top, best[j]);
        v_st(total, v_fma(v_ld(total), shrink[j], sum[j]));
    }
    for (ptrdiff_t d = 0; d < dim_v && w->r.has_begun; d++) {
        for (int j = 0; j < nv; j++) {
            real *o = w->r.ot + d * ATT_LD + q + j * VW;
            v_st(o, v_mul(v_ld(o), shrink[j]));
        }
    }
}

static inline void
forward_softmax(struct forward_scratch *w, struct att_block x, ptrdiff_t dim_v) {
    int q = 0;
    for (; q < x.nq - (SOFTMAX_NV - 1) * VW; q += SOFTMAX_NV * VW) {
        forward_softmax_lanes(w, x, dim_v, q, SOFTMAX_NV);
    }
    for (; SOFTMAX_NV > 1 && q < x.nq; q += VW) {
        forward_softmax_lanes(w, x, dim_v, q, 1);
    }
}

static inline void
forward_drop(const struct pya_ops_attention *a, struct att_block x, real *s) {
    const uint32_t seed = att_seed(a, x);
    for (int k = 0; k < x.nk; k++) {
        for (int q = 0; q < x.nq; q += VW) {
            real *p = s + k * ATT_LD + q;
            v_st(p, v_mul(v_ld(p), att_keep(a, seed, x.q0 + q, x.k0 + k)));
        }
    }
}

static void
forward_start(const struct pya_ops_attention *a, struct forward_scratch *w, struct att_block x) {
    att_pack_lanes(
        w->qt, att_row(a->q, x.b, x.h, x.q0), a->q.s, x.nq, (ptrdiff_t)a->dim,
        (real)(a->scale * att_log2e), VW);
    att_result_clear(&w->r);
}

static void
forward_keys(const struct pya_ops_attention *a, struct forward_scratch *w, struct att_block x) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    if (att_is_hidden(a, x)) {
        return;
    }
    att_scores(a, x, w->qt, w->s);
    forward_softmax(w, x, (ptrdiff_t)a->dim_v);
    if (a->dropout > 0) {
        forward_drop(a, x, w->s);
    }
    struct pya_tile_a values = {att_row(a->v, x.b, kv, x.k0), 1, a->v.s};
    struct pya_tile_b p = {w->s, ATT_LD};
    struct pya_tile_c dst = {w->r.ot, ATT_LD, w->r.has_begun};
    tile_multiply((int)a->dim_v, x.nq, x.nk, values, p, dst);
    w->r.has_begun = true;
}

static struct att_block
forward_block(const struct pya_ops_attention *a, struct att_block x, int i) {
    x.q0 += i * ATT_Q;
    x.nq = (int)(a->n_q - x.q0 < ATT_Q ? a->n_q - x.q0 : ATT_Q);
    return x;
}

/* n_w blocks of queries, the first of which x describes. */
static void
forward_queries(
    const struct pya_ops_attention *a, struct forward_scratch *w, int n_w, struct att_block first) {
    for (int i = 0; i < n_w; i++) {
        forward_start(a, &w[i], forward_block(a, first, i));
    }
    const struct att_block last = forward_block(a, first, n_w - 1);
    const ptrdiff_t end = att_visible(a, last);
    for (ptrdiff_t k0 = 0; k0 < end; k0 += ATT_K) {
        for (int i = 0; i < n_w; i++) {
            struct att_block x = forward_block(a, first, i);
            const ptrdiff_t n = att_visible(a, x) - k0;
            x.k0 = k0;
            x.nk = (int)(n < ATT_K ? n : ATT_K);
            if (x.nk > 0) {
                forward_keys(a, &w[i], x);
            }
        }
    }
    for (int i = 0; i < n_w; i++) {
        att_result_write(a, &w[i].r, forward_block(a, first, i));
    }
}

/* How many blocks of queries pass over a head's keys and values together.  One where those stay in the L2 cache, or where more
 * would leave threads without work; else as many as have their own scratch there. */
static int
forward_together(const struct pya_ops_attention *a) {
    const int64_t row = (a->dim + a->dim_v) * (int64_t)sizeof(real);
    const int64_t n_qb = (a->n_q + ATT_Q - 1) / ATT_Q;
    int64_t n = a->n_k * row <= FORWARD_NEAR ? 1 : FORWARD_SCRATCH / (row * ATT_LD);
    n = n > FORWARD_MOST ? FORWARD_MOST : n;
    while (n > 1 && a->n_b * a->n_h * (n_qb / n) < 4 * (int64_t)a->n_threads) {
        n--;
    }
    return n < 1 ? 1 : (int)n;
}

int
PYA_FN(pya_attention_forward)(const struct pya_ops_attention *a) {
#ifndef PYA_ISA_scalar /* where a lane is one query, none is idle */
    if (att_is_few(a)) {
        return PYA_FN(pya_attention_few_forward)(a);
    }
#endif
    const int together = forward_together(a);
    const ptrdiff_t step = (ptrdiff_t)together * ATT_Q;
    const ptrdiff_t n_qb = ((ptrdiff_t)a->n_q + step - 1) / step;
    const ptrdiff_t heads = (ptrdiff_t)(a->n_b * a->n_h);
    int failed = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct forward_scratch w[FORWARD_MOST];
        struct pya_scratch s = {NULL, 0};
        forward_carve(w, together, &s, a);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            forward_carve(w, together, &s, a);
        }
        /* with a causal mask the last blocks of queries are the longest, so they go first */
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t k = 0; k < heads * n_qb; k++) {
            const ptrdiff_t head = k / n_qb;
            const ptrdiff_t q0 = (n_qb - 1 - k % n_qb) * step;
            const ptrdiff_t n = ((ptrdiff_t)a->n_q - q0 + ATT_Q - 1) / ATT_Q;
            const struct att_block x = {
                head / (ptrdiff_t)a->n_h, head % (ptrdiff_t)a->n_h, q0, 0, 0, 0};
            if (s.base != NULL) {
                forward_queries(a, w, n < together ? (int)n : together, x);
            }
        }
        scratch_end(&s, &local);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
