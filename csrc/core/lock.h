/* A mutex in one word: one atomic exchange to acquire, one to release, and a futex when contended.  Floor 0.
 *
 * Uncontended it costs about half as much as pthread_mutex_t, and locking is most of the fast path.
 * Lock order: first a heap's lock (opening cards, starting or stopping history); then one card's lock (another card's
 * is only tried, never waited for); then that card's gate, for a moment, or during a device wait without the card's
 * lock.  Neither a heap's nor a card's lock is held while Python runs. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_lock {
    uint32_t state; /* 0 free, 1 held, 2 held and somebody may be waiting; atomic */
};

void pya_lock_wait(struct pya_lock *lock);
void pya_lock_wake(struct pya_lock *lock);

static inline void
pya_lock_acquire(struct pya_lock *lock) {
    uint32_t expected = 0;
    if (PYA_UNLIKELY(!__atomic_compare_exchange_n(
            &lock->state, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))) {
        pya_lock_wait(lock);
    }
}

static inline bool
pya_lock_try(struct pya_lock *lock) {
    uint32_t expected = 0;
    return __atomic_load_n(&lock->state, __ATOMIC_RELAXED) == 0 &&
           __atomic_compare_exchange_n(
               &lock->state, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/* For a caller that holds a lock of the same rank and so must not block.  Tries for some microseconds, then once
 * after each nap of a tenth of a millisecond. */
bool pya_lock_try_for(struct pya_lock *lock, int n_naps);

static inline void
pya_lock_release(struct pya_lock *lock) {
    if (PYA_UNLIKELY(__atomic_exchange_n(&lock->state, 0, __ATOMIC_RELEASE) == 2)) {
        pya_lock_wake(lock);
    }
}

/* Only for a process with a single thread, such as a forked child: elsewhere the answer may be outdated at once. */
static inline bool
pya_lock_is_held(const struct pya_lock *lock) {
    return __atomic_load_n(&lock->state, __ATOMIC_RELAXED) != 0;
}

#ifdef __cplusplus
}
#endif
