/* Grids of the CUDA kernels in cuda/, each stated beside its kernel there. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver.h"
#include "ops.h"

enum {
    THREADS = 256,
    KEY_THREADS = 128,
    WARP = 32,
    SPAN = 8, /* keys */
    BIG = 128,
    SMALL = 64,
    WIDE = 64,
    MAX_WALKED = 65535,
    TENSOR_DIM = 64, /* the least D */
    FULL_CARD = 96,  /* blocks */
};

static uint64_t
launch_parts(int64_t n, int64_t step) {
    return (uint64_t)((n + step - 1) / step);
}

/* n_parts for each t; t's beyond the grid's limit are walked by the blocks */
static struct pya_driver_grid
launch_grid_ps(const struct pya_ops_ps *ps, uint64_t n_parts, uint32_t shared) {
    struct pya_driver_grid g = {
        n_parts, (uint64_t)(ps->n_t < MAX_WALKED ? ps->n_t : MAX_WALKED), THREADS, shared};
    return g;
}

/* From 64 dimensions on, three TF32 products err less than a sum in fp32, whose roundings grow with its
 * length (tests/ops/test_cuda_tensor.py measures both); below, a log-probability is bound by memory.
 * The kernels for tensor cores count with 32 bits, one tile beyond the last row. */
static bool
launch_takes_tensor(
    const struct pya_ops_ps *ps, const struct pya_ops_target *to, const char *name,
    uint32_t shared) {
    const int64_t most = INT32_MAX - BIG;
    return ps->dim >= TENSOR_DIM && ps->n_l <= most && ps->n_m <= most &&
           ps->n_t <= INT32_MAX - MAX_WALKED && pya_driver_allow(to, name, shared);
}

int
pya_ops_cuda_ps_forward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const bool mixture = ps->log_weights.p != NULL;
    const char *tensor = mixture ? "pya_ps_mixture_forward_tensor" : "pya_ps_forward_tensor";
    const char *plain = mixture ? "pya_ps_mixture_forward" : "pya_ps_forward";
    const bool is_tensor = launch_takes_tensor(ps, to, tensor, PYA_OPS_PAIR_BYTES);
    const uint64_t tiles = launch_parts(ps->n_l, BIG) * (mixture ? 1 : launch_parts(ps->n_m, BIG));
    struct pya_driver_grid g = launch_grid_ps(ps, tiles, is_tensor ? PYA_OPS_PAIR_BYTES : 0);
    return pya_driver_launch(to, is_tensor ? tensor : plain, g, ps);
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
    struct pya_driver_grid g =
        launch_grid_ps(ps, is_whole && parts > 0 ? 1 : parts, PYA_OPS_WEIGH_BYTES);
    return pya_driver_launch(to, "pya_ps_backward_tensor", g, ps);
}

int
pya_ops_cuda_ps_backward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    if (launch_takes_tensor(ps, to, "pya_ps_backward_tensor", PYA_OPS_WEIGH_BYTES)) {
        return launch_ps_backward_tensor(ps, to);
    }
    const uint64_t columns = launch_parts(ps->dim, WIDE);
    int status = PYA_OPS_OK;
    if (ps->d_loc.p != NULL || ps->d_scale.p != NULL || ps->d_log_weights.p != NULL) {
        const uint64_t parts = launch_parts(ps->n_m, SMALL) * (ps->d_loc.p != NULL ? columns : 1);
        status = pya_driver_launch(to, "pya_ps_backward_loc", launch_grid_ps(ps, parts, 0), ps);
    }
    if (status == PYA_OPS_OK && ps->d_value.p != NULL) {
        const uint64_t parts = launch_parts(ps->n_l, SMALL) * columns;
        status = pya_driver_launch(to, "pya_ps_backward_value", launch_grid_ps(ps, parts, 0), ps);
    }
    return status;
}

/* n_parts for each query of each batch entry */
static struct pya_driver_grid
launch_grid_queries(const struct pya_ops_additive *a, int64_t n, int64_t step) {
    const uint64_t queries = (uint64_t)a->n_q * (uint64_t)a->n_b;
    struct pya_driver_grid g = {launch_parts(n, step) * queries, 1, THREADS, 0};
    return g;
}

int
pya_ops_cuda_additive_forward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    struct pya_driver_grid scores = launch_grid_queries(a, a->n_s, THREADS / WARP);
    struct pya_driver_grid context = launch_grid_queries(a, a->n_e, THREADS);
    int status = pya_driver_launch(to, "pya_additive_scores", scores, a);
    if (status == PYA_OPS_OK) {
        status = pya_driver_launch(to, "pya_additive_context", context, a);
    }
    return status;
}

int
pya_ops_cuda_additive_backward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    const uint64_t n_b = (uint64_t)a->n_b;
    struct pya_driver_grid probs = launch_grid_queries(a, a->n_s, THREADS / WARP);
    int status = pya_driver_launch(to, "pya_additive_backward_probs", probs, a);
    if (status == PYA_OPS_OK) {
        struct pya_driver_grid keys = {launch_parts(a->n_h, KEY_THREADS) * n_b, 1, KEY_THREADS, 0};
        status = pya_driver_launch(to, "pya_additive_backward_keys", keys, a);
    }
    if (status == PYA_OPS_OK && a->d_values.p != NULL) {
        struct pya_driver_grid values = {
            launch_parts(a->n_e, THREADS) * launch_parts(a->n_s, SPAN) * n_b, 1, THREADS, 0};
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
        launch_parts(a->n_q, SMALL) * (uint64_t)(a->n_h * a->n_b), 1, THREADS, 0};
    return pya_driver_launch(to, "pya_attention_forward", g, a);
}

int
pya_ops_cuda_attention_backward(
    const struct pya_ops_attention *a, const struct pya_ops_target *to) {
    const uint64_t heads = (uint64_t)(a->n_h * a->n_b);
    const uint64_t key_heads = (uint64_t)(a->n_kv * a->n_b);
    const uint64_t n_qb = launch_parts(a->n_q, SMALL);
    const uint64_t n_kb = launch_parts(a->n_k, SMALL);
    const uint64_t columns = launch_parts(a->dim, WIDE);
    const uint64_t columns_v = launch_parts(a->dim_v, WIDE);
    const struct {
        const char *kernel;
        struct pya_driver_grid grid;
    } steps[] = {
        {"pya_attention_backward_delta", {(uint64_t)a->n_q * heads, 1, WARP, 0}},
        {"pya_attention_backward_q", {columns * n_qb * heads, 1, THREADS, 0}},
        {"pya_attention_backward_k", {columns * n_kb * key_heads, 1, THREADS, 0}},
        {"pya_attention_backward_v", {columns_v * n_kb * key_heads, 1, THREADS, 0}},
    };
    int status = PYA_OPS_OK;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && status == PYA_OPS_OK; i++) {
        status = pya_driver_launch(to, steps[i].kernel, steps[i].grid, a);
    }
    if (status == PYA_OPS_OK && a->d_bias.p != NULL) {
        const struct pya_ops_scores o = a->d_bias;
        const uint64_t slices = (uint64_t)((o.b != 0 ? a->n_b : 1) * (o.h != 0 ? a->n_h : 1));
        struct pya_driver_grid bias = {
            (o.k != 0 ? n_kb : 1) * (o.q != 0 ? n_qb : 1) * slices, 1, THREADS, 0};
        status = pya_driver_launch(to, "pya_attention_backward_bias", bias, a);
    }
    return status;
}
