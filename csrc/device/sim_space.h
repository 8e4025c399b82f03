/* Address ranges of the simulated device, in pages, starting with page 0.  Floor 1, private to the sim.
 *
 * A released range is reused for the same size in O(1).  Otherwise a range is cut from the unused end of the space.
 * Only when the end is used up are adjacent free ranges joined, in O(ranges). */
#pragma once

#include "../core/base.h"

/* The ranges tile [0, n_used): walking by span visits each range once.  Checked by sim_space_check(). */
struct sim_space {
    /* At the first page of a range: its length in pages, with SIM_SPACE_FREE if it was released. */
    uint32_t *span;
    /* At the first page of a free range: the next one of the same size, plus 1; 0: the last. */
    uint32_t *next;
    uint32_t *head;   /* by size in pages: first free range, plus 1; 0: none */
    uint32_t n_pages; /* size of the space */
    uint32_t n_used;  /* pages cut from it so far */
    size_t n_ranges;  /* reserved now */
};

#define SIM_SPACE_FREE (UINT32_C(1) << 31)
#define SIM_SPACE_NONE UINT32_MAX

PYA_MUST_CHECK pya_status sim_space_init(struct sim_space *space, uint32_t n_pages);
void sim_space_fini(struct sim_space *space);
/* Returns the first page, or SIM_SPACE_NONE. */
uint32_t sim_space_reserve(struct sim_space *space, uint32_t n);
/* False, with nothing changed: no reserved range of n pages starts there. */
bool sim_space_release(struct sim_space *space, uint32_t first, uint32_t n);
/* Length in pages of the reserved range that starts there; 0: there is none. */
uint32_t sim_space_query(const struct sim_space *space, uint32_t first);
size_t sim_space_check(const struct sim_space *space);
