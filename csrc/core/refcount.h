/* Reference counts, and the list of what nobody owns any more, which any thread may lengthen.  Floor 0.
 *
 * tests/c/test_interleave.c runs these functions in every order of their steps. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* First member of what is counted.  Both atomic. */
struct pya_refcount {
    size_t n_owners;
    struct pya_refcount *next_dead;
};

/* For an owner only: it makes another. */
static inline void
pya_refcount_retain(struct pya_refcount *count) {
    (void)__atomic_fetch_add(&count->n_owners, 1, __ATOMIC_RELAXED);
}

/* True for the last owner, who then has it alone and sees all that the others did. */
static inline bool
pya_refcount_drop(struct pya_refcount *count) {
    return __atomic_fetch_sub(&count->n_owners, 1, __ATOMIC_ACQ_REL) == 1;
}

/* Lists only grow or are taken whole, so an address that comes back between the two steps does no harm. */
static inline void
pya_refcount_push_dead(struct pya_refcount **list, struct pya_refcount *count) {
    struct pya_refcount *head = __atomic_load_n(list, __ATOMIC_RELAXED);
    do {
        __atomic_store_n(&count->next_dead, head, __ATOMIC_RELAXED);
    } while (
        !__atomic_compare_exchange_n(list, &head, count, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

/* All that were pushed; the list is empty then. */
static inline struct pya_refcount *
pya_refcount_take_dead(struct pya_refcount **list) {
    return __atomic_exchange_n(list, NULL, __ATOMIC_ACQUIRE);
}

static inline struct pya_refcount *
pya_refcount_next_dead(const struct pya_refcount *count) {
    return __atomic_load_n(&count->next_dead, __ATOMIC_RELAXED);
}

#ifdef __cplusplus
}
#endif
