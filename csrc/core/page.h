/* The page table: every physical page of a card and its one home.  Floor 3. */
#pragma once

#include "../device/device.h"
#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_range;

typedef uint32_t pya_page_id;
#define PYA_NO_PAGE UINT32_MAX

/* handle 0: an unused entry, `slot` is then the next one in the chain of unused entries. */
struct pya_page {
    pya_page_handle handle;
    struct pya_range *range; /* home; NULL while the page has none (a release that failed) */
    uint32_t slot;           /* home: the page's number in the range */
    uint32_t n_mappings;     /* addresses at which it is mapped, home included */
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
    size_t n_mappings;
    pya_page_id unused;
    /* The device had no more than n_had of the pages wanted, and said free_then when these were back. */
    bool is_short;
    size_t n_had;
    size_t free_then;
};

void pya_pages_init(struct pya_pages *pages);
void pya_pages_fini(struct pya_pages *pages);
/* Host memory for n more pages, so that creating them can only fail on the device. */
PYA_MUST_CHECK pya_status pya_pages_reserve(struct pya_pages *pages, size_t n);
/* Creates n pages without a home or mapping; host memory was reserved.  On failure *n_made is how many of them, now ids'
 * first ones, could not be given back.
 * Making many only to give them back takes seconds: what the device did not have is not tried again, until
 * pya_pages_try_anew(), unless its free memory has grown by as much.  Not by that alone: it does not count what the driver
 * can put elsewhere (managed memory). */
PYA_MUST_CHECK pya_status pya_pages_make(
    struct pya_pages *pages, struct pya_device *dev, size_t n, pya_page_id *ids, size_t *n_made);
void pya_pages_try_anew(struct pya_pages *pages);
/* Unmapped pages only.  On failure the page stays in the table, without a home. */
PYA_MUST_CHECK pya_status
pya_page_release(struct pya_pages *pages, struct pya_device *dev, pya_page_id id);

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
