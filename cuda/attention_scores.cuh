#pragma once
/* A warp's attention scores on tensor cores: their places, bias, masks and dropout. */
#include "attention_tensor.cuh"

#ifdef PYA_TENSOR

/* Where a lane's scores are; in a transposed tile rows are keys and columns queries. */
struct att_spot {
    long long b, h;
    int row, column; /* of the lane's first score */
    bool is_whole;   /* no score of the block's tile is beyond the end or hidden by causal */
};

template <bool TRANSPOSED>
static __device__ inline struct att_spot
att_spot(
    const struct pya_ops_attention &a, long long b, long long h, int q0, int n_q, int k0, int n_k) {
    const struct att_lane l = att_lane();
    struct att_spot at = {
        b, h, (TRANSPOSED ? k0 : q0) + l.row, (TRANSPOSED ? q0 : k0) + 2 * l.t, false};
    at.is_whole = q0 + n_q <= a.n_q && k0 + n_k <= a.n_k && !(a.causal && k0 + n_k > q0 + 1);
    return at;
}

/* Calls make(n, e, address) for each of the lane's scores, with the address of its element in the view. */
template <bool TRANSPOSED, int N, class T, class Make>
static __device__ inline void
att_each(
    const struct pya_ops_attention &a, struct pya_ops_scores o, T *p, const struct att_spot &at,
    const Make &make) {
    const long long down = TRANSPOSED ? o.k : o.q;
    const long long across = TRANSPOSED ? o.q : o.k;
    const int rows_left = (int)(TRANSPOSED ? a.n_k : a.n_q) - at.row;
    const int columns_left = (int)(TRANSPOSED ? a.n_q : a.n_k) - at.column;
    p += at.b * o.b + at.h * o.h + at.row * down + at.column * across;
#pragma unroll
    for (int r = 0; r < 2; r++, p += 8 * down) {
        if (8 * r >= rows_left) {
            break;
        }
        T *next = p;
#pragma unroll
        for (int n = 0; n < N; n++, next += 8 * across) {
            if (8 * n < columns_left) {
                make(n, 2 * r, next);
            }
            if (8 * n + 1 < columns_left) {
                make(n, 2 * r + 1, next + across);
            }
        }
    }
}

/* Can neighbours along a row (an even column and the next) be loaded and stored as one? */
static __device__ inline bool
att_is_packed(const struct pya_ops_scores &o) {
    return o.k == 1 &&
           ((unsigned long long)o.p | (unsigned long long)((o.b | o.h | o.q) * 4)) % 8 == 0;
}

/* Loaded before a product and used after it. */
template <bool TRANSPOSED, int N>
static __device__ inline void
att_fetch_bias(float x[N][4], const struct pya_ops_attention &a, const struct att_spot &at) {
    const struct pya_ops_scores &o = a.bias;
    if (o.p == 0) {
        return;
    }
    const float *p = (const float *)o.p;
    if (!TRANSPOSED && at.is_whole && att_is_packed(o)) {
        p += at.b * o.b + at.h * o.h + at.row * o.q + at.column;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            get_pair(
                p + n / N * 8 * o.q + n % N * 8, &x[n % N][n / N * 2], &x[n % N][n / N * 2 + 1]);
        }
        return;
    }
    att_each<TRANSPOSED, N>(
        a, o, p, at, [&](int n, int e, const float *value) { x[n][e] = *value; });
}

/* Like finish_score, for all of a lane's scores. */
template <bool TRANSPOSED, int N>
static __device__ inline void
att_finish(
    float s[N][4], const float bias[N][4], const struct pya_ops_attention &a,
    const struct att_spot &at) {
    const float scale = score_scale(a);
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        s[n / 4][n % 4] *= scale;
    }
    if (a.bias.p != 0) {
#pragma unroll
        for (int n = 0; n < 4 * N; n++) {
            s[n / 4][n % 4] = add_bias(bias[n / 4][n % 4], s[n / 4][n % 4]);
        }
    }
    if (a.mask.p != 0) {
        att_each<TRANSPOSED, N>(
            a, a.mask, (const unsigned char *)a.mask.p, at,
            [&](int n, int e, const unsigned char *sees) {
                s[n][e] = *sees == 0 ? -INFINITY : s[n][e];
            });
    }
    if (!at.is_whole) {
#pragma unroll
        for (int n = 0; n < 4 * N; n++) {
            const int row = at.row + n % 4 / 2 * 8;
            const int column = at.column + n / 4 * 8 + n % 2;
            const bool hidden = TRANSPOSED ? is_beyond(a, column, row) : is_beyond(a, row, column);
            s[n / 4][n % 4] = hidden ? -INFINITY : s[n / 4][n % 4];
        }
    }
}

/* Bit 4n + e: does dropout keep the score n, e of a lane?  Not unrolled: that would be half of a kernel's loop, which
 * must fit in the instruction cache. */
template <bool TRANSPOSED, int N>
static __device__ inline unsigned
att_kept(const struct pya_ops_attention &a, const struct att_spot &at) {
    static_assert(4 * N <= 32, "a bit each");
    unsigned kept = 0;
#pragma unroll 1
    for (int n = 0; n < 4 * N; n++) {
        const int row = at.row + n % 4 / 2 * 8;
        const int column = at.column + n / 4 * 8 + n % 2;
        const float factor =
            TRANSPOSED ? keep(a, at.b, at.h, column, row) : keep(a, at.b, at.h, row, column);
        kept |= (factor > 0.0f ? 1u : 0u) << n;
    }
    return kept;
}

/* 0 if dropped, else the factor that makes up for the dropped ones */
static __device__ inline float
att_factor(const struct pya_ops_attention &a, unsigned kept, int n) {
    return (kept >> n & 1) != 0 ? (float)(1.0 / (1.0 - a.dropout)) : 0.0f;
}

/* The first query of a block; with causal, the blocks that see most keys start first. */
static __device__ inline int
att_first_query(const struct pya_ops_attention &a, unsigned part) {
    const int n = (int)((a.n_q + ATT_ROWS - 1) / ATT_ROWS);
    return (a.causal ? n - 1 - (int)part : (int)part) * ATT_ROWS;
}

#endif
