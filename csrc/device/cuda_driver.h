/* The CUDA driver, opened at run time: the few types and functions that we need, declared by ourselves.  Floor 1,
 * private.
 *
 * Names and numbers are the driver's binary interface.  CUDA's headers are not needed to build. */
#pragma once

#include "../core/base.h"

typedef int cuda_result;
typedef int cuda_device;
typedef struct cuda_context_body *cuda_context;
typedef void *cuda_stream;
typedef struct cuda_event_body *cuda_event;

enum {
    CUDA_OK = 0,
    CUDA_NOMEM = 2,
    CUDA_NOT_INITIALIZED = 3,
    CUDA_DEINITIALIZED = 4,
    CUDA_INVALID_HANDLE = 400,
    CUDA_NOT_READY = 600,
    CUDA_NOT_SUPPORTED = 801,
    CUDA_ECC_ERROR = 214,
    CUDA_NVLINK_ERROR = 220,
    CUDA_CONTAINED = 226, /* a hardware error that does not affect other processes */
    CUDA_ILLEGAL_ADDRESS = 700,
    CUDA_LAUNCH_TIMEOUT = 702,
    CUDA_CONTEXT_IS_DESTROYED = 709, /* some drivers return this for a destroyed stream */
    CUDA_DEVICE_ASSERT = 710,
    /* stack, instruction, alignment, address space, program counter, launch */
    CUDA_BROKEN_FIRST = 714,
    CUDA_BROKEN_LAST = 719,
    CUDA_TENSOR_MEMORY_LEAK = 721,
    CUDA_MPS_CLIENT_TERMINATED = 810,
    CUDA_CAPTURE_FIRST = 900, /* stream capture errors are 900 .. 908 */
    CUDA_CAPTURE_IMPLICIT = 906,
    CUDA_CAPTURE_LAST = 908,
};

enum {
    CUDA_ATTRIBUTE_VMM = 102,
    CUDA_ATTRIBUTE_POSIX_FD = 103,
    CUDA_ATTRIBUTE_RDMA_WITH_VMM = 110,
    CUDA_EVENT_DISABLE_TIMING = 2,
    CUDA_CAPTURE_MODE_RELAXED = 2,
    CUDA_ALLOCATION_PINNED = 1,
    CUDA_HANDLE_POSIX_FD = 1,
    CUDA_LOCATION_DEVICE = 1,
    CUDA_ACCESS_READ_WRITE = 3,
};

struct cuda_location {
    int type;
    int id;
};

struct cuda_allocation_prop {
    int type;
    int requested_handle_types;
    struct cuda_location location;
    void *win32_meta_data;
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct cuda_access_desc {
    struct cuda_location location;
    int flags;
};

/* group, name for cuGetProcAddress, exported name, parameters.
 * Groups: BASE: required, otherwise there is no device; VMM: virtual memory; EXTRA: each caller copes without it. */
#define CUDA_DRIVER_TABLE(X)                                                                       \
    X(BASE, cuInit, cuInit, (unsigned))                                                            \
    X(BASE, cuDeviceGet, cuDeviceGet, (cuda_device *, int))                                        \
    X(BASE, cuDeviceGetCount, cuDeviceGetCount, (int *))                                           \
    X(BASE, cuDeviceGetAttribute, cuDeviceGetAttribute, (int *, int, cuda_device))                 \
    X(BASE, cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *, cuda_device))                        \
    X(BASE, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (cuda_context *, cuda_device))     \
    X(BASE, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (cuda_device))                \
    X(BASE, cuCtxGetCurrent, cuCtxGetCurrent, (cuda_context *))                                    \
    X(BASE, cuCtxPushCurrent, cuCtxPushCurrent_v2, (cuda_context))                                 \
    X(BASE, cuCtxPopCurrent, cuCtxPopCurrent_v2, (cuda_context *))                                 \
    X(BASE, cuCtxSynchronize, cuCtxSynchronize, (void))                                            \
    X(BASE, cuMemAlloc, cuMemAlloc_v2, (pya_dptr *, size_t))                                       \
    X(BASE, cuMemFree, cuMemFree_v2, (pya_dptr))                                                   \
    X(BASE, cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *))                                   \
    X(BASE, cuEventCreate, cuEventCreate, (cuda_event *, unsigned))                                \
    X(BASE, cuEventRecord, cuEventRecord, (cuda_event, cuda_stream))                               \
    X(BASE, cuEventQuery, cuEventQuery, (cuda_event))                                              \
    X(BASE, cuEventSynchronize, cuEventSynchronize, (cuda_event))                                  \
    X(BASE, cuEventDestroy, cuEventDestroy_v2, (cuda_event))                                       \
    X(BASE, cuStreamSynchronize, cuStreamSynchronize, (cuda_stream))                               \
    X(VMM, cuMemCreate, cuMemCreate,                                                               \
      (uint64_t *, size_t, const struct cuda_allocation_prop *, unsigned long long))               \
    X(VMM, cuMemRelease, cuMemRelease, (uint64_t))                                                 \
    X(VMM, cuMemAddressReserve, cuMemAddressReserve,                                               \
      (pya_dptr *, size_t, size_t, pya_dptr, unsigned long long))                                  \
    X(VMM, cuMemAddressFree, cuMemAddressFree, (pya_dptr, size_t))                                 \
    X(VMM, cuMemMap, cuMemMap, (pya_dptr, size_t, size_t, uint64_t, unsigned long long))           \
    X(VMM, cuMemUnmap, cuMemUnmap, (pya_dptr, size_t))                                             \
    X(VMM, cuMemSetAccess, cuMemSetAccess,                                                         \
      (pya_dptr, size_t, const struct cuda_access_desc *, size_t))                                 \
    X(VMM, cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                           \
      (size_t *, const struct cuda_allocation_prop *, int))                                        \
    X(EXTRA, cuMemExportToShareableHandle, cuMemExportToShareableHandle,                           \
      (void *, uint64_t, int, unsigned long long))                                                 \
    X(EXTRA, cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                       \
      (uint64_t *, void *, int))                                                                   \
    X(EXTRA, cuStreamGetCtx, cuStreamGetCtx, (cuda_stream, cuda_context *))                        \
    X(EXTRA, cuStreamIsCapturing, cuStreamIsCapturing, (cuda_stream, int *))                       \
    X(EXTRA, cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *))        \
    X(EXTRA, cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int *, cuda_device, cuda_device))      \
    X(EXTRA, cuGetErrorString, cuGetErrorString, (cuda_result, const char **))

/* A pointer is NULL if the driver lacks the function. */
struct cuda_driver {
#define X(group, name, symbol, parameters) cuda_result(*name) parameters;
    CUDA_DRIVER_TABLE(X)
#undef X
    bool has_base;  /* every BASE function exists and cuInit worked */
    bool has_vmm;   /* every VMM function exists */
    bool is_forked; /* set in a forked child: the driver does not survive a fork */
    int init_result;
    char why_not[160]; /* if !has_base: what is missing */
};

/* Tests whether pages made with prop can be mapped at two addresses, made accessible and unmapped.  The device's
 * context exists. */
cuda_result
cuda_probe_pages(const struct cuda_driver *driver, const struct cuda_allocation_prop *prop);

/* Opens the driver at the first call.  Never NULL.  Thread-safe. */
const struct cuda_driver *cuda_driver_get(void);
