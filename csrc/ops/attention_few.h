#pragma once
/* Scaled attention's kernels for few queries, of the instruction sets with vectors.  Floor 2. */
#include "attention_tile.h"

/* With fewer queries they are the faster ones: of the narrowest heads 4, and one more for so many numbers of a key and a value,
 * up to so many, and of wide heads more; with few keys and very wide heads, any number.  Measured in both directions for heads of
 * 1 to 256 with 2 to 32 queries and 4 to 500 keys on a Zen 5, and from 13 queries on, and with few keys, on an Emerald Rapids. */
enum {
    ATT_FEW = 4,
    ATT_FEW_NUMBERS = VW == 16 ? 10 : 16,
    ATT_FEW_MOST = VW == 16 ? 13 : 8,
    ATT_FEW_MOST_OF_WIDE = VW == 16 ? 25 : 8,
    ATT_FEW_WIDE = 160,
    ATT_FEW_KEYS = VW == 16 ? 16 : 0,
    ATT_FEW_KEYS_WIDE = 384,
};

static inline bool
att_is_few(const struct pya_ops_attention *a) {
    const int64_t numbers = a->dim + a->dim_v;
    const int64_t few = ATT_FEW + numbers / ATT_FEW_NUMBERS;
    const int64_t most = numbers < ATT_FEW_WIDE ? ATT_FEW_MOST : ATT_FEW_MOST_OF_WIDE;
    const bool has_few_keys = a->n_k <= ATT_FEW_KEYS && numbers >= ATT_FEW_KEYS_WIDE;
    return (has_few_keys || a->n_q < (few < most ? few : most)) && !(a->dropout > 0);
}

/* As pya_attention_forward and pya_attention_backward, without dropout. */
int PYA_FN(pya_attention_few_forward)(const struct pya_ops_attention *a);
int PYA_FN(pya_attention_few_backward)(const struct pya_ops_attention *a);
