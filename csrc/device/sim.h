/* The simulated device.  Floor 2.
 *
 * Memory is bookkeeping or, if backed, host pages with real aliasing.  Calls are counted, cost modelled time and can
 * be made to fail.  Misuse that a driver would punish later is reported at once.  Every call is O(1) in what is
 * alive, or O(pages it names).  One mutex per device. */
#pragma once

#include "device.h"
#include "sim_cost.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_sim;

/* When does queued work finish?  Synchronising always finishes it. */
enum pya_sim_work {
    PYA_SIM_WORK_AT_ONCE, /* nothing is ever pending */
    PYA_SIM_WORK_BY_HAND, /* when the test calls pya_sim_finish() */
    PYA_SIM_WORK_DELAYED, /* an event is done once work_delay later events have been recorded */
};

struct pya_sim_config {
    size_t capacity_bytes;  /* only whole pages are usable; 0: 80 GiB */
    uint64_t address_bytes; /* 0: 16 TiB; a multiple of PYA_PAGE */
    enum pya_sim_cost cost;
    enum pya_sim_work work;
    uint64_t work_delay;
    uint64_t refused_peers; /* bit per device that is never given access */
    bool no_vmm;            /* a driver without virtual memory calls */
    bool backed;            /* real addresses: pages come from a memfd, mprotect enforces access */
    bool quiet;             /* violations are counted, not printed */
};

/* What is held now, and what has happened so far. */
struct pya_sim_state {
    size_t n_pages;    /* live physical pages: handle not released, or still mapped */
    size_t n_mappings; /* addresses mapped to a page */
    size_t n_ranges;   /* reserved address ranges */
    size_t n_plain;    /* plain allocations */
    size_t n_events;
    uint64_t used_bytes; /* pages and plain allocations */
    uint64_t peak_bytes; /* largest used_bytes so far */
    uint64_t n_calls[PYA_SIM_N_CALLS];
    uint64_t n_memory_calls; /* sum of n_calls where pya_sim_calls[].is_memory */
    uint64_t device_ns;      /* modelled */
    uint64_t n_stale;        /* calls with a destroyed stream */
    size_t n_violations;
};

/* pya_device_close() closes the device and frees the sim. */
PYA_MUST_CHECK pya_status
pya_sim_create(const struct pya_sim_config *config, int index, struct pya_sim **out);
struct pya_device *pya_sim_device(struct pya_sim *sim);
struct pya_sim *pya_sim_of(struct pya_device *dev);
void pya_sim_query(struct pya_sim *sim, struct pya_sim_state *out);
/* Text of the newest violation, valid until the next one; "" if there is none. */
const char *pya_sim_violation(struct pya_sim *sim);
/* Sets peak_bytes to used_bytes, and the counts and device_ns to zero. */
void pya_sim_reset_counts(struct pya_sim *sim);
/* Applies to later allocations; they all fail if the capacity is below used_bytes. */
void pya_sim_set_capacity(struct pya_sim *sim, size_t bytes);

#define PYA_SIM_ANY_CALL UINT32_MAX
/* Makes a call fail with `status`: the nth from now (1: the next) whose bit (1 << kind) is in kinds.  sticky: later
 * ones too. */
void
pya_sim_fail(struct pya_sim *sim, uint32_t kinds, uint64_t nth, pya_status status, bool sticky);
/* Stops failing calls.  True: one has failed. */
bool pya_sim_fail_clear(struct pya_sim *sim);

/* on: the program has destroyed the stream; the device still finishes the queued work.  off: a new stream has its
 * handle. */
void pya_sim_set_destroyed(struct pya_sim *sim, pya_stream stream, bool on);
/* Moves the stream's handle to the context of the device with that index.  Events made before cannot be recorded on
 * it.  On another device's stream, a wait for this device neither finishes work nor is forbidden by a capture. */
void pya_sim_set_context(struct pya_sim *sim, pya_stream stream, int context);
void pya_sim_set_capturing(struct pya_sim *sim, pya_stream stream, bool on);
void pya_sim_advance_clock(struct pya_sim *sim, uint64_t ns);

/* Queues work on the stream that touches [addr, addr + bytes).  Violations: memory that is not mapped and accessible;
 * bytes that unfinished work of another stream touches; unmapping memory under unfinished work.  PYA_E_HOST_NOMEM:
 * the work was not queued. */
PYA_MUST_CHECK pya_status
pya_sim_use(struct pya_sim *sim, pya_stream stream, pya_dptr addr, size_t bytes);
/* Finishes the work queued on the stream so far. */
void pya_sim_finish(struct pya_sim *sim, pya_stream stream);
void pya_sim_finish_all(struct pya_sim *sim);

/* The shadow records which 512-byte steps of which pages belong to a live block, whatever address they are seen
 * through. own: a step that already has an owner is a violation, and so is memory that is not mapped and accessible.
 * disown: a step without an owner is a violation. */
PYA_MUST_CHECK pya_status pya_sim_own(struct pya_sim *sim, pya_dptr addr, size_t bytes);
void pya_sim_disown(struct pya_sim *sim, pya_dptr addr, size_t bytes);

/* Recounts every structure of the sim, prints each violation and returns their number. */
size_t pya_sim_check(struct pya_sim *sim);

#ifdef __cplusplus
}
#endif
