/* What the parts of driver_costs share: the driver, the calls that must work, the figures. */
#pragma once

#include <setjmp.h>

#include "../clock.h"
#include "device/cuda_context.h"
#include "device/sim_cost.h"

/* Functions that only a benchmark wants; NULL where the driver lacks one.  Name, exported name, parameters. */
#define COSTS_MORE_TABLE(X)                                                                        \
    X(cuDriverGetVersion, cuDriverGetVersion, (int *))                                             \
    X(cuDeviceGetName, cuDeviceGetName, (char *, int, cuda_device))                                \
    X(cuStreamCreate, cuStreamCreate, (cuda_stream *, unsigned))                                   \
    X(cuStreamDestroy, cuStreamDestroy_v2, (cuda_stream))                                          \
    X(cuEventElapsedTime, cuEventElapsedTime, (float *, cuda_event, cuda_event))                   \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, pya_dptr, size_t))                                   \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (pya_dptr, pya_dptr, size_t, cuda_stream))          \
    X(cuMemsetD32Async, cuMemsetD32Async, (pya_dptr, unsigned, size_t, cuda_stream))               \
    X(cuMemsetD2D32Async, cuMemsetD2D32Async,                                                      \
      (pya_dptr, size_t, unsigned, size_t, size_t, cuda_stream))                                   \
    X(cuModuleLoadData, cuModuleLoadData, (void **, const void *))                                 \
    X(cuModuleGetFunction, cuModuleGetFunction, (void **, void *, const char *))                   \
    X(cuLaunchKernel, cuLaunchKernel,                                                              \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cuda_stream,  \
       void **, void **))

struct costs_more {
#define X(name, symbol, parameters) cuda_result(*name) parameters;
    COSTS_MORE_TABLE(X)
#undef X
};

struct costs {
    struct pya_device *dev;
    const struct cuda_driver *cu;
    struct costs_more more;
    struct cuda_allocation_prop prop; /* as the allocator makes its pages */
    bool has_vmm;
    bool is_small; /* little memory, few rounds: figures of no meaning */
    char name[128];
    int version; /* 12080: 12.8 */
};
extern struct costs bench;

/* Opens device 0 and makes its context the thread's.  False: says why. */
bool costs_open(void);

/* ---- calls that must work ---- */

/* A section ends at the first call that is refused; the next one begins.  What it held is lost to this process. */
void costs_section(const char *name, void (*run)(void));
/* How many calls were refused, and how many bytes were wrong. */
int costs_n_failed(void);
void costs_summary(void);
void costs_want(cuda_result result, const char *call);
void costs_wrong(const char *what);

#define WANT(name, ...) costs_want(bench.cu->name(__VA_ARGS__), #name)
#define WANT_MORE(name, ...)                                                                       \
    costs_want(bench.more.name == NULL ? CUDA_NOT_SUPPORTED : bench.more.name(__VA_ARGS__), #name)

pya_dptr costs_reserve(size_t bytes);
uint64_t costs_create(size_t bytes);
void costs_map(pya_dptr addr, size_t bytes, uint64_t handle);
void costs_set_access(pya_dptr addr, size_t bytes);
void costs_unmap(pya_dptr addr, size_t bytes);
void costs_release(uint64_t handle);
void costs_unreserve(pya_dptr addr, size_t bytes);
pya_dptr costs_alloc(size_t bytes);
void costs_free(pya_dptr addr);
/* With timing. */
cuda_event costs_event(void);
/* One that does not wait for stream 0. */
cuda_stream costs_stream(void);
double costs_elapsed_ms(cuda_event begin, cuda_event end);

/* ---- reads of lines anywhere ---- */

/* False: the driver cannot compile them, which it says. */
bool costs_gather_load(void);
/* Queues reads of n pages (a power of two), `step` bytes apart, whose every word is `word`.  Returns how many bytes. */
double costs_gather(pya_dptr addr, size_t n_pages, size_t step, unsigned word, cuda_stream stream);
/* Waits for all work.  Was every word of all reads since the last call what it was to be? */
bool costs_gather_was_right(void);

/* ---- figures ---- */

enum { COSTS_ROUNDS = 31 }; /* at most */

struct costs_figure {
    const char *section;
    const char *what;
    const char *unit;
    uint64_t pages; /* of the call or calls, 0: it knows none */
    size_t n;
    double samples[COSTS_ROUNDS];
};

/* Texts are kept as pointers. */
void
costs_add(const char *section, const char *what, uint64_t pages, const char *unit, double sample);

struct costs_summed {
    size_t n; /* 0: there is none */
    double median, min, max, mean;
};

struct costs_summed
costs_sum(const char *section, const char *what, uint64_t pages, const char *unit);
/* "12.31 (11.90-15.20)" of a figure times `times`, "-" where there is none. */
const char *
costs_cell(const char *section, const char *what, uint64_t pages, const char *unit, double times);
/* All that there is so far. */
bool costs_write_json(const char *path);

/* ---- sections ---- */

void costs_idle_pages(void);
void costs_idle_calls(void);
void costs_ways(void);
void costs_busy(void);
void costs_beside(void);
void costs_speed(void);
