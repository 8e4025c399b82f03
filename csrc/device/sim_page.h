/* Physical memory of the simulated device.  Floor 2, private to the sim. */
#pragma once

#include "sim.h"

#define SIM_STEPS ((uint32_t)(PYA_PAGE / PYA_ALIGN)) /* 512-byte steps of a page */
#define SIM_OWNER_WORDS (SIM_STEPS / 64)

#define SIM_MAX_PAGES (UINT32_C(1) << 30)

/* The pages of one handle are adjacent and form a run.  A run is alive while its first page has n_handles or
 * n_mappings > 0. */
struct sim_page {
    uint32_t first;      /* of the run; set in all its pages, never changes */
    uint32_t n_pages;    /* first page: of the run; 0 in others */
    uint32_t generation; /* first page: distinguishes handles of the same slot */
    uint32_t n_handles;  /* first page: created or imported, and not released */
    uint32_t next_free;  /* first page: next free run of this length, plus 1 */
    uint32_t n_mappings;
    uint32_t first_use; /* plus 1: unfinished work that touches the page */
    uint32_t n_owned;   /* bits set in owner */
    uint64_t *owner;    /* SIM_OWNER_WORDS words; NULL until a block owned a part */
};

/* Free runs of one length.  Runs are never cut or joined, so no order of calls can fragment the memory. */
struct sim_runs {
    uint32_t n_pages; /* 0: no such list yet */
    uint32_t head;    /* plus 1 */
};

pya_status sim_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out);
pya_status sim_page_release(struct pya_device *dev, pya_page_handle handle);
/* The functions below need the lock.  Takes a new run with one handle; *out is its first page. */
pya_status sim_page_take(struct pya_sim *sim, uint64_t n_pages, uint32_t *out);
/* Frees the run that starts there if no handle or mapping holds it any more. */
void sim_page_settle(struct pya_sim *sim, uint32_t first);
/* The first page of the handle's run, or SIM_SPACE_NONE. */
uint32_t sim_page_find(const struct pya_sim *sim, pya_page_handle handle);
