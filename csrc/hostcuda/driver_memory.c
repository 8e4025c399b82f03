/* libcuda.so.1: memory. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#include "call.h"
#include "copy.h"
#include "ipc.h"
#include "memory.h"
#include "pool.h"
#include "vmm.h"

#include <string.h>

enum { GRANULARITY_MINIMUM = 0, GRANULARITY_RECOMMENDED = 1 };

int
cuMemAlloc_v2(uintptr_t *out, size_t size) {
    HC_CONTEXT_TIMED();
    if (size == 0) {
        return CU_INVALID_VALUE; /* unlike cudaMalloc */
    }
    void *at = NULL;
    int error = pya_hc_memory_alloc(REGION_PLAIN, size, &at);
    if (error == CU_OK) {
        *out = (uintptr_t)at;
    }
    return error;
}

int
cuMemFree_v2(uintptr_t address) {
    HC_CONTEXT_TIMED();
    return pya_hc_memory_free((void *)address);
}

int
cuMemAllocManaged(uintptr_t *out, size_t size, unsigned flags) {
    HC_CONTEXT_TIMED();
    (void)flags;
    void *at = NULL;
    int error = size == 0 ? CU_INVALID_VALUE : pya_hc_memory_alloc(REGION_MANAGED, size, &at);
    if (error == CU_OK) {
        *out = (uintptr_t)at;
    }
    return error;
}

int
cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    HC_CONTEXT_TIMED();
    return pya_hc_memory_info(free_bytes, total_bytes);
}

int
cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t address) {
    HC_DRIVER();
    uintptr_t found = 0;
    size_t bytes = 0;
    int error = pya_hc_memory_range(address, &found, &bytes);
    if (error == CU_OK && base != NULL) {
        *base = found;
    }
    if (error == CU_OK && size != NULL) {
        *size = bytes;
    }
    return error;
}

int
cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    HC_CONTEXT_TIMED();
    (void)flags;
    return pya_hc_pinned_alloc(size, out);
}

int
cuMemAllocHost_v2(void **out, size_t size) {
    HC_CONTEXT_TIMED();
    return pya_hc_pinned_alloc(size, out);
}

int
cuMemFreeHost(void *ptr) {
    HC_CONTEXT_TIMED();
    return pya_hc_pinned_free(ptr);
}

int
cuMemHostRegister_v2(void *ptr, size_t size, unsigned flags) {
    HC_CONTEXT_TIMED();
    (void)flags;
    return pya_hc_host_register(ptr, size);
}

int
cuMemHostUnregister(void *ptr) {
    HC_CONTEXT_TIMED();
    return pya_hc_host_unregister(ptr);
}

int
cuMemHostGetDevicePointer_v2(uintptr_t *out, void *ptr, unsigned flags) {
    HC_DRIVER();
    return pya_hc_host_device_pointer(ptr, flags, (void **)out);
}

/* Virtual memory management */

int
cuMemGetAllocationGranularity(size_t *out, const struct cuda_vmm_prop *prop, int option) {
    HC_DRIVER_TIMED();
    if (out == NULL || prop == NULL || option < GRANULARITY_MINIMUM ||
        option > GRANULARITY_RECOMMENDED) {
        return CU_INVALID_VALUE;
    }
    *out = PYA_HC_PAGE;
    return CU_OK;
}

int
cuMemAddressReserve(
    uintptr_t *out, size_t size, size_t align, uintptr_t want, unsigned long long flags) {
    HC_DRIVER_TIMED();
    return flags != 0 ? CU_INVALID_VALUE : pya_hc_vmm_reserve(size, align, want, out);
}

int
cuMemAddressFree(uintptr_t start, size_t size) {
    HC_DRIVER_TIMED();
    return pya_hc_vmm_unreserve(start, size);
}

int
cuMemCreate(
    uint64_t *out, size_t size, const struct cuda_vmm_prop *prop, unsigned long long flags) {
    HC_DRIVER_TIMED();
    return flags != 0 ? CU_INVALID_VALUE : pya_hc_vmm_create(size, prop, out);
}

int
cuMemRelease(uint64_t handle) {
    HC_DRIVER_TIMED();
    return pya_hc_vmm_release(handle);
}

int
cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
    HC_DRIVER();
    return flags != 0 ? CU_INVALID_VALUE : pya_hc_vmm_export(handle, type, out);
}

int
cuMemImportFromShareableHandle(uint64_t *out, void *shared, int type) {
    HC_DRIVER();
    return pya_hc_vmm_import((int)(intptr_t)shared, type, out);
}

int
cuMemRetainAllocationHandle(uint64_t *out, void *address) {
    HC_DRIVER_TIMED();
    return out == NULL ? CU_INVALID_VALUE : pya_hc_vmm_retain((uintptr_t)address, out);
}

int
cuMemMap(uintptr_t start, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    HC_DRIVER_TIMED();
    return flags != 0 ? CU_INVALID_VALUE : pya_hc_vmm_map(start, size, offset, handle);
}

int
cuMemUnmap(uintptr_t start, size_t size) {
    HC_DRIVER_TIMED();
    return pya_hc_vmm_unmap(start, size);
}

int
cuMemSetAccess(uintptr_t start, size_t size, const struct cuda_access_desc *descs, size_t n_descs) {
    HC_DRIVER_TIMED();
    return pya_hc_vmm_set_access(start, size, descs, n_descs);
}

int
cuMemGetAccess(unsigned long long *flags, const struct cuda_location *location, uintptr_t address) {
    HC_DRIVER_TIMED();
    uint64_t found = 0;
    int error = pya_hc_vmm_get_access(address, location, &found);
    if (error == CU_OK) {
        *flags = found;
    }
    return error;
}

int
cuMemGetAllocationPropertiesFromHandle(struct cuda_vmm_prop *out, uint64_t handle) {
    HC_DRIVER();
    return pya_hc_vmm_prop(handle, out);
}

/* Pools */

int
cuMemAllocAsync(uintptr_t *out, size_t size, void *stream) {
    HC_STREAM_TIMED(stream);
    void *at = NULL;
    int error = size == 0 ? CU_INVALID_VALUE : pya_hc_pool_alloc(NULL, size, stream, &at);
    if (error == CU_OK) {
        *out = (uintptr_t)at;
    }
    return error;
}

int
cuMemFreeAsync(uintptr_t address, void *stream) {
    HC_STREAM_TIMED(stream);
    return pya_hc_pool_free((void *)address, stream);
}

int
cuDeviceGetDefaultMemPool(struct pya_hc_pool **out, int device) {
    HC_DRIVER();
    return pya_hc_pool_default(device, out);
}

int
cuDeviceGetMemPool(struct pya_hc_pool **out, int device) {
    HC_DRIVER();
    return pya_hc_pool_current(device, out);
}

int
cuMemPoolGetAttribute(struct pya_hc_pool *pool, int attribute, void *value) {
    HC_DRIVER();
    return pya_hc_pool_get(pool, attribute, value);
}

int
cuMemPoolSetAttribute(struct pya_hc_pool *pool, int attribute, void *value) {
    HC_DRIVER();
    return pya_hc_pool_set(pool, attribute, value);
}

int
cuMemPoolTrimTo(struct pya_hc_pool *pool, size_t keep) {
    HC_DRIVER_TIMED();
    return pya_hc_pool_trim(pool, keep);
}

/* Pointer attributes */

enum {
    POINTER_CONTEXT = 1,
    POINTER_MEMORY_TYPE = 2,
    POINTER_DEVICE_POINTER = 3,
    POINTER_HOST_POINTER = 4,
    POINTER_BUFFER_ID = 7,
    POINTER_IS_MANAGED = 8,
    POINTER_DEVICE_ORDINAL = 9,
    POINTER_IPC_CAPABLE = 10,
    POINTER_RANGE_START = 11,
    POINTER_RANGE_SIZE = 12,
    POINTER_MAPPED = 13,
};

/* Size of an attribute's value; 0 if it is unknown. */
static size_t
pointer_attribute_bytes(int attribute) {
    static const unsigned char bytes[] = {
        [POINTER_CONTEXT] = 8,        [POINTER_MEMORY_TYPE] = 4, [POINTER_DEVICE_POINTER] = 8,
        [POINTER_HOST_POINTER] = 8,   [POINTER_BUFFER_ID] = 8,   [POINTER_IS_MANAGED] = 4,
        [POINTER_DEVICE_ORDINAL] = 4, [POINTER_IPC_CAPABLE] = 1, [POINTER_RANGE_START] = 8,
        [POINTER_RANGE_SIZE] = 8,     [POINTER_MAPPED] = 1,
    };
    return attribute >= 0 && (size_t)attribute < sizeof bytes ? bytes[attribute] : 0;
}

/* Leaves 0 if the address has no such attribute. */
static int
pointer_attribute(uint64_t *value, int attribute, uintptr_t address) {
    struct cuda_pointer_attributes what;
    *value = 0;
    int error = pya_hc_memory_describe((const void *)address, &what);
    if (error != CU_OK || what.type == 0) {
        /* Triton asks this of every tensor and passes host memory on as it is. */
        *value = attribute == POINTER_DEVICE_POINTER && error == CU_OK ? address : 0;
        return CU_INVALID_VALUE;
    }
    uintptr_t base = 0;
    size_t size = 0;
    switch (attribute) {
    case POINTER_CONTEXT:
        *value = (uintptr_t)pya_hc_device(what.device);
        return CU_OK;
    case POINTER_MEMORY_TYPE:
        *value = what.type == 1 ? 1 : 2;
        return CU_OK;
    case POINTER_HOST_POINTER:
        if (what.type == 2) {
            return CU_INVALID_VALUE;
        }
        *value = address;
        return CU_OK;
    case POINTER_DEVICE_POINTER:
    case POINTER_BUFFER_ID:
        *value = address;
        return CU_OK;
    case POINTER_IS_MANAGED:
        *value = what.type == 3;
        return CU_OK;
    case POINTER_DEVICE_ORDINAL:
        *value = (unsigned)what.device;
        return CU_OK;
    case POINTER_IPC_CAPABLE:
        *value = pya_hc_ipc_can_export((const void *)address);
        return CU_OK;
    case POINTER_RANGE_START:
    case POINTER_RANGE_SIZE:
        error = pya_hc_memory_range(address, &base, &size);
        *value = attribute == POINTER_RANGE_START ? base : size;
        return error;
    case POINTER_MAPPED:
        *value = 1;
        return CU_OK;
    default:
        return CU_NOT_SUPPORTED;
    }
}

int
cuPointerGetAttribute(void *out, int attribute, uintptr_t address) {
    HC_DRIVER();
    uint64_t value = 0;
    int error = out == NULL ? CU_INVALID_VALUE : pointer_attribute(&value, attribute, address);
    if (error == CU_OK || value != 0) {
        memcpy(out, &value, pointer_attribute_bytes(attribute));
    }
    return error;
}

int
cuPointerGetAttributes(unsigned n, const int *attributes, void **out, uintptr_t address) {
    HC_DRIVER();
    for (unsigned i = 0; i < n; i++) {
        /* This form does not fail for unknown pointers: it returns zeros. */
        uint64_t value = 0;
        if (pointer_attribute(&value, attributes[i], address) != CU_OK) {
            value = 0;
        }
        memcpy(out[i], &value, pointer_attribute_bytes(attributes[i]));
    }
    return CU_OK;
}

/* Copies and fills */

int
cuMemcpyHtoD_v2(uintptr_t dst, const void *src, size_t size) {
    HC_CONTEXT();
    return pya_hc_copy((void *)dst, src, size, COPY_H2D, NULL, true);
}

int
cuMemcpyDtoH_v2(void *dst, uintptr_t src, size_t size) {
    HC_CONTEXT();
    return pya_hc_copy(dst, (const void *)src, size, COPY_D2H, NULL, true);
}

int
cuMemcpyDtoD_v2(uintptr_t dst, uintptr_t src, size_t size) {
    HC_CONTEXT();
    return pya_hc_copy((void *)dst, (const void *)src, size, COPY_D2D, NULL, false);
}

int
cuMemcpy(uintptr_t dst, uintptr_t src, size_t size) {
    HC_CONTEXT();
    return pya_hc_copy((void *)dst, (const void *)src, size, COPY_DEFAULT, NULL, true);
}

int
cuMemcpyAsync(uintptr_t dst, uintptr_t src, size_t size, void *stream) {
    HC_STREAM(stream);
    return pya_hc_copy((void *)dst, (const void *)src, size, COPY_DEFAULT, stream, false);
}

int
cuMemcpyHtoDAsync_v2(uintptr_t dst, const void *src, size_t size, void *stream) {
    HC_STREAM(stream);
    return pya_hc_copy((void *)dst, src, size, COPY_H2D, stream, false);
}

int
cuMemcpyDtoHAsync_v2(void *dst, uintptr_t src, size_t size, void *stream) {
    HC_STREAM(stream);
    return pya_hc_copy(dst, (const void *)src, size, COPY_D2H, stream, false);
}

int
cuMemcpyDtoDAsync_v2(uintptr_t dst, uintptr_t src, size_t size, void *stream) {
    HC_STREAM(stream);
    return pya_hc_copy((void *)dst, (const void *)src, size, COPY_D2D, stream, false);
}

int
cuMemsetD8_v2(uintptr_t dst, unsigned char value, size_t n) {
    HC_CONTEXT();
    return pya_hc_fill((void *)dst, value, 1, n, NULL, false);
}

int
cuMemsetD16_v2(uintptr_t dst, unsigned short value, size_t n) {
    HC_CONTEXT();
    return pya_hc_fill((void *)dst, value, 2, n, NULL, false);
}

int
cuMemsetD32_v2(uintptr_t dst, unsigned value, size_t n) {
    HC_CONTEXT();
    return pya_hc_fill((void *)dst, (int)value, 4, n, NULL, false);
}

int
cuMemsetD8Async(uintptr_t dst, unsigned char value, size_t n, void *stream) {
    HC_STREAM(stream);
    return pya_hc_fill((void *)dst, value, 1, n, stream, false);
}

int
cuMemsetD16Async(uintptr_t dst, unsigned short value, size_t n, void *stream) {
    HC_STREAM(stream);
    return pya_hc_fill((void *)dst, value, 2, n, stream, false);
}

int
cuMemsetD32Async(uintptr_t dst, unsigned value, size_t n, void *stream) {
    HC_STREAM(stream);
    return pya_hc_fill((void *)dst, (int)value, 4, n, stream, false);
}

/* One fill per row; width counts elements. */
int
cuMemsetD2D32Async(
    uintptr_t dst, size_t pitch, unsigned value, size_t width, size_t height, void *stream) {
    HC_STREAM(stream);
    int error = CU_OK;
    for (size_t row = 0; row < height && error == CU_OK; row++) {
        error = pya_hc_fill((void *)(dst + row * pitch), (int)value, 4, width, stream, false);
    }
    return error;
}

int
cuIpcGetMemHandle(struct cuda_ipc_handle *out, uintptr_t address) {
    HC_CONTEXT();
    return pya_hc_ipc_export((const void *)address, out);
}

int
cuIpcOpenMemHandle_v2(uintptr_t *out, struct cuda_ipc_handle handle, unsigned flags) {
    HC_CONTEXT();
    (void)flags;
    void *at = NULL;
    int error = pya_hc_ipc_open(&handle, &at);
    if (error == CU_OK) {
        *out = (uintptr_t)at;
    }
    return error;
}

int
cuIpcCloseMemHandle(uintptr_t address) {
    HC_CONTEXT();
    return pya_hc_ipc_close((void *)address);
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
