/* Scaled attention's forward with AMX: attention_forward.c, with products by tiles.  Several blocks of queries, of all heads
 * that share a key head, pass over the keys together, so that each block of keys and values is split once for them. */
#include "attention_amx.h"
#include "attention_scores.h"
#include "attention_write.h"
#include "kernels.h"

/* A block of queries with its running softmax. */
struct amx_forward_block {
    uint32_t *queries; /* right factor: dim rows, ATT_Q lanes */
    struct att_result r;
};

/* A block of keys, shared by the blocks of queries. */
struct amx_forward_keys {
    uint32_t *keys;   /* left factor: AMX_K rows of dim */
    uint32_t *values; /* left factor: dim_v rows of n */
    ptrdiff_t n;
};

/* One block of queries meets one block of keys. */
struct amx_forward_item {
    const struct pya_ops_attention *a;
    struct att_block x;
    struct amx_forward_block *block;
    const struct amx_forward_keys *keys;
    real *s;             /* [AMX_K][ATT_LD] */
    uint32_t *p;         /* right factor: AMX_K rows, ATT_Q lanes */
    real *shrink;        /* [ATT_Q]: what earlier results are multiplied by */
    real *sum;           /* [ATT_Q]: of this block of keys alone; sums of sums lose fewer digits */
    int lanes, n_chunks; /* of whole tiles: queries, and 32 keys each */
    uint32_t seed;       /* of dropout */
    bool is_first;       /* of its block of queries */
    int k, q; /* which probabilities are to be computed next: those of keys k and k + 16 */
};

/* Items pass in a pipeline: while the tiles multiply for the next and the previous one, the vector units compute the
 * probabilities of this one. */
struct amx_forward {
    struct amx_forward_item item[3];
    struct amx_forward_keys keys[3]; /* those of the three items may differ */
    real *qt;                        /* [dim][ATT_LD] */
    real *added;                     /* [dim_v, whole tiles][ATT_LD] */
    real *room;                      /* [dim_v][ATT_AMX_ROOM] */
    struct amx_forward_block block[TOGETHER_MOST];
};

static void
amx_forward_carve(
    struct amx_forward *w, int together, struct pya_scratch *s, const struct pya_ops_attention *a) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    for (int i = 0; i < 3; i++) {
        w->item[i].s = scratch_take(s, (size_t)AMX_K * ATT_LD);
        w->item[i].p = amx_take(s, ATT_Q, AMX_K);
        w->item[i].shrink = scratch_take(s, ATT_Q);
        w->item[i].sum = scratch_take(s, ATT_Q);
        w->keys[i].keys = amx_take(s, AMX_K, d);
        w->keys[i].values = amx_take(s, dv, AMX_K);
    }
    w->qt = scratch_take(s, (size_t)(d * ATT_LD));
    w->added = scratch_take(s, (size_t)(pack_round(dv, AMX_ROWS) * ATT_LD));
    w->room = scratch_take(s, (size_t)(dv * ATT_AMX_ROOM));
    for (int i = 0; i < together; i++) {
        w->block[i].queries = amx_take(s, ATT_Q, d);
        att_result_carve(&w->block[i].r, s, a);
    }
}

/* The largest score of each query so far, and how that changes what there was before. */
static void
amx_forward_top(struct amx_forward_item *i) {
    for (int q = 0; q < i->lanes; q += VW) {
        const vr before = v_ld(i->block->r.top + q);
        vr best = before;
        vr other = before; /* two maxima wait less for one another */
        int k = 0;
        for (; k + 1 < i->x.nk; k += 2) {
            best = v_max(best, v_ld(i->s + k * ATT_LD + q));
            other = v_max(other, v_ld(i->s + (k + 1) * ATT_LD + q));
        }
        if (k < i->x.nk) {
            best = v_max(best, v_ld(i->s + k * ATT_LD + q));
        }
        best = v_max(best, other);
        v_st(i->block->r.top + q, best);
        /* v_exp2(0) is one rounding step above 1; many blocks would multiply that error */
        v_st(i->shrink + q, v_sel(m_eq(before, best), v_set(1), v_exp2(v_sub(before, best))));
        v_st(i->sum + q, v_set(0));
    }
}

/* Turns vectors of scores of two keys into unnormalised probabilities. */
static inline __attribute__((always_inline)) void
amx_forward_pair(struct amx_forward_item *i, const bool drops) {
    const struct att_block x = i->x;
    const int k = i->k; /* and k + 16 */
    const int q = i->q;
    const real *from = i->s + k * ATT_LD + q;
    const vr best = v_ld(i->block->r.top + q);
    vr low = v_set(0); /* of a key that is missing */
    vr high = low;
    if (k < x.nk) {
        low = v_exp2(v_sub(v_ld(from), best));
    }
    if (k + 16 < x.nk) {
        high = v_exp2(v_sub(v_ld(from + 16 * ATT_LD), best));
    }
    v_st(i->sum + q, v_add(v_ld(i->sum + q), v_add(low, high)));
    if (drops) {
        low = v_mul(low, att_keep(i->a, i->seed, x.q0 + q, x.k0 + k));
        high = v_mul(high, att_keep(i->a, i->seed, x.q0 + q, x.k0 + k + 16));
    }
    uint32_t *to = i->p + (q / 16 * i->n_chunks + k / AMX_DEPTH) * AMX_BLOCK;
    amx_put(to + k % 16 * 16 + q % 16, amx_split(low), amx_split(high));
    i->q = q + VW;
    if (i->q == i->lanes) {
        i->q = 0;
        i->k += k % 16 == 15 ? AMX_DEPTH - 15 : 1;
    }
}

static void
amx_forward_step(void *of) {
    amx_forward_pair(of, false);
}

static void
amx_forward_step_with_dropout(void *of) {
    amx_forward_pair(of, true);
}

/* The scores of an item. */
static void
amx_forward_score(struct amx_forward_item *i, struct amx_beside *beside) {
    const ptrdiff_t d = (ptrdiff_t)i->a->dim;
    const struct amx_factor left = {i->keys->keys, i->x.nk, d};
    const struct amx_factor right = {i->block->queries, i->x.nq, d};
    amx_product(i->s, ATT_LD, left, right, d, beside);
    att_adjust_scores(i->a, i->x, i->s);
}

/* Adds what the item's keys contribute to the results. */
static void
amx_forward_weigh(struct amx_forward_item *i, real *added, struct amx_beside *beside) {
    const ptrdiff_t dv = (ptrdiff_t)i->a->dim_v;
    const struct amx_factor left = {i->keys->values, dv, i->keys->n};
    const struct amx_factor right = {i->p, i->x.nq, i->x.nk};
    amx_product(added, ATT_LD, left, right, i->x.nk, beside);
    for (ptrdiff_t d = 0; d < dv; d++) {
        for (int q = 0; q < i->x.nq; q += VW) {
            real *o = i->block->r.ot + d * ATT_LD + q;
            const vr more = v_ld(added + d * ATT_LD + q);
            v_st(o, i->is_first ? more : v_fma(v_ld(o), v_ld(i->shrink + q), more));
        }
    }
}

static void
amx_forward_add_sums(struct amx_forward_item *i) {
    for (int q = 0; q < i->lanes; q += VW) {
        real *total = i->block->r.sum + q;
        v_st(total, v_fma(v_ld(total), v_ld(i->shrink + q), v_ld(i->sum + q)));
    }
}

static inline ptrdiff_t
amx_forward_groups(const struct amx_forward_item *next, const struct amx_forward_item *last) {
    ptrdiff_t n = 0;
    if (next != NULL) {
        n += amx_groups(next->x.nk, next->x.nq, (ptrdiff_t)next->a->dim);
    }
    if (last != NULL) {
        n += amx_groups((ptrdiff_t)last->a->dim_v, last->x.nq, last->x.nk);
    }
    return n;
}

/* Each of the three may be missing. */
static void
amx_forward_advance(
    struct amx_forward *w, struct amx_forward_item *next, struct amx_forward_item *now,
    struct amx_forward_item *last) {
    struct amx_beside beside = amx_spread(
        now != NULL && now->a->dropout > 0 ? amx_forward_step_with_dropout : amx_forward_step, now,
        now == NULL ? 0 : now->n_chunks * 16 * (now->lanes / VW), amx_forward_groups(next, last));
    if (next != NULL) {
        att_prefetch_bias(next->a, next->x);
    }
    if (last != NULL) {
        amx_forward_weigh(last, w->added, &beside);
    }
    if (next != NULL) {
        amx_forward_score(next, &beside);
    }
    amx_finish(&beside);
    if (now != NULL) {
        amx_forward_add_sums(now);
    }
    if (next != NULL) {
        amx_forward_top(next);
    }
}

static bool
amx_forward_start(
    const struct pya_ops_attention *a, struct amx_forward *w, struct amx_forward_block *block,
    struct att_block x) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    att_pack_lanes(
        w->qt, att_row(a->q, x.b, x.h, x.q0), a->q.s, x.nq, d, (real)(a->scale * att_log2e), VW);
    att_result_clear(&block->r);
    return att_splits(
        amx_pack_lanes(block->queries, w->qt, ATT_LD, d, pack_round(x.nq, VW)), AMX_LEAST);
}

/* Splits keys from k0 on. */
static bool
amx_forward_load(
    const struct pya_ops_attention *a, struct amx_forward *w, struct amx_forward_keys *keys,
    struct att_block head) {
    const ptrdiff_t d = (ptrdiff_t)a->dim;
    const ptrdiff_t dv = (ptrdiff_t)a->dim_v;
    const real *k = att_row(a->k, head.b, head.h, head.k0);
    const real *v = att_row(a->v, head.b, head.h, head.k0);
    keys->n = head.nk;
    const unsigned largest_k = amx_pack_rows(keys->keys, k, a->k.s, keys->n, d);
    const unsigned largest_v = att_pack_columns(keys->values, w->room, v, a->v.s, keys->n, dv);
    return att_splits(largest_k, AMX_LEAST) && att_splits(largest_v, AMX_LEAST);
}

/* Blocks i0 to i1 of those that read key head head.h.  False: a number cannot be split. */
static bool
amx_forward_blocks(
    const struct pya_ops_attention *a, struct amx_forward *w, struct att_block head, ptrdiff_t i0,
    ptrdiff_t i1) {
    ptrdiff_t end = 0;
    for (ptrdiff_t i = i0; i < i1; i++) {
        const struct att_block x = att_block_of_group(a, head.b, head.h, i, 0, (ptrdiff_t)a->n_q);
        const ptrdiff_t visible = att_visible(a, x);
        end = visible > end ? visible : end;
        if (!amx_forward_start(a, w, &w->block[i - i0], x)) {
            return false;
        }
    }
    struct amx_forward_item *now = NULL;
    struct amx_forward_item *last = NULL;
    int n = 0;
    int n_keys = 0;
    for (; head.k0 < end; head.k0 += AMX_K) {
        struct amx_forward_keys *keys = &w->keys[n_keys % 3];
        bool is_loaded = false;
        head.nk = (int)(end - head.k0 < AMX_K ? end - head.k0 : AMX_K);
        for (ptrdiff_t i = i0; i < i1; i++) {
            struct amx_forward_item *next = &w->item[n];
            next->x = att_block_of_group(a, head.b, head.h, i, 0, (ptrdiff_t)a->n_q);
            const ptrdiff_t there = att_visible(a, next->x) - head.k0;
            next->x.k0 = head.k0;
            next->x.nk = (int)(there < head.nk ? there : head.nk);
            if (there <= 0 || att_is_hidden(a, next->x)) {
                continue;
            }
            if (!is_loaded && !amx_forward_load(a, w, keys, head)) {
                return false;
            }
            is_loaded = true;
            next->a = a;
            next->block = &w->block[i - i0];
            next->is_first = !next->block->r.has_begun;
            next->block->r.has_begun = true;
            next->seed = att_seed(a, next->x);
            next->keys = keys;
            next->lanes = (int)pack_round(next->x.nq, AMX_ROWS);
            next->n_chunks = (int)amx_chunks(next->x.nk);
            next->k = 0;
            next->q = 0;
            amx_forward_advance(w, next, now, last);
            last = now;
            now = next;
            n = (n + 1) % 3;
        }
        n_keys += is_loaded;
    }
    amx_forward_advance(w, NULL, now, last);
    amx_forward_advance(w, NULL, NULL, now);
    for (ptrdiff_t i = i0; i < i1; i++) {
        const struct att_block x = att_block_of_group(a, head.b, head.h, i, 0, (ptrdiff_t)a->n_q);
        att_result_write(a, &w->block[i - i0].r, x);
    }
    return true;
}

/* As many blocks as fit, unless threads would be left without work. */
static ptrdiff_t
amx_forward_together(const struct pya_ops_attention *a, ptrdiff_t n_blocks) {
    const size_t words = amx_words(ATT_Q, (ptrdiff_t)a->dim) + (size_t)a->dim_v * ATT_LD;
    ptrdiff_t n = att_together(words * sizeof(uint32_t), n_blocks);
    while (n > 1 && a->n_b * a->n_kv * ((n_blocks + n - 1) / n) < 2 * (int64_t)a->n_threads) {
        n--;
    }
    return n;
}

int
pya_attention_forward_amx(const struct pya_ops_attention *a) {
    if (!att_amx_pays(a)) {
        return PYA_FN(pya_attention_forward)(a);
    }
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    const ptrdiff_t n_blocks = ((ptrdiff_t)a->n_q + ATT_Q - 1) / ATT_Q * group;
    const ptrdiff_t together = amx_forward_together(a, n_blocks);
    const ptrdiff_t n_ranges = (n_blocks + together - 1) / together;
    int failed = 0;
    int refused = 0; /* a number cannot be split */
#pragma omp parallel num_threads(a->n_threads) reduction(| : failed)
    {
        struct amx_forward w;
        struct pya_scratch s = {NULL, 0};
        amx_forward_carve(&w, (int)together, &s, a);
        struct pya_scratch_local local;
        scratch_begin(&s, &local);
        failed |= s.base == NULL;
        if (s.base != NULL) {
            amx_forward_carve(&w, (int)together, &s, a);
            amx_begin();
        }
        /* with a causal mask the last blocks of queries are the longest, so they go first */
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t k = 0; k < (ptrdiff_t)(a->n_b * a->n_kv) * n_ranges; k++) {
            const ptrdiff_t head = k / n_ranges;
            const ptrdiff_t i0 = (n_ranges - 1 - k % n_ranges) * together;
            const ptrdiff_t i1 = i0 + together < n_blocks ? i0 + together : n_blocks;
            const struct att_block x = {
                head / (ptrdiff_t)a->n_kv, head % (ptrdiff_t)a->n_kv, 0, 0, 0, 0};
            if (s.base != NULL && !__atomic_load_n(&refused, __ATOMIC_RELAXED) &&
                !amx_forward_blocks(a, &w, x, i0, i1)) {
                __atomic_store_n(&refused, 1, __ATOMIC_RELAXED);
            }
        }
        if (s.base != NULL) {
            amx_end();
        }
        scratch_end(&s, &local);
    }
    if (failed) {
        return PYA_OPS_E_NOMEM;
    }
    return refused ? PYA_FN(pya_attention_forward)(a) : PYA_OPS_OK;
}
