/* Runs a program repeatedly; each time a later device call or host allocation fails, until none does. */
#pragma once

#include "check.h"
#include "core/heap.h"
#include "device/sim.h"
#include "fault.h"
#include "stat.h"

/* Runs the program on a heap with these options while the nth host allocation (host) or device call fails, and checks
 * that nothing is lost.  False: n was past the last one. */
typedef bool sweep_once_fn(const char *options, unsigned long nth, bool host, pya_status with);

/* Makes the nth host allocation or device call from now fail. */
static inline void
sweep_arm(struct pya_sim *sim, unsigned long nth, bool host, pya_status with) {
    if (host) {
        fault_arm(nth);
    } else {
        pya_sim_fail(sim, PYA_SIM_ANY_CALL, nth, with, false);
    }
}

/* Stops that.  True: one has failed. */
static inline bool
sweep_disarm(struct pya_sim *sim, bool host) {
    return host ? fault_disarm() : pya_sim_fail_clear(sim);
}

/* With nothing alive, nothing is left on the device after the cache was emptied. */
static inline void
sweep_check_empty(struct pya_heap *heap, struct pya_sim *sim) {
    struct pya_sim_state state;
    CHECK_OK(pya_empty_cache(heap, 0));
    pya_sim_query(sim, &state);
    CHECK_EQ(state.used_bytes, 0);
    CHECK_EQ(state.n_mappings, 0);
    CHECK_EQ(stat_of(heap, 0, "reserved_bytes.all.current"), 0);
}

static inline void
sweep_all(sweep_once_fn *once, const char *options) {
    unsigned long n = 1;
    for (; once(options, n, false, PYA_E_DEVICE) && check_failures < 20; n += CHECK_ONE_IN) {
        (void)once(options, n, false, PYA_E_NOMEM);
    }
    CHECK(n > 20);
    unsigned long n_host = 1;
    while (once(options, n_host, true, PYA_OK) && check_failures < 20) {
        n_host += CHECK_ONE_IN;
    }
    CHECK(n_host > 5);
    printf(
        "%-48s %lu device calls, %lu host allocations; one in %d failed, each once\n", options,
        n - 1, n_host - 1, CHECK_ONE_IN);
}
