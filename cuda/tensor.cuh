#pragma once
/* Products of 128 x 128 by tensor cores, as accurate as fp32.  Each number is split in two TF32 parts,
 * x = hi + lo to 2^-23, and lo*hi + hi*lo + hi*hi is summed, small terms first.  The tensor core
 * truncates where it adds, so that a sum kept there would drift: it sums 8 products at a time, and
 * those sums are added in fp32, rounded to nearest.  Numbers over 4e34 and infinities give NaN.
 *
 * 8 warps, two in rows and four in columns, each with 64 x 32 of the result. */
#include "mma.cuh"
#include "tile.cuh"

#ifdef PYA_TENSOR

enum {
    SLICE = 32,        /* numbers of each row in shared memory at a time */
    SUB = 8 * BIG + 8, /* 8 numbers of each row lie together; 8: no bank conflicts */
    PAIR_STAGE = 2 * (SLICE / 8) * SUB, /* both factors */
    PAIR_ROOM = 2 * PAIR_STAGE,
    W_STRIDE = BIG + 8,
    W_ROOM = BIG * W_STRIDE,
    WEIGH_STAGE = SLICE * (BIG + 8),
    WEIGH_ROOM = 2 * WEIGH_STAGE,
    TOGETHER = 2, /* sums under way at once: more would not fit in the registers */
};

struct place {
    int row, column; /* of the warp's part */
    int g, t;        /* of the lane */
};

static __device__ inline struct place
my_place() {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    struct place p = {warp / 4 * 64, warp % 4 * 32, lane / 4, lane % 4};
    return p;
}

/* The row and the column in 128 x 128 of acc[i][j][e]. */
static __device__ inline int
tensor_row(struct place p, int i, int e) {
    return p.row + i * 16 + e / 2 * 8 + p.g;
}

static __device__ inline int
tensor_column(struct place p, int j, int e) {
    return p.column + j * 8 + 2 * p.t + e % 2;
}

/* hi: x to 11 bits, by a product that pushes the other 13 out and an exact difference.  lo, exact, has
 * 12 or 13 bits, of which the tensor core reads 11.  Three instructions where the conversion that PTX
 * has is five. */
static __device__ inline void
split(float x, float *hi, float *lo) {
    *hi = fmaf(-8192.0f, x, __fmul_rn(8193.0f, x));
    *lo = x - *hi;
}

static __device__ inline void
tensor_clear(float acc[4][4][4]) {
#pragma unroll
    for (int n = 0; n < 64; n++) {
        acc[n / 16][n / 4 % 4][n % 4] = 0.0f;
    }
}

/* acc += a step of 8; a.get(i, x) and b.get(j, x) read the operands of tf32_multiply. */
template <class A, class B>
static __device__ inline void
tensor_step(float acc[4][4][4], const A &a, const B &b) {
    float b_hi[4][2];
    float b_lo[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x[2];
        b.get(j, x);
        split(x[0], &b_hi[j][0], &b_lo[j][0]);
        split(x[1], &b_hi[j][1], &b_lo[j][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x[4];
        float hi[4];
        float lo[4];
        a.get(i, x);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            split(x[n], &hi[n], &lo[n]);
        }
#pragma unroll
        for (int j0 = 0; j0 < 4; j0 += TOGETHER) {
            float c[TOGETHER][4] = {};
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                tf32_multiply(c[j], lo, b_hi[j0 + j]);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                tf32_multiply(c[j], hi, b_lo[j0 + j]);
            }
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) {
                tf32_multiply(c[j], hi, b_hi[j0 + j]);
            }
#pragma unroll
            for (int n = 0; n < 4 * TOGETHER; n++) {
                acc[i][j0 + n / 4][n % 4] += c[n / 4][n % 4];
            }
        }
    }
}

/* Two numbers side by side in shared memory. */
static __device__ inline void
get_pair(const float *p, float *x, float *y) {
    const float2 both = *(const float2 *)p;
    *x = both.x;
    *y = both.y;
}

/* Operands out of rows whose k are neighbours.  The k of a step may come in any order, the same for
 * both: slot t takes 2t and slot t + 4 takes 2t + 1, so that one load gets both. */
struct row_factor {
    const float *p; /* (row g of the warp's part, 2t) */
    int stride;
    __device__ inline void get(int n, float x[4]) const {
        get_pair(p + 16 * n * stride, &x[0], &x[2]);
        get_pair(p + (16 * n + 8) * stride, &x[1], &x[3]);
    }
};
struct row_factor_b {
    const float *p;
    __device__ inline void get(int n, float x[2]) const {
        get_pair(p + 8 * n * 8, &x[0], &x[1]);
    }
};

/* Operands whose k are rows: first and second are those of slots t and t + 4. */
struct column_factor {
    const float *first, *second; /* column g of the warp's part */
    __device__ inline void get(int n, float x[4]) const {
        x[0] = first[16 * n];
        x[1] = first[16 * n + 8];
        x[2] = second[16 * n];
        x[3] = second[16 * n + 8];
    }
};
struct column_factor_b {
    const float *first, *second;
    __device__ inline void get(int n, float x[2]) const {
        x[0] = first[8 * n];
        x[1] = second[8 * n];
    }
};

/* Whether whole groups of four can be copied. */
static __device__ inline bool
rows_are_aligned(rows r) {
    return ((unsigned long long)r.p | (unsigned long long)r.stride * 4) % 16 == 0;
}

/* Four numbers of row i from column d on, zeros where there are none. */
static __device__ inline void
copy_four(float *to, rows r, int i, int d, int dim) {
    const int left = i < r.n && d < dim ? dim - d : 0;
    async_copy(to, left > 0 ? r.p + i * r.stride + d : r.p, left < 4 ? left : 4);
}

static __device__ inline void
copy_one_by_one(float *to, rows r, int i, int d, int dim) {
    for (int k = 0; k < 4; k++) {
        to[k] = i < r.n && d + k < dim ? r.p[i * r.stride + d + k] : 0.0f;
    }
}

/* 128 rows x 32 numbers from d on. */
static __device__ inline void
pair_load(float *to, rows r, int d, int dim) {
    const int chunk = threadIdx.x % 8;
    to += chunk / 2 * SUB + chunk % 2 * 4;
    if (rows_are_aligned(r)) {
#pragma unroll 2
        for (int n = 0; n < BIG; n += THREADS / 8) {
            const int row = n + threadIdx.x / 8;
            copy_four(to + row * 8, r, row, d + chunk * 4, dim);
        }
        return;
    }
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < BIG; row += THREADS / 8) {
        copy_one_by_one(to + row * 8, r, row, d + chunk * 4, dim);
    }
}

static __device__ inline void
pair_stage(float *room, const rows &a, const rows &b, int slice, int dim) {
    if (slice * SLICE < dim) {
        float *to = room + slice % 2 * PAIR_STAGE;
        pair_load(to, a, slice * SLICE, dim);
        pair_load(to + PAIR_STAGE / 2, b, slice * SLICE, dim);
    }
    async_commit();
}

/* acc = a b^T of 128 rows each.  pair_start sends for the first slices; whoever waits for them, in
 * pair_finish, may do something else in between.  The room is free when pair_finish returns. */
static __device__ inline void
pair_start(float *room, const rows &a, const rows &b, int dim) {
    pair_stage(room, a, b, 0, dim);
    pair_stage(room, a, b, 1, dim);
}

static __device__ inline void
pair_finish(float acc[4][4][4], float *room, const rows &a, const rows &b, int dim) {
    const struct place p = my_place();
    tensor_clear(acc);
    for (int slice = 0; slice * SLICE < dim; slice++) {
        async_wait<1>();
        __syncthreads();
        const float *sa = room + slice % 2 * PAIR_STAGE + (p.row + p.g) * 8 + 2 * p.t;
        const float *sb =
            room + slice % 2 * PAIR_STAGE + PAIR_STAGE / 2 + (p.column + p.g) * 8 + 2 * p.t;
#pragma unroll 1 /* two steps at once would not fit in the registers */
        for (int k = 0; k < SLICE / 8; k++) {
            const struct row_factor fa = {sa + k * SUB, 8};
            const struct row_factor_b fb = {sb + k * SUB};
            tensor_step(acc, fa, fb);
        }
        __syncthreads();
        pair_stage(room, a, b, slice + 2, dim);
    }
}

/* Rows of b, 32 of them and 128 columns from c0 on; stride so that neither order of k has bank
 * conflicts. */
static __device__ inline void
weigh_stage(float *room, const rows &b, int slice, int stride, int c0, int dim) {
    if (slice * SLICE < b.n) {
        const int column = threadIdx.x % 32 * 4;
        float *to = room + slice % 2 * WEIGH_STAGE + column;
        if (rows_are_aligned(b)) {
#pragma unroll 2
            for (int n = 0; n < SLICE; n += THREADS / 32) {
                const int row = n + threadIdx.x / 32;
                copy_four(to + row * stride, b, slice * SLICE + row, c0 + column, dim);
            }
        } else {
#pragma unroll 1
            for (int row = threadIdx.x / 32; row < SLICE; row += THREADS / 32) {
                copy_one_by_one(to + row * stride, b, slice * SLICE + row, c0 + column, dim);
            }
        }
    }
    async_commit();
}

template <bool TRANSPOSED>
static __device__ inline void
weigh_start(float *room, const rows &b, int c0, int dim) {
    weigh_stage(room, b, 0, TRANSPOSED ? BIG + 8 : BIG + 4, c0, dim);
    weigh_stage(room, b, 1, TRANSPOSED ? BIG + 8 : BIG + 4, c0, dim);
}

/* acc = w b, or w^T b if TRANSPOSED; w: 128 x 128 weights in shared memory, zero where b has no row,
 * W_STRIDE apart.  A barrier stands between their writing and this; the room is free after it. */
template <bool TRANSPOSED>
static __device__ inline void
weigh_finish(float acc[4][4][4], const float *w, float *room, const rows &b, int c0, int dim) {
    const struct place p = my_place();
    const int stride = TRANSPOSED ? BIG + 8 : BIG + 4;
    tensor_clear(acc);
    for (int slice = 0; slice * SLICE < b.n; slice++) {
        async_wait<1>();
        __syncthreads();
        const float *sb = room + slice % 2 * WEIGH_STAGE + p.column + p.g;
#pragma unroll 1 /* two steps at once would not fit in the registers */
        for (int k = 0; k < SLICE; k += 8) {
            const int o = slice * SLICE + k;
            if (TRANSPOSED) {
                const float *first = w + (o + p.t) * W_STRIDE + p.row + p.g;
                const struct column_factor fa = {first, first + 4 * W_STRIDE};
                const struct column_factor_b fb = {
                    sb + (k + p.t) * stride, sb + (k + p.t + 4) * stride};
                tensor_step(acc, fa, fb);
            } else {
                const struct row_factor fa = {w + (p.row + p.g) * W_STRIDE + o + 2 * p.t, W_STRIDE};
                const struct column_factor_b fb = {
                    sb + (k + 2 * p.t) * stride, sb + (k + 2 * p.t + 1) * stride};
                tensor_step(acc, fa, fb);
            }
        }
        __syncthreads();
        weigh_stage(room, b, slice + 2, stride, c0, dim);
    }
}

#endif
