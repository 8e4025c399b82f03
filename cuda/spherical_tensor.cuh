#pragma once
/* Shared by the PowerSpherical kernels for cards with fast tensor cores, forward and backward. */
#include "args.h"
#include "spherical.cuh"
#include "tensor.cuh"

#ifdef PYA_TENSOR

static_assert(
    (PAIR_ROOM > W_ROOM ? PAIR_ROOM : W_ROOM) * sizeof(float) == PYA_OPS_PAIR_BYTES,
    "the launcher knows the room");
static_assert((W_ROOM + WEIGH_ROOM) * sizeof(float) == PYA_OPS_WEIGH_BYTES, "and this one");
static_assert(PAIR_ROOM <= W_ROOM + WEIGH_ROOM, "gaps and weights take the place of the factors");

/* Can two neighbours, at an even index and the next, be loaded and stored at once? */
static __device__ inline bool
pairs_are_aligned(const void *p, long long step, long long a, long long b) {
    return step == 1 && ((unsigned long long)p | (unsigned long long)((a | b) * 4)) % 8 == 0;
}

/* Puts the views of a tile's samples and components in shared memory, where they take no registers. */
static __device__ inline void
stage_views(const struct pya_ops_ps &a, rows both[2], int l0, int m0, int t) {
    __syncthreads();
    if (threadIdx.x == 0) {
        both[0] = view_rows(a.value, l0, t, a.n_l - l0);
        both[1] = view_rows(a.loc, m0, t, a.n_m - m0);
    }
    __syncthreads();
}

/* Must a cosine be recomputed?  Also if it is NaN, as it is if a number is too large for its half-precision parts. */
static __device__ inline bool
is_to_be_made_again(float u, float low, float high) {
    return !(u >= low && u <= high);
}

/* Need none of the thread's cosines be recomputed?  Nearly always so, and few instructions find out.
 * high(column): the cosine above which one must be. */
template <class High>
static __device__ inline bool
none_is_coarse(const patch acc, float low, const High &high) {
    const struct place p = my_place();
    float most = -low;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        most = fminf(most, high(tensor_column(p, n / 2, n % 2)));
    }
    bool none = true;
#pragma unroll
    for (int n = 0; n < 64; n++) {
        none &= fabsf(acc[n / 32][n / 4 % 8][n % 4]) <= most;
    }
    return none;
}

/* Calls make(row, column, whether they exist) for each pair that the thread marked in a part. */
template <class Make>
static __device__ inline void
for_marked(unsigned found, int part, const rows both[2], const Make &make) {
    const struct place p = my_place();
    while (found != 0) {
        const int n = take_lowest(&found);
        const int row = tensor_row(p, part, n % 4);
        const int column = tensor_column(p, n / 4, n % 4);
        make(row, column, row < both[0].n && column < both[1].n);
    }
}

/* Stores what the thread has of its r-th row of the result, r from 0 to 3; all of it must exist and be aligned. */
static __device__ inline void
store_row(float *to, const patch acc, int r) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float *x = &acc[r / 2][j][r % 2 * 2];
        const float2 both = {x[0], x[1]};
        *(float2 *)(to + 8 * j) = both;
    }
}

/* Writes the gaps to w, where the same thread reads them: this frees registers, and later loops need not be unrolled.
 * Recomputes coarse ones.  Sets *wild if some cosine is NaN. */
static __device__ inline void
put_gaps(
    float *w, const patch acc, const struct component *comp, float low, const rows both[2], int dim,
    bool *wild) {
    const struct place p = my_place();
    unsigned found[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int n = 0; n < 32; n += 2) {
            const int c = tensor_column(p, n / 4, 0);
            const float *u = &acc[part][n / 4][n % 4];
            found[part] |= is_to_be_made_again(u[0], low, comp[c].high) ? 1u << n : 0;
            found[part] |= is_to_be_made_again(u[1], low, comp[c + 1].high) ? 2u << n : 0;
            const float2 gaps = {gap_of(u[0]), gap_of(u[1])};
            *(float2 *)(w + tensor_row(p, part, n % 4) * W_STRIDE + c) = gaps;
        }
    }
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const unsigned here = part == 0 ? found[0] : found[1];
        for_marked(here, part, both, [&](int row, int c, bool is_there) {
            float *gap = w + row * W_STRIDE + c;
            if (is_there && *gap != *gap) {
                *wild = true; /* every thread that gets here writes the same */
            }
            *gap = is_there ? sharp_gap(both[0], both[1], row, c, dim) : 0.0f;
        });
    }
}

/* e^x.  Its relative error grows with |x|, as it does anyway if x is a rounded sum. */
static __device__ inline float
exp_about(float x) {
    return exp2_near(x * 1.44269504f);
}

#endif
