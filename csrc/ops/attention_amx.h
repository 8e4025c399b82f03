#pragma once
/* Shared by scaled attention's forward and backward with AMX.  Blocks, layout and softmax are those of attention_tile.h; what
 * differs is that each factor of a product is split first (amx_product.h), so keys and values are split once for as many
 * blocks of queries as possible.
 *
 * Parts of very small numbers would be denormal, which AMX reads as zero, and infinite numbers cannot be split.  So all inputs
 * must lie in a range; if one does not, the whole call is computed anew without AMX.  Floor 3. */
#include "amx_product.h"
#include "attention_drop.h"

/* Bits of floats; a whole block of zeros is fine as well.  Products of three inputs and sums of 2^14 of them are then still
 * finite, and their parts normal. */
enum {
    AMX_LARGEST = (127 + 38) << 23,
    AMX_LEAST = (127 - 24) << 23,
    AMX_LEAST_GRADIENT = (127 - 60) << 23,
};

static inline bool
att_splits(unsigned largest, unsigned least) {
    return largest == 0 || (largest >= least && largest < AMX_LARGEST);
}

/* Where splitting pays, by 130 shapes of 16 to 1024 queries and keys and heads of 16 to 256, measured against the AVX-512
 * kernels on a Granite Rapids.  Smaller heads and fewer scores are faster there, as is the backward of heads over 128. */
enum {
    AMX_LEAST_DIM = 48,
    AMX_LEAST_LENGTH = 64,
    AMX_LEAST_SCORES = 24000, /* of a head */
    AMX_BACKWARD_LEAST_SCORES = 65536,
    AMX_BACKWARD_MOST_DIM = 128,
};

/* Before a backward it is the backward that decides, of both: the maxima and sums that the forward keeps are of its scores, and
 * large ones that the backward rounds in another way give probabilities that are off by up to 1e-5. */
static inline bool
att_amx_pays(const struct pya_ops_attention *a) {
#ifdef PYA_AMX_EMULATED
    (void)a;
    return true;
#else
    const int64_t narrow = a->dim < a->dim_v ? a->dim : a->dim_v;
    const int64_t wide = a->dim < a->dim_v ? a->dim_v : a->dim;
    const bool has_backward = a->stats != NULL;
    return narrow >= AMX_LEAST_DIM && (!has_backward || wide <= AMX_BACKWARD_MOST_DIM) &&
           a->n_q >= AMX_LEAST_LENGTH && a->n_k >= AMX_LEAST_LENGTH &&
           a->n_q * a->n_k >= (has_backward ? AMX_BACKWARD_LEAST_SCORES : AMX_LEAST_SCORES);
#endif
}

static inline uint32_t *
amx_take(struct pya_scratch *s, ptrdiff_t n, ptrdiff_t depth) {
    return (uint32_t *)(void *)scratch_take(s, amx_words(n, depth));
}

/* The transposed rows as a left factor: sums then run over the rows.  room: [d][ATT_AMX_ROOM]. */
enum { AMX_K = 128, ATT_AMX_ROOM = AMX_K + 16 };
static inline unsigned
att_pack_columns(
    uint32_t *dst, real *room, const real *rows, ptrdiff_t row, ptrdiff_t n, ptrdiff_t d) {
    pack_transpose(room, ATT_AMX_ROOM, rows, row, n, d, n);
    return amx_pack_rows(dst, room, ATT_AMX_ROOM, d, n);
}

enum {
    TOGETHER_MOST = 32,         /* blocks of queries that pass over the keys together */
    TOGETHER_SCRATCH = 1 << 20, /* bytes that they may take: half of an L2 cache */
};

/* As many blocks of this size as fit, at least one. */
static inline ptrdiff_t
att_together(size_t size, ptrdiff_t n_blocks) {
    ptrdiff_t n = TOGETHER_SCRATCH / (ptrdiff_t)size;
    n = n > TOGETHER_MOST ? TOGETHER_MOST : n;
    n = n > n_blocks ? n_blocks : n;
    return n < 1 ? 1 : n;
}

/* Block i of those queries from q0 to q1 that read a key head.  The heads of a group alternate, so that neighbouring blocks see
 * about the same keys. */
static inline struct att_block
att_block_of_group(
    const struct pya_ops_attention *a, ptrdiff_t b, ptrdiff_t kv, ptrdiff_t i, ptrdiff_t q0,
    ptrdiff_t q1) {
    const ptrdiff_t group = (ptrdiff_t)(a->n_h / a->n_kv);
    struct att_block x = {b, kv * group + i % group, q0 + i / group * ATT_Q, 0, 0, 0};
    x.nq = (int)(q1 - x.q0 < ATT_Q ? q1 - x.q0 : ATT_Q);
    return x;
}
