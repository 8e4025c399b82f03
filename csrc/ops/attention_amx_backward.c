/* Scaled attention's backward with AMX: attention_backward.c, with products by tiles.  As in the forward, several blocks of
 * queries meet each block of keys, so that the latter is split once for them. */
#include "attention_amx.h"
#include "attention_backward.h"
#include "attention_scores.h"
#include "kernels.h"

enum {
    PAIR_Q = 32, /* lanes are filled up to whole pairs: the products over queries read them all */
};

/* Of one block of queries.  Each of q and dO is a factor twice: of sums over its columns and over queries. */
struct amx_backward_queries {
    uint32_t *q, *dot;           /* right: dim rows of ATT_Q lanes, dim_v rows */
    uint32_t *q_rows, *dot_rows; /* right: ATT_Q rows of dim lanes, of dim_v lanes */
    real *dqt;                   /* [dim][ATT_LD] */
    struct att_rows rows;
};

struct amx_backward {
    uint32_t *keys, *values; /* left: AMX_K rows of dim, of dim_v */
    uint32_t *columns;       /* left: dim rows of n_keys */
    ptrdiff_t n_keys;
    uint32_t *p, *ds;   /* left: AMX_K rows of ATT_Q */
    uint32_t *ds_lanes; /* right: AMX_K rows of ATT_Q lanes */
    real *s, *dp;       /* [AMX_K][ATT_LD] */
    real *lanes;        /* [dim or dim_v][ATT_LD] */
    real *room;         /* [dim][ATT_AMX_ROOM] */
    real *added;        /* [AMX_K][added_row], or [dim, whole tiles][ATT_LD] */
    ptrdiff_t added_row;
    ptrdiff_t together;
    /* of the unit's keys, or of a block of them if the unit's queries pass all together */
    struct att_keys sums;
    struct amx_backward_queries block[TOGETHER_MOST];
};

static void
amx_backward_carve(
    struct amx_backward *w, struct pya_scratch *s, const struct pya_ops_attention *a,
    ptrdiff_t keys) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const ptrdiff_t larger = d > dv ? d : dv;
    w->keys = amx_take(s, AMX_K, d);
    w->values = amx_take(s, AMX_K, dv);
    w->columns = amx_take(s, d, AMX_K);
    w->p = amx_take(s, AMX_K, ATT_Q);
    w->ds = amx_take(s, AMX_K, ATT_Q);
    w->ds_lanes = amx_take(s, ATT_Q, AMX_K);
    w->s = scratch_take(s, (size_t)AMX_K * ATT_LD);
    w->dp = scratch_take(s, (size_t)AMX_K * ATT_LD);
    w->added_row = pack_stride(pack_round(larger, AMX_ROWS));
    w->lanes = scratch_take(s, (size_t)(larger * ATT_LD));
    w->room = scratch_take(s, (size_t)(d * ATT_AMX_ROOM));
    const ptrdiff_t by_keys = AMX_K * w->added_row;
    const ptrdiff_t by_queries = pack_round(d, AMX_ROWS) * ATT_LD;
    w->added = scratch_take(s, (size_t)(by_keys > by_queries ? by_keys : by_queries));
    att_keys_carve(&w->sums, s, a, keys);
    for (ptrdiff_t i = 0; i < w->together; i++) {
        w->block[i].q = amx_take(s, ATT_Q, d);
        w->block[i].dot = amx_take(s, ATT_Q, dv);
        w->block[i].q_rows = amx_take(s, d, ATT_Q);
        w->block[i].dot_rows = amx_take(s, dv, ATT_Q);
        w->block[i].dqt = scratch_take(s, (size_t)(d * ATT_LD));
        att_rows_carve(&w->block[i].rows, s);
    }
}

/* False: a number cannot be split. */
static bool
amx_backward_load_queries(
    const struct pya_ops_attention *a, struct amx_backward *w, struct amx_backward_queries *block,
    struct att_block x) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const real *q = att_row(a->q, x.b, x.h, x.q0);
    const real *grad = att_row(a->grad, x.b, x.h, x.q0);
    const ptrdiff_t lanes = pack_round(x.nq, PAIR_Q);
    att_pack_lanes(w->lanes, q, a->q.s, x.nq, d, (real)(a->scale * att_log2e), PAIR_Q);
    const unsigned largest_scaled = amx_pack_lanes(block->q, w->lanes, ATT_LD, d, lanes);
    pack_transpose(w->lanes, ATT_LD, grad, a->grad.s, x.nq, dv, lanes);
    const unsigned largest_grad = amx_pack_lanes(block->dot, w->lanes, ATT_LD, dv, lanes);
    const unsigned largest_q = amx_pack_lanes(block->q_rows, q, a->q.s, x.nq, d);
    (void)amx_pack_lanes(block->dot_rows, grad, a->grad.s, x.nq, dv);
    att_rows_load(a, &block->rows, x);
    memset(block->dqt, 0, (size_t)(d * ATT_LD) * sizeof(real));
    return att_splits(largest_scaled, AMX_LEAST) && att_splits(largest_q, AMX_LEAST) &&
           att_splits(largest_grad, AMX_LEAST_GRADIENT);
}

static bool
amx_backward_load_keys(
    const struct pya_ops_attention *a, struct amx_backward *w, struct att_block x,
    const struct att_range *r) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t kv = x.h / (ptrdiff_t)(a->n_h / a->n_kv);
    const real *k = att_row(a->k, x.b, kv, x.k0);
    const real *v = att_row(a->v, x.b, kv, x.k0);
    w->n_keys = x.nk;
    const unsigned largest_k = amx_pack_rows(w->keys, k, a->k.s, x.nk, d);
    const unsigned largest_v = amx_pack_rows(w->values, v, a->v.s, x.nk, (ptrdiff_t)a->dim_v);
    if (r->want_q && a->d_q.p != NULL) {
        (void)att_pack_columns(w->columns, w->room, k, a->k.s, x.nk, d);
    }
    return att_splits(largest_k, AMX_LEAST) && att_splits(largest_v, AMX_LEAST);
}

/* Probabilities and gradients of the scores of one key, for the lanes from q on. */
struct amx_gradients {
    struct amx_parts p, ds;
};

/* Also writes the gradients to dp. */
static inline __attribute__((always_inline)) struct amx_gradients
amx_backward_one(
    const struct pya_ops_attention *a, const struct amx_backward *w, const struct att_rows *rows,
    struct att_block x, int k, int q) {
    vr kept = v_set(0);
    vr ds = v_set(0);
    if (k < x.nk) {
        real *at = w->dp + k * ATT_LD + q;
        const vr score = v_ld(w->s + k * ATT_LD + q);
        const vr p = v_mul(v_exp2(v_sub(score, v_ld(rows->top + q))), v_ld(rows->inverse + q));
        vr g = v_ld(at);
        kept = p;
        if (a->dropout > 0) {
            const vr keep = att_keep(a, att_seed(a, x), x.q0 + q, x.k0 + k);
            kept = v_mul(p, keep);
            g = v_mul(g, keep);
        }
        ds = v_mul(p, v_sub(g, v_ld(rows->delta + q)));
        v_st(at, ds);
    }
    return (struct amx_gradients){amx_split(kept), amx_split(ds)};
}

/* Turns scores into P and dS, as factors; dp becomes dS as well. */
static void
amx_backward_scores(
    const struct pya_ops_attention *a, struct amx_backward *w, const struct att_rows *rows,
    struct att_block x) {
    const int q_chunks = (int)amx_chunks(x.nq);
    const int k_chunks = (int)amx_chunks(x.nk);
    for (int n = 0; n < k_chunks * 16; n++) {
        const int k = n / 16 * AMX_DEPTH + n % 16; /* and k + 16 */
        for (int m = 0; m < q_chunks * 16; m += VW) {
            const int q = m / 16 * AMX_DEPTH + m % 16; /* and q + 16 */
            /* rows k and k + 16 are in neighbouring tiles */
            const int left = (k / 16 * q_chunks + m / 16) * AMX_BLOCK + k % 16 * 16 + m % 16;
            const int below = left + q_chunks * AMX_BLOCK;
            const int right = (q / 16 * k_chunks + n / 16) * AMX_BLOCK + k % 16 * 16 + m % 16;
            const struct amx_gradients g00 = amx_backward_one(a, w, rows, x, k, q);
            const struct amx_gradients g01 = amx_backward_one(a, w, rows, x, k, q + 16);
            amx_put(w->p + left, g00.p, g01.p);
            amx_put(w->ds + left, g00.ds, g01.ds);
            const struct amx_gradients g10 = amx_backward_one(a, w, rows, x, k + 16, q);
            amx_put(w->ds_lanes + right, g00.ds, g10.ds);
            const struct amx_gradients g11 = amx_backward_one(a, w, rows, x, k + 16, q + 16);
            amx_put(w->p + below, g10.p, g11.p);
            amx_put(w->ds + below, g10.ds, g11.ds);
            amx_put(w->ds_lanes + right + k_chunks * AMX_BLOCK, g01.ds, g11.ds);
        }
    }
}

static void
amx_backward_add(
    real *dst, ptrdiff_t dst_row, const real *src, ptrdiff_t src_row, ptrdiff_t rows,
    ptrdiff_t lanes) {
    for (ptrdiff_t r = 0; r < rows; r++) {
        for (ptrdiff_t j = 0; j < lanes; j += VW) {
            real *p = dst + r * dst_row + j;
            v_st(p, v_add(v_ld(p), v_ld(src + r * src_row + j)));
        }
    }
}

/* One block of queries meets the loaded block of keys, whose sums begin at key `first` of the scratch's. */
static void
amx_backward_block(
    const struct pya_ops_attention *a, struct amx_backward *w, struct amx_backward_queries *block,
    struct att_block x, const struct att_range *r, ptrdiff_t first) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const ptrdiff_t lanes = pack_round(x.nq, PAIR_Q);
    const struct amx_factor keys = {w->keys, x.nk, d};
    const struct amx_factor queries = {block->q, lanes, d};
    const struct amx_factor values = {w->values, x.nk, dv};
    const struct amx_factor dot = {block->dot, lanes, dv};
    att_prefetch_bias(a, x);
    amx_product(w->s, ATT_LD, keys, queries, d, NULL);
    amx_product(w->dp, ATT_LD, values, dot, dv, NULL);
    att_adjust_scores(a, x, w->s);
    amx_backward_scores(a, w, &block->rows, x);
    if (r->want_q && a->d_bias.p != NULL) {
        att_write_bias(a, w->dp, x);
    }
    if (r->want_q && a->d_q.p != NULL) {
        const struct amx_factor columns = {w->columns, d, w->n_keys};
        const struct amx_factor ds = {w->ds_lanes, x.nq, x.nk};
        amx_product(w->added, ATT_LD, columns, ds, x.nk, NULL);
        amx_backward_add(block->dqt, ATT_LD, w->added, ATT_LD, d, x.nq);
    }
    if (r->want_kv) {
        const struct att_keys *sums = &w->sums;
        const struct amx_factor p = {w->p, x.nk, x.nq};
        const struct amx_factor dot_rows = {block->dot_rows, dv, x.nq};
        real *dst_v = sums->dv + first * sums->ldv;
        amx_product(w->added, w->added_row, p, dot_rows, x.nq, NULL);
        amx_backward_add(dst_v, sums->ldv, w->added, w->added_row, x.nk, dv);
        const struct amx_factor ds = {w->ds, x.nk, x.nq};
        const struct amx_factor q_rows = {block->q_rows, d, x.nq};
        real *dst_k = sums->dk + first * sums->ld;
        amx_product(w->added, w->added_row, ds, q_rows, x.nq, NULL);
        amx_backward_add(dst_k, sums->ld, w->added, w->added_row, x.nk, d);
    }
}

/* Blocks i0 to i1 pass over the unit's keys; is_whole: these are all of the key head's. */
static bool
amx_backward_pass(
    const struct pya_ops_attention *a, struct amx_backward *w, const struct att_range *r,
    struct att_block head, ptrdiff_t i0, ptrdiff_t i1, bool is_whole) {
    const ptrdiff_t kv = head.h / (ptrdiff_t)(a->n_h / a->n_kv);
    for (ptrdiff_t i = i0; i < i1; i++) {
        const struct att_block x = att_block_of_group(a, head.b, kv, i, r->q0, r->q1);
        if (!amx_backward_load_queries(a, w, &w->block[i - i0], x)) {
            return false;
        }
    }
    for (head.k0 = r->k0; head.k0 < r->k1; head.k0 += AMX_K) {
        bool is_loaded = false;
        head.nk = (int)(r->k1 - head.k0 < AMX_K ? r->k1 - head.k0 : AMX_K);
        if (is_whole && r->want_kv) {
            att_keys_clear(&w->sums, head.nk);
        }
        for (ptrdiff_t i = i0; i < i1; i++) {
            struct att_block x = att_block_of_group(a, head.b, kv, i, r->q0, r->q1);
            const ptrdiff_t there = att_visible(a, x) - head.k0;
            x.k0 = head.k0;
            x.nk = (int)(there < head.nk ? there : head.nk);
            if (there <= 0 || att_is_hidden(a, x)) {
                continue;
            }
            if (!is_loaded && !amx_backward_load_keys(a, w, head, r)) {
                return false;
            }
            is_loaded = true;
            const ptrdiff_t first = is_whole ? 0 : head.k0 - r->k0;
            amx_backward_block(a, w, &w->block[i - i0], x, r, first);
        }
        if (is_whole && r->want_kv) {
            att_write_keys(a, &w->sums, head, head.k0 + head.nk);
        }
    }
    for (ptrdiff_t i = i0; i < i1 && r->want_q && a->d_q.p != NULL; i++) {
        att_write_queries(
            a, w->block[i - i0].dqt, att_block_of_group(a, head.b, kv, i, r->q0, r->q1));
    }
    return true;
}

static bool
amx_backward_unit(
    const struct pya_ops_attention *a, struct amx_backward *w, const struct att_range *r) {
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    const ptrdiff_t n_kv = r->kv1 - r->kv0;
    const ptrdiff_t n_blocks = att_n_parts(r->q1 - r->q0, ATT_Q) * group;
    const bool is_whole = n_blocks <= w->together;
    for (ptrdiff_t n = 0; n < (r->b1 - r->b0) * n_kv; n++) {
        const struct att_block head = {
            r->b0 + n / n_kv, (r->kv0 + n % n_kv) * group, 0, r->k0, 0, 0};
        if (!is_whole && r->want_kv) {
            att_keys_clear(&w->sums, r->k1 - r->k0);
        }
        for (ptrdiff_t i = 0; i < n_blocks; i += w->together) {
            const ptrdiff_t end = i + w->together < n_blocks ? i + w->together : n_blocks;
            if (!amx_backward_pass(a, w, r, head, i, end, is_whole)) {
                return false;
            }
        }
        if (!is_whole && r->want_kv) {
            att_write_keys(a, &w->sums, head, r->k1);
        }
    }
    return true;
}

enum { AMX_REFUSED = -1 }; /* a number cannot be split */

static int
amx_backward_run(const struct pya_ops_attention *a, struct att_plan plan) {
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    const ptrdiff_t n_blocks = att_n_parts(plan.q, ATT_Q) * group;
    const size_t factors =
        amx_words(ATT_Q, (ptrdiff_t)a->dim) + amx_words(ATT_Q, (ptrdiff_t)a->dim_v);
    const size_t words = 2 * factors + (size_t)a->dim * ATT_LD;
    const ptrdiff_t together = att_together(words * sizeof(uint32_t), n_blocks);
    const ptrdiff_t keys = !plan.want_kv ? 0 : n_blocks <= together ? AMX_K : plan.k;
    int failed = 0;
    int refused = 0;
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct amx_backward w = {.together = together};
        struct pya_scratch s = {NULL, 0};
        amx_backward_carve(&w, &s, a, keys);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            amx_backward_carve(&w, &s, a, keys);
            amx_begin();
        }
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t u = 0; u < att_n_units(a, plan); u++) {
            const struct att_range r = att_unit(a, plan, u);
            if (s.base != NULL && !__atomic_load_n(&refused, __ATOMIC_RELAXED) &&
                !amx_backward_unit(a, &w, &r)) {
                __atomic_store_n(&refused, 1, __ATOMIC_RELAXED);
            }
        }
        if (s.base != NULL) {
            amx_end();
        }
        scratch_end(&s, &local);
    }
    return failed ? PYA_OPS_E_NOMEM : refused ? AMX_REFUSED : PYA_OPS_OK;
}

/* Zeros the gradient of the bias again. */
static void
amx_backward_clear_bias(const struct pya_ops_attention *a) {
    const struct pya_ops_scores o = a->d_bias;
    const ptrdiff_t n_b = o.b == 0 ? 1 : (ptrdiff_t)a->n_b;
    const ptrdiff_t n_h = o.h == 0 ? 1 : (ptrdiff_t)a->n_h;
    const ptrdiff_t n_q = o.q == 0 ? 1 : (ptrdiff_t)a->n_q;
    const ptrdiff_t n_k = o.k == 0 ? 1 : (ptrdiff_t)a->n_k;
    for (ptrdiff_t n = 0; n < n_b * n_h * n_q; n++) {
        real *p = (real *)o.p + n / (n_h * n_q) * o.b + n / n_q % n_h * o.h + n % n_q * o.q;
        for (ptrdiff_t k = 0; k < n_k; k++) {
            p[k * o.k] = 0;
        }
    }
}

int
pya_attention_backward_amx(const struct pya_ops_attention *a) {
    if (!att_amx_pays(a)) {
        return PYA_FN(pya_attention_backward)(a);
    }
    const ptrdiff_t share = pack_round(att_n_parts(a->n_q, 2 * (ptrdiff_t)a->n_threads), ATT_Q);
    const int status = att_divide(a, share, amx_backward_run);
    if (status != AMX_REFUSED) {
        return status;
    }
    if (a->d_bias.p != NULL && a->d_bias_add) {
        amx_backward_clear_bias(a);
    }
    return PYA_FN(pya_attention_backward)(a);
}
