/* Garbage collection: gives back memory that was not needed lately, without waiting.  Floor 9.
 *
 * Each device has a level that its reserved bytes should stay below: the lowest of the soft limit, the collection
 * threshold and the memory to be left to other programs.  A growth above the level first gives back what no request
 * of the last windows needed.  If memory has to be created again soon after, the windows and the time to the next
 * collection become longer. */
#pragma once

#include "trim.h"

#ifdef __cplusplus
extern "C" {
#endif

void pya_gc_init(struct pya_card *card);

/* Would n_pages more exceed the level set by the last pya_gc_before_growth()? */
static inline bool
pya_gc_is_pressed(const struct pya_card *card, size_t n_pages) {
    size_t level = card->usage.level_bytes;
    return PYA_UNLIKELY(level != SIZE_MAX) && card->reserved_bytes + n_pages * PYA_PAGE > level;
}

/* Call when no free run fits a request of `bytes` and n_pages are about to be created.  Updates the level.  If the
 * growth would exceed it, gives back idle memory, except what the request itself can use of this arena. */
void pya_gc_before_growth(struct pya_arena *arena, size_t bytes, size_t n_pages);
/* Like pya_gc_is_pressed(), with the level as of now.  Gives nothing back. */
bool pya_gc_would_press(struct pya_card *card, size_t n_pages);
/* Call after a growth served the request.  reserved_before: the card's reserved bytes before it. */
void pya_gc_after_growth(struct pya_card *card, size_t reserved_before);
/* Call for a request if card->is_timed.  Gives back memory that was not needed for the time set by trim_after. */
void pya_gc_note_request(struct pya_card *card);
/* Gives back up to n_bytes of the default pool's memory that no stream uses any more.  Starts with what is least
 * likely to be needed again: longest unused, without a second address, largest.  Keeps n_keep free pages of the arena
 * `keep` (may be NULL).  Returns the bytes given back.  Never waits. */
size_t
pya_gc_collect(struct pya_card *card, size_t n_bytes, const struct pya_arena *keep, size_t n_keep);

#ifdef __cplusplus
}
#endif
