/* Grids of the CUDA kernels in cuda/; each is also stated there, beside its kernel. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver.h"
#include "ops.h"

enum {
    THREADS = 256,
    WARP = 32,
    COLUMNS = 128,         /* of a row that a warp of additive attention takes */
    CHUNK_BLOCKS = 320,    /* blocks wanted in its forward */
    KEPT_BYTES = 28 << 20, /* of its keys and values stay in the L2 cache (40 MB and more) */
    FEW_BLOCKS = 400,      /* with fewer blocks for its gradients of keys, each has MANY_THREADS */
    FEW_THREADS = 128,
    MANY_THREADS = 384,
    BIG = 128,
    SMALL = 64,
    WIDE = 64,
    MAX_WALKED = 65535,
    TENSOR_DIM = 64,    /* least D for tensor cores */
    FULL_CARD = 96,     /* blocks that keep a card busy */
    CUT_TILES = 8,      /* least number of tiles of samples that are cut into chunks */
    CUT_T = 16,         /* largest n_t with which they are */
    FEW_WORK = 1 << 18, /* most multiplications of a t that a block computes pair by pair */
    ATTENTION_THREADS = 128,
    SPAN_TENSOR = 32, /* keys or queries in a tile of attention on tensor cores */
};

static uint64_t
launch_parts(int64_t n, int64_t step) {
    return (uint64_t)((n + step - 1) / step);
}

/* n_parts blocks for each t; beyond the grid's limit, a block loops over several t. */
static struct pya_driver_grid
launch_grid_ps(const struct pya_ops_ps *ps, uint64_t n_parts, uint32_t shared) {
    struct pya_driver_grid g = {
        n_parts, (uint64_t)(ps->n_t < MAX_WALKED ? ps->n_t : MAX_WALKED), THREADS, shared};
    return g;
}

/* From 64 dimensions on, the three half-precision products (cuda/tensor.cuh) are more accurate than a sum in fp32, whose
 * rounding errors grow with its length (tests/ops/test_cuda_tensor.py measures both).  With fewer dimensions, a
 * log-probability is bound by memory.  The tensor-core kernels count with 32 bits, up to one tile beyond the last row. */
static bool
launch_takes_tensor(
    const struct pya_ops_ps *ps, const struct pya_ops_target *to, const char *name,
    uint32_t shared) {
    const int64_t most = INT32_MAX - BIG;
    return ps->dim >= TENSOR_DIM && ps->n_l <= most && ps->n_m <= most &&
           ps->n_t <= INT32_MAX - MAX_WALKED && pya_driver_allow(to, name, shared);
}

static bool
launch_has_pairs(const struct pya_ops_ps *ps, int64_t most) {
    return ps->n_l <= most && ps->n_m <= most && ps->n_l * ps->n_m <= most;
}

/* Kernels that compute a t pair by pair, in double.  One block per t if there are few t, pairs and multiplications, which
 * would not keep a card busy; otherwise one warp per t if a t has at most as many pairs as a warp has threads. */
struct launch_thin {
    const char *forward, *backward;
    int64_t threads; /* per t; 0: too many pairs for these kernels */
};

static struct launch_thin
launch_thin(const struct pya_ops_ps *ps) {
    const struct launch_thin warps = {"pya_ps_forward_thin", "pya_ps_backward_thin", WARP};
    const struct launch_thin blocks = {"pya_ps_forward_few", "pya_ps_backward_few", THREADS};
    const struct launch_thin neither = {NULL, NULL, 0};
    if (ps->n_t <= FULL_CARD && launch_has_pairs(ps, THREADS) && ps->dim <= FEW_WORK &&
        ps->n_l * ps->n_m * ps->dim <= FEW_WORK) {
        return blocks;
    }
    return launch_has_pairs(ps, WARP) ? warps : neither;
}

static int
launch_ps_thin(
    const struct pya_ops_ps *ps, const char *kernel, int64_t threads,
    const struct pya_ops_target *to) {
    struct pya_driver_grid g = {launch_parts(ps->n_t, THREADS / threads), 1, THREADS, 0};
    return pya_driver_launch(to, kernel, g, ps);
}

int
pya_ops_cuda_ps_forward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const struct launch_thin thin = launch_thin(ps);
    if (thin.threads != 0) {
        return launch_ps_thin(ps, thin.forward, thin.threads, to);
    }
    const bool mixture = ps->log_weights.p != NULL;
    const char *tensor = mixture ? "pya_ps_mixture_forward_tensor" : "pya_ps_forward_tensor";
    const char *plain = mixture ? "pya_ps_mixture_forward" : "pya_ps_forward";
    const bool is_tensor = launch_takes_tensor(ps, to, tensor, PYA_OPS_PAIR_BYTES);
    const uint64_t tiles = launch_parts(ps->n_l, BIG) * (mixture ? 1 : launch_parts(ps->n_m, BIG));
    struct pya_driver_grid g = launch_grid_ps(ps, tiles, is_tensor ? PYA_OPS_PAIR_BYTES : 0);
    return pya_driver_launch(to, is_tensor ? tensor : plain, g, ps);
}

static bool
launch_is_of_components(const struct pya_ops_ps *ps) {
    return ps->d_loc.p != NULL || ps->d_scale.p != NULL || ps->d_log_weights.p != NULL;
}

/* One block per t computes all gradients from one set of weights, if that keeps the card busy or a t is a single tile.
 * Otherwise separate blocks for components and for samples compute the weights twice. */
static int
launch_ps_backward_tensor(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const uint64_t parts = (launch_is_of_components(ps) ? launch_parts(ps->n_m, BIG) : 0) +
                           (ps->d_value.p != NULL ? launch_parts(ps->n_l, BIG) : 0);
    const bool is_whole = ps->n_t >= FULL_CARD || (ps->n_l <= BIG && ps->n_m <= BIG);
    struct pya_driver_grid g =
        launch_grid_ps(ps, is_whole && parts > 0 ? 1 : parts, PYA_OPS_WEIGH_BYTES);
    return pya_driver_launch(to, "pya_ps_backward_tensor", g, ps);
}

static int
launch_ps_backward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    if (launch_takes_tensor(ps, to, "pya_ps_backward_tensor", PYA_OPS_WEIGH_BYTES)) {
        return launch_ps_backward_tensor(ps, to);
    }
    const uint64_t columns = launch_parts(ps->dim, WIDE);
    int status = PYA_OPS_OK;
    if (launch_is_of_components(ps)) {
        const uint64_t parts = launch_parts(ps->n_m, SMALL) * (ps->d_loc.p != NULL ? columns : 1);
        status = pya_driver_launch(to, "pya_ps_backward_loc", launch_grid_ps(ps, parts, 0), ps);
    }
    if (status == PYA_OPS_OK && ps->d_value.p != NULL) {
        const uint64_t parts = launch_parts(ps->n_l, SMALL) * columns;
        status = pya_driver_launch(to, "pya_ps_backward_value", launch_grid_ps(ps, parts, 0), ps);
    }
    return status;
}

/* With few t and many samples, a few blocks would go through all samples while most of the card is idle.  So the samples are
 * cut into chunks, which the kernels treat like different t; afterwards the chunks' contributions to a component are summed. */
struct launch_cut {
    int64_t rows; /* in a chunk; the last may have fewer */
    int64_t n;    /* chunks; 1: not cut */
};

static struct launch_cut
launch_cut(const struct pya_ops_ps *ps) {
    const int64_t tiles = (int64_t)launch_parts(ps->n_l, BIG);
    const int64_t blocks = (int64_t)launch_parts(ps->n_m, BIG) * ps->n_t;
    struct launch_cut cut = {ps->n_l, 1};
    if (!launch_is_of_components(ps) || blocks == 0 || blocks >= FULL_CARD || ps->n_t > CUT_T ||
        tiles < CUT_TILES || tiles < 4 * ps->n_t) {
        return cut;
    }
    const int64_t wanted = (int64_t)launch_parts(3 * FULL_CARD, blocks);
    cut.rows = (int64_t)launch_parts(tiles, wanted < tiles ? wanted : tiles) * BIG;
    cut.n = (int64_t)launch_parts(ps->n_l, cut.rows);
    return cut;
}

int64_t
pya_ops_cuda_ps_room(const struct pya_ops_ps *ps) {
    const int64_t n = launch_cut(ps).n;
    const int64_t numbers = (ps->d_loc.p != NULL ? ps->dim : 0) + (ps->d_scale.p != NULL) +
                            (ps->d_log_weights.p != NULL);
    return n == 1 ? 0 : n * ps->n_m * numbers;
}

static struct pya_ops_view
launch_view_at(struct pya_ops_view v, int64_t i, int64_t t) {
    if (v.p != NULL) {
        v.p = (float *)v.p + i * v.i + t * v.t;
    }
    return v;
}

/* What chunk c contributes to component m is at (m, c). */
struct launch_sums {
    struct pya_ops_view loc, scale, log_weights;
};

static struct launch_sums
launch_sums(const struct pya_ops_ps *ps, int64_t n) {
    const int64_t n_m = ps->n_m;
    float *next = (float *)ps->workspace;
    struct launch_sums sums = {0};
    if (ps->d_loc.p != NULL) {
        sums.loc = (struct pya_ops_view){next, ps->dim, n_m * ps->dim};
        next += n * n_m * ps->dim;
    }
    if (ps->d_scale.p != NULL) {
        sums.scale = (struct pya_ops_view){next, 1, n_m};
        next += n * n_m;
    }
    if (ps->d_log_weights.p != NULL) {
        sums.log_weights = (struct pya_ops_view){next, 1, n_m};
    }
    return sums;
}

/* Chunks c .. c + n - 1 of one t, as a problem with n t's. */
static struct pya_ops_ps
launch_chunks(const struct pya_ops_ps *ps, struct launch_cut cut, int64_t t, int64_t c, int64_t n) {
    const struct launch_sums sums = launch_sums(ps, cut.n);
    const int64_t l = c * cut.rows;
    struct pya_ops_ps x = *ps;
    x.n_t = n;
    x.n_l = ps->n_l - l < cut.rows ? ps->n_l - l : cut.rows;
    x.value = launch_view_at(ps->value, l, t);
    x.d_value = launch_view_at(ps->d_value, l, t);
    x.value.t = cut.rows * x.value.i;
    x.d_value.t = cut.rows * x.d_value.i;
    x.loc = launch_view_at(ps->loc, 0, t);
    x.scale = launch_view_at(ps->scale, 0, t);
    x.log_weights = launch_view_at(ps->log_weights, 0, t);
    x.loc.t = x.scale.t = x.log_weights.t = 0;
    x.d_loc = launch_view_at(sums.loc, 0, c);
    x.d_scale = launch_view_at(sums.scale, 0, c);
    x.d_log_weights = launch_view_at(sums.log_weights, 0, c);
    x.grad = (const float *)ps->grad + l * ps->grad_l + t * ps->grad_t;
    x.grad_t = cut.rows * ps->grad_l;
    if (ps->out != NULL) {
        x.out = (float *)ps->out + l * ps->out_l + t * ps->out_t;
        x.out_t = cut.rows * ps->out_l;
    }
    return x;
}

static int
launch_ps_backward_cut(
    const struct pya_ops_ps *ps, struct launch_cut cut, int64_t t,
    const struct pya_ops_target *to) {
    const int64_t whole = ps->n_l / cut.rows;
    const struct pya_ops_ps most = launch_chunks(ps, cut, t, 0, whole);
    int status = launch_ps_backward(&most, to);
    if (status == PYA_OPS_OK && whole < cut.n) {
        const struct pya_ops_ps rest = launch_chunks(ps, cut, t, whole, 1);
        status = launch_ps_backward(&rest, to);
    }
    if (status != PYA_OPS_OK) {
        return status;
    }
    const struct launch_sums sums = launch_sums(ps, cut.n);
    struct pya_ops_ps all = *ps;
    all.n_t = cut.n;
    all.loc = sums.loc;
    all.scale = sums.scale;
    all.log_weights = sums.log_weights;
    all.d_loc = launch_view_at(ps->d_loc, 0, t);
    all.d_scale = launch_view_at(ps->d_scale, 0, t);
    all.d_log_weights = launch_view_at(ps->d_log_weights, 0, t);
    struct pya_driver_grid g = {launch_parts(ps->n_m * ps->dim, THREADS), 1, THREADS, 0};
    return pya_driver_launch(to, "pya_ps_backward_sum", g, &all);
}

int
pya_ops_cuda_ps_backward(const struct pya_ops_ps *ps, const struct pya_ops_target *to) {
    const struct launch_thin thin = launch_thin(ps);
    if (thin.threads != 0) {
        return launch_ps_thin(ps, thin.backward, thin.threads, to);
    }
    const struct launch_cut cut = launch_cut(ps);
    if (cut.n == 1 || ps->workspace == NULL) {
        return launch_ps_backward(ps, to);
    }
    int status = PYA_OPS_OK;
    for (int64_t t = 0; t < ps->n_t && status == PYA_OPS_OK; t++) {
        status = launch_ps_backward_cut(ps, cut, t, to);
    }
    return status;
}

static int64_t
launch_least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t
launch_most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* The keys are cut into so many parts that there are CHUNK_BLOCKS blocks, but a part has at least as many keys as a block has
 * warps, and at most as many as it has threads. */
static int64_t
launch_key_parts(const struct pya_ops_additive *a) {
    const int64_t wanted = launch_most(CHUNK_BLOCKS / launch_most(a->n_q * a->n_b, 1), 1);
    const int64_t size = (int64_t)launch_parts(a->n_s, wanted);
    const int64_t taken = launch_least(launch_most(size, THREADS / WARP), THREADS);
    return launch_most((int64_t)launch_parts(a->n_s, taken), 1);
}

/* Do the kernels' 32-bit counters suffice?  They count numbers in a row, and rows of probabilities, up to one block beyond the
 * last; in a gradient of values up to four times as far. */
static bool
launch_counts(const struct pya_ops_additive *a) {
    const int64_t most = INT32_MAX - (1 << 16);
    const int64_t queries = launch_most(a->n_q * a->n_b, 1);
    return a->n_h <= most && a->n_e <= most / 4 && queries <= most && a->n_s <= most / queries;
}

/* The steps of a decoder read the same keys and values, so the L2 cache should keep them: all keys first, then as many rows of
 * values as fit. */
static int64_t
launch_kept(const struct pya_ops_additive *a) {
    const int64_t rows = a->n_b * a->n_s;
    const int64_t room = KEPT_BYTES / (int64_t)sizeof(float) - rows * a->n_h;
    const int64_t all = launch_most(rows * a->n_e, 1);
    return launch_least(launch_most(room, 0), all) * PYA_OPS_KEPT_OF / all;
}

int64_t
pya_ops_cuda_additive_room(const struct pya_ops_additive *a) {
    const int64_t parts = launch_key_parts(a);
    const int64_t rows = a->n_q * a->n_b;
    return parts == 1 ? 0 : (2 * rows + 3) / 4 * 4 + rows * (parts * (a->n_e + 2) + a->n_s);
}

int
pya_ops_cuda_additive_forward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    const uint64_t rows = (uint64_t)a->n_q * (uint64_t)a->n_b;
    if (!launch_counts(a)) {
        return PYA_OPS_E_INVAL;
    }
    struct pya_ops_additive x = *a;
    x.n_parts = launch_key_parts(a);
    x.n_kept = launch_kept(a);
    struct pya_driver_grid parts = {(uint64_t)x.n_parts * rows, 1, THREADS, 0};
    int status = pya_driver_launch(to, "pya_additive_forward", parts, &x);
    if (status == PYA_OPS_OK && x.n_parts > PYA_OPS_MERGED_PARTS) {
        struct pya_driver_grid merge = {launch_parts(a->n_e, COLUMNS) * rows, 1, THREADS, 0};
        status = pya_driver_launch(to, "pya_additive_merge", merge, &x);
    }
    return status;
}

int
pya_ops_cuda_additive_backward(const struct pya_ops_additive *a, const struct pya_ops_target *to) {
    const int64_t rows = a->n_q * a->n_b * a->n_s;
    if (!launch_counts(a)) {
        return PYA_OPS_E_INVAL;
    }
    struct pya_ops_additive x = *a;
    x.n_kept = launch_kept(a);
    struct pya_driver_grid values = {launch_parts(rows, THREADS / WARP), 1, THREADS, 0};
    int status = pya_driver_launch(to, "pya_additive_backward_values", values, &x);
    if (status == PYA_OPS_OK) {
        const uint64_t blocks = launch_parts(a->n_h, COLUMNS) * (uint64_t)a->n_b;
        struct pya_driver_grid keys = {
            blocks, 1, blocks < FEW_BLOCKS ? MANY_THREADS : FEW_THREADS, 0};
        status = pya_driver_launch(to, "pya_additive_backward_keys", keys, a);
    }
    return status;
}

/* The tensor-core kernels, one per size of head, with the bytes of shared memory each needs. */
struct launch_attention {
    struct {
        const char *forward, *backward_q, *backward_keys, *backward_bias;
    } name;
    uint32_t forward, backward;
};

static const struct launch_attention attention_64 = {
    {"pya_attention_forward_64_tensor", "pya_attention_backward_q_64_tensor",
     "pya_attention_backward_keys_64_tensor", "pya_attention_backward_bias_64_tensor"},
    PYA_OPS_ATTENTION_FORWARD_64_BYTES,
    PYA_OPS_ATTENTION_BACKWARD_64_BYTES,
};
static const struct launch_attention attention_128 = {
    {"pya_attention_forward_128_tensor", "pya_attention_backward_q_128_tensor",
     "pya_attention_backward_keys_128_tensor", "pya_attention_backward_bias_128_tensor"},
    PYA_OPS_ATTENTION_FORWARD_128_BYTES,
    PYA_OPS_ATTENTION_BACKWARD_128_BYTES,
};

/* NULL for larger heads, or sequences too long to count with 32 bits up to one tile beyond the end. */
static const struct launch_attention *
launch_attention_tensor(const struct pya_ops_attention *a) {
    const int64_t most = INT32_MAX - BIG;
    const int64_t dim = a->dim > a->dim_v ? a->dim : a->dim_v;
    if (dim > 128 || a->n_q > most || a->n_k > most || a->n_h > most ||
        (int64_t)launch_parts(a->n_q, SPAN_TENSOR) * a->n_h > most) {
        return NULL;
    }
    return dim > 64 ? &attention_128 : &attention_64;
}

static struct pya_driver_grid
launch_grid_attention(uint64_t blocks, uint32_t shared) {
    struct pya_driver_grid g = {blocks, 1, ATTENTION_THREADS, shared};
    return g;
}

int
pya_ops_cuda_attention_forward(const struct pya_ops_attention *a, const struct pya_ops_target *to) {
    if (a->dim_v > 256) {
        return PYA_OPS_E_INVAL;
    }
    const uint64_t blocks = launch_parts(a->n_q, SMALL) * (uint64_t)(a->n_h * a->n_b);
    const struct launch_attention *tensor = launch_attention_tensor(a);
    if (tensor != NULL && pya_driver_allow(to, tensor->name.forward, tensor->forward)) {
        return pya_driver_launch(
            to, tensor->name.forward, launch_grid_attention(blocks, tensor->forward), a);
    }
    struct pya_driver_grid g = {blocks, 1, THREADS, 0};
    return pya_driver_launch(to, "pya_attention_forward", g, a);
}

struct launch_step {
    const char *kernel;
    struct pya_driver_grid grid;
};

static int
launch_steps(
    const struct launch_step *steps, size_t n, const struct pya_ops_attention *a,
    const struct pya_ops_target *to) {
    int status = PYA_OPS_OK;
    for (size_t i = 0; i < n && status == PYA_OPS_OK; i++) {
        status = pya_driver_launch(to, steps[i].kernel, steps[i].grid, a);
    }
    return status;
}

/* Number of blocks for the gradient of the bias, each with a tile of this many keys. */
static uint64_t
launch_bias_blocks(const struct pya_ops_attention *a, int64_t keys) {
    const struct pya_ops_scores o = a->d_bias;
    const uint64_t slices = (uint64_t)((o.b != 0 ? a->n_b : 1) * (o.h != 0 ? a->n_h : 1));
    return (o.k != 0 ? launch_parts(a->n_k, keys) : 1) *
           (o.q != 0 ? launch_parts(a->n_q, SMALL) : 1) * slices;
}

/* Is no element of d_bias shared?  A shared one has a stride of 0. */
static bool
launch_owns_bias(const struct pya_ops_attention *a) {
    const struct pya_ops_scores o = a->d_bias;
    return o.p != NULL && (o.b != 0 || a->n_b == 1) && (o.h != 0 || a->n_h == 1) &&
           (o.q != 0 || a->n_q == 1) && (o.k != 0 || a->n_k == 1);
}

static int
launch_attention_backward_tensor(
    const struct pya_ops_attention *a, const struct launch_attention *tensor,
    const struct pya_ops_target *to) {
    const uint64_t queries = launch_parts(a->n_q, SMALL) * (uint64_t)(a->n_h * a->n_b);
    const uint64_t keys = launch_parts(a->n_k, SMALL) * (uint64_t)(a->n_kv * a->n_b);
    const uint64_t bias = launch_bias_blocks(a, SPAN_TENSOR);
    const struct launch_step steps[] = {
        {tensor->name.backward_q, launch_grid_attention(queries, tensor->backward)},
        {tensor->name.backward_keys, launch_grid_attention(keys, tensor->backward)},
        {tensor->name.backward_bias, launch_grid_attention(bias, tensor->backward)},
    };
    struct pya_ops_attention x = *a;
    x.owns_bias = launch_owns_bias(a);
    return launch_steps(steps, a->d_bias.p != NULL && !x.owns_bias ? 3 : 2, &x, to);
}

int
pya_ops_cuda_attention_backward(
    const struct pya_ops_attention *a, const struct pya_ops_target *to) {
    const struct launch_attention *tensor = launch_attention_tensor(a);
    if (tensor != NULL && pya_driver_allow(to, tensor->name.backward_q, tensor->backward) &&
        pya_driver_allow(to, tensor->name.backward_keys, tensor->backward) &&
        pya_driver_allow(to, tensor->name.backward_bias, tensor->backward)) {
        return launch_attention_backward_tensor(a, tensor, to);
    }
    const uint64_t heads = (uint64_t)(a->n_h * a->n_b);
    const uint64_t key_heads = (uint64_t)(a->n_kv * a->n_b);
    const uint64_t n_qb = launch_parts(a->n_q, SMALL);
    const uint64_t n_kb = launch_parts(a->n_k, SMALL);
    const uint64_t columns = launch_parts(a->dim, WIDE);
    const uint64_t columns_v = launch_parts(a->dim_v, WIDE);
    const struct launch_step steps[] = {
        {"pya_attention_backward_delta", {(uint64_t)a->n_q * heads, 1, WARP, 0}},
        {"pya_attention_backward_q", {columns * n_qb * heads, 1, THREADS, 0}},
        {"pya_attention_backward_k", {columns * n_kb * key_heads, 1, THREADS, 0}},
        {"pya_attention_backward_v", {columns_v * n_kb * key_heads, 1, THREADS, 0}},
        {"pya_attention_backward_bias", {launch_bias_blocks(a, SMALL), 1, THREADS, 0}},
    };
    return launch_steps(steps, a->d_bias.p != NULL ? 5 : 4, a, to);
}
