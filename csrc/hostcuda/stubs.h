#pragma once
/* Macros for the generated stubs (stubs.awk).  Floor 1 (uses call.h). */

#include "call.h"

/* Library calls count like device calls but belong to no context and cannot be made to fail. */
#define COUNT() HC_QUIET()

#define ANSWER(name, status)                                                                       \
    __attribute__((weak)) int name(void) {                                                         \
        COUNT();                                                                                   \
        return status;                                                                             \
    }

#define UNKNOWN(entry, library)                                                                    \
    __attribute__((weak)) int entry(void) {                                                        \
        static struct pya_hc_call hc_call_ = {.name = #entry};                                     \
        return pya_hc_runtime(pya_hc_unknown(&hc_call_, library));                                 \
    }

#define BEGIN_OUT(name) __attribute__((weak)) int name

static inline void
pya_hc_stub_write_h(uintptr_t out) {
    static char dummy;
    *(void **)out = &dummy;
}

static inline void
pya_hc_stub_write_i(uintptr_t out) {
    *(int *)out = 0;
}

static inline void
pya_hc_stub_write_z(uintptr_t out) {
    *(size_t *)out = 0;
}
