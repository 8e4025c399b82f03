#include "torch_symbols.h"

#include <dlfcn.h>

/* RTLD_NOLOAD finds a loaded library by its name, wherever torch is installed.  libtorch_python had the wrapper for foreign
 * allocators until torch 2.5. */
static const char *const LIBRARIES[] = {
    "libc10.so", "libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"};

void *
pya_torch_symbol(const char *name) {
    for (size_t i = 0; i < sizeof LIBRARIES / sizeof LIBRARIES[0]; i++) {
        void *library = dlopen(LIBRARIES[i], RTLD_NOLOAD | RTLD_LAZY);
        if (library == NULL) {
            continue;
        }
        void *found = dlsym(library, name);
        (void)dlclose(library); /* torch's own reference keeps it loaded */
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
