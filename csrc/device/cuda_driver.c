#define _GNU_SOURCE
#include "cuda_driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static struct cuda_driver driver_it;
static pthread_once_t driver_once = PTHREAD_ONCE_INIT;

/* The requested version of the interface: late enough for every _v2 name in the table. */
#define DRIVER_VERSION 12000

typedef cuda_result (*driver_lookup)(const char *name, void **out, int version, uint64_t flags);
typedef cuda_result (*driver_lookup_v2)(
    const char *name, void **out, int version, uint64_t flags, int *found);

struct driver_source {
    void *library;
    driver_lookup lookup;       /* CUDA 11.3 .. */
    driver_lookup_v2 lookup_v2; /* CUDA 12 .. */
};

static void *
driver_find(const struct driver_source *source, const char *name, const char *symbol) {
    void *address = NULL;
    int found = 0;
    cuda_result result = CUDA_NOT_SUPPORTED;
    if (source->lookup_v2 != NULL) {
        result = source->lookup_v2(name, &address, DRIVER_VERSION, 0, &found);
    } else if (source->lookup != NULL) {
        result = source->lookup(name, &address, DRIVER_VERSION, 0);
    }
    return result == CUDA_OK && address != NULL ? address : dlsym(source->library, symbol);
}

/* ISO C has no conversion from an object pointer to a function pointer; POSIX guarantees that they are alike. */
static void
driver_assign(void *function_pointer, void *address) {
    memcpy(function_pointer, &address, sizeof address);
}

static void
driver_note_missing(struct cuda_driver *it, const char *name) {
    if (it->why_not[0] == '\0') {
        snprintf(it->why_not, sizeof it->why_not, "libcuda.so.1 has no %s", name);
    }
}

static void
driver_after_fork(void) {
    driver_it.is_forked = true;
}

static void
driver_open(void) {
    struct cuda_driver *it = &driver_it;
    struct driver_source source = {.library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)};
    if (source.library == NULL) {
        snprintf(it->why_not, sizeof it->why_not, "libcuda.so.1 could not be opened");
        return;
    }
    driver_assign(&source.lookup_v2, dlsym(source.library, "cuGetProcAddress_v2"));
    driver_assign(&source.lookup, dlsym(source.library, "cuGetProcAddress"));
    bool missing_BASE = false;
    bool missing_VMM = false;
    bool missing_EXTRA = false;
#define X(group, name, symbol, parameters)                                                         \
    driver_assign(&it->name, driver_find(&source, #name, #symbol));                                \
    if (it->name == NULL) {                                                                        \
        missing_##group = true;                                                                    \
    }                                                                                              \
    if (missing_BASE) {                                                                            \
        driver_note_missing(it, #symbol);                                                          \
    }
    CUDA_DRIVER_TABLE(X)
#undef X
    (void)missing_EXTRA;
    if (missing_BASE) {
        return;
    }
    it->init_result = it->cuInit(0);
    if (it->init_result != CUDA_OK) {
        snprintf(it->why_not, sizeof it->why_not, "cuInit failed with code %d", it->init_result);
        return;
    }
    it->has_base = true;
    /* Without this handler a forked child would get the driver's own error: a worse text, but equally safe. */
    (void)pthread_atfork(NULL, NULL, driver_after_fork);
    it->has_vmm = !missing_VMM;
}

const struct cuda_driver *
cuda_driver_get(void) {
    pthread_once(&driver_once, driver_open);
    return &driver_it;
}
