#pragma once
/* AVX-512 backend of simd.h: 16 floats.  Floor 0.
 * Long because a backend is one list of small inline functions. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

typedef float real;
typedef __m512 vr;
typedef __mmask16 vm;
enum { VW = 16, MR = 8 };

static inline vr
v_set(real x) {
    return _mm512_set1_ps(x);
}
static inline vr
v_ld(const real *p) {
    return _mm512_loadu_ps(p);
}
static inline void
v_st(real *p, vr a) {
    _mm512_storeu_ps(p, a);
}
/* Stores past the caches; p is aligned to a whole vector. */
static inline void
v_nt(real *p, vr a) {
    _mm512_stream_ps(p, a);
}
static inline vr
v_ld_n(const real *p, int n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
static inline void
v_st_n(real *p, vr a, int n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), a);
}
/* Stores the lanes whose bits are set; the others keep what is there. */
static inline void
v_st_where(real *p, vr a, unsigned bits) {
    _mm512_mask_storeu_ps(p, (__mmask16)(bits & 0xffff), a);
}
/* Which of 64 bytes are zero. */
static inline uint64_t
b_zeros(const uint8_t *p) {
    const __m512i x = _mm512_loadu_si512((const void *)p);
    return _cvtmask64_u64(_mm512_cmpeq_epi8_mask(x, _mm512_setzero_si512()));
}
static inline vr
v_add(vr a, vr b) {
    return _mm512_add_ps(a, b);
}
static inline vr
v_sub(vr a, vr b) {
    return _mm512_sub_ps(a, b);
}
static inline vr
v_mul(vr a, vr b) {
    return _mm512_mul_ps(a, b);
}
static inline vr
v_div(vr a, vr b) {
    return _mm512_div_ps(a, b);
}
static inline vr
v_fma(vr a, vr b, vr c) {
    return _mm512_fmadd_ps(a, b, c);
}
/* the same for a single number */
static inline real
r_fma(real a, real b, real c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
static inline vr
v_fnma(vr a, vr b, vr c) {
    return _mm512_fnmadd_ps(a, b, c);
}
static inline vr
v_max(vr a, vr b) {
    return _mm512_max_ps(a, b);
}
static inline vr
v_min(vr a, vr b) {
    return _mm512_min_ps(a, b);
}
static inline vm
m_lt(vr a, vr b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
static inline vm
m_eq(vr a, vr b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
static inline vr
v_sel(vm m, vr yes, vr no) {
    return _mm512_mask_blend_ps(m, no, yes);
}
static inline bool
m_any(vm m) {
    return m != 0;
}
/* Sums of products with more than twice the digits; each product is exact. */
typedef struct {
    __m512d low, high;
} vwide;
static inline vwide
w_fma(vr a, vr b, vwide c) {
    const __m512d a0 = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d a1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    const __m512d b0 = _mm512_cvtps_pd(_mm512_castps512_ps256(b));
    const __m512d b1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1));
    return (vwide){_mm512_fmadd_pd(a0, b0, c.low), _mm512_fmadd_pd(a1, b1, c.high)};
}
/* from + a, rounded once near -from */
static inline void
w_st(double *p, vwide a, double from) {
    _mm512_storeu_pd(p, _mm512_add_pd(_mm512_set1_pd(from), a.low));
    _mm512_storeu_pd(p + 8, _mm512_add_pd(_mm512_set1_pd(from), a.high));
}
/* Sums of vectors and of products in double: the same as vwide unless real is double itself. */
typedef vwide vd;
static inline vd
d_ld(const double *p) {
    return (vd){_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)};
}
static inline void
d_st(double *p, vd a) {
    _mm512_storeu_pd(p, a.low);
    _mm512_storeu_pd(p + 8, a.high);
}
static inline vd
d_fma(vr a, vr b, vd c) {
    return w_fma(a, b, c);
}
/* c + a (b - (m ? less : 0)) */
static inline vd
d_fma_less(vr a, vr b, vm m, double less, vd c) {
    const __m512d x = _mm512_set1_pd(less);
    const __m512d a0 = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d a1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    __m512d b0 = _mm512_cvtps_pd(_mm512_castps512_ps256(b));
    __m512d b1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1));
    b0 = _mm512_mask_sub_pd(b0, (__mmask8)m, b0, x);
    b1 = _mm512_mask_sub_pd(b1, (__mmask8)(m >> 8), b1, x);
    return (vd){_mm512_fmadd_pd(a0, b0, c.low), _mm512_fmadd_pd(a1, b1, c.high)};
}
static inline double
v_hsum_wide(vr a) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    return _mm512_reduce_add_pd(_mm512_add_pd(low, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))));
}
static inline real
v_hsum(vr a) {
    return _mm512_reduce_add_ps(a);
}
static inline real
v_hmax(vr a) {
    return _mm512_reduce_max_ps(a);
}
/* lane i: the sum of a[i] */
static inline vr
v_hsums(const vr a[16]) {
    vr two[8];  /* of four lanes, sums of two each of a[2i] and a[2i + 1], alternating */
    vr four[4]; /* of four lanes, one sum of four each of a[4i] to a[4i + 3] */
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        two[i] = v_add(
            _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d x = _mm512_castps_pd(two[2 * i]);
        const __m512d y = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = v_add(
            _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    const vr low = v_add(
        _mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
    const vr high = v_add(
        _mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
    return v_add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}
enum { LEAST_POWER2 = -127 }; /* 2^LEAST_POWER2 acts as 0 */
/* n: the integer nearest to a, from LEAST_POWER2 to 127; the result is 2^n in the form that v_scale2() takes.
 * Adding a number so large that the sum's last bits count ones puts n there; shifted up, they are 2^n.  (scalef would take
 * hundreds of cycles wherever its result is denormal or underflows, as for every hidden score.) */
static inline vr
v_power2(vr a, vr *n) {
    const vr large = _mm512_set1_ps(12582912.0f - (float)LEAST_POWER2); /* 1.5 * 2^23, the bias */
    const vr sum = _mm512_add_ps(a, large);
    *n = _mm512_sub_ps(sum, large);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(sum), 23));
}
/* a * 2^n */
static inline vr
v_scale2(vr a, vr power) {
    return _mm512_mul_ps(a, power);
}
/* 1/a, a normal: the 14-bit estimate and one Newton step */
static inline vr
v_rcp(vr a) {
    vr r = _mm512_rcp14_ps(a);
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r, r);
}
/* a = m * 2^e with m in [0.75, 1.5); a normal and positive */
static inline vr
v_split(vr a, vr *e) {
    const __m512i base = _mm512_set1_epi32(0x3f400000);
    __m512i bits = _mm512_castps_si512(a);
    __m512i exponent = _mm512_srai_epi32(_mm512_sub_epi32(bits, base), 23);
    *e = _mm512_cvtepi32_ps(exponent);
    return _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(exponent, 23)));
}
typedef __m512i vi;
static inline vi
i_set(unsigned x) {
    return _mm512_set1_epi32((int)x);
}
static inline vi
i_iota(void) {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vi
i_add(vi a, vi b) {
    return _mm512_add_epi32(a, b);
}
static inline vi
i_mul(vi a, vi b) {
    return _mm512_mullo_epi32(a, b);
}
static inline vi
i_xor(vi a, vi b) {
    return _mm512_xor_si512(a, b);
}
#define i_shr(a, n) _mm512_srli_epi32(a, n)
/* a non-negative integer below 2^24 as a real */
static inline vr
i_to_v(vi a) {
    return _mm512_cvtepi32_ps(a);
}
static inline vi
i_and(vi a, vi b) {
    return _mm512_and_si512(a, b);
}
static inline vi
i_or(vi a, vi b) {
    return _mm512_or_si512(a, b);
}
/* the larger one, unsigned */
static inline vi
i_max(vi a, vi b) {
    return _mm512_max_epu32(a, b);
}
static inline unsigned
i_hmax(vi a) {
    return _mm512_reduce_max_epu32(a);
}
static inline void
i_st(uint32_t *p, vi a) {
    _mm512_storeu_si512(p, a);
}
/* the bits of a, and back */
static inline vi
v_bits(vr a) {
    return _mm512_castps_si512(a);
}
static inline vr
i_real(vi a) {
    return _mm512_castsi512_ps(a);
}
