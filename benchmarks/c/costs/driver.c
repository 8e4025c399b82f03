/* The driver's calls: opened as the allocator opens them, the rest looked up here; each is to work or ends its section. */
#include "costs.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "device/cuda.h"

struct costs bench;

static jmp_buf section_end;
static const char *section_name = "";
static char failed[16][400];
static int n_failed;

static void
note_failure(const char *text) {
    (void)fflush(stdout);
    (void)fprintf(stderr, "%s: %s\n", section_name, text);
    if (n_failed < (int)(sizeof failed / sizeof *failed)) {
        (void)snprintf(failed[n_failed], sizeof *failed, "%s: %.300s", section_name, text);
    }
    n_failed++;
}

void
costs_want(cuda_result result, const char *call) {
    if (result == CUDA_OK) {
        return;
    }
    char text[160];
    const char *why = NULL;
    if (bench.cu->cuGetErrorString == NULL || bench.cu->cuGetErrorString(result, &why) != CUDA_OK) {
        why = NULL;
    }
    (void)snprintf(
        text, sizeof text, "%s was refused: %d %s", call, result, why == NULL ? "" : why);
    note_failure(text);
    longjmp(section_end, 1); /* NOLINT(cert-err52-cpp) */
}

void
costs_wrong(const char *what) {
    char text[160];
    (void)snprintf(text, sizeof text, "WRONG BYTES: %s", what);
    note_failure(text);
}

void
costs_section(const char *name, void (*run)(void)) {
    const double began = now_ns();
    section_name = name;
    if (setjmp(section_end) == 0) {
        run();
    } else {
        (void)bench.cu->cuCtxSynchronize(); /* the next section's card is idle */
    }
    printf("\n%s: %.1f s\n\n", section_name, (now_ns() - began) / 1e9);
    (void)fflush(stdout);
}

int
costs_n_failed(void) {
    return n_failed;
}

void
costs_summary(void) {
    for (int i = 0; i < n_failed && i < (int)(sizeof failed / sizeof *failed); i++) {
        printf("failed: %s\n", failed[i]);
    }
}

/* ---- opening ---- */

/* ISO C has no conversion from an object to a function pointer; POSIX promises that they are alike. */
static void
find(void *library, const char *symbol, void *function_pointer) {
    void *address = dlsym(library, symbol);
    memcpy(function_pointer, &address, sizeof address);
}

bool
costs_open(void) {
    struct pya_device_error error;
    struct pya_device_caps caps;
    if (pya_cuda_open(0, &bench.dev) != PYA_OK || pya_device_caps(bench.dev, &caps) != PYA_OK) {
        pya_cuda_error(&error);
        (void)fprintf(
            stderr, "opening device 0 failed: %s (%s %d)\n",
            error.text[0] != '\0' ? error.text : "no device", error.call, error.code);
        return false;
    }
    section_name = "opening";
    bench.cu = cuda_driver_get();
    bench.has_vmm = caps.has_vmm;
    bench.prop = cuda_from(bench.dev)->prop;
    if (!caps.has_vmm) {
        char text[320];
        pya_cuda_error(&error);
        (void)snprintf(
            text, sizeof text,
            "no virtual memory calls, or device 0 refused them when tried: %s %d %s", error.call,
            error.code, error.text);
        note_failure(text);
    }
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) {
        return false;
    }
#define X(name, symbol, parameters) find(library, #symbol, &bench.more.name);
    COSTS_MORE_TABLE(X)
#undef X
    if (bench.more.cuDriverGetVersion != NULL) {
        (void)bench.more.cuDriverGetVersion(&bench.version);
    }
    if (bench.more.cuDeviceGetName != NULL) {
        (void)bench.more.cuDeviceGetName(
            bench.name, (int)sizeof bench.name, cuda_from(bench.dev)->handle);
    }
    /* Once for all calls: entering would be part of each one's time. */
    return bench.cu->cuCtxPushCurrent(cuda_from(bench.dev)->context) == CUDA_OK;
}

/* ---- calls ---- */

pya_dptr
costs_reserve(size_t bytes) {
    pya_dptr addr = 0;
    WANT(cuMemAddressReserve, &addr, bytes, PYA_PAGE, 0, 0);
    return addr;
}

uint64_t
costs_create(size_t bytes) {
    uint64_t handle = 0;
    WANT(cuMemCreate, &handle, bytes, &bench.prop, 0);
    return handle;
}

void
costs_map(pya_dptr addr, size_t bytes, uint64_t handle) {
    WANT(cuMemMap, addr, bytes, 0, handle, 0);
}

void
costs_set_access(pya_dptr addr, size_t bytes) {
    const struct cuda_access_desc desc = {
        .location = bench.prop.location, .flags = CUDA_ACCESS_READ_WRITE};
    WANT(cuMemSetAccess, addr, bytes, &desc, 1);
}

void
costs_unmap(pya_dptr addr, size_t bytes) {
    WANT(cuMemUnmap, addr, bytes);
}

void
costs_release(uint64_t handle) {
    WANT(cuMemRelease, handle);
}

void
costs_unreserve(pya_dptr addr, size_t bytes) {
    WANT(cuMemAddressFree, addr, bytes);
}

pya_dptr
costs_alloc(size_t bytes) {
    pya_dptr addr = 0;
    WANT(cuMemAlloc, &addr, bytes);
    return addr;
}

void
costs_free(pya_dptr addr) {
    WANT(cuMemFree, addr);
}

cuda_event
costs_event(void) {
    cuda_event event = NULL;
    WANT(cuEventCreate, &event, 0);
    return event;
}

cuda_stream
costs_stream(void) {
    cuda_stream stream = NULL;
    WANT_MORE(cuStreamCreate, &stream, 1);
    return stream;
}

double
costs_elapsed_ms(cuda_event begin, cuda_event end) {
    float ms = 0;
    WANT(cuEventSynchronize, end);
    WANT_MORE(cuEventElapsedTime, &ms, begin, end);
    return (double)ms;
}
