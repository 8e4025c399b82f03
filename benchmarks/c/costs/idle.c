/* What the calls cost while the card has nothing to do. */
#include "costs.h"

#include <stdio.h>

enum { MOST = 1024, MANY_CALLS = 64 };

static uint64_t pages[MOST];

/* ---- calls that know pages ---- */

static const char IDLE[] = "idle";
static double began_ns;

static void
start(void) {
    began_ns = now_ns();
}

/* Microseconds of all n pages. */
static void
stop(const char *what, size_t n) {
    costs_add(IDLE, what, n, "us", (now_ns() - began_ns) / 1e3);
}

static void
map_reversed(pya_dptr view, size_t n) {
    for (size_t i = 0; i < n; i++) {
        costs_map(view + i * PYA_PAGE, PYA_PAGE, pages[n - 1 - i]);
    }
}

/* All that happens to the pages of a range, home and second mapping, and a plain allocation of as many bytes. */
static void
measure_pages(size_t n) {
    const size_t bytes = n * PYA_PAGE;
    start();
    const pya_dptr home = costs_reserve(bytes);
    stop("cuMemAddressReserve", n);
    const pya_dptr view = costs_reserve(bytes);
    start();
    for (size_t i = 0; i < n; i++) {
        pages[i] = costs_create(PYA_PAGE);
    }
    stop("cuMemCreate", n);
    start();
    for (size_t i = 0; i < n; i++) {
        costs_map(home + i * PYA_PAGE, PYA_PAGE, pages[i]);
    }
    stop("cuMemMap, first", n);
    start();
    costs_set_access(home, bytes);
    stop("cuMemSetAccess, first", n);
    start();
    map_reversed(view, n);
    stop("cuMemMap", n);
    start();
    costs_set_access(view, bytes);
    stop("cuMemSetAccess", n);
    start();
    costs_set_access(view, bytes);
    stop("cuMemSetAccess, is open", n);
    start();
    costs_unmap(view, bytes);
    stop("cuMemUnmap", n);
    map_reversed(view, n);
    start();
    for (size_t i = 0; i < n; i++) {
        costs_set_access(view + i * PYA_PAGE, PYA_PAGE);
    }
    stop("cuMemSetAccess, page by page", n);
    start();
    for (size_t i = 0; i < n; i++) {
        costs_unmap(view + i * PYA_PAGE, PYA_PAGE);
    }
    stop("cuMemUnmap, page by page", n);
    start();
    costs_unmap(home, bytes);
    stop("cuMemUnmap, last", n);
    start();
    for (size_t i = 0; i < n; i++) {
        costs_release(pages[i]);
    }
    stop("cuMemRelease", n);
    costs_unreserve(home, bytes);
    start();
    costs_unreserve(view, bytes);
    stop("cuMemAddressFree", n);
}

static void
measure_plain(size_t n) {
    start();
    const pya_dptr addr = costs_alloc(n * PYA_PAGE);
    stop("cuMemAlloc", n);
    start();
    costs_free(addr);
    stop("cuMemFree", n);
}

/* Of `times` calls with n pages in all, each page's share in us. */
static void
print_model(enum pya_sim_call call, uint64_t n, uint64_t times) {
    double us[PYA_SIM_N_COSTS];
    for (int i = 0; i < PYA_SIM_N_COSTS; i++) {
        const uint64_t ns =
            times * pya_sim_call_ns((enum pya_sim_cost)i, call, n / times, n / times);
        us[i] = (double)ns / 1e3 / (double)n;
    }
    printf(" %.2f (%.2f-%.2f) |", us[PYA_SIM_TYPICAL], us[PYA_SIM_LOW], us[PYA_SIM_HIGH]);
}

void
costs_idle_pages(void) {
    static const struct {
        const char *what;
        enum pya_sim_call call;
        bool is_each_page; /* a call a page */
    } rows[] = {
        {"cuMemAddressReserve", PYA_SIM_RANGE_RESERVE, false},
        {"cuMemAddressFree", PYA_SIM_RANGE_RELEASE, false},
        {"cuMemCreate", PYA_SIM_PAGE_CREATE, true},
        {"cuMemRelease", PYA_SIM_PAGE_RELEASE, true},
        {"cuMemMap, first", PYA_SIM_MAP, true},
        {"cuMemMap", PYA_SIM_MAP, true},
        {"cuMemSetAccess, first", PYA_SIM_SET_ACCESS, false},
        {"cuMemSetAccess", PYA_SIM_SET_ACCESS, false},
        {"cuMemSetAccess, is open", PYA_SIM_SET_ACCESS, false},
        {"cuMemSetAccess, page by page", PYA_SIM_SET_ACCESS, true},
        {"cuMemUnmap", PYA_SIM_UNMAP, false},
        {"cuMemUnmap, page by page", PYA_SIM_UNMAP, true},
        {"cuMemUnmap, last", PYA_SIM_UNMAP, false},
        {"cuMemAlloc", PYA_SIM_PLAIN_ALLOC, false},
        {"cuMemFree", PYA_SIM_PLAIN_FREE, false},
    };
    static const struct {
        size_t n;
        int rounds;
    } sizes[] = {{1, COSTS_ROUNDS}, {64, 21}, {MOST, 7}};
    const int n_sizes = bench.is_small ? 2 : 3;
    for (int size = 0; size < n_sizes; size++) {
        const int rounds = bench.is_small ? 3 : sizes[size].rounds;
        const double end = now_ns() + 2e9; /* a slow driver gets fewer rounds */
        for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
            if (bench.has_vmm) {
                measure_pages(sizes[size].n);
            }
            measure_plain(sizes[size].n);
        }
    }
    printf("us for each page: median (least-most), and the model's typical (low-high)\n\n");
    printf("| idle, pages | 1 | of 64 | of 1024 | model: 1 | of 64 | of 1024 |\n");
    printf("|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        printf("| %s |", rows[i].what);
        for (int size = 0; size < 3; size++) {
            const size_t n = sizes[size].n;
            printf(" %s |", costs_cell(IDLE, rows[i].what, n, "us", 1 / (double)n));
        }
        for (int size = 0; size < 3; size++) {
            print_model(rows[i].call, sizes[size].n, rows[i].is_each_page ? sizes[size].n : 1);
        }
        printf("\n");
    }
}

/* ---- calls that know none ---- */

static void
measure_calls(size_t n) {
    static cuda_event events[MANY_CALLS];
    size_t free_bytes;
    size_t total_bytes;
    int status;
    int mode = CUDA_CAPTURE_MODE_RELAXED;
    cuda_context context;
#define EACH(name, ...)                                                                            \
    start();                                                                                       \
    for (size_t i = 0; i < n; i++) {                                                               \
        WANT(name, __VA_ARGS__);                                                                   \
    }                                                                                              \
    stop(#name, n)
    EACH(cuEventCreate, &events[i], CUDA_EVENT_DISABLE_TIMING);
    EACH(cuEventRecord, events[i], NULL);
    EACH(cuEventSynchronize, events[i]);
    EACH(cuEventQuery, events[i]);
    EACH(cuEventDestroy, events[i]);
    EACH(cuStreamSynchronize, NULL);
    EACH(cuMemGetInfo, &free_bytes, &total_bytes);
    EACH(cuCtxGetCurrent, &context);
    if (bench.cu->cuStreamIsCapturing != NULL) {
        EACH(cuStreamIsCapturing, NULL, &status);
    }
    if (bench.cu->cuThreadExchangeStreamCaptureMode != NULL && n % 2 == 0) { /* and back */
        EACH(cuThreadExchangeStreamCaptureMode, &mode);
    }
#undef EACH
    start();
    for (size_t i = 0; i < n; i++) {
        costs_want(bench.cu->cuCtxSynchronize(), "cuCtxSynchronize");
    }
    stop("cuCtxSynchronize", n);
}

void
costs_idle_calls(void) {
    static const struct {
        const char *what;
        int call; /* of the model; -1: it knows it not */
    } rows[] = {
        {"cuEventCreate", PYA_SIM_EVENT_CREATE},       {"cuEventRecord", PYA_SIM_EVENT_RECORD},
        {"cuEventSynchronize", PYA_SIM_EVENT_SYNC},    {"cuEventQuery", PYA_SIM_EVENT_QUERY},
        {"cuEventDestroy", PYA_SIM_EVENT_DESTROY},     {"cuStreamSynchronize", PYA_SIM_STREAM_SYNC},
        {"cuCtxSynchronize", PYA_SIM_DEVICE_SYNC},     {"cuMemGetInfo", PYA_SIM_MEM_INFO},
        {"cuStreamIsCapturing", PYA_SIM_IS_CAPTURING}, {"cuCtxGetCurrent", -1},
        {"cuThreadExchangeStreamCaptureMode", -1},
    };
    for (int round = 0; round < (bench.is_small ? 3 : COSTS_ROUNDS); round++) {
        measure_calls(1);
        measure_calls(MANY_CALLS);
    }
    printf("| idle, calls | 1 us | each of 64 us | model us |\n|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const uint64_t model =
            rows[i].call < 0
                ? 0
                : pya_sim_call_ns(PYA_SIM_TYPICAL, (enum pya_sim_call)rows[i].call, 0, 0);
        printf(
            "| %s | %s | %s | %.2f |\n", rows[i].what, costs_cell(IDLE, rows[i].what, 1, "us", 1),
            costs_cell(IDLE, rows[i].what, MANY_CALLS, "us", 1.0 / MANY_CALLS),
            (double)model / 1e3);
    }
}
