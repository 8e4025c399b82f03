/* The devices for tests of what every device promises: the simulated one, counting and backed, with and without
 * virtual memory, and the CUDA driver if libcuda.so.1 can be opened. */
#pragma once

#include "check.h"

#include "device/cuda.h"
#include "device/sim.h"
#include "driver.h"

struct subject {
    const char *name;
    struct pya_device *(*open)(void);
    /* Copy n bytes to or from device memory; NULL if the device stores no bytes. */
    void (*copy_in)(pya_dptr to, const void *from, size_t n);
    void (*copy_out)(void *to, pya_dptr from, size_t n);
};

static inline struct pya_device *
open_sim(struct pya_sim_config config) {
    config.capacity_bytes = 64 * PYA_PAGE;
    config.address_bytes = UINT64_C(1) << 34;
    config.quiet = true;
    struct pya_sim *sim = NULL;
    return CHECK_OK(pya_sim_create(&config, 0, &sim)) ? pya_sim_device(sim) : NULL;
}

static inline struct pya_device *
open_counting(void) {
    return open_sim((struct pya_sim_config){0});
}

static inline struct pya_device *
open_backed(void) {
    return open_sim((struct pya_sim_config){.backed = true});
}

static inline struct pya_device *
open_no_vmm(void) {
    return open_sim((struct pya_sim_config){.no_vmm = true});
}

static inline struct pya_device *
open_cuda(void) {
    struct pya_device *dev = NULL;
    pya_status status = pya_cuda_open(0, &dev);
    if (status == PYA_E_NOTSUP) {
        struct pya_device_error error;
        pya_cuda_error(&error);
        CHECK(error.text[0] != '\0'); /* the reason is told */
        CHECK_EQ(pya_cuda_count(), 0);
        printf("cuda: skipped: %s\n", pya_cuda_why_not());
        return NULL;
    }
    return CHECK_OK(status) ? dev : NULL;
}

static inline void
host_in(pya_dptr to, const void *from, size_t n) {
    memcpy((void *)(uintptr_t)to, from, n);
}

static inline void
host_out(void *to, pya_dptr from, size_t n) {
    memcpy(to, (const void *)(uintptr_t)from, n);
}

/* The library switches the context only for its own calls: the test's thread has none unless it makes one current. */
static inline void
cuda_make_current(bool is_current) {
    int (*retain)(void **, int) = NULL;
    int (*set_current)(void *) = NULL;
    void *symbol = cuda_symbol("cuDevicePrimaryCtxRetain");
    memcpy(&retain, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuCtxSetCurrent");
    memcpy(&set_current, &symbol, sizeof symbol);
    void *context = NULL;
    if (CHECK(retain != NULL && set_current != NULL)) {
        CHECK(!is_current || retain(&context, 0) == 0);
        CHECK_EQ(set_current(context), 0);
    }
}

/* The copies are the test's own driver calls; the library never copies. */
static inline void
cuda_copy(const char *name, pya_dptr a, const void *b, void *c, size_t n) {
    int (*in)(pya_dptr, const void *, size_t) = NULL;
    int (*out)(void *, pya_dptr, size_t) = NULL;
    void *symbol = cuda_symbol(name);
    memcpy(&in, &symbol, sizeof symbol);
    memcpy(&out, &symbol, sizeof symbol);
    if (CHECK(in != NULL)) {
        cuda_make_current(true);
        CHECK_EQ(b != NULL ? in(a, b, n) : out(c, a, n), 0);
        cuda_make_current(false);
    }
}

/* The thread's current context; NULL: none, or no driver. */
static inline void *
cuda_current(void) {
    int (*get_current)(void **) = NULL;
    void *context = NULL;
    void *symbol = cuda_symbol("cuCtxGetCurrent");
    memcpy(&get_current, &symbol, sizeof symbol);
    return get_current != NULL && get_current(&context) == 0 ? context : NULL;
}

static inline void
cuda_in(pya_dptr to, const void *from, size_t n) {
    cuda_copy("cuMemcpyHtoD_v2", to, from, NULL, n);
}

static inline void
cuda_out(void *to, pya_dptr from, size_t n) {
    cuda_copy("cuMemcpyDtoH_v2", from, NULL, to, n);
}

static const struct subject subjects[] = {
    {"sim", open_counting, NULL, NULL},
    {"sim backed", open_backed, host_in, host_out},
    {"sim without vmm", open_no_vmm, NULL, NULL},
    {"cuda", open_cuda, cuda_in, cuda_out},
};

static inline void
check_sim_clean(struct pya_device *dev) {
    struct pya_sim *sim = pya_sim_of(dev);
    if (sim != NULL) {
        struct pya_sim_state state;
        pya_sim_query(sim, &state);
        CHECK_EQ(
            state.n_pages + state.n_mappings + state.n_ranges + state.n_plain + state.n_events, 0);
        CHECK_EQ(pya_sim_check(sim), 0);
    }
}
