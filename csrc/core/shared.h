/* Things with several owners, and the list of those nobody owns any more, which anybody may lengthen.  Floor 0.
 *
 * tests/c/test_interleave.c runs these functions in every order of their steps. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* First member of what is shared.  Both atomic. */
struct pya_shared {
    size_t n_owners;
    struct pya_shared *next_dead;
};

/* For an owner only: it makes another. */
static inline void
pya_shared_retain(struct pya_shared *shared) {
    (void)__atomic_fetch_add(&shared->n_owners, 1, __ATOMIC_RELAXED);
}

/* True for the last owner, who then has it alone and sees all that the others did. */
static inline bool
pya_shared_drop(struct pya_shared *shared) {
    return __atomic_fetch_sub(&shared->n_owners, 1, __ATOMIC_ACQ_REL) == 1;
}

/* Lists only grow or are taken whole, so an address that comes back between the two steps does no harm. */
static inline void
pya_shared_bury(struct pya_shared **list, struct pya_shared *shared) {
    struct pya_shared *head = __atomic_load_n(list, __ATOMIC_RELAXED);
    do {
        __atomic_store_n(&shared->next_dead, head, __ATOMIC_RELAXED);
    } while (!__atomic_compare_exchange_n(
        list, &head, shared, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

/* All that were buried; the list is empty then. */
static inline struct pya_shared *
pya_shared_exhume(struct pya_shared **list) {
    return __atomic_exchange_n(list, NULL, __ATOMIC_ACQUIRE);
}

static inline struct pya_shared *
pya_shared_next(const struct pya_shared *shared) {
    return __atomic_load_n(&shared->next_dead, __ATOMIC_RELAXED);
}

#ifdef __cplusplus
}
#endif
