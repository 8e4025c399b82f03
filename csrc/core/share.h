/* Shared ranges: the most that free bytes can give without two live blocks sharing a byte.  Floor 8.
 *
 * A range may begin in the free end of a page and end in the free start of another, so a request needs up to
 * two wholly free pages fewer and wastes none of its last one.  Both addresses of such a page are live at
 * once; every block in it keeps to its own PYA_ALIGN steps. */
#pragma once

#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The free end of a page (to begin in), wholly free pages, the free start of a page (to end in). */
struct pya_share {
    pya_page_id begin; /* PYA_NO_PAGE: none */
    size_t begin_bytes;
    size_t n_whole;
    pya_page_id end; /* PYA_NO_PAGE: none */
};

/* The fewest wholly free pages that `bytes` need in this arena beside one begin and one end. */
struct pya_share pya_share_plan(const struct pya_arena *arena, size_t bytes);
/* Maps the plan, whose wholly free pages are there, and hands it out.  Undoes itself on failure. */
PYA_MUST_CHECK pya_status pya_share_take(
    struct pya_arena *arena, size_t bytes, const struct pya_share *plan, struct pya_block **out);

#ifdef __cplusplus
}
#endif
