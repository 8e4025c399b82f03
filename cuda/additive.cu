/* Additive attention; the formulas and the names are those of csrc/ops/additive.c. */
#include "args.h"
#include "tile.cuh"

static __device__ inline const float *
seq_row(struct pya_ops_view v, long long i, long long b) {
    return (const float *)v.p + i * v.i + b * v.t;
}

static __device__ inline bool
seq_is_on(const struct pya_ops_additive &a, long long b, long long s) {
    return a.mask == 0 || a.mask[b * a.mask_b + s * a.mask_s] != 0;
}

/* The block's sum or maximum; every thread gets it, in one fixed order. */
static __device__ inline float
block_reduce(float x, bool maximum) {
    __shared__ float part[THREADS];
    __syncthreads();
    part[threadIdx.x] = x;
    __syncthreads();
    for (int n = THREADS / 2; n > 0; n /= 2) {
        if ((int)threadIdx.x < n) {
            const float y = part[threadIdx.x + n];
            part[threadIdx.x] =
                maximum ? fmaxf(part[threadIdx.x], y) : part[threadIdx.x] + y;
        }
        __syncthreads();
    }
    return part[0];
}

/* blocks: queries * batch; a warp scores one s at a time; probs serve as the scores' room */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_additive_forward(struct pya_ops_additive a) {
    const struct parted block = block_part(a.n_q);
    const long long q = block.part;
    const long long b = block.rest;
    const int lane = threadIdx.x % 32;
    float *p = (float *)a.probs + (b * a.n_q + q) * a.n_s;
    const float *query = seq_row(a.query, q, b);
    for (long long s = threadIdx.x / 32; s < a.n_s; s += THREADS / 32) {
        const float *key = seq_row(a.keys, s, b);
        float sum = 0.0f;
        for (long long k = lane; k < a.n_h; k += 32) {
            sum = fmaf(((const float *)a.v)[k], tanhf(key[k] + query[k]), sum);
        }
        sum = reduce32_add(sum);
        if (lane == 0) {
            p[s] = seq_is_on(a, b, s) ? sum : -INFINITY;
        }
    }
    __syncthreads();
    float top = -INFINITY;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        top = fmaxf(top, p[s]);
    }
    top = block_reduce(top, true);
    float sum = 0.0f;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        p[s] = p[s] == -INFINITY ? 0.0f : expf(p[s] - top);
        sum += p[s];
    }
    sum = block_reduce(sum, false);
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        p[s] *= scale;
    }
    __syncthreads();
    float *out = (float *)a.context.p + q * a.context.i + b * a.context.t;
    for (long long e = threadIdx.x; e < a.n_e; e += THREADS) {
        float c = 0.0f;
        for (long long s = 0; s < a.n_s; s++) {
            if (!(p[s] <= 0.0f)) { /* what is hidden may hold anything; a NaN counts */
                c = fmaf(p[s], seq_row(a.values, s, b)[e], c);
            }
        }
        out[e] = c;
    }
}

/* ds = p (dp - sum p dp), kept in the workspace.  blocks: queries * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_additive_backward_scores(struct pya_ops_additive a) {
    const struct parted block = block_part(a.n_q);
    const long long q = block.part;
    const long long b = block.rest;
    const int lane = threadIdx.x % 32;
    const float *p = (const float *)a.probs + (b * a.n_q + q) * a.n_s;
    float *ds = (float *)a.workspace + (b * a.n_q + q) * a.n_s;
    const float *grad = seq_row(a.grad, q, b);
    for (long long s = threadIdx.x / 32; s < a.n_s; s += THREADS / 32) {
        const float *value = seq_row(a.values, s, b);
        float sum = 0.0f;
        for (long long e = lane; e < a.n_e; e += 32) {
            sum = fmaf(grad[e], value[e], sum);
        }
        sum = reduce32_add(sum);
        if (lane == 0) {
            ds[s] = sum + (a.grad_probs.p != 0 ? seq_row(a.grad_probs, q, b)[s] : 0.0f);
        }
    }
    __syncthreads();
    float mean = 0.0f;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        mean += p[s] <= 0.0f ? 0.0f : p[s] * ds[s]; /* a NaN counts */
    }
    mean = block_reduce(mean, false);
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        ds[s] = p[s] <= 0.0f ? 0.0f : p[s] * (ds[s] - mean);
    }
}

/* One thread owns one h through all s and queries: no two threads add to the same number.
 * blocks: H / 256 * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_additive_backward_keys(struct pya_ops_additive a) {
    const struct parted block = block_part((a.n_h + THREADS - 1) / THREADS);
    const long long b = block.rest;
    const long long k = (long long)block.part * THREADS + threadIdx.x;
    if (k >= a.n_h) {
        return;
    }
    const float v = ((const float *)a.v)[k];
    const float *ds = (const float *)a.workspace + b * a.n_q * a.n_s;
    float *d_query = (float *)a.d_query.p + b * a.d_query.t + k;
    float d_v = 0.0f;
    for (long long q = 0; q < a.n_q; q++) {
        const float query = seq_row(a.query, q, b)[k];
        float sum = 0.0f;
        for (long long s = 0; s < a.n_s; s++) {
            const float t = tanhf(seq_row(a.keys, s, b)[k] + query);
            const float w = ds[q * a.n_s + s];
            const float g = w * v * (1.0f - t * t);
            d_v = fmaf(w, t, d_v);
            sum += g;
            if (a.d_keys.p != 0) {
                float *d_key = (float *)a.d_keys.p + s * a.d_keys.i + b * a.d_keys.t + k;
                *d_key = a.accumulate || q > 0 ? *d_key + g : g;
            }
        }
        d_query[q * a.d_query.i] = sum;
    }
    ((float *)a.d_v)[b * a.n_h + k] = d_v;
}

/* blocks: E / 256 * S * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_additive_backward_values(struct pya_ops_additive a) {
    const struct parted block = block_part((a.n_e + THREADS - 1) / THREADS);
    const long long e = (long long)block.part * THREADS + threadIdx.x;
    const long long s = block.rest % (unsigned)a.n_s;
    const long long b = block.rest / (unsigned)a.n_s;
    if (e >= a.n_e) {
        return;
    }
    float *d_value = (float *)a.d_values.p + s * a.d_values.i + b * a.d_values.t + e;
    float sum = a.accumulate ? *d_value : 0.0f;
    for (long long q = 0; q < a.n_q; q++) {
        const float p = ((const float *)a.probs)[(b * a.n_q + q) * a.n_s + s];
        sum = fmaf(p, seq_row(a.grad, q, b)[e], sum);
    }
    *d_value = sum;
}
