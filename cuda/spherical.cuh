#pragma once
/* What all PowerSpherical kernels need: the normaliser, one pair of a sample and a component; the
 * formulas and the names are those of csrc/ops/ps_forward.c and ps_backward.c. */
#include "args.h"
#include "tile.cuh"

static __device__ inline double
norm_series(double x) {
    const double r = 1.0 / x;
    const double q = r * r;
    return r * (1.0 / 12 - q * (1.0 / 360 - q * (1.0 / 1260 - q * (1.0 / 1680))));
}

static __device__ inline double
norm_tail(double x) {
    const double r = 1.0 / x;
    const double q = r * r;
    return 0.5 * r + q * (1.0 / 12 - q * (1.0 / 120 - q * (1.0 / 252 - q * (1.0 / 240))));
}

/* log C + kappa log 2 and its derivative, in double: its parts are large and cancel */
static __device__ inline void
norm(double kappa, double dim, float *h, float *dh) {
    const double b = 0.5 * (dim - 1.0);
    double a = kappa + b;
    if (a <= 0.0) { /* no density: also what keeps the shift below from walking up from -1e30 */
        *h = *dh = __int_as_float(0x7fc00000);
        return;
    }
    double ratio = 1.0;
    double shift = 0.0;
    while (a < 12.0) {
        ratio *= a / (a + b);
        shift += 1.0 / a - 1.0 / (a + b);
        a += 1.0;
    }
    const double l = log1p(b / a);
    double v = (a - 0.5) * l + b * (log(a + b) - 3.53102424696929079);
    v += norm_series(a + b) - norm_series(a) + log(ratio);
    *h = (float)v;
    *dh = (float)(l - norm_tail(a + b) + norm_tail(a) + shift);
}

/* log((1 + u) / 2) of a cosine, bottom from -1 down, 0 from 1 up, NaN stays.  As log1p of (u - 1) / 2,
 * which is exact where it is small, 1 + f with f in [-0.25, 0.5] once a power of two is split off; the
 * polynomial is that of csrc/ops/simd_math.h.  No branch: log1pf has one for arguments it cannot get. */
static __device__ inline float
log_half(float u, float bottom) {
    const float d = fmaf(0.5f, u > 1.0f ? 1.0f : u, -0.5f);
    const float y = d + 1.0f;
    const int e = (__float_as_int(y) - 0x3f400000) & (int)0xff800000;
    const float s = __int_as_float(0x3f800000 - e);
    const float f = fmaf(d, s, s - 1.0f);
    float q = fmaf(0.05413254350423813f, f, -0.12067381292581558f);
    q = fmaf(q, f, 0.14983923733234406f);
    q = fmaf(q, f, -0.1682281196117401f);
    q = fmaf(q, f, 0.1997707635164261f);
    q = fmaf(q, f, -0.24993441998958588f);
    q = fmaf(q, f, 0.3333354890346527f);
    q = fmaf(q, f, -0.5000005960464478f);
    q = fmaf(f * f, q, f);
    q = fmaf((float)e, 8.26295829e-8f, q); /* e counts powers of two by 2^23: times log 2 / 2^23 */
    return y <= 0.0f ? bottom : q;
}

/* log_half one fp32 step away from the antipode, where gradients are taken. */
#define PYA_LEAST_LOG (-17.32868f)

/* What log_half says at the antipode: finite for the uniform distribution, as 0 * inf is no number. */
static __device__ inline float
bottom_of(float kappa) {
    return kappa == 0.0f ? PYA_LEAST_LOG : -INFINITY;
}

static __device__ inline float
log_prob(float u, float kappa, float bottom, float h) {
    return fmaf(kappa, log_half(u, bottom), h);
}

static __device__ inline rows
view_rows(struct pya_ops_view v, long long i, long long t, long long n) {
    rows r = {(const float *)v.p + i * v.i + t * v.t, v.i, at_most_big(n)};
    return r;
}

static __device__ inline float
view_at(struct pya_ops_view v, long long i, long long t) {
    return ((const float *)v.p)[i * v.i + t * v.t];
}

/* What one side of the backward needs of a component and of a sample. */
struct component {
    float kappa, h, dh, weight;
};
struct sample {
    float grad, f;
};

static __device__ inline struct component
load_component(const struct pya_ops_ps &a, long long m, long long t, bool mixture) {
    struct component c = {0.0f, 0.0f, 0.0f, -INFINITY};
    if (m < a.n_m) {
        c.kappa = view_at(a.scale, m, t);
        norm(c.kappa, (double)a.dim, &c.h, &c.dh);
        c.weight = mixture ? view_at(a.log_weights, m, t) : 0.0f;
    }
    return c;
}

static __device__ inline struct sample
load_sample(const struct pya_ops_ps &a, long long l, long long t, bool mixture) {
    struct sample s = {0.0f, INFINITY};
    if (mixture && l < a.n_l) {
        s.grad = ((const float *)a.grad)[l * a.grad_l + t * a.grad_t];
        s.f = ((const float *)a.out)[l * a.out_l + t * a.out_t];
        s.f = s.f == -INFINITY ? INFINITY : s.f;
    }
    return s;
}

/* The larger one; a NaN in x stays, which fmaxf() would lose. */
static __device__ inline float
at_least(float least, float x) {
    return x < least ? least : x;
}

/* G of one pair; *gl its product with log y.  Returns W. */
static __device__ inline float
pair_weight(float u, struct component c, struct sample s, bool mixture, float *g, float *gl) {
    const float y = log_half(u, bottom_of(c.kappa));
    if (mixture) {
        *g = s.grad * expf(c.weight + fmaf(c.kappa, y, c.h) - s.f);
    }
    *gl = *g * at_least(PYA_LEAST_LOG, y);
    return __fdividef(*g * c.kappa, at_least(5.9604645e-8f, 1.0f + (u > 1.0f ? 1.0f : u)));
}
