/* In a tensor of a few numbers errors do not average out: where a sum happens to cancel, every rounding shows.  So problems so
 * small that the call costs more than the computation are computed in double. */
#include "ps_small.h"

#include <stdlib.h>

enum { SMALL_PAIRS = 1024, FEW_PAIRS = 64, SMALL_WORK = 32768, FEW_WORK = FEW_PAIRS * 4096 };

bool
pya_ps_is_small(const struct pya_ops_ps *ps) {
    int64_t pairs = 1;
    const int64_t n[] = {ps->n_l, ps->n_m, ps->n_t};
    for (int i = 0; i < 3 && pairs <= SMALL_PAIRS; i++) {
        pairs = n[i] > SMALL_PAIRS ? n[i] : pairs * n[i];
    }
    return ps->dtype == PYA_OPS_F32 && pairs <= SMALL_PAIRS &&
           pairs * ps->dim <= (pairs <= FEW_PAIRS ? FEW_WORK : SMALL_WORK);
}

/* Rows of numbers under up to three indices: the caller's floats, and our contiguous doubles. */
struct small_part {
    struct pya_ops_view view; /* p NULL: not wanted */
    int64_t outer;            /* stride of the first index */
    int64_t n[3];             /* of the first, of view.i, of view.t */
    int64_t dim;
    double *wide;
};

static int64_t
small_count(const struct small_part *x) {
    return x->view.p == NULL ? 0 : x->n[0] * x->n[1] * x->n[2] * x->dim;
}

static inline void
small_copy_row(float *p, double *wide, int64_t n, bool widen) {
    for (int64_t k = 0; k < n; k++) {
        if (widen) {
            wide[k] = (double)p[k];
        } else {
            p[k] = (float)wide[k];
        }
    }
}

static void
small_copy(const struct small_part *x, bool widen) {
    double *wide = x->wide;
    for (int64_t o = 0; o < x->n[0] && x->view.p != NULL; o++) {
        for (int64_t i = 0; i < x->n[1]; i++) {
            float *p = (float *)x->view.p + o * x->outer + i * x->view.i;
            for (int64_t t = 0; t < x->n[2]; t++, wide += x->dim) {
                small_copy_row(p + t * x->view.t, wide, x->dim, widen);
            }
        }
    }
}

enum {
    VALUE,
    LOC,
    SCALE,
    WEIGHTS,
    GRAD,
    N_INPUTS,
    OUT = N_INPUTS,
    D_VALUE,
    D_LOC,
    D_SCALE,
    D_WEIGHTS,
    N_PARTS
};

static void
small_describe(struct small_part x[N_PARTS], const struct pya_ops_ps *ps) {
    const bool mixture = ps->log_weights.p != NULL;
    const struct pya_ops_view views[N_PARTS] = {
        [VALUE] = ps->value,
        [LOC] = ps->loc,
        [SCALE] = ps->scale,
        [WEIGHTS] = ps->log_weights,
        [D_VALUE] = ps->d_value,
        [D_LOC] = ps->d_loc,
        [D_SCALE] = ps->d_scale,
        [D_WEIGHTS] = ps->d_log_weights,
        [OUT] = {ps->out, mixture ? ps->out_l : ps->out_m, ps->out_t},
        /* only read, although a view could be written to */
        [GRAD] = {(void *)(uintptr_t)ps->grad, mixture ? ps->grad_l : ps->grad_m, ps->grad_t},
    };
    for (int k = 0; k < N_PARTS; k++) {
        const bool of_samples = k == VALUE || k == D_VALUE || (mixture && (k == OUT || k == GRAD));
        const bool is_row = k == VALUE || k == LOC || k == D_VALUE || k == D_LOC;
        x[k] = (struct small_part){
            views[k], 0, {1, of_samples ? ps->n_l : ps->n_m, ps->n_t}, is_row ? ps->dim : 1, NULL};
    }
    if (!mixture) {
        x[OUT].n[0] = x[GRAD].n[0] = ps->n_l;
        x[OUT].outer = ps->out_l;
        x[GRAD].outer = ps->grad_l;
    }
}

/* Copies everything that x describes to doubles in one allocation, which is returned; NULL: out of memory. */
static double *
small_widen(struct small_part x[N_PARTS]) {
    int64_t n = 0;
    for (int k = 0; k < N_PARTS; k++) {
        n += small_count(&x[k]);
    }
    double *memory = (double *)malloc((size_t)n * sizeof(double));
    double *next = memory;
    for (int k = 0; k < N_PARTS && memory != NULL; k++) {
        x[k].wide = next;
        next += small_count(&x[k]);
        if (k < N_INPUTS) {
            small_copy(&x[k], true);
        }
    }
    return memory;
}

static struct pya_ops_view
small_view(const struct small_part *x) {
    const struct pya_ops_view none = {NULL, 0, 0};
    return x->view.p == NULL ? none : (struct pya_ops_view){x->wide, x->n[2] * x->dim, x->dim};
}

static struct pya_ops_ps
small_problem(const struct pya_ops_ps *ps, const struct small_part x[N_PARTS]) {
    struct pya_ops_ps wide = *ps;
    wide.value = small_view(&x[VALUE]);
    wide.loc = small_view(&x[LOC]);
    wide.scale = small_view(&x[SCALE]);
    wide.log_weights = small_view(&x[WEIGHTS]);
    wide.d_value = small_view(&x[D_VALUE]);
    wide.d_loc = small_view(&x[D_LOC]);
    wide.d_scale = small_view(&x[D_SCALE]);
    wide.d_log_weights = small_view(&x[D_WEIGHTS]);
    wide.out = x[OUT].wide;
    wide.grad = x[GRAD].wide;
    const bool mixture = ps->log_weights.p != NULL;
    wide.out_t = wide.grad_t = 1;
    wide.out_m = wide.grad_m = ps->n_t;
    wide.out_l = wide.grad_l = mixture ? ps->n_t : ps->n_m * ps->n_t;
    return wide;
}

/* The mixture's backward needs its result in double too, since probabilities are exp of differences from it. */
static int
small_solve(const struct pya_ops_ps *wide, const struct pya_kernels *f64, bool backward) {
    if (wide->log_weights.p == NULL) {
        return backward ? f64->ps_backward(wide) : f64->ps_forward(wide);
    }
    const int status = f64->ps_mixture_forward(wide);
    return backward && status == PYA_OPS_OK ? f64->ps_mixture_backward(wide) : status;
}

/* Parts first .. last are results. */
static int
small_run(
    const struct pya_ops_ps *ps, const struct pya_kernels *f64, bool backward, int first,
    int last) {
    struct small_part x[N_PARTS];
    small_describe(x, ps);
    double *memory = small_widen(x);
    if (memory == NULL) {
        return PYA_OPS_E_NOMEM;
    }
    const struct pya_ops_ps wide = small_problem(ps, x);
    const int status = small_solve(&wide, f64, backward);
    for (int k = first; k <= last && status == PYA_OPS_OK; k++) {
        small_copy(&x[k], false);
    }
    free(memory);
    return status;
}

int
pya_ps_small_forward(const struct pya_ops_ps *ps, const struct pya_kernels *f64) {
    return small_run(ps, f64, false, OUT, OUT);
}

int
pya_ps_small_backward(const struct pya_ops_ps *ps, const struct pya_kernels *f64) {
    return small_run(ps, f64, true, D_VALUE, N_PARTS - 1);
}
