/* The page table.  Floor 3. */
#include "page.h"

#include <stdio.h>
#include <stdlib.h>

#include "debug.h"

/* Below this many pages, querying the device's free memory costs more than creating pages in vain. */
#ifdef PYA_TEST_TINY
enum { MAKE_ASKS_FROM = 2 };
#else
enum { MAKE_ASKS_FROM = 64 };
#endif

void
pya_pages_init(struct pya_pages *pages) {
    *pages = (struct pya_pages){0};
    for (int grain = 0; grain < PYA_N_GRAINS; grain++) {
        pages->unused[grain] = PYA_NO_PAGE;
    }
}

void
pya_pages_fini(struct pya_pages *pages) {
    free(pages->items);
    pya_pages_init(pages);
}

pya_status
pya_pages_reserve(struct pya_pages *pages, size_t n) {
    size_t needed = pages->n_items + n; /* unused entries may belong to other grain sizes */
    if (needed <= pages->n_room) {
        return PYA_OK;
    }
    if (needed >= PYA_NO_PAGE) {
        return PYA_E_HOST_NOMEM;
    }
    size_t n_more = pages->n_room + pages->n_room / 4;
    size_t n_room = needed > n_more ? needed : n_more;
    struct pya_page *items = realloc(pages->items, n_room * sizeof *items);
    if (items == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pages->items = items;
    pages->n_room = n_room;
    return PYA_OK;
}

static pya_status
grain_create(struct pya_pages *pages, struct pya_device *dev, unsigned grain, pya_page_id *ids) {
    const size_t n = pya_grain_pages(grain);
    pya_page_handle handle;
    pya_status st = pya_device_page_create(dev, n, &handle);
    if (st != PYA_OK) {
        return st;
    }
    pya_page_id first = pages->unused[grain];
    if (first != PYA_NO_PAGE) {
        pages->unused[grain] = pages->items[first].slot;
    } else {
        PYA_ASSERT(pages->n_items + n <= pages->n_room);
        first = (pya_page_id)pages->n_items;
        pages->n_items += n;
    }
    for (size_t i = 0; i < n; i++) {
        ids[i] = first + (pya_page_id)i;
        pages->items[ids[i]] =
            (struct pya_page){.handle = handle, .grain = (uint8_t)grain, .place = (uint8_t)i};
    }
    pages->n_live += n;
    pages->n_grained += n > 1 ? n : 0;
    return PYA_OK;
}

static bool
make_is_hopeless(const struct pya_pages *pages, struct pya_device *dev, size_t n) {
    size_t free_now;
    size_t total;
    if (!pages->is_short || n <= pages->n_had || n < MAKE_ASKS_FROM ||
        pya_device_mem_info(dev, &free_now, &total) != PYA_OK) {
        return false;
    }
    size_t more = free_now > pages->free_then ? free_now - pages->free_then : 0;
    return n - pages->n_had > more / PYA_PAGE;
}

static void
make_note_shortage(struct pya_pages *pages, struct pya_device *dev, size_t n_had) {
    size_t total;
    pages->n_had = n_had;
    pages->is_short =
        n_had >= MAKE_ASKS_FROM && pya_device_mem_info(dev, &pages->free_then, &total) == PYA_OK;
}

pya_status
pya_pages_make(
    struct pya_pages *pages, struct pya_device *dev, size_t n, unsigned most, pya_page_id *ids,
    size_t *n_made) {
    *n_made = 0;
    if (make_is_hopeless(pages, dev, n)) {
        return PYA_E_NOMEM;
    }
    pya_status st = PYA_OK;
    size_t n_had = 0;
    while (n_had < n && st == PYA_OK) {
        unsigned grain = pya_grain_within(n - n_had);
        grain = grain < most ? grain : most;
        st = grain_create(pages, dev, grain, ids + n_had);
        n_had += st == PYA_OK ? pya_grain_pages(grain) : 0;
        if (st == PYA_E_NOMEM && grain > 0) { /* there may be room for a smaller grain */
            most = grain - 1;
            st = PYA_OK;
        }
    }
    if (st == PYA_OK) {
        *n_made = n;
        return PYA_OK;
    }
    for (size_t i = 0; i < n_had;) {
        const size_t n_here = pya_page_n(pages, ids[i]);
        if (pya_grain_release(pages, dev, ids[i]) != PYA_OK) {
            for (size_t k = 0; k < n_here; k++) {
                ids[(*n_made)++] = ids[i + k];
            }
        }
        i += n_here;
    }
    if (st == PYA_E_NOMEM) {
        make_note_shortage(pages, dev, n_had);
    }
    return st;
}

void
pya_pages_try_anew(struct pya_pages *pages) {
    pages->is_short = false;
}

pya_status
pya_grain_release(struct pya_pages *pages, struct pya_device *dev, pya_page_id id) {
    struct pya_page *items = &pages->items[id];
    const unsigned grain = items->grain;
    const size_t n = pya_grain_pages(grain);
    PYA_ASSERT(items->place == 0);
    for (size_t i = 0; i < n; i++) {
        PYA_ASSERT(items[i].n_mappings == 0 && items[i].handle == items->handle);
        items[i].range = NULL;
    }
    pya_status st = pya_device_page_release(dev, items->handle);
    if (st != PYA_OK) {
        return st;
    }
    for (size_t i = 0; i < n; i++) {
        items[i] = (struct pya_page){.grain = (uint8_t)grain, .place = (uint8_t)i};
    }
    items->slot = pages->unused[grain];
    pages->unused[grain] = id;
    pages->n_live -= n;
    pages->n_grained -= n > 1 ? n : 0;
    return PYA_OK;
}

pya_status
pya_pages_map(
    const struct pya_pages *pages, struct pya_device *dev, pya_dptr addr, const pya_page_id *ids,
    size_t n, size_t *n_mapped) {
    pya_status st = PYA_OK;
    size_t i = 0;
    while (i < n && st == PYA_OK) {
        const size_t n_here = pya_page_n(pages, ids[i]);
        PYA_ASSERT(pages->items[ids[i]].place == 0 && n_here <= n - i);
        PYA_ASSERT(ids[i + n_here - 1] == ids[i] + n_here - 1);
        st = pya_device_map(dev, addr + i * PYA_PAGE, pages->items[ids[i]].handle, n_here);
        i += st == PYA_OK ? n_here : 0;
    }
    *n_mapped = i;
    return st;
}

size_t
pya_pages_check(const struct pya_pages *pages) {
    size_t n_wrong = 0;
    size_t n_grained = 0;
    for (size_t i = 0; i < pages->n_items; i++) {
        const struct pya_page *page = &pages->items[i];
        const struct pya_page *first = page - page->place;
        if (page->handle == 0) {
            continue;
        }
        n_grained += page->grain > 0;
        bool is_whole = first->handle == page->handle && first->grain == page->grain &&
                        first->place == 0 && first->range == page->range &&
                        first->n_mappings == page->n_mappings &&
                        (page->range == NULL || page->slot == first->slot + page->place);
        if (!is_whole) {
            (void)fprintf(stderr, "page %zu is apart from its grain\n", i);
            n_wrong++;
        }
    }
    if (n_grained != pages->n_grained) {
        (void)fprintf(stderr, "pages: %zu in grains, %zu counted\n", n_grained, pages->n_grained);
        n_wrong++;
    }
    return n_wrong;
}
