#pragma once
/* Portable backend of simd.h: one lane, plain C, for float and (PYA_REAL_F64) double.
 * It is also the reference that the other backends and the CUDA kernels are compared with.
 * Floor 0.  Long because a backend is one list of small inline functions. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef PYA_REAL_F64
typedef double real;
#else
typedef float real;
#endif
typedef real vr;
typedef bool vm;
typedef uint32_t vi;
enum { VW = 1, MR = 4 };

static inline vr
v_set(real x) {
    return x;
}
static inline vr
v_ld(const real *p) {
    return *p;
}
static inline void
v_st(real *p, vr a) {
    *p = a;
}
/* Stores past the caches; p is aligned to a whole vector. */
static inline void
v_nt(real *p, vr a) {
    *p = a;
}
static inline vr
v_ld_n(const real *p, int n) {
    return n > 0 ? *p : 0;
}
static inline void
v_st_n(real *p, vr a, int n) {
    if (n > 0) {
        *p = a;
    }
}
/* Stores the lanes whose bits are set; the others keep what is there. */
static inline void
v_st_where(real *p, vr a, unsigned bits) {
    if (bits & 1) {
        *p = a;
    }
}
/* Which of 64 bytes are zero: eight at a time, whose highest bits a product gathers in its highest byte. */
static inline uint64_t
b_zeros(const uint8_t *p) {
    const uint64_t low = 0x7f7f7f7f7f7f7f7f;
    uint64_t zeros = 0;
    for (int i = 0; i < 64; i += 8) {
        uint64_t x = 0;
        for (int j = 0; j < 8; j++) {
            x |= (uint64_t)p[i + j] << (8 * j);
        }
        const uint64_t is_zero = ~(((x & low) + low) | x | low) >> 7;
        zeros |= (is_zero * 0x0102040810204080 >> 56) << i;
    }
    return zeros;
}
static inline vr
v_add(vr a, vr b) {
    return a + b;
}
static inline vr
v_sub(vr a, vr b) {
    return a - b;
}
static inline vr
v_mul(vr a, vr b) {
    return a * b;
}
static inline vr
v_fma(vr a, vr b, vr c) {
    return a * b + c;
}
/* the same for a single number */
static inline real
r_fma(real a, real b, real c) {
    return a * b + c;
}
static inline vr
v_fnma(vr a, vr b, vr c) {
    return c - a * b;
}
/* NaN in the second operand survives, as in the vector instructions. */
static inline vr
v_max(vr a, vr b) {
    return a > b ? a : b;
}
static inline vr
v_min(vr a, vr b) {
    return a < b ? a : b;
}
static inline vm
m_lt(vr a, vr b) {
    return a < b;
}
static inline vm
m_eq(vr a, vr b) {
    return a == b;
}
static inline vr
v_sel(vm m, vr yes, vr no) {
    return m ? yes : no;
}
static inline bool
m_any(vm m) {
    return m;
}
#ifdef PYA_REAL_F64
/* Sums of products with twice the digits: the rounding errors of products and sums are summed too. */
typedef struct {
    double sum, lost;
} vwide;
static inline vwide
w_fma(vr a, vr b, vwide c) {
    const double p = a * b;
    const double s = c.sum + p;
    const double back = s - c.sum;
    return (vwide){s, c.lost + fma(a, b, -p) + ((c.sum - (s - back)) + (p - back))};
}
static inline void
w_st(double *p, vwide a, double from) {
    *p = (from + a.sum) + a.lost;
}
#else
/* Sums of products with more than twice the digits; each product is exact. */
typedef struct {
    double sum;
} vwide;
static inline vwide
w_fma(vr a, vr b, vwide c) {
    return (vwide){c.sum + (double)a * (double)b};
}
/* from + a, rounded once near -from */
static inline void
w_st(double *p, vwide a, double from) {
    *p = from + a.sum;
}
#endif
/* Sums of numbers and of products in double. */
typedef double vd;
static inline vd
d_ld(const double *p) {
    return *p;
}
static inline void
d_st(double *p, vd a) {
    *p = a;
}
static inline vd
d_fma(vr a, vr b, vd c) {
    return c + (double)a * (double)b;
}
/* c + a (b - (m ? less : 0)) */
static inline vd
d_fma_less(vr a, vr b, vm m, double less, vd c) {
    return c + (double)a * ((double)b - (m ? less : 0));
}
static inline double
v_hsum_wide(vr a) {
    return (double)a;
}
static inline real
v_hsum(vr a) {
    return a;
}
static inline real
v_hmax(vr a) {
    return a;
}
/* lane i: the sum of a[i] */
static inline vr
v_hsums(const vr a[1]) {
    return a[0];
}
static inline vr
v_rcp(vr a) {
    return 1 / a;
}
static inline vi
i_set(unsigned x) {
    return x;
}
static inline vi
i_iota(void) {
    return 0;
}
static inline vi
i_add(vi a, vi b) {
    return a + b;
}
static inline vi
i_mul(vi a, vi b) {
    return a * b;
}
static inline vi
i_xor(vi a, vi b) {
    return a ^ b;
}
#define i_shr(a, n) ((a) >> (n))
static inline vr
i_to_v(vi a) {
    return (vr)a;
}
#ifndef PYA_REAL_F64
static inline vi
i_and(vi a, vi b) {
    return a & b;
}
static inline vi
i_or(vi a, vi b) {
    return a | b;
}
/* the larger one, unsigned */
static inline vi
i_max(vi a, vi b) {
    return a > b ? a : b;
}
static inline unsigned
i_hmax(vi a) {
    return a;
}
static inline void
i_st(uint32_t *p, vi a) {
    *p = a;
}
/* the bits of a, and back */
static inline vi
v_bits(vr a) {
    vi bits;
    memcpy(&bits, &a, sizeof bits);
    return bits;
}
static inline vr
i_real(vi a) {
    vr x;
    memcpy(&x, &a, sizeof x);
    return x;
}
#endif

#ifdef PYA_REAL_F64
static inline vr
v_exp(vr x) {
    return exp(x);
}
static inline vr
v_exp2(vr x) {
    return exp2(x);
}
static inline vr
v_log(vr y) {
    return log(y);
}
static inline vr
v_log1m(vr d) {
    return log1p(d);
}
static inline vr
v_log1m_fine(vr d) {
    return log1p(d);
}
static inline vr
v_log_either(vm is_small, vr x) {
    return is_small ? log(x) : log1p(x);
}
static inline vr
v_tanh(vr x) {
    return tanh(x);
}
#else
static inline vr
v_exp(vr x) {
    return expf(x);
}
static inline vr
v_exp2(vr x) {
    return exp2f(x);
}
static inline vr
v_log(vr y) {
    return logf(y);
}
static inline vr
v_log1m(vr d) {
    return log1pf(d);
}
static inline vr
v_log1m_fine(vr d) {
    return log1pf(d);
}
static inline vr
v_log_either(vm is_small, vr x) {
    return is_small ? logf(x) : log1pf(x);
}
static inline vr
v_tanh(vr x) {
    return tanhf(x);
}
#endif
