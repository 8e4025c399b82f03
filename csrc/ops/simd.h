#pragma once
/* One small vector vocabulary for every CPU kernel.  A kernel file is compiled once per backend;
 * the build chooses the backend with -DPYA_ISA_avx512, -DPYA_ISA_avx2 or -DPYA_ISA_scalar
 * (-DPYA_REAL_F64 for doubles) and the names it defines end in the backend's name: PYA_FN().
 * Lanes: vr holds VW reals, MR is the number of rows of the matrix tile that fit the registers.
 * Floor 0. */
#if !defined(PYA_ISA_avx512) && !defined(PYA_ISA_avx2) && !defined(PYA_ISA_scalar)
#define PYA_ISA_scalar /* a reader such as clang-tidy, outside the build */
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

#define PYA_CAT_(a, b) a##_##b
#define PYA_CAT(a, b) PYA_CAT_(a, b)
#define PYA_FN(name) PYA_CAT(name, PYA_SUFFIX)
