/* The page table.  Floor 3. */
#include "page.h"

#include <stdlib.h>

#include "debug.h"

/* Below this a look at the device's free memory costs more than pages made in vain. */
#ifdef PYA_TEST_TINY
enum { MAKE_ASKS_FROM = 2 };
#else
enum { MAKE_ASKS_FROM = 64 };
#endif

void
pya_pages_init(struct pya_pages *pages) {
    *pages = (struct pya_pages){.unused = PYA_NO_PAGE};
}

void
pya_pages_fini(struct pya_pages *pages) {
    free(pages->items);
    pya_pages_init(pages);
}

pya_status
pya_pages_reserve(struct pya_pages *pages, size_t n) {
    size_t needed = pages->n_live + n;
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
page_create(struct pya_pages *pages, struct pya_device *dev, pya_page_id *out) {
    pya_page_handle handle;
    pya_status st = pya_device_page_create(dev, 1, &handle);
    if (st != PYA_OK) {
        return st;
    }
    pya_page_id id = pages->unused;
    if (id != PYA_NO_PAGE) {
        pages->unused = pages->items[id].slot;
    } else {
        PYA_ASSERT(pages->n_items < pages->n_room);
        id = (pya_page_id)pages->n_items++;
    }
    pages->items[id] = (struct pya_page){.handle = handle};
    pages->n_live++;
    *out = id;
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
    struct pya_pages *pages, struct pya_device *dev, size_t n, pya_page_id *ids, size_t *n_made) {
    *n_made = 0;
    if (make_is_hopeless(pages, dev, n)) {
        return PYA_E_NOMEM;
    }
    pya_status st = PYA_OK;
    size_t n_had = 0;
    for (; n_had < n && st == PYA_OK; n_had += st == PYA_OK) {
        st = page_create(pages, dev, &ids[n_had]);
    }
    if (st == PYA_OK) {
        *n_made = n;
        return PYA_OK;
    }
    for (size_t i = 0; i < n_had; i++) {
        if (pya_page_release(pages, dev, ids[i]) != PYA_OK) {
            ids[(*n_made)++] = ids[i];
        }
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
pya_page_release(struct pya_pages *pages, struct pya_device *dev, pya_page_id id) {
    struct pya_page *page = &pages->items[id];
    PYA_ASSERT(page->n_mappings == 0);
    page->range = NULL;
    pya_status st = pya_device_page_release(dev, page->handle);
    if (st != PYA_OK) {
        return st;
    }
    *page = (struct pya_page){.slot = pages->unused};
    pages->unused = id;
    pages->n_live--;
    return PYA_OK;
}
