#pragma once
/* Virtual memory management: handles of physical memory, reservations of addresses, mappings, access.
 * Floor 2 (uses region.h, physical.h).
 *
 * A handle lives while the program holds it (create, retain) or it is mapped.  A mapped handle that is released keeps its
 * memory until the last unmap, as on a device. */

#include "region.h"

int pya_hc_vmm_reserve(size_t size, size_t align, uintptr_t want, uintptr_t *out);
int pya_hc_vmm_unreserve(uintptr_t start, size_t size);
int pya_hc_vmm_create(size_t size, const struct cuda_vmm_prop *prop, uint64_t *out);
int pya_hc_vmm_release(uint64_t id);
int pya_hc_vmm_retain(uintptr_t address, uint64_t *out);
int pya_hc_vmm_map(uintptr_t start, size_t size, size_t offset, uint64_t id);
int pya_hc_vmm_unmap(uintptr_t start, size_t size);
int pya_hc_vmm_set_access(
    uintptr_t start, size_t size, const struct cuda_access_desc *descs, size_t n_descs);
int pya_hc_vmm_get_access(uintptr_t address, const struct cuda_location *location, uint64_t *flags);
int pya_hc_vmm_prop(uint64_t id, struct cuda_vmm_prop *out);
/* A POSIX file descriptor for a handle that was created as exportable. */
int pya_hc_vmm_export(uint64_t id, int type, int *out);
int pya_hc_vmm_import(int fd, int type, uint64_t *out);

int pya_hc_vmm_range_locked(
    const struct pya_hc_region *region, uintptr_t address, uintptr_t *base, size_t *size);
int pya_hc_handle_fd(const struct pya_hc_handle *handle);
uint64_t pya_hc_handle_offset(const struct pya_hc_handle *handle);
uint64_t pya_hc_vmm_n_handles_locked(void);
uint64_t pya_hc_vmm_n_mappings_locked(void);
