/* libcudart: memory, copies, pools, IPC. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#include "call.h"
#include "copy.h"
#include "ipc.h"
#include "memory.h"
#include "module.h"
#include "pool.h"

#include <string.h>

#define RT(expression) return pya_hc_runtime(expression)

int
cudaMalloc(void **out, size_t size) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_memory_alloc(REGION_PLAIN, size, out));
}

int
cudaMallocManaged(void **out, size_t size, unsigned flags) {
    HC_RUNTIME_TIMED();
    (void)flags;
    RT(size == 0 ? CU_INVALID_VALUE : pya_hc_memory_alloc(REGION_MANAGED, size, out));
}

int
cudaFree(void *ptr) {
    HC_RUNTIME_TIMED();
    (void)pya_hc_current_device(); /* programs create the context with cudaFree(0) */
    RT(pya_hc_memory_free(ptr));
}

int
cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_memory_info(free_bytes, total_bytes));
}

int
cudaHostAlloc(void **out, size_t size, unsigned flags) {
    HC_RUNTIME_TIMED();
    (void)flags;
    RT(pya_hc_pinned_alloc(size, out));
}

int
cudaMallocHost(void **out, size_t size) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pinned_alloc(size, out));
}

int
cudaFreeHost(void *ptr) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pinned_free(ptr));
}

int
cudaHostRegister(void *ptr, size_t size, unsigned flags) {
    HC_RUNTIME_TIMED();
    (void)flags;
    RT(pya_hc_host_register(ptr, size));
}

int
cudaHostUnregister(void *ptr) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_host_unregister(ptr));
}

int
cudaHostGetDevicePointer(void **out, void *ptr, unsigned flags) {
    HC_RUNTIME();
    RT(pya_hc_host_device_pointer(ptr, flags, out));
}

/* Since CUDA 13 the caller's struct has 64 more bytes. */
int
cudaPointerGetAttributes(struct cuda_pointer_attributes *out, const void *ptr) {
    HC_RUNTIME();
    if (out == NULL) {
        RT(CU_INVALID_VALUE);
    }
    if (PYA_CUDART_MAJOR >= 13) {
        memset(out + 1, 0, 8 * sizeof(long));
    }
    RT(pya_hc_memory_describe(ptr, out));
}

/* Where managed memory is placed does not matter here.  CUDA 13's plain names are CUDA 12's _v2 forms. */
#if PYA_CUDART_MAJOR >= 13
#define PLACE_NAME(name) name
#else
#define PLACE_NAME(name) name##_v2
int
cudaMemPrefetchAsync(const void *ptr, size_t size, int device, void *stream) {
    HC_RUNTIME();
    (void)device;
    (void)stream;
    RT(pya_hc_memory_check_managed(ptr, size));
}

int
cudaMemAdvise(const void *ptr, size_t size, int advice, int device) {
    HC_RUNTIME();
    (void)advice;
    (void)device;
    RT(pya_hc_memory_check_managed(ptr, size));
}
#endif

int
PLACE_NAME(cudaMemPrefetchAsync)(
    const void *ptr, size_t size, struct cuda_location place, unsigned flags, void *stream) {
    HC_RUNTIME();
    (void)place;
    (void)flags;
    (void)stream;
    RT(pya_hc_memory_check_managed(ptr, size));
}

int
PLACE_NAME(cudaMemAdvise)(const void *ptr, size_t size, int advice, struct cuda_location place) {
    HC_RUNTIME();
    (void)advice;
    (void)place;
    RT(pya_hc_memory_check_managed(ptr, size));
}

/* Copies and fills */

int
cudaMemcpy(void *dst, const void *src, size_t size, int kind) {
    HC_RUNTIME();
    RT(pya_hc_copy(dst, src, size, kind, NULL, true));
}

int
cudaMemcpyAsync(void *dst, const void *src, size_t size, int kind, void *stream) {
    HC_RUNTIME();
    RT(pya_hc_copy(dst, src, size, kind, stream, false));
}

int
cudaMemcpyPeer(void *dst, int dst_device, const void *src, int src_device, size_t size) {
    HC_RUNTIME();
    (void)dst_device;
    (void)src_device;
    RT(pya_hc_copy(dst, src, size, COPY_PEER, NULL, true));
}

int
cudaMemcpyPeerAsync(
    void *dst, int dst_device, const void *src, int src_device, size_t size, void *stream) {
    HC_RUNTIME();
    (void)dst_device;
    (void)src_device;
    RT(pya_hc_copy(dst, src, size, COPY_PEER, stream, false));
}

int
cudaMemcpy2D(
    void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
    int kind) {
    HC_RUNTIME();
    struct pya_hc_copy2d copy = {dst, dst_pitch, src, src_pitch, width, height};
    RT(pya_hc_copy2d(&copy, kind, NULL, true));
}

int
cudaMemcpy2DAsync(
    void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
    int kind, void *stream) {
    HC_RUNTIME();
    struct pya_hc_copy2d copy = {dst, dst_pitch, src, src_pitch, width, height};
    RT(pya_hc_copy2d(&copy, kind, stream, false));
}

int
cudaMemset(void *dst, int value, size_t size) {
    HC_RUNTIME();
    RT(pya_hc_fill(dst, value, 1, size, NULL, false));
}

int
cudaMemsetAsync(void *dst, int value, size_t size, void *stream) {
    HC_RUNTIME();
    RT(pya_hc_fill(dst, value, 1, size, stream, false));
}

int
cudaMemcpyToSymbol(const void *symbol, const void *src, size_t size, size_t offset, int kind) {
    HC_RUNTIME();
    (void)kind;
    void *at = NULL;
    size_t room = 0;
    int error = pya_hc_variable_address(symbol, &at, &room);
    if (error == CU_OK && (offset > room || room - offset < size)) {
        error = CU_INVALID_VALUE;
    }
    RT(error == CU_OK ? pya_hc_copy((char *)at + offset, src, size, COPY_DEFAULT, NULL, true)
                      : error);
}

int
cudaGetSymbolAddress(void **out, const void *symbol) {
    HC_RUNTIME();
    size_t size = 0;
    RT(pya_hc_variable_address(symbol, out, &size));
}

int
cudaGetSymbolSize(size_t *out, const void *symbol) {
    HC_RUNTIME();
    void *at = NULL;
    RT(pya_hc_variable_address(symbol, &at, out));
}

/* Pools */

int
cudaMallocAsync(void **out, size_t size, void *stream) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pool_alloc(NULL, size, stream, out));
}

int
cudaMallocFromPoolAsync(void **out, size_t size, struct pya_hc_pool *pool, void *stream) {
    HC_RUNTIME_TIMED();
    RT(pool == NULL ? CU_INVALID_VALUE : pya_hc_pool_alloc(pool, size, stream, out));
}

int
cudaFreeAsync(void *ptr, void *stream) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pool_free(ptr, stream));
}

int
cudaDeviceGetDefaultMemPool(struct pya_hc_pool **out, int device) {
    HC_RUNTIME();
    RT(pya_hc_pool_default(device, out));
}

int
cudaDeviceGetMemPool(struct pya_hc_pool **out, int device) {
    HC_RUNTIME();
    RT(pya_hc_pool_current(device, out));
}

int
cudaDeviceSetMemPool(int device, struct pya_hc_pool *pool) {
    HC_RUNTIME();
    RT(pya_hc_pool_set_current(device, pool));
}

int
cudaMemPoolCreate(struct pya_hc_pool **out, const struct cuda_pool_props *props) {
    HC_RUNTIME_TIMED();
    RT(props == NULL ? CU_INVALID_VALUE : pya_hc_pool_create(props->location.id, out));
}

int
cudaMemPoolDestroy(struct pya_hc_pool *pool) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pool_destroy(pool));
}

int
cudaMemPoolGetAttribute(struct pya_hc_pool *pool, int attribute, void *value) {
    HC_RUNTIME();
    RT(pya_hc_pool_get(pool, attribute, value));
}

int
cudaMemPoolSetAttribute(struct pya_hc_pool *pool, int attribute, void *value) {
    HC_RUNTIME();
    RT(pya_hc_pool_set(pool, attribute, value));
}

int
cudaMemPoolTrimTo(struct pya_hc_pool *pool, size_t keep) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_pool_trim(pool, keep));
}

/* Every device can access every pool, since all of it is host memory. */
int
cudaMemPoolSetAccess(struct pya_hc_pool *pool, const struct cuda_access_desc *descs, size_t n) {
    HC_RUNTIME_TIMED();
    (void)pool;
    RT(descs == NULL && n > 0 ? CU_INVALID_VALUE : CU_OK);
}

int
cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
    HC_RUNTIME();
    (void)attribute;
    if (pya_hc_device(device) == NULL) {
        RT(CU_INVALID_DEVICE);
    }
    *(uint64_t *)value = 0; /* here graphs allocate from the device's pool */
    return CU_OK;
}

int
cudaDeviceSetGraphMemAttribute(int device, int attribute, void *value) {
    HC_RUNTIME();
    (void)attribute;
    (void)value;
    RT(pya_hc_device(device) == NULL ? CU_INVALID_DEVICE : CU_OK);
}

/* Other processes */

int
cudaIpcGetMemHandle(struct cuda_ipc_handle *out, void *ptr) {
    HC_RUNTIME();
    RT(pya_hc_ipc_export(ptr, out));
}

int
cudaIpcOpenMemHandle(void **out, struct cuda_ipc_handle handle, unsigned flags) {
    HC_RUNTIME();
    (void)flags;
    RT(pya_hc_ipc_open(&handle, out));
}

int
cudaIpcCloseMemHandle(void *ptr) {
    HC_RUNTIME();
    RT(pya_hc_ipc_close(ptr));
}

/* Work is done when it is submitted, so another process's event is always complete. */
int
cudaIpcGetEventHandle(struct cuda_ipc_handle *out, void *event) {
    HC_RUNTIME();
    (void)event;
    memset(out, 0, sizeof *out);
    return CU_OK;
}

int
cudaIpcOpenEventHandle(void **out, struct cuda_ipc_handle handle) {
    HC_RUNTIME();
    (void)handle;
    RT(pya_hc_event_create(EVENT_INTERPROCESS | EVENT_DISABLE_TIMING, out));
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
