/* Device memory is a sparse file, and a model's activations are gigabytes that no kernel ever wrote.
 * A plain memcpy would allocate every page of them.  So holes are copied as holes, and large fills with zero become
 * holes. */

#define _GNU_SOURCE
#include "bytes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define SPARSE_LEAST ((size_t)64 << 10)
#define FILE_PAGE ((uint64_t)4096)

static _Atomic uint64_t n_dtoh_copies, n_dtoh_bytes;

static bool
bytes_backing(uintptr_t address, struct pya_hc_backing *out) {
    pya_hc_lock();
    bool found = pya_hc_backing_locked(address, out);
    pya_hc_unlock();
    return found;
}

/* Writes zeros; in device memory whole file pages become holes. */
static void
bytes_zero(char *dst, size_t size, bool is_device) {
    while (size > 0) {
        struct pya_hc_backing at;
        if (!is_device || size < SPARSE_LEAST || !bytes_backing((uintptr_t)dst, &at)) {
            memset(dst, 0, size);
            return;
        }
        size_t part = size < at.run ? size : at.run;
        uint64_t first = (at.offset + FILE_PAGE - 1) & ~(FILE_PAGE - 1);
        uint64_t last = (at.offset + part) & ~(FILE_PAGE - 1);
        int flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        if (last > first && fallocate(at.fd, flags, (off_t)first, (off_t)(last - first)) == 0) {
            memset(dst, 0, first - at.offset);
            memset(dst + (last - at.offset), 0, at.offset + part - last);
        } else {
            memset(dst, 0, part);
        }
        dst += part;
        size -= part;
    }
}

/* Copies from device memory, one run of data or of hole after the other. */
static void
bytes_copy_sparse(char *dst, const char *src, size_t size, bool dst_is_device) {
    while (size > 0) {
        struct pya_hc_backing at;
        if (!bytes_backing((uintptr_t)src, &at)) {
            memmove(dst, src, size);
            return;
        }
        size_t part = size < at.run ? size : at.run;
        off_t data = lseek(at.fd, (off_t)at.offset, SEEK_DATA);
        bool is_hole = data < 0 ? errno == ENXIO : (uint64_t)data > at.offset;
        if (is_hole) {
            uint64_t hole = data < 0 ? part : (uint64_t)data - at.offset;
            part = hole < part ? hole : part;
            bytes_zero(dst, part, dst_is_device);
        } else {
            off_t end = data < 0 ? -1 : lseek(at.fd, data, SEEK_HOLE);
            uint64_t run = end < 0 ? part : (uint64_t)end - at.offset;
            part = run < part ? run : part;
            memmove(dst, src, part);
        }
        dst += part;
        src += part;
        size -= part;
    }
}

static bool
bytes_overlap(const void *a, const void *b, size_t size) {
    uintptr_t x = (uintptr_t)a;
    uintptr_t y = (uintptr_t)b;
    return x < y ? y - x < size : x - y < size;
}

int
pya_hc_bytes_sides(
    const void *dst, const void *src, size_t size, int *dst_device, int *src_device) {
    *dst_device = -1;
    *src_device = -1;
    pya_hc_lock();
    int error = pya_hc_access_locked((uintptr_t)dst, size, true, dst_device);
    if (error == CU_OK) {
        error = pya_hc_access_locked((uintptr_t)src, size, false, src_device);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_bytes_copy(void *dst, const void *src, size_t size) {
    if (size == 0) {
        return CU_OK;
    }
    int dst_device;
    int src_device;
    int error = pya_hc_bytes_sides(dst, src, size, &dst_device, &src_device);
    if (error != CU_OK) {
        return error;
    }
    if (src_device >= 0 && size >= SPARSE_LEAST && !bytes_overlap(dst, src, size)) {
        bytes_copy_sparse(dst, src, size, dst_device >= 0);
    } else {
        memmove(dst, src, size);
    }
    return CU_OK;
}

int
pya_hc_bytes_set(void *dst, int value, unsigned width, size_t count) {
    if (count == 0) {
        return CU_OK;
    }
    size_t size = 0;
    if (__builtin_mul_overflow(count, (size_t)width, &size) || (uintptr_t)dst % width != 0) {
        return CU_INVALID_VALUE;
    }
    int device = -1;
    pya_hc_lock();
    int error = pya_hc_access_locked((uintptr_t)dst, size, true, &device);
    const struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)dst);
    /* Host memory must be known to the device, all of it. */
    bool is_known =
        device >= 0 || (region != NULL && size <= region->start + region->mapped - (uintptr_t)dst);
    pya_hc_unlock();
    if (error != CU_OK || !is_known) {
        return CU_INVALID_VALUE;
    }
    if (value == 0) {
        bytes_zero(dst, size, device >= 0);
    } else if (width == 1) {
        memset(dst, value, size);
    } else {
        for (size_t i = 0; i < count; i++) {
            memcpy((char *)dst + i * width, &value, width);
        }
    }
    return CU_OK;
}

void
pya_hc_bytes_note_dtoh(size_t size) {
    atomic_fetch_add(&n_dtoh_copies, 1);
    atomic_fetch_add(&n_dtoh_bytes, size);
}

uint64_t
pya_hc_bytes_dtoh_copies(void) {
    return atomic_load(&n_dtoh_copies);
}

uint64_t
pya_hc_bytes_dtoh_bytes(void) {
    return atomic_load(&n_dtoh_bytes);
}
