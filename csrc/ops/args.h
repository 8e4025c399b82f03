#pragma once
/* The arguments of the ops: the same structures on the host and, by value, in the CUDA kernels.
 * Floor 0. */
#ifdef __CUDACC_RTC__
typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#else
#include <stdint.h>
#endif

/* Bytes of dynamic shared memory with which the tensor-core kernels are launched. */
enum { PYA_OPS_PAIR_BYTES = 98304, PYA_OPS_WEIGH_BYTES = 103424 };
/* The same for attention, with heads of up to 64 and up to 128 numbers. */
enum {
    PYA_OPS_ATTENTION_FORWARD_64_BYTES = 81920,
    PYA_OPS_ATTENTION_FORWARD_128_BYTES = 98304,
    PYA_OPS_ATTENTION_BACKWARD_64_BYTES = 57344,
    PYA_OPS_ATTENTION_BACKWARD_128_BYTES = 114688,
};

/* Up to this many parts of the keys are merged by the last of a query's blocks; more take a launch of their own. */
enum { PYA_OPS_MERGED_PARTS = 16, PYA_OPS_KEPT_OF = 16 };

/* A matrix of rows (or numbers) addressed by two batch indices; strides in elements, 0 = shared. */
struct pya_ops_view {
    void *p;
    int64_t i, t;
};

/* PowerSpherical: value (l,t,D), loc (m,t,D), scale and log_weights (m,t); D is contiguous.
 * In views with two indices, i is l or m.  NULL p: not wanted. */
struct pya_ops_ps {
    int64_t n_l, n_m, n_t, dim;
    struct pya_ops_view value, loc, scale, log_weights;
    void *out; /* log-prob (l,m,t), or for the mixture (l,t) with out_m unused */
    int64_t out_l, out_m, out_t;
    const void *grad; /* gradient of out, with strides of its own */
    int64_t grad_l, grad_m, grad_t;
    struct pya_ops_view d_value, d_loc, d_scale, d_log_weights;
    void *workspace;   /* pya_ops_cuda_ps_room() numbers, CUDA's backward only */
    int32_t dtype;     /* pya_ops_dtype */
    int32_t n_threads; /* at least 1 */
};

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
    void *d_v; /* [n_b][n_h], one partial sum per batch entry */
    /* CUDA only: forward pya_ops_cuda_additive_room() numbers, backward [n_b][n_q][n_s] */
    void *workspace;
    /* set by the launcher: parts of the keys; n_kept of every KEPT_OF rows of values may stay in the L2 cache */
    int64_t n_parts, n_kept;
    int32_t accumulate; /* nonzero: d_keys and d_values are added to */
    int32_t dtype;
    int32_t n_threads;
};

/* Rows of one head; strides in elements, the row itself contiguous. */
struct pya_ops_heads {
    void *p;
    int64_t b, h, s;
};

/* Bias, mask or gradient of the bias: addressed like scores; stride 0 = shared. */
struct pya_ops_scores {
    void *p;
    int64_t b, h, q, k;
};

/* Scaled dot-product attention; query head h reads key head h / (n_h / n_kv). */
struct pya_ops_attention {
    int64_t n_b, n_h, n_kv, n_q, n_k, dim, dim_v;
    struct pya_ops_heads q, k, v, out;
    /* [n_b][n_h][2][n_q]: per row the largest score in units of log 2, and 1 / (sum of exp2(score - largest)), 0 if a row sees
     * no key.  NULL: not wanted (CPU). */
    void *stats;
    struct pya_ops_scores bias, mask /* bytes */;
    double scale, dropout;
    uint64_t seed;
    struct pya_ops_heads grad, d_q, d_k, d_v;
    struct pya_ops_scores d_bias;
    void *workspace;    /* [n_b][n_h][n_q], CUDA's backward only */
    int32_t d_bias_add; /* nonzero: d_bias starts as zeros and is added to */
    int32_t causal;     /* query i sees keys 0..i */
    int32_t dtype;
    int32_t n_threads;
    /* set by CUDA's launcher: each element of d_bias belongs to a single score; it is then computed together with d_q */
    int32_t owns_bias;
};
