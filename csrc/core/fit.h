/* The fit index: an arena's free runs by size.  Floor 3.
 *
 * Bins of one size each up to 1 MiB, above that 32 bins per power of two; a bitmap says which are filled.
 * Each bin is a treap ordered by (bytes, addr), so best fit by size and then lowest address costs the
 * logarithm of one bin's population, and nearly all bins hold one run or two.
 * Nothing here allocates: the links are in the blocks. */
#pragma once

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PYA_FIT_EXACT = (int)(PYA_SMALL_MAX / PYA_ALIGN),
    PYA_FIT_SUB_BITS = 5,
    PYA_FIT_EXACT_BITS = 11, /* log2(PYA_FIT_EXACT) */
    PYA_FIT_MAX_BITS = 39,   /* runs of up to 2^39 units, more than any address space */
    PYA_FIT_BINS
    = PYA_FIT_EXACT + ((PYA_FIT_MAX_BITS - PYA_FIT_EXACT_BITS) << PYA_FIT_SUB_BITS) + 1,
    PYA_FIT_WORDS = (PYA_FIT_BINS + 63) / 64,
};

/* filled bit b == (bins[b] != NULL); summary bit w == (filled[w] != 0).  Checked by pya_fit_check(). */
struct pya_fit {
    uint64_t summary;
    size_t n_runs;
    uint64_t filled[PYA_FIT_WORDS];
    struct pya_block *bins[PYA_FIT_BINS];
};

void pya_fit_insert(struct pya_fit *fit, struct pya_block *run);
void pya_fit_remove(struct pya_fit *fit, struct pya_block *run);
/* Gives the run new bounds; it stays where it is when no other run could come between. */
void pya_fit_update(struct pya_fit *fit, struct pya_block *run, pya_dptr addr, size_t bytes);
/* The smallest run of at least `bytes`, the lowest of those; NULL if there is none.  Stays in the index. */
struct pya_block *pya_fit_find(const struct pya_fit *fit, size_t bytes);
/* The next larger run (or the same size, next address) after `run`; NULL at the end. */
struct pya_block *pya_fit_next(const struct pya_fit *fit, const struct pya_block *run);
/* The largest run; NULL when there is none. */
struct pya_block *pya_fit_largest(const struct pya_fit *fit);
size_t pya_fit_check(const struct pya_fit *fit);

#ifdef __cplusplus
}
#endif
