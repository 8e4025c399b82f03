/* Picks the kernel table for a call and checks the caller's mistakes. */
#include "ops.h"

#include <stdbool.h>
#include <stddef.h>

#include "cpu.h"
#include "hugepage.h"
#include "kernels.h"
#include "ps_small.h"

#define OPS_TABLE(isa) OPS_TABLE_WITH(isa, isa)
/* attention: an instruction set that only has kernels for it */
#define OPS_TABLE_WITH(isa, attention)                                                             \
    {                                                                                              \
        .ps_forward = pya_ps_forward_##isa, .ps_backward = pya_ps_backward_##isa,                  \
        .ps_mixture_forward = pya_ps_mixture_forward_##isa,                                        \
        .ps_mixture_backward = pya_ps_mixture_backward_##isa,                                      \
        .additive_forward = pya_additive_forward_##isa,                                            \
        .additive_backward = pya_additive_backward_##isa,                                          \
        .attention_forward = pya_attention_forward_##attention,                                    \
        .attention_backward = pya_attention_backward_##attention,                                  \
    }

static const struct pya_kernels ops_f64 = OPS_TABLE(f64);
static const struct pya_kernels ops_f32[] = {
    [PYA_OPS_ISA_SCALAR] = OPS_TABLE(scalar),
#ifdef PYA_HAVE_AVX2
    [PYA_OPS_ISA_AVX2] = OPS_TABLE(avx2),
#endif
#ifdef PYA_HAVE_AVX512
    [PYA_OPS_ISA_AVX512] = OPS_TABLE(avx512),
#endif
#if defined(PYA_AMX_EMULATED)
    [PYA_OPS_ISA_AMX] = OPS_TABLE_WITH(scalar, amx),
#elif defined(PYA_HAVE_AMX)
    [PYA_OPS_ISA_AMX] = OPS_TABLE_WITH(avx512, amx),
#endif
};

static const struct pya_kernels *
ops_kernels(int32_t dtype) {
    return dtype == PYA_OPS_F64 ? &ops_f64 : &ops_f32[pya_cpu_isa()];
}

static bool
ops_is_dtype(int32_t dtype) {
    return dtype == PYA_OPS_F32 || dtype == PYA_OPS_F64;
}

static bool
ops_is_valid_ps(const struct pya_ops_ps *ps) {
    return ps->n_l > 0 && ps->n_m > 0 && ps->n_t > 0 && ps->dim >= 2 && ps->dim < (1 << 24) &&
           ps->n_threads >= 1 && ops_is_dtype(ps->dtype) && ps->value.p != NULL &&
           ps->loc.p != NULL && ps->scale.p != NULL;
}

static size_t
ops_item_bytes(int32_t dtype) {
    return dtype == PYA_OPS_F64 ? 8 : 4;
}

/* Only if the view covers its rows without holes do we know that its whole extent is ours. */
static void
ops_advise_rows(const struct pya_ops_ps *ps, struct pya_ops_view v, int64_t rows) {
    if (v.t == ps->dim && v.i == ps->n_t * ps->dim) {
        pya_hugepage_advise(v.p, (size_t)(rows * v.i) * ops_item_bytes(ps->dtype));
    }
}

static void
ops_advise_gradients(const struct pya_ops_ps *ps) {
    ops_advise_rows(ps, ps->d_value, ps->n_l);
    ops_advise_rows(ps, ps->d_loc, ps->n_m);
}

int
pya_ops_ps_forward(const struct pya_ops_ps *ps) {
    if (!ops_is_valid_ps(ps) || ps->out == NULL) {
        return PYA_OPS_E_INVAL;
    }
    if (ps->out_m == 1 && ps->out_l == ps->n_m && ps->out_t == ps->n_l * ps->n_m) {
        pya_hugepage_advise(ps->out, (size_t)(ps->n_t * ps->out_t) * ops_item_bytes(ps->dtype));
    }
    return pya_ps_is_small(ps) ? pya_ps_small_forward(ps, &ops_f64)
                               : ops_kernels(ps->dtype)->ps_forward(ps);
}

int
pya_ops_ps_backward(const struct pya_ops_ps *ps) {
    if (!ops_is_valid_ps(ps) || ps->grad == NULL || ps->log_weights.p != NULL) {
        return PYA_OPS_E_INVAL;
    }
    ops_advise_gradients(ps);
    return pya_ps_is_small(ps) ? pya_ps_small_backward(ps, &ops_f64)
                               : ops_kernels(ps->dtype)->ps_backward(ps);
}

int
pya_ops_ps_mixture_forward(const struct pya_ops_ps *ps) {
    if (!ops_is_valid_ps(ps) || ps->out == NULL || ps->log_weights.p == NULL) {
        return PYA_OPS_E_INVAL;
    }
    return pya_ps_is_small(ps) ? pya_ps_small_forward(ps, &ops_f64)
                               : ops_kernels(ps->dtype)->ps_mixture_forward(ps);
}

int
pya_ops_ps_mixture_backward(const struct pya_ops_ps *ps) {
    if (!ops_is_valid_ps(ps) || ps->out == NULL || ps->grad == NULL || ps->log_weights.p == NULL) {
        return PYA_OPS_E_INVAL;
    }
    ops_advise_gradients(ps);
    return pya_ps_is_small(ps) ? pya_ps_small_backward(ps, &ops_f64)
                               : ops_kernels(ps->dtype)->ps_mixture_backward(ps);
}

static bool
ops_is_valid_additive(const struct pya_ops_additive *a) {
    return a->n_b > 0 && a->n_q > 0 && a->n_s > 0 && a->n_h > 0 && a->n_e > 0 &&
           a->n_threads >= 1 && ops_is_dtype(a->dtype) && a->query.p != NULL && a->keys.p != NULL &&
           a->values.p != NULL && a->v != NULL && a->probs != NULL;
}

int
pya_ops_additive_forward(const struct pya_ops_additive *a) {
    if (!ops_is_valid_additive(a) || a->context.p == NULL) {
        return PYA_OPS_E_INVAL;
    }
    return ops_kernels(a->dtype)->additive_forward(a);
}

int
pya_ops_additive_backward(const struct pya_ops_additive *a) {
    if (!ops_is_valid_additive(a) || a->grad.p == NULL || a->d_v == NULL || a->d_query.p == NULL) {
        return PYA_OPS_E_INVAL;
    }
    const size_t item = ops_item_bytes(a->dtype);
    if (a->d_keys.i == a->n_h && a->d_keys.t == a->n_s * a->n_h) {
        pya_hugepage_advise(a->d_keys.p, (size_t)(a->n_b * a->d_keys.t) * item);
    }
    if (a->d_values.i == a->n_e && a->d_values.t == a->n_s * a->n_e) {
        pya_hugepage_advise(a->d_values.p, (size_t)(a->n_b * a->d_values.t) * item);
    }
    return ops_kernels(a->dtype)->additive_backward(a);
}

static bool
ops_is_valid_attention(const struct pya_ops_attention *a) {
    return a->n_b > 0 && a->n_h > 0 && a->n_kv > 0 && a->n_h % a->n_kv == 0 && a->n_q > 0 &&
           a->n_k > 0 && a->dim > 0 && a->dim_v > 0 && a->dim <= 1024 && a->dim_v <= 1024 &&
           a->n_threads >= 1 && ops_is_dtype(a->dtype) && a->q.p != NULL && a->k.p != NULL &&
           a->v.p != NULL && a->out.p != NULL && a->dropout >= 0 && a->dropout < 1;
}

/* A result of attention, if its rows are without holes. */
static void
ops_advise_heads(
    struct pya_ops_heads x, int64_t n_h, int64_t n, int64_t dim,
    const struct pya_ops_attention *a) {
    if (x.s == dim && x.h == n * dim && x.b == n_h * x.h) {
        pya_hugepage_advise(x.p, (size_t)(a->n_b * x.b) * ops_item_bytes(a->dtype));
    }
}

int
pya_ops_attention_forward(const struct pya_ops_attention *a) {
    if (!ops_is_valid_attention(a)) {
        return PYA_OPS_E_INVAL;
    }
    ops_advise_heads(a->out, a->n_h, a->n_q, a->dim_v, a);
    return ops_kernels(a->dtype)->attention_forward(a);
}

int
pya_ops_attention_backward(const struct pya_ops_attention *a) {
    if (!ops_is_valid_attention(a) || a->stats == NULL || a->grad.p == NULL) {
        return PYA_OPS_E_INVAL;
    }
    if (a->d_bias.p != NULL && a->d_bias.k == 1 && a->d_bias.q == a->n_k) {
        pya_hugepage_advise(
            a->d_bias.p, (size_t)(a->n_q * a->n_k) * ops_item_bytes(a->dtype) *
                             (size_t)(a->d_bias.h != 0 ? a->n_h : 1) *
                             (size_t)(a->d_bias.b != 0 ? a->n_b : 1));
    }
    ops_advise_heads(a->d_q, a->n_h, a->n_q, a->dim, a);
    ops_advise_heads(a->d_k, a->n_kv, a->n_k, a->dim, a);
    ops_advise_heads(a->d_v, a->n_kv, a->n_k, a->dim_v, a);
    return ops_kernels(a->dtype)->attention_backward(a);
}
