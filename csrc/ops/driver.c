#include "driver.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The driver's types as its ABI has them: handles are pointers, results are ints. */
typedef int (*load_fn)(void **module, const void *image);
typedef int (*function_fn)(void **function, void *module, const char *name);
typedef int (*attribute_fn)(void *function, int attribute, int value);
typedef int (*launch_fn)(
    void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
    unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
    void **extra);

typedef int (*get_context_fn)(void **context);
typedef int (*set_context_fn)(void *context);

static struct {
    get_context_fn get_context;
    set_context_fn set_context;
    load_fn load;
    function_fn function;
    attribute_fn set_attribute;
    launch_fn launch;
} driver;

enum { MAX_SHARED = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

static _Thread_local char driver_message[160];

static int
driver_refuse(const char *call, int result) {
    snprintf(driver_message, sizeof driver_message, "%s answered CUDA error %d", call, result);
    return PYA_OPS_E_DRIVER;
}

const char *
pya_ops_cuda_error(void) {
    return driver_message;
}

/* Function pointers are copied with memcpy: ISO C has no cast to them from an object pointer. */
static bool
driver_find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

int
pya_ops_cuda_open(const char *path) {
    const char *name = path != NULL ? path : "libcuda.so.1";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(driver_message, sizeof driver_message, "%s cannot be opened", name);
        return PYA_OPS_E_DRIVER;
    }
    if (!driver_find(library, "cuCtxGetCurrent", &driver.get_context) ||
        !driver_find(library, "cuCtxSetCurrent", &driver.set_context) ||
        !driver_find(library, "cuModuleLoadData", &driver.load) ||
        !driver_find(library, "cuModuleGetFunction", &driver.function) ||
        !driver_find(library, "cuFuncSetAttribute", &driver.set_attribute) ||
        !driver_find(library, "cuLaunchKernel", &driver.launch)) {
        snprintf(driver_message, sizeof driver_message, "%s lacks the module calls", name);
        return PYA_OPS_E_DRIVER;
    }
    return PYA_OPS_OK; /* stays open: kernels may be in flight until the process ends */
}

int
pya_ops_cuda_load(const void *image, struct pya_ops_target *to) {
    void *loaded = NULL;
    void *context = NULL;
    if (driver.load == NULL) {
        return PYA_OPS_E_INVAL;
    }
    int result = driver.get_context(&context);
    if (result != 0) {
        return driver_refuse("cuCtxGetCurrent", result);
    }
    result = driver.load(&loaded, image);
    if (result != 0) {
        return driver_refuse("cuModuleLoadData", result);
    }
    to->module = (uint64_t)(uintptr_t)loaded;
    to->context = context;
    return PYA_OPS_OK;
}

bool
pya_ops_cuda_has(const struct pya_ops_target *to, const char *kernel) {
    void *function = NULL;
    return driver.function != NULL &&
           driver.function(&function, (void *)(uintptr_t)to->module, kernel) == 0;
}

/* A new thread has no context yet, and torch's current device may be another one.  So the module's context is made current;
 * *before is the previous one. */
static int
driver_enter(const struct pya_ops_target *to, void **before) {
    int result = driver.get_context(before);
    if (result == 0 && *before != to->context) {
        result = driver.set_context(to->context);
    }
    return result == 0 ? PYA_OPS_OK : driver_refuse("cuCtxSetCurrent", result);
}

static void
driver_leave(const struct pya_ops_target *to, void *before) {
    if (before != to->context) {
        (void)driver.set_context(before);
    }
}

bool
pya_driver_allow(const struct pya_ops_target *to, const char *kernel, uint32_t shared) {
    void *function = NULL;
    void *before = NULL;
    if (driver.launch == NULL || driver_enter(to, &before) != PYA_OPS_OK) {
        return false;
    }
    const bool is_allowed =
        driver.function(&function, (void *)(uintptr_t)to->module, kernel) == 0 &&
        driver.set_attribute(function, MAX_SHARED, (int)shared) == 0;
    driver_leave(to, before);
    return is_allowed;
}

int
pya_driver_launch(
    const struct pya_ops_target *to, const char *kernel, struct pya_driver_grid grid,
    const void *argument) {
    if (driver.launch == NULL || grid.x > 0x7fffffff || grid.y > 65535) {
        return PYA_OPS_E_INVAL;
    }
    if (grid.x == 0 || grid.y == 0) {
        return PYA_OPS_OK;
    }
    void *before = NULL;
    int status = driver_enter(to, &before);
    if (status != PYA_OPS_OK) {
        return status;
    }
    void *function = NULL;
    void *arguments[1];
    memcpy(&arguments[0], &argument, sizeof argument); /* the driver only reads it */
    const char *call = "cuModuleGetFunction";
    int result = driver.function(&function, (void *)(uintptr_t)to->module, kernel);
    if (result == 0) {
        call = "cuLaunchKernel";
        result = driver.launch(
            function, (unsigned)grid.x, (unsigned)grid.y, 1, grid.threads, 1, 1, grid.shared,
            to->stream, arguments, NULL);
    }
    driver_leave(to, before);
    return result == 0 ? PYA_OPS_OK : driver_refuse(call, result);
}
