/* The fit index: an arena's free runs by size.  Floor 3.
 *
 * Up to 1 MiB a ring for every size, the lowest address in front as a rule.  Above, 128 treaps per power of two, ordered by
 * (bytes, addr): best fit costs the logarithm of one treap's population.  Nearly all hold a run or none, and entering or
 * leaving is then the same for both: which of the two it is, is as random as the sizes, and no processor guesses it.
 * A bitmap says which are filled.  Nothing here allocates: the links are in the blocks. */
#pragma once

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PYA_FIT_RINGS = (int)(PYA_SMALL_MAX / PYA_ALIGN),
    PYA_FIT_SUB_BITS = 7,
    PYA_FIT_RING_BITS = 11, /* log2(PYA_FIT_RINGS) */
    PYA_FIT_MAX_BITS = 27,  /* from 2^27 units on, 64 GiB, all are in the last treap */
    PYA_FIT_TREES = (PYA_FIT_MAX_BITS - PYA_FIT_RING_BITS) << PYA_FIT_SUB_BITS,
    PYA_FIT_BINS = PYA_FIT_RINGS + PYA_FIT_TREES, /* rings first */
    PYA_FIT_WORDS = (PYA_FIT_BINS + 63) / 64,
};

/* filled bit b == bin b has a run; summary bit w == (filled[w] != 0).  Checked by pya_fit_check(). */
struct pya_fit {
    uint64_t summary;
    size_t n_runs;
    uint64_t filled[PYA_FIT_WORDS];
    struct pya_block *heads[PYA_FIT_BINS]; /* a ring's first run or a treap's root; NULL: none */
};

void pya_fit_init(struct pya_fit *fit);
void pya_fit_insert(struct pya_fit *fit, struct pya_block *run);
void pya_fit_remove(struct pya_fit *fit, struct pya_block *run);
/* Another record, or the same, takes the run's place with new bounds; that place stays when no other run could come
 * between. */
void pya_fit_replace(
    struct pya_fit *fit, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes);
/* The smallest run of at least `bytes`, the lowest of those; NULL if there is none.  Stays in the index. */
struct pya_block *pya_fit_find(const struct pya_fit *fit, size_t bytes);
/* The next larger run (or the same size, next address) after `run`; NULL at the end. */
struct pya_block *pya_fit_next(const struct pya_fit *fit, const struct pya_block *run);
/* Calls visit for all runs of at least a page, in the order of pya_fit_next(). */
void pya_fit_visit_pages(
    const struct pya_fit *fit, void (*visit)(void *arg, struct pya_block *run), void *arg);
/* The largest run; NULL when there is none. */
struct pya_block *pya_fit_largest(const struct pya_fit *fit);
size_t pya_fit_check(const struct pya_fit *fit);

#ifdef __cplusplus
}
#endif
