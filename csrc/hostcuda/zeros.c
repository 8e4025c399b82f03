/* A library of its own, preloaded by dry runs only: what torch's allocators hand out begins with zeros.  What no kernel
 * computed then reads as zero, in every run and on every allocator, and not as whatever lay there before: indices lie
 * within, nothing is NaN, sizes are small.
 *
 * torch tells its profiler of every block through a function of libc10, which is found here first; pyalloc's bridge does
 * the same where it is asked to. */

#define _GNU_SOURCE
#include "bytes.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

enum { CUDA = 1 };

/* A large block is many pages with a call each, and nobody reads all of it back. */
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

/* torch's own, which lies behind this one wherever libraries are searched. */
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

/* For an allocator that asks before it reports, in place of c10::memoryProfilingEnabled(). */
bool
pya_hostcuda_wants_reports(void) {
    return true;
}
