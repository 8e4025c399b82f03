/* What a scan tells of device memory: which request each piece was taken for, and until when. */
#include "check.h"

#include "replay/scan.h"

enum { MIB = 1 << 20 };

static char path[] = "/tmp/pya-growth-XXXXXX";

static struct pya_scan *
scanned(const struct pya_trace_event *events, size_t n, int device) {
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    for (uint32_t i = 1; i < 4; i++) {
        uint32_t stack = 0;
        CHECK_OK(pya_trace_stack(writer, &(struct pya_trace_frame){.line = i}, &stack));
        CHECK_EQ(stack, i);
    }
    for (size_t i = 0; i < n; i++) {
        struct pya_trace_event event = events[i];
        event.time_ns = event.time_ns == 0 ? 1000 * i : event.time_ns;
        CHECK_OK(pya_trace_write(writer, &event));
    }
    CHECK_OK(pya_trace_close(writer));
    const struct pya_scan_settings settings = {.device = device, .n_bins = 2};
    struct pya_scan *scan = NULL;
    if (!CHECK_OK(pya_scan_run(path, &settings, &scan))) {
        exit(1);
    }
    return scan;
}

struct wanted {
    uint64_t begin, end, mib;
    uint32_t stack;
};

static void
check_growths(struct pya_scan *scan, const struct wanted *wanted, size_t n_wanted) {
    size_t n = 0;
    const struct pya_scan_growth *g = pya_scan_growths(scan, &n);
    CHECK_EQ(n, n_wanted);
    for (size_t i = 0; i < n && i < n_wanted; i++) {
        CHECK_EQ(g[i].begin, wanted[i].begin);
        CHECK_EQ(g[i].end, wanted[i].end);
        CHECK_EQ(g[i].bytes, wanted[i].mib * MIB);
        CHECK_EQ(g[i].stack, wanted[i].stack);
        CHECK_EQ(g[i].is_known, wanted[i].stack != 0);
    }
    pya_scan_destroy(scan);
}

#define EVENTS(...)                                                                                \
    (const struct pya_trace_event[]){__VA_ARGS__},                                                 \
        sizeof((const struct pya_trace_event[]){__VA_ARGS__}) / sizeof(struct pya_trace_event)
#define WANTED(...)                                                                                \
    (const struct wanted[]){__VA_ARGS__},                                                          \
        sizeof((const struct wanted[]){__VA_ARGS__}) / sizeof(struct wanted)

static void
test_whole_segments(void) {
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 20 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 9 * MIB, .stack = 1},
            {.kind = PYA_TRACE_ALLOC, .addr = 110 * MIB, .bytes = 9 * MIB, .stack = 2}, /* fits */
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 200 * MIB, .bytes = 30 * MIB, .stack = 3},
            {.kind = PYA_TRACE_ALLOC, .addr = 200 * MIB, .bytes = 29 * MIB, .stack = 2},
            {.kind = PYA_TRACE_SEGMENT_FREE, .addr = 100 * MIB, .bytes = 20 * MIB},
            {.kind = PYA_TRACE_SEGMENT_FREE, .addr = 300 * MIB, .bytes = 20 * MIB}, /* unknown */
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 2 * MIB}),
        -1);
    check_growths(
        scan, WANTED(
                  {0, 5, 20, 1}, {7, PYA_SCAN_NEVER, 2, 0} /* for nothing yet */,
                  {3, PYA_SCAN_NEVER, 30, 3} /* its own */));
}

static void
test_pages_of_one_request_are_one_piece(void) {
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 100 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 104 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 102 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 6 * MIB, .stack = 1},
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 106 * MIB, .bytes = 4 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 106 * MIB, .bytes = 4 * MIB, .stack = 2},
            {.kind = PYA_TRACE_SEGMENT_UNMAP, .addr = 102 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_SEGMENT_UNMAP, .addr = 104 * MIB, .bytes = 4 * MIB}),
        -1);
    check_growths(
        scan, WANTED(
                  {2, 6, 2, 1}, {2, 7, 2, 1}, {4, 7, 2, 2}, {2, PYA_SCAN_NEVER, 2, 1},
                  {4, PYA_SCAN_NEVER, 2, 2}));
}

static void
test_devices_are_apart(void) {
    const struct pya_trace_event events[] = {
        {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 20 * MIB, .device = 1},
        {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 9 * MIB, .stack = 1},
        {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 10 * MIB},
        {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 9 * MIB, .stack = 2, .device = 1},
        {.kind = PYA_TRACE_SEGMENT_FREE, .addr = 100 * MIB, .bytes = 20 * MIB, .device = 1},
    };
    check_growths(scanned(events, 5, -1), WANTED({0, 4, 20, 2}, {2, PYA_SCAN_NEVER, 10, 0}));
    check_growths(scanned(events, 5, 0), WANTED({2, PYA_SCAN_NEVER, 10, 0}));
}

/* What was there when the trace began is told at its first time, blocks after segments. */
static void
test_what_was_there_before_was_for_no_request(void) {
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 20 * MIB, .time_ns = 5},
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 200 * MIB, .bytes = 20 * MIB, .time_ns = 5},
            {.kind = PYA_TRACE_ALLOC,
             .addr = 100 * MIB,
             .bytes = 9 * MIB,
             .stack = 1,
             .time_ns = 5},
            {.kind = PYA_TRACE_ALLOC, .addr = 110 * MIB, .bytes = 9 * MIB, .stack = 2},
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 300 * MIB, .bytes = 20 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 300 * MIB, .bytes = 9 * MIB, .stack = 3}),
        -1);
    check_growths(
        scan,
        WANTED({0, PYA_SCAN_NEVER, 20, 0}, {1, PYA_SCAN_NEVER, 20, 0}, {4, PYA_SCAN_NEVER, 20, 3}));
}

/* As many as are kept, and twice that: the larger ones stay. */
static void
test_the_smallest_are_left_out(void) {
    enum { N = 2 * PYA_SCAN_SPANS };
    struct pya_trace_event *events = calloc(2 * N, sizeof *events);
    for (size_t i = 0; events != NULL && i < N; i++) {
        const uint64_t bytes = (1 + i % 2 * 1000) * (uint64_t)4096;
        events[2 * i] =
            (struct pya_trace_event){.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = MIB, .bytes = bytes};
        events[2 * i + 1] =
            (struct pya_trace_event){.kind = PYA_TRACE_SEGMENT_FREE, .addr = MIB, .bytes = bytes};
    }
    struct pya_scan *scan = scanned(events, events == NULL ? 0 : 2 * N, -1);
    free(events);
    size_t n = 0;
    const struct pya_scan_growth *g = pya_scan_growths(scan, &n);
    CHECK(n > 0 && n <= PYA_SCAN_SPANS);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(g[i].bytes, 1001 * 4096);
        CHECK_EQ(g[i].end, g[i].begin + 1);
    }
    pya_scan_destroy(scan);
}

static const struct check_case cases[] = {
    {"whole segments", test_whole_segments},
    {"pages of one request are one piece", test_pages_of_one_request_are_one_piece},
    {"devices are apart", test_devices_are_apart},
    {"what was there before was for no request", test_what_was_there_before_was_for_no_request},
    {"the smallest are left out", test_the_smallest_are_left_out},
};

int
main(int argc, char **argv) {
    return check_main_with_file(argc, argv, cases, sizeof cases / sizeof *cases, path);
}
