#pragma once
/* Plain device memory, and host memory known to the device.  Floor 4 (uses region.h, physical.h). */

#include "region.h"

/* Size 0 gives NULL and CU_OK, as cudaMalloc does. */
int pya_hc_memory_alloc(enum pya_hc_region_kind kind, size_t size, void **out);
int pya_hc_memory_free(void *ptr);
/* The same with the lock held and for a given device; for pools. */
int pya_hc_memory_alloc_locked(
    struct pya_hc_device *dev, enum pya_hc_region_kind kind, size_t size,
    struct pya_hc_region **out);
void pya_hc_memory_free_locked(struct pya_hc_region *region);

/* CU_INVALID_VALUE unless the whole range is managed memory. */
int pya_hc_memory_check_managed(const void *ptr, size_t size);

int pya_hc_pinned_alloc(size_t size, void **out);
int pya_hc_pinned_free(void *ptr);
int pya_hc_host_register(void *ptr, size_t size);
int pya_hc_host_unregister(void *ptr);

/* Frees the device's plain and managed memory and its pinned memory, and ends its registrations. */
void pya_hc_memory_reset_locked(int device);

int pya_hc_memory_info(size_t *free_bytes, size_t *total_bytes);
/* Base and size of the allocation at the address; in a reservation, those of the mapped handle. */
int pya_hc_memory_range(uintptr_t address, uintptr_t *base, size_t *size);
/* Like cudaPointerGetAttributes; type 0 for unknown memory. */
int pya_hc_memory_describe(const void *ptr, struct cuda_pointer_attributes *out);
/* The device's address of pinned or registered memory; flags: 0. */
int pya_hc_host_device_pointer(void *ptr, unsigned flags, void **out);
