/* A difference of two lgammas of close arguments, rearranged so that the large parts cancel on paper:
 *   lgamma(a+b) - lgamma(a) = (a - 1/2) log1p(b/a) + b (log(a+b) - 1) + s(a+b) - s(a),
 * where s is the Stirling series, after a was shifted up until six terms of s are exact to a double. */
#include "special.h"

#include <math.h>

static const double stirling_from = 12.0;
static const double log_4pi = 2.53102424696929079;

static double
special_series(double x) {
    double r = 1.0 / x;
    double q = r * r;
    return r * (1.0 / 12 +
                q * (-1.0 / 360 +
                     q * (1.0 / 1260 + q * (-1.0 / 1680 + q * (1.0 / 1188 - q * 691.0 / 360360)))));
}

/* digamma(x) - log(x) */
static double
special_digamma_tail(double x) {
    double r = 1.0 / x;
    double q = r * r;
    return -0.5 * r -
           q * (1.0 / 12 -
                q * (1.0 / 120 -
                     q * (1.0 / 252 - q * (1.0 / 240 - q * (1.0 / 132 - q * 691.0 / 32760)))));
}

struct pya_special_norm
pya_special_normalizer(double kappa, double dim) {
    const double b = 0.5 * (dim - 1.0);
    double a = kappa + b;
    if (a <= 0) { /* no density; this also keeps the shift below from counting up from -1e30 */
        return (struct pya_special_norm){(double)NAN, (double)NAN};
    }
    /* The shift's factors a / (a + b) and terms b / (a (a + b)) are brought to one denominator each, because a division
     * takes as long as the rest of a step.  At most 12 factors; they are large only if D is, and then a is. */
    double above = 1.0;
    double below = 1.0;
    double terms = 0.0; /* over above below */
    while (a < stirling_from) {
        terms = terms * (a * (a + b)) + above * below;
        above *= a;
        below *= a + b;
        a += 1.0;
    }
    const double ratio = above / below;
    const double shift = b * terms / (above * below);
    struct pya_special_norm out;
    double l1 = log1p(b / a);
    out.h = (a - 0.5) * l1 + b * (log(a + b) - 1.0) + special_series(a + b) - special_series(a) -
            b * log_4pi;
    if (ratio < 1.0) {
        out.h += log(ratio);
    }
    out.dh = l1 + special_digamma_tail(a + b) - special_digamma_tail(a) + shift;
    return out;
}
