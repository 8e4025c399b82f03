/* Garbage collection: giving back, without waiting, memory that was not needed lately.  Floor 9.
 *
 * A device has a level its reserved bytes should stay below: the soft limit, the collection threshold, what is to be
 * left to other programs, whichever is lowest.  Above it a growth gives back first what no request of the last windows
 * needed.  Memory that had to be made again soon after makes the windows, and the time to the next collection, longer. */
#pragma once

#include "trim.h"

#ifdef __cplusplus
extern "C" {
#endif

void pya_gc_init(struct pya_card *card);

/* Would n_pages more pass the level?  As it was at the last pya_gc_before_growth(). */
static inline bool
pya_gc_is_pressed(const struct pya_card *card, size_t n_pages) {
    size_t level = card->usage.level_bytes;
    return PYA_UNLIKELY(level != SIZE_MAX) && card->reserved_bytes + n_pages * PYA_PAGE > level;
}

/* No free run was found: a request of `bytes` is about to create n_pages.  Sets the level, and where it would be
 * passed gives back idle memory; what the request itself can use of the arena's stays. */
void pya_gc_before_growth(struct pya_arena *arena, size_t bytes, size_t n_pages);
/* The same as pya_gc_is_pressed(), with the level as it is now; gives nothing back. */
bool pya_gc_would_press(struct pya_card *card, size_t n_pages);
/* Such a request was served; with what the card had reserved before. */
void pya_gc_after_growth(struct pya_card *card, size_t reserved_before);
/* A request, where card->is_timed: gives back what nothing needed for that long. */
void pya_gc_note_request(struct pya_card *card);
/* Gives back up to n_bytes of memory of the default pool that no stream uses any more, the least likely to be needed
 * again first: longest unused, seen at no second address, largest.  n_keep free pages of the arena `keep` (may be NULL)
 * stay.  Returns the bytes that went back.  Never waits. */
size_t
pya_gc_collect(struct pya_card *card, size_t n_bytes, const struct pya_arena *keep, size_t n_keep);

#ifdef __cplusplus
}
#endif
