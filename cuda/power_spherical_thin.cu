/* The PowerSpherical kernels for few pairs of a sample and a component per t, as in the latents of a batch (one pair
 * each) or mixtures with their own components: a tile of 128 x 128 would be nearly empty.  A team takes a t, a thread
 * a pair; a team is a warp or, if there are few t too, a block.  Errors of so few numbers do not average out, and sums
 * may cancel, so pairs are computed in double, and sums of products keep their rounding errors. */
#include "args.h"
#include "spherical.cuh"
#include "tile.cuh"

struct thin_place {
    long long t;
    int lane;
    int warp, n_warps; /* in the team */
    int first;         /* thread of the team */
    int l, m;          /* of the thread's pair */
    bool has_t, is_pair;
};

template <int TEAM>
static __device__ inline struct thin_place
thin_place(const struct pya_ops_ps &a) {
    const int member = threadIdx.x % TEAM;
    const long long t = (long long)blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int n_m = (int)a.n_m;
    const bool is_pair = t < a.n_t && member < (int)a.n_l * n_m;
    struct thin_place p = {
        t,
        (int)threadIdx.x % 32,
        member / 32,
        TEAM / 32,
        (int)threadIdx.x - member,
        member / n_m,
        member % n_m,
        t < a.n_t,
        is_pair};
    return p;
}

static __device__ inline const float *
thin_row(struct pya_ops_view v, long long i, long long t) {
    return (const float *)v.p + i * v.i + t * v.t;
}

/* Doubles are shuffled as two floats: 48 of 53 bits. */
static __device__ inline double
reduce32_add_double(double x) {
    for (int m = 16; m > 0; m >>= 1) {
        const float high = (float)x;
        const float low = (float)(x - (double)high);
        x += (double)PYA_SHUFFLE(high, m) + (double)PYA_SHUFFLE(low, m);
    }
    return x;
}

/* 1 + u of the thread's pair, up to 2; undefined in a thread without one.  Called by all threads. */
static __device__ inline double
thin_one_plus_u(const struct pya_ops_ps &a, const struct thin_place &p) {
    __shared__ double found[THREADS];
    const int n_m = (int)a.n_m;
    const int pairs = p.has_t ? (int)a.n_l * n_m : 0;
    for (int pair = p.warp; pair < pairs; pair += p.n_warps) {
        const float *x = thin_row(a.value, pair / n_m, p.t);
        const float *y = thin_row(a.loc, pair % n_m, p.t);
        float2 sum = {0.0f, 0.0f};
#pragma unroll 4
        for (int k = p.lane; k < (int)a.dim; k += 32) {
            sum_add_product(&sum, x[k], y[k]);
        }
        const double all = reduce32_add_double(sum_total(sum));
        if (p.lane == 0) {
            found[p.first + pair] = 1.0 + all;
        }
    }
    __syncthreads();
    const double one_plus_u = p.is_pair ? found[threadIdx.x] : 2.0;
    return one_plus_u > 2.0 ? 2.0 : one_plus_u;
}

/* A pair in double: kappa, the normaliser, its derivative, log((1 + u) / 2). */
struct thin_pair {
    double kappa, h, dh;
    double one_plus_u, log_y;
    bool is_behind;
};

/* Called by all threads. */
static __device__ inline struct thin_pair
thin_pair(const struct pya_ops_ps &a, const struct thin_place &p) {
    __shared__ double norms[2][THREADS];
    if (p.is_pair && p.l == 0) {
        double h;
        double dh;
        norm((double)view_at(a.scale, p.m, p.t), (double)a.dim, &h, &dh);
        norms[0][threadIdx.x] = h;
        norms[1][threadIdx.x] = dh;
    }
    struct thin_pair x = {};
    x.one_plus_u = thin_one_plus_u(a, p);
    x.is_behind = x.one_plus_u <= 0.0;
    if (x.is_behind) {
        x.one_plus_u = (double)PYA_LEAST;
    }
    x.log_y = log(0.5 * x.one_plus_u);
    if (p.is_pair) {
        x.kappa = (double)view_at(a.scale, p.m, p.t);
        x.h = norms[0][p.first + p.m];
        x.dh = norms[1][p.first + p.m];
    }
    return x;
}

static __device__ inline double
thin_log_prob(const struct thin_pair &x) {
    const double log_y = x.is_behind ? (double)bottom_of((float)x.kappa) : x.log_y;
    return x.kappa * log_y + x.h; /* NaN stays NaN */
}

/* A pair's term in a mixture, exp(its log-probability - top), the sum of the sample's terms, and top, the largest
 * log-probability. */
struct thin_share {
    double term, sum, top;
};

/* Called by all threads.  The backward calls it again, because shares taken from the rounded result are less accurate,
 * which shows where they cancel. */
static __device__ inline struct thin_share
thin_share(const struct pya_ops_ps &a, const struct thin_place &p, double x) {
    __shared__ double terms[2][THREADS];
    const int first = p.first + p.l * (int)a.n_m;
    struct thin_share s = {0.0, 0.0, -1e37};
    terms[0][threadIdx.x] = x + (p.is_pair ? (double)view_at(a.log_weights, p.m, p.t) : 0.0);
    __syncthreads();
    for (int i = 0; p.is_pair && i < (int)a.n_m; i++) {
        s.top = fmax(s.top, terms[0][first + i]);
    }
    s.term = exp(terms[0][threadIdx.x] - s.top);
    terms[1][threadIdx.x] = s.term;
    __syncthreads();
    for (int i = 0; p.is_pair && i < (int)a.n_m; i++) {
        s.sum += terms[1][first + i];
    }
    return s;
}

template <int TEAM>
static __device__ inline void
thin_forward(const struct pya_ops_ps &a) {
    const struct thin_place p = thin_place<TEAM>(a);
    const double x = thin_log_prob(thin_pair(a, p));
    float *out = (float *)a.out + p.t * a.out_t + p.l * a.out_l;
    if (a.log_weights.p == 0) {
        if (p.is_pair) {
            out[p.m * a.out_m] = (float)x;
        }
        return;
    }
    const struct thin_share s = thin_share(a, p, x);
    if (p.is_pair && p.m == 0) {
        *out = s.sum == 0.0 ? -INFINITY : (float)(s.top + log(s.sum));
    }
}

/* Rows of a gradient: each is a sum of n weights, step apart, times rows of the other kind. */
struct thin_rows {
    struct pya_ops_view to, others;
    int n_rows, row_step;
    int n, step;
};

static __device__ inline void
thin_gradient(
    const struct thin_rows &r, const float2 *weights, const struct thin_place &p, int dim) {
    for (int row = p.warp; r.to.p != 0 && row < r.n_rows; row += p.n_warps) {
        for (int k = p.lane; k < dim; k += 32) {
            float2 sum = {0.0f, 0.0f};
            for (int i = 0; i < r.n; i++) {
                const float2 w = weights[row * r.row_step + i * r.step];
                const float x = thin_row(r.others, i, p.t)[k];
                sum_add_product(&sum, w.x, x);
                sum.y = fmaf(w.y, x, sum.y);
            }
            ((float *)r.to.p)[row * r.to.i + p.t * r.to.t + k] = (float)sum_total(sum);
        }
    }
}

template <int TEAM>
static __device__ inline void
thin_backward(const struct pya_ops_ps &a) {
    __shared__ float2 weights[THREADS];
    __shared__ double sums[2][THREADS]; /* G, and G times the slope of scale */
    const struct thin_place p = thin_place<TEAM>(a);
    const int n_l = (int)a.n_l;
    const int n_m = (int)a.n_m;
    const struct thin_pair x = thin_pair(a, p);
    double g = 0.0;
    if (p.is_pair) {
        const float *grad = (const float *)a.grad + p.l * a.grad_l + p.t * a.grad_t;
        g = (double)(a.log_weights.p != 0 ? grad[0] : grad[p.m * a.grad_m]);
    }
    if (a.log_weights.p != 0) {
        const struct thin_share s = thin_share(a, p, thin_log_prob(x));
        g *= s.sum == 0.0 ? 0.0 : s.term / s.sum;
    }
    double slope = g * (x.log_y + x.dh);
    const double w = g * x.kappa / x.one_plus_u;
    weights[threadIdx.x].x = (float)w;
    weights[threadIdx.x].y = (float)(w - (double)(float)w);
    sums[0][threadIdx.x] = g;
    sums[1][threadIdx.x] = slope;
    __syncthreads();
    if (!p.has_t) {
        return;
    }
    const struct thin_rows of_value = {a.d_value, a.loc, n_l, n_m, n_m, 1};
    const struct thin_rows of_loc = {a.d_loc, a.value, n_m, 1, n_l, n_m};
    thin_gradient(of_value, weights + p.first, p, (int)a.dim);
    thin_gradient(of_loc, weights + p.first, p, (int)a.dim);
    if (!p.is_pair || p.l != 0) {
        return;
    }
    for (int l = 1; l < n_l; l++) {
        g += sums[0][threadIdx.x + l * n_m];
        slope += sums[1][threadIdx.x + l * n_m];
    }
    if (a.d_scale.p != 0) {
        ((float *)a.d_scale.p)[p.m * a.d_scale.i + p.t * a.d_scale.t] = (float)slope;
    }
    if (a.d_log_weights.p != 0) {
        ((float *)a.d_log_weights.p)[p.m * a.d_log_weights.i + p.t * a.d_log_weights.t] = (float)g;
    }
}

/* For t's with at most 32 pairs, a warp each.  blocks: t / 8 */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_ps_forward_thin(struct pya_ops_ps a) {
    thin_forward<32>(a);
}

/* Four blocks per multiprocessor, as below: otherwise ptxas of CUDA 13.0 takes 40 registers on 8.0 or 10.0 and
 * spills. */
extern "C" __global__ void __launch_bounds__(THREADS, 4)
pya_ps_backward_thin(struct pya_ops_ps a) {
    thin_backward<32>(a);
}

/* For t's with at most 256 pairs, a block each.  blocks: t */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_ps_forward_few(struct pya_ops_ps a) {
    thin_forward<THREADS>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
pya_ps_backward_few(struct pya_ops_ps a) {
    thin_backward<THREADS>(a);
}
