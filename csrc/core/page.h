/* The page table: every physical page of a card and its one home.  Floor 3.
 *
 * Pages come in grains: 1, 4 or 16 of them behind one handle.  A driver's call costs the same for each handle, whatever
 * its size, and kernels run a few percent faster on large ones; but it maps and unmaps a grain only whole.  So the pages
 * of a grain always lie side by side, in order, at home and wherever else they are mapped, and leave together. */
#pragma once

#include "../device/device.h"
#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_range;

/* Every list of pages consists of whole grains, the pages of each in order. */
typedef uint32_t pya_page_id;
#define PYA_NO_PAGE UINT32_MAX

enum { PYA_GRAIN_SHIFT = 2, PYA_N_GRAINS = 3 };

/* handle 0: an unused entry; `slot` of a grain's first page is then the next grain in the chain of unused ones of its size. */
struct pya_page {
    pya_page_handle handle;  /* of the grain */
    struct pya_range *range; /* home; NULL while the page has none (a release that failed) */
    uint32_t slot;           /* home: the page's number in the range */
    uint32_t n_mappings;     /* addresses at which it is mapped, home included */
    uint8_t grain;           /* it has 1 << grain * PYA_GRAIN_SHIFT pages */
    uint8_t place;           /* in the grain, from 0 on; entries of one grain follow each other */
    bool is_small;           /* created for a small request: torch's small pool owns it */
    bool is_leaving; /* scratch: chosen by the trimmer, or not to be picked (pya_stitch_mark()) */
    bool is_left;    /* see pya_arena_leave() */
};

/* n_live == number of entries with a handle; n_mappings == sum of their n_mappings. */
struct pya_pages {
    struct pya_page *items;
    size_t n_items;
    size_t n_room;
    size_t n_live;
    size_t n_grained; /* of those: in grains of more than one page */
    size_t n_mappings;
    pya_page_id unused[PYA_N_GRAINS];
    /* The device had no more than n_had of the pages wanted, and said free_then when these were back. */
    bool is_short;
    size_t n_had;
    size_t free_then;
};

static inline size_t
pya_grain_pages(unsigned grain) {
    return (size_t)1 << grain * PYA_GRAIN_SHIFT;
}

/* The largest grain of at most n pages, n > 0. */
static inline unsigned
pya_grain_within(size_t n) {
    unsigned grain = 0;
    while (grain + 1 < PYA_N_GRAINS && pya_grain_pages(grain + 1) <= n) {
        grain++;
    }
    return grain;
}

/* Of the page's grain. */
static inline size_t
pya_page_n(const struct pya_pages *pages, pya_page_id id) {
    return pya_grain_pages(pages->items[id].grain);
}

/* Of a list of pages. */
static inline size_t
pya_pages_handles(const struct pya_pages *pages, const pya_page_id *ids, size_t n) {
    size_t n_handles = 0;
    for (size_t i = 0; i < n; i++) {
        n_handles += pages->items[ids[i]].place == 0;
    }
    return n_handles;
}

void pya_pages_init(struct pya_pages *pages);
void pya_pages_fini(struct pya_pages *pages);
/* Host memory for n more pages, so that creating them can only fail on the device. */
PYA_MUST_CHECK pya_status pya_pages_reserve(struct pya_pages *pages, size_t n);
/* Creates n pages without a home or mapping, in the fewest grains that make n, none larger than `most`; host memory was
 * reserved.  On failure *n_made is how many of them, now ids' first ones, could not be given back.
 * Making many only to give them back takes seconds: what the device did not have is not tried again, until
 * pya_pages_try_anew(), unless its free memory has grown by as much.  Not by that alone: it does not count what the driver
 * can put elsewhere (managed memory). */
PYA_MUST_CHECK pya_status pya_pages_make(
    struct pya_pages *pages, struct pya_device *dev, size_t n, unsigned most, pya_page_id *ids,
    size_t *n_made);
void pya_pages_try_anew(struct pya_pages *pages);
/* The grain that begins with this page; unmapped ones only.  On failure its pages stay in the table, without a home. */
PYA_MUST_CHECK pya_status
pya_grain_release(struct pya_pages *pages, struct pya_device *dev, pya_page_id id);
/* Maps whole grains side by side.  *n_mapped: pages that are mapped, also on failure. */
PYA_MUST_CHECK pya_status pya_pages_map(
    const struct pya_pages *pages, struct pya_device *dev, pya_dptr addr, const pya_page_id *ids,
    size_t n, size_t *n_mapped);

/* Whether the pages of each grain are side by side at home, and mapped as often as one another.  Prints each violation and
 * returns their number. */
size_t pya_pages_check(const struct pya_pages *pages);

/* Mappings are counted here so that the sums stay true. */
static inline void
pya_page_mapped(struct pya_pages *pages, pya_page_id id) {
    pages->items[id].n_mappings++;
    pages->n_mappings++;
}

static inline void
pya_page_unmapped(struct pya_pages *pages, pya_page_id id) {
    pages->items[id].n_mappings--;
    pages->n_mappings--;
}

#ifdef __cplusplus
}
#endif
