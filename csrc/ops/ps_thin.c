/* PowerSpherical with few pairs of a sample and a component per t, as in the latents of a batch (one pair each) or small
 * mixtures with their own components.  Lanes are the pairs of several t (components fastest, then samples), and a cosine is
 * a product of two rows.  A pair's result does not depend on which pairs it is processed with. */
#include "kernels.h"
#include "ps_tile.h"

enum { THIN_LANES = 128 };

/* Pairs processed together; ps_tile's arrays of components are indexed by lane. */
struct thin {
    struct ps_tile w;
    const real *value[THIN_LANES], *loc[THIN_LANES];
    ptrdiff_t l[THIN_LANES], m[THIN_LANES], t[THIN_LANES];
    int component[THIN_LANES];
    int n;
    bool any_coarse;
    real numbers[13][THIN_LANES] __attribute__((aligned(64)));
    real *coarse, *gap; /* where coarse is 1, gap says what u does not */
    double sums[2][THIN_LANES];
    double terms
        [THIN_LANES]; /* of a mixture, from which large numbers cancel; then each sample's largest */
};

static void
thin_carve(struct thin *x, const struct pya_ops_ps *ps, bool backward) {
    struct ps_tile *w = &x->w;
    real **const places[] = {&w->kappa, &w->h,      &w->h_low, &w->a,  &w->high,   &w->u,     &w->f,
                             &w->grad,  &x->coarse, &x->gap,   &w->dh, &w->dh_far, &w->dh_low};
    memset(w, 0, sizeof *w);
    for (int i = 0; i < (backward ? 13 : 10); i++) {
        *places[i] = x->numbers[i];
    }
    w->all_g = x->sums[0];
    w->all_gs = x->sums[1];
    ps_set_least(w, ps->dtype);
}

/* v_dot() of unit vectors with all digits, as a gap. */
static __attribute__((noinline)) real
thin_sharp_gap(const real *x, const real *y, ptrdiff_t d) {
    if (VW > 1 && d <= 3) { /* all are recomputed there, and a vector would be nearly empty */
        double above = 1;
        double below = -1;
        for (ptrdiff_t k = 0; k < d; k++) {
            above += (double)x[k] * (double)y[k];
            below += (double)x[k] * (double)y[k];
        }
        return ps_gap(above, below);
    }
    vwide sum;
    memset(&sum, 0, sizeof sum);
    for (ptrdiff_t k = 0; k < d; k += VW) {
        int n = d - k < VW ? (int)(d - k) : VW;
        sum = w_fma(v_ld_n(x + k, n), v_ld_n(y + k, n), sum);
    }
    double above[VW];
    double below[VW];
    w_st(above, sum, 1);
    w_st(below, sum, -1);
    for (int k = 1; k < VW; k++) {
        above[0] += above[k] - 1;
        below[0] += below[k] + 1;
    }
    return ps_gap(above[0], below[0]);
}

/* Locates the n pairs from `first` on, and lists their components, each once; returns how many components. */
static int
thin_place(struct thin *x, const struct pya_ops_ps *ps, ptrdiff_t first, int n) {
    const ptrdiff_t n_m = (ptrdiff_t)ps->n_m;
    ptrdiff_t m = first % n_m;
    ptrdiff_t l = first / n_m % (ptrdiff_t)ps->n_l;
    ptrdiff_t t = first / n_m / (ptrdiff_t)ps->n_l;
    int found = 0;
    for (int k = 0; k < n; k++) {
        x->value[k] = ps_row(ps->value, l, t);
        x->loc[k] = ps_row(ps->loc, m, t);
        x->l[k] = l;
        x->m[k] = m;
        x->t[k] = t;
        if (l > 0 && k >= n_m) { /* shared with the previous sample */
            x->component[k] = x->component[k - n_m];
        } else {
            x->w.kappa[found] = *ps_row(ps->scale, m, t);
            x->w.a[found] = ps->log_weights.p != NULL ? *ps_row(ps->log_weights, m, t) : 0;
            x->component[k] = found++;
        }
        m = m + 1 < n_m ? m + 1 : 0;
        l = m > 0 ? l : l + 1 < ps->n_l ? l + 1 : 0;
        t += m == 0 && l == 0;
    }
    return found;
}

/* Copies a component's numbers to each of its pairs, none of which has a lower index. */
static void
thin_spread(struct thin *x) {
    struct ps_tile *w = &x->w;
    real *const each[] = {w->kappa, w->h, w->h_low, w->a, w->high, w->dh, w->dh_far};
    for (int i = 0; i < (w->dh == NULL ? 5 : 7); i++) {
        for (int k = x->n - 1; k >= 0; k--) {
            each[i][k] = each[i][x->component[k]];
        }
        for (int k = x->n; k < (int)pack_round(x->n, VW); k++) {
            each[i][k] = 0;
        }
    }
}

/* Prefetches the rows of pair k, if it exists: no hardware prefetcher follows from row to row. */
static inline void
thin_ask(const struct thin *x, int k, ptrdiff_t d) {
    const ptrdiff_t line = 64 / (ptrdiff_t)sizeof(real);
    for (ptrdiff_t j = 0; k < x->n && j < d; j += line) {
        __builtin_prefetch(x->value[k] + j, 0, 3);
        __builtin_prefetch(x->loc[k] + j, 0, 3);
    }
}

/* Loads the n pairs from `first` on: their components, cosines and, for coarse ones, gaps. */
static void
thin_gather(struct thin *x, const struct pya_ops_ps *ps, ptrdiff_t first, int n) {
    const ptrdiff_t d = (ptrdiff_t)ps->dim;
    struct ps_tile *w = &x->w;
    x->n = n;
    const int components = thin_place(x, ps, first, n);
    ps_tile_finish(w, ps->dim, components);
    if (components < n) {
        thin_spread(x);
    }
    const bool is_known = w->low > 1;
    const int ahead = d <= 128 ? 8 : 2;
    x->any_coarse = false;
    for (int k = 0; k < n; k++) {
        thin_ask(x, k + ahead, d);
        const real u = is_known ? 0 : v_dot(x->value[k], x->loc[k], d);
        const bool is_coarse = is_known || u < w->low || u > w->high[k];
        w->u[k] = u;
        x->coarse[k] = is_coarse;
        x->gap[k] = is_coarse ? thin_sharp_gap(x->value[k], x->loc[k], d) : 0;
        x->any_coarse |= is_coarse;
    }
    for (int k = n; k < (int)pack_round(n, VW); k++) {
        w->u[k] = x->coarse[k] = x->gap[k] = 0;
    }
}

static inline vm
thin_is_coarse(const struct thin *x, int j) {
    return m_eq(v_ld(x->coarse + j), v_set(1));
}

/* log y */
static inline vr
thin_log_y(const struct thin *x, int j) {
    const vr log_y = ps_log_y(ps_clamp(v_ld(x->w.u + j)));
    return x->any_coarse ? v_sel(thin_is_coarse(x, j), ps_gap_log_y(v_ld(x->gap + j)), log_y)
                         : log_y;
}

/* Replaces the cosines by log-probabilities. */
static inline void
thin_log_probs(struct thin *x) {
    for (int j = 0; j < x->n; j += VW) {
        v_st(x->w.u + j, ps_log_prob(thin_log_y(x, j), v_ld(x->w.kappa + j), v_ld(x->w.h + j)));
    }
}

/* exp(term - the sample's largest term) for a mixture's terms; each sample has n_m consecutive ones.  The largest is kept
 * finite.  In many dimensions normalizers are large and close to one another, so their low digits count. */
static void
thin_exp(struct thin *x, int n_m, real *to) {
    const struct ps_tile *w = &x->w;
    for (int j = 0; j < x->n; j += VW) {
        v_st(to + j, ps_log_prob(thin_log_y(x, j), v_ld(w->kappa + j), v_set(0)));
    }
    for (int k = 0; k < x->n; k++) {
        x->terms[k] = (double)w->h[k] + (double)to[k] + ((double)w->a[k] + (double)w->h_low[k]);
    }
    for (int k = 0; k < x->n; k += n_m) {
        double top = -1e37;
        for (int i = 0; i < n_m; i++) {
            top = x->terms[k + i] > top ? x->terms[k + i] : top;
        }
        for (int i = 0; i < n_m; i++) {
            to[k + i] = (real)(x->terms[k + i] - top);
        }
        x->terms[k] = top;
    }
    for (int k = x->n; k < (int)pack_round(x->n, VW); k++) {
        to[k] = 0;
    }
    for (int j = 0; j < x->n; j += VW) {
        v_st(to + j, v_exp(v_ld(to + j)));
    }
}

static inline double
thin_sum(const real *terms, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)terms[i];
    }
    return sum;
}

static void
thin_mixture(struct thin *x, const struct pya_ops_ps *ps) {
    const int n_m = (int)ps->n_m;
    real *sums = x->gap; /* in each sample's first lane */
    thin_exp(x, n_m, x->w.u);
    for (int k = 0; k < (int)pack_round(x->n, VW); k++) {
        sums[k] = 1;
    }
    for (int k = 0; k < x->n; k += n_m) {
        sums[k] = (real)thin_sum(x->w.u + k, n_m);
    }
    for (int j = 0; j < x->n; j += VW) {
        const vr sum = v_ld(sums + j);
        v_st(sums + j, v_sel(m_eq(sum, v_set(0)), v_set((real)-INFINITY), v_log(sum)));
    }
    for (int k = 0; k < x->n; k += n_m) {
        ((real *)ps->out)[x->l[k] * ps->out_l + x->t[k] * ps->out_t] =
            (real)(x->terms[k] + (double)sums[k]);
    }
}

static void
thin_forward(struct thin *x, const struct pya_ops_ps *ps, ptrdiff_t first, int n) {
    thin_gather(x, ps, first, n);
    if (ps->log_weights.p != NULL) {
        thin_mixture(x, ps);
        return;
    }
    thin_log_probs(x);
    for (int k = 0; k < n; k++) {
        ((real *)ps->out)[x->l[k] * ps->out_l + x->m[k] * ps->out_m + x->t[k] * ps->out_t] =
            x->w.u[k];
    }
}

/* Pairs per unit: whole t's, if the pairs of a t belong together. */
static ptrdiff_t
thin_unit(const struct pya_ops_ps *ps, ptrdiff_t together) {
    const ptrdiff_t pairs = (ptrdiff_t)(ps->n_l * ps->n_m * ps->n_t);
    const ptrdiff_t fair = ps_n_blocks(pairs, 4 * (ptrdiff_t)ps->n_threads);
    const ptrdiff_t unit = fair < THIN_LANES ? fair : THIN_LANES;
    return unit < together ? together : unit / together * together;
}

int
PYA_FN(pya_ps_thin_forward)(const struct pya_ops_ps *ps) {
    const ptrdiff_t pairs = (ptrdiff_t)(ps->n_l * ps->n_m * ps->n_t);
    const bool mixture = ps->log_weights.p != NULL;
    const ptrdiff_t unit = thin_unit(ps, mixture ? (ptrdiff_t)(ps->n_l * ps->n_m) : 1);
    const ptrdiff_t units = ps_n_blocks(pairs, unit);
#pragma omp parallel num_threads(ps->n_threads)
    {
        struct thin x;
        thin_carve(&x, ps, false);
#pragma omp for schedule(dynamic, ps_chunk(units, ps->n_threads))
        for (ptrdiff_t k = 0; k < units; k++) {
            thin_forward(&x, ps, k * unit, ps_count(pairs, k * unit, unit));
        }
    }
    return PYA_OPS_OK;
}

/* G of each pair.  In a mixture it is a share of its sample's gradient, relative to the sum of these very terms: shares that
 * add up to 1 lose less when gradients cancel than shares relative to the rounded result. */
static void
thin_load_gradients(struct thin *x, const struct pya_ops_ps *ps) {
    const real *grad = (const real *)ps->grad;
    const bool mixture = ps->log_weights.p != NULL;
    const int n_m = (int)ps->n_m;
    for (int k = 0; k < x->n; k++) {
        const ptrdiff_t at = x->l[k] * ps->grad_l + x->t[k] * ps->grad_t;
        x->w.grad[k] = grad[mixture ? at : at + x->m[k] * ps->grad_m];
    }
    for (int k = x->n; k < (int)pack_round(x->n, VW); k++) {
        x->w.grad[k] = 0;
    }
    if (!mixture) {
        return;
    }
    real *terms = x->w.f;
    thin_exp(x, n_m, terms);
    for (int k = 0; k < x->n; k += n_m) {
        const double sum = thin_sum(terms + k, n_m);
        const real share = sum == 0 ? 0 : (real)(1 / sum);
        for (int i = 0; i < n_m; i++) {
            x->w.grad[k + i] *= terms[k + i] * share;
        }
    }
}

/* Turns cosines into weights W, and adds G and G s of each pair to the sums. */
static void
thin_weights(struct thin *x) {
    struct ps_tile *w = &x->w;
    for (int j = 0; j < x->n; j += VW) {
        const vr kappa = v_ld(w->kappa + j);
        const vr u = ps_clamp(v_ld(w->u + j));
        const vm coarse = thin_is_coarse(x, j);
        vr one_plus_u = v_add(u, v_set(1));
        vr slope = ps_slope(w, j, u);
        if (x->any_coarse) {
            const vr gap = v_ld(x->gap + j);
            one_plus_u = v_sel(coarse, ps_gap_one_plus_u(gap), one_plus_u);
            slope = v_sel(coarse, v_add(ps_gap_log_y(gap), v_ld(w->dh + j)), slope);
        }
        const vm behind = m_eq(one_plus_u, v_set(0));
        slope = v_sel(behind, v_add(v_set(w->least_log_y), v_ld(w->dh + j)), slope);
        const vr g = v_ld(w->grad + j);
        const vr r = v_rcp(v_sel(behind, v_set(w->least), one_plus_u));
        v_st(w->u + j, v_mul(v_mul(g, kappa), r));
        real gs[2][VW];
        v_st(gs[0], g);
        v_st(gs[1], slope);
        for (int i = 0; i < VW; i++) {
            w->all_g[j + i] = (double)gs[0][i];
            w->all_gs[j + i] = (double)gs[0][i] * (double)gs[1][i];
        }
    }
}

/* Every step-th of n weights and rows. */
struct thin_terms {
    const real *weights;
    const real *const *rows;
    int n, step;
};

static inline void
thin_row(real *to, struct thin_terms from, ptrdiff_t d, bool past_cache) {
    const bool stream = past_cache && (uintptr_t)to % (VW * sizeof(real)) == 0;
    for (ptrdiff_t k = 0; k < d; k += VW) {
        const int n = d - k < VW ? (int)(d - k) : VW;
        vr sum = v_set(0);
        for (int i = 0; i < from.n; i += from.step) {
            const vr x = n == VW ? v_ld(from.rows[i] + k) : v_ld_n(from.rows[i] + k, n);
            sum = v_fma(v_set(from.weights[i]), x, sum);
        }
        if (n < VW) {
            v_st_n(to + k, sum, n);
        } else if (stream) {
            v_nt(to + k, sum);
        } else {
            v_st(to + k, sum);
        }
    }
}

/* Writes the gradients of samples' and components' rows for one t, whose pairs begin at `lane`. */
static inline void
thin_write_rows(const struct thin *x, const struct pya_ops_ps *ps, int lane, bool past_cache) {
    const int n_m = (int)ps->n_m;
    const int pairs = (int)ps->n_l * n_m;
    for (int l = 0; ps->d_value.p != NULL && l < (int)ps->n_l; l++) {
        const int at = lane + l * n_m;
        const struct thin_terms from = {x->w.u + at, x->loc + at, n_m, 1};
        thin_row(ps_row_out(ps->d_value, l, x->t[lane]), from, (ptrdiff_t)ps->dim, past_cache);
    }
    for (int m = 0; ps->d_loc.p != NULL && m < n_m; m++) {
        const int at = lane + m;
        const struct thin_terms from = {x->w.u + at, x->value + at, pairs - m, n_m};
        thin_row(ps_row_out(ps->d_loc, m, x->t[lane]), from, (ptrdiff_t)ps->dim, past_cache);
    }
}

/* Writes the gradients of its components' scales and weights. */
static inline void
thin_write_sums(const struct thin *x, const struct pya_ops_ps *ps, int lane) {
    const int n_m = (int)ps->n_m;
    for (int m = 0; m < n_m; m++) {
        double g = 0;
        double gs = 0;
        for (int l = 0; l < (int)ps->n_l; l++) {
            g += x->w.all_g[lane + l * n_m + m];
            gs += x->w.all_gs[lane + l * n_m + m];
        }
        if (ps->d_scale.p != NULL) {
            *ps_row_out(ps->d_scale, m, x->t[lane]) = (real)gs;
        }
        if (ps->d_log_weights.p != NULL) {
            *ps_row_out(ps->d_log_weights, m, x->t[lane]) = (real)g;
        }
    }
}

static void
thin_backward(
    struct thin *x, const struct pya_ops_ps *ps, ptrdiff_t first, int n, bool past_cache) {
    thin_gather(x, ps, first, n);
    thin_load_gradients(x, ps);
    thin_weights(x);
    for (int lane = 0; lane < n; lane += (int)(ps->n_l * ps->n_m)) {
        thin_write_rows(x, ps, lane, past_cache);
        thin_write_sums(x, ps, lane);
    }
}

int
PYA_FN(pya_ps_thin_backward)(const struct pya_ops_ps *ps) {
    const ptrdiff_t pairs = (ptrdiff_t)(ps->n_l * ps->n_m * ps->n_t);
    const ptrdiff_t unit = thin_unit(ps, (ptrdiff_t)(ps->n_l * ps->n_m));
    const ptrdiff_t units = ps_n_blocks(pairs, unit);
    /* if the rows would evict one another from the caches before anybody reads them */
    const bool past_cache =
        (ps->n_l + ps->n_m) * ps->n_t * ps->dim * (int64_t)sizeof(real) >= (int64_t)8 << 20;
#pragma omp parallel num_threads(ps->n_threads)
    {
        struct thin x;
        thin_carve(&x, ps, true);
#pragma omp for schedule(dynamic, ps_chunk(units, ps->n_threads))
        for (ptrdiff_t k = 0; k < units; k++) {
            thin_backward(&x, ps, k * unit, ps_count(pairs, k * unit, unit), past_cache);
        }
    }
    return PYA_OPS_OK;
}
