/* Gradients of the PowerSpherical log-probability and of its mixture.  With G the gradient of each log-probability (for the
 * mixture G = grad * exp(a + L - F), computed on the fly) and
 * W = G kappa / (1 + u):
 *   d_loc = W^T value, d_value = W loc, d_kappa = sum G s with s = log y + h', d_a = sum G.
 * Cosines are recomputed block by block; nothing of the size of G is kept. */
#include "kernels.h"
#include "pack_transpose.h"
#include "ps_tile.h"

struct backward_range {
    ptrdiff_t l0, l1, m0, m1;
    bool want_value, want_loc;
};

#define NOT_COARSE ((real)2)
#define LOG_2 0.69314718055994531

/* In many dimensions most cosines are near 0.  log((1 + u) / 2) is then nearly -log 2, which cancels in a sum with a term
 * close to log 2; a sum with log(1 + u) keeps all digits.  NEAR uses the former, FAR the latter, EITHER whichever is nearer to
 * 0.  GAPS is like EITHER, with gaps in place of cosines that are too coarse. */
enum backward_form { NEAR, FAR, EITHER, GAPS };

/* G is given; or shares of a mixture, with all its components in the block (SHARES) or not (PARTS). */
enum backward_kind { GIVEN, SHARES, PARTS };
enum { NEAR_DIMS = 64 }; /* with fewer dimensions SHARES use NEAR for EITHER */

/* Rows (samples) of a block that are processed together: intermediate results stay in L1, and the components' sums in
 * registers.  STRIP_LANES: the rows of one column do not collide in the cache. */
enum { STRIP_ROWS = 8, STRIP_LANES = 128 + 16 };
typedef real backward_lanes[STRIP_ROWS][STRIP_LANES] __attribute__((aligned(64)));
struct backward_strip {
    int l, n, nm; /* the first row, how many, and the block's components */
    enum backward_form form;
    backward_lanes gap;           /* for GAPS: those of coarse cosines, else NOT_COARSE */
    backward_lanes g;             /* G if it is not in whole vectors; for a mixture, its terms */
    backward_lanes log;           /* for a mixture, backward_log() */
    const real *rows[STRIP_ROWS]; /* of G, or of the terms */
    real amiss[STRIP_ROWS];       /* 1 / (sum of a mixture's terms) - 1 */
};

/* The cosine u, or its gap; far: the logarithm is that of 1 + u. */
struct backward_cosine {
    vr u, gap;
    vm coarse, far;
};

static inline __attribute__((always_inline)) struct backward_cosine
backward_load(
    const struct ps_tile *w, const struct backward_strip *s, int i, int j, enum backward_kind kind,
    enum backward_form form) {
    struct backward_cosine x;
    x.u = ps_fine(v_ld(w->u + (s->l + i) * w->lm + j));
    x.gap = form == GAPS ? v_ld(s->gap[i] + j) : v_set(NOT_COARSE);
    x.coarse = m_lt(x.gap, v_set(NOT_COARSE));
    const vr far = v_set(kind == PARTS ? -2 : (real)0.5); /* of PARTS none is, as in the forward */
    x.far = m_lt(form == GAPS ? v_sel(x.coarse, v_set(1), x.u) : x.u, far);
    return x;
}

static inline __attribute__((always_inline)) vr
backward_pick(struct backward_cosine x, vr far, vr near, enum backward_form form) {
    return form == FAR ? far : form == NEAR ? near : v_sel(x.far, far, near);
}

static inline __attribute__((always_inline)) vr
backward_log(struct backward_cosine x, enum backward_form form) {
    const vr half = v_mul(v_sub(x.u, v_set(1)), v_set((real)0.5));
    const vr fine = backward_pick(x, x.u, half, form);
    if (form != GAPS) {
        return v_log1m_fine(fine);
    }
    const vm is_small = m_lt(v_set(0), v_sel(x.coarse, x.gap, v_set(-1)));
    const vr log = v_log_either(is_small, v_sel(x.coarse, v_mul(v_set((real)0.5), x.gap), fine));
    return v_sel(m_eq(x.gap, v_set(PS_BEHIND)), v_set((real)-INFINITY), log);
}

/* exp(term - result) for a mixture's terms.  If gradients cancel, shares that add up to 1 lose less than shares relative to
 * the rounded result.  So the large parts of the exponent are cancelled first, before they can round away the rest, and the
 * terms are divided by their own sum (amiss).  PARTS have no such sum; they are rounded like the forward's terms, so that a
 * term that outweighs all others has a share of exactly 1. */
static inline __attribute__((always_inline)) void
backward_terms(
    const struct ps_tile *w, struct backward_strip *s, int i, enum backward_kind kind,
    enum backward_form form) {
    const vr f = v_set(w->f[s->l + i]);
    vr sum = v_set(0); /* not in double: of few terms, with an error common to a sample's shares */
    for (int j = 0; j < s->nm; j += VW) {
        const struct backward_cosine x = backward_load(w, s, i, j, kind, form);
        const vr log = backward_log(x, form);
        const vr kappa = v_ld(w->kappa + j);
        vr h = v_ld(w->h + j);
        vr a = v_ld(w->a + j);
        if (kind == SHARES) {
            h = v_sub(backward_pick(x, v_ld(w->h_far + j), h, form), f);
            a = backward_pick(x, v_ld(w->a_far + j), v_ld(w->a_near + j), form);
        }
        const vr each = form == GAPS ? ps_log_prob(log, kappa, h) : v_fma(kappa, log, h);
        const vr joint = v_add(each, a);
        const vr term = v_exp(kind == SHARES ? joint : v_sub(joint, f));
        sum = v_add(sum, term);
        v_st(s->g[i] + j, term);
        v_st(s->log[i] + j, log);
    }
    const double all = v_hsum_wide(sum);
    s->amiss[i] = kind == SHARES && all > 0 ? (real)(1 / all - 1) : 0;
}

/* Turns cosines into W, and adds to the lanes' sums of G and of G s, in double because gradients cancel.  Of s only the
 * logarithm is summed here; the rest is added at the end. */
static inline __attribute__((always_inline)) void
backward_sums(
    const struct ps_tile *w, const struct backward_strip *s, enum backward_kind kind,
    enum backward_form form) {
    double *sums = form == FAR ? w->all_far : w->all_g;
    for (int j = 0; j < s->nm; j += VW) {
        const vr kappa = v_ld(w->kappa + j);
        vd all_g = d_ld(sums + j);
        vd all_gs = d_ld(w->all_gs + j);
        for (int i = 0; i < s->n; i++) {
            const struct backward_cosine x = backward_load(w, s, i, j, kind, form);
            vr c = v_add(x.u, v_set(1));
            vr g = v_ld(s->rows[i] + j);
            if (kind != GIVEN) {
                g = v_mul(v_set(w->grad[s->l + i]), v_fma(g, v_set(s->amiss[i]), g));
            }
            vr log = kind != GIVEN ? v_ld(s->log[i] + j) : backward_log(x, form);
            if (form == GAPS) {
                const vm behind = m_eq(x.gap, v_set(PS_BEHIND));
                c = v_sel(x.coarse, ps_gap_one_plus_u(x.gap), c);
                c = v_sel(behind, v_set(w->least), c);
                log = v_sel(behind, v_set(w->least_log_y), log);
            }
            v_st(w->u + (s->l + i) * w->lm + j, v_mul(v_mul(g, kappa), v_rcp(c)));
            all_g = d_fma(g, v_set(1), all_g);
            all_gs = form == FAR || form == NEAR ? d_fma(g, log, all_gs)
                                                 : d_fma_less(g, log, x.far, LOG_2, all_gs);
        }
        d_st(sums + j, all_g);
        d_st(w->all_gs + j, all_gs);
    }
}

static inline __attribute__((always_inline)) void
backward_strip_of(
    const struct ps_tile *w, struct backward_strip *s, enum backward_kind kind,
    enum backward_form form) {
    for (int i = 0; i < s->n && kind != GIVEN; i++) {
        backward_terms(w, s, i, kind, form);
    }
    backward_sums(w, s, kind, form);
}

static void
backward_strip(const struct ps_tile *w, struct backward_strip *s, enum backward_kind kind) {
    const enum backward_form form = s->form;
    if (kind == GIVEN && form == FAR) {
        backward_strip_of(w, s, GIVEN, FAR);
    } else if (kind == GIVEN && form == EITHER) {
        backward_strip_of(w, s, GIVEN, EITHER);
    } else if (kind == GIVEN) {
        backward_strip_of(w, s, GIVEN, GAPS);
    } else if (kind == SHARES && form == NEAR) {
        backward_strip_of(w, s, SHARES, NEAR);
    } else if (kind == SHARES && form == FAR) {
        backward_strip_of(w, s, SHARES, FAR);
    } else if (kind == SHARES && form == EITHER) {
        backward_strip_of(w, s, SHARES, EITHER);
    } else if (kind == SHARES) {
        backward_strip_of(w, s, SHARES, GAPS);
    } else if (form == NEAR) {
        backward_strip_of(w, s, PARTS, NEAR);
    } else {
        backward_strip_of(w, s, PARTS, GAPS);
    }
}

/* Chooses a strip's form, usually by its least and its largest cosine. */
static enum backward_form
backward_form(
    const struct ps_tile *w, const struct backward_strip *s, int dim, enum backward_kind kind) {
    const real *u = w->u + s->l * w->lm;
    vr least = v_set(1);
    vr most = v_set(-1);
    for (int i = 0; i < s->n; i++) {
        for (int j = 0; j < s->nm; j += VW) {
            const vr x = v_ld(u + i * w->lm + j);
            least = v_min(least, x);
            most = v_max(most, x);
        }
    }
    const struct ps_limits limits = {w->high, w->low, false, s->n, s->nm};
    const bool any = m_any(m_lt(least, v_set(w->low))) || m_any(m_lt(v_set(w->least_high), most));
    if (any && ps_any_is_coarse(u, w->lm, limits)) {
        return GAPS;
    }
    if (kind == PARTS) {
        return NEAR;
    }
    if (!m_any(m_lt(v_set((real)0.5), most))) {
        return FAR;
    }
    return kind == SHARES && dim < NEAR_DIMS ? NEAR : EITHER;
}

/* Computes the gaps of a row, else NOT_COARSE, independently of neighbouring rows. */
static void
backward_refine(const struct ps_tile *w, struct backward_strip *s, int i, int dim) {
    const int l = s->l + i;
    const struct pya_tile_a a = {w->value + l * w->ld, w->ld, 1};
    const struct pya_tile_b b = {w->loc_t, w->lm};
    const struct pya_tile_c c = {s->gap[i], STRIP_LANES, 0};
    const struct ps_limits limits = {w->high, w->low, false, 1, s->nm};
    const real *u = w->u + l * w->lm;
    memcpy(s->gap[i], u, (size_t)pack_round(s->nm, VW) * sizeof *u);
    ps_refine_tile(dim, a, b, c, limits);
    for (int j = 0; j < s->nm; j++) {
        s->gap[i][j] = ((u[j] < w->low) | (u[j] > w->high[j])) ? s->gap[i][j] : NOT_COARSE;
    }
    for (int j = s->nm; j < (int)pack_round(s->nm, VW); j++) {
        s->gap[i][j] = NOT_COARSE;
    }
}

/* Copies n numbers, stride apart, into a row padded with zeros to whole vectors. */
static inline void
backward_gather(real *dst, const real *src, ptrdiff_t stride, int n) {
    for (int k = 0; k < n; k++) {
        dst[k] = src[k * stride];
    }
    for (int k = n; k < (int)pack_round(n, VW); k++) {
        dst[k] = 0;
    }
}

/* The samples' gradients and results, of a mixture. */
static void
backward_samples(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0, int nl) {
    const real *grad = (const real *)ps->grad + l0 * ps->grad_l + t * ps->grad_t;
    const real *f = (const real *)ps->out + l0 * ps->out_l + t * ps->out_t;
    for (int l = 0; l < nl; l++) {
        const real fl = f[l * ps->out_l];
        w->grad[l] = grad[l * ps->grad_l];
        w->f[l] = isinf(fl) && fl < 0 ? (real)INFINITY : fl;
    }
}

static void
backward_weights(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t t, ptrdiff_t l0, ptrdiff_t m0) {
    const int nl = ps_count(ps->n_l, l0, w->lb);
    const int nm = ps_count(ps->n_m, m0, w->mb);
    const bool mixture = ps->log_weights.p != NULL;
    const real *grad = (const real *)ps->grad + l0 * ps->grad_l + t * ps->grad_t;
    struct backward_strip s;
    const enum backward_kind kind = !mixture ? GIVEN : nm == ps->n_m ? SHARES : PARTS;
    s.nm = nm;
    if (mixture) {
        backward_samples(w, ps, t, l0, nl);
    }
    for (s.l = 0; s.l < nl; s.l += s.n) {
        s.n = nl - s.l < STRIP_ROWS ? nl - s.l : STRIP_ROWS;
        for (int i = 0; i < s.n; i++) {
            const real *row = grad + (s.l + i) * ps->grad_l + m0 * ps->grad_m;
            const bool packed = !mixture && w->given == NULL && ps->grad_m == 1 && nm % VW == 0;
            s.rows[i] = packed ? row : s.g[i];
            if (w->given != NULL) {
                s.rows[i] =
                    w->given + (t - w->first_t) * w->given_t + (l0 + s.l + i) * w->given_l + m0;
            } else if (!mixture && !packed) {
                backward_gather(s.g[i], row, ps->grad_m, nm);
            }
            for (int j = 0; packed && s.l + i + STRIP_ROWS < nl && j < nm;
                 j += 64 / (int)sizeof *row) {
                __builtin_prefetch(row + STRIP_ROWS * ps->grad_l + j, 0, 3);
            }
        }
        s.form = backward_form(w, &s, (int)ps->dim, kind);
        for (int i = 0; i < s.n && s.form == GAPS; i++) {
            backward_refine(w, &s, i, (int)ps->dim);
        }
        backward_strip(w, &s, kind);
    }
}

/* rows x dim of scratch, to be stored in or added to a gradient */
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

/* Everything for one block of samples against the packed block of components. */
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
            const double slope = (double)w->dh[i] + (double)w->dh_low[i];
            const double beside = slope * w->all_g[i] + (slope - LOG_2) * w->all_far[i];
            *ps_row_out(ps->d_scale, m0 + i, t) = (real)(w->all_gs[i] + beside);
        }
        if (ps->d_log_weights.p != NULL) {
            *ps_row_out(ps->d_log_weights, m0 + i, t) = (real)(w->all_g[i] + w->all_far[i]);
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
            const double far = (double)w->h[i] + (double)w->h_low[i] - (double)w->kappa[i] * LOG_2;
            w->h_far[i] = (real)far;
            w->a_far[i] = (real)((double)w->a[i] + (far - (double)w->h_far[i]));
            w->a_near[i] = w->a[i] + w->h_low[i];
            w->all_g[i] = w->all_far[i] = w->all_gs[i] = 0;
        }
        for (ptrdiff_t l0 = r->l0; l0 < r->l1; l0 += w->lb) {
            backward_pair(w, ps, t, l0, m0, r);
        }
        /* the sums over samples are complete only if the unit saw all of them */
        if (r->l0 == 0 && r->l1 == ps->n_l) {
            backward_finish(w, ps, t, m0, nm);
        }
    }
}

/* How the problem is cut into units.  If there are enough t's, a unit is a whole t.  Otherwise blocks of components (for
 * d_loc, d_scale, d_a), then blocks of samples (for d_value), at the price of one more product.  Every sum has the same order
 * in both. */
struct backward_plan {
    ptrdiff_t block_l, block_m; /* rows per unit */
    bool want_value, want_loc;
};

/* Reads the given gradients of the t's from first to end. */
static void
backward_read_given(
    struct ps_tile *w, const struct pya_ops_ps *ps, ptrdiff_t first, ptrdiff_t end) {
    const real *grad = (const real *)ps->grad + first;
    w->first_t = first;
    for (ptrdiff_t l = 0; l < ps->n_l; l++) {
        pack_transpose(
            w->given + l * w->given_l, w->given_t, grad + l * ps->grad_l, ps->grad_m,
            (ptrdiff_t)ps->n_m, end - first, w->given_l);
    }
}

static int
backward_run(const struct pya_ops_ps *ps, struct backward_plan plan) {
    const ptrdiff_t n_lb = ps_n_blocks(ps->n_l, plan.block_l);
    const ptrdiff_t n_mb = ps_n_blocks(ps->n_m, plan.block_m);
    const ptrdiff_t units = (ptrdiff_t)ps->n_t * n_lb * n_mb;
    const ptrdiff_t n_given = ps_n_given(ps);
    const ptrdiff_t chunk = n_given > 1 ? n_given : ps_chunk(units, ps->n_threads);
    int failed = 0;
#pragma omp parallel num_threads(ps->n_threads) reduction(| : failed)
    {
        struct ps_tile w;
        void *scratch = ps_tile_create(&w, ps, PS_BACKWARD);
        ps_set_least(&w, ps->dtype);
        failed |= scratch == NULL;
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t first = 0; first < units; first += chunk) {
            const ptrdiff_t end = first + chunk < units ? first + chunk : units;
            if (scratch != NULL && w.given != NULL) {
                backward_read_given(&w, ps, first, end);
            }
            for (ptrdiff_t k = first; k < end && scratch != NULL; k++) {
                ptrdiff_t l0 = k / n_mb % n_lb * plan.block_l;
                ptrdiff_t m0 = k % n_mb * plan.block_m;
                struct backward_range r = {
                    l0,
                    l0 + plan.block_l < ps->n_l ? l0 + plan.block_l : ps->n_l,
                    m0,
                    m0 + plan.block_m < ps->n_m ? m0 + plan.block_m : ps->n_m,
                    plan.want_value,
                    plan.want_loc};
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
