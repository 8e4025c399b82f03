/* Attention for cards whose tensor cores pay, heads of at most 128 numbers.  Four warps, each with 16 rows of its
 * own (queries, or keys where their gradients are made), go through the other side tile by tile.
 *
 * Each number is split in two TF32 parts.  The tensor core sums 16 products at a time, and those sums are added in
 * fp32. */
#include "args.h"
#include "tensor.cuh"
#include "tile.cuh"

#ifdef PYA_TENSOR

enum {
    ATT_THREADS = 128,
    ATT_ROWS = 64, /* of a block */
    ATT_STEP = 16, /* numbers of a row at a time */
    ATT_COLUMNS = 32,
    ATT_KEYS_64 = 64, /* of a tile forward, in the smaller heads */
    ATT_KEYS_128 = 32,
    ATT_SPAN = 32, /* keys or queries of a tile backward */
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

/* --- tiles in shared memory: rows of D numbers in groups of four, which change places by the row so
 * that neither reading along rows nor across them has bank conflicts ------------------------------ */

static __device__ inline int
att_swap(int row) {
    return (row & 6) ^ (row & 1) << 2;
}

static __device__ inline bool
att_is_aligned(const void *p, long long stride) {
    return ((unsigned long long)p | (unsigned long long)stride * 4) % 16 == 0;
}

/* Rows of one head, all of them, and those from i on. */
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

/* The first N rows, with zeros up to a multiple of 16, and for rows that are not there. */
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

/* hi is x rounded to 11 significant bits, lo the rest.  The rounding is worth its instruction: cut off, which costs
 * two, all errors have one sign, and what the scores of the backward then have beside those of the forward was ten
 * times theirs. */
static __device__ inline void
att_split(float x, float *hi, float *lo) {
    *hi = fmaf(-8192.0f, x, __fmul_rn(8193.0f, x));
    *lo = x - *hi;
}

/* x, y: 4 neighbouring k's of rows g and g + 8 */
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

/* 16 k's of a right factor of four tiles. */
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

/* Of the 24 products of 16 k's with four tiles, small ones first. */
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

/* The same twice, in turns: a product waits for the last one of its tile, and eight tiles fill that time. */
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

/* and of the four rows that are the columns of a lane. */
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

/* s += this warp's 16 rows of left times the 8N rows of right, of dim numbers, of which the first ones are done.
 * Slots t and t + 4 of the two products of a step take k's 4t to 4t + 3. */
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

/* Both at once as far as both go. */
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

/* and 32 numbers of these rows; first, second: where the lane's two of eight begin. */
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

/* out += this warp's weights (16 x 8N, as att_pairs leaves them) times the 8N rows of tile.  Slots t and
 * t + 4 take the rows whose weights the lane has; of 32 columns, those of tile j are j, j + 4 and so on:
 * out[m][j][e] is column att_column(m, e) + j.  TWO: of 32 rows both halves in turns, for which keys of the larger
 * heads have not the registers. */
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

/* out times scale[0] for row, scale[1] for row + 8 */
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

/* --- scores ---------------------------------------------------------------------------------------- */

/* Where a lane's scores are; of a transposed tile keys are the rows and queries the columns. */
struct att_spot {
    long long b, h;
    int row, column; /* of the lane's first */
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

/* From the lane's first score on, what a view of them has: make(n, e, address) for each. */
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

/* Whether neighbours along a row (an even column and the next) can be moved as one. */
static __device__ inline bool
att_is_packed(const struct pya_ops_scores &o) {
    return o.k == 1 &&
           ((unsigned long long)o.p | (unsigned long long)((o.b | o.h | o.q) * 4)) % 8 == 0;
}

/* Sent for before a product, needed after it. */
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

/* As finish_score for all of a lane's scores. */
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

/* Bit 4n + e: whether dropout keeps the score n, e of a lane.  Not unrolled, which was half of a kernel's loop: that is
 * to stay in the cache of instructions. */
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

/* 0 or what makes up for those that are dropped */
static __device__ inline float
att_factor(const struct pya_ops_attention &a, unsigned kept, int n) {
    return (kept >> n & 1) != 0 ? (float)(1.0 / (1.0 - a.dropout)) : 0.0f;
}

/* --- forward --------------------------------------------------------------------------------------- */

/* A running softmax of rows g and g + 8; each lane has its own part of the sum. */
struct att_running {
    float top[2], sum[2];
};

/* Scores to weights under the largest score so far, by which what was made before shrinks. */
template <int N>
static __device__ inline void
att_soften(float s[N][4], struct att_running *run, float shrink[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float best = run->top[r];
#pragma unroll
        for (int n = 0; n < N; n++) {
            best = fmaxf(best, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        best = reduce4_max(best);
        shrink[r] = exp2_near(run->top[r] - best);
        run->top[r] = best;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            float *x = &s[n / 2][2 * r + n % 2];
            *x = exp2_near(*x - best);
            part += *x;
        }
        run->sum[r] = fmaf(run->sum[r], shrink[r], part);
    }
}

template <int D>
static __device__ inline void
att_shrink(float out[D / 32][4][4], const float shrink[2]) {
#pragma unroll
    for (int n = 0; n < D / 2; n++) {
        out[n / 16][n / 4 % 4][n % 4] *= shrink[n % 4 / 2];
    }
}

/* The first query of a block; with causal the blocks that see most keys begin. */
static __device__ inline int
att_first_query(const struct pya_ops_attention &a, unsigned part) {
    const int n = (int)((a.n_q + ATT_ROWS - 1) / ATT_ROWS);
    return (a.causal ? n - 1 - (int)part : (int)part) * ATT_ROWS;
}

template <int D, int KEYS>
static __device__ inline void
att_forward(const struct pya_ops_attention &a, float *room) {
    const struct head_part block = block_head_part((a.n_q + ATT_ROWS - 1) / ATT_ROWS, a.n_h);
    const int q0 = att_first_query(a, block.part);
    const long long kv = block.h / (a.n_h / a.n_kv);
    const int end = (int)(a.causal && q0 + ATT_ROWS < a.n_k ? q0 + ATT_ROWS : a.n_k);
    const struct att_side keys = att_side(a.k, block.b, kv, a.n_k, a.dim);
    const struct att_side values = att_side(a.v, block.b, kv, a.n_k, a.dim_v);
    float *tiles = room + ATT_ROWS * D;
    float out[D / 32][4][4] = {};
    struct att_running run = {{-1e37f, -1e37f}, {}};
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, block.b, block.h, a.n_q, a.dim), q0));
    att_load<D, KEYS>(tiles, keys);
    att_load<D, KEYS>(tiles + KEYS * D, values);
    async_commit();
#pragma unroll 1
    for (int k0 = 0; k0 < end; k0 += KEYS) {
        async_wait<0>();
        __syncthreads();
        if (k0 + KEYS < end) {
            float *next = tiles + (k0 / KEYS + 1) % 2 * (2 * KEYS * D);
            att_load<D, KEYS>(next, att_from(keys, k0 + KEYS));
            att_load<D, KEYS>(next + KEYS * D, att_from(values, k0 + KEYS));
            async_commit();
        }
        const float *tile = tiles + k0 / KEYS % 2 * (2 * KEYS * D);
        const struct att_spot at = att_spot<false>(a, block.b, block.h, q0, ATT_ROWS, k0, KEYS);
        float s[KEYS / 8][4];
        float bias[KEYS / 8][4] = {};
        float shrink[2];
        att_fetch_bias<false, KEYS / 8>(bias, a, at);
        att_pairs<D, KEYS / 8>(s, room, tile, (int)a.dim);
        att_finish<false, KEYS / 8>(s, bias, a, at);
        att_soften<KEYS / 8>(s, &run, shrink);
        if (a.dropout > 0.0) {
            const unsigned kept = att_kept<false, KEYS / 8>(a, at);
#pragma unroll
            for (int n = 0; n < KEYS / 2; n++) {
                s[n / 4][n % 4] *= att_factor(a, kept, n);
            }
        }
        att_shrink<D>(out, shrink);
        att_weigh<D, KEYS / 8>(out, s, tile + KEYS * D, (int)a.dim_v);
    }
    const struct att_lane l = att_lane();
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = reduce4_add(run.sum[r]);
        const int q = q0 + l.row + 8 * r;
        inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (l.t == 0 && q < a.n_q) {
            float *kept = (float *)a.stats + 2 * (block.b * a.n_h + block.h) * a.n_q + q;
            kept[0] = run.top[r];
            kept[a.n_q] = inverse[r];
        }
    }
    att_store<D>(a.out, block.b, block.h, q0 + l.row, a.n_q, (int)a.dim_v, out, inverse);
}

/* blocks of all kernels forward: queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_forward_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_forward<64, ATT_KEYS_64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_forward_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_forward<128, ATT_KEYS_128>(a, room);
}

/* --- backward -------------------------------------------------------------------------------------- */

/* What the backward needs of a query. */
struct att_query {
    float top, inverse, delta;
};

static __device__ inline struct att_query
att_query(const struct pya_ops_attention &a, long long b, long long h, int q) {
    const long long base = (b * a.n_h + h) * a.n_q;
    struct att_query of = {INFINITY, 0.0f, 0.0f};
    if (q < a.n_q) {
        of.top = ((const float *)a.stats)[2 * base + q];
        of.inverse = ((const float *)a.stats)[2 * base + a.n_q + q];
        of.delta = ((const float *)a.workspace)[base + q];
    }
    return of;
}

/* Scores to kept probabilities, and dP to dS; of(n, e) is the query of a score. */
template <bool TRANSPOSED, int N, class Of>
static __device__ inline void
att_gradients(
    float p[N][4], float ds[N][4], const float bias[N][4], const struct pya_ops_attention &a,
    const struct att_spot &at, const Of &of) {
    att_finish<TRANSPOSED, N>(p, bias, a, at);
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        const struct att_query query = of(n / 4, n % 4);
        p[n / 4][n % 4] = exp2_near(p[n / 4][n % 4] - query.top) * query.inverse;
    }
    if (a.dropout > 0.0) {
        const unsigned kept = att_kept<TRANSPOSED, N>(a, at);
#pragma unroll
        for (int n = 0; n < 4 * N; n++) {
            const float factor = att_factor(a, kept, n);
            const float delta = of(n / 4, n % 4).delta;
            float *x = &p[n / 4][n % 4];
            ds[n / 4][n % 4] = *x * fmaf(ds[n / 4][n % 4], factor, -delta);
            *x *= factor;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        ds[n / 4][n % 4] = p[n / 4][n % 4] * (ds[n / 4][n % 4] - of(n / 4, n % 4).delta);
    }
}

/* delta = sum dO * O of a query, by the four lanes of its row; for the kernels after this one too. */
static __device__ inline float
att_make_delta(const struct pya_ops_attention &a, long long b, long long h, int q) {
    const int t = threadIdx.x % 4;
    float sum = 0.0f;
    if (q < a.n_q) {
        const float *o = (const float *)a.out.p + b * a.out.b + h * a.out.h + q * a.out.s;
        const float *g = (const float *)a.grad.p + b * a.grad.b + h * a.grad.h + q * a.grad.s;
#pragma unroll 8
        for (int c = t; c < (int)a.dim_v; c += 4) {
            sum = fmaf(o[c], g[c], sum);
        }
    }
    sum = reduce4_add(sum);
    if (t == 0 && q < a.n_q) {
        ((float *)a.workspace)[(b * a.n_h + h) * a.n_q + q] = sum;
    }
    return sum;
}

template <int N>
static __device__ inline void
att_store_bias(const float ds[N][4], const struct pya_ops_attention &a, const struct att_spot &at) {
    const struct pya_ops_scores &o = a.d_bias;
    float *p = (float *)o.p;
    if (at.is_whole && att_is_packed(o)) {
        p += at.b * o.b + at.h * o.h + at.row * o.q + at.column;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            const float2 both = {ds[n % N][n / N * 2], ds[n % N][n / N * 2 + 1]};
            *(float2 *)(p + n / N * 8 * o.q + n % N * 8) = both;
        }
        return;
    }
    att_each<false, N>(a, o, p, at, [&](int n, int e, float *to) { *to = ds[n][e]; });
}

/* Whether no two scores share a number of the bias: dS then is its gradient. */
static __device__ inline bool
att_owns_bias(const struct pya_ops_attention &a) {
    const struct pya_ops_scores &o = a.d_bias;
    return o.p != 0 && (o.b != 0 || a.n_b == 1) && (o.h != 0 || a.n_h == 1) &&
           (o.q != 0 || a.n_q == 1) && (o.k != 0 || a.n_k == 1);
}

/* dQ, delta, and the gradient of a bias that nobody shares.  Of the tiles under way, the next keys have room
 * beside the last ones; the next values come as soon as the last ones are read. */
template <int D>
static __device__ inline void
att_backward_q(const struct pya_ops_attention &a, float *room) {
    const int N = ATT_SPAN / 8;
    const struct head_part block = block_head_part((a.n_q + ATT_ROWS - 1) / ATT_ROWS, a.n_h);
    const struct att_lane l = att_lane();
    const int q0 = att_first_query(a, block.part);
    const long long kv = block.h / (a.n_h / a.n_kv);
    const int end = (int)(a.causal && q0 + ATT_ROWS < a.n_k ? q0 + ATT_ROWS : a.n_k);
    const struct att_side keys = att_side(a.k, block.b, kv, a.n_k, a.dim);
    const struct att_side values = att_side(a.v, block.b, kv, a.n_k, a.dim_v);
    float *grad_tile = room + ATT_ROWS * D;
    float *key_tiles = grad_tile + ATT_ROWS * D;
    float *value_tile = key_tiles + 2 * ATT_SPAN * D;
    const bool owns_bias = att_owns_bias(a);
    float out[D / 32][4][4] = {};
    struct att_query of[2];
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, block.b, block.h, a.n_q, a.dim), q0));
    att_load<D, ATT_ROWS>(
        grad_tile, att_from(att_side(a.grad, block.b, block.h, a.n_q, a.dim_v), q0));
    att_load<D, ATT_SPAN>(key_tiles, keys);
    att_load<D, ATT_SPAN>(value_tile, values);
    async_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int q = q0 + l.row + 8 * r;
        const float *kept = (const float *)a.stats + 2 * (block.b * a.n_h + block.h) * a.n_q + q;
        of[r].top = q < a.n_q ? kept[0] : INFINITY;
        of[r].inverse = q < a.n_q ? kept[a.n_q] : 0.0f;
        of[r].delta = att_make_delta(a, block.b, block.h, q);
    }
#pragma unroll 1
    for (int k0 = 0; k0 < end; k0 += ATT_SPAN) {
        const int next = k0 + ATT_SPAN;
        const float *tile = key_tiles + k0 / ATT_SPAN % 2 * (ATT_SPAN * D);
        async_wait<0>();
        __syncthreads();
        if (next < end) {
            att_load<D, ATT_SPAN>(
                key_tiles + next / ATT_SPAN % 2 * (ATT_SPAN * D), att_from(keys, next));
            async_commit();
        }
        const struct att_spot at = att_spot<false>(a, block.b, block.h, q0, ATT_ROWS, k0, ATT_SPAN);
        float p[N][4];
        float ds[N][4];
        float bias[N][4] = {};
        att_fetch_bias<false, N>(bias, a, at);
        att_pairs_two<D>(p, room, tile, (int)a.dim, ds, grad_tile, value_tile, (int)a.dim_v);
        __syncthreads();
        if (next < end) {
            att_load<D, ATT_SPAN>(value_tile, att_from(values, next));
            async_commit();
        }
        att_gradients<false, N>(p, ds, bias, a, at, [&](int, int e) { return of[e / 2]; });
        if (owns_bias) {
            att_store_bias<N>(ds, a, at);
        }
        att_weigh<D, N>(out, ds, tile, (int)a.dim);
    }
    const float scale[2] = {(float)a.scale, (float)a.scale};
    att_store<D>(a.d_q, block.b, block.h, q0 + l.row, a.n_q, (int)a.dim, out, scale);
}

/* blocks: queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_q_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_q<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_q_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_q<128>(a, room);
}

/* The tiles of queries that a block of keys goes through: those of all query heads of its group, in order. */
struct att_walk {
    long long h;
    int q0;
};

static __device__ inline struct att_walk
att_walk(const struct pya_ops_attention &a, long long kv, int first, int n_tiles, int i) {
    struct att_walk w = {kv * (a.n_h / a.n_kv) + i / n_tiles, first + i % n_tiles * ATT_SPAN};
    return w;
}

/* One of the three numbers of a query of a tile: those of all queries, then the next. */
static __device__ inline float
att_number(const struct pya_ops_attention &a, long long b, struct att_walk w) {
    const struct att_query of = att_query(a, b, w.h, w.q0 + (int)threadIdx.x % ATT_SPAN);
    const int n = threadIdx.x / ATT_SPAN;
    return n == 0 ? of.top : n == 1 ? of.inverse : of.delta;
}

/* dK and dV: everything is transposed, keys are rows. */
template <int D>
static __device__ inline void
att_backward_keys(const struct pya_ops_attention &a, float *room) {
    __shared__ float numbers[2][ATT_THREADS / ATT_SPAN][ATT_SPAN];
    const int N = ATT_SPAN / 8;
    const struct head_part block = block_head_part((a.n_k + ATT_ROWS - 1) / ATT_ROWS, a.n_kv);
    const struct att_lane l = att_lane();
    const long long b = block.b;
    const long long kv = block.h;
    const int k0 = (int)block.part * ATT_ROWS;
    const int first = a.causal ? k0 : 0;
    const int n_tiles = first < a.n_q ? ((int)a.n_q - first + ATT_SPAN - 1) / ATT_SPAN : 0;
    const int n = n_tiles * (int)(a.n_h / a.n_kv);
    const int dim = (int)a.dim;
    const int dim_v = (int)a.dim_v;
    float *values = room + ATT_ROWS * D;
    float *queries = values + ATT_ROWS * D;
    float *grads = queries + 2 * ATT_SPAN * D;
    float d_k[D / 32][4][4] = {};
    float d_v[D / 32][4][4] = {};
    if (n > 0) {
        const struct att_walk w = att_walk(a, kv, first, n_tiles, 0);
        att_load<D, ATT_ROWS>(room, att_from(att_side(a.k, b, kv, a.n_k, dim), k0));
        att_load<D, ATT_ROWS>(values, att_from(att_side(a.v, b, kv, a.n_k, dim_v), k0));
        att_load<D, ATT_SPAN>(queries, att_from(att_side(a.q, b, w.h, a.n_q, dim), w.q0));
        att_load<D, ATT_SPAN>(grads, att_from(att_side(a.grad, b, w.h, a.n_q, dim_v), w.q0));
        async_commit();
        numbers[0][threadIdx.x / ATT_SPAN][threadIdx.x % ATT_SPAN] = att_number(a, b, w);
    }
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const struct att_walk w = att_walk(a, kv, first, n_tiles, i);
        const struct att_walk next = att_walk(a, kv, first, n_tiles, i + 1);
        const float *tile = queries + i % 2 * (ATT_SPAN * D);
        float number = 0.0f;
        async_wait<0>();
        __syncthreads();
        if (i + 1 < n) {
            att_load<D, ATT_SPAN>(
                queries + (i + 1) % 2 * (ATT_SPAN * D),
                att_from(att_side(a.q, b, next.h, a.n_q, dim), next.q0));
            async_commit();
            number = att_number(a, b, next);
        }
        const struct att_spot at = att_spot<true>(a, b, w.h, w.q0, ATT_SPAN, k0, ATT_ROWS);
        float p[N][4];
        float ds[N][4];
        float bias[N][4] = {};
        att_fetch_bias<true, N>(bias, a, at);
        if (D == 64) { /* in the larger heads there are not the registers for both */
            att_pairs_two<D>(p, room, tile, dim, ds, values, grads, dim_v);
        } else {
            att_pairs<D, N>(p, room, tile, dim);
            att_pairs<D, N>(ds, values, grads, dim_v);
        }
        att_gradients<true, N>(p, ds, bias, a, at, [&](int m, int e) {
            const int column = 8 * m + 2 * l.t + e % 2;
            struct att_query of = {
                numbers[i % 2][0][column], numbers[i % 2][1][column], numbers[i % 2][2][column]};
            return of;
        });
        numbers[(i + 1) % 2][threadIdx.x / ATT_SPAN][threadIdx.x % ATT_SPAN] = number;
        att_weigh<D, N, D == 64>(d_v, p, grads, dim_v);
        __syncthreads();
        if (i + 1 < n) {
            att_load<D, ATT_SPAN>(
                grads, att_from(att_side(a.grad, b, next.h, a.n_q, dim_v), next.q0));
            async_commit();
        }
        att_weigh<D, N, D == 64>(d_k, ds, tile, dim);
    }
    const float scale[2] = {(float)a.scale, (float)a.scale};
    const float one[2] = {1.0f, 1.0f};
    att_store<D>(a.d_k, b, kv, k0 + l.row, a.n_k, dim, d_k, scale);
    att_store<D>(a.d_v, b, kv, k0 + l.row, a.n_k, dim_v, d_v, one);
}

/* blocks: keys / 64 * key heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_keys_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_keys<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_keys_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_keys<128>(a, room);
}

/* sum += dS of one tile */
template <int D>
static __device__ inline void
att_add_bias(
    float sum[ATT_SPAN / 8][4], const struct pya_ops_attention &a, float *room, long long b,
    long long h, int q0, int k0) {
    const int N = ATT_SPAN / 8;
    const struct att_lane l = att_lane();
    const long long kv = h / (a.n_h / a.n_kv);
    float *grads = room + ATT_ROWS * D;
    float *keys = grads + ATT_ROWS * D;
    float *values = keys + ATT_SPAN * D;
    const struct att_spot at = att_spot<false>(a, b, h, q0, ATT_ROWS, k0, ATT_SPAN);
    float p[N][4];
    float ds[N][4];
    float bias[N][4] = {};
    __syncthreads();
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, b, h, a.n_q, a.dim), q0));
    att_load<D, ATT_SPAN>(keys, att_from(att_side(a.k, b, kv, a.n_k, a.dim), k0));
    async_commit();
    att_load<D, ATT_ROWS>(grads, att_from(att_side(a.grad, b, h, a.n_q, a.dim_v), q0));
    att_load<D, ATT_SPAN>(values, att_from(att_side(a.v, b, kv, a.n_k, a.dim_v), k0));
    async_commit();
    att_fetch_bias<false, N>(bias, a, at);
    const struct att_query of[2] = {
        att_query(a, b, h, q0 + l.row), att_query(a, b, h, q0 + l.row + 8)};
    async_wait<1>();
    __syncthreads();
    att_pairs<D, N>(p, room, keys, (int)a.dim);
    async_wait<0>();
    __syncthreads();
    att_pairs<D, N>(ds, grads, values, (int)a.dim_v);
    att_gradients<false, N>(p, ds, bias, a, at, [&](int, int e) { return of[e / 2]; });
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        sum[n / 4][n % 4] += ds[n / 4][n % 4];
    }
}

/* The gradient of a bias that is shared: one block owns 64 queries x 32 keys of a bias slice (all queries or
 * keys where the bias is shared along them) and adds what shares it in a fixed order. */
template <int D>
static __device__ inline void
att_backward_bias(const struct pya_ops_attention &a, float *room) {
    const struct pya_ops_scores o = a.d_bias;
    const unsigned n_kb = o.k != 0 ? (unsigned)((a.n_k + ATT_SPAN - 1) / ATT_SPAN) : 1;
    const long long n_qb = o.q != 0 ? (a.n_q + ATT_ROWS - 1) / ATT_ROWS : 1;
    const struct head_part block = block_head_part(n_kb * n_qb, o.h != 0 ? a.n_h : 1);
    const int q1 = (int)(block.part / n_kb) * ATT_ROWS;
    const int k1 = (int)(block.part % n_kb) * ATT_SPAN;
    const int q_end = o.q != 0 ? q1 + 1 : (int)a.n_q;
    const int k_end = o.k != 0 ? k1 + 1 : (int)a.n_k;
    float sum[ATT_SPAN / 8][4] = {};
    for (long long b = o.b != 0 ? block.b : 0; b < (o.b != 0 ? block.b + 1 : a.n_b); b++) {
        for (long long h = o.h != 0 ? block.h : 0; h < (o.h != 0 ? block.h + 1 : a.n_h); h++) {
            for (int q0 = q1; q0 < q_end; q0 += ATT_ROWS) {
                const int seen = a.causal && q0 + ATT_ROWS < k_end ? q0 + ATT_ROWS : k_end;
                for (int k0 = k1; k0 < seen; k0 += ATT_SPAN) {
                    att_add_bias<D>(sum, a, room, b, h, q0, k0);
                }
            }
        }
    }
    const struct att_lane l = att_lane();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < ATT_SPAN / 2; n++) {
        const int row = l.row + n % 4 / 2 * 8;
        room[row * (ATT_SPAN + 1) + n / 4 * 8 + 2 * l.t + n % 2] = sum[n / 4][n % 4];
    }
    __syncthreads();
    put_bias_gradient<ATT_ROWS, ATT_SPAN, ATT_THREADS>(a, room, block.b, block.h, q1, k1);
}

/* blocks: keys / 32 * queries / 64 * heads * batch, each 1 where shared */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_bias_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_bias<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_bias_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_bias<128>(a, room);
}

#endif
