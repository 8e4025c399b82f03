/* The fit index: an arena's free runs by size.  Floor 3.
 *
 * Up to 1 MiB there is one ring for each size, usually with the lowest address first.  Above that there are 128
 * treaps per power of two, ordered by (bytes, addr): best fit costs the logarithm of one treap's size.  Nearly every
 * ring or treap holds at most one run, so that case is handled alike for both, without a branch that no processor
 * could predict.  A bitmap tells which bins are filled.  Nothing is allocated here: the links are in the blocks. */
#pragma once

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PYA_FIT_RINGS = (int)(PYA_SMALL_MAX / PYA_ALIGN),
    PYA_FIT_SUB_BITS = 7,
    PYA_FIT_RING_BITS = 11, /* log2(PYA_FIT_RINGS) */
    PYA_FIT_MAX_BITS = 27,  /* runs from 2^27 units on, 64 GiB, share the last treap */
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
/* Replaces run by heir, which may be the same record, with new bounds.  It keeps its place in the index if no other
 * run can lie between the old and the new size. */
void pya_fit_replace(
    struct pya_fit *fit, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes);
/* The smallest run of at least `bytes`, and the lowest address among those; NULL: none.  The run stays in the index. */
struct pya_block *pya_fit_find(const struct pya_fit *fit, size_t bytes);
/* The next run after `run` by (bytes, addr); NULL at the end. */
struct pya_block *pya_fit_next(const struct pya_fit *fit, const struct pya_block *run);
/* Calls visit for each run of at least one page, in the order of pya_fit_next(). */
void pya_fit_visit_pages(
    const struct pya_fit *fit, void (*visit)(void *arg, struct pya_block *run), void *arg);
/* The largest run; NULL: there is none. */
struct pya_block *pya_fit_largest(const struct pya_fit *fit);
size_t pya_fit_check(const struct pya_fit *fit);

#ifdef __cplusplus
}
#endif
