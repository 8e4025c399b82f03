/* A program run again and again, with a later device call or host allocation failing each time, until none is left. */
#pragma once

#include "check.h"
#include "core/heap.h"

/* Runs the program on a heap of those options with the nth host allocation (host) or device call failing, and checks
 * that nothing is lost by it; false: n outlived them all. */
typedef bool sweep_once_fn(const char *options, unsigned long nth, bool host, pya_status with);

static inline void
sweep_all(sweep_once_fn *once, const char *options) {
    unsigned long n = 1;
    for (; once(options, n, false, PYA_E_DEVICE) && check_failures < 20; n++) {
        (void)once(options, n, false, PYA_E_NOMEM);
    }
    CHECK(n > 20);
    unsigned long n_host = 1;
    while (once(options, n_host, true, PYA_OK) && check_failures < 20) {
        n_host++;
    }
    CHECK(n_host > 5);
    printf(
        "%-48s %lu device calls, %lu host allocations failed once each\n", options, n - 1,
        n_host - 1);
}
