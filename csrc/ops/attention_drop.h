#pragma once
/* Dropout of scaled attention's probabilities.  Floor 2. */
#include "attention_tile.h"

/* A counter-based random number: the same for (seed, head, query, key) in forward and backward. */
static inline uint32_t
att_mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static inline uint32_t
att_seed(const struct pya_ops_attention *a, struct att_block x) {
    uint32_t head = (uint32_t)(x.b * (ptrdiff_t)a->n_h + x.h);
    return att_mix(att_mix((uint32_t)a->seed + head) ^ (uint32_t)(a->seed >> 32));
}

/* 1 / (1 - dropout) if the score is kept, else 0 */
static inline vr
att_keep(const struct pya_ops_attention *a, uint32_t seed, ptrdiff_t q, ptrdiff_t k) {
    vi x = i_add(i_iota(), i_set((uint32_t)q));
    x = i_add(i_mul(x, i_set(0x9e3779b9u)), i_set(att_mix((uint32_t)k ^ seed)));
    x = i_mul(i_xor(x, i_shr(x, 16)), i_set(0x7feb352du));
    x = i_mul(i_xor(x, i_shr(x, 15)), i_set(0x846ca68bu));
    x = i_shr(i_xor(x, i_shr(x, 16)), 8);
    vr u = v_mul(i_to_v(x), v_set((real)(1.0 / 16777216)));
    return v_sel(m_lt(u, v_set((real)a->dropout)), v_set(0), v_set((real)(1 / (1 - a->dropout))));
}
