/* The CUDA driver of this machine, for the tests' own calls. */
#pragma once

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline void *
cuda_symbol(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    return library == NULL ? NULL : dlsym(library, name);
}

/* Makes calls of that name in the host-memory runtime fail.  False: there is no device, or a real card, whose driver
 * does not fail on request. */
static inline bool
fail_nth(uint64_t n, const char *call, int error) {
    void (*fail)(uint64_t, const char *, int) = NULL;
    void *symbol = cuda_symbol("pya_hostcuda_fail_nth");
    memcpy(&fail, &symbol, sizeof fail);
    if (fail != NULL) {
        fail(n, call, error);
    }
    return fail != NULL;
}
