/* A separate library, preloaded only by dry runs: blocks of torch's allocators start as zeros.  What no kernel computed
 * then reads as zero, in every run and on every allocator, instead of as leftovers: indices are in range, nothing is NaN,
 * sizes are small.
 *
 * torch reports every block to its profiler through a function of libc10, which we replace; pyalloc's bridge calls it too
 * when asked to. */

#define _GNU_SOURCE
#include "bytes.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

enum { CUDA = 1 };

/* Only this much of a block is zeroed: a large one has many pages with a call each, and nobody reads all of it back. */
#define MOST ((int64_t)16 << 20)

struct c10_device {
    int8_t type, index;
};

typedef void (*report_fn)(
    void *ptr, int64_t delta, size_t allocated, size_t reserved, struct c10_device device);

/* c10::reportMemoryUsageToProfiler */
#define REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

bool pya_hostcuda_wants_reports(void);
void REPORT(void *ptr, int64_t delta, size_t allocated, size_t reserved, struct c10_device device);

/* torch's own function, which comes after ours in the search order. */
static report_fn
zeros_find(void) {
    static _Atomic(report_fn) known;
    report_fn found = atomic_load(&known);
    void *library = found == NULL ? dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY) : NULL;
    if (library != NULL) {
        void *symbol = dlsym(library, TEXT(REPORT));
        memcpy(&found, &symbol, sizeof found);
        atomic_store(&known, found);
        (void)dlclose(library); /* torch's own reference keeps it loaded */
    }
    return found;
}

void
REPORT(void *ptr, int64_t delta, size_t allocated, size_t reserved, struct c10_device device) {
    if (delta > 0 && device.type == CUDA) {
        (void)pya_hc_bytes_set(ptr, 0, 1, (size_t)(delta < MOST ? delta : MOST));
    }
    report_fn own = zeros_find();
    if (own != NULL) {
        own(ptr, delta, allocated, reserved, device);
    }
}

/* Replaces c10::memoryProfilingEnabled() for an allocator that asks before it reports. */
bool
pya_hostcuda_wants_reports(void) {
    return true;
}
