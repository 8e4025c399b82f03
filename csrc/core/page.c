/* The page table.  Floor 3. */
#include "page.h"

#include <stdlib.h>

#include "debug.h"

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

pya_status
pya_page_create(struct pya_pages *pages, struct pya_device *dev, pya_page_id *out) {
    pya_page_handle handle;
    pya_status st = pya_device_page_create(dev, &handle);
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
