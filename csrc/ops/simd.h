#pragma once
/* A small vector vocabulary for all CPU kernels.  A kernel file is compiled once per backend.  The build chooses the backend
 * with -DPYA_ISA_avx512, -DPYA_ISA_avx2 or -DPYA_ISA_scalar (-DPYA_REAL_F64 for doubles), and the names that the file
 * defines end in the backend's name: PYA_FN().
 * Lanes: vr holds VW reals; MR is the number of rows of a matrix tile that fit in the registers.
 * Floor 0. */
#if !defined(PYA_ISA_avx512) && !defined(PYA_ISA_avx2) && !defined(PYA_ISA_scalar)
#define PYA_ISA_scalar /* for tools such as clang-tidy, outside the build */
#endif
#if defined(PYA_ISA_avx512)
#include "simd_avx512.h"
#define PYA_SUFFIX avx512
#elif defined(PYA_ISA_avx2)
#include "simd_avx2.h"
#define PYA_SUFFIX avx2
#elif defined(PYA_REAL_F64)
#include "simd_scalar.h"
#define PYA_SUFFIX f64
#else
#include "simd_scalar.h"
#define PYA_SUFFIX scalar
#endif

#if defined(PYA_ISA_avx512) || defined(PYA_ISA_avx2)
#include "simd_math.h"
#endif

#include <stddef.h>

#define PYA_CAT_(a, b) a##_##b
#define PYA_CAT(a, b) PYA_CAT_(a, b)
#define PYA_FN(name) PYA_CAT(name, PYA_SUFFIX)

static inline real
v_dot(const real *x, const real *y, ptrdiff_t n) {
    vr s0 = v_set(0);
    vr s1 = v_set(0);
    ptrdiff_t k = 0;
    for (; k + 2 * VW <= n; k += 2 * VW) {
        s0 = v_fma(v_ld(x + k), v_ld(y + k), s0);
        s1 = v_fma(v_ld(x + k + VW), v_ld(y + k + VW), s1);
    }
    for (; k < n; k += VW) {
        int rest = n - k < VW ? (int)(n - k) : VW;
        s1 = v_fma(v_ld_n(x + k, rest), v_ld_n(y + k, rest), s1);
    }
    return v_hsum(v_add(s0, s1));
}
