/* The PowerSpherical kernels where a t has few pairs of a sample and a component, as the latents of a batch have, one
 * pair each, or mixtures with components of their own: a tile of 128 x 128 would be empty but for those.  A warp takes a
 * t, a lane a pair; cosines are summed in double.  blocks: t / 8 */
#include "args.h"
#include "spherical.cuh"
#include "tile.cuh"

enum { MOST_PAIRS = 32 };

struct thin_place {
    long long t;
    int lane, warp;
    int l, m;       /* of the lane's pair */
    bool has_t, is_pair;
};

static __device__ inline struct thin_place
thin_place(const struct pya_ops_ps &a) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const long long t = (long long)blockIdx.x * (THREADS / 32) + warp;
    const int n_m = (int)a.n_m;
    const bool is_pair = t < a.n_t && lane < (int)a.n_l * n_m;
    struct thin_place p = {t, lane, warp, lane / n_m, lane % n_m, t < a.n_t, is_pair};
    return p;
}

static __device__ inline const float *
thin_row(struct pya_ops_view v, long long i, long long t) {
    return (const float *)v.p + i * v.i + t * v.t;
}

/* Doubles pass as two floats: 48 of 53 bits. */
static __device__ inline double
reduce32_add_double(double x) {
    for (int m = 16; m > 0; m >>= 1) {
        const float high = (float)x;
        const float low = (float)(x - (double)high);
        x += (double)PYA_SHUFFLE(high, m) + (double)PYA_SHUFFLE(low, m);
    }
    return x;
}

/* The gap of the lane's pair; of a lane without one, anything. */
static __device__ inline float
thin_gap(const struct pya_ops_ps &a, const struct thin_place &p) {
    const int n_m = (int)a.n_m;
    float gap = 0.0f;
    for (int pair = 0; p.has_t && pair < (int)a.n_l * n_m; pair++) {
        const float *x = thin_row(a.value, pair / n_m, p.t);
        const float *y = thin_row(a.loc, pair % n_m, p.t);
        double sum = 0.0;
#pragma unroll 4
        for (int k = p.lane; k < (int)a.dim; k += 32) {
            sum += (double)x[k] * (double)y[k];
        }
        sum = reduce32_add_double(sum);
        gap = pair == p.lane ? ps_gap(1.0 + sum, sum - 1.0) : gap;
    }
    return gap;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pya_ps_forward_thin(struct pya_ops_ps a) {
    const struct thin_place p = thin_place(a);
    const bool mixture = a.log_weights.p != 0;
    const float gap = thin_gap(a, p);
    float x = -INFINITY;
    if (p.is_pair) {
        const struct component c = load_component(a, p.m, p.t, mixture);
        x = fmaf(c.kappa, gap_log_half(gap, bottom_of(c.kappa)), c.h);
    }
    float *out = (float *)a.out + p.t * a.out_t;
    if (!mixture) {
        if (p.is_pair) {
            out[p.l * a.out_l + p.m * a.out_m] = x;
        }
        return;
    }
    for (int l = 0; l < (int)a.n_l; l++) {
        const bool is_mine = p.is_pair && p.l == l;
        const float best = reduce16_max(fmaxf(-1e37f, is_mine ? x : -INFINITY));
        const float top = fmaxf(best, PYA_SHUFFLE(best, 16));
        const float sum = reduce32_add(is_mine ? expf(x - top) : 0.0f);
        if (p.has_t && p.lane == 0) {
            out[l * a.out_l] = sum == 0.0f ? -INFINITY : top + logf(sum);
        }
    }
}

/* A row of a gradient: the sum of n weights, step apart, times the rows of the other kind. */
static __device__ inline void
thin_gradient(
    struct pya_ops_view d, struct pya_ops_view others, const float *w, int step, int n, int row,
    const struct thin_place &p, int dim) {
    for (int k = p.lane; k < dim; k += 32) {
        float sum = 0.0f;
        for (int i = 0; i < n; i++) {
            sum = fmaf(w[i * step], thin_row(others, i, p.t)[k], sum);
        }
        ((float *)d.p)[row * d.i + p.t * d.t + k] = sum;
    }
}

/* Four blocks a multiprocessor: left alone, ptxas of CUDA 13.0 takes 40 registers on 8.0 and spills. */
extern "C" __global__ void __launch_bounds__(THREADS, 4)
pya_ps_backward_thin(struct pya_ops_ps a) {
    __shared__ float weights[THREADS];
    __shared__ float sums[2][THREADS]; /* G, and G log y */
    const struct thin_place p = thin_place(a);
    const bool mixture = a.log_weights.p != 0;
    const int n_l = (int)a.n_l;
    const int n_m = (int)a.n_m;
    const float gap = thin_gap(a, p);
    struct component c = {};
    float g = 0.0f;
    float gl = 0.0f;
    float w = 0.0f;
    if (p.is_pair) {
        c = load_component(a, p.m, p.t, mixture);
        if (!mixture) {
            g = ((const float *)a.grad)[p.l * a.grad_l + p.m * a.grad_m + p.t * a.grad_t];
        }
        w = pair_weight(gap, c, load_sample(a, p.l, p.t, mixture), mixture, &g, &gl);
    }
    weights[threadIdx.x] = w;
    sums[0][threadIdx.x] = g;
    sums[1][threadIdx.x] = gl;
    __syncthreads();
    if (!p.has_t) {
        return;
    }
    const float *mine = weights + p.warp * 32;
    for (int l = 0; a.d_value.p != 0 && l < n_l; l++) {
        thin_gradient(a.d_value, a.loc, mine + l * n_m, 1, n_m, l, p, (int)a.dim);
    }
    for (int m = 0; a.d_loc.p != 0 && m < n_m; m++) {
        thin_gradient(a.d_loc, a.value, mine + m, n_m, n_l, m, p, (int)a.dim);
    }
    if (!p.is_pair || p.l != 0) {
        return;
    }
    for (int l = 1; l < n_l; l++) {
        g += sums[0][threadIdx.x + l * n_m];
        gl += sums[1][threadIdx.x + l * n_m];
    }
    if (a.d_scale.p != 0) {
        ((float *)a.d_scale.p)[p.m * a.d_scale.i + p.t * a.d_scale.t] = fmaf(c.dh, g, gl);
    }
    if (a.d_log_weights.p != 0) {
        ((float *)a.d_log_weights.p)[p.m * a.d_log_weights.i + p.t * a.d_log_weights.t] = g;
    }
}
