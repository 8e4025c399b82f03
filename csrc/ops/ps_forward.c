/* PowerSpherical log-probability of every sample under every component, and the mixture's
 * log-sum-exp over components, from blocks of cosines that never leave the cache. */
#include "kernels.h"
#include "pack_transpose.h"
#include "ps_tile.h"

/* Where the results of a register tile go: rows x lanes. */
struct ps_store {
    real *p;
    ptrdiff_t row, lane;
};

/* Of cosines, or of gaps. */
static inline __attribute__((always_inline)) void
forward_finish(
    const struct ps_tile *w, const real *u, ptrdiff_t j, struct ps_limits of, struct ps_store out,
    bool gaps) {
    for (int v = 0; v < of.lanes; v += VW) {
        vr kappa = v_ld(w->kappa + j + v);
        vr h = v_ld(w->h + j + v);
        int n = of.lanes - v < VW ? of.lanes - v : VW;
        for (int i = 0; i < of.rows; i++) {
            const vr c = v_ld(u + i * 2 * VW + v);
            const vr ly = gaps ? ps_gap_log_y(c) : ps_log_y(ps_fine(c));
            const vr x = gaps ? ps_log_prob(ly, kappa, h) : v_fma(kappa, ly, h);
            real *p = out.p + i * out.row + v * out.lane;
            if (out.lane == 1 && n == VW) {
                v_st(p, x);
            } else if (out.lane == 1) {
                v_st_n(p, x, n);
            } else {
                real tmp[VW];
                v_st(tmp, x);
                for (int k = 0; k < n; k++) {
                    p[k * out.lane] = tmp[k];
                }
            }
        }
    }
}

static void
forward_block(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0, ptrdiff_t m0) {
    const ptrdiff_t d = (ptrdiff_t)ps->dim;
    const int nl = ps_count(ps->n_l, l0, w->lb);
    const int nm = ps_count(ps->n_m, m0, w->mb);
    pack_rows(w->value, w->ld, ps_row(ps->value, l0, t), ps->value.i, nl, d, d);
    pack_transpose(w->loc_t, w->lm, ps_row(ps->loc, m0, t), ps->loc.i, nm, d, pack_round(nm, VW));
    ps_tile_components(w, ps, m0, nm, t);
    struct pack_part part = {0, (int)(ps_n_blocks(nm, 2 * VW) * ps_n_blocks(nl, MR))};
    real *out = (real *)ps->out + l0 * ps->out_l + m0 * ps->out_m + t * ps->out_t;
    for (int j = 0; j < nm; j += 2 * VW) {
        const int lanes = nm - j < 2 * VW ? nm - j : 2 * VW;
        for (int i = 0; i < nl; i += MR, part.step++) {
            pack_prefetch_part(ps_row(ps->value, l0, t), ps->value.i, nl, d, part);
            pack_prefetch_part(ps_row(ps->loc, m0, t), ps->loc.i, nm, d, part);
            real u[MR * 2 * VW] __attribute__((aligned(64)));
            const int rows = nl - i < MR ? nl - i : MR;
            struct pya_tile_a a = {w->value + i * w->ld, w->ld, 1};
            struct pya_tile_b b = {w->loc_t + j, w->lm};
            struct pya_tile_c c = {u, 2 * VW, 0};
            ps_cosines((struct ps_product){a, b, c, rows, lanes > VW ? 2 : 1}, (int)d);
            struct ps_store s = {out + i * ps->out_l + j * ps->out_m, ps->out_l, ps->out_m};
            struct ps_limits limits = {
                w->has_high ? w->high + j : NULL, w->low, false, rows, lanes};
            if (ps_any_is_coarse(u, 2 * VW, limits)) {
                ps_refine_tile((int)d, a, b, c, limits);
                forward_finish(w, u, j, limits, s, true);
            } else {
                forward_finish(w, u, j, limits, s, false);
            }
        }
    }
}

int
PYA_FN(pya_ps_forward)(const struct pya_ops_ps *ps) {
    if (ps_is_thin(ps) || ps->n_l == 1 || ps->n_m == 1) {
        return PYA_FN(pya_ps_thin_forward)(ps);
    }
    const ptrdiff_t block = ps_block(ps->dim);
    const ptrdiff_t n_lb = ps_n_blocks(ps->n_l, block);
    const ptrdiff_t n_mb = ps_n_blocks(ps->n_m, block);
    const ptrdiff_t units = (ptrdiff_t)ps->n_t * n_lb * n_mb;
    int failed = 0;
#pragma omp parallel num_threads(ps->n_threads) reduction(| : failed)
    {
        struct ps_tile w;
        void *scratch = ps_tile_create(&w, ps, PS_FORWARD);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, ps_chunk(units, ps->n_threads))
        for (ptrdiff_t k = 0; k < units; k++) {
            if (scratch != NULL) {
                forward_block(&w, ps, k / (n_lb * n_mb), k / n_mb % n_lb * block, k % n_mb * block);
            }
        }
        free(scratch);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}

struct mixture_sums {
    real *top, *sum;
    int rows;
};

/* Folds the rows (components) of one register tile into the running maximum and sum of its lanes (samples).  The reference
 * point is kept finite, so that a lane of only -inf stays -inf. */
static inline __attribute__((always_inline)) void
mixture_fold(const struct ps_tile *w, int m, real *u, struct mixture_sums to, bool gaps) {
    const int rows = to.rows;
    for (int v = 0; v < 2 * VW; v += VW) {
        vr old = v_ld(to.top + v);
        vr best = old;
        for (int i = 0; i < rows; i++) {
            const vr c = v_ld(u + i * 2 * VW + v);
            const vr ly = gaps ? ps_gap_log_y(c) : ps_log_y(ps_fine(c));
            const vr kappa = v_set(w->kappa[m + i]);
            const vr h = v_set(w->h[m + i]);
            vr x = gaps ? ps_log_prob(ly, kappa, h) : v_fma(kappa, ly, h);
            x = v_add(x, v_set(w->a[m + i]));
            v_st(u + i * 2 * VW + v, x);
            best = v_max(best, x);
        }
        const vr shrink = v_exp(v_sub(old, best));
        vr s = v_set(0);
        for (int i = 0; i < rows; i++) {
            s = v_add(s, v_exp(v_sub(v_ld(u + i * 2 * VW + v), best)));
        }
        v_st(to.top + v, best);
        v_st(to.sum + v, v_fma(v_ld(to.sum + v), shrink, s));
    }
}

/* Adds the components from m0 on to the sums of all samples of the block. */
static void
mixture_components(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t m0, int nl) {
    const ptrdiff_t d = (ptrdiff_t)ps->dim;
    const int nm = ps_count(ps->n_m, m0, w->mb);
    pack_rows(w->loc, w->ld, ps_row(ps->loc, m0, t), ps->loc.i, nm, d, d);
    pack_prefetch(ps_row(ps->loc, m0, t), ps->loc.i, nm, d);
    ps_tile_components(w, ps, m0, nm, t);
    for (int j = 0; j < nl; j += 2 * VW) {
        for (int i = 0; i < nm; i += MR) {
            real u[MR * 2 * VW] __attribute__((aligned(64)));
            const int rows = nm - i < MR ? nm - i : MR;
            struct pya_tile_a a = {w->loc + i * w->ld, w->ld, 1};
            struct pya_tile_b b = {w->value_t + j, w->lm};
            struct pya_tile_c c = {u, 2 * VW, 0};
            ps_cosines((struct ps_product){a, b, c, rows, 2}, (int)d);
            struct mixture_sums to = {w->f + j, w->grad + j, rows};
            struct ps_limits limits = {
                w->has_high ? w->high + i : NULL, w->low, true, rows, 2 * VW};
            if (ps_any_is_coarse(u, 2 * VW, limits)) {
                ps_refine_tile((int)d, a, b, c, limits);
                mixture_fold(w, i, u, to, true);
            } else {
                mixture_fold(w, i, u, to, false);
            }
        }
    }
}

static void
mixture_block(struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0) {
    const ptrdiff_t d = (ptrdiff_t)ps->dim;
    const int nl = ps_count(ps->n_l, l0, w->lb);
    const int padded = (int)pack_round(nl, 2 * VW);
    pack_transpose(w->value_t, w->lm, ps_row(ps->value, l0, t), ps->value.i, nl, d, padded);
    pack_prefetch(ps_row(ps->value, l0, t), ps->value.i, nl, d);
    for (int i = 0; i < padded; i += VW) {
        v_st(w->f + i, v_set((real)-1e37));
        v_st(w->grad + i, v_set(0));
    }
    for (ptrdiff_t m0 = 0; m0 < ps->n_m; m0 += w->mb) {
        mixture_components(w, ps, t, m0, nl);
    }
    for (int i = 0; i < padded; i += VW) {
        vr s = v_ld(w->grad + i);
        vr f = v_add(v_ld(w->f + i), v_log(s));
        v_st(w->f + i, v_sel(m_eq(s, v_set(0)), v_set((real)-INFINITY), f));
    }
    real *out = (real *)ps->out + l0 * ps->out_l + t * ps->out_t;
    for (int i = 0; i < nl; i++) {
        out[i * ps->out_l] = w->f[i];
    }
}

int
PYA_FN(pya_ps_mixture_forward)(const struct pya_ops_ps *ps) {
    if (ps_is_thin(ps)) {
        return PYA_FN(pya_ps_thin_forward)(ps);
    }
    const ptrdiff_t block = ps_block(ps->dim);
    const ptrdiff_t n_lb = ps_n_blocks(ps->n_l, block);
    const ptrdiff_t units = (ptrdiff_t)ps->n_t * n_lb;
    int failed = 0;
#pragma omp parallel num_threads(ps->n_threads) reduction(| : failed)
    {
        struct ps_tile w;
        void *scratch = ps_tile_create(&w, ps, PS_MIXTURE);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, ps_chunk(units, ps->n_threads))
        for (ptrdiff_t k = 0; k < units; k++) {
            if (scratch != NULL) {
                mixture_block(&w, ps, k / n_lb, k % n_lb * block);
            }
        }
        free(scratch);
    }
    return failed ? PYA_OPS_E_NOMEM : PYA_OPS_OK;
}
