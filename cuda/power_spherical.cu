/* PowerSpherical log-probability and mixture, forward and backward, by fp32 multiply-adds. */
#include "args.h"
#include "spherical.cuh"
#include "tile.cuh"

/* blocks: (components / 128 * samples / 128, t) */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_forward(struct pya_ops_ps a) {
    __shared__ float kappa[BIG];
    __shared__ float h[BIG];
    const struct parted block = block_part((a.n_m + BIG - 1) / BIG);
    const long long l0 = (long long)block.rest * BIG;
    const long long m0 = (long long)block.part * BIG;
    for (long long t = blockIdx.y; t < a.n_t; t += gridDim.y) {
        __syncthreads();
        if (threadIdx.x < BIG && m0 + threadIdx.x < a.n_m) {
            float unused;
            kappa[threadIdx.x] = view_at(a.scale, m0 + threadIdx.x, t);
            norm(kappa[threadIdx.x], (double)a.dim, &h[threadIdx.x], &unused);
        }
        float acc[8][8];
        big_multiply(
            acc, view_rows(a.value, l0, t, a.n_l - l0), view_rows(a.loc, m0, t, a.n_m - m0),
            (int)a.dim);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const long long l = l0 + big_row(i);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int c = big_column(j);
                if (l < a.n_l && m0 + c < a.n_m) {
                    ((float *)a.out)[l * a.out_l + (m0 + c) * a.out_m + t * a.out_t] =
                        log_prob(acc[i][j], kappa[c], bottom_of(kappa[c]), h[c]);
                }
            }
        }
    }
}

/* blocks: (samples / 128, t); components pass by 128 at a time */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_mixture_forward(struct pya_ops_ps a) {
    __shared__ float kappa[BIG];
    __shared__ float h[BIG];
    const long long l0 = (long long)blockIdx.x * BIG;
    for (long long t = blockIdx.y; t < a.n_t; t += gridDim.y) {
        float top[8];
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            top[i] = -1e37f;
            sum[i] = 0.0f;
        }
        for (long long m0 = 0; m0 < a.n_m; m0 += BIG) {
            __syncthreads();
            if (threadIdx.x < BIG) {
                const bool real = m0 + threadIdx.x < a.n_m;
                float unused;
                kappa[threadIdx.x] = real ? view_at(a.scale, m0 + threadIdx.x, t) : 0.0f;
                h[threadIdx.x] = -INFINITY;
                if (real) {
                    norm(kappa[threadIdx.x], (double)a.dim, &h[threadIdx.x], &unused);
                    h[threadIdx.x] += view_at(a.log_weights, m0 + threadIdx.x, t);
                }
            }
            float acc[8][8];
            big_multiply(
                acc, view_rows(a.value, l0, t, a.n_l - l0), view_rows(a.loc, m0, t, a.n_m - m0),
                (int)a.dim);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float best = top[i];
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int c = big_column(j);
                    acc[i][j] = log_prob(acc[i][j], kappa[c], bottom_of(kappa[c]), h[c]);
                    best = fmaxf(best, acc[i][j]);
                }
                best = reduce16_max(best);
                float s = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    s += expf(acc[i][j] - best);
                }
                sum[i] = sum[i] * expf(top[i] - best) + reduce16_add(s);
                top[i] = best;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const long long l = l0 + big_row(i);
            if (threadIdx.x % 16 == 0 && l < a.n_l) {
                ((float *)a.out)[l * a.out_l + t * a.out_t] =
                    sum[i] == 0.0f ? -INFINITY : top[i] + logf(sum[i]);
            }
        }
    }
}

/* Gradients of one side's rows: 64 own rows a block, the other side passes by 64 at a time.
 * of_loc: own rows are components (d_loc, d_scale, d_log_weights), else samples (d_value).
 * blocks: (own / 64 * D / 64, t) */
static __device__ inline void
backward_side(const struct pya_ops_ps &a, bool of_loc) {
    __shared__ struct component comp[SMALL];
    __shared__ struct sample samp[SMALL];
    __shared__ float w[SMALL][SMALL + 1];
    const bool mixture = a.log_weights.p != 0;
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const int dim = (int)a.dim;
    const long long n_own = of_loc ? a.n_m : a.n_l;
    const struct parted block = block_part((n_own + SMALL - 1) / SMALL);
    const int c0 = block.rest * WIDE;
    const long long own0 = (long long)block.part * SMALL;
    const long long n_other = of_loc ? a.n_l : a.n_m;
    const struct pya_ops_view own = of_loc ? a.loc : a.value;
    const struct pya_ops_view other = of_loc ? a.value : a.loc;
    const struct pya_ops_view d_own = of_loc ? a.d_loc : a.d_value;
    for (long long t = blockIdx.y; t < a.n_t; t += gridDim.y) {
        float d[4][4] = {};
        float sum_g[4] = {};
        float sum_gl[4] = {};
        for (long long o0 = 0; o0 < n_other; o0 += SMALL) {
            const long long l0 = of_loc ? o0 : own0;
            const long long m0 = of_loc ? own0 : o0;
            __syncthreads();
            if (threadIdx.x < SMALL) {
                comp[threadIdx.x] = load_component(a, m0 + threadIdx.x, t, mixture);
            } else if (threadIdx.x < 2 * SMALL) {
                const int l = threadIdx.x - SMALL;
                samp[l] = load_sample(a, l0 + l, t, mixture);
            }
            const rows others = view_rows(other, o0, t, n_other - o0);
            float u[4][4];
            small_multiply(u, view_rows(own, own0, t, n_own - own0), others, dim);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int l = of_loc ? tx + j : ty + i;
                    const int m = of_loc ? ty + i : tx + j;
                    float g = 0.0f;
                    float gl;
                    if (!mixture && l0 + l < a.n_l && m0 + m < a.n_m) {
                        g = ((const float *)
                                 a.grad)[(l0 + l) * a.grad_l + (m0 + m) * a.grad_m + t * a.grad_t];
                    }
                    w[ty + i][tx + j] = pair_weight(u[i][j], comp[m], samp[l], mixture, &g, &gl);
                    sum_g[i] += g;
                    sum_gl[i] += gl;
                }
            }
            if (d_own.p != 0) {
                wide_add(d, w, others, c0, dim);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const long long r = own0 + ty + i;
#pragma unroll
            for (int j = 0; j < 4 && d_own.p != 0; j++) {
                if (r < n_own && c0 + tx + j < dim) {
                    ((float *)d_own.p)[r * d_own.i + t * d_own.t + c0 + tx + j] = d[i][j];
                }
            }
            const float g = reduce16_add(sum_g[i]);
            const float gl = reduce16_add(sum_gl[i]);
            if (!of_loc || c0 != 0 || tx != 0 || r >= n_own) {
                continue;
            }
            if (a.d_scale.p != 0) {
                ((float *)a.d_scale.p)[r * a.d_scale.i + t * a.d_scale.t] =
                    fmaf(comp[ty + i].dh, g, gl);
            }
            if (a.d_log_weights.p != 0) {
                ((float *)a.d_log_weights.p)[r * a.d_log_weights.i + t * a.d_log_weights.t] = g;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_backward_loc(struct pya_ops_ps a) {
    backward_side(a, true);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_backward_value(struct pya_ops_ps a) {
    backward_side(a, false);
}
