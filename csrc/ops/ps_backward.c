/* Gradients of the PowerSpherical log-probability and of its mixture.  With G the gradient of each
 * log-probability (for the mixture G = grad * exp(a + L - F), made on the fly) and
 * W = G kappa / (1 + u):
 *   d_loc = W^T value, d_value = W loc, d_kappa = sum G s with s = log y + h', d_a = sum G.
 * Cosines are computed again block by block; nothing of the size of G is kept. */
#include "kernels.h"
#include "pack_transpose.h"
#include "ps_tile.h"

enum { FLUSHED_ROWS = 16 }; /* sums of more samples, in float, lose what cancels */

struct backward_range {
    ptrdiff_t l0, l1, m0, m1;
    bool want_value, want_loc;
};

/* G of the mixture. */
static inline vr
backward_share(const struct ps_tile *w, int l, int j, vr ly) {
    const vr each = ps_log_prob(ly, v_ld(w->kappa + j), v_ld(w->h + j));
    const vr joint = v_add(v_ld(w->a + j), each);
    return v_mul(v_set(w->grad[l]), v_exp(v_sub(joint, v_set(w->f[l]))));
}

/* G and G s to their sums, in double: near the antipode s is large, and gradients cancel. */
static inline void
backward_add(const struct ps_tile *w, int j, vr g, vr slope) {
    real gs[2][VW];
    v_st(gs[0], g);
    v_st(gs[1], slope);
    double all[2][VW]; /* a compiler makes vectors of what cannot overlap */
    memcpy(all[0], w->all_g + j, sizeof all[0]);
    memcpy(all[1], w->all_gs + j, sizeof all[1]);
    for (int i = 0; i < VW; i++) {
        all[0][i] += (double)gs[0][i];
        all[1][i] += (double)gs[0][i] * (double)gs[1][i];
    }
    memcpy(w->all_g + j, all[0], sizeof all[0]);
    memcpy(w->all_gs + j, all[1], sizeof all[1]);
}

/* One row (sample) of the block: cosines or gaps in, W out, the lanes' sums updated. */
static inline __attribute__((always_inline)) void
backward_row(const struct ps_tile *w, int l, int nm, const real *grad, bool mixture, bool gaps) {
    real *u = w->u + l * w->lm;
    for (int j = 0; j < nm; j += VW) {
        const vr x = v_ld(u + j);
        const vr c = gaps ? ps_gap_one_plus_u(x) : v_add(ps_clamp(x), v_set(1));
        const vr kappa = v_ld(w->kappa + j);
        const vr dh = v_ld(w->dh + j);
        vr g;
        vr slope;
        if (mixture || gaps) {
            const vr ly = gaps ? ps_gap_log_y(x) : ps_log_y(ps_clamp(x));
            slope = v_add(ly, dh);
            g = mixture ? backward_share(w, l, j, ly) : v_ld(grad + j);
        } else {
            slope = ps_slope(w, j, ps_clamp(x));
            g = v_ld(grad + j);
        }
        const vm behind = m_eq(c, v_set(0));
        slope = v_sel(behind, v_add(v_set(w->least_log_y), dh), slope);
        const vr r = v_rcp(v_sel(behind, v_set(w->least), c));
        v_st(u + j, v_mul(v_mul(g, kappa), r));
        if (gaps && w->low < 0) { /* few are coarse, and near the antipode */
            backward_add(w, j, g, slope);
        } else {
            v_st(w->sum_g + j, v_add(v_ld(w->sum_g + j), g));
            v_st(w->sum_gs + j, v_fma(g, slope, v_ld(w->sum_gs + j)));
        }
    }
}

/* The samples' sums so far to those of all, in double before they are long. */
static void
backward_flush(struct ps_tile *w, int nm) {
    for (int i = 0; i < nm; i++) {
        w->all_g[i] += (double)w->sum_g[i];
        w->all_gs[i] += (double)w->sum_gs[i];
        w->sum_g[i] = w->sum_gs[i] = 0;
    }
}

/* n numbers, stride apart, into a row padded with zeros to whole vectors */
static inline void
backward_gather(real *dst, const real *src, ptrdiff_t stride, int n) {
    for (int k = 0; k < n; k++) {
        dst[k] = src[k * stride];
    }
    for (int k = n; k < (int)pack_round(n, VW); k++) {
        dst[k] = 0;
    }
}

static void
backward_weights(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0, ptrdiff_t m0) {
    const int nl = ps_count(ps->n_l, l0, w->lb);
    const int nm = ps_count(ps->n_m, m0, w->mb);
    const bool mixture = ps->log_weights.p != NULL;
    const real *grad = (const real *)ps->grad + l0 * ps->grad_l + t * ps->grad_t;
    if (mixture) {
        const real *f = (const real *)ps->out + l0 * ps->out_l + t * ps->out_t;
        for (int l = 0; l < nl; l++) {
            real fl = f[l * ps->out_l];
            w->grad[l] = grad[l * ps->grad_l];
            w->f[l] = isinf(fl) && fl < 0 ? (real)INFINITY : fl;
        }
    }
    for (int i = 0; i < (int)pack_round(nm, VW); i++) {
        w->sum_g[i] = w->sum_gs[i] = 0;
    }
    for (int l = 0; l < nl; l++) {
        real row[128 + 16];
        if (!mixture) {
            backward_gather(row, grad + l * ps->grad_l + m0 * ps->grad_m, ps->grad_m, nm);
        }
        struct pya_tile_c c = {w->u + l * w->lm, w->lm, 0};
        struct ps_limits limits = {w->has_high ? w->high : NULL, w->low, false, 1, nm};
        if (ps_any_is_coarse(c.p, 0, limits)) {
            struct pya_tile_a a = {w->value + l * w->ld, w->ld, 1};
            struct pya_tile_b b = {w->loc_t, w->lm};
            ps_refine_tile((int)ps->dim, a, b, c, limits);
            backward_row(w, l, nm, row, mixture, true);
        } else {
            backward_row(w, l, nm, row, mixture, false);
        }
        if (l % FLUSHED_ROWS == FLUSHED_ROWS - 1 || l == nl - 1) {
            backward_flush(w, nm);
        }
    }
}

/* rows x dim of scratch, to be written or added to a gradient */
struct backward_rows {
    const real *p;
    ptrdiff_t row;
    int n;
    bool add, last; /* last: nothing is added to them later */
};

static inline void
backward_copy(real *dst, const real *src, ptrdiff_t n, bool past_cache) {
    if (!past_cache || (uintptr_t)dst % (VW * sizeof(real)) != 0 || n % VW != 0) {
        memcpy(dst, src, (size_t)n * sizeof(real));
        return;
    }
    for (ptrdiff_t k = 0; k < n; k += VW) {
        v_nt(dst + k, v_ld(src + k));
    }
}

static void
backward_write_rows(
    struct pya_ops_view dst, ptrdiff_t i0, ptrdiff_t t, struct backward_rows src, ptrdiff_t d) {
    for (int i = 0; i < src.n; i++) {
        real *p = ps_row_out(dst, i0 + i, t);
        const real *q = src.p + i * src.row;
        if (!src.add) {
            backward_copy(p, q, d, src.last);
            continue;
        }
        for (ptrdiff_t k = 0; k < d; k++) {
            p[k] += q[k];
        }
    }
}

/* All the work of one block of samples against the packed block of components. */
static void
backward_pair(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0, ptrdiff_t m0,
    const struct backward_range *r) {
    const int d = (int)ps->dim;
    const int nl = ps_count(ps->n_l, l0, w->lb);
    const int nm = ps_count(ps->n_m, m0, w->mb);
    const real *value = ps_row(ps->value, l0, t);
    pack_rows(w->value, w->ld, value, ps->value.i, nl, d, pack_round(d, VW));
    pack_prefetch(value, ps->value.i, nl, d);
    struct pya_tile_a a = {w->value, w->ld, 1};
    struct pya_tile_b b = {w->loc_t, w->lm};
    struct pya_tile_c c = {w->u, w->lm, 0};
    for (int done = 0, n = 0; done < d; done += n, a.p += n * a.k, b.p += n * b.k) {
        n = ps_terms(d, done);
        c.add = done > 0;
        tile_multiply(nl, nm, n, a, b, c);
    }
    backward_weights(w, ps, t, l0, m0);
    if (r->want_loc) {
        struct pya_tile_a wt = {w->u, 1, w->lm};
        struct pya_tile_b val = {w->value, w->ld};
        struct pya_tile_c dst = {w->d_loc, w->ld, l0 > r->l0};
        tile_multiply(nm, d, nl, wt, val, dst);
    }
    if (r->want_value) {
        struct pya_tile_a wl = {w->u, w->lm, 1};
        struct pya_tile_b loc = {w->loc, w->ld};
        struct pya_tile_c dst = {w->d_value, w->ld, 0};
        tile_multiply(nl, d, nm, wl, loc, dst);
        struct backward_rows rows = {w->d_value, w->ld, nl, m0 > r->m0, m0 + nm == r->m1};
        backward_write_rows(ps->d_value, l0, t, rows, d);
    }
}

static void
backward_finish(struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t m0, int nm) {
    if (ps->d_loc.p != NULL) {
        struct backward_rows rows = {w->d_loc, w->ld, nm, false, true};
        backward_write_rows(ps->d_loc, m0, t, rows, (ptrdiff_t)ps->dim);
    }
    for (int i = 0; i < nm; i++) {
        if (ps->d_scale.p != NULL) {
            *ps_row_out(ps->d_scale, m0 + i, t) = (real)w->all_gs[i];
        }
        if (ps->d_log_weights.p != NULL) {
            *ps_row_out(ps->d_log_weights, m0 + i, t) = (real)w->all_g[i];
        }
    }
}

static void
backward_unit(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, const struct backward_range *r) {
    const ptrdiff_t d = (ptrdiff_t)ps->dim;
    for (ptrdiff_t m0 = r->m0; m0 < r->m1; m0 += w->mb) {
        const int nm = ps_count(r->m1, m0, w->mb);
        const real *loc = ps_row(ps->loc, m0, t);
        pack_rows(w->loc, w->ld, loc, ps->loc.i, nm, d, pack_round(d, VW));
        pack_prefetch(loc, ps->loc.i, nm, d);
        pack_transpose(w->loc_t, w->lm, w->loc, w->ld, nm, d, pack_round(nm, VW));
        ps_tile_components(w, ps, m0, nm, t);
        for (int i = 0; i < (int)pack_round(nm, VW); i++) {
            w->all_g[i] = w->all_gs[i] = 0;
        }
        for (ptrdiff_t l0 = r->l0; l0 < r->l1; l0 += w->lb) {
            backward_pair(w, ps, t, l0, m0, r);
        }
        /* the sums over samples are whole only where the unit saw all of them */
        if (r->l0 == 0 && r->l1 == ps->n_l) {
            backward_finish(w, ps, t, m0, nm);
        }
    }
}

/* How the units cut the problem: whole t's when there are enough of them; else blocks of
 * components (for d_loc, d_scale, d_a), then blocks of samples (for d_value), at the price of one
 * more product.  The order of every sum is the same in both. */
struct backward_plan {
    ptrdiff_t block_l, block_m; /* rows per unit */
    bool want_value, want_loc;
};

static int
backward_run(const struct pya_ops_ps *ps, struct backward_plan plan) {
    const ptrdiff_t n_lb = ps_n_blocks(ps->n_l, plan.block_l);
    const ptrdiff_t n_mb = ps_n_blocks(ps->n_m, plan.block_m);
    const ptrdiff_t units = (ptrdiff_t)ps->n_t * n_lb * n_mb;
    int failed = 0;
#pragma omp parallel num_threads(ps->n_threads) reduction(| : failed)
    {
        struct ps_tile w;
        void *scratch = ps_tile_create(&w, ps, PS_BACKWARD);
        ps_set_least(&w, ps->dtype);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, ps_chunk(units, ps->n_threads))
        for (ptrdiff_t k = 0; k < units; k++) {
            ptrdiff_t l0 = k / n_mb % n_lb * plan.block_l;
            ptrdiff_t m0 = k % n_mb * plan.block_m;
            struct backward_range r = {
                l0,
                l0 + plan.block_l < ps->n_l ? l0 + plan.block_l : ps->n_l,
                m0,
                m0 + plan.block_m < ps->n_m ? m0 + plan.block_m : ps->n_m,
                plan.want_value,
                plan.want_loc};
            if (scratch != NULL) {
                backward_unit(&w, ps, k / (n_lb * n_mb), &r);
            }
        }
        free(scratch);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}

static int
backward_all(const struct pya_ops_ps *ps) {
    if (ps_is_thin(ps)) {
        return PYA_FN(pya_ps_thin_backward)(ps);
    }
    const ptrdiff_t block = ps_block(ps->dim);
    const bool want_value = ps->d_value.p != NULL;
    const bool want_loc = ps->d_loc.p != NULL;
    if (ps->n_t >= 2 * ps->n_threads || (ps->n_l <= block && ps->n_m <= block)) {
        struct backward_plan whole = {(ptrdiff_t)ps->n_l, (ptrdiff_t)ps->n_m, want_value, want_loc};
        return backward_run(ps, whole);
    }
    int status = PYA_OPS_OK;
    if (want_loc || ps->d_scale.p != NULL || ps->d_log_weights.p != NULL) {
        struct backward_plan components = {(ptrdiff_t)ps->n_l, block, false, want_loc};
        status = backward_run(ps, components);
    }
    if (status == PYA_OPS_OK && want_value) {
        struct pya_ops_ps only_value = *ps;
        only_value.d_loc.p = only_value.d_scale.p = only_value.d_log_weights.p = NULL;
        struct backward_plan samples = {block, (ptrdiff_t)ps->n_m, true, false};
        status = backward_run(&only_value, samples);
    }
    return status;
}

int
PYA_FN(pya_ps_backward)(const struct pya_ops_ps *ps) {
    return backward_all(ps);
}

int
PYA_FN(pya_ps_mixture_backward)(const struct pya_ops_ps *ps) {
    return backward_all(ps);
}
