/* Pages that belong to no arena, mapped side by side: those of other processes, and what a trial could not give back.
 * They do not count as reserved and are never allocated.  Floor 5. */
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
    pya_page_handle held; /* a handle that could not be released; 0: none */
    bool is_over;         /* its user closed it; queued work may still read it */
    uint64_t waited;      /* first round of waits that began after that */
};

/* Maps n_pages, not yet accessible.  *out is in no list.  Call it without the lock, because the source may be slow.
 * On failure *out is NULL or holds what could not be undone. */
PYA_MUST_CHECK pya_status pya_import_map(
    struct pya_card *card, size_t n_pages, const struct pya_import_source *source,
    struct pya_import **out);
/* Unmaps an import and frees its record.  Work that used it has finished.  On failure the import remains, perhaps
 * with fewer pages mapped. */
PYA_MUST_CHECK pya_status pya_import_unmap(struct pya_card *card, struct pya_import *import);
/* Makes one page of the device's own accessible to the device and its peers, and removes it again.  What cannot be
 * removed joins the card's list as an import that is over. */
PYA_MUST_CHECK pya_status pya_import_try(struct pya_card *card);
/* Gives one more peer access to all imports in the card's list. */
PYA_MUST_CHECK pya_status pya_imports_open_peer(struct pya_card *card, int peer);
/* Only for the end of the heap. */
void pya_imports_destroy(struct pya_card *card);

#ifdef __cplusplus
}
#endif
