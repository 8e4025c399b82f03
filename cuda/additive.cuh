#pragma once
/* Additive attention: shared by forward and backward; rows are read four numbers at a time.  Formulas and names are
 * those of csrc/ops/additive.c.  A decoder step is small and bound by memory, so everything in a launch is requested
 * at once, in as few dependent launches as possible.  Keys may stay in the L2 cache from step to step; what is larger
 * (values and gradients) passes through it. */
#include "args.h"
#include "tile.cuh"

enum {
    WARPS = THREADS / 32,
    SPREAD = 128, /* numbers of a row that a warp takes at a time: four a lane */
    AHEAD = 8,    /* the most such loads that a thread issues before it uses the first */
};

/* Blocks per multiprocessor of the kernels that read values: after 9.0, limiting them to 64 registers would spill. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
enum { STREAM_BLOCKS = 3 };
#else
enum { STREAM_BLOCKS = 4 };
#endif

/* Quads of a row loaded at once; rows that are not wide take four loads for each. */
static __device__ constexpr int
ahead(bool is_wide) {
    return is_wide ? AHEAD : AHEAD / 4;
}

/* Loads and stores of what is not read again soon: the caches evict it first. */
#ifndef PYA_EMULATE
#define PYA_LOAD_ONCE(p) __ldcs(p)
#define PYA_STORE_ONCE(p, x) __stcs(p, x)
#define PYA_LOAD_SHARED(p) __ldcg(p) /* what other blocks of the launch wrote */
#endif

static __device__ inline const float *
seq_row(struct pya_ops_view v, long long i, long long b) {
    return (const float *)v.p + i * v.i + b * v.t;
}

static __device__ inline float *
seq_row_to(struct pya_ops_view v, long long i, long long b) {
    return (float *)v.p + i * v.i + b * v.t;
}

/* Is row s of values one that does not stay in the L2 cache, because not all fit? */
static __device__ inline bool
value_is_once(const struct pya_ops_additive &a, int s) {
    return (int)((unsigned)s * 7 % PYA_OPS_KEPT_OF) >= (int)a.n_kept; /* evenly spread */
}

/* Does every row start at an address where four numbers can be loaded at once? */
static __device__ inline bool
seq_is_wide(struct pya_ops_view v) {
    const unsigned long long p = (unsigned long long)v.p;
    return (p | (unsigned long long)(v.i * 4) | (unsigned long long)(v.t * 4)) % 16 == 0;
}

/* Number k of a row of n, zero beyond. */
static __device__ inline float
number_at(const float *row, int k, int n) {
    return k < n ? row[k] : 0.0f;
}

/* A lane's four of the 128 numbers that a warp takes of a row: adjacent in a wide row, else 32 apart, so that
 * either way the lanes' loads are contiguous. */
struct quad {
    float x[4];
};

/* Index of this lane's first number among those from k on. */
template <bool WIDE>
static __device__ inline int
quad_place(int k) {
    return k + (int)(threadIdx.x % 32) * (WIDE ? 4 : 1);
}

/* Of a row of n (a multiple of 4 if wide), zeros beyond. */
template <bool WIDE>
static __device__ inline struct quad
quad_load(const float *row, int k, int n) {
    struct quad q = {};
    if (WIDE) {
        if (k < n) {
            const float4 all = *(const float4 *)(row + k);
            q = {{all.x, all.y, all.z, all.w}};
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q.x[i] = number_at(row, k + 32 * i, n);
        }
    }
    return q;
}

/* As quad_load; not to stay in the caches if is_once. */
template <bool WIDE>
static __device__ inline struct quad
quad_load_once(const float *row, int k, int n, bool is_once = true) {
    struct quad q = {};
    if (WIDE) {
        if (k < n) {
            const float4 *p = (const float4 *)(row + k);
            const float4 all = is_once ? PYA_LOAD_ONCE(p) : *p;
            q = {{all.x, all.y, all.z, all.w}};
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q.x[i] = k + 32 * i < n ? PYA_LOAD_ONCE(row + k + 32 * i) : 0.0f;
        }
    }
    return q;
}

template <bool WIDE>
static __device__ inline void
quad_store(float *row, int k, int n, struct quad q) {
    if (WIDE) {
        if (k < n) {
            PYA_STORE_ONCE((float4 *)(row + k), make_float4(q.x[0], q.x[1], q.x[2], q.x[3]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (k + 32 * i < n) {
                PYA_STORE_ONCE(row + k + 32 * i, q.x[i]);
            }
        }
    }
}

/* Separates a batch of loads from their use.  Without it ptxas moves later loads behind the first use; it does not
 * move them across a barrier.  For whole warps. */
static __device__ inline void
loads_first() {
    __syncwarp();
}

static __device__ inline void
quad_add(struct quad *sum, float w, struct quad q) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum->x[i] = fmaf(w, q.x[i], sum->x[i]);
    }
}
