/* Stitched ranges: a list of pages mapped a second time, side by side, for one block.  Floor 7.
 *
 * Taking one lends the same bytes out of the pages' home runs; giving it back returns them there.  The
 * mapping stays, so a range whose bytes are all free again is taken anew without a device call.  There is as much room
 * again behind it, so that one for a tensor that grows is extended by the pages it lacks.
 *
 * A grain is mapped whole, so a range that begins with the end of one or ends with the start of one (mosaic.h) shows more
 * than it lends.  The pages that it lends are its own, unless it is shared: then it begins or ends within a page, in which
 * other live blocks may sit, under its home address or under those of other ranges, in bytes of their own. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PYA_STITCH_BUCKETS = 128 };

struct pya_stitch {
    struct pya_stitch *next_same, *prev_same; /* same bucket, latest used first */
    struct pya_stitch *newer, *older;         /* all of the arena, by use */
    struct pya_arena *arena;
    struct pya_block *block; /* NULL: idle */
    pya_dptr base;
    size_t range_bytes; /* address space reserved at base */
    size_t offset;      /* of the first lent byte from base; less than a grain */
    size_t bytes;       /* lent from there; both multiples of PYA_PAGE unless shared */
    bool is_shared;
    size_t n_pages; /* mapped there; fewer than fit when is_broken */
    bool is_broken; /* half mapped, which could not be undone: only good for unmapping */
    pya_page_id pages[];
};

/* The first page of a range that lends anything of itself, and the one behind the last: what the grains at both ends have
 * besides is mapped, and another's. */
static inline size_t
pya_stitch_first(const struct pya_stitch *stitch) {
    return stitch->offset >> PYA_PAGE_SHIFT;
}

static inline size_t
pya_stitch_end(const struct pya_stitch *stitch) {
    return pya_pages_for(stitch->offset + stitch->bytes);
}

struct pya_stitches {
    struct pya_stitch *buckets[PYA_STITCH_BUCKETS];
    struct pya_stitch *newest, *oldest;
    size_t n_mappings; /* sum of n_pages */
};

/* Which bytes a range is to lend: of n_pages pages, from `offset` on. */
struct pya_stitch_plan {
    const pya_page_id *ids;
    size_t n_pages;
    size_t offset;
    size_t bytes;
};

/* An idle range of exactly the pages that `bytes` need, or a shared one of exactly `bytes`, all of whose bytes the
 * arena may use; NULL if none.  It is the arena's then, whoever made it. */
PYA_MUST_CHECK pya_status
pya_stitch_find(struct pya_arena *arena, size_t bytes, struct pya_stitch **out);
/* The range, idle or not, of blocks of `bytes` at addr; NULL if there is none any more. */
struct pya_stitch *pya_stitch_of(const struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* That range, while it is idle and all of its bytes are free; NULL otherwise. */
struct pya_stitch *pya_stitch_again(struct pya_arena *arena, pya_dptr addr, size_t bytes);
/* The idle range whose block would start at addr, all of its bytes free at home; NULL if none. */
struct pya_stitch *pya_stitch_at(struct pya_arena *arena, pya_dptr addr);
/* Maps the pages (their part of the plan free, at home in this arena) at a fresh range.  Undoes itself on
 * failure. */
PYA_MUST_CHECK pya_status pya_stitch_make(
    struct pya_arena *arena, const struct pya_stitch_plan *plan, struct pya_stitch **out);
/* The longest idle range, all of its bytes free, that lacks few of the pages `bytes` need and has address space for
 * them.  NULL: there is none, or the arena's pool is in use. */
struct pya_stitch *pya_stitch_find_short(struct pya_arena *arena, size_t bytes);
/* Marks its pages as leaving, so that pya_pages_pick() passes them over, or unmarks them. */
void pya_stitch_mark(const struct pya_stitch *stitch, bool is_leaving);
/* Maps more pages, wholly free and at home in its arena, behind those of an idle range that has the room.  Undoes
 * itself on failure.  The record may move. */
PYA_MUST_CHECK pya_status
pya_stitch_extend(struct pya_stitch **stitch, const pya_page_id *ids, size_t n_pages);
/* Hands out the first `bytes` of an idle range whose bytes are all free.  PYA_E_HOST_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status
pya_stitch_take(struct pya_stitch *stitch, size_t bytes, struct pya_block **out);
/* Returns the lent bytes home and frees the record of the block; the range becomes idle. */
void pya_stitch_give(struct pya_block *block);
/* Unmaps an idle range; work that used it has finished.  On failure it stays. */
PYA_MUST_CHECK pya_status pya_stitch_destroy(struct pya_stitch *stitch);
/* For the end of the heap: unmaps all, live ones too. */
void pya_stitches_destroy(struct pya_arena *arena);

size_t pya_stitches_host_bytes(const struct pya_arena *arena);
size_t pya_stitches_check(const struct pya_arena *arena);

#ifdef __cplusplus
}
#endif
