/* What the driver's calls cost on the machine at hand, beside what the simulated device takes them to cost.
 *
 *     make -C tests/c ubench && build/c/release/bench/driver_costs
 *
 * Medians over ROUNDS of a range of one page and one of MANY; their difference gives the cost per page.  On the
 * host-memory runtime (LD_LIBRARY_PATH=pyalloc/lib/hostcuda) the figures say nothing about a card. */
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "device/cuda.h"
#include "device/sim_cost.h"

enum { ROUNDS = 21, MANY = 64 };

static double times[PYA_SIM_N_CALLS][2][ROUNDS]; /* ns; of one page, of MANY */
static double began_ns;

static void
need(pya_status status, const char *what) {
    if (status != PYA_OK) {
        struct pya_device_error error;
        pya_cuda_error(&error);
        (void)fprintf(
            stderr, "%s failed: %s (%s %d)\n", what,
            error.text[0] != '\0' ? error.text : "no device", error.call, error.code);
        exit(1);
    }
}

static void
start(void) {
    began_ns = now_ns();
}

static void
stop(enum pya_sim_call call, bool is_many, int round) {
    times[call][is_many][round] = now_ns() - began_ns;
}

/* All that happens to the pages of a range, home and second mapping, and a plain allocation of as many bytes. */
static void
measure_pages(struct pya_device *dev, size_t n, int round) {
    static pya_page_handle pages[MANY];
    const bool is_many = n > 1;
    pya_dptr home = 0;
    pya_dptr view = 0;
    start();
    need(pya_device_range_reserve(dev, n * PYA_PAGE, &home), "reserving addresses");
    stop(PYA_SIM_RANGE_RESERVE, is_many, round);
    need(pya_device_range_reserve(dev, n * PYA_PAGE, &view), "reserving addresses");
    start();
    for (size_t i = 0; i < n; i++) {
        need(pya_device_page_create(dev, 1, &pages[i]), "creating a page");
    }
    stop(PYA_SIM_PAGE_CREATE, is_many, round);
    for (size_t i = 0; i < n; i++) {
        need(pya_device_map(dev, home + i * PYA_PAGE, pages[i], 1), "mapping");
    }
    need(pya_device_set_access(dev, home, n * PYA_PAGE), "opening");
    start();
    for (size_t i = 0; i < n; i++) {
        need(pya_device_map(dev, view + i * PYA_PAGE, pages[n - 1 - i], 1), "mapping again");
    }
    stop(PYA_SIM_MAP, is_many, round);
    start();
    need(pya_device_set_access(dev, view, n * PYA_PAGE), "opening");
    stop(PYA_SIM_SET_ACCESS, is_many, round);
    start();
    need(pya_device_unmap(dev, view, n * PYA_PAGE), "unmapping");
    stop(PYA_SIM_UNMAP, is_many, round);
    need(pya_device_unmap(dev, home, n * PYA_PAGE), "unmapping");
    start();
    for (size_t i = 0; i < n; i++) {
        need(pya_device_page_release(dev, pages[i]), "releasing a page");
    }
    stop(PYA_SIM_PAGE_RELEASE, is_many, round);
    need(pya_device_range_release(dev, home, n * PYA_PAGE), "giving addresses back");
    start();
    need(pya_device_range_release(dev, view, n * PYA_PAGE), "giving addresses back");
    stop(PYA_SIM_RANGE_RELEASE, is_many, round);
    start();
    need(pya_device_plain_alloc(dev, n * PYA_PAGE, &home), "allocating");
    stop(PYA_SIM_PLAIN_ALLOC, is_many, round);
    start();
    need(pya_device_plain_free(dev, home), "freeing");
    stop(PYA_SIM_PLAIN_FREE, is_many, round);
}

/* Calls that know no pages, n of them. */
static void
measure_calls(struct pya_device *dev, size_t n, int round) {
    const bool is_many = n > 1;
    pya_event event = 0;
    bool flag = false;
    size_t free_bytes;
    size_t total_bytes;
    need(pya_device_event_create(dev, 0, &event), "creating an event");
#define EACH(call, expression)                                                                     \
    start();                                                                                       \
    for (size_t i = 0; i < n; i++) {                                                               \
        need(expression, #call);                                                                   \
    }                                                                                              \
    stop(PYA_SIM_##call, is_many, round)
    EACH(EVENT_RECORD, pya_device_event_record(dev, event, 0));
    EACH(EVENT_SYNC, pya_device_event_sync(dev, event));
    EACH(EVENT_QUERY, pya_device_event_query(dev, event, &flag));
    EACH(IS_CAPTURING, pya_device_is_capturing(dev, 0, &flag));
    EACH(STREAM_SYNC, pya_device_stream_sync(dev, 0));
    EACH(DEVICE_SYNC, pya_device_sync(dev));
    EACH(MEM_INFO, pya_device_mem_info(dev, &free_bytes, &total_bytes));
#undef EACH
    need(pya_device_event_destroy(dev, event), "destroying an event");
}

static int
compare(const void *a, const void *b) {
    const double *x = a;
    const double *y = b;
    return (*x > *y) - (*x < *y);
}

static double
median(double *values) {
    qsort(values, ROUNDS, sizeof *values, compare);
    return values[ROUNDS / 2];
}

int
main(void) {
    struct pya_device *dev = NULL;
    struct pya_device_caps caps;
    need(pya_cuda_open(0, &dev), "opening device 0");
    need(pya_device_caps(dev, &caps), "asking what it can");
    if (!caps.has_vmm) {
        struct pya_device_error error;
        pya_cuda_error(&error);
        (void)fprintf(
            stderr, "device 0 has no virtual memory calls, or refused them when tried: %s %d %s\n",
            error.call, error.code, error.text);
        return 1;
    }
    for (int round = 0; round < ROUNDS; round++) {
        measure_pages(dev, 1, round);
        measure_pages(dev, MANY, round);
        measure_calls(dev, 1, round);
        measure_calls(dev, MANY, round);
    }
    printf("| call | 1 page us | each of %d us | model: 1 page | each of %d |\n", MANY, MANY);
    printf("|---|---|---|---|---|\n");
    for (int i = 0; i < PYA_SIM_N_CALLS; i++) {
        const double one = median(times[i][0]);
        const uint64_t n_pages = i <= PYA_SIM_SET_ACCESS ? MANY : 1; /* in one call */
        const uint64_t n_handles = n_pages;                          /* each of one page */
        const uint64_t model =
            pya_sim_call_ns(PYA_SIM_TYPICAL, (enum pya_sim_call)i, n_handles, n_pages);
        if (one > 0) {
            printf(
                "| %s | %.2f | %.2f | %.2f | %.2f |\n", pya_sim_calls[i].name, one / 1e3,
                median(times[i][1]) / 1e3 / MANY,
                (double)pya_sim_call_ns(PYA_SIM_TYPICAL, (enum pya_sim_call)i, 1, 1) / 1e3,
                (double)model / 1e3 / (double)n_pages);
        }
    }
    pya_device_close(dev);
    return 0;
}
