#pragma once
/* Address space and the map from address to allocation.  Floor 2 (uses state.h).
 *
 * All device addresses come from one window of PROT_NONE address space, so that they are in order of
 * allocation and no stray mapping of the process falls between. */

#include "state.h"

enum pya_hc_region_kind {
    REGION_PLAIN,      /* cudaMalloc; bytes in the device's file */
    REGION_MANAGED,    /* cudaMallocManaged: the same, with a host address */
    REGION_CHUNK,      /* chunk of a memory pool */
    REGION_IMPORT,     /* another process's plain allocation */
    REGION_RESERVED,   /* cuMemAddressReserve */
    REGION_PINNED,     /* cudaHostAlloc */
    REGION_REGISTERED, /* cudaHostRegister: the program's own memory */
};

/* One 2 MiB page of a reservation. */
struct pya_hc_page {
    struct pya_hc_handle *handle; /* NULL: nothing mapped */
    uint32_t index;               /* which page of the handle */
    uint16_t readers, writers;    /* bit per device with access */
};

struct pya_hc_region {
    uintptr_t start;
    size_t size;   /* as asked for */
    size_t mapped; /* address space taken, a multiple of 2 MiB (host kinds: bytes mapped) */
    enum pya_hc_region_kind kind;
    int device;
    int fd;                    /* REGION_IMPORT: its own file */
    int pid, n_opens;          /* REGION_IMPORT: whose it is, how often it was opened */
    uint64_t offset;           /* in the device's file; unused for reservations and host kinds */
    struct pya_hc_page *pages; /* REGION_RESERVED: mapped / 2 MiB of them */
    void *owner;               /* REGION_CHUNK: its pool */
};

/* Address space from the window.  `want` is a hint, 0 for none. */
int pya_hc_address_take_locked(size_t size, size_t align, uintptr_t want, uintptr_t *start);
/* Makes the range inaccessible again and gives it back. */
void pya_hc_address_give_locked(uintptr_t start, size_t size);
/* Whether the process may not have the addresses of a device's memory: then all of it is out of memory. */
bool pya_hc_address_is_refused_locked(void);
/* Broken invariants of what is given out. */
int pya_hc_address_check_locked(void);

int pya_hc_region_insert_locked(const struct pya_hc_region *region, struct pya_hc_region **out);
void pya_hc_region_remove_locked(struct pya_hc_region *region);
/* The region that holds the address, or NULL. */
struct pya_hc_region *pya_hc_region_at_locked(uintptr_t address);
/* Whether any of it is in a region. */
bool pya_hc_region_meets_locked(uintptr_t start, size_t size);
/* Any region of the device that is of one of the kinds (bits, by number); NULL: there is none. */
struct pya_hc_region *pya_hc_region_of_locked(int device, unsigned kinds);
/* The import of these bytes of a process; NULL: there is none. */
struct pya_hc_region *pya_hc_region_import_locked(int pid, int device, uint64_t offset);
uint64_t pya_hc_region_count_locked(enum pya_hc_region_kind kind);

bool pya_hc_region_is_device(const struct pya_hc_region *region);

/* Whether [start, start + size) may be touched: CU_OK for readable (and writable if `write`) device
 * memory or for host memory, otherwise CU_INVALID_VALUE.  *device is the owner, -1 for the host. */
int pya_hc_access_locked(uintptr_t start, size_t size, bool write, int *device);

/* Is all of a device range that may be touched open to this device too?  Plain memory always is. */
bool pya_hc_is_open_to_locked(uintptr_t start, size_t size, bool write, int device);

/* File and offset behind a device address, and how many bytes follow it there without a break. */
struct pya_hc_backing {
    int fd;
    uint64_t offset;
    size_t run;
};
bool pya_hc_backing_locked(uintptr_t address, struct pya_hc_backing *out);
