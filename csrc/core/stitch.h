/* Stitched ranges: a list of pages mapped a second time, side by side, for one block.  Floor 7.
 *
 * Taking a stitched range lends the same bytes out of the pages' home runs; giving it back returns them.  The mapping
 * stays, so a range whose bytes are all free again is reused without a device call.  As much address space again is
 * reserved behind it, so that a range for a growing tensor is extended by just the missing pages.
 *
 * A grain is mapped whole, so a range that begins with the end of a grain or ends with the start of one (mosaic.h)
 * maps more than it lends.  The pages it lends are its own, unless it is shared: a shared range begins or ends within
 * a page, where other live blocks may lie in other bytes, under their home address or under those of other ranges. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PYA_STITCH_BUCKETS = 128 };

struct pya_stitch {
    struct pya_stitch *next_same, *prev_same; /* same bucket, most recently used first */
    struct pya_stitch *newer, *older;         /* all of the arena, most recently used first */
    struct pya_arena *arena;
    struct pya_block *block; /* NULL: idle */
    pya_dptr base;
    size_t range_bytes; /* address space reserved at base */
    size_t offset;      /* of the first lent byte from base; less than a grain */
    size_t bytes;       /* lent bytes; offset and bytes are multiples of PYA_PAGE unless shared */
    bool is_shared;
    size_t n_pages; /* mapped; fewer than fit if is_broken */
    /* Partly mapped, and that could not be undone: may only be unmapped, after a wait for the device.  If an extension
     * broke it, queued work may still use the earlier part, and no page's home tells of that work. */
    bool is_broken;
    pya_page_id pages[];
};

/* The first page of a range that lends bytes, and the page after the last.  The rest of the grains at both ends is
 * mapped, but belongs to others. */
static inline size_t
pya_stitch_first(const struct pya_stitch *stitch) {
    return stitch->offset >> PYA_PAGE_SHIFT;
}

static inline size_t
pya_stitch_end(const struct pya_stitch *stitch) {
    return pya_pages_for(stitch->offset + stitch->bytes);
}

/* Does the range have no partial page or grain? */
static inline bool
pya_stitch_is_whole(const struct pya_stitch *stitch) {
    return stitch->bytes == stitch->n_pages * PYA_PAGE;
}

/* How many pages of a range from i on, at most n_most, also lie side by side at home. */
size_t pya_stitch_row(const struct pya_stitch *stitch, size_t i, size_t n_most);

struct pya_stitches {
    struct pya_stitch *buckets[PYA_STITCH_BUCKETS];
    struct pya_stitch *newest, *oldest;
    size_t n_mappings; /* sum of n_pages */
};

/* The bytes that a range is to lend: `bytes` from `offset` on, in n_pages pages. */
struct pya_stitch_plan {
    const pya_page_id *ids;
    size_t n_pages;
    size_t offset;
    size_t bytes;
};

/* An idle range with exactly the pages that `bytes` need, or a shared one of exactly `bytes`, if the arena may use
 * all of its bytes.  NULL: none.  The range becomes the arena's, whoever made it. */
PYA_MUST_CHECK pya_status
pya_stitch_find(struct pya_arena *arena, size_t bytes, struct pya_stitch **out);
/* The range, idle or not, for blocks of `bytes` at addr; NULL: there is none any more. */
struct pya_stitch *pya_stitch_of(const struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* The same range if it is idle and all its bytes are free; NULL otherwise. */
struct pya_stitch *pya_stitch_again(struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* The idle range whose block would start at addr, if all its bytes are free at home; NULL: none. */
struct pya_stitch *pya_stitch_at(struct pya_arena *arena, pya_dptr addr);
/* Maps the plan's pages at a fresh range.  They are at home in this arena, and the bytes to lend are free.  Undoes
 * itself on failure. */
PYA_MUST_CHECK pya_status pya_stitch_make(
    struct pya_arena *arena, const struct pya_stitch_plan *plan, struct pya_stitch **out);
/* The longest idle range with all its bytes free that lacks only a few of the pages for `bytes` and has address space
 * for them.  NULL: none, or the arena's pool is in use. */
struct pya_stitch *pya_stitch_find_short(struct pya_arena *arena, size_t bytes);
/* Marks or unmarks the range's pages as leaving, so that pya_pages_pick() skips them. */
void pya_stitch_mark(const struct pya_stitch *stitch, bool is_leaving);
/* Maps more pages behind those of an idle range that has the address space, and allocates its first `bytes`.  The pages
 * are wholly free and at home in its arena.  Undoes itself on failure.  The range's record is another one afterwards. */
PYA_MUST_CHECK pya_status pya_stitch_extend(
    struct pya_stitch *old, const pya_page_id *ids, size_t n_pages, size_t bytes,
    struct pya_block **out);
/* Allocates the first `bytes` of an idle range whose bytes are all free.  PYA_E_HOST_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status
pya_stitch_take(struct pya_stitch *stitch, size_t bytes, struct pya_block **out);
/* Returns the lent bytes home and frees the block's record.  The range becomes idle. */
void pya_stitch_give(struct pya_block *block);
/* Unmaps an idle range.  Work that used it has finished.  On failure the range stays. */
PYA_MUST_CHECK pya_status pya_stitch_destroy(struct pya_stitch *stitch);
/* Unmaps all ranges, including live ones.  Only for the end of the heap. */
void pya_stitches_destroy(struct pya_arena *arena);

size_t pya_stitches_host_bytes(const struct pya_arena *arena);
size_t pya_stitches_check(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
