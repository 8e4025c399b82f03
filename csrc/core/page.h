/* The page table: every physical page of a card and its one home.  Floor 3.
 *
 * Pages come in grains: 1, 4 or 16 pages behind one handle.  A driver call costs the same for each handle, whatever
 * its size, and kernels run a few percent faster on large grains; but a grain can only be mapped and unmapped whole.
 * So the pages of a grain always lie side by side and in order, at home and wherever else they are mapped, and are
 * released together. */
#pragma once

#include "../device/device.h"
#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_range;

/* A list of pages always consists of whole grains, with each grain's pages in order. */
typedef uint32_t pya_page_id;
#define PYA_NO_PAGE UINT32_MAX

enum { PYA_GRAIN_SHIFT = 2, PYA_N_GRAINS = 3 };

/* handle 0: an unused entry.  In a grain's first page, `slot` is then the next entry in the chain of unused grains of
 * that size. */
struct pya_page {
    pya_page_handle handle;  /* of the whole grain */
    struct pya_range *range; /* home; NULL while the page has none (a release that failed) */
    uint32_t slot;           /* home: the slot's number in the range */
    uint32_t n_mappings;     /* addresses at which it is mapped, including home */
    uint8_t grain;           /* the grain has 1 << grain * PYA_GRAIN_SHIFT pages */
    uint8_t place;           /* index in the grain; the entries of a grain are consecutive */
    bool is_small;           /* created for a small request: counts in torch's small pool */
    bool is_leaving; /* scratch: chosen by the trimmer, or not to be picked (pya_stitch_mark()) */
    bool is_left;    /* see pya_arena_leave() */
};

/* n_live == number of entries with a handle; n_mappings == sum of their n_mappings. */
struct pya_pages {
    struct pya_page *items;
    size_t n_items;
    size_t n_room;
    size_t n_live;
    size_t n_grained; /* of those, in grains of more than one page */
    size_t n_mappings;
    pya_page_id unused[PYA_N_GRAINS];
    /* At the last shortage the device gave only n_had of the pages wanted, and reported free_then after they were
     * released. */
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

/* Number of pages in the page's grain. */
static inline size_t
pya_page_n(const struct pya_pages *pages, pya_page_id id) {
    return pya_grain_pages(pages->items[id].grain);
}

/* Number of handles in a list of pages. */
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
/* Reserves host memory for n more pages, so that creating them can only fail on the device. */
PYA_MUST_CHECK pya_status pya_pages_reserve(struct pya_pages *pages, size_t n);
/* Creates n pages without a home or mapping, in the fewest grains not larger than `most`.  Host memory was reserved.
 * On failure *n_made pages could not be released again; they come first in ids.
 * Creating many pages only to release them takes seconds.  So a number that the device did not have is not tried
 * again until pya_pages_try_anew(), or until the device's free memory has grown by the difference.  Free memory alone
 * does not decide: it does not count what the driver can move elsewhere (managed memory). */
PYA_MUST_CHECK pya_status pya_pages_make(
    struct pya_pages *pages, struct pya_device *dev, size_t n, unsigned most, pya_page_id *ids,
    size_t *n_made);
void pya_pages_try_anew(struct pya_pages *pages);
/* Releases the grain that begins with this page; it must be unmapped.  On failure its pages stay in the table without
 * a home. */
PYA_MUST_CHECK pya_status
pya_grain_release(struct pya_pages *pages, struct pya_device *dev, pya_page_id id);
/* Maps whole grains side by side.  *n_mapped: pages mapped, also on failure. */
PYA_MUST_CHECK pya_status pya_pages_map(
    const struct pya_pages *pages, struct pya_device *dev, pya_dptr addr, const pya_page_id *ids,
    size_t n, size_t *n_mapped);

/* Checks that each grain's pages lie side by side at home and are mapped equally often.  Prints each violation and
 * returns their number. */
size_t pya_pages_check(const struct pya_pages *pages);

/* Every mapping is counted here, so that the sums stay correct. */
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
