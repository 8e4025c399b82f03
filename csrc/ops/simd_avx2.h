#pragma once
/* AVX2 + FMA backend of simd.h: 8 floats.  Floor 0.
 * Long because a backend is one list of small inline functions. */
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

typedef float real;
typedef __m256 vr;
typedef __m256 vm;
enum { VW = 8, MR = 6 };

static inline vr
v_set(real x) {
    return _mm256_set1_ps(x);
}
static inline vr
v_ld(const real *p) {
    return _mm256_loadu_ps(p);
}
static inline void
v_st(real *p, vr a) {
    _mm256_storeu_ps(p, a);
}
static inline __m256i
v_head_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* Stores past the caches; p is aligned to a whole vector. */
static inline void
v_nt(real *p, vr a) {
    _mm256_stream_ps(p, a);
}
/* n <= VW.  A whole vector is stored without a mask, since Zen 3 needs 20 steps for a masked store. */
static inline vr
v_ld_n(const real *p, int n) {
    return n == VW ? v_ld(p) : _mm256_maskload_ps(p, v_head_mask(n));
}
static inline void
v_st_n(real *p, vr a, int n) {
    if (n == VW) {
        v_st(p, a);
    } else {
        _mm256_maskstore_ps(p, v_head_mask(n), a);
    }
}
/* Stores the lanes whose bits are set; the others keep what is there, and are written too. */
static inline void
v_st_where(real *p, vr a, unsigned bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i its = _mm256_and_si256(_mm256_set1_epi32((int)bits), lane);
    const vr is_set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(its, lane));
    v_st(p, _mm256_blendv_ps(v_ld(p), a, is_set));
}
/* Which of 64 bytes are zero. */
static inline uint64_t
b_zeros(const uint8_t *p) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    const __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)(p + 32));
    const uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, zero));
    const uint32_t high = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(y, zero));
    return (uint64_t)high << 32 | low;
}
static inline vr
v_add(vr a, vr b) {
    return _mm256_add_ps(a, b);
}
static inline vr
v_sub(vr a, vr b) {
    return _mm256_sub_ps(a, b);
}
static inline vr
v_mul(vr a, vr b) {
    return _mm256_mul_ps(a, b);
}
static inline vr
v_div(vr a, vr b) {
    return _mm256_div_ps(a, b);
}
static inline vr
v_fma(vr a, vr b, vr c) {
    return _mm256_fmadd_ps(a, b, c);
}
/* the same for a single number */
static inline real
r_fma(real a, real b, real c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
static inline vr
v_fnma(vr a, vr b, vr c) {
    return _mm256_fnmadd_ps(a, b, c);
}
static inline vr
v_max(vr a, vr b) {
    return _mm256_max_ps(a, b);
}
static inline vr
v_min(vr a, vr b) {
    return _mm256_min_ps(a, b);
}
static inline vm
m_lt(vr a, vr b) {
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
static inline vm
m_eq(vr a, vr b) {
    return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
}
static inline vr
v_sel(vm m, vr yes, vr no) {
    return _mm256_blendv_ps(no, yes, m);
}
static inline bool
m_any(vm m) {
    return _mm256_movemask_ps(m) != 0;
}
/* Sums of products with more than twice the digits; each product is exact. */
typedef struct {
    __m256d low, high;
} vwide;
static inline vwide
w_fma(vr a, vr b, vwide c) {
    const __m256d a0 = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const __m256d a1 = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    const __m256d b0 = _mm256_cvtps_pd(_mm256_castps256_ps128(b));
    const __m256d b1 = _mm256_cvtps_pd(_mm256_extractf128_ps(b, 1));
    return (vwide){_mm256_fmadd_pd(a0, b0, c.low), _mm256_fmadd_pd(a1, b1, c.high)};
}
/* from + a, rounded once near -from */
static inline void
w_st(double *p, vwide a, double from) {
    _mm256_storeu_pd(p, _mm256_add_pd(_mm256_set1_pd(from), a.low));
    _mm256_storeu_pd(p + 4, _mm256_add_pd(_mm256_set1_pd(from), a.high));
}
/* Sums of vectors and of products in double: the same as vwide unless real is double itself. */
typedef vwide vd;
static inline vd
d_ld(const double *p) {
    return (vd){_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
}
static inline void
d_st(double *p, vd a) {
    _mm256_storeu_pd(p, a.low);
    _mm256_storeu_pd(p + 4, a.high);
}
static inline vd
d_fma(vr a, vr b, vd c) {
    return w_fma(a, b, c);
}
/* c + a (b - (m ? less : 0)) */
static inline vd
d_fma_less(vr a, vr b, vm m, double less, vd c) {
    const __m256d x = _mm256_set1_pd(less);
    const __m256i bits = _mm256_castps_si256(m);
    const __m256d m0 = _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(bits)));
    const __m256d m1 =
        _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_extracti128_si256(bits, 1)));
    const __m256d a0 = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const __m256d a1 = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    __m256d b0 = _mm256_cvtps_pd(_mm256_castps256_ps128(b));
    __m256d b1 = _mm256_cvtps_pd(_mm256_extractf128_ps(b, 1));
    b0 = _mm256_sub_pd(b0, _mm256_and_pd(m0, x));
    b1 = _mm256_sub_pd(b1, _mm256_and_pd(m1, x));
    return (vd){_mm256_fmadd_pd(a0, b0, c.low), _mm256_fmadd_pd(a1, b1, c.high)};
}
static inline double
v_hsum_wide(vr a) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const __m256d s = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    const __m128d t = _mm_add_pd(_mm256_castpd256_pd128(s), _mm256_extractf128_pd(s, 1));
    return _mm_cvtsd_f64(_mm_add_sd(t, _mm_unpackhi_pd(t, t)));
}
static inline real
v_hsum(vr a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline real
v_hmax(vr a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
/* lane i: the sum of a[i] */
static inline vr
v_hsums(const vr a[8]) {
    const vr x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const vr y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return v_add(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
enum { LEAST_POWER2 = -127 }; /* 2^LEAST_POWER2 acts as 0 */
/* n: the integer nearest to a, from LEAST_POWER2 to 127; the result is 2^n in the form that v_scale2() takes.
 * Adding a number so large that the sum's last bits count ones puts n there; shifted up, they are 2^n. */
static inline vr
v_power2(vr a, vr *n) {
    const vr large = _mm256_set1_ps(12582912.0f - (float)LEAST_POWER2); /* 1.5 * 2^23, the bias */
    const vr sum = _mm256_add_ps(a, large);
    *n = _mm256_sub_ps(sum, large);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(sum), 23));
}
/* a * 2^n */
static inline vr
v_scale2(vr a, vr power) {
    return _mm256_mul_ps(a, power);
}
/* 1/a; AVX2's 12-bit estimate would need two Newton steps, so a division is as fast */
static inline vr
v_rcp(vr a) {
    return _mm256_div_ps(_mm256_set1_ps(1.0f), a);
}
/* a = m * 2^e with m in [0.75, 1.5); a normal and positive */
static inline vr
v_split(vr a, vr *e) {
    const __m256i base = _mm256_set1_epi32(0x3f400000);
    __m256i bits = _mm256_castps_si256(a);
    __m256i exponent = _mm256_srai_epi32(_mm256_sub_epi32(bits, base), 23);
    *e = _mm256_cvtepi32_ps(exponent);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(exponent, 23)));
}
typedef __m256i vi;
static inline vi
i_set(unsigned x) {
    return _mm256_set1_epi32((int)x);
}
static inline vi
i_iota(void) {
    return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
}
static inline vi
i_add(vi a, vi b) {
    return _mm256_add_epi32(a, b);
}
static inline vi
i_mul(vi a, vi b) {
    return _mm256_mullo_epi32(a, b);
}
static inline vi
i_xor(vi a, vi b) {
    return _mm256_xor_si256(a, b);
}
#define i_shr(a, n) _mm256_srli_epi32(a, n)
/* a non-negative integer below 2^24 as a real */
static inline vr
i_to_v(vi a) {
    return _mm256_cvtepi32_ps(a);
}
