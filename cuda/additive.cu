/* Additive attention; the formulas and the names are those of csrc/ops/additive.c.  A step of a decoder is bound by
 * memory, and small: its work is cut over as many blocks as there is room for, and a thread asks for AHEAD numbers
 * before it uses the first. */
#include "args.h"
#include "tile.cuh"

enum {
    WARPS = THREADS / 32,
    AHEAD = 8,
    SPAN = 8,          /* rows of values whose gradients a thread makes */
    KEY_THREADS = 128, /* of the kernel for keys, which has few blocks: half as large, they spread better */
};

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
block_reduce(float x, bool maximum, int n_warps) {
    __shared__ float part[WARPS];
    for (int m = 16; m > 0; m >>= 1) {
        const float y = PYA_SHUFFLE(x, m);
        x = maximum ? fmaxf(x, y) : x + y;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = part[0];
    for (int n = 1; n < n_warps; n++) {
        x = maximum ? fmaxf(x, part[n]) : x + part[n];
    }
    return x;
}

/* Of blocks that count through parts, queries and the batch. */
struct query_part {
    unsigned part;
    long long q, b;
};

static __device__ inline struct query_part
block_query_part(long long n_parts, long long n_q) {
    const struct parted block = block_part(n_parts);
    struct query_part p = {block.part, block.rest % (unsigned)n_q, block.rest / (unsigned)n_q};
    return p;
}

/* Number k of a row of n, zero beyond. */
static __device__ inline float
number_at(const float *row, long long k, long long n) {
    return k < n ? row[k] : 0.0f;
}

/* What this lane has of a row of n from number k on. */
static __device__ inline void
row_fetch(float x[AHEAD], const float *row, long long k, long long n) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        x[i] = number_at(row, k + 32 * i, n);
    }
}

/* Scores, into the workspace.  blocks: keys / 8 * queries * batch, a warp for each key */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_additive_scores(struct pya_ops_additive a) {
    const struct query_part block = block_query_part((a.n_s + WARPS - 1) / WARPS, a.n_q);
    const long long s = (long long)block.part * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (s >= a.n_s) {
        return;
    }
    const bool is_on = seq_is_on(a, block.b, s);
    const long long n = is_on ? a.n_h : 0; /* what is hidden is not even read */
    const float *key = seq_row(a.keys, s, block.b);
    const float *query = seq_row(a.query, block.q, block.b);
    const float *v = (const float *)a.v;
    float sum = 0.0f;
    float x[AHEAD];
    row_fetch(x, key, lane, n);
    for (long long k = lane; k < n; k += 32 * AHEAD) {
        float next[AHEAD];
        row_fetch(next, key, k + 32 * AHEAD, n);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float t = tanhf(x[i] + number_at(query, k + 32 * i, n));
            sum = fmaf(number_at(v, k + 32 * i, n), t, sum);
            x[i] = next[i];
        }
    }
    sum = reduce32_add(sum);
    if (lane == 0) {
        ((float *)a.workspace)[(block.b * a.n_q + block.q) * a.n_s + s] = is_on ? sum : -INFINITY;
    }
}

/* Probabilities and context.  blocks: E / 256 * queries * batch, each with the softmax of its query */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_additive_context(struct pya_ops_additive a) {
    __shared__ float p[THREADS];
    const struct query_part block = block_query_part((a.n_e + THREADS - 1) / THREADS, a.n_q);
    const long long row = (block.b * a.n_q + block.q) * a.n_s;
    const float *score = (const float *)a.workspace + row;
    const long long e = (long long)block.part * THREADS + threadIdx.x;
    float top = -INFINITY;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        top = fmaxf(top, score[s]);
    }
    top = block_reduce(top, true, WARPS);
    float sum = 0.0f;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        sum += score[s] == -INFINITY ? 0.0f : expf(score[s] - top);
    }
    sum = block_reduce(sum, false, WARPS);
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    float c = 0.0f;
    for (long long s0 = 0; s0 < a.n_s; s0 += THREADS) {
        const long long s = s0 + threadIdx.x;
        __syncthreads();
        float x = 0.0f;
        if (s < a.n_s) {
            x = score[s] == -INFINITY ? 0.0f : expf(score[s] - top) * scale;
            if (block.part == 0) {
                ((float *)a.probs)[row + s] = x;
            }
        }
        p[threadIdx.x] = x;
        __syncthreads();
        const int n = e < a.n_e ? (int)(a.n_s - s0 < THREADS ? a.n_s - s0 : THREADS) : 0;
        const float *value = seq_row(a.values, s0, block.b) + e;
        for (int i0 = 0; i0 < n; i0 += AHEAD) {
            float y[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) { /* what is hidden may hold anything; a NaN counts */
                y[i] = !(p[i0 + i] <= 0.0f) ? value[(i0 + i) * a.values.i] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                c = fmaf(p[i0 + i], y[i], c);
            }
        }
    }
    if (e < a.n_e) {
        ((float *)a.context.p)[block.q * a.context.i + block.b * a.context.t + e] = c;
    }
}

/* The probabilities' gradients dp, into the workspace, 0 where nothing is attended to.
 * blocks: keys / 8 * queries * batch, a warp for each key */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_additive_backward_probs(struct pya_ops_additive a) {
    const struct query_part block = block_query_part((a.n_s + WARPS - 1) / WARPS, a.n_q);
    const long long s = (long long)block.part * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (s >= a.n_s) {
        return;
    }
    const long long at = (block.b * a.n_q + block.q) * a.n_s + s;
    const bool is_on = !(((const float *)a.probs)[at] <= 0.0f); /* a NaN counts */
    const long long n = is_on ? a.n_e : 0;
    const float *value = seq_row(a.values, s, block.b);
    const float *grad = seq_row(a.grad, block.q, block.b);
    float sum = 0.0f;
    float x[AHEAD];
    row_fetch(x, value, lane, n);
    for (long long e = lane; e < n; e += 32 * AHEAD) {
        float next[AHEAD];
        row_fetch(next, value, e + 32 * AHEAD, n);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            sum = fmaf(x[i], number_at(grad, e + 32 * i, n), sum);
            x[i] = next[i];
        }
    }
    sum = reduce32_add(sum);
    if (lane == 0) {
        const bool has_more = is_on && a.grad_probs.p != 0;
        sum += has_more ? seq_row(a.grad_probs, block.q, block.b)[s] : 0.0f;
        ((float *)a.workspace)[at] = sum;
    }
}

/* The scores' gradients ds = p (dp - sum p dp) of n keys from s0 on, zeros beyond, for all threads to read. */
static __device__ inline void
put_score_gradients(float ds[KEY_THREADS], const float *p, const float *dp, float mean, long long n) {
    __syncthreads();
    const bool is_on = (long long)threadIdx.x < n && !(p[threadIdx.x] <= 0.0f);
    ds[threadIdx.x] = is_on ? p[threadIdx.x] * (dp[threadIdx.x] - mean) : 0.0f;
    __syncthreads();
}

/* One thread owns one h through all s and queries: no two threads add to the same number.
 * blocks: H / 128 * batch */
extern "C" __global__ void __launch_bounds__(KEY_THREADS)
pya_additive_backward_keys(struct pya_ops_additive a) {
    __shared__ float ds[KEY_THREADS];
    const struct parted block = block_part((a.n_h + KEY_THREADS - 1) / KEY_THREADS);
    const long long b = block.rest;
    const long long k = (long long)block.part * KEY_THREADS + threadIdx.x;
    const bool exists = k < a.n_h;
    const float v = number_at((const float *)a.v, k, a.n_h);
    float d_v = 0.0f;
    for (long long q = 0; q < a.n_q; q++) {
        const float *p = (const float *)a.probs + (b * a.n_q + q) * a.n_s;
        const float *dp = (const float *)a.workspace + (b * a.n_q + q) * a.n_s;
        float mean = 0.0f;
        for (long long s = threadIdx.x; s < a.n_s; s += KEY_THREADS) {
            mean += p[s] <= 0.0f ? 0.0f : p[s] * dp[s];
        }
        mean = block_reduce(mean, false, KEY_THREADS / 32);
        const float query = number_at(seq_row(a.query, q, b), k, a.n_h);
        const bool add = a.accumulate || q > 0;
        float sum = 0.0f;
        for (long long s0 = 0; s0 < a.n_s; s0 += KEY_THREADS) {
            put_score_gradients(ds, p + s0, dp + s0, mean, a.n_s - s0);
            const int n = exists ? (int)(a.n_s - s0 < KEY_THREADS ? a.n_s - s0 : KEY_THREADS) : 0;
            const float *key = seq_row(a.keys, s0, b) + k;
            float *d_key = (float *)a.d_keys.p;
            d_key += d_key == 0 ? 0 : s0 * a.d_keys.i + b * a.d_keys.t + k;
            for (int i0 = 0; i0 < n; i0 += AHEAD) {
                float x[AHEAD];
                float before[AHEAD];
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const bool is_wanted = d_key != 0 && add && i0 + i < n;
                    x[i] = ds[i0 + i] != 0.0f ? key[(i0 + i) * a.keys.i] : 0.0f;
                    before[i] = is_wanted ? d_key[(i0 + i) * a.d_keys.i] : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    const float t = tanhf(x[i] + query);
                    const float g = ds[i0 + i] * v * (1.0f - t * t);
                    d_v = fmaf(ds[i0 + i], t, d_v);
                    sum += g;
                    if (d_key != 0 && i0 + i < n) {
                        d_key[(i0 + i) * a.d_keys.i] = before[i] + g;
                    }
                }
            }
        }
        if (exists) {
            ((float *)a.d_query.p)[q * a.d_query.i + b * a.d_query.t + k] = sum;
        }
    }
    if (exists) {
        ((float *)a.d_v)[b * a.n_h + k] = d_v;
    }
}

/* blocks: E / 256 * S / 8 * batch */
extern "C" __global__ void __launch_bounds__(THREADS)
pya_additive_backward_values(struct pya_ops_additive a) {
    const struct parted block = block_part((a.n_e + THREADS - 1) / THREADS);
    const long long e = (long long)block.part * THREADS + threadIdx.x;
    const unsigned n_spans = (unsigned)((a.n_s + SPAN - 1) / SPAN);
    const long long s0 = (long long)(block.rest % n_spans) * SPAN;
    const long long b = block.rest / n_spans;
    const int n = (int)(a.n_s - s0 < SPAN ? a.n_s - s0 : SPAN);
    if (e >= a.n_e) {
        return;
    }
    float *d_value = (float *)a.d_values.p + s0 * a.d_values.i + b * a.d_values.t + e;
    const float *p = (const float *)a.probs + b * a.n_q * a.n_s + s0;
    float sum[SPAN];
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        sum[i] = a.accumulate && i < n ? d_value[i * a.d_values.i] : 0.0f;
    }
    for (long long q = 0; q < a.n_q; q++) {
        const float grad = seq_row(a.grad, q, b)[e];
#pragma unroll
        for (int i = 0; i < SPAN; i++) {
            sum[i] = fmaf(number_at(p + q * a.n_s, i, n), grad, sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < SPAN; i++) {
        if (i < n) {
            d_value[i * a.d_values.i] = sum[i];
        }
    }
}
