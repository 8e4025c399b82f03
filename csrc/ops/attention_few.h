#pragma once
/* Scaled attention's kernels for few queries, of the instruction sets with vectors.  Floor 2. */
#include "attention_tile.h"

/* With fewer queries they are the faster ones: of the narrowest heads 4, and one more for so many numbers of a key and a value,
 * up to so many.  Measured in both directions for 2 to 20 queries, 4 to 300 keys and heads of 1 to 256 on a Zen 5; the bounds
 * of wide heads are those of a Granite Rapids, where fewer pay. */
enum {
    ATT_FEW = 4,
    ATT_FEW_NUMBERS = VW == 16 ? 10 : 16,
    ATT_FEW_MOST = VW == 16 ? 13 : 8,
};

static inline bool
att_is_few(const struct pya_ops_attention *a) {
    const int64_t few = ATT_FEW + (a->dim + a->dim_v) / ATT_FEW_NUMBERS;
    return a->n_q < (few < ATT_FEW_MOST ? few : ATT_FEW_MOST) && !(a->dropout > 0);
}

/* As pya_attention_forward and pya_attention_backward, without dropout. */
int PYA_FN(pya_attention_few_forward)(const struct pya_ops_attention *a);
int PYA_FN(pya_attention_few_backward)(const struct pya_ops_attention *a);
