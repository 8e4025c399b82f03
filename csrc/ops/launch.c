/* Grids of the CUDA kernels in cuda/, each stated beside its kernel there. */
#include <stdbool.h>
#include <stddef.h>

#include "driver.h"
#include "ops.h"

enum {
    THREADS = 256,
    BIG = 128,
    SMALL = 64,
    WIDE = 64,
    MAX_GRID = 65535,
    TENSOR_DIM = 64, /* the least D */
    FULL_CARD = 96,  /* blocks */
};

static uint64_t
launch_parts(int64_t n, int64_t step) {
    return (uint64_t)((n + step - 1) / step);
}

/* t's beyond the grid's limit are walked by the blocks */
static uint64_t
launch_walked(int64_t n) {
    return (uint64_t)(n < MAX_GRID ? n : MAX_GRID);
}

/* From 64 dimensions on, three TF32 products err less than a sum in fp32, whose roundings grow with its
 * length (tests/ops/test_cuda_tensor.py measures both); below, a log-probability is bound by memory. */
static bool
launch_takes_tensor(
    const struct pya_ops_ps *ps, const struct pya_ops_target *to, const char *name,
    uint32_t shared) {
    return ps->dim >= TENSOR_DIM && pya_driver_allow(to, name, shared);
}

int
pya_ops_cuda_ps_forward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const bool mixture = ps->log_weights.p != NULL;
    const char *tensor = mixture ? "pya_ps_mixture_forward_tensor" : "pya_ps_forward_tensor";
    const bool is_tensor = launch_takes_tensor(ps, to, tensor, PYA_OPS_PAIR_BYTES);
    const uint32_t shared = is_tensor ? PYA_OPS_PAIR_BYTES : 0;
    const uint64_t n_l = launch_parts(ps->n_l, BIG);
    const uint64_t n_t = launch_walked(ps->n_t);
    if (mixture) {
        struct pya_driver_grid g = {n_l, n_t, 1, THREADS, shared};
        return pya_driver_launch(to, is_tensor ? tensor : "pya_ps_mixture_forward", g, ps);
    }
    struct pya_driver_grid g = {launch_parts(ps->n_m, BIG), n_l, n_t, THREADS, shared};
    return pya_driver_launch(to, is_tensor ? tensor : "pya_ps_forward", g, ps);
}

/* One block for each t makes all gradients from one set of weights where that leaves no card idle or
 * loses no work; else blocks for components and blocks for samples make the weights twice. */
static int
launch_ps_backward_tensor(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const bool of_components =
        ps->d_loc.p != NULL || ps->d_scale.p != NULL || ps->d_log_weights.p != NULL;
    const uint64_t parts = (of_components ? launch_parts(ps->n_m, BIG) : 0) +
                           (ps->d_value.p != NULL ? launch_parts(ps->n_l, BIG) : 0);
    const bool is_whole = ps->n_t >= FULL_CARD || (ps->n_l <= BIG && ps->n_m <= BIG);
    struct pya_driver_grid g = {
        (uint64_t)ps->n_t, is_whole && parts > 0 ? 1 : parts, 1, THREADS, PYA_OPS_WEIGH_BYTES};
    return pya_driver_launch(to, "pya_ps_backward_tensor", g, ps);
}

int
pya_ops_cuda_ps_backward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    if (launch_takes_tensor(ps, to, "pya_ps_backward_tensor", PYA_OPS_WEIGH_BYTES)) {
        return launch_ps_backward_tensor(ps, to);
    }
    const uint64_t columns = launch_parts(ps->dim, WIDE);
    const uint64_t n_t = launch_walked(ps->n_t);
    int status = PYA_OPS_OK;
    if (ps->d_loc.p != NULL || ps->d_scale.p != NULL || ps->d_log_weights.p != NULL) {
        struct pya_driver_grid g = {
            launch_parts(ps->n_m, SMALL), ps->d_loc.p != NULL ? columns : 1, n_t, THREADS, 0};
        status = pya_driver_launch(to, "pya_ps_backward_loc", g, ps);
    }
    if (status == PYA_OPS_OK && ps->d_value.p != NULL) {
        struct pya_driver_grid g = {launch_parts(ps->n_l, SMALL), columns, n_t, THREADS, 0};
        status = pya_driver_launch(to, "pya_ps_backward_value", g, ps);
    }
    return status;
}

int
pya_ops_cuda_additive_forward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    struct pya_driver_grid g = {(uint64_t)a->n_q, (uint64_t)a->n_b, 1, THREADS, 0};
    return pya_driver_launch(to, "pya_additive_forward", g, a);
}

int
pya_ops_cuda_additive_backward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    const uint64_t n_b = (uint64_t)a->n_b;
    struct pya_driver_grid scores = {(uint64_t)a->n_q, n_b, 1, THREADS, 0};
    int status = pya_driver_launch(to, "pya_additive_backward_scores", scores, a);
    if (status == PYA_OPS_OK) {
        struct pya_driver_grid keys = {launch_parts(a->n_h, THREADS), n_b, 1, THREADS, 0};
        status = pya_driver_launch(to, "pya_additive_backward_keys", keys, a);
    }
    if (status == PYA_OPS_OK && a->d_values.p != NULL) {
        struct pya_driver_grid values = {
            launch_parts(a->n_e, THREADS), (uint64_t)a->n_s, n_b, THREADS, 0};
        status = pya_driver_launch(to, "pya_additive_backward_values", values, a);
    }
    return status;
}

int
pya_ops_cuda_attention_forward(const struct pya_ops_attention *a, const struct pya_ops_target *to) {
    if (a->dim_v > 256) {
        return PYA_OPS_E_INVAL;
    }
    struct pya_driver_grid g = {
        launch_parts(a->n_q, SMALL), (uint64_t)a->n_h, (uint64_t)a->n_b, THREADS, 0};
    return pya_driver_launch(to, "pya_attention_forward", g, a);
}

int
pya_ops_cuda_attention_backward(
    const struct pya_ops_attention *a, const struct pya_ops_target *to) {
    const uint64_t n_b = (uint64_t)a->n_b;
    const uint64_t n_h = (uint64_t)a->n_h;
    const uint64_t n_kv = (uint64_t)a->n_kv;
    const uint64_t n_qb = launch_parts(a->n_q, SMALL);
    const uint64_t n_kb = launch_parts(a->n_k, SMALL);
    const struct {
        const char *kernel;
        struct pya_driver_grid grid;
    } steps[] = {
        {"pya_attention_backward_delta", {(uint64_t)a->n_q, n_h, n_b, 32, 0}},
        {"pya_attention_backward_q", {n_qb * launch_parts(a->dim, WIDE), n_h, n_b, THREADS, 0}},
        {"pya_attention_backward_k", {n_kb * launch_parts(a->dim, WIDE), n_kv, n_b, THREADS, 0}},
        {"pya_attention_backward_v", {n_kb * launch_parts(a->dim_v, WIDE), n_kv, n_b, THREADS, 0}},
    };
    int status = PYA_OPS_OK;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && status == PYA_OPS_OK; i++) {
        status = pya_driver_launch(to, steps[i].kernel, steps[i].grid, a);
    }
    if (status == PYA_OPS_OK && a->d_bias.p != NULL) {
        struct pya_driver_grid bias = {
            a->d_bias.k != 0 ? n_kb : 1, a->d_bias.q != 0 ? n_qb : 1,
            (a->d_bias.b != 0 ? n_b : 1) * (a->d_bias.h != 0 ? n_h : 1), THREADS, 0};
        status = pya_driver_launch(to, "pya_attention_backward_bias", bias, a);
    }
    return status;
}
