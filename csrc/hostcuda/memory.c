/* cudaMalloc takes whole pages of 2 MiB, as the real driver does for its own bookkeeping, so that the capacity is exhausted
 * when a card's would be.  On a card small allocations share pages.  Here each has its own page, which costs only address
 * space, and they are charged as if they were adjacent. */

#define _GNU_SOURCE
#include "memory.h"

#include "capture.h"
#include "physical.h"
#include "pool.h"
#include "vmm.h"

#include <sys/mman.h>
#include <unistd.h>

#define SMALL_STEP ((size_t)512)
#define SMALL_END (PYA_HC_PAGE / 2)

/* step is a power of two. */
static size_t
memory_round(size_t size, size_t step) {
    return (size + step - 1) & ~(step - 1);
}

static bool
memory_is_small(const struct pya_hc_region *region) {
    return region->kind == REGION_PLAIN && region->size < SMALL_END;
}

static int
memory_take_small(struct pya_hc_device *dev, struct pya_hc_region *region) {
    size_t small = dev->small + memory_round(region->size, SMALL_STEP);
    size_t added = memory_round(small, PYA_HC_PAGE) - memory_round(dev->small, PYA_HC_PAGE);
    int error = pya_hc_charge_locked(dev, added);
    if (error != CU_OK) {
        return error;
    }
    error = pya_hc_physical_place_locked(dev, region->mapped, &region->offset);
    if (error != CU_OK) {
        pya_hc_uncharge_locked(dev, added);
        return error;
    }
    dev->small = small;
    return CU_OK;
}

static void
memory_give_small(struct pya_hc_device *dev, const struct pya_hc_region *region) {
    size_t small = dev->small - memory_round(region->size, SMALL_STEP);
    pya_hc_physical_drop_locked(dev, region->offset, region->mapped);
    pya_hc_uncharge_locked(
        dev, memory_round(dev->small, PYA_HC_PAGE) - memory_round(small, PYA_HC_PAGE));
    dev->small = small;
}

/* Managed memory moves to the device page by page when a kernel touches it, and may exceed the device's capacity.  Our kernels
 * touch nothing, so it is not charged. */
static int
memory_take_managed(struct pya_hc_device *dev, struct pya_hc_region *region) {
    int error = pya_hc_physical_place_locked(dev, region->mapped, &region->offset);
    if (error != CU_OK) {
        return error;
    }
    dev->managed += region->size;
    if (dev->managed > dev->managed_peak) {
        dev->managed_peak = dev->managed;
    }
    return CU_OK;
}

static int
memory_take(struct pya_hc_device *dev, struct pya_hc_region *region) {
    if (memory_is_small(region)) {
        return memory_take_small(dev, region);
    }
    return region->kind == REGION_MANAGED
               ? memory_take_managed(dev, region)
               : pya_hc_physical_take_locked(dev, region->mapped, &region->offset);
}

static void
memory_give(const struct pya_hc_region *region) {
    struct pya_hc_device *dev = pya_hc_device(region->device);
    if (memory_is_small(region)) {
        memory_give_small(dev, region);
    } else if (region->kind == REGION_MANAGED) {
        dev->managed -= region->size;
        pya_hc_physical_drop_locked(dev, region->offset, region->mapped);
    } else {
        pya_hc_physical_give_locked(dev, region->offset, region->mapped);
    }
}

int
pya_hc_memory_alloc_locked(
    struct pya_hc_device *dev, enum pya_hc_region_kind kind, size_t size,
    struct pya_hc_region **out) {
    size_t mapped = memory_round(size, PYA_HC_PAGE);
    if (mapped < size) {
        return CU_OUT_OF_MEMORY;
    }
    struct pya_hc_region region = {
        .size = size, .mapped = mapped, .kind = kind, .device = dev->ordinal, .fd = -1};
    int error = memory_take(dev, &region);
    if (error != CU_OK) {
        return error;
    }
    error = pya_hc_address_take_locked(mapped, PYA_HC_PAGE, 0, &region.start);
    if (error != CU_OK) {
        goto give_physical;
    }
    error =
        pya_hc_physical_map(dev->fd, region.offset, region.start, mapped, PROT_READ | PROT_WRITE);
    if (error != CU_OK) {
        goto give_address;
    }
    error = pya_hc_region_insert_locked(&region, out);
    if (error != CU_OK) {
        goto give_address;
    }
    return CU_OK;

give_address:
    pya_hc_address_give_locked(region.start, mapped);
give_physical:
    memory_give(&region);
    return error;
}

void
pya_hc_memory_free_locked(struct pya_hc_region *region) {
    pya_hc_address_give_locked(region->start, region->mapped);
    memory_give(region);
    pya_hc_region_remove_locked(region);
}

int
pya_hc_memory_alloc(enum pya_hc_region_kind kind, size_t size, void **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    if (size == 0) {
        *out = NULL;
        return CU_OK;
    }
    pya_hc_lock();
    struct pya_hc_region *region = NULL;
    error = pya_hc_memory_alloc_locked(dev, kind, size, &region);
    if (error == CU_OK) {
        *out = (void *)region->start;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_memory_free(void *ptr) {
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK || ptr == NULL) {
        return error;
    }
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    if (region != NULL && region->kind == REGION_CHUNK) {
        error = pya_hc_pool_free_locked(region->owner, (uintptr_t)ptr);
    } else if (
        region == NULL || region->start != (uintptr_t)ptr ||
        (region->kind != REGION_PLAIN && region->kind != REGION_MANAGED)) {
        error = CU_INVALID_VALUE;
    } else {
        pya_hc_memory_free_locked(region);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_memory_check_managed(const void *ptr, size_t size) {
    pya_hc_lock();
    const struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    bool is_managed = region != NULL && region->kind == REGION_MANAGED &&
                      size <= region->start + region->mapped - (uintptr_t)ptr;
    pya_hc_unlock();
    return is_managed ? CU_OK : CU_INVALID_VALUE;
}

int
pya_hc_pinned_alloc(size_t size, void **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    if (size == 0) {
        *out = NULL;
        return CU_OK;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t mapped = (size + page - 1) & ~(page - 1);
    if (mapped < size) {
        return CU_OUT_OF_MEMORY;
    }
    void *at = mmap(
        NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return CU_OUT_OF_MEMORY;
    }
    struct pya_hc_region region = {
        .start = (uintptr_t)at, .size = size, .mapped = mapped, .kind = REGION_PINNED, .fd = -1};
    struct pya_hc_device *dev = pya_hc_current_device();
    region.device = dev == NULL ? 0 : dev->ordinal;
    pya_hc_lock();
    error = pya_hc_region_insert_locked(&region, NULL);
    pya_hc_unlock();
    if (error != CU_OK) {
        (void)munmap(at, mapped);
        return error;
    }
    *out = at;
    return CU_OK;
}

static void
host_forget_locked(struct pya_hc_region *region) {
    if (region->kind == REGION_PINNED) {
        (void)munmap((void *)region->start, region->mapped);
    }
    pya_hc_region_remove_locked(region);
}

static int
host_forget(void *ptr, enum pya_hc_region_kind kind, int error_if_unknown) {
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    if (region == NULL || region->start != (uintptr_t)ptr || region->kind != kind) {
        error = error_if_unknown;
    } else {
        host_forget_locked(region);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_pinned_free(void *ptr) {
    return ptr == NULL ? CU_OK : host_forget(ptr, REGION_PINNED, CU_INVALID_VALUE);
}

int
pya_hc_host_register(void *ptr, size_t size) {
    if (ptr == NULL || size == 0 || size > UINTPTR_MAX - (uintptr_t)ptr) {
        return CU_INVALID_VALUE;
    }
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    struct pya_hc_region region = {
        .start = (uintptr_t)ptr, .size = size, .mapped = size, .kind = REGION_REGISTERED, .fd = -1};
    struct pya_hc_device *dev = pya_hc_current_device();
    region.device = dev == NULL ? 0 : dev->ordinal;
    pya_hc_lock();
    if (pya_hc_region_meets_locked(region.start, size)) {
        error = CU_HOST_ALREADY_REGISTERED;
    } else {
        error = pya_hc_region_insert_locked(&region, NULL);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_host_unregister(void *ptr) {
    return host_forget(ptr, REGION_REGISTERED, CU_HOST_NOT_REGISTERED);
}

void
pya_hc_memory_reset_locked(int device) {
    const unsigned on_device = 1u << REGION_PLAIN | 1u << REGION_MANAGED;
    const unsigned on_host = 1u << REGION_PINNED | 1u << REGION_REGISTERED;
    struct pya_hc_region *region;
    while ((region = pya_hc_region_of_locked(device, on_device)) != NULL) {
        pya_hc_memory_free_locked(region);
    }
    while ((region = pya_hc_region_of_locked(device, on_host)) != NULL) {
        host_forget_locked(region);
    }
}

int
pya_hc_memory_info(size_t *free_bytes, size_t *total_bytes) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    if (free_bytes == NULL || total_bytes == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    *free_bytes = pya_hc_free_locked(dev);
    *total_bytes = dev->capacity;
    pya_hc_unlock();
    return CU_OK;
}

int
pya_hc_memory_range(uintptr_t address, uintptr_t *base, size_t *size) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked(address);
    if (region == NULL) {
        error = CU_INVALID_VALUE;
    } else if (region->kind == REGION_RESERVED) {
        error = pya_hc_vmm_range_locked(region, address, base, size);
    } else if (region->kind == REGION_CHUNK) {
        error = pya_hc_pool_range_locked(region->owner, address, base, size);
    } else {
        *base = region->start;
        *size = region->size;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_memory_describe(const void *ptr, struct cuda_pointer_attributes *out) {
    *out = (struct cuda_pointer_attributes){.device = -2, .host_pointer = (void *)(uintptr_t)ptr};
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    if (region != NULL) {
        out->device = region->device;
        out->device_pointer = (void *)(uintptr_t)ptr;
        out->type = pya_hc_region_is_device(region) ? 2 : 1;
        if (region->kind == REGION_MANAGED) {
            out->type = 3;
        } else if (out->type == 2) {
            out->host_pointer = NULL;
        }
    }
    pya_hc_unlock();
    return CU_OK;
}

int
pya_hc_host_device_pointer(void *ptr, unsigned flags, void **out) {
    struct cuda_pointer_attributes what;
    int error = pya_hc_memory_describe(ptr, &what);
    if (error != CU_OK || out == NULL || flags != 0 || what.type != 1) {
        return error != CU_OK ? error : CU_INVALID_VALUE;
    }
    *out = ptr;
    return CU_OK;
}
