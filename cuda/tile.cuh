#pragma once
/* Matrix products of rows through shared memory, in plain fp32 FMA, so that the tests' CPU emulation does exactly the
 * same arithmetic.  256 threads per block. */

#ifndef PYA_EMULATE
#define PYA_SHUFFLE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#endif

typedef float real; /* the name that the C kernels use in shared headers */
#define PYA_SHARED static __device__ inline

enum { THREADS = 256, BIG = 128, SMALL = 64, DEPTH = 16 };

struct rows {
    const float *p;
    long long stride;
    int n; /* rows that exist, at most BIG; the others read as zero */
};

/* A block's place.  blockIdx.x counts all that blocks do not loop over, because a grid's other two indices end at
 * 65535. */
struct parted {
    unsigned part; /* of n_parts */
    unsigned rest;
};

static __device__ inline struct parted
block_part(long long n_parts) {
    struct parted p = {blockIdx.x % (unsigned)n_parts, blockIdx.x / (unsigned)n_parts};
    return p;
}

static __device__ inline int
at_most_big(long long n) {
    return (int)(n < BIG ? n : BIG);
}

[[maybe_unused]] static __device__ inline float
reduce4_add(float x) {
    x += PYA_SHUFFLE(x, 1);
    return x + PYA_SHUFFLE(x, 2);
}

[[maybe_unused]] static __device__ inline float
reduce4_max(float x) {
    x = fmaxf(x, PYA_SHUFFLE(x, 1));
    return fmaxf(x, PYA_SHUFFLE(x, 2));
}

static __device__ inline float
reduce16_add(float x) {
    for (int m = 8; m > 0; m >>= 1) {
        x += PYA_SHUFFLE(x, m);
    }
    return x;
}

static __device__ inline float
reduce16_max(float x) {
    for (int m = 8; m > 0; m >>= 1) {
        x = fmaxf(x, PYA_SHUFFLE(x, m));
    }
    return x;
}

static __device__ inline float
reduce32_add(float x) {
    return reduce16_add(x + PYA_SHUFFLE(x, 16));
}

/* 128 rows x 16 numbers from d on: each thread takes 8 numbers of one row. */
static __device__ inline void
big_fetch(float out[8], rows r, int d, int dim) {
    const int row = threadIdx.x / 2;
    const int k = d + threadIdx.x % 2 * 8;
    const float *p = r.p + row * r.stride + k;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out[i] = row < r.n && k + i < dim ? p[i] : 0.0f;
    }
}

static __device__ inline void
big_place(float s[DEPTH][BIG + 4], const float x[8]) {
    const int row = threadIdx.x / 2;
    const int k = threadIdx.x % 2 * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        s[k + i][row] = x[i];
    }
}

/* The column of a thread's j-th result: two groups of four, 64 apart, to avoid bank conflicts. */
static __device__ inline int
big_column(int j) {
    return threadIdx.x % 16 * 4 + j % 4 + j / 4 * 64;
}

static __device__ inline int
big_row(int i) {
    return threadIdx.x / 16 * 8 + i;
}

/* Loads four adjacent numbers from shared memory at once: left to the compiler, that took four loads on 9.0. */
static __device__ inline void
get_four(float x[4], const float *p) {
    const float4 all = *(const float4 *)p;
    x[0] = all.x;
    x[1] = all.y;
    x[2] = all.z;
    x[3] = all.w;
}

/* acc[i][j] = a row big_row(i) . b row big_column(j); loads the next slice while this one is multiplied. */
static __device__ inline void
big_multiply(float acc[8][8], rows a, rows b, int dim) {
    __shared__ __align__(16) float sa[DEPTH][BIG + 4];
    __shared__ __align__(16) float sb[DEPTH][BIG + 4];
    float xa[8];
    float xb[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            acc[i][j] = 0.0f;
        }
    }
    big_fetch(xa, a, 0, dim);
    big_fetch(xb, b, 0, dim);
    for (int d = 0; d < dim; d += DEPTH) {
        __syncthreads();
        big_place(sa, xa);
        big_place(sb, xb);
        __syncthreads();
        if (d + DEPTH < dim) {
            big_fetch(xa, a, d + DEPTH, dim);
            big_fetch(xb, b, d + DEPTH, dim);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float fa[8];
            float fb[8];
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                get_four(fa + i, &sa[k][big_row(i)]);
                get_four(fb + i, &sb[k][big_column(i)]);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    acc[i][j] = fmaf(fa[i], fb[j], acc[i][j]);
                }
            }
        }
    }
}

/* 64 rows x 16 numbers, transposed: each thread takes 4 numbers of one row. */
static __device__ inline void
small_load(float s[DEPTH][SMALL + 4], rows r, int d, int dim) {
    const int row = threadIdx.x / 4;
    const int k = threadIdx.x % 4 * 4;
    const float *p = r.p + row * r.stride + d + k;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[k + i][row] = row < r.n && d + k + i < dim ? p[i] : 0.0f;
    }
}

/* acc[i][j] = a row (ty*4 + i) . b row (tx*4 + j) */
static __device__ inline void
small_multiply(float acc[4][4], rows a, rows b, int dim) {
    __shared__ float sa[DEPTH][SMALL + 4];
    __shared__ float sb[DEPTH][SMALL + 4];
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            acc[i][j] = 0.0f;
        }
    }
    for (int d = 0; d < dim; d += DEPTH) {
        __syncthreads();
        small_load(sa, a, d, dim);
        small_load(sb, b, d, dim);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[i][j] = fmaf(sa[k][ty + i], sb[k][tx + j], acc[i][j]);
                }
            }
        }
    }
}

enum { WIDE = 64 }; /* columns that one call of wide_add computes */

/* acc[i][j] += sum over o of w[ty*4 + i][o] * b row o, column c0 + tx*4 + j; w: 64 x 64 weights in
 * shared memory, whole before the call */
static __device__ inline void
wide_add(float acc[4][4], const float w[SMALL][SMALL + 1], rows b, int c0, int dim) {
    __shared__ float sb[DEPTH][WIDE];
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    for (int o = 0; o < SMALL; o += DEPTH) {
        __syncthreads();
        for (int n = threadIdx.x; n < DEPTH * WIDE; n += THREADS) {
            const int row = o + n / WIDE;
            const int c = c0 + n % WIDE;
            sb[n / WIDE][n % WIDE] = row < b.n && c < dim ? b.p[row * b.stride + c] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[i][j] = fmaf(w[ty + i][o + k], sb[k][tx + j], acc[i][j]);
                }
            }
        }
    }
}
