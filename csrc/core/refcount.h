/* Reference counts, and a list of objects without owners to which any thread may add.  Floor 0.
 *
 * tests/c/test_interleave.c runs these functions in every order of their steps. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first member of a counted object.  Both fields are atomic. */
struct pya_refcount {
    size_t n_owners;
    struct pya_refcount *next_dead;
};

/* Adds an owner.  Only an owner may call this. */
static inline void
pya_refcount_retain(struct pya_refcount *count) {
    (void)__atomic_fetch_add(&count->n_owners, 1, __ATOMIC_RELAXED);
}

/* Removes an owner.  True for the last one, which then has the object alone and sees everything the others wrote. */
static inline bool
pya_refcount_drop(struct pya_refcount *count) {
    return __atomic_fetch_sub(&count->n_owners, 1, __ATOMIC_ACQ_REL) == 1;
}

/* Objects are only pushed, or the list is taken as a whole, so an address that reappears between the two steps does
 * no harm. */
static inline void
pya_refcount_push_dead(struct pya_refcount **list, struct pya_refcount *count) {
    struct pya_refcount *head = __atomic_load_n(list, __ATOMIC_RELAXED);
    do {
        __atomic_store_n(&count->next_dead, head, __ATOMIC_RELAXED);
    } while (
        !__atomic_compare_exchange_n(list, &head, count, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

/* Takes all objects that were pushed and leaves the list empty. */
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
