#pragma once
/* Instructions that CUDA C++ cannot express, each in a wrapper that the CPU emulation of the tests replaces: tensor
 * cores in TF32 and half precision, and asynchronous copies. */

/* Tensor cores pay off where three TF32 products are faster than one in fp32: on the large cards (A100, H100 and H200,
 * B200), but not where the TF32 rate is at most twice the fp32 one (8.6, 8.9, 12.x). */
#if defined(PYA_EMULATE)
#define PYA_TENSOR 1
#elif defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200)
#define PYA_TENSOR 1
#endif
#endif

#ifdef PYA_EMULATE
#define PYA_DYNAMIC(name) float *const name = emu_dynamic()
#elif defined(PYA_TENSOR)
#define PYA_DYNAMIC(name) extern __shared__ __align__(16) float name[]

/* c (16 x 8) += a (16 x 8) times b (8 x 8), all 32 lanes together.  With g = lane / 4, t = lane % 4:
 * a[0..3] are (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b[0..1] are (t, g), (t + 4, g);
 * c[0..3] are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).  Of a and b the 11 leading
 * significant bits are read, the rest is cut off. */
static __device__ inline void
tf32_multiply(float c[4], const float a[4], const float b[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])),
                   "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

/* c (16 x 8) += a (16 x 16) times b (16 x 8) in half precision, two neighbours in k a word, the even one low.
 * a[0..3] begin at (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b[0..1] at (2t, g), (2t + 8, g); c as
 * above. */
static __device__ inline void
half_multiply(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two numbers to half precision, to nearest, as one word; too large ones become infinite. */
static __device__ inline unsigned
half_pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(low), "f"(high));
    return both;
}

static __device__ inline void
half_unpack(unsigned both, float *low, float *high) {
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.f32.f16 %0, x; cvt.f32.f16 %1, y;}"
        : "=f"(*low), "=f"(*high)
        : "r"(both));
}

/* 2^x with a relative error of 2^-22; 0 below 2^-126. */
static __device__ inline float
exp2_near(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Four 8 x 8 matrices of half precision from shared memory, all 32 lanes together.  Lane 8n + i says where row
 * i of matrix n lies: 16 bytes, aligned.  out[n] is (g, 2t) and (g, 2t + 1) of matrix n, TRANSPOSED (2t, g)
 * and (2t + 1, g). */
template <bool TRANSPOSED>
static __device__ inline void
matrix_load(unsigned out[4], const unsigned *row) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    }
}

/* Is x true in any of the 32 lanes?  All lanes must call it, and all get the answer. */
static __device__ inline bool
any_lane(bool x) {
    return __any_sync(0xffffffffu, x);
}

/* 1 / x to about one rounding step, for x from 2^-126 to 2^126. */
static __device__ inline float
reciprocal_about(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* n (0 to 4) numbers from global memory, zeros up to 4, to shared memory; both 16-byte aligned.  They
 * are there after async_wait and a barrier; from must be readable memory even where n is 0. */
static __device__ inline void
async_copy(float *to, const float *from, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(n * 4)
                 : "memory");
}

/* Closes a group of copies. */
static __device__ inline void
async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's copies but for those of the latest N groups. */
template <int N>
static __device__ inline void
async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}
#endif
