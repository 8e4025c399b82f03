/* Additive attention backward: the gradients of values and probabilities, then of keys, query and v. */
#include "additive.cuh"

enum { MOST_WARPS = 12 }; /* in a block of the gradient of keys */

/* Quads of keys loaded at once, depending on whether their gradients are stored or added to what is there. */
static __device__ constexpr int
keys_ahead(bool is_wide, bool adds) {
    return is_wide ? (adds ? 3 : 5) : 1;
}

template <bool WIDE>
static __device__ inline float
value_dot(const float *value, const float *grad, int n, bool is_once) {
    constexpr int N = ahead(WIDE);
    float sum = 0.0f;
    for (int k0 = 0; k0 < n; k0 += SPREAD * N) {
        const int k = quad_place<WIDE>(k0);
        struct quad x[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = quad_load_once<WIDE>(value, k + i * SPREAD, n, is_once);
        }
        loads_first();
#pragma unroll
        for (int i = 0; i < N; i++) {
            const struct quad g = quad_load<WIDE>(grad, k + i * SPREAD, n);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum = fmaf(x[i].x[j], g.x[j], sum);
            }
        }
    }
    return reduce32_add(sum);
}

/* A warp's place in the backward: key s of query q of entry b. */
struct seq_place {
    unsigned b, q, s;
};

/* The gradient of a row of values; the warps of its queries take 128 columns each, in turns. */
template <bool WIDE>
static __device__ inline void
put_value_gradient(const struct pya_ops_additive &a, struct seq_place at) {
    constexpr int N = ahead(WIDE) / 2;
    float *d_value = seq_row_to(a.d_values, at.s, at.b);
    const float *p = (const float *)a.probs + (long long)at.b * a.n_q * a.n_s + at.s;
    const int n = (int)a.n_e;
    const int n_q = (int)a.n_q;
    const int n_groups = (n + SPREAD - 1) / SPREAD;
    const int step = n_q < n_groups ? n_q : n_groups; /* with many queries most warps have none: 32 bits will do */
    for (int g = (int)at.q; g < n_groups; g += step * N) {
        struct quad sum[N];
        int k[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            k[i] = quad_place<WIDE>((g + i * step) * SPREAD);
            sum[i] = quad_load_once<WIDE>(d_value, k[i], a.accumulate ? n : 0);
        }
#pragma unroll 1 /* one query is the usual case; unrolling would spill */
        for (int q = 0; q < n_q; q++) {
            const float *grad = seq_row(a.grad, q, at.b);
            const float weight = p[q * a.n_s];
#pragma unroll
            for (int i = 0; i < N; i++) {
                quad_add(&sum[i], weight, quad_load<WIDE>(grad, k[i], n));
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            quad_store<WIDE>(d_value, k[i], n, sum[i]);
        }
    }
}

template <bool WIDE>
static __device__ inline void
backward_row(const struct pya_ops_additive &a, struct seq_place at) {
    const long long n = ((long long)at.b * a.n_q + at.q) * a.n_s + at.s;
    const bool is_on = !(((const float *)a.probs)[n] <= 0.0f); /* a NaN counts */
    const float *value = seq_row(a.values, at.s, at.b);
    const float sum = value_dot<WIDE>(
        value, seq_row(a.grad, at.q, at.b), is_on ? (int)a.n_e : 0, value_is_once(a, (int)at.s));
    if (threadIdx.x % 32 == 0) {
        const bool has_more = is_on && a.grad_probs.p != 0;
        ((float *)a.workspace)[n] =
            sum + (has_more ? seq_row(a.grad_probs, at.q, at.b)[at.s] : 0.0f);
    }
    if (a.d_values.p != 0) {
        put_value_gradient<WIDE>(a, at);
    }
}

/* The gradients dp of the probabilities, into the workspace (0 for masked keys), and of the values: one is bound by
 * reading, the other by writing.  blocks: keys * queries * batch / 8, a warp for each */
extern "C" __global__ void __launch_bounds__(THREADS, STREAM_BLOCKS)
pya_additive_backward_values(struct pya_ops_additive a) {
    const unsigned n = blockIdx.x * WARPS + threadIdx.x / 32;
    const unsigned row = n / (unsigned)a.n_s;
    const struct seq_place at = {row / (unsigned)a.n_q, row % (unsigned)a.n_q, n % (unsigned)a.n_s};
    if (at.b >= a.n_b) {
        return;
    }
    if (a.n_e % 4 == 0 && seq_is_wide(a.values) && seq_is_wide(a.grad) && seq_is_wide(a.d_values)) {
        backward_row<true>(a, at);
    } else {
        backward_row<false>(a, at);
    }
}

static __device__ inline int
block_warps() {
    return (int)blockDim.x / 32;
}

/* Sum over keys of p dp; computed by each warp for itself. */
static __device__ inline float
probs_mean(const float *p, const float *dp, long long n) {
    float mean = 0.0f;
    for (long long s = threadIdx.x % 32; s < n; s += 32) {
        mean += p[s] <= 0.0f ? 0.0f : p[s] * dp[s];
    }
    return reduce32_add(mean);
}

/* The scores' gradients ds = p (dp - sum p dp) of one key per thread; zeros from n on. */
static __device__ inline void
put_score_gradients(
    float ds[32 * MOST_WARPS], const float *p, const float *dp, float mean, long long n) {
    __syncthreads();
    const bool is_on = (long long)threadIdx.x < n && !(p[threadIdx.x] <= 0.0f);
    ds[threadIdx.x] = is_on ? p[threadIdx.x] * (dp[threadIdx.x] - mean) : 0.0f;
    __syncthreads();
}

/* Loads this thread's numbers of the warp's next N rows of keys, which are as many rows apart as there are warps; masked
 * rows are not read. */
template <bool WIDE, int N>
static __device__ inline void
keys_fetch(
    struct quad x[N], const struct pya_ops_additive &a, const float *key, const float *p, int i,
    int n, int k) {
    const int warps = block_warps();
#pragma unroll
    for (int m = 0; m < N; m++) {
        const int s = i + m * warps;
        const bool is_on = s < n && !(p[s] <= 0.0f);
        x[m] = quad_load<WIDE>(key + s * a.keys.i, k, is_on ? (int)a.n_h : 0);
    }
}

/* Sums x over the warps; the first warp gets the result. */
static __device__ inline void
warps_add(struct quad *x, struct quad all[MOST_WARPS][32]) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    all[threadIdx.x / 32][lane] = *x;
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int n = 1; n < block_warps(); n++) {
            quad_add(x, 1.0f, all[n][lane]);
        }
    }
}

/* 128 columns of one query. */
struct key_columns {
    int b, q, k;
    struct quad d_v, d_query; /* what this warp adds */
};

/* Each warp takes every n-th key, n the number of warps, so that no two threads add to the same number.
 * ADDS: add to the keys' gradients. */
template <bool WIDE, bool ADDS>
static __device__ inline void
backward_query(const struct pya_ops_additive &a, struct key_columns *c) {
    __shared__ float ds[32 * MOST_WARPS];
    constexpr int N = keys_ahead(WIDE, ADDS);
    const int warp = threadIdx.x / 32;
    const int warps = block_warps();
    const int tile = 32 * warps;
    const float *p = (const float *)a.probs + (c->b * a.n_q + c->q) * a.n_s;
    const float *dp = (const float *)a.workspace + (c->b * a.n_q + c->q) * a.n_s;
    float mean = 0.0f;
    for (long long s0 = 0; s0 < a.n_s; s0 += tile) {
        const int n = (int)(a.n_s - s0 < tile ? a.n_s - s0 : tile);
        const float *key = seq_row(a.keys, s0, c->b);
        float *d_key = seq_row_to(a.d_keys, s0, c->b);
        struct quad x[N];
        keys_fetch<WIDE, N>(x, a, key, p + s0, warp, n, c->k);
        mean = s0 == 0 ? probs_mean(p, dp, a.n_s) : mean;
        put_score_gradients(ds, p + s0, dp + s0, mean, n);
        for (int i = warp; i < n; i += warps * N) {
            const struct quad query =
                quad_load<WIDE>(seq_row(a.query, c->q, c->b), c->k, (int)a.n_h);
            const struct quad v = quad_load<WIDE>((const float *)a.v, c->k, (int)a.n_h);
            struct quad before[ADDS ? N : 1];
#pragma unroll
            for (int m = 0; ADDS && m < N; m++) {
                const int s = i + m * warps;
                before[m] =
                    quad_load_once<WIDE>(d_key + s * a.d_keys.i, c->k, s < n ? (int)a.n_h : 0);
            }
#pragma unroll
            for (int m = 0; m < N; m++) {
                const int s = i + m * warps;
                if (s < n) {
                    struct quad g = {};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float t = tanhf(x[m].x[j] + query.x[j]);
                        g.x[j] = ds[s] * v.x[j] * (1.0f - t * t);
                        c->d_v.x[j] = fmaf(ds[s], t, c->d_v.x[j]);
                        c->d_query.x[j] += g.x[j];
                        g.x[j] += ADDS ? before[m].x[j] : 0.0f;
                    }
                    quad_store<WIDE>(
                        d_key + s * a.d_keys.i, c->k, a.d_keys.p != 0 ? (int)a.n_h : 0, g);
                }
            }
            keys_fetch<WIDE, N>(x, a, key, p + s0, i + warps * N, n, c->k);
        }
    }
}

template <bool WIDE>
static __device__ inline void
backward_columns(const struct pya_ops_additive &a, int b, int k0) {
    __shared__ struct quad all[MOST_WARPS][32];
    struct key_columns c = {b, 0, quad_place<WIDE>(k0), {}, {}};
    for (; c.q < a.n_q; c.q++) {
        c.d_query = {};
        if (a.d_keys.p != 0 && (a.accumulate || c.q > 0)) {
            backward_query<WIDE, true>(a, &c);
        } else {
            backward_query<WIDE, false>(a, &c);
        }
        warps_add(&c.d_query, all);
        if (threadIdx.x < 32) {
            quad_store<WIDE>(seq_row_to(a.d_query, c.q, b), c.k, a.n_h, c.d_query);
        }
    }
    warps_add(&c.d_v, all);
    if (threadIdx.x < 32) {
        quad_store<WIDE>((float *)a.d_v + b * a.n_h, c.k, a.n_h, c.d_v);
    }
}

/* blocks: H / 128 * batch, of 4 to 12 warps */
extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, 2)
pya_additive_backward_keys(struct pya_ops_additive a) {
    const struct parted block = block_part((a.n_h + SPREAD - 1) / SPREAD);
    const int k0 = (int)block.part * SPREAD;
    const struct pya_ops_view v = {(void *)a.v, 0, 0};
    const struct pya_ops_view d_v = {a.d_v, 0, 0};
    if (a.n_h % 4 == 0 && seq_is_wide(a.keys) && seq_is_wide(a.query) && seq_is_wide(v) &&
        seq_is_wide(a.d_keys) && seq_is_wide(a.d_query) && seq_is_wide(d_v)) {
        backward_columns<true>(a, (int)block.rest, k0);
    } else {
        backward_columns<false>(a, (int)block.rest, k0);
    }
}
