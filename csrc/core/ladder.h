/* The ladder: where a request is looked for, in which order, and what happens when nothing is left.  Floor 11. */
#pragma once

#include "gc.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_block *pya_ladder_fit_run(struct pya_arena *arena, size_t bytes, bool is_small);
/* Step one of every policy: tries only the block freed last and the fit index.  NULL: go down the ladder. */
static inline struct pya_block *
pya_ladder_fit(struct pya_arena *arena, size_t bytes, bool is_small) {
    struct pya_block *parked = arena->parked;
    if (parked != NULL && parked->bytes == bytes) {
        arena->parked = NULL;
        return parked;
    }
    return pya_ladder_fit_run(arena, bytes, is_small);
}
/* All steps below pya_ladder_fit().  bytes: rounded.  PYA_E_NOMEM: every permitted step was tried.  The block's user
 * fields are unset, and it may belong to another arena.  The card's lock may be released meanwhile. */
PYA_MUST_CHECK pya_status
pya_ladder_climb(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out);

#ifdef __cplusplus
}
#endif
