/* Physical memory of the simulated device.  Floor 2, private to the sim. */
#pragma once

#include "sim.h"

#define SIM_STEPS ((uint32_t)(PYA_PAGE / PYA_ALIGN)) /* 512-byte steps of a page */
#define SIM_OWNER_WORDS (SIM_STEPS / 64)

#define SIM_MAX_PAGES (UINT32_C(1) << 30)

/* The pages of one handle are neighbours, a run; it is alive while n_handles or n_mappings of its first page > 0. */
struct sim_page {
    uint32_t first;      /* of the run; here for all its pages, for good */
    uint32_t n_pages;    /* at the first page: of the run; 0 elsewhere */
    uint32_t generation; /* at the first page: distinguishes handles of the same slot */
    uint32_t n_handles;  /* at the first page: created or imported and not released */
    uint32_t next_free;  /* at the first page: the next free run as long, plus 1 */
    uint32_t n_mappings;
    uint32_t first_use; /* plus 1: unfinished work that touches it */
    uint32_t n_owned;   /* bits set in owner */
    uint64_t *owner;    /* SIM_OWNER_WORDS; NULL until a block owned part of it */
};

/* Free runs of one length: a run is never cut nor joined, so that no order of calls leaves room without a place. */
struct sim_runs {
    uint32_t n_pages; /* 0: no such list yet */
    uint32_t head;    /* plus 1 */
};

pya_status sim_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out);
pya_status sim_page_release(struct pya_device *dev, pya_page_handle handle);
/* The rest with the lock held.  The first page of a new run, which has one handle. */
pya_status sim_page_take(struct pya_sim *sim, uint64_t n_pages, uint32_t *out);
/* Gives the run that starts there back when neither a handle nor a mapping holds it. */
void sim_page_settle(struct pya_sim *sim, uint32_t first);
/* The first page of the run with that handle, or SIM_SPACE_NONE. */
uint32_t sim_page_find(const struct pya_sim *sim, pya_page_handle handle);
