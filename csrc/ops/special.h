#pragma once
/* The PowerSpherical normaliser in double precision.  Floor 0. */

struct pya_special_norm {
    double h;  /* log C(kappa) + kappa log 2 */
    double dh; /* its derivative in kappa */
};

/* kappa >= 0, dim >= 2; NaN for kappa <= -beta.  h = lgamma(kappa + 2 beta) - lgamma(kappa + beta) - beta log(4 pi) with
 * beta = (dim - 1) / 2 (De Cao and Aziz 2020, rearranged so that nothing large cancels). */
struct pya_special_norm pya_special_normalizer(double kappa, double dim);
