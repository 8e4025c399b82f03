/* The ladder: where a request is looked for, in which order, and what is done when nothing is left.  Floor 11. */
#pragma once

#include "gc.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_block *pya_ladder_fit_run(struct pya_arena *arena, size_t bytes, bool is_small);
/* What was freed last or the fit index alone, as step one of every policy.  NULL: go down the ladder. */
static inline struct pya_block *
pya_ladder_fit(struct pya_arena *arena, size_t bytes, bool is_small) {
    struct pya_block *parked = arena->parked;
    if (parked != NULL && parked->bytes == bytes) {
        arena->parked = NULL;
        return parked;
    }
    return pya_ladder_fit_run(arena, bytes, is_small);
}
/* Everything below it.  bytes: rounded.  PYA_E_NOMEM after every step that may be taken was taken;
 * the block's user fields are unset, and it may be another arena's.  The card's lock may be given up meanwhile. */
PYA_MUST_CHECK pya_status
pya_ladder_climb(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

#ifdef __cplusplus
}
#endif
