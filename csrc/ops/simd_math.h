#pragma once
/* exp, log, log1p and tanh of float vectors to about 1e-7 relative; polynomials and the ratio
 * fitted by Lawson iteration (weighted least squares to minimax) for the ranges named at each.  Floor 0. */
#include <math.h>

/* exp(r) - 1 on |r| <= ln2/2: r + r^2 q(r), error 1.1e-7 of exp */
static inline vr
v_expm1_core(vr r) {
    vr q = v_fma(v_set(0.008312477730214596f), r, v_set(0.041890550404787064f));
    q = v_fma(q, r, v_set(0.16667115688323975f));
    q = v_fma(q, r, v_set(0.4999922811985016f));
    return v_fma(v_mul(r, r), q, r);
}

/* x <= 88; below -87 the result is 0, so that exp(-inf) needs no special case; NaN stays NaN */
static inline vr
v_exp(vr x) {
    const vr low = v_set(-87.0f);
    const vr inside = v_max(low, x);
    vr n; /* inside = n ln2 + r */
    const vr power = v_power2(v_mul(inside, v_set(1.44269504088896341f)), &n);
    vr r = v_fnma(n, v_set(0.693145751953125f), inside);
    r = v_fnma(n, v_set(1.42860682030941723e-6f), r);
    vr y = v_scale2(v_add(v_expm1_core(r), v_set(1.0f)), power);
    return v_sel(m_lt(x, low), v_set(0.0f), y);
}

/* 2^x, x <= 127; -inf gives 0; the polynomial's error is 8e-8 relative, 2.2e-7 with all roundings */
static inline vr
v_exp2(vr x) {
    x = v_max(v_set(LEAST_POWER2), x); /* this order keeps NaN */
    vr n;
    const vr power = v_power2(x, &n);
    vr f = v_sub(x, n);
    vr p = v_fma(v_set(0.001327647129073739f), f, v_set(0.009675541892647743f));
    p = v_fma(p, f, v_set(0.05550713092088699f));
    p = v_fma(p, f, v_set(0.24022120237350464f));
    p = v_fma(p, f, v_set(0.6931469440460205f));
    p = v_fma(p, f, v_set(1.0000001192092896f));
    return v_scale2(p, power);
}

/* log(1 + f) on [-0.25, 0.5]: f + f^2 q(f), error 2.8e-8 relative */
static inline vr
v_log1p_core(vr f) {
    vr q = v_fma(v_set(0.05413254350423813f), f, v_set(-0.12067381292581558f));
    q = v_fma(q, f, v_set(0.14983923733234406f));
    q = v_fma(q, f, v_set(-0.1682281196117401f));
    q = v_fma(q, f, v_set(0.1997707635164261f));
    q = v_fma(q, f, v_set(-0.24993441998958588f));
    q = v_fma(q, f, v_set(0.3333354890346527f));
    q = v_fma(q, f, v_set(-0.5000005960464478f));
    return v_fma(v_mul(f, f), q, f);
}

/* log(y), y normal, positive and finite, or NaN: splitting the bits loses a NaN, adding 0 * y restores it */
static inline vr
v_log(vr y) {
    vr e;
    vr f = v_sub(v_split(y, &e), v_set(1.0f));
    vr r = v_fma(e, v_set(0.693147180559945309f), v_log1p_core(f));
    return v_fma(v_set(0.0f), y, r);
}

/* log(y), y in (0, 1.5] and d = y - 1.  If no power of two was split off, f is d itself, not (1 + d) - 1, so that small d keep
 * their relative accuracy. */
static inline vr
v_log_positive(vr y, vr d) {
    vr e;
    vr m = v_split(y, &e);
    vr f = v_sel(m_eq(e, v_set(0.0f)), d, v_sub(m, v_set(1.0f)));
    vr r = v_fma(e, v_set(0.693147180559945309f), v_log1p_core(f));
    return v_fma(v_set(0.0f), y, r); /* NaN, as in v_log */
}

/* The same for y >= 0; -inf at 0. */
static inline vr
v_log_beside(vr y, vr d) {
    return v_sel(m_eq(y, v_set(0.0f)), v_set(-INFINITY), v_log_positive(y, d));
}

/* log(1 + d) for d in [-1, 0.5] */
static inline vr
v_log1m(vr d) {
    return v_log_beside(v_add(d, v_set(1.0f)), d);
}

/* log(1 + d) for d in (-1, 0.5] */
static inline vr
v_log1m_fine(vr d) {
    return v_log_positive(v_add(d, v_set(1.0f)), d);
}

/* log(x) if is_small (x from 0 to 0.5), else log(1 + x) (x from -1 to 0) */
static inline vr
v_log_either(vm is_small, vr x) {
    return v_log_beside(v_sel(is_small, x, v_add(x, v_set(1.0f))), x);
}

/* tanh as x P(x^2) / Q(x^2).  The ratio's own error is 1.4e-8 relative on [-8.6, 8.6], where float has reached 1.  All
 * coefficients are positive, so that nothing cancels: 3.4e-7 with all roundings. */
static inline vr
v_tanh(vr x) {
    x = v_min(v_set(8.6f), v_max(v_set(-8.6f), x)); /* this order keeps NaN */
    const vr y = v_mul(x, x);
    vr p = v_fma(v_set(1.4146975146900331e-08f), y, v_set(2.1171619664528407e-05f));
    vr q = v_fma(v_set(8.097809427454195e-07f), y, v_set(0.00033412815537303686f));
    p = v_fma(p, y, v_set(0.003529523266479373f));
    q = v_fma(q, y, v_set(0.026005921885371208f));
    p = v_fma(p, y, v_set(0.13409551978111267f));
    q = v_fma(q, y, v_set(0.4674287736415863f));
    p = v_fma(p, y, v_set(1.0f));
    q = v_fma(q, y, v_set(1.0f));
    return v_div(v_mul(x, p), q);
}
