#pragma once
/* Actual copies and fills; untouched memory stays untouched.  Floor 3 (uses region.h). */

#include "region.h"

/* The devices that own the two sides of a copy (-1: host).  CU_INVALID_VALUE if a device side may not be accessed. */
int
pya_hc_bytes_sides(const void *dst, const void *src, size_t size, int *dst_device, int *src_device);
/* Either side may be device or host memory.  CU_INVALID_VALUE if a device side may not be accessed. */
int pya_hc_bytes_copy(void *dst, const void *src, size_t size);
/* width 1, 2 or 4 bytes; count elements; in device memory, or host memory that the device knows. */
int pya_hc_bytes_set(void *dst, int value, unsigned width, size_t count);
/* Counts a copy from device to host. */
void pya_hc_bytes_note_dtoh(size_t size);
uint64_t pya_hc_bytes_dtoh_copies(void);
uint64_t pya_hc_bytes_dtoh_bytes(void);
