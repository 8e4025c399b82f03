/* libcudart: devices, errors, versions, kernels, and the registration calls of compiled code. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#include "call.h"
#include "copy.h"
#include "lookup.h"
#include "module.h"
#include "props.h"
#include "reset.h"

#include <string.h>

#define RT(expression) return pya_hc_runtime(expression)

#if PYA_CUDART_MAJOR >= 13
#define RUNTIME_VERSION 13020
#else
#define RUNTIME_VERSION 12080
#endif

int
cudaGetDeviceCount(int *out) {
    HC_RUNTIME();
    *out = pya_hc_n_devices();
    RT(*out == 0 ? CU_NO_DEVICE : CU_OK);
}

int
cudaGetDevice(int *out) {
    HC_RUNTIME();
    if (pya_hc_n_devices() == 0) {
        RT(CU_NO_DEVICE);
    }
    *out = pya_hc_current() < 0 ? 0 : pya_hc_current();
    return CU_OK;
}

int
cudaSetDevice(int device) {
    HC_RUNTIME();
    if (pya_hc_device(device) == NULL) {
        RT(CU_INVALID_DEVICE);
    }
    pya_hc_set_current(device);
    (void)pya_hc_current_device(); /* creates the context, as CUDA does since 12 */
    return CU_OK;
}

int
cudaDeviceReset(void) {
    HC_RUNTIME();
    RT(pya_hc_device_reset(pya_hc_current() < 0 ? 0 : pya_hc_current()));
}

int
cudaDeviceSynchronize(void) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_device_sync());
}

int
cudaDeviceGetAttribute(int *out, int attribute, int device) {
    HC_RUNTIME();
    RT(pya_hc_attribute(device, attribute, out));
}

int
cudaGetDeviceProperties(void *out, int device) {
    HC_RUNTIME();
    RT(pya_hc_properties(device, PYA_CUDART_MAJOR, out));
}

/* CUDA 12's name for the same function. */
int
cudaGetDeviceProperties_v2(void *out, int device) {
    HC_RUNTIME();
    RT(pya_hc_properties(device, PYA_CUDART_MAJOR, out));
}

int
cudaDeviceGetPCIBusId(char *out, int length, int device) {
    HC_RUNTIME();
    const struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        RT(CU_INVALID_DEVICE);
    }
    RT(pya_hc_pci_bus_id(dev, out, length) ? CU_OK : CU_INVALID_VALUE);
}

int
cudaDeviceGetByPCIBusId(int *out, const char *text) {
    HC_RUNTIME();
    const int n_devices = pya_hc_n_devices(); /* also reads CUDA_VISIBLE_DEVICES */
    const struct pya_hc_device *dev = pya_hc_device_by_pci_bus_id(text);
    if (n_devices == 0 || dev == NULL || dev->ordinal < 0) {
        RT(CU_INVALID_DEVICE);
    }
    *out = dev->ordinal;
    return CU_OK;
}

int
cudaDeviceCanAccessPeer(int *out, int device, int peer) {
    HC_RUNTIME();
    if (pya_hc_device(device) == NULL || pya_hc_device(peer) == NULL) {
        RT(CU_INVALID_DEVICE);
    }
    *out = device != peer;
    return CU_OK;
}

static int
device_set_peer(int peer, bool enable) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL || pya_hc_device(peer) == NULL || peer == dev->ordinal) {
        return CU_INVALID_DEVICE;
    }
    uint32_t bit = 1u << peer;
    pya_hc_lock();
    bool changes = ((dev->peers & bit) != 0) != enable;
    dev->peers ^= changes ? bit : 0;
    pya_hc_unlock();
    if (changes) {
        return CU_OK;
    }
    return enable ? CU_PEER_ALREADY_ENABLED : CU_PEER_NOT_ENABLED;
}

int
cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    HC_RUNTIME();
    RT(flags != 0 ? CU_INVALID_VALUE : device_set_peer(peer, true));
}

int
cudaDeviceDisablePeerAccess(int peer) {
    HC_RUNTIME();
    RT(device_set_peer(peer, false));
}

int
cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    HC_RUNTIME();
    *least = 0;
    *greatest = -5;
    return CU_OK;
}

int
cudaDriverGetVersion(int *out) {
    HC_QUIET();
    *out = RUNTIME_VERSION;
    return CU_OK;
}

int
cudaRuntimeGetVersion(int *out) {
    HC_QUIET();
    *out = RUNTIME_VERSION;
    return CU_OK;
}

int
cudaGetLastError(void) {
    HC_QUIET();
    return pya_hc_last_error(true);
}

int
cudaPeekAtLastError(void) {
    HC_QUIET();
    return pya_hc_last_error(false);
}

const char *
cudaGetErrorName(int error) {
    HC_QUIET();
    return pya_hc_error_name(error);
}

const char *
cudaGetErrorString(int error) {
    HC_QUIET();
    return pya_hc_error_text(error);
}

int
cudaProfilerStart(void) {
    HC_RUNTIME();
    return CU_OK;
}

int
cudaProfilerStop(void) {
    HC_RUNTIME();
    return CU_OK;
}

int
cudaGetDriverEntryPointByVersion(
    const char *name, void **out, unsigned version, unsigned long long flags, int *status) {
    HC_QUIET();
    (void)flags;
    *out = pya_hc_driver_lookup(name, (int)version);
    if (status != NULL) {
        *status = *out == NULL; /* 1: symbol not found */
    }
    return CU_OK;
}

int
cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, out, RUNTIME_VERSION, flags, status);
}

/* Called by code compiled with nvcc when it is loaded.  Creates no context. */

void **
__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}

void
__cudaRegisterFatBinaryEnd(void **handle) {
    (void)handle;
}

void
__cudaUnregisterFatBinary(void **handle) {
    (void)handle;
}

char
__cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

void
__cudaRegisterFunction(void **handle) {
    (void)handle;
}

void
__cudaRegisterVar(
    void **handle, char *host, char *address, const char *name, int is_extern, size_t size) {
    (void)handle;
    (void)address;
    (void)name;
    (void)is_extern;
    pya_hc_variable_register(host, size);
}

/* The <<<>>> syntax stores its configuration here for cudaLaunchKernel. */
static _Thread_local struct {
    struct cuda_dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} pushed_config;

unsigned
__cudaPushCallConfiguration(
    struct cuda_dim3 grid, struct cuda_dim3 block, size_t shared_bytes, void *stream) {
    pushed_config.grid = grid;
    pushed_config.block = block;
    pushed_config.shared_bytes = shared_bytes;
    pushed_config.stream = stream;
    return 0;
}

int
__cudaPopCallConfiguration(
    struct cuda_dim3 *grid, struct cuda_dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = pushed_config.grid;
    *block = pushed_config.block;
    *shared_bytes = pushed_config.shared_bytes;
    *(void **)stream = pushed_config.stream;
    return CU_OK;
}

int
__cudaGetKernel(const void **out, const void *function) {
    *out = function;
    return CU_OK;
}

static int
launch(struct cuda_dim3 grid, struct cuda_dim3 block, const void *stream) {
    const unsigned grid_sizes[] = {grid.x, grid.y, grid.z};
    const unsigned block_sizes[] = {block.x, block.y, block.z};
    return pya_hc_launch_fits(grid_sizes, block_sizes) ? pya_hc_launch(stream)
                                                       : CU_INVALID_CONFIGURATION;
}

int
cudaLaunchKernel(
    const void *function, struct cuda_dim3 grid, struct cuda_dim3 block, void **args,
    size_t shared_bytes, void *stream) {
    HC_RUNTIME();
    (void)function;
    (void)args;
    (void)shared_bytes;
    RT(launch(grid, block, stream));
}

int
__cudaLaunchKernel(
    const void *function, struct cuda_dim3 grid, struct cuda_dim3 block, void **args,
    size_t shared_bytes, void *stream) {
    HC_RUNTIME();
    (void)function;
    (void)args;
    (void)shared_bytes;
    RT(launch(grid, block, stream));
}

int
cudaLaunchCooperativeKernel(
    const void *function, struct cuda_dim3 grid, struct cuda_dim3 block, void **args,
    size_t shared_bytes, void *stream) {
    HC_RUNTIME();
    (void)function;
    (void)args;
    (void)shared_bytes;
    RT(launch(grid, block, stream));
}

int
cudaLaunchKernelExC(const struct cuda_launch_config *config, const void *function, void **args) {
    HC_RUNTIME();
    (void)function;
    (void)args;
    if (config == NULL) {
        RT(CU_INVALID_VALUE);
    }
    RT(launch(config->grid, config->block, config->stream));
}

int
cudaLaunchHostFunc(void *stream, pya_hc_host_fn fn, void *data) {
    HC_RUNTIME();
    RT(pya_hc_host_function(stream, fn, data));
}

int
cudaFuncGetAttributes(struct cuda_func_attributes *out, const void *function) {
    HC_RUNTIME();
    (void)function;
    pya_hc_function_attributes(out);
    return CU_OK;
}

int
cudaFuncSetAttribute(const void *function, int attribute, int value) {
    HC_RUNTIME();
    RT(pya_hc_kernel_set(function, attribute, value));
}

int
cudaFuncSetCacheConfig(const void *function, int config) {
    HC_RUNTIME();
    (void)function;
    (void)config;
    return CU_OK;
}

int
cudaGetFuncBySymbol(void **out, const void *symbol) {
    HC_RUNTIME();
    *out = (void *)(uintptr_t)symbol;
    return CU_OK;
}

int
cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *out, const void *function, int threads, size_t shared_bytes) {
    HC_RUNTIME();
    (void)function;
    *out = pya_hc_occupancy(threads, shared_bytes);
    return CU_OK;
}

int
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *out, const void *function, int threads, size_t shared_bytes, unsigned flags) {
    HC_RUNTIME();
    (void)function;
    (void)flags;
    *out = pya_hc_occupancy(threads, shared_bytes);
    return CU_OK;
}

int
cudaOccupancyMaxActiveClusters(int *out, const void *function, const void *config) {
    HC_RUNTIME();
    (void)function;
    (void)config;
    *out = 132;
    return CU_OK;
}

/* Libraries loaded at run time: names without code. */

int
cudaLibraryLoadData(void **out, const void *code) {
    HC_RUNTIME();
    (void)code;
    *out = pya_hc_function("library");
    RT(*out == NULL ? CU_OUT_OF_MEMORY : CU_OK);
}

int
cudaLibraryLoadFromFile(void **out, const char *path) {
    HC_RUNTIME();
    *out = pya_hc_function(path);
    RT(*out == NULL ? CU_OUT_OF_MEMORY : CU_OK);
}

int
cudaLibraryUnload(void *library) {
    HC_RUNTIME();
    (void)library;
    return CU_OK;
}

int
cudaLibraryGetKernel(void **out, void *library, const char *name) {
    HC_RUNTIME();
    (void)library;
    *out = pya_hc_function(name);
    RT(*out == NULL ? CU_OUT_OF_MEMORY : CU_OK);
}

int
cudaLibraryGetKernelCount(unsigned *out, void *library) {
    HC_RUNTIME();
    (void)library;
    *out = 0;
    return CU_OK;
}

/* A library without code has no variables: return CUDA's error for an unknown name. */

int
cudaLibraryGetGlobal(void **out, size_t *size, void *library, const char *name) {
    HC_RUNTIME();
    (void)out, (void)size, (void)library, (void)name;
    RT(CU_NOT_FOUND);
}

int
cudaLibraryGetManaged(void **out, size_t *size, void *library, const char *name) {
    HC_RUNTIME();
    (void)out, (void)size, (void)library, (void)name;
    RT(CU_NOT_FOUND);
}

int
cudaLibraryGetUnifiedFunction(void **out, void *library, const char *name) {
    HC_RUNTIME();
    (void)out, (void)library, (void)name;
    RT(CU_NOT_FOUND);
}

int
cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    HC_RUNTIME();
    if (pya_hc_device(device) == NULL) {
        RT(CU_INVALID_DEVICE);
    }
    RT(pya_hc_kernel_set(kernel, attribute, value));
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
