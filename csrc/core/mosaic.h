/* The composition of a stitched range: whole free grains, preceded by the free end of a grain and followed by the
 * free start of another.  Floor 8.
 *
 * A grain can only be mapped whole, so the rest of the first and last grain is mapped next to the block, but not
 * lent.  If pages may be shared, the block may also begin and end within a page: it needs up to two pages fewer and
 * wastes nothing of its last page.  Such a page is then live under both addresses, and every block in it keeps to its
 * own PYA_ALIGN steps. */
#pragma once

#include "move.h"
#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Part of a grain; `grain` is the number of its first page.  bytes 0: none. */
struct pya_part {
    pya_page_id grain;
    size_t bytes;
};

/* begin.bytes + bytes lent by grains (the cut one lends cut_bytes) + end.bytes + n_lacking pages == bytes, or more by
 * the unused rest of the last page. */
struct pya_mosaic {
    size_t bytes;
    size_t n_lacking; /* pages to create first */
    struct pya_part begin;
    struct pya_grains grains;
    unsigned cut;     /* the last grain of this size ... */
    size_t cut_bytes; /* ... lends at most this; 0: no grain is cut */
    struct pya_part end;
};

/* The plan with the fewest new pages.  shares: parts may end within a page; otherwise `bytes` is rounded up to whole
 * pages. */
struct pya_mosaic pya_mosaic_plan(const struct pya_arena *arena, size_t bytes, bool shares);
/* Handles that the plan maps; each new page counts as one. */
size_t pya_mosaic_handles(const struct pya_mosaic *mosaic);
/* Maps a plan that matches the arena's current state.  Undoes itself on failure.  PYA_E_NOMEM: the plan lacks pages. */
PYA_MUST_CHECK pya_status
pya_mosaic_make(struct pya_arena *arena, const struct pya_mosaic *mosaic, struct pya_stitch **out);

#ifdef __cplusplus
}
#endif
