#pragma once
/* Which cosines of PowerSpherical are too coarse, and what stands for them, here and in cuda/.  A density depends
 * on 1 + u, which a cosine near the antipode has lost in its rounding, and times a large kappa on 1 - u, lost
 * near the mode.  There the sum of products is made again with more digits, and both ends kept.  Floor 1. */
#include "tile.h"
#ifndef __CUDACC_RTC__
#include <math.h>
#endif

#ifndef PYA_SHARED
#define PYA_SHARED static inline /* the kernels of cuda/ say more */
#endif

/* A cosine errs by a rounding step or, near +-1, by its own share of one that grows with the root of the
 * dimension; a gradient errs by that over 1 + u of itself.  The ratio of such an error to what is allowed. */
PYA_SHARED double
ps_coarseness(int64_t dim) {
#ifdef PYA_REAL_F64
    const double step = 1.1102230246251565e-16;
#else
    const double step = 5.9604645e-8;
#endif
    return step * fmax(1.0, 0.25 * sqrt((double)dim)) / 5e-7;
}

/* The cosine below which it is too coarse.  All are on the circle and the sphere, where many lie near -1. */
PYA_SHARED real
ps_low(int64_t dim) {
    return dim <= 3 && sizeof(real) == sizeof(float) ? (real)INFINITY
                                                     : (real)(-1 / (1 + ps_coarseness(dim)));
}

/* And the one above, where kappa times its error is too much of the log-probability h + kappa log y. */
PYA_SHARED real
ps_high(real coarseness, real kappa, real h) {
    const real size = h < 0 ? -h : h;
    const real high = (kappa + 2 * (size < 1 ? 1 : size)) / (kappa * (1 + coarseness));
    return high < 1 ? high : (real)INFINITY;
}

/* A cosine with all digits at both ends, as one number: 1 + u below 0, u - 1 elsewhere.  This one says that
 * 1 + u is 0 or less. */
#define PS_BEHIND ((real)1e-37)

PYA_SHARED real
ps_gap(double one_plus_u, double u_minus_one) {
    const double most = u_minus_one > 0 ? 0 : u_minus_one; /* NaN stays */
    const double gap = one_plus_u < 1 ? one_plus_u : most;
    return one_plus_u <= 0 ? PS_BEHIND : (real)gap;
}
