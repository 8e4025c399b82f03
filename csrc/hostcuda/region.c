/* Regions are in an array sorted by address.  The page tables of reservations are separate, so that mapping a page never
 * moves anything. */

#define _GNU_SOURCE
#include "region.h"

#include "physical.h"
#include "vmm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define WINDOW_HINT ((uintptr_t)0x100000000000)
#define WINDOW_MOST ((size_t)1 << 44)
#define WINDOW_LEAST ((size_t)1 << 36)

static struct pya_hc_region **regions;
static size_t n_regions, regions_capacity;
static uint64_t n_by_kind[REGION_REGISTERED + 1];

static uintptr_t window_start;
static struct pya_hc_extents window; /* offsets from window_start */
static bool is_window_refused;

static int
window_open(void) {
    if (window_start != 0) {
        return CU_OK;
    }
    for (size_t size = WINDOW_MOST; size >= WINDOW_LEAST; size /= 2) {
        /* Only a hint: if something else is there (a sanitizer's shadow), any place will do. */
        void *at = mmap(
            (void *)WINDOW_HINT, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
            0);
        if (at != MAP_FAILED) {
            uintptr_t start = ((uintptr_t)at + PYA_HC_PAGE - 1) & ~(PYA_HC_PAGE - 1);
            window_start = start;
            window.limit = (uintptr_t)at + size - start;
            return CU_OK;
        }
    }
    if (!is_window_refused) {
        is_window_refused = true;
        (void)fprintf(
            stderr,
            "pyalloc hostcuda: this process may not reserve enough address space for a device's "
            "memory; lift the limit: ulimit -v unlimited\n");
    }
    return CU_OUT_OF_MEMORY;
}

int
pya_hc_address_take_locked(size_t size, size_t align, uintptr_t want, uintptr_t *start) {
    int error = window_open();
    if (error != CU_OK) {
        return error;
    }
    uint64_t offset = 0;
    if (want > window_start && (want & (align - 1)) == 0 &&
        pya_hc_extents_take_at(&window, want - window_start, size)) {
        *start = want;
        return CU_OK;
    }
    /* Alignments above a page apply to the address, which is window_start + offset. */
    uint64_t slack = align > PYA_HC_PAGE ? align : 0;
    if (!pya_hc_extents_take(&window, size + slack, PYA_HC_PAGE, &offset)) {
        return CU_OUT_OF_MEMORY;
    }
    if (slack > 0) {
        uintptr_t at = (window_start + offset + align - 1) & ~(align - 1);
        uint64_t head = at - window_start - offset;
        if (head > 0) {
            (void)pya_hc_extents_give(&window, offset, head);
        }
        if (slack > head) {
            (void)pya_hc_extents_give(&window, at - window_start + size, slack - head);
        }
        offset = at - window_start;
    }
    *start = window_start + offset;
    return CU_OK;
}

void
pya_hc_address_give_locked(uintptr_t start, size_t size) {
    (void)mmap(
        (void *)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
        0);
    (void)pya_hc_extents_give(&window, start - window_start, size);
}

bool
pya_hc_address_is_refused_locked(void) {
    return is_window_refused;
}

int
pya_hc_address_check_locked(void) {
    return pya_hc_extents_check(&window);
}

/* Index of the first region that starts after the address. */
static size_t
region_after(uintptr_t address) {
    size_t low = 0;
    size_t high = n_regions;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        bool is_behind = regions[mid]->start > address;
        low = is_behind ? low : mid + 1;
        high = is_behind ? mid : high;
    }
    return low;
}

int
pya_hc_region_insert_locked(const struct pya_hc_region *region, struct pya_hc_region **out) {
    if (n_regions == regions_capacity) {
        size_t capacity = regions_capacity == 0 ? 256 : 2 * regions_capacity;
        struct pya_hc_region **grown = realloc(regions, capacity * sizeof(void *));
        if (grown == NULL) {
            return CU_OUT_OF_MEMORY;
        }
        regions = grown;
        regions_capacity = capacity;
    }
    struct pya_hc_region *copy = malloc(sizeof *copy);
    if (copy == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    *copy = *region;
    size_t at = region_after(region->start);
    memmove(&regions[at + 1], &regions[at], (n_regions - at) * sizeof(void *));
    regions[at] = copy;
    n_regions++;
    n_by_kind[region->kind]++;
    if (out != NULL) {
        *out = copy;
    }
    return CU_OK;
}

void
pya_hc_region_remove_locked(struct pya_hc_region *region) {
    size_t at = region_after(region->start) - 1;
    n_regions--;
    n_by_kind[region->kind]--;
    memmove(&regions[at], &regions[at + 1], (n_regions - at) * sizeof(void *));
    free(region->pages);
    free(region);
}

struct pya_hc_region *
pya_hc_region_at_locked(uintptr_t address) {
    size_t at = region_after(address);
    if (at == 0) {
        return NULL;
    }
    struct pya_hc_region *region = regions[at - 1];
    return address - region->start < region->mapped ? region : NULL;
}

bool
pya_hc_region_meets_locked(uintptr_t start, size_t size) {
    size_t at = region_after(start + size - 1);
    return at > 0 && regions[at - 1]->start + regions[at - 1]->mapped > start;
}

struct pya_hc_region *
pya_hc_region_of_locked(int device, unsigned kinds) {
    for (size_t i = n_regions; i-- > 0;) {
        if (regions[i]->device == device && (kinds >> regions[i]->kind & 1) != 0) {
            return regions[i];
        }
    }
    return NULL;
}

struct pya_hc_region *
pya_hc_region_import_locked(int pid, int device, uint64_t offset) {
    for (size_t i = 0; i < n_regions; i++) {
        if (regions[i]->kind == REGION_IMPORT && regions[i]->pid == pid &&
            regions[i]->device == device && regions[i]->offset == offset) {
            return regions[i];
        }
    }
    return NULL;
}

uint64_t
pya_hc_region_count_locked(enum pya_hc_region_kind kind) {
    return n_by_kind[kind];
}

bool
pya_hc_region_is_device(const struct pya_hc_region *region) {
    return region->kind < REGION_PINNED;
}

/* Is every page in this part of a reservation mapped and accessible to one of the devices? */
static bool
region_are_pages_open(
    const struct pya_hc_region *region, uintptr_t start, size_t size, bool write,
    unsigned devices) {
    size_t first = (start - region->start) / PYA_HC_PAGE;
    size_t last = (start + size - 1 - region->start) / PYA_HC_PAGE;
    for (size_t i = first; i <= last; i++) {
        const struct pya_hc_page *page = &region->pages[i];
        if (page->handle == NULL || ((write ? page->writers : page->readers) & devices) == 0) {
            return false;
        }
    }
    return true;
}

/* Is the whole range device memory, in one or several adjacent regions, and accessible to one of the devices? */
static bool
region_is_open(uintptr_t start, size_t size, bool write, unsigned devices) {
    while (size > 0) {
        const struct pya_hc_region *region = pya_hc_region_at_locked(start);
        if (region == NULL || !pya_hc_region_is_device(region)) {
            return false;
        }
        size_t rest = region->start + region->mapped - start;
        size_t part = size < rest ? size : rest;
        if (region->kind == REGION_RESERVED &&
            !region_are_pages_open(region, start, part, write, devices)) {
            return false;
        }
        start += part;
        size -= part;
    }
    return true;
}

int
pya_hc_access_locked(uintptr_t start, size_t size, bool write, int *device) {
    *device = -1;
    struct pya_hc_region *region = pya_hc_region_at_locked(start);
    if (region == NULL) {
        /* It is host memory unless it is in the window, where the program has nothing of its own. */
        bool in_window =
            window_start != 0 && start >= window_start && start - window_start < window.limit;
        return in_window ? CU_INVALID_VALUE : CU_OK;
    }
    if (!pya_hc_region_is_device(region)) {
        return CU_OK;
    }
    *device = region->device;
    return region_is_open(start, size, write, UINT16_MAX) ? CU_OK : CU_INVALID_VALUE;
}

bool
pya_hc_is_open_to_locked(uintptr_t start, size_t size, bool write, int device) {
    return region_is_open(start, size, write, 1u << device);
}

bool
pya_hc_backing_locked(uintptr_t address, struct pya_hc_backing *out) {
    struct pya_hc_region *region = pya_hc_region_at_locked(address);
    if (region == NULL || !pya_hc_region_is_device(region)) {
        return false;
    }
    size_t within = address - region->start;
    if (region->kind != REGION_RESERVED) {
        out->fd = region->kind == REGION_IMPORT ? region->fd : pya_hc_physical_fd(region->device);
        out->offset = region->offset + within;
        out->run = region->mapped - within;
        return true;
    }
    const struct pya_hc_page *page = &region->pages[within / PYA_HC_PAGE];
    if (page->handle == NULL) {
        return false;
    }
    size_t in_page = within % PYA_HC_PAGE;
    out->fd = pya_hc_handle_fd(page->handle);
    out->offset = pya_hc_handle_offset(page->handle) + page->index * PYA_HC_PAGE + in_page;
    out->run = PYA_HC_PAGE - in_page;
    return true;
}
