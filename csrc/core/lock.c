/* The contended half of pya_lock.  Floor 0. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PYA_LOCK_SPINS /* tests/c/test_interleave.c: fewer */
#define PYA_LOCK_SPINS 64
#endif

void
pya_lock_wait(struct pya_lock *lock) {
    for (int i = 0; i < PYA_LOCK_SPINS; i++) {
        if (pya_lock_try(lock)) {
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    /* From here on the word says 2, so that whoever releases it wakes one of us. */
    while (__atomic_exchange_n(&lock->state, 2, __ATOMIC_ACQUIRE) != 0) {
        (void)syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    }
}

void
pya_lock_wake(struct pya_lock *lock) {
    (void)syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
