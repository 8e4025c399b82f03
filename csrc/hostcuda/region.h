#pragma once
/* Address space, and the map from addresses to allocations.  Floor 2 (uses state.h).
 *
 * All device addresses come from one window of PROT_NONE address space, so that they ascend in the order of allocation and no
 * other mapping of the process lies between them. */

#include "state.h"

enum pya_hc_region_kind {
    REGION_PLAIN,      /* cudaMalloc; bytes in the device's file */
    REGION_MANAGED,    /* cudaMallocManaged: the same, also accessible by the host */
    REGION_CHUNK,      /* chunk of a memory pool */
    REGION_IMPORT,     /* another process's plain allocation */
    REGION_RESERVED,   /* cuMemAddressReserve */
    REGION_PINNED,     /* cudaHostAlloc */
    REGION_REGISTERED, /* cudaHostRegister: the program's own memory */
};

/* One 2 MiB page of a reservation. */
struct pya_hc_page {
    struct pya_hc_handle *handle; /* NULL: nothing mapped */
    uint32_t index;               /* the page's number in the handle */
    uint16_t readers, writers;    /* bit per device that has access */
};

struct pya_hc_region {
    uintptr_t start;
    size_t size;   /* as requested */
    size_t mapped; /* address space taken, a multiple of 2 MiB (host kinds: bytes mapped) */
    enum pya_hc_region_kind kind;
    int device;
    int fd;                    /* REGION_IMPORT: its own file */
    int pid, n_opens;          /* REGION_IMPORT: owning process; number of opens */
    uint64_t offset;           /* in the device's file; unused for reservations and host kinds */
    struct pya_hc_page *pages; /* REGION_RESERVED: mapped / 2 MiB of them */
    void *owner;               /* REGION_CHUNK: its pool */
};

/* Takes address space from the window.  `want` is a hint, 0 for none. */
int pya_hc_address_take_locked(size_t size, size_t align, uintptr_t want, uintptr_t *start);
/* Makes the range inaccessible again and returns it. */
void pya_hc_address_give_locked(uintptr_t start, size_t size);
/* Could the process not get the window's address space?  Then every device allocation fails as out of memory. */
bool pya_hc_address_is_refused_locked(void);
/* Number of violated invariants of the allocated ranges. */
int pya_hc_address_check_locked(void);

int pya_hc_region_insert_locked(const struct pya_hc_region *region, struct pya_hc_region **out);
void pya_hc_region_remove_locked(struct pya_hc_region *region);
/* The region that contains the address, or NULL. */
struct pya_hc_region *pya_hc_region_at_locked(uintptr_t address);
/* Does the range overlap a region? */
bool pya_hc_region_meets_locked(uintptr_t start, size_t size);
/* Any region of the device of one of these kinds (bits, by number); NULL if there is none. */
struct pya_hc_region *pya_hc_region_of_locked(int device, unsigned kinds);
/* The import of this range of a process; NULL if there is none. */
struct pya_hc_region *pya_hc_region_import_locked(int pid, int device, uint64_t offset);
uint64_t pya_hc_region_count_locked(enum pya_hc_region_kind kind);

bool pya_hc_region_is_device(const struct pya_hc_region *region);

/* May [start, start + size) be accessed?  CU_OK for readable (and writable if `write`) device memory and for host memory,
 * otherwise CU_INVALID_VALUE.  *device is the owner, -1 for the host. */
int pya_hc_access_locked(uintptr_t start, size_t size, bool write, int *device);

/* Can `device` access this range of device memory?  Plain memory always can be. */
bool pya_hc_is_open_to_locked(uintptr_t start, size_t size, bool write, int device);

/* File and offset behind a device address, and how many bytes from there are contiguous in the file. */
struct pya_hc_backing {
    int fd;
    uint64_t offset;
    size_t run;
};
bool pya_hc_backing_locked(uintptr_t address, struct pya_hc_backing *out);
