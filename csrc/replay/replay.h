/* Replays a program under a policy on the simulated device: how much memory and how many device calls it takes, whether it
 * fits, and the least memory in which it fits.  Floor 5.
 *
 * A replay is deterministic and independent of other replays: threads may replay one program at the same time. */
#pragma once

#include "../core/pyalloc.h"
#include "../device/sim_cost.h"
#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(identifier, name, description) */
#define PYA_REPLAY_POLICY_TABLE(X)                                                                 \
    X(NATIVE, "native", "torch's caching allocator (model)")                                       \
    X(EXPANDABLE, "expandable", "torch's expandable segments (model)")                             \
    X(PYALLOC, "pyalloc", "pyalloc itself")

enum pya_replay_policy {
#define X(name, text, help) PYA_REPLAY_##name,
    PYA_REPLAY_POLICY_TABLE(X)
#undef X
        PYA_REPLAY_N_POLICIES
};

const char *pya_replay_policy_name(enum pya_replay_policy policy);

struct pya_replay_settings {
    enum pya_replay_policy policy;
    struct pya_options options; /* for PYALLOC */
    size_t capacity_bytes;      /* of each device; 0: ample */
    enum pya_sim_cost cost;
    uint64_t work_delay; /* an event completes after this many later ones; 0: at once */
    bool no_vmm;         /* simulate a driver without virtual memory calls */
    /* How often to run the program in one process; blocks left alive are freed after each pass.  0 means 1. */
    unsigned n_passes;
    /* Check that every byte of every page has a single owner; slower. */
    bool check;
    /* Called now and then; false stops the replay (PYA_E_BUSY).  May be NULL. */
    bool (*progress)(void *arg, uint64_t n_done, uint64_t n_all);
    void *progress_arg;
};

struct pya_replay_result {
    bool completed;
    uint64_t failed_op;           /* if not completed: which, counted through all passes */
    uint64_t failed_bytes;        /* and what it requested */
    uint64_t peak_bytes;          /* device memory; the sum of each device's own peak */
    uint64_t end_bytes;           /* device memory when the program ends */
    uint64_t n_calls;             /* memory calls (sim_cost.h) */
    uint64_t n_calls_second_half; /* in the second half of the operations */
    uint64_t device_ns;           /* modelled */
    uint64_t device_ns_second_half;
    uint64_t n_calls_last_pass; /* the steady state of a program that repeats itself */
    uint64_t device_ns_last_pass;
    uint64_t n_calls_by_kind[PYA_SIM_N_CALLS];
    uint64_t n_violations; /* misuse that the device saw; with check, also bytes with two owners */
};

#define PYA_REPLAY_N_NEIGHBOURS 32

struct pya_replay_min {
    uint64_t bytes;      /* smallest capacity that completed */
    uint64_t safe_bytes; /* no capacity tried from here up failed */
    unsigned n_holes;    /* capacities between the two that failed */
    uint64_t holes[PYA_REPLAY_N_NEIGHBOURS];
    unsigned n_replays;
};

/* PYA_OK also if the program runs out of memory: see result.completed. */
PYA_MUST_CHECK pya_status pya_replay_run(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_result *out);
/* Bisects in pages, then tries the 32 next smaller sizes, because completion is not quite monotone.  Starts from
 * settings.capacity_bytes, or if that is 0 from the memory taken when memory is ample.  PYA_E_NOMEM: the program does not
 * complete even with the starting capacity. */
PYA_MUST_CHECK pya_status pya_replay_find_min(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_min *out);

#ifdef __cplusplus
}
#endif
