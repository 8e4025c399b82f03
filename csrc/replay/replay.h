/* Replaying a program on a policy over the simulated device: how much memory, how many device calls, does it fit, and
 * what is the least it fits in.  Floor 5.
 *
 * A replay is deterministic and independent of others: threads may replay one program at the same time. */
#pragma once

#include "../core/pyalloc.h"
#include "../device/sim_cost.h"
#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* name, what it is */
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
    uint64_t work_delay; /* an event passes after this many later ones; 0: at once */
    bool no_vmm;         /* a driver without virtual memory calls */
    /* How often the program runs in one process, what is left alive being freed after each; 0: once. */
    unsigned n_passes;
    /* Every byte of every page is checked for a single owner: slower. */
    bool check;
    /* Called now and then; false stops the replay (PYA_E_BUSY).  May be NULL. */
    bool (*progress)(void *arg, uint64_t n_done, uint64_t n_all);
    void *progress_arg;
};

struct pya_replay_result {
    bool completed;
    uint64_t failed_op;           /* when not: which, counted through all passes */
    uint64_t failed_bytes;        /* and what it asked for */
    uint64_t peak_bytes;          /* device memory, summed over devices, each at its own peak */
    uint64_t end_bytes;           /* device memory when the program ends */
    uint64_t n_calls;             /* memory calls (sim_cost.h) */
    uint64_t n_calls_second_half; /* of the operations */
    uint64_t device_ns;           /* modelled */
    uint64_t device_ns_second_half;
    uint64_t n_calls_last_pass; /* what a program settles to that does the same for long */
    uint64_t device_ns_last_pass;
    uint64_t n_calls_by_kind[PYA_SIM_N_CALLS];
    uint64_t n_violations; /* misuse the device saw; with check, bytes with two owners too */
};

#define PYA_REPLAY_N_NEIGHBOURS 32

struct pya_replay_min {
    uint64_t bytes;      /* smallest capacity seen to complete */
    uint64_t safe_bytes; /* nothing tried from here up failed */
    unsigned n_holes;    /* sizes between the two that failed */
    uint64_t holes[PYA_REPLAY_N_NEIGHBOURS];
    unsigned n_replays;
};

/* PYA_OK also when the program runs out of memory: result.completed says. */
PYA_MUST_CHECK pya_status pya_replay_run(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_result *out);
/* By bisection in pages, then the 32 next smaller sizes, since completion is not quite monotone.
 * settings.capacity_bytes is where to start from (0: from what it takes with ample memory); PYA_E_NOMEM: it does not
 * complete even there. */
PYA_MUST_CHECK pya_status pya_replay_find_min(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_min *out);

#ifdef __cplusplus
}
#endif
