#pragma once
/* Scaled dot-product attention in fp32: where a block's rows and scores are; masks, bias and dropout of a score; and the
 * sums for a shared bias.  Formulas and names are those of csrc/ops/attention_forward.c and attention_backward.c.
 * Scores are in units of log 2. */
#include "args.h"
#include "tile.cuh"

static __device__ inline rows
head_rows(struct pya_ops_heads x, long long b, long long h, long long s, long long n) {
    rows r = {(const float *)x.p + b * x.b + h * x.h + s * x.s, x.s, at_most_big(n)};
    return r;
}

/* The part of a head that a block has: blockIdx.x counts through parts, then heads, then the batch. */
struct head_part {
    unsigned part;
    long long h, b;
};

static __device__ inline struct head_part
block_head_part(long long n_parts, long long n_heads) {
    const struct parted block = block_part(n_parts);
    struct head_part p = {
        block.part, block.rest % (unsigned)n_heads, block.rest / (unsigned)n_heads};
    return p;
}

static __device__ inline long long
score_at(struct pya_ops_scores x, long long b, long long h, long long q, long long k) {
    return b * x.b + h * x.h + q * x.q + k * x.k;
}

/* Is there no such score, or does causal hide it? */
static __device__ inline bool
is_beyond(const struct pya_ops_attention &a, long long q, long long k) {
    return q >= a.n_q || k >= a.n_k || (a.causal && k > q);
}

/* Is there a mask, the same for all queries?  Padding of keys is. */
static __device__ inline bool
hides_keys(const struct pya_ops_attention &a) {
    return a.mask.p != 0 && (a.mask.q == 0 || a.n_q == 1);
}

/* Does such a mask show any of n keys from k on?  All of a block's threads call this. */
template <int N_THREADS>
static __device__ inline bool
shows_any(const struct pya_ops_attention &a, long long b, long long h, int k, int n) {
    const unsigned char *p = (const unsigned char *)a.mask.p + score_at(a.mask, b, h, 0, k);
    int shown = 0;
    for (int i = threadIdx.x; i < n; i += N_THREADS) {
        shown |= p[i * a.mask.k];
    }
    return __syncthreads_or(shown) != 0;
}

struct key_range {
    int first, end;
};

/* The keys before `end` that a head's queries go through, by tiles, of which there is at least one: without those that
 * padding hides at either end.  Many are looked at at once, then few, because each look waits for memory. */
template <int TILE, int N_THREADS>
static __device__ inline struct key_range
seen_keys(const struct pya_ops_attention &a, long long b, long long h, long long end) {
    struct key_range r = {0, (int)end};
    if (!hides_keys(a)) {
        return r;
    }
#pragma unroll 1
    for (int n = 8 * TILE; n >= TILE; n /= 8) {
        while (n < r.end && !shows_any<N_THREADS>(a, b, h, r.end - n, n)) {
            r.end -= n;
        }
    }
#pragma unroll 1
    for (int n = 8 * TILE; n >= TILE; n /= 8) {
        while (r.first + n < r.end && !shows_any<N_THREADS>(a, b, h, r.first, n)) {
            r.first += n;
        }
    }
    return r;
}

/* May a query see one of n keys from k on, as far as padding decides? */
template <int N_THREADS>
static __device__ inline bool
may_see(const struct pya_ops_attention &a, long long b, long long h, long long k, int n) {
    return !hides_keys(a) ||
           shows_any<N_THREADS>(a, b, h, (int)k, (int)(a.n_k - k < n ? a.n_k - k : n));
}

/* The factor from a dot product to a score. */
static __device__ inline float
score_scale(const struct pya_ops_attention &a) {
    return (float)(a.scale * 1.44269504088896341);
}

static __device__ inline float
add_bias(float bias, float s) {
    return fmaf(1.44269504f, bias, s);
}

/* One score of a block with bias and masks applied, in units of log 2; -inf if there is none. */
static __device__ inline float
finish_score(
    const struct pya_ops_attention &a, float s, long long b, long long h, long long q,
    long long k) {
    if (is_beyond(a, q, k)) {
        return -INFINITY;
    }
    if (a.mask.p != 0 && ((const unsigned char *)a.mask.p)[score_at(a.mask, b, h, q, k)] == 0) {
        return -INFINITY;
    }
    s *= score_scale(a);
    if (a.bias.p != 0) {
        s = add_bias(((const float *)a.bias.p)[score_at(a.bias, b, h, q, k)], s);
    }
    return s;
}

static __device__ inline unsigned
coin_mix(unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* 1 / (1 - dropout) if the probability is kept, else 0; the same random numbers as in the CPU kernels */
static __device__ inline float
keep(const struct pya_ops_attention &a, long long b, long long h, long long q, long long k) {
    if (a.dropout <= 0.0) {
        return 1.0f;
    }
    const unsigned head = (unsigned)(b * a.n_h + h);
    const unsigned seed =
        coin_mix(coin_mix((unsigned)a.seed + head) ^ (unsigned)(a.seed >> 32));
    const unsigned x = coin_mix((unsigned)q * 0x9e3779b9u + coin_mix((unsigned)k ^ seed)) >> 8;
    const bool dropped = (float)x * (1.0f / 16777216.0f) < (float)a.dropout;
    return dropped ? 0.0f : (float)(1.0 / (1.0 - a.dropout));
}

/* Writes a block's sums of the gradient of the bias (COLUMNS + 1 apart in shared memory) to the slice that starts at
 * query q1 and key k1; sums along a shared dimension of the bias are added up. */
template <int ROWS, int COLUMNS, int N_THREADS>
static __device__ inline void
put_bias_gradient(
    const struct pya_ops_attention &a, const float *sums, long long b, long long h, long long q1,
    long long k1) {
    const struct pya_ops_scores o = a.d_bias;
    const int n_i = o.q != 0 ? ROWS : 1;
    const int n_j = o.k != 0 ? COLUMNS : 1;
    for (int n = threadIdx.x; n < n_i * n_j; n += N_THREADS) {
        const int i = n / n_j;
        const int j = n % n_j;
        float total = 0.0f;
        for (int x = i; x < (o.q != 0 ? i + 1 : ROWS); x++) {
            for (int y = j; y < (o.k != 0 ? j + 1 : COLUMNS); y++) {
                total += sums[x * (COLUMNS + 1) + y];
            }
        }
        if ((o.q == 0 || q1 + i < a.n_q) && (o.k == 0 || k1 + j < a.n_k)) {
            ((float *)o.p)[score_at(o, b, h, q1 + i, k1 + j)] = total;
        }
    }
}
