/* A program that repeats its requests gets the places of the last time again.  Floor 8.
 *
 * Best fit alone puts the blocks of a training step a little differently each time, because what lives beyond its end
 * (gradients) lies elsewhere; other pages are free then, and others are stitched, for dozens of steps.  A step that finds
 * its blocks where the one before had them is like it, and needs no device call. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For a request in an arena of pages of the default pool: a block at the place, home or stitched, of the corresponding
 * request one period ago.  Where another block lies there now, one in free memory that no other request of the period will
 * want before this one is given back.  NULL while the program is not known to repeat itself, and where no such memory is
 * free; for a request below PYA_REPEAT_FROM also before a whole period has settled.  The block is USED or STITCHED. */
struct pya_block *pya_repeat_take(struct pya_arena *arena, size_t bytes);
/* Was the latest large request one of a program that is known to repeat itself? */
bool pya_repeat_is_known(const struct pya_arena *arena);
/* That request was served by `block`, wherever it lies. */
void pya_repeat_note(struct pya_arena *arena, struct pya_block *block);
/* Its user gives a block back that has an n_request. */
void pya_repeat_note_free(const struct pya_block *block);
/* The user had free pages given back: what lay there will lie elsewhere, and nothing settles before all came once more. */
void pya_repeat_note_trim(struct pya_arena *arena);

/* Is pya_repeat_take() or pya_repeat_note() to be called for this request? */
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
