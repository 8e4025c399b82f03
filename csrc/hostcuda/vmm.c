/* Handles are numbers, not pointers: index and generation, so that a stale one is recognised.  Mappings are created
 * PROT_NONE; cuMemSetAccess opens them. */

#define _GNU_SOURCE
#include "vmm.h"

#include "physical.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { HANDLE_POSIX_FD = 1 }; /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */

/* Live while n_owners + n_mappings > 0; the slot is reused after that, with the next generation. */
struct pya_hc_handle {
    uint32_t index, generation;
    int device;
    unsigned n_owners; /* creates, retains and imports that were not yet released */
    unsigned n_mappings;
    size_t size;
    int fd;           /* imported: the other process's file; -1: the device's own */
    bool is_exported; /* anybody may hold the descriptor, so its bytes are never reused */
    uint64_t offset;  /* in the file */
    struct cuda_vmm_prop prop;
    struct pya_hc_handle *next_free;
};

static struct pya_hc_handle **handles;
static size_t n_slots, slots_capacity;
static struct pya_hc_handle *free_slots;
static uint64_t n_handles, n_mappings;

static struct pya_hc_handle *
handle_new(void) {
    if (free_slots != NULL) {
        struct pya_hc_handle *handle = free_slots;
        free_slots = handle->next_free;
        return handle;
    }
    if (n_slots == slots_capacity) {
        size_t capacity = slots_capacity == 0 ? 256 : 2 * slots_capacity;
        struct pya_hc_handle **grown = realloc(handles, capacity * sizeof(void *));
        if (grown == NULL) {
            return NULL;
        }
        handles = grown;
        slots_capacity = capacity;
    }
    struct pya_hc_handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL) {
        return NULL;
    }
    handle->index = (uint32_t)n_slots;
    handles[n_slots++] = handle;
    return handle;
}

static uint64_t
handle_id(const struct pya_hc_handle *handle) {
    return ((uint64_t)handle->generation + 1) << 32 | handle->index;
}

/* NULL if the program does not hold the handle. */
static struct pya_hc_handle *
handle_find(uint64_t id) {
    size_t index = id & UINT32_MAX;
    if (index >= n_slots || handle_id(handles[index]) != id || handles[index]->n_owners == 0) {
        return NULL;
    }
    return handles[index];
}

static void
handle_drop(struct pya_hc_handle *handle) {
    if (handle->n_owners > 0 || handle->n_mappings > 0) {
        return;
    }
    struct pya_hc_device *dev = pya_hc_device(handle->device);
    if (handle->fd >= 0) {
        pya_hc_physical_forget_locked(handle->fd);
    } else if (handle->is_exported) {
        pya_hc_uncharge_locked(dev, handle->size);
    } else {
        pya_hc_physical_give_locked(dev, handle->offset, handle->size);
    }
    handle->generation++;
    handle->next_free = free_slots;
    free_slots = handle;
    n_handles--;
}

int
pya_hc_handle_fd(const struct pya_hc_handle *handle) {
    return handle->fd >= 0 ? handle->fd : pya_hc_physical_fd(handle->device);
}

uint64_t
pya_hc_handle_offset(const struct pya_hc_handle *handle) {
    return handle->offset;
}

uint64_t
pya_hc_vmm_n_handles_locked(void) {
    return n_handles;
}

uint64_t
pya_hc_vmm_n_mappings_locked(void) {
    return n_mappings;
}

int
pya_hc_vmm_reserve(size_t size, size_t align, uintptr_t want, uintptr_t *out) {
    if (out == NULL || size == 0 || size % PYA_HC_PAGE != 0 || (align & (align - 1)) != 0) {
        return CU_INVALID_VALUE;
    }
    align = align < PYA_HC_PAGE ? PYA_HC_PAGE : align;
    struct pya_hc_region region = {
        .size = size, .mapped = size, .kind = REGION_RESERVED, .device = -1, .fd = -1};
    region.pages = calloc(size / PYA_HC_PAGE, sizeof *region.pages);
    if (region.pages == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    pya_hc_lock();
    int error = pya_hc_address_take_locked(size, align, want, &region.start);
    if (error != CU_OK) {
        goto free_pages;
    }
    error = pya_hc_region_insert_locked(&region, NULL);
    if (error != CU_OK) {
        goto give_address;
    }
    pya_hc_unlock();
    *out = region.start;
    return CU_OK;

give_address:
    pya_hc_address_give_locked(region.start, size);
free_pages:
    pya_hc_unlock();
    free(region.pages);
    return error;
}

/* The reservation that contains the whole range, which must consist of pages; NULL otherwise. */
static struct pya_hc_region *
vmm_reservation(uintptr_t start, size_t size) {
    struct pya_hc_region *region = pya_hc_region_at_locked(start);
    if (region == NULL || region->kind != REGION_RESERVED || size == 0 ||
        start % PYA_HC_PAGE != 0 || size % PYA_HC_PAGE != 0 ||
        region->start + region->size - start < size) {
        return NULL;
    }
    return region;
}

int
pya_hc_vmm_unreserve(uintptr_t start, size_t size) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = vmm_reservation(start, size);
    if (region != NULL && region->start == start && region->size == size) {
        size_t n_mapped = 0;
        for (size_t i = 0; i < size / PYA_HC_PAGE; i++) {
            n_mapped += region->pages[i].handle != NULL;
        }
        if (n_mapped == 0) {
            pya_hc_address_give_locked(start, size);
            pya_hc_region_remove_locked(region);
            error = CU_OK;
        }
    }
    pya_hc_unlock();
    return error;
}

static void
handle_fill(struct pya_hc_handle *handle, int device, int fd, uint64_t offset, size_t size) {
    handle->device = device;
    handle->n_owners = 1;
    handle->n_mappings = 0;
    handle->size = size;
    handle->fd = fd;
    handle->is_exported = false;
    handle->offset = offset;
    n_handles++;
}

int
pya_hc_vmm_create(size_t size, const struct cuda_vmm_prop *prop, uint64_t *out) {
    if (out == NULL || prop == NULL || size == 0 || size % PYA_HC_PAGE != 0 || prop->type != 1) {
        return CU_INVALID_VALUE;
    }
    if (prop->location.type != 1 || (prop->handle_types & ~HANDLE_POSIX_FD) != 0) {
        return CU_NOT_SUPPORTED; /* also for fabric handles, which few devices have */
    }
    struct pya_hc_device *dev = pya_hc_device(prop->location.id);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    pya_hc_lock();
    uint64_t offset = 0;
    int error = pya_hc_physical_take_locked(dev, size, &offset);
    if (error == CU_OK) {
        struct pya_hc_handle *handle = handle_new();
        if (handle == NULL) {
            pya_hc_physical_give_locked(dev, offset, size);
            error = CU_OUT_OF_MEMORY;
        } else {
            handle_fill(handle, dev->ordinal, -1, offset, size);
            handle->prop = *prop;
            *out = handle_id(handle);
        }
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_release(uint64_t id) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_handle *handle = handle_find(id);
    if (handle != NULL) {
        handle->n_owners--;
        handle_drop(handle);
        error = CU_OK;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_retain(uintptr_t address, uint64_t *out) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked(address);
    if (region != NULL && region->kind == REGION_RESERVED) {
        struct pya_hc_handle *handle =
            region->pages[(address - region->start) / PYA_HC_PAGE].handle;
        if (handle != NULL) {
            handle->n_owners++;
            *out = handle_id(handle);
            error = CU_OK;
        }
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_map(uintptr_t start, size_t size, size_t offset, uint64_t id) {
    if (offset != 0) {
        return CU_INVALID_VALUE;
    }
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_handle *handle = handle_find(id);
    struct pya_hc_region *region = vmm_reservation(start, size);
    if (handle == NULL || region == NULL || handle->size != size) {
        goto done;
    }
    struct pya_hc_page *pages = &region->pages[(start - region->start) / PYA_HC_PAGE];
    size_t n_pages = size / PYA_HC_PAGE;
    for (size_t i = 0; i < n_pages; i++) {
        if (pages[i].handle != NULL) {
            goto done;
        }
    }
    int fd = pya_hc_handle_fd(handle);
    error = pya_hc_physical_map(fd, handle->offset, start, size, PROT_NONE);
    if (error != CU_OK) {
        goto done;
    }
    for (size_t i = 0; i < n_pages; i++) {
        pages[i] = (struct pya_hc_page){.handle = handle, .index = (uint32_t)i};
    }
    handle->n_mappings++;
    n_mappings++;
    region->device = handle->device;

done:
    pya_hc_unlock();
    return error;
}

/* Do the pages consist of whole mappings? */
static bool
vmm_is_whole(const struct pya_hc_page *pages, size_t n_pages) {
    for (size_t i = 0; i < n_pages;) {
        if (pages[i].handle == NULL || pages[i].index != 0) {
            return false;
        }
        i += pages[i].handle->size / PYA_HC_PAGE;
        if (i > n_pages) {
            return false;
        }
    }
    return true;
}

int
pya_hc_vmm_unmap(uintptr_t start, size_t size) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = vmm_reservation(start, size);
    if (region == NULL) {
        goto done;
    }
    struct pya_hc_page *pages = &region->pages[(start - region->start) / PYA_HC_PAGE];
    size_t n_pages = size / PYA_HC_PAGE;
    if (!vmm_is_whole(pages, n_pages)) {
        goto done;
    }
    void *at = mmap(
        (void *)start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
        0);
    if (at == MAP_FAILED) {
        error = CU_OUT_OF_MEMORY;
        goto done;
    }
    for (size_t i = 0; i < n_pages; i++) {
        struct pya_hc_handle *handle = pages[i].handle;
        bool is_last = (pages[i].index + 1) * PYA_HC_PAGE == handle->size;
        pages[i] = (struct pya_hc_page){0};
        if (is_last) {
            handle->n_mappings--;
            n_mappings--;
            handle_drop(handle);
        }
    }
    error = CU_OK;

done:
    pya_hc_unlock();
    return error;
}

static void
vmm_page_access(struct pya_hc_page *page, const struct cuda_access_desc *desc) {
    uint16_t bit = (uint16_t)(1u << desc->location.id);
    page->readers &= (uint16_t)~bit;
    page->writers &= (uint16_t)~bit;
    if (desc->flags != 0) {
        page->readers |= bit;
    }
    if (desc->flags == 3) {
        page->writers |= bit;
    }
}

static int
vmm_check_descs(const struct cuda_access_desc *descs, size_t n_descs) {
    for (size_t i = 0; i < n_descs; i++) {
        bool is_flag = descs[i].flags == 0 || descs[i].flags == 1 || descs[i].flags == 3;
        if (descs[i].location.type != 1 || !is_flag) {
            return CU_INVALID_VALUE;
        }
        if (pya_hc_device(descs[i].location.id) == NULL) {
            return CU_INVALID_DEVICE;
        }
    }
    return n_descs == 0 ? CU_INVALID_VALUE : CU_OK;
}

int
pya_hc_vmm_set_access(
    uintptr_t start, size_t size, const struct cuda_access_desc *descs, size_t n_descs) {
    int error = descs == NULL ? CU_INVALID_VALUE : vmm_check_descs(descs, n_descs);
    if (error != CU_OK) {
        return error;
    }
    error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = vmm_reservation(start, size);
    if (region == NULL) {
        goto done;
    }
    struct pya_hc_page *pages = &region->pages[(start - region->start) / PYA_HC_PAGE];
    size_t n_pages = size / PYA_HC_PAGE;
    if (!vmm_is_whole(pages, n_pages)) {
        goto done;
    }
    for (size_t i = 0; i < n_pages * n_descs; i++) {
        vmm_page_access(&pages[i / n_descs], &descs[i % n_descs]);
    }
    /* Pages of one call may have had different access: open each run of equal pages separately. */
    for (size_t i = 0; i < n_pages;) {
        size_t first = i;
        int protection = pages[i].readers ? PROT_READ : PROT_NONE;
        protection |= pages[i].writers ? PROT_WRITE : 0;
        while (i < n_pages && (pages[i].readers != 0) == (pages[first].readers != 0) &&
               (pages[i].writers != 0) == (pages[first].writers != 0)) {
            i++;
        }
        void *at = (void *)(start + first * PYA_HC_PAGE);
        if (mprotect(at, (i - first) * PYA_HC_PAGE, protection) != 0) {
            error = CU_OUT_OF_MEMORY;
            goto done;
        }
    }
    error = CU_OK;

done:
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_get_access(uintptr_t address, const struct cuda_location *location, uint64_t *flags) {
    if (location == NULL || flags == NULL || location->type != 1) {
        return CU_INVALID_VALUE;
    }
    if (pya_hc_device(location->id) == NULL) {
        return CU_INVALID_DEVICE;
    }
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked(address);
    if (region != NULL && region->kind == REGION_RESERVED) {
        const struct pya_hc_page *page = &region->pages[(address - region->start) / PYA_HC_PAGE];
        if (page->handle != NULL) {
            unsigned bit = 1u << location->id;
            *flags = (page->writers & bit) != 0 ? 3 : (page->readers & bit) != 0;
            error = CU_OK;
        }
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_prop(uint64_t id, struct cuda_vmm_prop *out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct pya_hc_handle *handle = handle_find(id);
    if (handle != NULL) {
        *out = handle->prop;
    }
    pya_hc_unlock();
    return handle == NULL ? CU_INVALID_VALUE : CU_OK;
}

int
pya_hc_vmm_export(uint64_t id, int type, int *out) {
    int error = CU_INVALID_VALUE;
    if (out == NULL || type != HANDLE_POSIX_FD) {
        return CU_NOT_SUPPORTED;
    }
    pya_hc_lock();
    struct pya_hc_handle *handle = handle_find(id);
    if (handle != NULL && handle->fd < 0 && (handle->prop.handle_types & type) != 0) {
        error = pya_hc_physical_export(handle->device, handle->offset, handle->size, out);
        handle->is_exported = handle->is_exported || error == CU_OK;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_import(int fd, int type, uint64_t *out) {
    struct pya_hc_import found;
    if (out == NULL || type != HANDLE_POSIX_FD) {
        return CU_NOT_SUPPORTED;
    }
    pya_hc_lock();
    int error = pya_hc_physical_import_locked(fd, &found);
    struct pya_hc_handle *handle = error == CU_OK ? handle_new() : NULL;
    if (error == CU_OK && handle == NULL) {
        pya_hc_physical_forget_locked(found.fd);
        error = CU_OUT_OF_MEMORY;
    } else if (error == CU_OK) {
        handle_fill(handle, found.device, found.fd, found.offset, found.bytes);
        handle->prop = (struct cuda_vmm_prop){
            .type = 1, .handle_types = type, .location = {.type = 1, .id = found.device}};
        *out = handle_id(handle);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_vmm_range_locked(
    const struct pya_hc_region *region, uintptr_t address, uintptr_t *base, size_t *size) {
    size_t i = (address - region->start) / PYA_HC_PAGE;
    const struct pya_hc_page *page = &region->pages[i];
    if (page->handle == NULL) {
        return CU_INVALID_VALUE;
    }
    *base = region->start + (i - page->index) * PYA_HC_PAGE;
    *size = page->handle->size;
    return CU_OK;
}
