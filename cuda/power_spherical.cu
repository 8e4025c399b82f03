/* PowerSpherical log-probability and mixture, forward and backward, on plain fp32 FMA. */
#include "args.h"
#include "spherical.cuh"
#include "tile.cuh"

/* Turns cosines into log-probabilities. */
static __device__ inline void
big_log_probs(float acc[8][8], const struct columns &of, const rows both[2], int dim) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
        unsigned coarse = 0;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int c = big_column(n % 8);
            float *x = &acc[half + n / 8][n % 8];
            coarse |= is_coarse(*x, of.low, of.high[c]) ? 1u << n : 0;
            *x = log_prob(*x, of.kappa[c], of.h[c]);
        }
        while (coarse != 0) {
            const int n = take_lowest(&coarse);
            const int row = big_row(half + n / 8);
            const int c = big_column(n % 8);
            if (row >= both[0].n || c >= both[1].n) {
                continue;
            }
            const float x = sharp_log_prob(of, both, row, c, dim);
#pragma unroll
            for (int k = 0; k < 32; k++) { /* a variable index would force acc out of the registers */
                float *to = &acc[half + k / 8][k % 8];
                *to = k == n ? x : *to;
            }
        }
    }
}

/* blocks: (components / 128 * samples / 128, t) */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_forward(struct pya_ops_ps a) {
    __shared__ struct columns of;
    const struct parted block = block_part((a.n_m + BIG - 1) / BIG);
    const long long l0 = (long long)block.rest * BIG;
    const long long m0 = (long long)block.part * BIG;
    for (long long t = blockIdx.y; t < a.n_t; t += gridDim.y) {
        __syncthreads();
        put_columns(&of, a, m0, t, false);
        const rows both[2] = {
            view_rows(a.value, l0, t, a.n_l - l0), view_rows(a.loc, m0, t, a.n_m - m0)};
        float acc[8][8];
        big_multiply(acc, both[0], both[1], (int)a.dim);
        big_log_probs(acc, of, both, (int)a.dim);
        float *out = (float *)a.out + l0 * a.out_l + m0 * a.out_m + t * a.out_t;
#pragma unroll
        for (int n = 0; n < 64; n++) {
            const int row = big_row(n / 8);
            const int c = big_column(n % 8);
            if (row < both[0].n && c < both[1].n) {
                out[row * a.out_l + c * a.out_m] = acc[n / 8][n % 8];
            }
        }
    }
}

/* blocks: (samples / 128, t); a block loops over the components, 128 at a time */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_ps_mixture_forward(struct pya_ops_ps a) {
    __shared__ struct columns of;
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
            put_columns(&of, a, m0, t, true);
            const rows both[2] = {
                view_rows(a.value, l0, t, a.n_l - l0), view_rows(a.loc, m0, t, a.n_m - m0)};
            float acc[8][8];
            big_multiply(acc, both[0], both[1], (int)a.dim);
            big_log_probs(acc, of, both, (int)a.dim);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float best = top[i];
#pragma unroll
                for (int j = 0; j < 8; j++) {
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

/* Turns the thread's 16 cosines into gaps: rows from ty and columns from tx on, which are components or, if of_loc,
 * samples. */
static __device__ inline void
small_gaps(
    float u[4][4], const struct component *comp, rows own, rows others, bool of_loc, int dim,
    float low) {
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    unsigned coarse = 0;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const float high = comp[of_loc ? ty + n / 4 : tx + n % 4].high;
        coarse |= is_coarse(u[n / 4][n % 4], low, high) ? 1u << n : 0;
        u[n / 4][n % 4] = gap_of(u[n / 4][n % 4]);
    }
    while (coarse != 0) {
        const int n = take_lowest(&coarse);
        if (ty + n / 4 >= own.n || tx + n % 4 >= others.n) {
            continue;
        }
        const float gap = sharp_gap(own, others, ty + n / 4, tx + n % 4, dim);
#pragma unroll
        for (int k = 0; k < 16; k++) {
            u[k / 4][k % 4] = k == n ? gap : u[k / 4][k % 4];
        }
    }
}

/* Gradients of one side's rows: a block has 64 rows of its own and loops over the other side, 64 at a time.
 * of_loc: its rows are components (d_loc, d_scale, d_log_weights), else samples (d_value).
 * blocks: (own / 64 * D / 64, t) */
static __device__ inline void
backward_side(const struct pya_ops_ps &a, bool of_loc) {
    __shared__ struct component comp[SMALL];
    __shared__ double totals[2][SMALL]; /* G, G times the slope of scale; a row's first thread's */
    __shared__ struct sample samp[SMALL];
    __shared__ float w[SMALL][SMALL + 1];
    const bool mixture = a.log_weights.p != 0;
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const int dim = (int)a.dim;
    const float low = ps_low(a.dim);
    const long long n_own = of_loc ? a.n_m : a.n_l;
    const struct parted block = block_part((n_own + SMALL - 1) / SMALL);
    const int c0 = block.rest * WIDE;
    const bool of_sums = of_loc && c0 == 0 && tx == 0;
    const long long own0 = (long long)block.part * SMALL;
    const long long n_other = of_loc ? a.n_l : a.n_m;
    const struct pya_ops_view own = of_loc ? a.loc : a.value;
    const struct pya_ops_view other = of_loc ? a.value : a.loc;
    const struct pya_ops_view d_own = of_loc ? a.d_loc : a.d_value;
    for (long long t = blockIdx.y; t < a.n_t; t += gridDim.y) {
        float d[4][4] = {};
        if (of_sums) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                totals[0][ty + i] = totals[1][ty + i] = 0.0;
            }
        }
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
            const rows owns = view_rows(own, own0, t, n_own - own0);
            float u[4][4];
            small_multiply(u, owns, others, dim);
            small_gaps(u, comp, owns, others, of_loc, dim, low);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 sum_g = {0.0f, 0.0f};
                float2 sum_gs = {0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int l = of_loc ? tx + j : ty + i;
                    const int m = of_loc ? ty + i : tx + j;
                    float g = 0.0f;
                    float slope;
                    if (!mixture && l0 + l < a.n_l && m0 + m < a.n_m) {
                        g = ((const float *)
                                 a.grad)[(l0 + l) * a.grad_l + (m0 + m) * a.grad_m + t * a.grad_t];
                    }
                    w[ty + i][tx + j] = pair_weight(u[i][j], comp[m], samp[l], mixture, &g, &slope);
                    if (of_loc && c0 == 0) {
                        sum_add(&sum_g, g);
                        sum_add_product(&sum_gs, g, slope);
                    }
                }
                if (of_loc && c0 == 0) {
                    sum_g = sum_reduce16(sum_g);
                    sum_gs = sum_reduce16(sum_gs);
                }
                if (of_sums) {
                    totals[0][ty + i] += sum_total(sum_g);
                    totals[1][ty + i] += sum_total(sum_gs);
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
            if (!of_sums || r >= n_own) {
                continue;
            }
            if (a.d_scale.p != 0) {
                ((float *)a.d_scale.p)[r * a.d_scale.i + t * a.d_scale.t] =
                    (float)totals[1][ty + i];
            }
            if (a.d_log_weights.p != 0) {
                ((float *)a.d_log_weights.p)[r * a.d_log_weights.i + t * a.d_log_weights.t] =
                    (float)totals[0][ty + i];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pya_ps_backward_loc(struct pya_ops_ps a) {
    backward_side(a, true);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pya_ps_backward_value(struct pya_ops_ps a) {
    backward_side(a, false);
}

/* One number of a component: the sum of what n chunks of samples contribute. */
static __device__ inline void
add_chunks(struct pya_ops_view to, struct pya_ops_view from, long long n, long long m, long long k) {
    if (to.p == 0) {
        return;
    }
    double sum = 0.0;
#pragma unroll 8
    for (long long c = 0; c < n; c++) {
        sum += (double)((const float *)from.p)[m * from.i + c * from.t + k];
    }
    ((float *)to.p)[m * to.i + k] = (float)sum;
}

/* Sums n_t chunks, in loc, scale and log_weights.  blocks: components * D / 256 */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_ps_backward_sum(struct pya_ops_ps a) {
    const long long n = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long m = n / a.dim;
    const long long k = n % a.dim;
    if (m >= a.n_m) {
        return;
    }
    add_chunks(a.d_loc, a.loc, a.n_t, m, k);
    if (k == 0) {
        add_chunks(a.d_scale, a.scale, a.n_t, m, 0);
        add_chunks(a.d_log_weights, a.log_weights, a.n_t, m, 0);
    }
}
