/* Pages of other processes, mapped side by side here.  No arena's: neither counted as reserved nor handed out.  Floor 5. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_import_source;

struct pya_import {
    struct pya_import *next; /* of the card */
    pya_dptr base;
    size_t n_pages;
    size_t n_mapped;
    pya_page_handle held; /* releasing it failed; 0: none */
    bool is_over;         /* its user is done with it; work that reads it may not be */
    uint64_t waited;      /* round of waits that began after that */
};

/* Maps n_pages, not yet accessible; *out is in no list.  The lock is not held: the source may take its time.  On failure
 * *out is NULL, or what could not be undone. */
PYA_MUST_CHECK pya_status pya_import_map(
    struct pya_card *card, size_t n_pages, const struct pya_import_source *source,
    struct pya_import **out);
/* Unmaps it and frees the record; work that used it has finished.  On failure it is what it was, or less of it mapped. */
PYA_MUST_CHECK pya_status pya_import_unmap(struct pya_card *card, struct pya_import *import);
/* Opens the imports of the card's list to one more peer. */
PYA_MUST_CHECK pya_status pya_imports_open_peer(struct pya_card *card, int peer);
/* For the end of the heap. */
void pya_imports_destroy(struct pya_card *card);

#ifdef __cplusplus
}
#endif
