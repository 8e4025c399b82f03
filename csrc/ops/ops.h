#pragma once
/* The C interface of libpyalloc_ops: fused CPU ops.  Callers pass pointers and element strides; no
 * framework type appears here.  Every function is thread-safe, allocates only scratch of a size
 * independent of the batch, and gives bitwise equal results for equal inputs.  Floor 2. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_OPS_API __attribute__((visibility("default")))

typedef enum pya_ops_status {
    PYA_OPS_OK = 0,
    PYA_OPS_E_NOMEM = 1,
    PYA_OPS_E_INVAL = 2,
    PYA_OPS_E_DRIVER = 3,
} pya_ops_status;

typedef enum pya_ops_isa {
    PYA_OPS_ISA_SCALAR = 0,
    PYA_OPS_ISA_AVX2 = 1,
    PYA_OPS_ISA_AVX512 = 2,
} pya_ops_isa;

typedef enum pya_ops_dtype {
    PYA_OPS_F32 = 0,
    PYA_OPS_F64 = 1,
} pya_ops_dtype;

/* A matrix of rows (or numbers) addressed by two batch indices; strides in elements, 0 = shared. */
struct pya_ops_view {
    void *p;
    int64_t i, t;
};

/* PowerSpherical: value (l,t,D), loc (m,t,D), scale and log_weights (m,t); D is contiguous.
 * The two-index views use i for l or m.  NULL p: not wanted. */
struct pya_ops_ps {
    int64_t n_l, n_m, n_t, dim;
    struct pya_ops_view value, loc, scale, log_weights;
    void *out; /* log-prob (l,m,t), or for the mixture (l,t) with out_m unused */
    int64_t out_l, out_m, out_t;
    const void *grad; /* of out, its own strides */
    int64_t grad_l, grad_m, grad_t;
    struct pya_ops_view d_value, d_loc, d_scale, d_log_weights;
    int32_t dtype;     /* pya_ops_dtype */
    int32_t n_threads; /* at least 1 */
};

PYA_OPS_API int pya_ops_ps_forward(const struct pya_ops_ps *ps);
PYA_OPS_API int pya_ops_ps_backward(const struct pya_ops_ps *ps);
/* out is read by the backward of the mixture: it is all that is kept from the forward. */
PYA_OPS_API int pya_ops_ps_mixture_forward(const struct pya_ops_ps *ps);
PYA_OPS_API int pya_ops_ps_mixture_backward(const struct pya_ops_ps *ps);

/* Widest instruction set this machine and this build both have; the one in use; choose a narrower
 * one (tests, measurements). */
PYA_OPS_API int pya_ops_isa_best(void);
PYA_OPS_API int pya_ops_isa_current(void);
PYA_OPS_API int pya_ops_isa_select(int isa);
PYA_OPS_API int pya_ops_max_threads(void);

#ifdef __cplusplus
}
#endif
