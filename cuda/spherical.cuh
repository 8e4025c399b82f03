#pragma once
/* What all PowerSpherical kernels need: the normaliser, and one pair of a sample and a component.  Formulas and names
 * are those of csrc/ops/ps_forward.c and ps_backward.c. */
#include "args.h"
#include "ps_coarse.h"
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

/* log C + kappa log 2 and its derivative; in double, because its parts are large and cancel */
static __device__ inline void
norm(double kappa, double dim, double *h, double *dh) {
    const double b = 0.5 * (dim - 1.0);
    double a = kappa + b;
    if (a <= 0.0) { /* no density; this also keeps the shift below from counting up from -1e30 */
        *h = *dh = (double)__int_as_float(0x7fc00000);
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
    v += norm_series(a + b) - norm_series(a);
    v += ratio < 1.0 ? log(ratio) : 0.0; /* often not needed, and takes a while */
    *h = v;
    *dh = l - norm_tail(a + b) + norm_tail(a) + shift;
}

/* Adds x to a sum of two numbers; the second collects the rounding errors of the first. */
static __device__ inline void
sum_add(float2 *sum, float x) {
    const float next = sum->x + x;
    const float added = next - sum->x;
    sum->y += (sum->x - (next - added)) + (x - added);
    sum->x = next;
}

/* The same for the product x y. */
static __device__ inline void
sum_add_product(float2 *sum, float x, float y) {
    const float product = __fmul_rn(x, y);
    sum_add(sum, product);
    sum->y += fmaf(x, y, -product);
}

/* The sum over a row of 16 lanes. */
static __device__ inline float2
sum_reduce16(float2 sum) {
#pragma unroll
    for (int m = 8; m > 0; m >>= 1) {
        const float2 other = {PYA_SHUFFLE(sum.x, m), PYA_SHUFFLE(sum.y, m)};
        sum_add(&sum, other.x);
        sum.y += other.y;
    }
    return sum;
}

/* If the sum is infinite, its rounding errors are NaN. */
static __device__ inline double
sum_total(float2 sum) {
    return sum.y == sum.y ? (double)sum.x + (double)sum.y : (double)sum.x;
}

/* log(d + rest); rest is 0 or, for d >= -1, 1, which is accurate for small d.  Splits off a power of two, so that 1 +
 * f remains with f in [-0.25, 0.5]; the polynomial is that of csrc/ops/simd_math.h.  Branch-free, unlike log1pf, which
 * handles arguments that do not occur here. */
static __device__ inline float
log_beside(float d, float rest) {
    const int e = (__float_as_int(d + rest) - 0x3f400000) & (int)0xff800000;
    const float s = __int_as_float(0x3f800000 - e);
    const float f = fmaf(d, s, fmaf(rest, s, -1.0f));
    float q = fmaf(0.05413254350423813f, f, -0.12067381292581558f);
    q = fmaf(q, f, 0.14983923733234406f);
    q = fmaf(q, f, -0.1682281196117401f);
    q = fmaf(q, f, 0.1997707635164261f);
    q = fmaf(q, f, -0.24993441998958588f);
    q = fmaf(q, f, 0.3333354890346527f);
    q = fmaf(q, f, -0.5000005960464478f);
    q = fmaf(f * f, q, f);
    /* e counts powers of two by 2^23: times log 2 / 2^23 */
    return fmaf((float)e, 8.26295829e-8f, q);
}

/* Turns a cosine that is not too coarse into a gap (ps_coarse.h), without recomputing it. */
static __device__ inline float
gap_of(float u) {
    return (u > 1.0f ? 1.0f : u) - 1.0f;
}

/* log((1 + u) / 2) from a gap; `bottom` beyond the antipode; NaN stays NaN */
static __device__ inline float
gap_log_half(float gap, float bottom) {
    const float log_y = log_beside(0.5f * gap, gap > 0.0f ? 0.0f : 1.0f);
    return gap == PS_BEHIND ? bottom : log_y;
}

/* 1 + u one fp32 step away from the antipode, where gradients there are evaluated, and log y at that point. */
#define PYA_LEAST 5.9604645e-8f
#define PYA_LEAST_LOG (-17.32868f)

/* log y beyond the antipode: finite for the uniform distribution, since 0 * inf is NaN. */
static __device__ inline float
bottom_of(float kappa) {
    return kappa == 0.0f ? PYA_LEAST_LOG : -INFINITY;
}

/* Bitwise the same as from its gap for a cosine that is not too coarse; undefined for others. */
static __device__ inline float
log_prob(float u, float kappa, float h) {
    return fmaf(kappa, log_beside(fmaf(0.5f, u > 1.0f ? 1.0f : u, -0.5f), 1.0f), h);
}

static __device__ inline bool
is_coarse(float u, float low, float high) {
    return u < low || u > high;
}

/* Removes and returns the lowest number of a set of 0 to 31. */
static __device__ inline int
take_lowest(unsigned *set) {
    const int n = __ffs((int)*set) - 1;
    *set &= *set - 1;
    return n;
}

/* The gap of row i of a and row j of b, recomputed in double. */
static __device__ inline float
sharp_gap(const rows &a, const rows &b, int i, int j, int dim) {
    const float *x = a.p + i * a.stride;
    const float *y = b.p + j * b.stride;
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < dim; k++) {
        sum += (double)x[k] * (double)y[k];
    }
    return ps_gap(1.0 + sum, sum - 1.0);
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

/* What a kernel needs of a component and, in the backward, of a sample. */
struct component {
    float kappa;
    float h;    /* in the mixture it includes the weight */
    float high; /* cosines above are too coarse in fp32 */
    /* The slope of scale is log((1 + u) / 2) + near, or equally log(1 + u) + far.  In many dimensions most cosines are
     * near 0, and only the latter keeps all digits of the sum.  The mixture does not use far. */
    float near, far;
};
struct sample {
    float grad, f;
};

static __device__ inline struct component
load_component(const struct pya_ops_ps &a, long long m, long long t, bool mixture) {
    struct component c = {0.0f, -INFINITY, INFINITY, 0.0f, 0.0f};
    if (m < a.n_m) {
        double h;
        double slope;
        c.kappa = view_at(a.scale, m, t);
        norm(c.kappa, (double)a.dim, &h, &slope);
        c.h = (float)h;
        c.high = ps_high((float)ps_coarseness(a.dim), c.kappa, c.h);
        c.h += mixture ? view_at(a.log_weights, m, t) : 0.0f;
        c.near = (float)slope;
        c.far = (float)(slope - 0.69314718055994531);
    }
    return c;
}

/* 128 components in shared memory, for log-probabilities; low: cosines below are too coarse in fp32. */
struct columns {
    float kappa[BIG], h[BIG], high[BIG];
    float low;
};

/* Loads the components from m0 on; called by all threads, followed by a barrier. */
static __device__ inline void
put_columns(
    struct columns *of, const struct pya_ops_ps &a, long long m0, long long t, bool mixture) {
    if (threadIdx.x < BIG) {
        const struct component c = load_component(a, m0 + threadIdx.x, t, mixture);
        of->kappa[threadIdx.x] = c.kappa;
        of->h[threadIdx.x] = c.h;
        of->high[threadIdx.x] = c.high;
    } else if (threadIdx.x == BIG) {
        of->low = ps_low(a.dim);
    }
}

/* The log-probability of a coarse pair, row i of the samples and column j of the components. */
static __device__ inline float
sharp_log_prob(const struct columns &of, const rows both[2], int i, int j, int dim) {
    const float gap = sharp_gap(both[0], both[1], i, j, dim);
    return fmaf(of.kappa[j], gap_log_half(gap, bottom_of(of.kappa[j])), of.h[j]);
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

/* G of one pair and the slope of scale.  Returns W. */
static __device__ inline float
pair_weight(float gap, struct component c, struct sample s, bool mixture, float *g, float *slope) {
    const bool is_behind = gap == PS_BEHIND;
    const bool is_far = !mixture && gap <= -0.5f;
    const float y = is_far ? log_beside(1.0f + gap, 1.0f) : gap_log_half(gap, bottom_of(c.kappa));
    if (mixture) {
        *g = s.grad * expf(fmaf(c.kappa, y, c.h) - s.f);
    }
    *slope = (is_behind ? PYA_LEAST_LOG : y) + (is_far ? c.far : c.near);
    const float one_plus_u = gap > 0.0f ? gap : 2.0f + gap;
    return __fdividef(*g * c.kappa, is_behind ? PYA_LEAST : one_plus_u);
}
