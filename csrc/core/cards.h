/* What a heap's callers read without a lock: its cards, the claims of address space, and which process opened the
 * cards.  Floor 1.
 *
 * tests/c/test_interleave.c runs these functions in every order of their steps. */
#pragma once

#include "lock.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_card;

/* Devices claim address space in steps of 64 GiB.  A pointer then leads to the few cards it can belong to. */
enum { PYA_CLAIM_SHIFT = 36, PYA_CLAIM_SLOTS = 4096 };

/* All members are atomic. */
struct pya_cards {
    uint32_t fork_count; /* fork count of the process that opened the first card */
    int n_open;
    struct pya_card *open[PYA_MAX_DEVICES]; /* set at first use, then never changed; NULL before */
    uint64_t claims[PYA_CLAIM_SLOTS];       /* bit i: card i has addresses there */
};

struct pya_card_opener {
    void *arg;
    pya_status (*open)(void *arg, int device, struct pya_card **out);
    uint32_t fork_count; /* of this process */
};

/* NULL if the device was never used.  0 <= device < PYA_MAX_DEVICES. */
static inline struct pya_card *
pya_cards_get(const struct pya_cards *cards, int device) {
    return __atomic_load_n(&cards->open[device], __ATOMIC_ACQUIRE);
}

/* Makes a new card visible to all threads.  The caller holds the lock. */
static inline void
pya_cards_publish(struct pya_cards *cards, int device, struct pya_card *card, uint32_t fork_count) {
    int n_open = __atomic_load_n(&cards->n_open, __ATOMIC_RELAXED);
    if (n_open == 0) {
        __atomic_store_n(&cards->fork_count, fork_count, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&cards->n_open, n_open + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&cards->open[device], card, __ATOMIC_RELEASE);
}

/* Returns the device's card; the first caller opens it. */
PYA_MUST_CHECK static inline pya_status
pya_cards_open(
    struct pya_cards *cards, struct pya_lock *lock, int device, struct pya_card_opener opener,
    struct pya_card **out) {
    pya_status st = PYA_OK;
    pya_lock_acquire(lock);
    struct pya_card *card = __atomic_load_n(&cards->open[device], __ATOMIC_RELAXED);
    if (card == NULL) {
        st = opener.open(opener.arg, device, &card);
        if (st == PYA_OK) {
            pya_cards_publish(cards, device, card, opener.fork_count);
        }
    }
    pya_lock_release(lock);
    if (st == PYA_OK) {
        *out = card;
    }
    return st;
}

/* Makes the device look unused.  Only for a process with a single thread. */
static inline void
pya_cards_forget(struct pya_cards *cards, int device) {
    for (int i = 0; i < PYA_CLAIM_SLOTS; i++) {
        cards->claims[i] &= ~((uint64_t)1 << device);
    }
    cards->open[device] = NULL;
}

/* Is this process a fork of the process that opened the cards? */
static inline bool
pya_cards_are_forked(const struct pya_cards *cards, uint32_t fork_count) {
    /* Usually there was no fork, and one load is enough. */
    if (PYA_LIKELY(__atomic_load_n(&cards->fork_count, __ATOMIC_RELAXED) == fork_count)) {
        return false;
    }
    return __atomic_load_n(&cards->n_open, __ATOMIC_ACQUIRE) > 0 &&
           __atomic_load_n(&cards->fork_count, __ATOMIC_RELAXED) != fork_count;
}

static inline void
pya_cards_claim(struct pya_cards *cards, int device, pya_dptr addr, size_t bytes) {
    uint64_t last = (addr + bytes - 1) >> PYA_CLAIM_SHIFT;
    for (uint64_t i = addr >> PYA_CLAIM_SHIFT; i <= last; i++) {
        (void)__atomic_fetch_or(
            &cards->claims[i % PYA_CLAIM_SLOTS], (uint64_t)1 << device, __ATOMIC_RELEASE);
    }
}

/* Bit i set: ptr may belong to device i. */
static inline uint64_t
pya_cards_claiming(const struct pya_cards *cards, pya_dptr ptr) {
    return __atomic_load_n(
        &cards->claims[(ptr >> PYA_CLAIM_SHIFT) % PYA_CLAIM_SLOTS], __ATOMIC_ACQUIRE);
}

/* The card of the lowest bit in the result of pya_cards_claiming(); never NULL, because a card is opened before it
 * claims. */
static inline struct pya_card *
pya_cards_lowest(const struct pya_cards *cards, uint64_t claiming) {
    return __atomic_load_n(&cards->open[__builtin_ctzll(claiming)], __ATOMIC_RELAXED);
}

#ifdef __cplusplus
}
#endif
