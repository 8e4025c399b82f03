/* Scaled dot-product attention, forward: each block of queries passes over all keys, keeping the running maximum and sum of
 * each query; scores never leave the cache. */
#include "attention_drop.h"
#include "attention_tile.h"

struct forward_scratch {
    real *qt;        /* [dim][ATT_LD] */
    real *s;         /* [ATT_K][ATT_LD] */
    real *ot;        /* [dim_v][ATT_LD] */
    real *top, *sum; /* [ATT_Q] */
};

static void
forward_carve(struct forward_scratch *w, struct pya_scratch *s, const struct pya_ops_attention *a) {
    w->qt = scratch_take(s, (size_t)a->dim * ATT_LD);
    w->s = scratch_take(s, att_tile_size(a));
    w->ot = scratch_take(s, (size_t)a->dim_v * ATT_LD);
    w->top = scratch_take(s, ATT_Q);
    w->sum = scratch_take(s, ATT_Q);
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
        best[j] = v_ld(w->top + q + j * VW);
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
        real *top = w->top + q + j * VW;
        real *total = w->sum + q + j * VW;
        /* v_exp2(0) is one rounding step above 1; many blocks would multiply that error */
        const vr before = v_ld(top);
        shrink[j] = v_sel(m_eq(before, best[j]), v_set(1), v_exp2(v_sub(before, best[j])));
        v_st(top, best[j]);
        v_st(total, v_fma(v_ld(total), shrink[j], sum[j]));
    }
    /* the first block has nothing to rescale: its product overwrites */
    for (ptrdiff_t d = 0; d < dim_v && x.k0 > 0; d++) {
        for (int j = 0; j < nv; j++) {
            real *o = w->ot + d * ATT_LD + q + j * VW;
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
forward_write(const struct pya_ops_attention *a, struct forward_scratch *w, struct att_block x) {
    real *top = a->stats == NULL ? NULL : att_tops(a, x);
    for (int q = 0; q < x.nq; q += VW) {
        const vr sum = v_ld(w->sum + q);
        const vm none = m_eq(sum, v_set(0)); /* every key masked: zeros, not NaN */
        const vr inverse = v_sel(none, v_set(0), v_rcp(sum));
        if (top != NULL) {
            const int n = x.nq - q < VW ? x.nq - q : VW;
            v_st_n(top + q, v_ld(w->top + q), n);
            v_st_n(top + a->n_q + q, inverse, n);
        }
        for (ptrdiff_t d = 0; d < a->dim_v; d++) {
            v_st(w->ot + d * ATT_LD + q, v_mul(v_ld(w->ot + d * ATT_LD + q), inverse));
        }
    }
    pack_transpose(
        att_row_out(a->out, x.b, x.h, x.q0), a->out.s, w->ot, ATT_LD, (ptrdiff_t)a->dim_v, x.nq,
        (ptrdiff_t)a->dim_v);
}

static void
forward_queries(const struct pya_ops_attention *a, struct forward_scratch *w, struct att_block x) {
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    att_pack_lanes(
        w->qt, att_row(a->q, x.b, x.h, x.q0), a->q.s, x.nq, (ptrdiff_t)a->dim,
        (real)(a->scale * att_log2e));
    for (int q = 0; q < ATT_Q; q++) {
        w->top[q] = (real)-1e37;
        w->sum[q] = 0;
    }
    const ptrdiff_t end = att_visible(a, x.q0, x.nq);
    for (x.k0 = 0; x.k0 < end; x.k0 += ATT_K) {
        x.nk = (int)(end - x.k0 < ATT_K ? end - x.k0 : ATT_K);
        att_scores(a, x, w->qt, w->s);
        forward_softmax(w, x, (ptrdiff_t)a->dim_v);
        if (a->dropout > 0) {
            forward_drop(a, x, w->s);
        }
        struct pya_tile_a values = {att_row(a->v, x.b, kv, x.k0), 1, a->v.s};
        struct pya_tile_b p = {w->s, ATT_LD};
        struct pya_tile_c dst = {w->ot, ATT_LD, x.k0 > 0};
        tile_multiply((int)a->dim_v, x.nq, x.nk, values, p, dst);
    }
    forward_write(a, w, x);
}

int
PYA_FN(pya_attention_forward)(const struct pya_ops_attention *a) {
    const ptrdiff_t n_qb = ((ptrdiff_t)a->n_q + ATT_Q - 1) / ATT_Q;
    const ptrdiff_t heads = (ptrdiff_t)(a->n_b * a->n_h);
    int failed = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct forward_scratch w;
        struct pya_scratch s = {NULL, 0};
        forward_carve(&w, &s, a);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            forward_carve(&w, &s, a);
        }
        /* with a causal mask the last block of queries is the longest, so it goes first */
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t k = 0; k < heads * n_qb; k++) {
            ptrdiff_t head = k / n_qb;
            ptrdiff_t q0 = (n_qb - 1 - k % n_qb) * ATT_Q;
            struct att_block x = {head / (ptrdiff_t)a->n_h, head % (ptrdiff_t)a->n_h, q0, 0, 0, 0};
            x.nq = (int)(a->n_q - q0 < ATT_Q ? a->n_q - q0 : ATT_Q);
            if (s.base != NULL) {
                forward_queries(a, &w, x);
            }
        }
        scratch_end(&s, &local);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
