#pragma once
/* Products of 128 x 128 on tensor cores, as accurate as fp32.  On its way to shared memory each number is split into
 * two half-precision parts, x = hi + lo; the result is lo*hi + hi*lo + hi*hi, small terms first.  The tensor core
 * truncates when it adds, so long sums would drift: it sums 16 terms at a time, and those sums are added in fp32,
 * rounded to nearest.
 *
 * 8 warps, four in rows and two in columns, each computing 32 x 64 of the result. */
#include "mma.cuh"
#include "tile.cuh"

#ifdef PYA_TENSOR

enum {
    SLICE = 32,     /* numbers of each row that are multiplied between two barriers: 16 or 32 */
    PAIR_AHEAD = 1, /* slices on their way from global memory */
    PAIR_SLICE = 2 * BIG * SLICE, /* both factors, in floats; hi and lo take as much as one */
    PAIR_ROOM = (2 + PAIR_AHEAD) * PAIR_SLICE, /* two slices split, the others as they came */
    PAIR_LONG = 1024,   /* from this many dimensions on cosines need lo*lo as well */
    W_STRIDE = BIG + 8, /* 8: no bank conflicts */
    W_ROOM = BIG * W_STRIDE,
    WEIGH_DEPTH = 16, /* the same for weighted sums: rows of b in a slice, slices on their way */
    WEIGH_AHEAD = 2,
    WEIGH_RAW = WEIGH_DEPTH * BIG,
    WEIGH_STRIDE = BIG / 2 + 4, /* words of a row of hi or of lo; 4: no bank conflicts */
    WEIGH_SLICE = 2 * WEIGH_DEPTH * WEIGH_STRIDE,
    WEIGH_ROOM = 2 * WEIGH_SLICE + WEIGH_AHEAD * WEIGH_RAW,
};

struct place {
    int row, column; /* of the warp's part */
    int g, t;        /* of the lane */
};

static __device__ inline struct place
my_place() {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    struct place p = {warp / 2 * 32, warp % 2 * 64, lane / 4, lane % 4};
    return p;
}

/* A thread's part of the result; tensor_row and tensor_column tell where [i][j][e] is in 128 x 128. */
typedef float patch[2][8][4];

static __device__ inline int
tensor_row(struct place p, int i, int e) {
    return p.row + i * 16 + e / 2 * 8 + p.g;
}

static __device__ inline int
tensor_column(struct place p, int j, int e) {
    return p.column + j * 8 + 2 * p.t + e % 2;
}

static __device__ inline void
tensor_clear(patch acc) {
#pragma unroll
    for (int n = 0; n < 64; n++) {
        acc[n / 32][n / 4 % 8][n % 4] = 0.0f;
    }
}

/* scale * (x, y) in two parts: hi has 11 bits, lo the next 11.  At most 2^-23 of a number is lost, or 2^-25 if that
 * is more.  If hi is infinite, lo is infinite with the other sign, so that any sum with both is NaN. */
static __device__ inline void
split_halves(float x, float y, float scale, unsigned *hi, unsigned *lo) {
    float hx;
    float hy;
    *hi = half_pack(x * scale, y * scale);
    half_unpack(*hi, &hx, &hy);
    *lo = half_pack(fmaf(x, scale, -hx), fmaf(y, scale, -hy));
}

/* The same with a whole number as hi.  Sums of their products are exact up to 2^24, however a tensor core truncates. */
static __device__ inline void
split_whole(float x, float y, float scale, unsigned *hi, unsigned *lo) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    float hx = fmaf(x, scale, shift) - shift;
    float hy = fmaf(y, scale, shift) - shift;
    *hi = half_pack(hx, hy);
    half_unpack(*hi, &hx, &hy); /* above 2048 half precision does not have every whole number */
    *lo = half_pack(fmaf(x, scale, -hx), fmaf(y, scale, -hy));
}

/* One factor of a step of 16: [0] hi and [1] lo. */
struct fragments_a {
    unsigned part[2][2][4]; /* [which][i] */
};
struct fragments_b {
    unsigned part[2][4]; /* of two columns of tiles, j even and j odd */
};

/* acc += scale * a step of 16, for columns 2q and 2q + 1.  LOWEST: only lo*lo, otherwise all but lo*lo. */
template <bool LOWEST>
static __device__ inline void
tensor_step(
    patch acc, int q, const struct fragments_a &a, const struct fragments_b &b, float scale) {
    float c[4][4] = {};
#pragma unroll
    for (int which = LOWEST ? 3 : 0; which < (LOWEST ? 4 : 3); which++) {
        const int of_a = which == 0 || which == 3; /* lo*hi, hi*lo, hi*hi; lo*lo */
        const int of_b = which == 1 || which == 3;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            half_multiply(c[n], a.part[of_a][n / 2], &b.part[of_b][n % 2 * 2]);
        }
    }
#pragma unroll
    for (int n = 0; n < 16; n++) {
        float *to = &acc[n / 8][2 * q + n / 4 % 2][n % 4];
        *to = fmaf(c[n / 4][n % 4], scale, *to);
    }
}

/* Loads two adjacent numbers from shared memory. */
static __device__ inline void
get_pair(const float *p, float *x, float *y) {
    const float2 both = *(const float2 *)p;
    *x = both.x;
    *y = both.y;
}

/* Can groups of four numbers be copied at once? */
static __device__ inline bool
rows_are_aligned(rows r) {
    return ((unsigned long long)r.p | (unsigned long long)r.stride * 4) % 16 == 0;
}

/* Copies groups of four numbers at column d from N rows, i, i + step, ...; zeros where there are none.  The groups go
 * to places 4 * THREADS apart, which only this thread reads after async_wait, so it needs no barrier.  r is passed by
 * value: by reference it would be read from shared memory again after each copy. */
template <int N>
static __device__ inline void
copy_fours(float *to, const rows r, int i, int step, int d, int dim) {
    const float *from = r.p + i * r.stride + d;
    const int left = dim - d;
    if (rows_are_aligned(r)) {
        const long long apart = step * r.stride;
        if (i + (N - 1) * step < r.n && left >= 4) { /* nearly always */
#pragma unroll
            for (int n = 0; n < N; n++, from += apart) {
                async_copy(to + n * 4 * THREADS, from, 4);
            }
            return;
        }
        const int n_numbers = left < 0 ? 0 : left < 4 ? left : 4;
#pragma unroll 1
        for (int n = 0; n < N; n++, from += apart) {
            const int n_here = i + n * step < r.n ? n_numbers : 0;
            async_copy(to + n * 4 * THREADS, n_here > 0 ? from : r.p, n_here);
        }
        return;
    }
#pragma unroll 1
    for (int n = 0; n < 4 * N; n++) {
        const bool is_there = i + n / 4 * step < r.n && n % 4 < left;
        to[n / 4 * 4 * THREADS + n % 4] = is_there ? from[n / 4 * step * r.stride + n % 4] : 0.0f;
    }
}

/* --- pairs: acc = a b^T of 128 rows each --------------------------------------------------------- */

/* Cosines of unit vectors.  With these scales a sum of 16 products of hi hardly ever exceeds 2^24 (1/8 of a cosine),
 * and lo is so small that leaving out lo*lo costs at most 4e-8 at the mode below PAIR_LONG dimensions; with 8192 for
 * both it would cost more.  A row of a with a number of 4 or more, or of b with 8 or more, gives NaN. */
#define PYA_SCALE_A 16384.0f
#define PYA_SCALE_B 8192.0f

/* Where a chunk of a row is stored: four words of hi; those of lo lie PAIR_LO words later.  The exclusive or puts
 * chunks with the same number, of eight successive rows, in different banks. */
static __device__ inline int
pair_chunk(int row, int chunk) {
    return row * (SLICE / 2) + 4 * (chunk ^ (SLICE == 32 ? row >> 1 & 3 : row >> 2 & 1));
}

enum {
    PAIR_LO = BIG * SLICE / 2,
    QUADS = SLICE / 4, /* groups of four numbers of a row, and threads that take one each */
    PASSES = BIG * QUADS / THREADS,
};

static __device__ inline void
pair_load(float *raw, const rows &r, int d, int dim) {
    copy_fours<PASSES>(
        raw + threadIdx.x * 4, r, threadIdx.x / QUADS, THREADS / QUADS, d + threadIdx.x % QUADS * 4,
        dim);
}

static __device__ inline void
pair_split(unsigned *to, const float *raw, float scale) {
    const int quad = threadIdx.x % QUADS;
    to += pair_chunk(threadIdx.x / QUADS, quad / 2) + quad % 2 * 2;
    raw += threadIdx.x * 4;
#pragma unroll
    for (int n = 0; n < PASSES; n++) {
        const int at = n * (THREADS / QUADS) * (SLICE / 2);
        float x[4];
        uint2 hi;
        uint2 lo;
        get_four(x, raw + n * THREADS * 4);
        split_whole(x[0], x[1], scale, &hi.x, &lo.x);
        split_whole(x[2], x[3], scale, &hi.y, &lo.y);
        *(uint2 *)(to + at) = hi;
        *(uint2 *)(to + at + PAIR_LO) = lo;
    }
}

static __device__ inline float *
pair_raw(float *room, int slice) {
    return room + (2 + slice % PAIR_AHEAD) * PAIR_SLICE;
}

static __device__ inline void
pair_stage(float *room, const rows &a, const rows &b, int slice, int dim) {
    if (slice * SLICE < dim) {
        pair_load(pair_raw(room, slice), a, slice * SLICE, dim);
        pair_load(pair_raw(room, slice) + PAIR_SLICE / 2, b, slice * SLICE, dim);
    }
    async_commit();
}

/* pair_start requests the first slices; pair_finish waits for them.  Other work may be done in between. */
static __device__ inline void
pair_start(float *room, const rows &a, const rows &b, int dim) {
    for (int slice = 0; slice < PAIR_AHEAD; slice++) {
        pair_stage(room, a, b, slice, dim);
    }
}

template <bool LOWEST>
static __device__ inline void
pair_multiply(patch acc, const unsigned *a, const unsigned *b) {
    const struct place p = my_place();
    const int lane = threadIdx.x % 32;
    const int at_a = pair_chunk(p.row + lane % 16, lane / 16);
    const int at_b = pair_chunk(p.column + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll 1                             /* two steps at once would not fit in the registers */
    for (int k = 0; k < SLICE / 8; k += 2) { /* chunk + k is chunk ^ k */
        const unsigned *const from_a = a + (at_a ^ 4 * k);
        const unsigned *const from_b = b + (at_b ^ 4 * k);
        struct fragments_a fa;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = n / 2 * PAIR_LO + n % 2 * 16 * (SLICE / 2);
            matrix_load<false>(fa.part[n / 2][n % 2], from_a + at);
        }
#pragma unroll
        for (int q = 0; q < 4; q++) {
            struct fragments_b fb;
            matrix_load<false>(fb.part[0], from_b + q * 16 * (SLICE / 2));
            matrix_load<false>(fb.part[1], from_b + q * 16 * (SLICE / 2) + PAIR_LO);
            tensor_step<LOWEST>(acc, q, fa, fb, 1 / (PYA_SCALE_A * PYA_SCALE_B));
        }
    }
}

/* A slice is split into one of two buffers while other threads still multiply what is in the other.  room is free
 * when pair_finish returns. */
static __device__ inline void
pair_finish(patch acc, float *room, const rows &a, const rows &b, int dim) {
    tensor_clear(acc);
#pragma unroll 1
    for (int slice = 0; slice * SLICE < dim; slice++) {
        unsigned *const to = (unsigned *)room + slice % 2 * PAIR_SLICE;
        async_wait<PAIR_AHEAD - 1>();
        pair_split(to, pair_raw(room, slice), PYA_SCALE_A);
        pair_split(to + PAIR_SLICE / 2, pair_raw(room, slice) + PAIR_SLICE / 2, PYA_SCALE_B);
        pair_stage(room, a, b, slice + PAIR_AHEAD, dim);
        __syncthreads();
        if (dim >= PAIR_LONG) {
            pair_multiply<true>(acc, to, to + PAIR_SLICE / 2);
        }
        pair_multiply<false>(acc, to, to + PAIR_SLICE / 2);
    }
    __syncthreads();
}

/* --- weighted sums: acc = w b, or w^T b if TRANSPOSED; w: 128 x 128 weights in shared memory ------------- */

#define PYA_SCALE_WEIGHED 2048.0f

static __device__ inline float *
weigh_raw(float *room, int slice) {
    return room + 2 * WEIGH_SLICE + slice % WEIGH_AHEAD * WEIGH_RAW + threadIdx.x * 4;
}

/* Requests 16 rows of b, 128 columns from c0 on. */
static __device__ inline void
weigh_stage(float *room, const rows &b, int slice, int c0, int dim) {
    if (slice * WEIGH_DEPTH < b.n) {
        const int row = slice * WEIGH_DEPTH + threadIdx.x / 32;
        copy_fours<WEIGH_DEPTH / 8>(
            weigh_raw(room, slice), b, row, 8, c0 + threadIdx.x % 32 * 4, dim);
    }
    async_commit();
}

static __device__ inline void
weigh_split(unsigned *to, const float *raw) {
    to += threadIdx.x / 32 * WEIGH_STRIDE + threadIdx.x % 32 * 2;
#pragma unroll
    for (int n = 0; n < WEIGH_DEPTH / 8; n++) {
        float x[4];
        uint2 hi;
        uint2 lo;
        get_four(x, raw + n * THREADS * 4);
        split_halves(x[0], x[1], PYA_SCALE_WEIGHED, &hi.x, &lo.x);
        split_halves(x[2], x[3], PYA_SCALE_WEIGHED, &hi.y, &lo.y);
        *(uint2 *)(to + n * 8 * WEIGH_STRIDE) = hi;
        *(uint2 *)(to + n * 8 * WEIGH_STRIDE + WEIGH_SLICE / 2) = lo;
    }
}

static __device__ inline void
weigh_start(float *room, const rows &b, int c0, int dim) {
    for (int slice = 0; slice < WEIGH_AHEAD; slice++) {
        weigh_stage(room, b, slice, c0, dim);
    }
}

/* The largest absolute weight of each row, in either half of the columns, and of each column, in each quarter of the
 * rows.  The code that computes w fills it in. */
enum { OF_ROWS = 0, OF_COLUMNS = 2, N_LARGEST = 6 };
typedef float largest_weights[N_LARGEST][BIG];

/* The power of two that brings a row's largest weight to at least 2^14 and below 2^15 (weights below 2^-101 do not
 * all get that far), and the factor for its results that follows from it. */
static __device__ inline float
weigh_scale(float largest) {
    const int exponent = __float_as_int(largest) >> 23;
    return __int_as_float((268 - (exponent < 26 ? 26 : exponent)) << 23);
}

static __device__ inline float
weigh_unscale(float scale) {
    const int exponent = __float_as_int(scale) >> 23;
    return __int_as_float((243 - exponent) << 23);
}

/* The weights of a slice, split, as half_multiply takes them; first: the weight at the thread's first row of the
 * result and its first k.  If TRANSPOSED, k is permuted as by weigh_slot, to avoid bank conflicts. */
template <bool TRANSPOSED>
static __device__ inline void
weigh_fragments(struct fragments_a *a, const float *first, const float scale[4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int i = n / 4;
        const int row = n % 2 * 8 + i * 16;
        const int k = n / 2 % 2 * 8;
        const float *at = TRANSPOSED ? first + k * W_STRIDE + row : first + row * W_STRIDE + k;
        float x[2];
        if (TRANSPOSED) {
            x[0] = at[0];
            x[1] = at[4 * W_STRIDE];
        } else {
            get_pair(at, &x[0], &x[1]);
        }
        split_halves(
            x[0], x[1], scale[i * 2 + n % 2], &a->part[0][i][n % 4], &a->part[1][i][n % 4]);
    }
}

template <bool TRANSPOSED>
static __device__ inline int
weigh_slot(int slot) {
    return TRANSPOSED ? (slot & 8) | (slot >> 1 & 3) | (slot & 1) << 2 : slot;
}

template <bool TRANSPOSED>
static __device__ inline void
weigh_multiply(patch acc, const float *first, const unsigned *b, const float scale[4]) {
    const struct place p = my_place();
    const int lane = threadIdx.x % 32;
    const int k = weigh_slot<TRANSPOSED>(lane % 16);
    struct fragments_a fa;
    weigh_fragments<TRANSPOSED>(&fa, first, scale);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        struct fragments_b fb;
        const unsigned *at = b + k * WEIGH_STRIDE + p.column / 2 + q * 8 + lane / 16 * 4;
        matrix_load<true>(fb.part[0], at);
        matrix_load<true>(fb.part[1], at + WEIGH_SLICE / 2);
        tensor_step<false>(acc, q, fa, fb, 1.0f);
    }
}

/* w must be zero where b has no row.  A barrier must separate writing w from this; room is free afterwards. */
template <bool TRANSPOSED>
static __device__ inline void
weigh_finish(
    patch acc, const float *w, float *room, const largest_weights largest, const rows &b, int c0,
    int dim) {
    const struct place p = my_place();
    const float *first =
        w + (TRANSPOSED ? p.t * W_STRIDE + p.row + p.g : (p.row + p.g) * W_STRIDE + 2 * p.t);
    float scale[4];
    tensor_clear(acc);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int row = tensor_row(p, n / 2, n % 2 * 2);
        float most = 0.0f;
#pragma unroll
        for (int k = TRANSPOSED ? OF_COLUMNS : OF_ROWS; k < (TRANSPOSED ? N_LARGEST : OF_COLUMNS);
             k++) {
            most = fmaxf(most, largest[k][row]);
        }
        scale[n] = weigh_scale(most);
    }
#pragma unroll 1
    for (int slice = 0; slice * WEIGH_DEPTH < b.n; slice++) {
        unsigned *const to = (unsigned *)room + slice % 2 * WEIGH_SLICE;
        async_wait<WEIGH_AHEAD - 1>();
        weigh_split(to, weigh_raw(room, slice));
        weigh_stage(room, b, slice + WEIGH_AHEAD, c0, dim);
        __syncthreads();
        weigh_multiply<TRANSPOSED>(acc, first, to, scale);
        first += WEIGH_DEPTH * (TRANSPOSED ? W_STRIDE : 1);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 64; n++) {
        acc[n / 32][n / 4 % 8][n % 4] *= weigh_unscale(scale[n / 32 * 2 + n % 4 / 2]);
    }
}

/* The same by fp32 multiply-adds, for b with numbers that cannot be split into half-precision parts. */
template <bool TRANSPOSED>
static __device__ inline void
weigh_plain(patch acc, const float *w, const rows &b, int c0, int dim) {
    const struct place p = my_place();
    async_wait<0>(); /* for what weigh_start requested */
    tensor_clear(acc);
#pragma unroll 1
    for (int k = 0; k < b.n; k++) {
#pragma unroll
        for (int n = 0; n < 64; n++) {
            const int row = tensor_row(p, n / 32, n % 4);
            const int d = c0 + tensor_column(p, n / 4 % 8, n % 4);
            const float x = d < dim ? b.p[k * b.stride + d] : 0.0f;
            float *to = &acc[n / 32][n / 4 % 8][n % 4];
            *to = fmaf(TRANSPOSED ? w[k * W_STRIDE + row] : w[row * W_STRIDE + k], x, *to);
        }
    }
    __syncthreads();
}

#endif
