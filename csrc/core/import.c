#include "import.h"

#include <stdlib.h>
#include <unistd.h>

#include "pyalloc.h"

static pya_status
import_map_next(
    struct pya_card *card, struct pya_import *import, const struct pya_import_source *source) {
    int fd = -1;
    uint32_t n = 0;
    pya_page_handle page;
    pya_status st = source->next(source->arg, &fd, &n);
    if (st != PYA_OK) {
        return st;
    }
    bool is_fit = n > 0 && n <= import->n_pages - import->n_mapped;
    st = is_fit ? pya_device_page_import(card->dev, fd, &page) : PYA_E_INVAL;
    (void)close(fd);
    if (st != PYA_OK) {
        return st;
    }
    st = pya_device_map(card->dev, import->base + import->n_mapped * PYA_PAGE, page, n);
    import->n_mapped += st == PYA_OK ? n : 0;
    /* A mapping keeps the page alive; without one, this frees the page. */
    pya_status released = pya_device_page_release(card->dev, page);
    import->held = released == PYA_OK ? 0 : page;
    return st == PYA_OK ? released : st;
}

/* A record with addresses, and nothing mapped there. */
static pya_status
import_new(struct pya_card *card, size_t n_pages, struct pya_import **out) {
    struct pya_import *import = calloc(1, sizeof *import);
    if (import == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    import->n_pages = n_pages;
    pya_status st = pya_device_range_reserve(card->dev, n_pages * PYA_PAGE, &import->base);
    if (st != PYA_OK) {
        free(import);
        return st;
    }
    *out = import;
    return PYA_OK;
}

pya_status
pya_import_map(
    struct pya_card *card, size_t n_pages, const struct pya_import_source *source,
    struct pya_import **out) {
    *out = NULL;
    if (!card->caps.has_vmm) {
        return PYA_E_NOTSUP;
    }
    if (n_pages == 0 || n_pages > SIZE_MAX / PYA_PAGE) {
        return PYA_E_INVAL;
    }
    struct pya_import *import;
    pya_status st = import_new(card, n_pages, &import);
    if (st != PYA_OK) {
        return st;
    }
    while (st == PYA_OK && import->n_mapped < n_pages) {
        st = import_map_next(card, import, source);
    }
    if (st == PYA_OK || pya_import_unmap(card, import) != PYA_OK) {
        *out = import;
    }
    return st;
}

pya_status
pya_import_unmap(struct pya_card *card, struct pya_import *import) {
    pya_status st = PYA_OK;
    if (import->held != 0) {
        st = pya_device_page_release(card->dev, import->held);
        import->held = st == PYA_OK ? 0 : import->held;
    }
    if (st == PYA_OK && import->n_mapped > 0) {
        st = pya_device_unmap(card->dev, import->base, import->n_mapped * PYA_PAGE);
        import->n_mapped = st == PYA_OK ? 0 : import->n_mapped;
    }
    if (st != PYA_OK) {
        return st;
    }
    st = pya_device_range_release(card->dev, import->base, import->n_pages * PYA_PAGE);
    if (st == PYA_OK) {
        free(import);
    }
    return st;
}

pya_status
pya_import_try(struct pya_card *card) {
    struct pya_import *import;
    pya_status st = import_new(card, 1, &import);
    if (st != PYA_OK) {
        return st;
    }
    import->is_over = true;
    st = pya_device_page_create(card->dev, 1, &import->held);
    if (st == PYA_OK) {
        st = pya_device_map(card->dev, import->base, import->held, 1);
        import->n_mapped = st == PYA_OK;
    }
    st = st == PYA_OK ? pya_device_set_access(card->dev, import->base, PYA_PAGE) : st;
    if (pya_import_unmap(card, import) != PYA_OK) {
        import->next = card->imports;
        card->imports = import;
    }
    return st;
}

pya_status
pya_imports_open_peer(struct pya_card *card, int peer) {
    pya_status st = PYA_OK;
    for (const struct pya_import *i = card->imports; i != NULL && st == PYA_OK; i = i->next) {
        if (i->n_mapped == i->n_pages) { /* otherwise it is being removed */
            st = pya_device_open_peer(card->dev, peer, i->base, i->n_pages * PYA_PAGE);
        }
    }
    return st;
}

void
pya_imports_destroy(struct pya_card *card) {
    while (card->imports != NULL) {
        struct pya_import *import = card->imports;
        card->imports = import->next;
        if (pya_import_unmap(card, import) != PYA_OK) {
            free(import);
        }
    }
}
