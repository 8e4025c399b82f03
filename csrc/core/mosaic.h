/* What a stitched range is put together from: whole free grains, in front of them the free end of a grain, behind them the
 * free start of another.  Floor 8.
 *
 * A grain can only be mapped whole, so what else these two have lies beside the block, mapped but not lent.  Where pages
 * may be shared the block begins and ends within a page too: it needs up to two pages fewer and wastes nothing of its last
 * one.  Both addresses of such a page are live at once; every block in it keeps to its own PYA_ALIGN steps. */
#pragma once

#include "move.h"
#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A part of a grain, from its first page's number on; bytes 0: none. */
struct pya_part {
    pya_page_id grain;
    size_t bytes;
};

/* begin.bytes + the grains' bytes but for what the cut one keeps + end.bytes + n_lacking pages == bytes, or more by what
 * the last page has. */
struct pya_mosaic {
    size_t bytes;
    size_t n_lacking; /* pages, to be made before */
    struct pya_part begin;
    struct pya_grains grains;
    unsigned cut;     /* the last of this size ... */
    size_t cut_bytes; /* ... lends no more than these; 0: none is cut */
    struct pya_part end;
};

/* With the fewest new pages.  shares: parts are not of whole pages; else `bytes` are rounded up to these. */
struct pya_mosaic pya_mosaic_plan(const struct pya_arena *arena, size_t bytes, bool shares);
/* That it maps; new pages at one each. */
size_t pya_mosaic_handles(const struct pya_mosaic *mosaic);
/* Maps a plan of the arena as it is.  Undoes itself on failure.  PYA_E_NOMEM: it lacks pages. */
PYA_MUST_CHECK pya_status
pya_mosaic_make(struct pya_arena *arena, const struct pya_mosaic *mosaic, struct pya_stitch **out);

#ifdef __cplusplus
}
#endif
