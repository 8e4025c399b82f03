/* The simulated device: memory is bookkeeping (or, when backed, host pages with real aliasing), calls are counted,
 * cost modelled time, can be made to fail, and misuse the driver would punish later is reported at once.  Floor 2.
 *
 * Every call is O(1) in what is alive, or O(pages it names).  One mutex per device. */
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
    size_t capacity_bytes;  /* whole pages are usable; 0: 80 GiB */
    uint64_t address_bytes; /* 0: 16 TiB; a multiple of PYA_PAGE */
    enum pya_sim_cost cost;
    enum pya_sim_work work;
    uint64_t work_delay;
    uint64_t refused_peers; /* bit per device for which access is never given */
    bool no_vmm;            /* a driver without virtual memory calls */
    bool backed; /* addresses are real: pages come from a memfd, access is enforced by mprotect */
    bool quiet;  /* violations are counted, not printed */
};

/* What is held now, and what has happened. */
struct pya_sim_state {
    size_t n_pages;    /* physical pages alive: handle not released, or still mapped */
    size_t n_mappings; /* addresses mapped to a page */
    size_t n_ranges;   /* reserved address ranges */
    size_t n_plain;    /* plain allocations */
    size_t n_events;
    uint64_t used_bytes; /* pages and plain allocations */
    uint64_t peak_bytes; /* largest used_bytes so far */
    uint64_t n_calls[PYA_SIM_N_CALLS];
    uint64_t n_memory_calls; /* sum of n_calls where pya_sim_calls[].is_memory */
    uint64_t device_ns;      /* modelled */
    uint64_t n_stale;        /* calls about a destroyed stream */
    size_t n_violations;
};

/* The device is closed with pya_device_close(), which frees the sim. */
PYA_MUST_CHECK pya_status
pya_sim_create(const struct pya_sim_config *config, int index, struct pya_sim **out);
struct pya_device *pya_sim_device(struct pya_sim *sim);
struct pya_sim *pya_sim_of(struct pya_device *dev);
void pya_sim_query(struct pya_sim *sim, struct pya_sim_state *out);
/* Text of the newest violation; "" when there is none.  Valid until the next one. */
const char *pya_sim_violation(struct pya_sim *sim);
/* peak_bytes = used_bytes, counts and device_ns to zero. */
void pya_sim_reset_counts(struct pya_sim *sim);
/* Applies to later allocations; below used_bytes it makes them all fail. */
void pya_sim_set_capacity(struct pya_sim *sim, size_t bytes);

#define PYA_SIM_ANY_CALL UINT32_MAX
/* The nth call from now (1: the next) whose bit (1 << kind) is in kinds gives status; sticky: later ones too. */
void
pya_sim_fail(struct pya_sim *sim, uint32_t kinds, uint64_t nth, pya_status status, bool sticky);
/* Nothing fails any more.  True: one did. */
bool pya_sim_fail_clear(struct pya_sim *sim);

/* on: the program destroyed the stream; the device still works off what is queued.  off: a new one has its handle. */
void pya_sim_set_destroyed(struct pya_sim *sim, pya_stream stream, bool on);
/* The stream's handle belongs to another device's context now (0: the first): events made before cannot be recorded on it. */
void pya_sim_set_context(struct pya_sim *sim, pya_stream stream, uint32_t context);
void pya_sim_set_capturing(struct pya_sim *sim, pya_stream stream, bool on);
void pya_sim_advance_clock(struct pya_sim *sim, uint64_t ns);

/* Queues work on the stream that touches [addr, addr + bytes).  Violations: memory that is not mapped and accessible;
 * bytes that unfinished work of another stream touches.  Unmapping under unfinished work is one too.
 * PYA_E_HOST_NOMEM: the work was not queued. */
PYA_MUST_CHECK pya_status
pya_sim_use(struct pya_sim *sim, pya_stream stream, pya_dptr addr, size_t bytes);
/* Work queued on the stream so far is done. */
void pya_sim_finish(struct pya_sim *sim, pya_stream stream);
void pya_sim_finish_all(struct pya_sim *sim);

/* The shadow: which 512-byte steps of which pages belong to a live block, whatever the address they are seen through.
 * own: violations for a step that has an owner and for memory not mapped and accessible.  disown: for one that has none. */
PYA_MUST_CHECK pya_status pya_sim_own(struct pya_sim *sim, pya_dptr addr, size_t bytes);
void pya_sim_disown(struct pya_sim *sim, pya_dptr addr, size_t bytes);

/* Recounts every structure of the sim itself; prints each violation; returns their number. */
size_t pya_sim_check(struct pya_sim *sim);

#ifdef __cplusplus
}
#endif
