#pragma once
/* Settings, devices, the one lock and the per-thread context.  Floor 1 (uses abi.h, extents.h).
 *
 * Everything below the entry points is guarded by the one lock; functions named _locked are called
 * with it held.  Host callbacks of a program are never called under it. */

#include "abi.h"
#include "extents.h"

#include <stdatomic.h>
#include <stdbool.h>

#define PYA_HC_MAX_DEVICES 16
#define PYA_HC_PAGE ((size_t)2 << 20)

struct pya_hc_device {
    int ordinal;                      /* as CUDA counts in this process; -1: not visible to it */
    int physical;                     /* as NVML counts */
    _Atomic size_t capacity;          /* bytes the device has */
    size_t used, peak;                /* physical bytes: plain allocations, VMM handles, pools */
    size_t small;                     /* bytes of those that share pages; whole pages in used */
    int fd;                           /* memfd that holds the device's bytes; -1 before first use */
    struct pya_hc_extents file;       /* used ranges of that file */
    uint64_t n_launches;              /* kernels launched so far: the clock of delayed events */
    uint64_t n_syncs;                 /* how often all of its work was waited for */
    uint32_t peers;                   /* bit i: access to device i is enabled */
    atomic_bool active;               /* its primary context exists */
    struct pya_hc_stream *streams[2]; /* the legacy and the per-thread default stream */
    struct pya_hc_pool *pools[2];     /* default and current memory pool; NULL before first use */
};

void pya_hc_lock(void);
void pya_hc_unlock(void);

/* Reads the settings on the first call.  CU_NOT_INITIALIZED in a child forked after first use. */
int pya_hc_state_use(void);
bool pya_hc_state_is_foreign(void);

/* All of the machine, as NVML counts; then those that CUDA_VISIBLE_DEVICES leaves to this process, in its order. */
int pya_hc_n_physical(void);
struct pya_hc_device *pya_hc_physical(int physical);
int pya_hc_n_devices(void);
struct pya_hc_device *pya_hc_device(int ordinal); /* NULL when there is none */

uint64_t pya_hc_event_delay(void);

/* The calling thread's device: -1 as long as nothing chose one. */
int pya_hc_current(void);
void pya_hc_set_current(int ordinal);
/* The same, choosing device 0 where none was chosen, and bringing its context up. */
struct pya_hc_device *pya_hc_current_device(void);

/* Counts bytes in against the capacity (CU_OUT_OF_MEMORY when they do not fit), and out again. */
int pya_hc_charge_locked(struct pya_hc_device *dev, size_t bytes);
void pya_hc_uncharge_locked(struct pya_hc_device *dev, size_t bytes);
/* A capacity lowered below what is in use leaves nothing free. */
size_t pya_hc_free_locked(const struct pya_hc_device *dev);
