/* Events that a scan tells one by one: which ones, and what is known of their blocks. */
#include "check.h"

#include "replay/scan.h"

enum { MIB = 1 << 20 };

static char path[] = "/tmp/pya-told-XXXXXX";

static void
write_events(void) {
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    uint32_t module = 0;
    uint32_t phase = 0;
    CHECK_OK(pya_trace_string(writer, "module:layer", 12, &module));
    CHECK_OK(pya_trace_string(writer, "forward", 7, &phase));
    const struct pya_trace_event events[] = {
        {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = MIB, .bytes = 20 * MIB},
        {.kind = PYA_TRACE_PHASE_BEGIN, .text = phase},
        {.kind = PYA_TRACE_POOL_BEGIN, .addr = 0, .arg = 7},
        {.kind = PYA_TRACE_ALLOC, .addr = MIB, .bytes = 4 * MIB, .stream = 9},
        {.kind = PYA_TRACE_POOL_END, .addr = 0, .arg = 7},
        {.kind = PYA_TRACE_PHASE_BEGIN, .text = module},
        {.kind = PYA_TRACE_RECORD_STREAM, .addr = MIB, .arg = 11},
        {.kind = PYA_TRACE_PHASE_END, .text = module},
        {.kind = PYA_TRACE_FREE, .addr = MIB},
        {.kind = PYA_TRACE_FREE_COMPLETED, .addr = MIB},
        {.kind = PYA_TRACE_FREE, .addr = MIB}, /* of nothing */
        {.kind = PYA_TRACE_ALLOC, .addr = MIB, .bytes = 100, .device = 1},
        {.kind = PYA_TRACE_SEGMENT_FREE, .addr = MIB, .bytes = 20 * MIB},
    };
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        struct pya_trace_event event = events[i];
        event.time_ns = 1000 * i;
        CHECK_OK(pya_trace_write(writer, &event));
    }
    CHECK_OK(pya_trace_close(writer));
}

static struct pya_scan *
scanned(const struct pya_scan_range *ranges, size_t n, int device) {
    const struct pya_scan_settings settings = {
        .device = device, .n_bins = 2, .ranges = ranges, .n_ranges = n};
    struct pya_scan *scan = NULL;
    if (!CHECK_OK(pya_scan_run(path, &settings, &scan))) {
        exit(1);
    }
    return scan;
}

static void
check_numbers(const struct pya_scan *scan, const uint64_t *wanted, size_t n_wanted) {
    size_t n = 0;
    const struct pya_scan_told *told = pya_scan_told(scan, &n);
    CHECK_EQ(n, n_wanted);
    for (size_t i = 0; i < n && i < n_wanted; i++) {
        CHECK_EQ(told[i].event, wanted[i]);
        CHECK_EQ(told[i].time_ns, 1000 * wanted[i]);
    }
}

static void
test_ranges(void) {
    write_events();
    const struct pya_scan_range two[] = {{0, 0}, {1, 3}, {3, 4}, {10, 99}};
    struct pya_scan *scan = scanned(two, 4, -1);
    check_numbers(scan, (uint64_t[]){1, 2, 3, 10, 11, 12}, 6);
    pya_scan_destroy(scan);
    scan = scanned(two, 4, 1); /* marks belong to all devices */
    check_numbers(scan, (uint64_t[]){1, 11}, 2);
    pya_scan_destroy(scan);
    scan = scanned(NULL, 0, -1);
    check_numbers(scan, NULL, 0);
    pya_scan_destroy(scan);
}

static void
test_blocks(void) {
    write_events();
    const struct pya_scan_range all = {0, UINT64_MAX};
    struct pya_scan *scan = scanned(&all, 1, -1);
    check_numbers(scan, (uint64_t[]){0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12}, 11); /* no modules */
    size_t n = 0;
    const struct pya_scan_told *told = pya_scan_told(scan, &n);
    if (n == 11) {
        CHECK_EQ(told[0].bytes, (uint64_t)20 * MIB);
        CHECK_EQ(told[0].alloc_event, PYA_SCAN_NEVER);
        CHECK_EQ(told[3].stream, 9);
        for (size_t i = 3; i <= 7; i++) { /* asked for, used elsewhere, freed, free for others */
            const bool is_of_block = i != 4;
            CHECK_EQ(told[i].alloc_event, is_of_block ? 3 : PYA_SCAN_NEVER);
            CHECK_EQ(told[i].bytes, is_of_block ? (uint64_t)4 * MIB : 0);
            CHECK_EQ(told[i].pool, is_of_block);
        }
        CHECK_EQ(told[5].arg, 11);
        CHECK_EQ(told[8].alloc_event, PYA_SCAN_NEVER);
        CHECK_EQ(told[8].bytes, 0);
        CHECK_EQ(told[9].device, 1);
        CHECK_EQ(told[9].pool, 0);
    }
    pya_scan_destroy(scan);
}

static const struct check_case cases[] = {
    {"ranges", test_ranges},
    {"blocks", test_blocks},
};

int
main(int argc, char **argv) {
    return check_main_with_file(argc, argv, cases, sizeof cases / sizeof *cases, path);
}
