/* The device table, slot by slot, and how a device is opened. */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_context.h"

/* The driver does not report the size of the address space.  47 bits are available on every x86-64 and arm64 host. */
#define CUDA_ADDRESS_BYTES (UINT64_C(1) << 47)

/* Most slots are one driver call between enter and leave. */
#define CUDA_CALL(dev, name, bytes, ...)                                                           \
    struct cuda_scope scope;                                                                       \
    pya_status status = cuda_enter((dev), &scope);                                                 \
    if (status != PYA_OK) {                                                                        \
        return status;                                                                             \
    }                                                                                              \
    status = cuda_report(#name, scope.cuda->driver->name(__VA_ARGS__), (bytes));                   \
    cuda_leave(&scope)

#define CUDA_FREE_CALL(dev, name, bytes, ...)                                                      \
    struct cuda_scope scope;                                                                       \
    pya_status status;                                                                             \
    if (!cuda_enter_to_free((dev), &scope, &status)) {                                             \
        return status;                                                                             \
    }                                                                                              \
    status = cuda_report(#name, cuda_gently(scope.cuda->driver->name(__VA_ARGS__)), (bytes));      \
    cuda_leave(&scope)

/* ---- plain memory ---- */

static pya_status
cuda_caps(struct pya_device *dev, struct pya_device_caps *out) {
    *out = cuda_from(dev)->caps;
    return PYA_OK;
}

static pya_status
cuda_plain_alloc(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    pya_dptr addr = 0;
    CUDA_CALL(dev, cuMemAlloc, bytes, &addr, bytes);
    if (status == PYA_OK) {
        *out = addr;
    }
    return status;
}

static pya_status
cuda_plain_free(struct pya_device *dev, pya_dptr addr) {
    CUDA_FREE_CALL(dev, cuMemFree, 0, addr);
    return status;
}

static pya_status
cuda_mem_info(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes) {
    size_t free_now = 0;
    size_t total = 0;
    CUDA_CALL(dev, cuMemGetInfo, 0, &free_now, &total);
    if (status == PYA_OK) {
        *free_bytes = free_now;
        *total_bytes = total;
    }
    return status;
}

/* ---- work ---- */

static cuda_stream
cuda_stream_from(pya_stream stream) {
    return (cuda_stream)(uintptr_t)pya_stream_handle(stream);
}

static cuda_event
cuda_event_from(pya_event event) {
    return (cuda_event)(uintptr_t)event;
}

/* The context of a stream.  NULL: the current one, which is the device's or, for a default stream, that of the
 * stream's device. */
static cuda_context
cuda_stream_context(const struct cuda *cuda, pya_stream stream) {
    cuda_context context = NULL;
    if (pya_stream_handle(stream) <= PYA_STREAM_DEFAULT || cuda->driver->cuStreamGetCtx == NULL ||
        cuda->driver->cuStreamGetCtx(cuda_stream_from(stream), &context) != CUDA_OK) {
        return NULL;
    }
    return context == cuda->context ? NULL : context;
}

static pya_status
cuda_event_create(struct pya_device *dev, pya_stream stream, pya_event *out) {
    struct cuda_scope scope;
    pya_status status = cuda_enter_for(dev, stream, &scope);
    if (status != PYA_OK) {
        return status;
    }
    const struct cuda_driver *driver = scope.cuda->driver;
    cuda_event event = NULL;
    cuda_context other = cuda_stream_context(scope.cuda, stream);
    bool is_pushed = other != NULL && driver->cuCtxPushCurrent(other) == CUDA_OK;
    cuda_result result = driver->cuEventCreate(&event, CUDA_EVENT_DISABLE_TIMING);
    if (is_pushed) {
        (void)driver->cuCtxPopCurrent(&other);
    }
    status = cuda_report("cuEventCreate", result, 0);
    cuda_leave(&scope);
    if (status == PYA_OK) {
        *out = (pya_event)(uintptr_t)event;
    }
    return status;
}

static pya_status
cuda_event_record(struct pya_device *dev, pya_event event, pya_stream stream) {
    struct cuda_scope scope;
    pya_status status = cuda_enter_for(dev, stream, &scope);
    if (status != PYA_OK) {
        return status;
    }
    cuda_result result =
        scope.cuda->driver->cuEventRecord(cuda_event_from(event), cuda_stream_from(stream));
    cuda_leave(&scope);
    return cuda_report("cuEventRecord", result, 0);
}

static pya_status
cuda_event_query(struct pya_device *dev, pya_event event, bool *done) {
    struct cuda_scope scope;
    pya_status status = cuda_enter(dev, &scope);
    if (status != PYA_OK) {
        return status;
    }
    cuda_result result = scope.cuda->driver->cuEventQuery(cuda_event_from(event));
    cuda_leave(&scope);
    if (result == CUDA_OK || result == CUDA_NOT_READY) {
        *done = result == CUDA_OK;
        return PYA_OK;
    }
    return cuda_report("cuEventQuery", result, 0);
}

static pya_status
cuda_event_sync(struct pya_device *dev, pya_event event) {
    CUDA_CALL(dev, cuEventSynchronize, 0, cuda_event_from(event));
    return status;
}

static pya_status
cuda_event_destroy(struct pya_device *dev, pya_event event) {
    CUDA_FREE_CALL(dev, cuEventDestroy, 0, cuda_event_from(event));
    return status;
}

static pya_status
cuda_stream_sync(struct pya_device *dev, pya_stream stream) {
    struct cuda_scope scope;
    pya_status status = cuda_enter_for(dev, stream, &scope);
    if (status != PYA_OK) {
        return status;
    }
    cuda_result result = scope.cuda->driver->cuStreamSynchronize(cuda_stream_from(stream));
    cuda_leave(&scope);
    return cuda_report_stream("cuStreamSynchronize", result);
}

static pya_status
cuda_device_sync(struct pya_device *dev) {
    CUDA_CALL(dev, cuCtxSynchronize, 0);
    return status;
}

static pya_status
cuda_is_capturing(struct pya_device *dev, pya_stream stream, bool *out) {
    struct cuda_scope scope;
    pya_status status = cuda_enter_for(dev, stream, &scope);
    if (status != PYA_OK) {
        return status;
    }
    int capture = 0;
    cuda_result result = CUDA_OK;
    if (scope.cuda->driver->cuStreamIsCapturing != NULL) {
        result = scope.cuda->driver->cuStreamIsCapturing(cuda_stream_from(stream), &capture);
    }
    cuda_leave(&scope);
    /* The legacy stream was queried while a blocking stream captures: any call on the legacy stream would end that
     * capture. */
    if (result == CUDA_OK || result == CUDA_CAPTURE_IMPLICIT) {
        *out = result == CUDA_CAPTURE_IMPLICIT || capture != 0;
        return PYA_OK;
    }
    return cuda_report_stream("cuStreamIsCapturing", result);
}

/* ---- virtual memory ---- */

static pya_status
cuda_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out) {
    uint64_t page = 0;
    size_t bytes = n_pages * PYA_PAGE;
    CUDA_CALL(dev, cuMemCreate, bytes, &page, bytes, &scope.cuda->prop, 0);
    if (status == PYA_OK) {
        *out = page;
    }
    return status;
}

static pya_status
cuda_page_release(struct pya_device *dev, pya_page_handle page) {
    CUDA_FREE_CALL(dev, cuMemRelease, 0, page);
    return status;
}

static pya_status
cuda_range_reserve(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    pya_dptr addr = 0;
    CUDA_CALL(dev, cuMemAddressReserve, bytes, &addr, bytes, PYA_PAGE, 0, 0);
    if (status == PYA_OK) {
        *out = addr;
    }
    return status;
}

static pya_status
cuda_range_release(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    CUDA_FREE_CALL(dev, cuMemAddressFree, bytes, addr, bytes);
    return status;
}

static pya_status
cuda_map(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages) {
    size_t bytes = n_pages * PYA_PAGE;
    CUDA_CALL(dev, cuMemMap, bytes, addr, bytes, 0, page, 0);
    return status;
}

static pya_status
cuda_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    CUDA_FREE_CALL(dev, cuMemUnmap, bytes, addr, bytes);
    return status;
}

/* Gives access to the devices whose bits are set. */
static pya_status
cuda_open(struct pya_device *dev, uint64_t who, pya_dptr addr, size_t bytes) {
    struct cuda_access_desc desc[PYA_MAX_DEVICES];
    size_t n = 0;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        if ((who >> i & 1) != 0) {
            desc[n++] = (struct cuda_access_desc){
                .location = {.type = CUDA_LOCATION_DEVICE, .id = i},
                .flags = CUDA_ACCESS_READ_WRITE,
            };
        }
    }
    CUDA_CALL(dev, cuMemSetAccess, bytes, addr, bytes, desc, n);
    if (status != PYA_OK) {
        cuda_note_peers(who & ~(UINT64_C(1) << dev->index));
    }
    return status;
}

static pya_status
cuda_set_access(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    uint64_t peers = __atomic_load_n(&cuda_from(dev)->peers, __ATOMIC_ACQUIRE);
    return cuda_open(dev, peers | UINT64_C(1) << dev->index, addr, bytes);
}

static pya_status
cuda_open_peer(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes) {
    return cuda_open(dev, UINT64_C(1) << peer, addr, bytes);
}

static pya_status
cuda_page_export(struct pya_device *dev, pya_page_handle page, int *fd) {
    struct cuda *cuda = cuda_from(dev);
    int exported = -1;
    if (!cuda->caps.has_export) {
        return PYA_E_NOTSUP;
    }
    CUDA_CALL(dev, cuMemExportToShareableHandle, 0, &exported, page, CUDA_HANDLE_POSIX_FD, 0);
    if (status == PYA_OK) {
        *fd = exported;
    }
    return status;
}

static pya_status
cuda_page_import(struct pya_device *dev, int fd, pya_page_handle *out) {
    uint64_t page = 0;
    if (cuda_from(dev)->driver->cuMemImportFromShareableHandle == NULL) {
        return PYA_E_NOTSUP;
    }
    /* NOLINTNEXTLINE(performance-no-int-to-ptr): how the driver wants it */
    void *shared = (void *)(intptr_t)fd;
    CUDA_CALL(dev, cuMemImportFromShareableHandle, 0, &page, shared, CUDA_HANDLE_POSIX_FD);
    if (status == PYA_OK) {
        *out = page;
    }
    return status;
}

static pya_status
cuda_set_peer(struct pya_device *dev, int peer, bool on) {
    struct cuda *cuda = cuda_from(dev);
    if (peer < 0 || peer >= pya_cuda_count() || peer >= PYA_MAX_DEVICES || peer == dev->index) {
        return PYA_E_INVAL;
    }
    if (!on) {
        __atomic_fetch_and(&cuda->peers, ~(UINT64_C(1) << peer), __ATOMIC_RELEASE);
        return PYA_OK;
    }
    if (cuda->driver->cuDeviceCanAccessPeer == NULL) {
        return cuda_missing("cuDeviceCanAccessPeer");
    }
    cuda_device other = 0;
    int can = 0;
    pya_status status = cuda_report("cuDeviceGet", cuda->driver->cuDeviceGet(&other, peer), 0);
    if (status != PYA_OK) {
        return status;
    }
    cuda_result result = cuda->driver->cuDeviceCanAccessPeer(&can, other, cuda->handle);
    status = cuda_report("cuDeviceCanAccessPeer", result, 0);
    if (status != PYA_OK) {
        return status;
    }
    if (can == 0) {
        return PYA_E_NOTSUP;
    }
    __atomic_fetch_or(&cuda->peers, UINT64_C(1) << peer, __ATOMIC_RELEASE);
    return PYA_OK;
}

static void
cuda_close(struct pya_device *dev) {
    struct cuda *cuda = cuda_from(dev);
    if (!cuda->driver->is_forked) {
        (void)cuda->driver->cuDevicePrimaryCtxRelease(cuda->handle);
    }
    free(cuda);
}

/* The slots that work without virtual memory too.  The others are then NULL and are never called. */
#define CUDA_OPS_PLAIN                                                                             \
    .name = "cuda", .caps = cuda_caps, .plain_alloc = cuda_plain_alloc,                            \
    .plain_free = cuda_plain_free, .event_create = cuda_event_create,                              \
    .event_record = cuda_event_record, .event_query = cuda_event_query,                            \
    .event_sync = cuda_event_sync, .event_destroy = cuda_event_destroy,                            \
    .stream_sync = cuda_stream_sync, .device_sync = cuda_device_sync, .mem_info = cuda_mem_info,   \
    .is_capturing = cuda_is_capturing, .begin = cuda_begin, .end = cuda_end,                       \
    .last_error = cuda_last_error, .close = cuda_close

static const struct pya_device_ops cuda_ops_plain = {CUDA_OPS_PLAIN};

static const struct pya_device_ops cuda_ops = {
    CUDA_OPS_PLAIN,
    .page_create = cuda_page_create,
    .page_release = cuda_page_release,
    .range_reserve = cuda_range_reserve,
    .range_release = cuda_range_release,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .set_access = cuda_set_access,
    .page_export = cuda_page_export,
    .page_import = cuda_page_import,
    .set_peer = cuda_set_peer,
    .open_peer = cuda_open_peer,
};

/* ---- opening ---- */

static int
cuda_attribute(const struct cuda *cuda, int attribute) {
    int value = 0;
    cuda_result result = cuda->driver->cuDeviceGetAttribute(&value, attribute, cuda->handle);
    return result == CUDA_OK ? value : 0;
}

static bool
cuda_can_export(const struct cuda *cuda) {
    return cuda_attribute(cuda, CUDA_ATTRIBUTE_POSIX_FD) != 0 &&
           cuda->driver->cuMemExportToShareableHandle != NULL &&
           cuda->driver->cuMemImportFromShareableHandle != NULL;
}

/* Errors that another way of creating pages would not change: a full card refuses all pages, a broken one
 * everything. */
static bool
cuda_is_no_refusal(cuda_result result) {
    return result == CUDA_OK || result == CUDA_NOMEM || cuda_is_sticky(result);
}

/* A driver usually refuses one of the two properties, rarely both. */
static cuda_result
cuda_probe_each(struct cuda *cuda) {
    const struct cuda_allocation_prop full = cuda->prop;
    cuda_result result = cuda_probe_pages(cuda->driver, &cuda->prop);
    for (int without = 1; without <= 3 && !cuda_is_no_refusal(result); without++) {
        cuda->prop = full;
        if ((without & 1) != 0) {
            cuda->prop.gpu_direct_rdma_capable = 0;
        }
        if ((without & 2) != 0) {
            cuda->prop.requested_handle_types = 0;
        }
        if (memcmp(&cuda->prop, &full, sizeof full) != 0) {
            result = cuda_probe_pages(cuda->driver, &cuda->prop);
        }
    }
    return result;
}

/* Does the device have virtual memory with our page size?  Fills prop. */
static bool
cuda_probe_vmm(struct cuda *cuda) {
    if (!cuda->driver->has_vmm || cuda_attribute(cuda, CUDA_ATTRIBUTE_VMM) == 0) {
        return false;
    }
    cuda->prop = (struct cuda_allocation_prop){
        .type = CUDA_ALLOCATION_PINNED,
        .location = {.type = CUDA_LOCATION_DEVICE, .id = cuda->device.index},
        /* As torch requests: network cards read the memory directly if the device allows it, and other processes can
         * map it. */
        .gpu_direct_rdma_capable = cuda_attribute(cuda, CUDA_ATTRIBUTE_RDMA_WITH_VMM) != 0,
        .requested_handle_types = cuda_can_export(cuda) ? CUDA_HANDLE_POSIX_FD : 0,
    };
    size_t unit = 0;
    cuda_result result = cuda->driver->cuMemGetAllocationGranularity(&unit, &cuda->prop, 0);
    struct cuda_scope scope;
    if (result != CUDA_OK || unit == 0 || PYA_PAGE % unit != 0 ||
        cuda_enter_scope(cuda, &scope) != PYA_OK) {
        return false;
    }
    result = cuda_probe_each(cuda);
    cuda_leave(&scope);
    return cuda_is_no_refusal(result);
}

int
pya_cuda_count(void) {
    const struct cuda_driver *driver = cuda_driver_get();
    int n = 0;
    return driver->has_base && driver->cuDeviceGetCount(&n) == CUDA_OK ? n : 0;
}

const char *
pya_cuda_why_not(void) {
    return cuda_driver_get()->why_not;
}

void
pya_cuda_error(struct pya_device_error *out) {
    cuda_last_error(NULL, out);
}

pya_status
pya_cuda_open(int index, struct pya_device **out) {
    const struct cuda_driver *driver = cuda_driver_get();
    if (!driver->has_base) {
        return cuda_report_no_driver(driver);
    }
    if (driver->is_forked) {
        return PYA_E_FORKED;
    }
    if (index < 0 || index >= PYA_MAX_DEVICES || index >= pya_cuda_count()) {
        return PYA_E_INVAL;
    }
    struct cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    cuda->device.index = index;
    cuda->driver = driver;
    pya_status status = cuda_report("cuDeviceGet", driver->cuDeviceGet(&cuda->handle, index), 0);
    if (status != PYA_OK) {
        goto free_cuda;
    }
    size_t total = 0;
    status = cuda_report("cuDeviceTotalMem", driver->cuDeviceTotalMem(&total, cuda->handle), 0);
    if (status != PYA_OK) {
        goto free_cuda;
    }
    cuda_result result = driver->cuDevicePrimaryCtxRetain(&cuda->context, cuda->handle);
    status = cuda_report("cuDevicePrimaryCtxRetain", result, 0);
    if (status != PYA_OK) {
        goto free_cuda;
    }
    cuda->caps = (struct pya_device_caps){
        .has_vmm = cuda_probe_vmm(cuda),
        .total_bytes = total,
        .address_bytes = CUDA_ADDRESS_BYTES,
    };
    cuda->caps.has_export = cuda->caps.has_vmm && cuda->prop.requested_handle_types != 0;
    cuda->device.ops = cuda->caps.has_vmm ? &cuda_ops : &cuda_ops_plain;
    *out = &cuda->device;
    return PYA_OK;

free_cuda:
    free(cuda);
    return status;
}
