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

/* Additive (Bahdanau) attention: score = v . tanh(key + query), probabilities over s, context =
 * sum of probability * value.  Rows of n_h and n_e numbers are contiguous. */
struct pya_ops_additive {
    int64_t n_b, n_q, n_s, n_h, n_e;
    struct pya_ops_view query, keys, values; /* i: q or s, t: b */
    const void *v;                           /* [n_h] */
    const uint8_t *mask;                     /* NULL, or nonzero where s takes part */
    int64_t mask_b, mask_s;
    void *probs; /* [n_b][n_q][n_s]; written by forward, read by backward */
    struct pya_ops_view context;
    struct pya_ops_view grad, grad_probs; /* grad_probs.p may be NULL */
    struct pya_ops_view d_query, d_keys, d_values;
    void *d_v;          /* [n_b][n_h], one partial sum per batch entry */
    int32_t accumulate; /* nonzero: d_keys and d_values are added to */
    int32_t dtype;
    int32_t n_threads;
};

PYA_OPS_API int pya_ops_additive_forward(const struct pya_ops_additive *a);
PYA_OPS_API int pya_ops_additive_backward(const struct pya_ops_additive *a);

/* Rows of one head; strides in elements, the row itself contiguous. */
struct pya_ops_heads {
    void *p;
    int64_t b, h, s;
};
/* Scores' companions: bias, mask and the gradient of the bias; stride 0 = shared. */
struct pya_ops_scores {
    void *p;
    int64_t b, h, q, k;
};

/* Scaled dot-product attention; query head h reads key head h / (n_h / n_kv). */
struct pya_ops_attention {
    int64_t n_b, n_h, n_kv, n_q, n_k, dim, dim_v;
    struct pya_ops_heads q, k, v, out;
    void *lse; /* [n_b][n_h][n_q], log2 of the sum of exp(score) */
    struct pya_ops_scores bias, mask /* bytes */;
    double scale, dropout;
    uint64_t seed;
    struct pya_ops_heads grad, d_q, d_k, d_v;
    struct pya_ops_scores d_bias;
    int32_t d_bias_add; /* nonzero: d_bias starts as zeros and is added to */
    int32_t causal;     /* query i sees keys 0..i */
    int32_t dtype;
    int32_t n_threads;
};

PYA_OPS_API int pya_ops_attention_forward(const struct pya_ops_attention *a);
PYA_OPS_API int pya_ops_attention_backward(const struct pya_ops_attention *a);

/* Widest instruction set this machine and this build both have; the one in use; choose a narrower
 * one (tests, measurements). */
PYA_OPS_API int pya_ops_isa_best(void);
PYA_OPS_API int pya_ops_isa_current(void);
PYA_OPS_API int pya_ops_isa_select(int isa);
PYA_OPS_API int pya_ops_max_threads(void);

#ifdef __cplusplus
}
#endif
