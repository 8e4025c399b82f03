/* Additive attention forward: probabilities, and the mean of the values under them. */
#include "additive.cuh"

/* Quads of the rows of values loaded at once for their mean. */
static __device__ constexpr int
values_ahead(bool is_wide) {
    return is_wide ? 5 : 2;
}

static __device__ inline bool
seq_is_on(const struct pya_ops_additive &a, long long b, long long s) {
    return a.mask == 0 || a.mask[b * a.mask_b + s * a.mask_s] != 0;
}

static __device__ inline float
reduce32_max(float x) {
    return reduce16_max(fmaxf(x, PYA_SHUFFLE(x, 16)));
}

/* The keys are cut into parts of equal size, one block each: it computes their scores, the softmax and the mean of the
 * part's values.  The last block of a query, or with many parts a launch of its own, combines the means.  The
 * workspace, for n rows (queries of all entries): tickets[n] of 64 bits, padded to a multiple of 16 bytes;
 * means[n][parts][E]; sums[n][parts] {largest score, sum of exp(score - largest)}; scores[n][S]. */
struct gathered {
    unsigned long long *ticket;
    float *means, *sums, *scores; /* of one row */
};

static __device__ inline struct gathered
gathered_at(const struct pya_ops_additive &a, long long r) {
    const long long n = a.n_b * a.n_q;
    float *means = (float *)a.workspace + (2 * n + 3) / 4 * 4;
    float *sums = means + n * a.n_parts * a.n_e;
    float *scores = sums + n * a.n_parts * 2;
    return {
        (unsigned long long *)a.workspace + r, means + r * a.n_parts * a.n_e,
        sums + r * a.n_parts * 2, scores + r * a.n_s};
}

/* Is this block the last of n to arrive here?  It can then see what all of them wrote before, through PYA_LOAD_SHARED.
 * Nobody clears the ticket: unless it bears the mark of its place, which other contents do once in 2^60 times, it
 * counts as 0; the last block removes the mark. */
static __device__ inline bool
block_is_last(unsigned long long *ticket, unsigned n) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned long long mark =
            ((unsigned long long)ticket * 0x9e3779b97f4a7c15ull | 1ull << 63) & ~0xffffffffull;
        unsigned long long seen = mark + n - 1; /* the guess of the last, which needs one attempt */
        __threadfence();
        for (;;) {
            const unsigned long long came = seen - mark < n ? seen - mark : 0;
            const unsigned long long next = came + 1 == n ? 0 : mark + came + 1;
            const unsigned long long found = atomicCAS(ticket, seen, next);
            if (found == seen) {
                is_last = next == 0;
                break;
            }
            seen = found;
        }
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

/* weight(i) = exp(score(i) - top) * scale; 0 if the score is -inf, as for masked keys. */
struct softmax {
    float top, scale;
};

static __device__ inline float
softmax_weight(struct softmax m, float score) {
    return score == -INFINITY ? 0.0f : expf(score - m.top) * m.scale;
}

/* The softmax of a part's scores; computed by each warp for itself. */
static __device__ inline struct softmax
softmax_of_scores(const float *score, int n, float *sum) {
    const int lane = threadIdx.x % 32;
    struct softmax m = {-INFINITY, 1.0f};
    for (int s = lane; s < n; s += 32) {
        m.top = fmaxf(m.top, score[s]);
    }
    m.top = reduce32_max(m.top);
    float x = 0.0f;
    for (int s = lane; s < n; s += 32) {
        x += softmax_weight(m, score[s]);
    }
    *sum = reduce32_add(x);
    m.scale = *sum == 0.0f ? 0.0f : 1.0f / *sum;
    return m;
}

/* The softmax of all keys, from {largest, sum} of the parts; computed by each warp for itself. */
static __device__ inline struct softmax
softmax_of_parts(const float *sums, long long n) {
    const int lane = threadIdx.x % 32;
    struct softmax m = {-INFINITY, 1.0f};
    for (long long c = lane; c < n; c += 32) {
        m.top = fmaxf(m.top, PYA_LOAD_SHARED(sums + 2 * c));
    }
    m.top = reduce32_max(m.top);
    float x = 0.0f;
    for (long long c = lane; c < n; c += 32) { /* a NaN sum stays NaN */
        x += softmax_weight(m, PYA_LOAD_SHARED(sums + 2 * c)) * PYA_LOAD_SHARED(sums + 2 * c + 1);
    }
    x = reduce32_add(x);
    m.scale = x == 0.0f ? 0.0f : 1.0f / x;
    return m;
}

/* Weights of n parts, zeros beyond, for all threads to read. */
static __device__ inline void
put_part_weights(float w[THREADS], struct softmax m, const float *sums, long long n) {
    const float *mine = sums + 2 * threadIdx.x;
    __syncthreads();
    w[threadIdx.x] = (long long)threadIdx.x < n
                         ? softmax_weight(m, PYA_LOAD_SHARED(mine)) * PYA_LOAD_SHARED(mine + 1)
                         : 0.0f;
    __syncthreads();
}

/* sum += the means of the parts first, first + step, ... of n, at column k; parts without weight are not read */
template <bool WIDE>
static __device__ inline void
merge_add(
    struct quad *sum, const float w[THREADS], const float *means, int k, int n_e, int n, int first,
    int step) {
    constexpr int N = ahead(WIDE);
    for (int c = first; c < n; c += N * step) {
        struct quad x[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int part = c + i * step;
            const bool is_on = part < n && !(w[part] <= 0.0f); /* a NaN counts */
            const float *mean = means + (long long)part * n_e;
            x[i] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[i].x[j] =
                    is_on && !WIDE && k + 32 * j < n_e ? PYA_LOAD_SHARED(mean + k + 32 * j) : 0.0f;
            }
            if (WIDE && is_on && k < n_e) {
                const float4 all = PYA_LOAD_SHARED((const float4 *)(mean + k));
                x[i] = {{all.x, all.y, all.z, all.w}};
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (c + i * step < n) {
                quad_add(sum, w[c + i * step], x[i]);
            }
        }
    }
}

static __device__ inline void
merge_probs(const struct pya_ops_additive &a, struct softmax m, long long r) {
    const float *score = gathered_at(a, r).scores;
    for (long long s = threadIdx.x; s < a.n_s; s += THREADS) {
        ((float *)a.probs)[r * a.n_s + s] = softmax_weight(m, PYA_LOAD_SHARED(score + s));
    }
}

/* All of a row by one block, from at most THREADS parts. */
template <bool WIDE>
static __device__ inline void
merge_row(const struct pya_ops_additive &a, float w[THREADS], long long r, float *context) {
    const struct gathered g = gathered_at(a, r);
    const struct softmax m = softmax_of_parts(g.sums, a.n_parts);
    put_part_weights(w, m, g.sums, a.n_parts);
    for (int k0 = (int)threadIdx.x / 32 * SPREAD; k0 < a.n_e; k0 += WARPS * SPREAD) {
        const int k = quad_place<WIDE>(k0);
        struct quad sum = {};
        merge_add<WIDE>(&sum, w, g.means, k, a.n_e, (int)a.n_parts, 0, 1);
        quad_store<WIDE>(context, k, a.n_e, sum);
    }
    merge_probs(a, m, r);
}

static __device__ inline bool
forward_is_wide(const struct pya_ops_additive &a) {
    return a.n_e % 4 == 0 && seq_is_wide(a.values) && seq_is_wide(a.context);
}

/* The scores of a part's keys, one warp per key; masked keys are not read. */
template <bool WIDE>
static __device__ inline float
key_score(const float *key, const float *query, const float *v, int n) {
    constexpr int N = ahead(WIDE);
    float sum = 0.0f;
    for (int k0 = 0; k0 < n; k0 += SPREAD * N) {
        const int k = quad_place<WIDE>(k0);
        struct quad x[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = quad_load<WIDE>(key, k + i * SPREAD, n);
        }
        loads_first();
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (k0 + i * SPREAD < n) {
                const struct quad q = quad_load<WIDE>(query, k + i * SPREAD, n);
                const struct quad w = quad_load<WIDE>(v, k + i * SPREAD, n);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum = fmaf(w.x[j], tanhf(x[i].x[j] + q.x[j]), sum);
                }
            }
        }
    }
    return reduce32_add(sum);
}

struct part {
    int b, q, index;
    int s0, n; /* keys */
};

static __device__ inline long long
part_row(const struct pya_ops_additive &a, struct part p) {
    return p.b * a.n_q + p.q;
}

template <bool WIDE>
static __device__ inline void
put_scores(
    const struct pya_ops_additive &a, float score[THREADS], const float w[THREADS], struct part p) {
    const float *query = seq_row(a.query, p.q, p.b);
    for (int s = threadIdx.x / 32; s < p.n; s += WARPS) {
        const bool is_on = w[s] != 0.0f;
        const float *key = seq_row(a.keys, p.s0 + s, p.b);
        const float sum = key_score<WIDE>(key, query, (const float *)a.v, is_on ? (int)a.n_h : 0);
        if (threadIdx.x % 32 == 0) {
            score[s] = is_on ? sum : -INFINITY;
        }
    }
}

/* Loads this thread's numbers of the rows of values that it takes at once, from row i on. */
template <bool WIDE>
static __device__ inline void
values_fetch(
    struct quad x[values_ahead(WIDE)], const struct pya_ops_additive &a, const float w[THREADS],
    struct part p, int i, int k) {
    const float *value = seq_row(a.values, p.s0, p.b);
#pragma unroll
    for (int n = 0; n < values_ahead(WIDE); n++) { /* a NaN counts */
        x[n] = quad_load_once<WIDE>(
            value + (i + n) * a.values.i, k, !(w[i + n] <= 0.0f) ? (int)a.n_e : 0,
            value_is_once(a, p.s0 + i + n));
    }
}

/* The part's softmax: turns its scores into weights. */
static __device__ inline void
put_weights(
    const struct pya_ops_additive &a, const float score[THREADS], float w[THREADS], struct part p) {
    const int t = threadIdx.x;
    float sum = 0.0f;
    const struct softmax m = softmax_of_scores(score, p.n, &sum);
    w[t] = t < p.n ? softmax_weight(m, score[t]) : 0.0f;
    if (a.n_parts == 1) {
        if (t < p.n) {
            ((float *)a.probs)[part_row(a, p) * a.n_s + t] = w[t];
        }
        return;
    }
    const struct gathered g = gathered_at(a, part_row(a, p));
    if (t < p.n) {
        g.scores[p.s0 + t] = score[t];
    }
    if (t < 2) {
        g.sums[2 * p.index + t] = t == 0 ? m.top : sum;
    }
}

/* The mean of the part's values; its first rows are being loaded while other warps still compute scores. */
template <bool WIDE>
static __device__ inline void
put_mean(
    const struct pya_ops_additive &a, const float score[THREADS], float w[THREADS], struct part p,
    float *mean) {
    constexpr int N = values_ahead(WIDE);
    int k = quad_place<WIDE>((int)threadIdx.x / 32 * SPREAD);
    struct quad x[N];
    struct quad sum = {};
    int i = 0;
    values_fetch<WIDE>(x, a, w, p, 0, k);
    __syncthreads();
    put_weights(a, score, w, p);
    __syncthreads();
    while (k < a.n_e) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (!(w[i + n] <= 0.0f)) { /* masked rows may hold anything */
                quad_add(&sum, w[i + n], x[n]);
            }
        }
        i += N;
        if (i >= p.n) {
            quad_store<WIDE>(mean, k, a.n_e, sum);
            k += WARPS * SPREAD;
            sum = {};
            i = 0;
        }
        values_fetch<WIDE>(x, a, w, p, i, k);
    }
}

/* Probabilities and context, or the parts' shares of them.  blocks: parts * queries * batch */
extern "C" __global__ void __launch_bounds__(THREADS, STREAM_BLOCKS)
pya_additive_forward(struct pya_ops_additive a) {
    __shared__ float score[THREADS];
    __shared__ float w[THREADS + AHEAD]; /* zeros from the part's end on */
    const struct parted block = block_part(a.n_parts);
    const int n_s = (int)a.n_s;
    const int n_q = (int)a.n_q;
    const int size = (n_s + (int)a.n_parts - 1) / (int)a.n_parts;
    struct part p = {(int)block.rest / n_q, (int)block.rest % n_q, (int)block.part, 0, 0};
    p.s0 = p.index * size;
    p.n = n_s - p.s0 < size ? n_s - p.s0 : size;
    if (threadIdx.x < AHEAD) {
        w[THREADS + threadIdx.x] = 0.0f;
    }
    w[threadIdx.x] = (int)threadIdx.x < p.n && seq_is_on(a, p.b, p.s0 + threadIdx.x) ? 1.0f : 0.0f;
    __syncthreads();
    const struct pya_ops_view v = {(void *)a.v, 0, 0};
    if (a.n_h % 4 == 0 && seq_is_wide(a.keys) && seq_is_wide(a.query) && seq_is_wide(v)) {
        put_scores<true>(a, score, w, p);
    } else {
        put_scores<false>(a, score, w, p);
    }
    float *context = seq_row_to(a.context, p.q, p.b);
    float *mean = a.n_parts == 1 ? context : gathered_at(a, part_row(a, p)).means + p.index * a.n_e;
    const bool is_wide = forward_is_wide(a);
    if (is_wide) {
        put_mean<true>(a, score, w, p, mean);
    } else {
        put_mean<false>(a, score, w, p, mean);
    }
    if (a.n_parts == 1 || a.n_parts > PYA_OPS_MERGED_PARTS ||
        !block_is_last(gathered_at(a, part_row(a, p)).ticket, (unsigned)a.n_parts)) {
        return;
    }
    if (is_wide) {
        merge_row<true>(a, w, part_row(a, p), context);
    } else {
        merge_row<false>(a, w, part_row(a, p), context);
    }
}

/* 128 columns of a row: each warp takes every eighth part. */
template <bool WIDE>
static __device__ inline void
merge_columns(
    const struct pya_ops_additive &a, struct gathered g, struct softmax m, int k0, float *context) {
    __shared__ float w[THREADS];
    __shared__ struct quad sums[WARPS][32];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int k = quad_place<WIDE>(k0);
    struct quad sum = {};
    for (long long c = 0; c < a.n_parts; c += THREADS) {
        const int n = (int)(a.n_parts - c < THREADS ? a.n_parts - c : THREADS);
        put_part_weights(w, m, g.sums + 2 * c, n);
        merge_add<WIDE>(&sum, w, g.means + c * a.n_e, k, a.n_e, n, warp, WARPS);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        for (int n = 1; n < WARPS; n++) {
            quad_add(&sum, 1.0f, sums[n][lane]);
        }
        quad_store<WIDE>(context, k, a.n_e, sum);
    }
}

/* If there are too many parts for one block to combine.  blocks: E / 128 * queries * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 2)
pya_additive_merge(struct pya_ops_additive a) {
    const struct parted block = block_part((a.n_e + SPREAD - 1) / SPREAD);
    const long long r = block.rest;
    const struct gathered g = gathered_at(a, r);
    const struct softmax m = softmax_of_parts(g.sums, a.n_parts);
    float *context =
        seq_row_to(a.context, block.rest % (unsigned)a.n_q, block.rest / (unsigned)a.n_q);
    const int k0 = (int)block.part * SPREAD;
    if (forward_is_wide(a)) {
        merge_columns<true>(a, g, m, k0, context);
    } else {
        merge_columns<false>(a, g, m, k0, context);
    }
    if (block.part == 0) {
        merge_probs(a, m, r);
    }
}
