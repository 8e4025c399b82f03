#pragma once
/* Settings, devices, the one lock and the per-thread context.  Floor 1 (uses abi.h, extents.h).
 *
 * The one lock guards everything below the entry points; functions named _locked are called with it held.  A program's
 * host callbacks are never called under it. */

#include "abi.h"
#include "extents.h"

#include <stdatomic.h>
#include <stdbool.h>

#define PYA_HC_MAX_DEVICES 16
#define PYA_HC_PAGE ((size_t)2 << 20)

struct pya_hc_device {
    int ordinal;                      /* CUDA's number in this process; -1: not visible to it */
    int physical;                     /* NVML's number */
    _Atomic size_t capacity;          /* bytes of memory the device has */
    size_t used, peak;                /* physical bytes: plain allocations, VMM handles, pools */
    size_t small;                     /* bytes of those that share pages; `used` has whole pages */
    size_t managed, managed_peak;     /* bytes of managed memory, which is not charged */
    int fd;                           /* memfd that holds the device's bytes; -1 before first use */
    struct pya_hc_extents file;       /* used ranges of that file */
    uint64_t n_launches;              /* kernels launched so far: the clock of delayed events */
    uint64_t n_syncs;                 /* number of waits for all of its work */
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

/* The machine's devices in NVML's order; below, those that CUDA_VISIBLE_DEVICES leaves to this process, in its order. */
int pya_hc_n_physical(void);
struct pya_hc_device *pya_hc_physical(int physical);
int pya_hc_n_devices(void);
struct pya_hc_device *pya_hc_device(int ordinal); /* NULL when there is none */

uint64_t pya_hc_event_delay(void);

/* The calling thread's device; -1 until one is chosen. */
int pya_hc_current(void);
void pya_hc_set_current(int ordinal);
/* The same, but chooses device 0 if none was chosen, and creates its context. */
struct pya_hc_device *pya_hc_current_device(void);

/* Charges bytes against the capacity (CU_OUT_OF_MEMORY if they do not fit), and uncharges them. */
int pya_hc_charge_locked(struct pya_hc_device *dev, size_t bytes);
void pya_hc_uncharge_locked(struct pya_hc_device *dev, size_t bytes);
/* 0 if the capacity was lowered below what is in use. */
size_t pya_hc_free_locked(const struct pya_hc_device *dev);
