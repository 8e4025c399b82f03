/* The PowerSpherical forward kernels for cards with fast tensor cores, used from 64 dimensions on. */
#include "spherical_tensor.cuh"

#ifdef PYA_TENSOR

/* Marks each thread's cosines that were too coarse: bit 4 j + e of part i stands for acc[i][j][e].  In shared memory,
 * where it takes no registers. */
typedef unsigned marks[2][THREADS];

/* log((1 + u) / 2) of a cosine that is not too coarse, bitwise as from its gap; undefined for others. */
static __device__ inline float
log_half(float u) {
    return log_beside(-__saturatef(fmaf(-0.5f, u, 0.5f)), 1.0f);
}

/* Turns cosines into log-probabilities and sets the marks; marked ones must be recomputed. */
static __device__ inline void
pair_log_probs(patch acc, const struct columns &of, marks coarse) {
    const struct place p = my_place();
    const bool none = none_is_coarse(acc, of.low, [&](int c) { return of.high[c]; });
#pragma unroll
    for (int part = 0; part < 2; part++) {
        unsigned found = 0;
#pragma unroll
        for (int n = 0; n < 32 && !none; n++) {
            const int c = tensor_column(p, n / 4, n % 4);
            found |= is_to_be_made_again(acc[part][n / 4][n % 4], of.low, of.high[c]) ? 1u << n : 0;
        }
        coarse[part][threadIdx.x] = found;
    }
#pragma unroll
    for (int n = 0; n < 64; n++) {
        const int c = tensor_column(p, n / 4 % 8, n % 4);
        float *x = &acc[n / 32][n / 4 % 8][n % 4];
        *x = fmaf(of.kappa[c], log_half(*x), of.h[c]);
    }
}

/* Addresses all results relative to the thread's first one, because registers are scarce. */
static __device__ inline void
forward_store(const struct pya_ops_ps &a, const patch acc, int l0, int m0, int t) {
    const struct place p = my_place();
    const bool packed = pairs_are_aligned(a.out, a.out_m, a.out_l, a.out_t);
    const int l = l0 + tensor_row(p, 0, 0);
    const int m = m0 + tensor_column(p, 0, 0);
    const int n_l = a.n_l - l < BIG ? (int)(a.n_l - l) : BIG;
    const int n_m = a.n_m - m < BIG ? (int)(a.n_m - m) : BIG;
    float *out = (float *)a.out + l * a.out_l + m * a.out_m + t * a.out_t;
    const bool whole = packed && a.n_m - m0 >= BIG;
    if (whole && a.n_l - l0 >= BIG) { /* nearly always */
#pragma unroll
        for (int r = 0; r < 4; r++, out += 8 * a.out_l) {
            store_row(out, acc, r);
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 4; r++, out += 8 * a.out_l) {
        if (8 * r >= n_l) {
            break;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float *x = &acc[r / 2][j][r % 2 * 2];
            if (8 * j < n_m) {
                out[8 * j * a.out_m] = x[0];
            }
            if (8 * j + 1 < n_m) {
                out[(8 * j + 1) * a.out_m] = x[1];
            }
        }
    }
}

/* blocks: (components / 128 * samples / 128, t) */
extern "C" __global__ void
__launch_bounds__(THREADS, 2) pya_ps_forward_tensor(struct pya_ops_ps a) {
    PYA_DYNAMIC(room);
    __shared__ struct columns of;
    __shared__ marks coarse;
    __shared__ rows both[2];
    const int dim = (int)a.dim;
    __shared__ int first[2]; /* sample and component of the block; shared to save registers */
    if (threadIdx.x == 0) {
        const struct parted block = block_part((a.n_m + BIG - 1) / BIG);
        first[0] = block.rest * BIG;
        first[1] = block.part * BIG;
    }
    __syncthreads();
    for (int t = blockIdx.y; t < (int)a.n_t; t += gridDim.y) {
        stage_views(a, both, first[0], first[1], t);
        pair_start(room, both[0], both[1], dim);
        put_columns(&of, a, first[1], t, false);
        patch acc;
        pair_finish(acc, room, both[0], both[1], dim);
        pair_log_probs(acc, of, coarse);
        forward_store(a, acc, first[0], first[1], t);
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            for_marked(coarse[part][threadIdx.x], part, both, [&](int row, int c, bool is_there) {
                if (!is_there) {
                    return;
                }
                float *out = (float *)a.out + t * a.out_t;
                out[(first[0] + row) * a.out_l + (first[1] + c) * a.out_m] =
                    sharp_log_prob(of, both, row, c, dim);
            });
        }
    }
}

/* Adds the terms of 16 components to the running logsumexp of a row, over all columns of the warp. */
static __device__ inline void
mixture_add(float terms[16], float *top, float *sum) {
    float best = *top;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        best = fmaxf(best, terms[n]);
    }
    best = reduce4_max(best);
    float s = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        /* its relative error is large only for terms far below the largest, which hardly matter */
        s += exp_about(terms[n] - best);
    }
    *sum = *sum * expf(*top - best) + reduce4_add(s);
    *top = best;
}

/* Adds a row's terms to its sum in shared memory. */
static __device__ inline void
mixture_row(float terms[16], float2 *at) {
    /* only the lane that writes may read, because a shuffle does not order the lanes */
    const bool is_mine = threadIdx.x % 4 == 0;
    const float2 none = {-1e37f, 0.0f};
    float2 value = is_mine ? *at : none;
    mixture_add(terms, &value.x, &value.y);
    if (is_mine) {
        *at = value;
    }
}

/* Adds 128 components, by their gaps, to the running logsumexp of the rows. */
static __device__ inline void
mixture_tile(const float *gaps, const struct component *comp, float2 (*running)[BIG]) {
    const struct place p = my_place();
    float kappa[16];
    float h[16];
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const int c = tensor_column(p, n / 2, n % 2);
        kappa[n] = comp[c].kappa;
        h[n] = comp[c].h;
    }
#pragma unroll 1
    for (int r = 0; r < 4; r++) {
        const int row = p.row + p.g + r * 8;
        float terms[16];
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            get_pair(gaps + row * W_STRIDE + tensor_column(p, n / 2, 0), terms + n, terms + n + 1);
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
            terms[n] = fmaf(kappa[n], gap_log_half(terms[n], bottom_of(kappa[n])), h[n]);
        }
        mixture_row(terms, &running[p.column / 64][row]);
    }
}

/* The same from cosines, none of which is too coarse. */
static __device__ inline void
mixture_fine(const patch acc, const struct component *comp, float2 (*running)[BIG]) {
    const struct place p = my_place();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float terms[16];
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const struct component c = comp[tensor_column(p, n / 2, n % 2)];
            terms[n] = fmaf(c.kappa, log_half(acc[r / 2][n / 2][r % 2 * 2 + n % 2]), c.h);
        }
        mixture_row(terms, &running[p.column / 64][p.row + p.g + r * 8]);
    }
}

/* blocks: (samples / 128, t); a block loops over the components, 128 at a time */
extern "C" __global__ void
__launch_bounds__(THREADS, 2) pya_ps_mixture_forward_tensor(struct pya_ops_ps a) {
    PYA_DYNAMIC(room);
    __shared__ struct component comp[BIG];
    __shared__ float low;
    __shared__ float2
        running[2][BIG]; /* for each warp's columns: largest term, sum relative to it */
    __shared__ bool wild;
    __shared__ rows both[2];
    const int dim = (int)a.dim;
    const int l0 = blockIdx.x * BIG;
    for (int t = blockIdx.y; t < (int)a.n_t; t += gridDim.y) {
        __syncthreads();
        const float2 none = {-1e37f, 0.0f};
        running[threadIdx.x / BIG][threadIdx.x % BIG] = none;
        for (int m0 = 0; m0 < (int)a.n_m; m0 += BIG) {
            stage_views(a, both, l0, m0, t);
            pair_start(room, both[0], both[1], dim);
            if (threadIdx.x < BIG) {
                comp[threadIdx.x] = load_component(a, m0 + threadIdx.x, t, true);
            } else {
                low = ps_low(a.dim); /* all threads write the same */
            }
            patch acc;
            pair_finish(acc, room, both[0], both[1], dim);
            if (any_lane(!none_is_coarse(acc, low, [&](int c) { return comp[c].high; }))) {
                put_gaps(room, acc, comp, low, both, dim, &wild);
                mixture_tile(room, comp, running);
            } else {
                mixture_fine(acc, comp, running);
            }
        }
        __syncthreads();
        const int l = l0 + threadIdx.x;
        if (threadIdx.x < BIG && l < a.n_l) {
            float best = -1e37f;
            for (int n = 0; n < 2; n++) {
                best = fmaxf(best, running[n][threadIdx.x].x);
            }
            float s = 0.0f;
            for (int n = 0; n < 2; n++) {
                s += running[n][threadIdx.x].y * expf(running[n][threadIdx.x].x - best);
            }
            ((float *)a.out)[l * a.out_l + t * a.out_t] = s == 0.0f ? -INFINITY : best + logf(s);
        }
    }
}

#endif
