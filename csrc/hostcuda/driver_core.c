/* libcuda.so.1: devices, contexts, modules, kernels, look-up of entry points. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#define _GNU_SOURCE
#include "call.h"
#include "copy.h"
#include "lookup.h"
#include "module.h"
#include "props.h"
#include "reset.h"

#include <stdio.h>
#include <string.h>

#define DRIVER_VERSION 13020
#define MAX_CONTEXTS 64

static _Thread_local int pushed[MAX_CONTEXTS];
static _Thread_local int n_pushed;

int
cuInit(unsigned flags) {
    HC_DRIVER();
    if (flags != 0) {
        return CU_INVALID_VALUE;
    }
    return pya_hc_n_devices() == 0 ? CU_NO_DEVICE : CU_OK;
}

int
cuDriverGetVersion(int *out) {
    HC_QUIET();
    *out = DRIVER_VERSION;
    return CU_OK;
}

int
cuGetErrorString(int error, const char **out) {
    HC_QUIET();
    const char *name;
    return pya_hc_driver_error(error, &name, out) ? CU_OK : CU_INVALID_VALUE;
}

int
cuGetErrorName(int error, const char **out) {
    HC_QUIET();
    const char *text;
    return pya_hc_driver_error(error, out, &text) ? CU_OK : CU_INVALID_VALUE;
}

int
cuDeviceGetCount(int *out) {
    HC_DRIVER();
    *out = pya_hc_n_devices();
    return CU_OK;
}

int
cuDeviceGet(int *out, int ordinal) {
    HC_DRIVER();
    if (pya_hc_device(ordinal) == NULL) {
        return CU_INVALID_DEVICE;
    }
    *out = ordinal;
    return CU_OK;
}

int
cuDeviceGetName(char *out, int length, int device) {
    HC_DRIVER();
    if (pya_hc_device(device) == NULL) {
        return CU_INVALID_DEVICE;
    }
    (void)snprintf(out, (size_t)length, "%s", pya_hc_device_name());
    return CU_OK;
}

int
cuDeviceTotalMem_v2(size_t *out, int device) {
    HC_DRIVER();
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    *out = dev->capacity;
    return CU_OK;
}

int
cuDeviceGetAttribute(int *out, int attribute, int device) {
    HC_DRIVER();
    return pya_hc_attribute(device, attribute, out);
}

int
cuDeviceGetUuid_v2(struct cuda_uuid *out, int device) {
    HC_DRIVER();
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    pya_hc_device_uuid(dev, out);
    return CU_OK;
}

int
cuDeviceGetPCIBusId(char *out, int length, int device) {
    HC_DRIVER();
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    return pya_hc_pci_bus_id(dev, out, length) ? CU_OK : CU_INVALID_VALUE;
}

int
cuDeviceCanAccessPeer(int *out, int device, int peer) {
    HC_DRIVER();
    if (pya_hc_device(device) == NULL || pya_hc_device(peer) == NULL) {
        return CU_INVALID_DEVICE;
    }
    *out = device != peer;
    return CU_OK;
}

/* Nothing is ever logged, so the callback is never called. */
int
cuLogsRegisterCallback(void *callback, void *data, void **out) {
    HC_DRIVER();
    (void)data;
    if (out != NULL) {
        *out = callback;
    }
    return CU_OK;
}

int
cuLogsUnregisterCallback(void *callback) {
    HC_DRIVER();
    (void)callback;
    return CU_OK;
}

/* Contexts: one per device; the handle is the device's address. */

static int
context_device(const void *context) {
    for (int i = 0; i < pya_hc_n_devices(); i++) {
        if (context == pya_hc_device(i)) {
            return i;
        }
    }
    return -1;
}

int
cuDevicePrimaryCtxRetain(void **out, int device) {
    HC_DRIVER();
    struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    dev->active = true;
    *out = dev;
    return CU_OK;
}

int
cuDevicePrimaryCtxRelease_v2(int device) {
    HC_DRIVER();
    return pya_hc_device(device) == NULL ? CU_INVALID_DEVICE : CU_OK;
}

int
cuDevicePrimaryCtxReset_v2(int device) {
    HC_DRIVER();
    return pya_hc_device_reset(device);
}

int
cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    HC_DRIVER();
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    *flags = 0;
    *active = dev->active;
    return CU_OK;
}

int
cuCtxGetCurrent(void **out) {
    HC_DRIVER_TIMED();
    *out = pya_hc_device(pya_hc_current());
    return CU_OK;
}

int
cuCtxSetCurrent(void *context) {
    HC_DRIVER();
    int device = context_device(context);
    if (context != NULL && device < 0) {
        return CU_INVALID_CONTEXT;
    }
    pya_hc_set_current(device);
    return CU_OK;
}

int
cuCtxPushCurrent_v2(void *context) {
    HC_DRIVER_TIMED();
    int device = context_device(context);
    if (device < 0 || n_pushed == MAX_CONTEXTS) {
        return CU_INVALID_CONTEXT;
    }
    pushed[n_pushed++] = pya_hc_current();
    pya_hc_set_current(device);
    return CU_OK;
}

int
cuCtxPopCurrent_v2(void **out) {
    HC_DRIVER_TIMED();
    if (pya_hc_current() < 0) {
        return CU_INVALID_CONTEXT;
    }
    if (out != NULL) {
        *out = pya_hc_device(pya_hc_current());
    }
    pya_hc_set_current(n_pushed > 0 ? pushed[--n_pushed] : -1);
    return CU_OK;
}

int
cuCtxGetDevice(int *out) {
    HC_CONTEXT();
    *out = pya_hc_current();
    return CU_OK;
}

int
cuCtxSynchronize(void) {
    HC_CONTEXT_TIMED();
    return pya_hc_device_sync();
}

int
cuCtxGetLimit(size_t *out, int limit) {
    HC_CONTEXT();
    static const size_t limits[] = {1024, 1048576, 8388608, 2, 2048, 128, 0};
    *out = limit >= 0 && limit < 7 ? limits[limit] : 0;
    return CU_OK;
}

int
cuCtxSetLimit(int limit, size_t value) {
    HC_CONTEXT();
    (void)limit;
    (void)value;
    return CU_OK;
}

int
cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    HC_CONTEXT();
    *least = 0;
    *greatest = -5;
    return CU_OK;
}

/* Modules and kernels */

static int
module_new(void **out, const char *what) {
    *out = pya_hc_function(what);
    return *out == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

int
cuModuleLoad(void **out, const char *path) {
    HC_CONTEXT();
    return module_new(out, path);
}

int
cuModuleLoadData(void **out, const void *image) {
    HC_CONTEXT();
    (void)image;
    return module_new(out, "module");
}

int
cuModuleLoadDataEx(void **out, const void *image, unsigned n, const int *options, void **values) {
    HC_CONTEXT();
    (void)image;
    (void)n;
    (void)options;
    (void)values;
    return module_new(out, "module");
}

int
cuModuleUnload(void *module) {
    HC_DRIVER();
    (void)module;
    return CU_OK;
}

int
cuModuleGetFunction(void **out, void *module, const char *name) {
    HC_DRIVER();
    *out = pya_hc_kernel(module, name);
    return *out == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

/* The PTX linker: its result is a module without code. */

int
cuLinkCreate_v2(unsigned n, const int *options, void **values, void **out) {
    HC_DRIVER();
    (void)n;
    (void)options;
    (void)values;
    return module_new(out, "link");
}

int
cuLinkAddData_v2(void *link) {
    HC_DRIVER();
    return link == NULL ? CU_INVALID_HANDLE : CU_OK;
}

int
cuLinkComplete(void *link, const void **image, size_t *size) {
    HC_DRIVER();
    static const char nothing[8];
    if (link == NULL) {
        return CU_INVALID_HANDLE;
    }
    *image = nothing;
    if (size != NULL) {
        *size = sizeof nothing;
    }
    return CU_OK;
}

int
cuLinkDestroy(void *link) {
    HC_DRIVER();
    return link == NULL ? CU_INVALID_HANDLE : CU_OK;
}

int
cuLibraryLoadData(void **out) {
    HC_DRIVER();
    return module_new(out, "library");
}

int
cuLibraryUnload(void *library) {
    HC_DRIVER();
    (void)library;
    return CU_OK;
}

int
cuLibraryGetKernel(void **out, void *library, const char *name) {
    HC_DRIVER();
    *out = pya_hc_kernel(library, name);
    return *out == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

int
cuKernelGetFunction(void **out, void *kernel) {
    HC_DRIVER();
    *out = kernel;
    return CU_OK;
}

int
cuKernelGetAttribute(int *out, int attribute, void *kernel, int device) {
    HC_DRIVER();
    (void)kernel;
    (void)device;
    return pya_hc_function_attribute(attribute, out);
}

int
cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    HC_DRIVER();
    (void)device;
    return pya_hc_kernel_set(kernel, attribute, value);
}

int
cuFuncGetAttribute(int *out, int attribute, void *function) {
    HC_DRIVER();
    (void)function;
    return pya_hc_function_attribute(attribute, out);
}

int
cuFuncSetAttribute(void *function, int attribute, int value) {
    HC_DRIVER();
    return pya_hc_kernel_set(function, attribute, value);
}

int
cuFuncSetCacheConfig(void *function, int config) {
    HC_DRIVER();
    (void)function;
    (void)config;
    return CU_OK;
}

static int
launch(
    const void *function, const unsigned *grid, const unsigned *block, size_t shared_bytes,
    const void *stream) {
    int error = pya_hc_launch_check(function, grid, block, shared_bytes);
    return error == CU_OK ? pya_hc_launch(stream) : error;
}

int
cuLaunchKernel(
    void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared_bytes, void *stream, void **args, void **extra) {
    HC_STREAM(stream);
    (void)args;
    (void)extra;
    return launch(
        function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared_bytes, stream);
}

int
cuLaunchCooperativeKernel(
    void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    unsigned shared_bytes, void *stream, void **args) {
    HC_STREAM(stream);
    (void)args;
    return launch(
        function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared_bytes, stream);
}

int
cuLaunchKernelEx(const struct cu_launch_config *config, void *function, void **args, void **extra) {
    HC_STREAM(config == NULL ? NULL : config->stream);
    (void)args;
    (void)extra;
    return config == NULL
               ? CU_INVALID_VALUE
               : launch(
                     function, config->grid, config->block, config->shared_bytes, config->stream);
}

int
cuLaunchHostFunc(void *stream, pya_hc_host_fn fn, void *data) {
    HC_STREAM(stream);
    return pya_hc_host_function(stream, fn, data);
}

int
cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *out, void *function, int threads, size_t shared_bytes) {
    HC_DRIVER();
    (void)function;
    *out = pya_hc_occupancy(threads, shared_bytes);
    return CU_OK;
}

int
cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *out, void *function, int threads, size_t shared_bytes, unsigned flags) {
    HC_DRIVER();
    (void)function;
    (void)flags;
    *out = pya_hc_occupancy(threads, shared_bytes);
    return CU_OK;
}

int
cuOccupancyMaxActiveClusters(int *out, void *function, const struct cu_launch_config *config) {
    HC_DRIVER();
    (void)function;
    (void)config;
    *out = 132;
    return CU_OK;
}

int
cuTensorMapEncodeTiled(void *map) {
    HC_DRIVER();
    if (map == NULL || (uintptr_t)map % 64 != 0) {
        return CU_INVALID_VALUE;
    }
    memset(map, 0, 128);
    return CU_OK;
}

/* The driver's private tables, which tools ask for but do not need.  Not reported, since it is usual. */
int
cuGetExportTable(const void **out, const struct cuda_uuid *id) {
    HC_DRIVER();
    (void)id;
    *out = NULL;
    return CU_NOT_SUPPORTED;
}

/* Entry points by name */

int
cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, unsigned *status) {
    HC_QUIET();
    (void)flags;
    if (name == NULL || out == NULL) {
        return CU_INVALID_VALUE;
    }
    *out = pya_hc_driver_lookup(name, version);
    if (status != NULL) {
        *status = *out == NULL; /* 1: symbol not found */
    }
    return *out == NULL ? CU_NOT_FOUND : CU_OK;
}

int
cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
