/* The fit index: an arena's free runs by size.  Floor 3.
 *
 * Up to 1 MiB each size has a bin of its own, a ring, usually with the lowest address first.  Above that each power
 * of two has 128 bins, treaps ordered by (bytes, addr): best fit takes the logarithm of one treap's size.  Nearly
 * every bin holds at most one run, so rings and treaps handle that case alike, without a branch that no processor
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
/* Replaces run by heir, which may be the same record, with new bounds.  Cheap if the run is alone in its bin and the
 * new size belongs there too. */
void pya_fit_replace(
    struct pya_fit *fit, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes);
/* The smallest run of at least `bytes`; NULL: none.  Of several the lowest address, in a ring the first.  The run
 * stays in the index. */
struct pya_block *pya_fit_find(const struct pya_fit *fit, size_t bytes);
/* The next run after `run` by (bytes, addr), in a ring by the ring's order; NULL at the end. */
struct pya_block *pya_fit_next(const struct pya_fit *fit, const struct pya_block *run);
/* Calls visit for each run of at least one page, ordered by (bytes, addr). */
void pya_fit_visit_pages(
    const struct pya_fit *fit, void (*visit)(void *arg, struct pya_block *run), void *arg);
/* The largest run; NULL: there is none. */
struct pya_block *pya_fit_largest(const struct pya_fit *fit);
size_t pya_fit_check(const struct pya_fit *fit);

#ifdef __cplusplus
}
#endif
