#define _GNU_SOURCE /* RTLD_DEFAULT, with glibc 2.31 */
#include "torch_symbols.h"

#include <dlfcn.h>

/* libtorch_python had the wrapper for foreign allocators until torch 2.5. */
static struct {
    const char *name;
    void *handle; /* NULL: not loaded yet; never closed, as torch is never unloaded */
} libraries[] = {
    {"libc10.so", NULL},
    {"libc10_cuda.so", NULL},
    {"libtorch_cuda.so", NULL},
    {"libtorch_python.so", NULL},
};
enum { N_LIBRARIES = sizeof libraries / sizeof libraries[0] };

/* RTLD_NOLOAD finds a loaded library by its name, wherever torch is installed.  The loader compares all names of all loaded
 * libraries, which takes longer than finding a symbol, so the handle is kept. */
static void *
library_handle(size_t i) {
    void *handle = __atomic_load_n(&libraries[i].handle, __ATOMIC_ACQUIRE);
    if (handle == NULL) {
        handle = dlopen(libraries[i].name, RTLD_NOLOAD | RTLD_LAZY);
        __atomic_store_n(&libraries[i].handle, handle, __ATOMIC_RELEASE);
    }
    return handle;
}

void *
pya_torch_symbol(const char *name) {
    for (size_t i = 0; i < N_LIBRARIES; i++) {
        void *library = library_handle(i);
        void *found = library == NULL ? NULL : dlsym(library, name);
        if (found != NULL) {
            return found;
        }
    }
    return NULL;
}

void *
pya_torch_runtime_symbol(const char *name) {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    return symbol != NULL ? symbol : pya_torch_symbol(name);
}
