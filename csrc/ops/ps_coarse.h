#pragma once
/* Which cosines u of PowerSpherical are too coarse, and what replaces them, here and in cuda/.  A density depends on 1 + u,
 * which rounding ruins near the antipode, and on kappa (1 - u), which it ruins near the mode if kappa is large.  There the
 * dot product is recomputed with more digits, and stored as a gap, which has them at both ends.  Floor 1. */
#include "tile.h"
#ifndef __CUDACC_RTC__
#include <math.h>
#endif

#ifndef PYA_SHARED
#define PYA_SHARED static inline /* cuda/ has its own definition */
#endif

/* The error of a cosine over the allowed error.  It is one rounding step or, near +-1, a fraction of one that grows with the
 * root of the dimension; the relative error of a gradient is that divided by 1 + u. */
PYA_SHARED double
ps_coarseness(int64_t dim) {
#ifdef PYA_REAL_F64
    const double step = 1.1102230246251565e-16;
#else
    const double step = 5.9604645e-8;
#endif
    return step * fmax(1.0, 0.25 * sqrt((double)dim)) / 5e-7;
}

/* Cosines below this are too coarse.  On the circle and the sphere all are, since many lie near -1. */
PYA_SHARED real
ps_low(int64_t dim) {
    return dim <= 3 && sizeof(real) == sizeof(float) ? (real)INFINITY
                                                     : (real)(-1 / (1 + ps_coarseness(dim)));
}

/* Cosines above this are too coarse: kappa times the error is too much for the log-probability h + kappa log y. */
PYA_SHARED real
ps_high(real coarseness, real kappa, real h) {
    const real size = h < 0 ? -h : h;
    const real high = (kappa + 2 * (size < 1 ? 1 : size)) / (kappa * (1 + coarseness));
    return high < 1 ? high : (real)INFINITY;
}

/* A gap: a cosine with all digits at both ends, in one number.  It is 1 + u for u < 0, and u - 1 otherwise.  PS_BEHIND says
 * that 1 + u <= 0. */
#define PS_BEHIND ((real)1e-37)

PYA_SHARED real
ps_gap(double one_plus_u, double u_minus_one) {
    const double most = u_minus_one > 0 ? 0 : u_minus_one; /* NaN stays */
    const double gap = one_plus_u < 1 ? one_plus_u : most;
    return one_plus_u <= 0 ? PS_BEHIND : (real)gap;
}
