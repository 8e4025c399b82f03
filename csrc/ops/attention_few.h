#pragma once
/* Scaled attention's forward for few queries, of the instruction sets with vectors.  Floor 2. */
#include "attention_tile.h"

/* With fewer queries it is the faster one, with wide heads also with more: measured for 4 to 20 queries, 2 to 500 keys and heads
 * of 1 to 256 on a Granite Rapids. */
enum {
    ATT_FEW = VW == 16 ? 10 : VW,
    ATT_FEW_OF_WIDE = VW == 16 ? 13 : VW,
    ATT_WIDE = 64,
};

static inline bool
att_is_few(const struct pya_ops_attention *a) {
    const bool is_wide = a->dim + a->dim_v >= 2 * ATT_WIDE;
    return a->n_q < (is_wide ? ATT_FEW_OF_WIDE : ATT_FEW) && !(a->dropout > 0);
}

/* As pya_attention_forward, without dropout. */
int PYA_FN(pya_attention_few)(const struct pya_ops_attention *a);
