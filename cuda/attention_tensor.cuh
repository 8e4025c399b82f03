#pragma once
/* Attention for cards with fast tensor cores, heads of at most 128 numbers.  Four warps, each with 16 rows of its own
 * (queries, or keys if their gradients are computed), go through the other side tile by tile.  This file has tiles in
 * shared memory and their products.
 *
 * Each number is split into two TF32 parts.  The tensor core sums 16 products at a time, and those sums are added in
 * fp32. */
#include "attention.cuh"
#include "tensor.cuh"

#ifdef PYA_TENSOR

enum {
    ATT_THREADS = 128,
    ATT_ROWS = 64, /* rows of a block */
    ATT_STEP = 16, /* numbers of a row per step */
    ATT_COLUMNS = 32,
    ATT_KEYS_64 = 64, /* keys of a tile in the forward, with heads of up to 64 */
    ATT_KEYS_128 = 32,
    ATT_SPAN = 32, /* keys or queries of a tile in the backward */
};

static_assert(
    (ATT_ROWS + 4 * ATT_KEYS_64) * 64 * sizeof(float) == PYA_OPS_ATTENTION_FORWARD_64_BYTES,
    "the launcher knows the room");
static_assert(
    (ATT_ROWS + 4 * ATT_KEYS_128) * 128 * sizeof(float) == PYA_OPS_ATTENTION_FORWARD_128_BYTES,
    "and this one");
static_assert(
    (2 * ATT_ROWS + 3 * ATT_SPAN) * 64 * sizeof(float) == PYA_OPS_ATTENTION_BACKWARD_64_BYTES,
    "and this one");

/* The place of a lane: rows g and g + 8 of its warp's 16, columns 2t and 2t + 1 of each eight. */
struct att_lane {
    int row; /* g of the warp's 16, in the block's 64 */
    int g, t;
};

static __device__ inline struct att_lane
att_lane() {
    const int lane = threadIdx.x % 32;
    struct att_lane l = {(int)threadIdx.x / 32 * 16 + lane / 4, lane / 4, lane % 4};
    return l;
}

/* --- tiles in shared memory: rows of D numbers in groups of four, which are permuted by row so that neither
 * reading along rows nor across them has bank conflicts ------------------------------------------- */

static __device__ inline int
att_swap(int row) {
    return (row & 6) ^ (row & 1) << 2;
}

static __device__ inline bool
att_is_aligned(const void *p, long long stride) {
    return ((unsigned long long)p | (unsigned long long)stride * 4) % 16 == 0;
}

/* The rows of one head: all of them, or those from i on. */
struct att_side {
    const float *p;
    long long stride;
    int n, dim;
};

static __device__ inline struct att_side
att_side(struct pya_ops_heads x, long long b, long long h, long long n, long long dim) {
    struct att_side r = {(const float *)x.p + b * x.b + h * x.h, x.s, (int)n, (int)dim};
    return r;
}

static __device__ inline struct att_side
att_from(const struct att_side &r, int i) {
    struct att_side rest = {r.p + i * r.stride, r.stride, r.n - i, r.dim};
    return rest;
}

/* Loads the first N rows; zeros up to a multiple of 16, and for rows that do not exist. */
template <int D, int N>
static __device__ inline void
att_load(float *tile, const struct att_side &r) {
    const int step = ATT_THREADS / (D / 4);
    const int chunk = threadIdx.x % (D / 4);
    const int d = 4 * chunk;
    if (d >= (r.dim + ATT_STEP - 1) / ATT_STEP * ATT_STEP) {
        return;
    }
    const int first = threadIdx.x / (D / 4);
    const int left = r.dim - d;
    const int n = left < 0 ? 0 : left < 4 ? left : 4;
    if (att_is_aligned(r.p, r.stride)) {
        const float *from = n > 0 ? r.p + first * r.stride + d : r.p;
        const long long down = n > 0 ? step * r.stride : 0;
        float *const even = tile + first * D + 4 * (chunk ^ att_swap(first));
        float *const odd = tile + first * D + 4 * (chunk ^ att_swap(first + step));
        if (r.n >= N) {
#pragma unroll
            for (int i = 0; i < N / step; i++, from += down) {
                async_copy((i % 2 == 0 ? even : odd) + i * step * D, from, n);
            }
            return;
        }
#pragma unroll 2
        for (int i = 0; i < N / step; i++, from += down) {
            const bool is_there = first + i * step < r.n;
            async_copy(
                (i % 2 == 0 ? even : odd) + i * step * D, is_there ? from : r.p, is_there ? n : 0);
        }
        return;
    }
#pragma unroll 1
    for (int i = first; i < N; i += step) {
        float *to = tile + i * D + 4 * (chunk ^ att_swap(i));
        for (int k = 0; k < 4; k++) {
            to[k] = i < r.n && k < n ? r.p[i * r.stride + d + k] : 0.0f;
        }
    }
}

/* --- products -------------------------------------------------------------------------------------- */

/* 16 rows and 16 k's of a left factor, as operands of two products by tf32_multiply. */
struct att_left {
    float hi[2][4];
    float lo[2][4];
};

/* hi is x rounded to 11 significant bits, lo the rest.  Rounding is worth its one extra instruction (three instead of two):
 * with truncation all errors have one sign, and the backward's scores differed from the forward's by ten times their
 * error. */
static __device__ inline void
att_split(float x, float *hi, float *lo) {
    *hi = fmaf(-8192.0f, x, __fmul_rn(8193.0f, x));
    *lo = x - *hi;
}

/* x, y: 4 adjacent k's of rows g and g + 8 */
static __device__ inline struct att_left
att_left_of(const float x[4], const float y[4]) {
    struct att_left a;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        att_split(x[n], &a.hi[n / 2][n % 2 * 2], &a.lo[n / 2][n % 2 * 2]);
        att_split(y[n], &a.hi[n / 2][n % 2 * 2 + 1], &a.lo[n / 2][n % 2 * 2 + 1]);
    }
    return a;
}

/* 16 k's of a right factor with four tiles. */
struct att_right {
    float hi[2][4][2];
    float lo[2][4][2];
};

/* b[u][j]: of tile j, the operands of product u */
static __device__ inline struct att_right
att_right_of(const float b[2][4][2]) {
    struct att_right r;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const int u = n / 8;
        const int j = n / 2 % 4;
        att_split(b[u][j][n % 2], &r.hi[u][j][n % 2], &r.lo[u][j][n % 2]);
    }
    return r;
}

/* Number n of the 24 products of 16 k's with four tiles, small terms first. */
static __device__ inline void
att_product(float c[4][4], const struct att_left &a, const struct att_right &b, int n) {
    const int u = n / 4 % 2;
    const int j = n % 4;
    tf32_multiply(c[j], n < 8 ? a.lo[u] : a.hi[u], n / 8 == 1 ? b.lo[u][j] : b.hi[u][j]);
}

static __device__ inline void
att_add(float acc[4][4], const float c[4][4]) {
#pragma unroll
    for (int n = 0; n < 16; n++) {
        acc[n / 4][n % 4] += c[n / 4][n % 4];
    }
}

/* acc (16 x 32, four tiles) += 16 k's */
static __device__ inline void
att_multiply(float acc[4][4], const struct att_left &a, const struct att_right &b) {
    float c[4][4] = {};
#pragma unroll
    for (int n = 0; n < 24; n++) {
        att_product(c, a, b, n);
    }
    att_add(acc, c);
}

/* The same for two at once, alternating: a product waits for the previous one of its tile; eight tiles fill that time. */
static __device__ inline void
att_multiply_two(
    float acc0[4][4], const struct att_left &a0, const struct att_right &b0, float acc1[4][4],
    const struct att_left &a1, const struct att_right &b1) {
    float c0[4][4] = {};
    float c1[4][4] = {};
#pragma unroll
    for (int n = 0; n < 48; n++) {
        if (n / 4 % 2 == 0) {
            att_product(c0, a0, b0, n / 8 * 4 + n % 4);
        } else {
            att_product(c1, a1, b1, n / 8 * 4 + n % 4);
        }
    }
    att_add(acc0, c0);
    att_add(acc1, c1);
}

/* Numbers k to k + 3 of rows g and g + 8 */
template <int D>
static __device__ inline struct att_left
att_left_at(const float *row, int k) {
    float x[4];
    float y[4];
    get_four(x, row + k);
    get_four(y, row + 8 * D + k);
    return att_left_of(x, y);
}

/* The same for the four rows that are a lane's columns. */
template <int D>
static __device__ inline struct att_right
att_right_at(const float *row, int k) {
    float b[2][4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x[4];
        get_four(x, row + 8 * j * D + k);
        b[0][j][0] = x[0];
        b[0][j][1] = x[1];
        b[1][j][0] = x[2];
        b[1][j][1] = x[3];
    }
    return att_right_of(b);
}

template <int N>
static __device__ inline void
att_clear(float s[N][4]) {
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        s[n / 4][n % 4] = 0.0f;
    }
}

/* s += this warp's 16 rows of left times the 8N rows of right, each of dim numbers, of which the first ones are already
 * done. Slots t and t + 4 of the two products of a step take the k's 4t to 4t + 3. */
template <int D, int N>
static __device__ inline void
att_add_pairs(float s[N][4], const float *left, const float *right, int done, int dim) {
    const struct att_lane l = att_lane();
    left += l.row * D;
    right += l.g * D;
#pragma unroll 1
    for (int d = done; d < dim; d += ATT_STEP) {
        const int k = (d + 4 * l.t) ^ 4 * att_swap(l.g);
        const struct att_left a = att_left_at<D>(left, k);
        if constexpr (N == 8) {
            att_multiply_two(
                s, a, att_right_at<D>(right, k), s + 4, a, att_right_at<D>(right + 32 * D, k));
        } else {
            static_assert(N == 4, "four tiles or eight");
            att_multiply(s, a, att_right_at<D>(right, k));
        }
    }
}

template <int D, int N>
static __device__ inline void
att_pairs(float s[N][4], const float *left, const float *right, int dim) {
    att_clear<N>(s);
    att_add_pairs<D, N>(s, left, right, 0, dim);
}

/* Both products at once, as far as both go. */
template <int D>
static __device__ inline void
att_pairs_two(
    float s0[4][4], const float *left0, const float *right0, int dim0, float s1[4][4],
    const float *left1, const float *right1, int dim1) {
    const struct att_lane l = att_lane();
    const int left = l.row * D;
    const int right = l.g * D;
    int d = 0;
    att_clear<4>(s0);
    att_clear<4>(s1);
#pragma unroll 1
    for (; d < dim0 && d < dim1; d += ATT_STEP) {
        const int k = (d + 4 * l.t) ^ 4 * att_swap(l.g);
        att_multiply_two(
            s0, att_left_at<D>(left0 + left, k), att_right_at<D>(right0 + right, k), s1,
            att_left_at<D>(left1 + left, k), att_right_at<D>(right1 + right, k));
    }
    att_add_pairs<D, 4>(s0, left0, right0, d, dim0);
    att_add_pairs<D, 4>(s1, left1, right1, d, dim1);
}

/* The weights of rows n and n + 1 of eight */
static __device__ inline struct att_left
att_left_weights(const float w[2][4]) {
    const float x[4] = {w[0][0], w[0][1], w[1][0], w[1][1]};
    const float y[4] = {w[0][2], w[0][3], w[1][2], w[1][3]};
    return att_left_of(x, y);
}

/* 32 numbers of these rows; first, second: where the lane's two of eight begin. */
template <int D>
static __device__ inline struct att_right
att_right_rows(const float *first, const float *second) {
    float b[2][4][2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
        float x0[4];
        float x1[4];
        get_four(x0, first + 8 * u * D);
        get_four(x1, second + 8 * u * D);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            b[u][j][0] = x0[j];
            b[u][j][1] = x1[j];
        }
    }
    return att_right_of(b);
}

/* out += this warp's weights (16 x 8N, as att_pairs leaves them) times the 8N rows of tile.  Slots t and t + 4 take the
 * rows whose weights the lane has.  Of 32 columns, those of tile j are j, j + 4 and so on: out[m][j][e] is column
 * att_column(m, e) + j.  TWO: alternate between both halves of 32 rows; with the larger heads, keys lack the registers
 * for that. */
template <int D, int N, bool TWO = true>
static __device__ inline void
att_weigh(float out[D / 32][4][4], const float w[N][4], const float *tile, int dim) {
    const struct att_lane l = att_lane();
    const float *first = tile + 2 * l.t * D + 4 * (l.g ^ att_swap(2 * l.t));
    const float *second = tile + (2 * l.t + 1) * D + 4 * (l.g ^ att_swap(2 * l.t + 1));
    const int step = TWO ? 4 : 2;
#pragma unroll
    for (int n = 0; n < N; n += step) {
        const struct att_left a0 = att_left_weights(w + n);
        const struct att_left a1 = att_left_weights(w + n + step - 2);
#pragma unroll
        for (int m = 0; m < D / 32; m++) {
            if (m * ATT_COLUMNS >= dim) {
                break;
            }
            const int at = 8 * n * D + m * ATT_COLUMNS;
            const struct att_right b0 = att_right_rows<D>(first + at, second + at);
            if (TWO) {
                att_multiply_two(
                    out[m], a0, b0, out[m], a1,
                    att_right_rows<D>(first + 16 * D + at, second + 16 * D + at));
            } else {
                att_multiply(out[m], a0, b0);
            }
        }
    }
}

static __device__ inline int
att_column(int m, int e) {
    return m * ATT_COLUMNS + (int)threadIdx.x % 4 * 8 + e % 2 * 4;
}

/* Multiplies out by scale[0] in row, and by scale[1] in row + 8. */
template <int D>
static __device__ inline void
att_store(
    struct pya_ops_heads x, long long b, long long h, int row, long long n_rows, int dim,
    const float out[D / 32][4][4], const float scale[2]) {
    float *p = (float *)x.p + b * x.b + h * x.h;
    const bool aligned = att_is_aligned(p, x.s);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= n_rows) {
            continue;
        }
        float *to = p + (row + 8 * r) * x.s;
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            const int c = att_column(n / 2, n % 2);
            const int e = 2 * r + n % 2;
            const float4 all = {
                out[n / 2][0][e] * scale[r], out[n / 2][1][e] * scale[r],
                out[n / 2][2][e] * scale[r], out[n / 2][3][e] * scale[r]};
            if (aligned && c + 4 <= dim) {
                *(float4 *)(to + c) = all;
                continue;
            }
            if (c < dim) {
                to[c] = all.x;
            }
            if (c + 1 < dim) {
                to[c + 1] = all.y;
            }
            if (c + 2 < dim) {
                to[c + 2] = all.z;
            }
            if (c + 3 < dim) {
                to[c + 3] = all.w;
            }
        }
    }
}

#endif
