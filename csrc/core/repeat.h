/* Gives a program that repeats its requests the same places as last time.  Floor 8.
 *
 * Best fit alone places the blocks of a training step slightly differently each time, because blocks that outlive the
 * step (gradients) lie elsewhere.  Then other pages are free and others are stitched, for dozens of steps.  A step
 * that gets the places of the step before needs no device call. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For a request in an arena of pages of the default pool: takes a block at the place, home or stitched, where the
 * corresponding request lay one period ago.  If another block lies there now, takes one in free memory that no other
 * request of the period will want before this one is freed.  NULL if the program is not known to repeat itself or no
 * such memory is free; for a request below PYA_REPEAT_FROM also until a whole period has settled.  The block is USED
 * or STITCHED. */
struct pya_block *pya_repeat_take(struct pya_arena *arena, size_t bytes);
/* Does the latest large request belong to a program that is known to repeat itself? */
bool pya_repeat_is_known(const struct pya_arena *arena);
/* Notes that this request was served by `block`, wherever it lies. */
void pya_repeat_note(struct pya_arena *arena, struct pya_block *block);
/* Notes that the user freed a block that has an n_request. */
void pya_repeat_note_free(const struct pya_block *block);
/* Notes that the user had free pages given back.  Blocks will now lie elsewhere, so nothing settles until every
 * request has come once more. */
void pya_repeat_note_trim(struct pya_arena *arena);

/* Must pya_repeat_take() or pya_repeat_note() be called for this request? */
static inline bool
pya_repeat_is_on(struct pya_arena *arena, size_t bytes) {
    if (bytes < PYA_REPEAT_FROM) {
        return PYA_UNLIKELY(arena->littles != NULL);
    }
    if (arena->pool != NULL || arena->small_fit != NULL) {
        return false;
    }
    if (PYA_LIKELY(arena->repeat_pause == 0)) {
        return true;
    }
    arena->repeat_pause--;
    return false;
}

size_t pya_repeat_host_bytes(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
