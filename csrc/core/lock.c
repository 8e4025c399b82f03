/* The contended half of pya_lock.  Floor 0. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef PYA_LOCK_SPINS /* tests/c/test_interleave.c: fewer */
#define PYA_LOCK_SPINS 64
#endif

static bool
lock_spin(struct pya_lock *lock) {
    for (int i = 0; i < PYA_LOCK_SPINS; i++) {
        if (pya_lock_try(lock)) {
            return true;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

bool
pya_lock_try_for(struct pya_lock *lock, int n_naps) {
    const struct timespec nap = {.tv_nsec = 100 * 1000};
    bool is_held = lock_spin(lock);
    for (int i = 0; i < n_naps && !is_held; i++) {
        (void)nanosleep(&nap, NULL);
        is_held = pya_lock_try(lock);
    }
    return is_held;
}

void
pya_lock_wait(struct pya_lock *lock) {
    if (lock_spin(lock)) {
        return;
    }
    /* From here on the word is 2, so whoever releases the lock wakes one of us. */
    while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0) {
        (void)syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    }
}

void
pya_lock_wake(struct pya_lock *lock) {
    (void)syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
