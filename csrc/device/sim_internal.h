/* The shared parts of the simulated device, for sim*.c.  Floor 2. */
#pragma once

#include <pthread.h>

#include "sim.h"
#include "sim_page.h"
#include "sim_space.h"

/* A page table entry: the low half is the physical page plus 1 (0: nothing mapped), followed by flags. */
#define SIM_PTE_PAGE UINT64_C(0xFFFFFFFF)
#define SIM_PTE_RESERVED (UINT64_C(1) << 32)
#define SIM_PTE_ACCESS (UINT64_C(1) << 33)
#define SIM_PTE_PLAIN (UINT64_C(1) << 34) /* plain_alloc's: no virtual memory call may touch it */
#define SIM_PTE_START (UINT64_C(1) << 35) /* a range starts here */
#define SIM_PTE_PEERS                                                                              \
    36 /* from this bit on: one per device that has access, for the first SIM_PEERS of them */
#define SIM_PEERS ((UINT64_C(1) << (64 - SIM_PTE_PEERS)) - 1)

struct sim_stream {
    pya_stream id;
    uint64_t n_queued;
    uint64_t n_finished; /* <= n_queued */
    uint32_t next;       /* plus 1: with the same hash */
    bool is_capturing, is_destroyed;
    int context; /* index of the stream's device */
};

enum { SIM_STREAM_BITS = 10 };

struct sim_event {
    uint32_t generation;
    uint32_t next_free; /* plus 1 */
    uint32_t stream;    /* plus 1; 0: never recorded */
    int context;        /* of the stream it was created for */
    bool is_alive;
    uint64_t work;   /* the stream's n_queued at the record */
    uint64_t record; /* number of the record on this device */
};

/* Work number `work` of a stream touches steps [first, last] of a page through virtual page vpage. */
struct sim_use {
    uint32_t stream;
    uint32_t next; /* plus 1 */
    uint32_t vpage;
    uint16_t first;
    uint16_t last;
    uint64_t work;
};

struct pya_sim {
    struct pya_device device; /* first */
    pthread_mutex_t lock;     /* guards all members below */
    struct pya_sim_config config;
    pya_dptr base; /* address of virtual page 0 */
    struct sim_space space;
    uint64_t *pte; /* by virtual page */
    struct sim_page *pages;
    uint32_t n_page_slots;
    uint32_t n_pages_used; /* slots that ever belonged to a run */
    struct sim_runs *runs; /* by length; the few lengths are in order of first use */
    uint32_t n_run_slots;
    struct sim_stream *streams;
    uint32_t n_streams;
    uint32_t stream_heads[1 << SIM_STREAM_BITS]; /* plus 1: by hash of the id */
    struct sim_event *events;
    uint32_t n_event_slots;
    uint32_t free_event; /* plus 1 */
    uint64_t n_records;
    struct sim_use *uses;
    uint32_t n_use_slots;
    uint32_t free_use; /* plus 1 */
    struct pya_sim_state state;
    uint64_t clock_ns;
    uint64_t peers;
    struct pya_device_error error;
    bool is_told; /* the failing call has noted its code and text */
    char violation[160];
    uint32_t fail_kinds;
    uint64_t fail_left; /* matching calls until the failing one; 0: none */
    pya_status fail_status;
    bool fail_sticky;
    bool fail_fired;
    int fd; /* of the memory behind the pages; -1 if not backed */
};

/* Counts the call and takes the lock; sim_leave() releases it.  Returns PYA_OK or the injected failure. */
pya_status sim_enter(struct pya_sim *sim, enum pya_sim_call call);
/* Adds the modelled time of a successful call, or notes the error of a failed one.  Returns status. */
pya_status sim_leave(
    struct pya_sim *sim, enum pya_sim_call call, uint64_t n_handles, uint64_t n_pages,
    pya_status status);
/* Counts and prints a misuse.  Returns PYA_E_DEVICE with "invalid value", as the driver would. */
pya_status sim_misuse(struct pya_sim *sim, const char *what, uint64_t value);
/* The virtual page of an address, or SIM_SPACE_NONE. */
uint32_t sim_vpage(const struct pya_sim *sim, pya_dptr addr);

static inline struct pya_sim *
sim_from(struct pya_device *dev) {
    return (struct pya_sim *)dev;
}

static inline pya_dptr
sim_address(const struct pya_sim *sim, uint32_t vpage) {
    return sim->base + ((uint64_t)vpage << PYA_PAGE_SHIFT);
}

/* Doubles a full array.  False: no host memory; nothing changed. */
bool sim_grow(void **array, uint32_t *n_slots, size_t element_bytes);

/* sim_back.c: no-ops if not backed.  False: no host memory. */
pya_status sim_back_open(struct pya_sim *sim);
void sim_back_close(struct pya_sim *sim);
bool sim_back_map(struct pya_sim *sim, uint32_t vpage, uint32_t page, uint32_t n);
void sim_back_unmap(struct pya_sim *sim, uint32_t vpage, uint32_t n);
bool sim_back_access(struct pya_sim *sim, uint32_t vpage, uint32_t n);
bool sim_back_drop(struct pya_sim *sim, uint32_t page, uint32_t n);

/* sim_memory.c */
pya_status sim_range_reserve(struct pya_device *dev, size_t bytes, pya_dptr *out);
pya_status sim_range_release(struct pya_device *dev, pya_dptr addr, size_t bytes);
pya_status sim_map(struct pya_device *dev, pya_dptr addr, pya_page_handle handle, size_t n_pages);
pya_status sim_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes);
pya_status sim_set_access(struct pya_device *dev, pya_dptr addr, size_t bytes);
pya_status sim_open_peer(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes);
pya_status sim_plain_alloc(struct pya_device *dev, size_t bytes, pya_dptr *out);
pya_status sim_plain_free(struct pya_device *dev, pya_dptr addr);

/* sim_export.c */
pya_status sim_page_export(struct pya_device *dev, pya_page_handle handle, int *fd);
pya_status sim_page_import(struct pya_device *dev, int fd, pya_page_handle *out);

/* sim_work.c; the caller holds the lock */
/* Finishes the work of the device's own streams. */
void sim_finish_own_locked(struct pya_sim *sim);
/* Number of unfinished uses of the page through vpage. */
uint32_t sim_pending_uses_locked(struct pya_sim *sim, uint32_t page, uint32_t vpage);
void sim_drop_uses_locked(struct pya_sim *sim, uint32_t page);
pya_status sim_event_create(struct pya_device *dev, pya_stream stream, pya_event *out);
pya_status sim_event_record(struct pya_device *dev, pya_event event, pya_stream stream);
pya_status sim_event_query(struct pya_device *dev, pya_event event, bool *done);
pya_status sim_event_sync(struct pya_device *dev, pya_event event);
pya_status sim_event_destroy(struct pya_device *dev, pya_event event);
pya_status sim_stream_sync(struct pya_device *dev, pya_stream stream);
pya_status sim_device_sync(struct pya_device *dev);
pya_status sim_is_capturing(struct pya_device *dev, pya_stream stream, bool *out);
