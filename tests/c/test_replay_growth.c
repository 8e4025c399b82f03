/* What a scan tells of device memory: which request each piece was taken for, and until when; and what happens with
 * more pieces and blocks than it keeps. */
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
    uint32_t text = 0;
    CHECK_OK(pya_trace_string(writer, "phase", 5, &text));
    CHECK_EQ(text, 1);
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
    const uint64_t end = n;
    const struct pya_scan_settings settings = {
        .device = device,
        .n_bins = 2,
        .window_end = PYA_SCAN_NEVER,
        .moments = &end,
        .n_moments = 1};
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

/* What existed when the trace began is told at its first time, blocks after segments. */
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

/* A segment is for the first request in it, unless the trace names another.  One that existed before is for none. */
static void
test_segments_have_a_request(void) {
    static const struct {
        uint64_t mib;
        uint32_t stack, phase;
        bool is_known;
    } wanted[] = {{100, 0, 0, false}, {200, 0, 0, false}, {300, 2, 1, true}, {400, 3, 1, true}};
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = MIB, .time_ns = 5},
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 200 * MIB, .bytes = 9 * MIB, .time_ns = 5},
            {.kind = PYA_TRACE_ALLOC, .addr = 200 * MIB, .bytes = MIB, .stack = 1, .time_ns = 5},
            {.kind = PYA_TRACE_PHASE_BEGIN, .text = 1},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = MIB, .stack = 1},
            {.kind = PYA_TRACE_SEGMENT_FREE, .addr = 208 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 300 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 300 * MIB, .bytes = MIB / 2, .stack = 2},
            {.kind = PYA_TRACE_PHASE_END, .text = 1},
            {.kind = PYA_TRACE_ALLOC, .addr = 300 * MIB + MIB / 2, .bytes = MIB / 2, .stack = 1},
            {.kind = PYA_TRACE_FREE, .addr = 200 * MIB},
            {.kind = PYA_TRACE_SEGMENT_FREE, .addr = 205 * MIB, .bytes = 3 * MIB},
            {.kind = PYA_TRACE_PHASE_BEGIN, .text = 1},
            {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 400 * MIB, .bytes = MIB, .stack = 3},
            {.kind = PYA_TRACE_ALLOC, .addr = 400 * MIB, .bytes = MIB, .stack = 1}),
        -1);
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    if (CHECK_EQ(n, 1) && CHECK_EQ(moment->n_segments, 4)) {
        for (size_t i = 0; i < 4; i++) {
            CHECK_EQ(moment->segments[i].addr, wanted[i].mib * MIB);
            CHECK_EQ(moment->segments[i].stack, wanted[i].stack);
            CHECK_EQ(moment->segments[i].phase, wanted[i].phase);
            CHECK_EQ(moment->segments[i].is_known, wanted[i].is_known);
        }
    }
    CHECK_EQ(pya_scan_totals(scan)->peak_reserved_event, 3);
    CHECK_EQ(pya_scan_totals(scan)->peak_reserved_alloc, PYA_SCAN_NEVER);
    pya_scan_destroy(scan);
}

/* A pool's request lies in the middle of pages that another pool had, and takes over only those. */
static void
test_pages_go_from_pool_to_pool(void) {
    static const uint64_t pages[][3] = {{100, 4, 1}, {104, 2, 0}, {106, 2, 2}, {108, 2, 1}};
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 100 * MIB, .bytes = 10 * MIB},
            {.kind = PYA_TRACE_POOL_BEGIN, .addr = 7, .arg = 1},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 10 * MIB},
            {.kind = PYA_TRACE_FREE, .addr = 100 * MIB},
            {.kind = PYA_TRACE_POOL_BEGIN, .addr = 7, .arg = 2},
            {.kind = PYA_TRACE_ALLOC, .addr = 106 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_POOL_END},
            {.kind = PYA_TRACE_ALLOC, .addr = 104 * MIB + 512, .bytes = MIB}),
        -1);
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    if (CHECK_EQ(n, 1) && CHECK_EQ(moment->n_segments, 4)) {
        for (size_t i = 0; i < 4; i++) {
            CHECK_EQ(moment->segments[i].addr, pages[i][0] * MIB);
            CHECK_EQ(moment->segments[i].bytes, pages[i][1] * MIB);
            CHECK_EQ(moment->segments[i].pool, pages[i][2]);
        }
    }
    pya_scan_destroy(scan);
}

/* Pages that join a used mapping behind them and an unused one before them: the request behind is not forgotten. */
static void
test_pages_between_mappings(void) {
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 100 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 104 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 104 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 102 * MIB, .bytes = 2 * MIB},
            {.kind = PYA_TRACE_POOL_BEGIN, .addr = 7, .arg = 1},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 2 * MIB}),
        -1);
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    if (CHECK_EQ(n, 1) && CHECK_EQ(moment->n_segments, 2)) {
        CHECK(moment->segments[0].bytes == 2 * MIB && moment->segments[0].pool == 1);
        CHECK(moment->segments[1].bytes == 4 * MIB && moment->segments[1].pool == 0);
    }
    pya_scan_destroy(scan);
}

/* The end of a free is missing if something else lies there since; another's is still to come. */
static void
test_ends_of_frees_that_are_missing(void) {
    struct pya_scan *scan = scanned(
        EVENTS(
            {.kind = PYA_TRACE_SEGMENT_MAP, .addr = 100 * MIB, .bytes = 10 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 101 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 103 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 105 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 107 * MIB, .bytes = MIB},
            {.kind = PYA_TRACE_FREE, .addr = 101 * MIB},
            {.kind = PYA_TRACE_FREE, .addr = 103 * MIB},
            {.kind = PYA_TRACE_FREE, .addr = 105 * MIB},
            {.kind = PYA_TRACE_FREE, .addr = 107 * MIB},
            {.kind = PYA_TRACE_FREE_COMPLETED, .addr = 107 * MIB},
            {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = 5 * MIB}),
        -1);
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    if (CHECK_EQ(n, 1) && CHECK_EQ(moment->n_blocks, 2)) {
        CHECK_EQ(moment->blocks[0].addr, 100 * MIB);
        CHECK_EQ(moment->blocks[1].addr, 105 * MIB);
        CHECK(moment->blocks[1].is_pending);
    }
    pya_scan_destroy(scan);
}

/* The request for which reserved memory grew to its largest: the next one on that device, if any. */
static void
test_the_peak_has_a_request(void) {
    const struct pya_trace_event events[] = {
        {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 100 * MIB, .bytes = 10 * MIB},
        {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = MIB, .device = 1},
        {.kind = PYA_TRACE_FREE, .addr = 100 * MIB, .device = 1},
        {.kind = PYA_TRACE_ALLOC, .addr = 100 * MIB, .bytes = MIB},
        {.kind = PYA_TRACE_ALLOC, .addr = 102 * MIB, .bytes = MIB},
        {.kind = PYA_TRACE_SEGMENT_ALLOC, .addr = 200 * MIB, .bytes = 10 * MIB},
        {.kind = PYA_TRACE_OOM, .bytes = 20 * MIB},
        {.kind = PYA_TRACE_ALLOC, .addr = 104 * MIB, .bytes = MIB},
    };
    static const struct {
        size_t n;
        uint64_t event, alloc;
    } wanted[] = {{3, 1, PYA_SCAN_NEVER}, {5, 4, 3}, {8, 6, PYA_SCAN_NEVER}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        struct pya_scan *scan = scanned(events, wanted[i].n, -1);
        CHECK_EQ(pya_scan_totals(scan)->peak_reserved_event, wanted[i].event);
        CHECK_EQ(pya_scan_totals(scan)->peak_reserved_alloc, wanted[i].alloc);
        pya_scan_destroy(scan);
    }
}

/* N pieces of device memory with a block in each: all are alive at once, and are freed in the order of their
 * requests. */
static struct pya_scan *
scanned_many(size_t n, uint64_t (*bytes_of)(size_t i)) {
    struct pya_trace_event *events = calloc(4 * n, sizeof *events);
    for (size_t i = 0; events != NULL && i < n; i++) {
        const struct pya_trace_event e = {.addr = (1 + i) * MIB, .bytes = bytes_of(i)};
        events[2 * i] = events[2 * i + 1] = events[2 * (n + i)] = events[2 * (n + i) + 1] = e;
        events[2 * i].kind = PYA_TRACE_SEGMENT_ALLOC;
        events[2 * i + 1].kind = PYA_TRACE_ALLOC;
        events[2 * (n + i)].kind = PYA_TRACE_FREE;
        events[2 * (n + i) + 1].kind = PYA_TRACE_SEGMENT_FREE;
    }
    struct pya_scan *scan = scanned(events, events == NULL ? 0 : 4 * n, -1);
    free(events);
    CHECK_EQ(pya_scan_totals(scan)->n_frees, n);
    CHECK_EQ(pya_scan_totals(scan)->n_unknown_frees, 0);
    return scan;
}

static uint64_t
every_other_is_small(size_t i) {
    return (1 + i % 2 * 100) * (uint64_t)4096;
}

/* As many as are kept, and twice that: the larger ones stay. */
static void
test_the_smallest_are_left_out(void) {
    enum { N = 2 * PYA_SCAN_SPANS };
    struct pya_scan *scan = scanned_many(N, every_other_is_small);
    size_t n = 0;
    const struct pya_scan_growth *g = pya_scan_growths(scan, &n);
    CHECK(n >= PYA_SCAN_SPANS / 2 && n <= PYA_SCAN_SPANS);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(g[i].bytes, 101 * 4096);
        CHECK_EQ(g[i].end, 2 * N + g[i].begin + 1);
    }
    const struct pya_scan_block *spans = pya_scan_spans(scan, &n);
    CHECK(n >= PYA_SCAN_SPANS / 2 && n <= PYA_SCAN_SPANS);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(spans[i].bytes, 101 * 4096);
        CHECK_EQ(spans[i].addr, (1 + spans[i].alloc_event / 2) * MIB);
        CHECK_EQ(spans[i].free_event, 2 * N + spans[i].alloc_event - 1);
    }
    pya_scan_destroy(scan);
}

static void
check_half_is_kept(uint64_t (*bytes_of)(size_t i)) {
    struct pya_scan *scan = scanned_many(2 * PYA_SCAN_SPANS, bytes_of);
    size_t n = 0;
    (void)pya_scan_spans(scan, &n);
    CHECK(n >= PYA_SCAN_SPANS / 2 && n <= PYA_SCAN_SPANS);
    (void)pya_scan_growths(scan, &n);
    CHECK(n >= PYA_SCAN_SPANS / 2 && n <= PYA_SCAN_SPANS);
    pya_scan_destroy(scan);
}

static uint64_t
all_alike(size_t i) {
    (void)i;
    return 4096;
}

static uint64_t
beyond_any_memory(size_t i) {
    return UINT64_MAX - i;
}

/* None is smaller; a trace need not be from pyalloc. */
static void
test_of_one_size_some_are_kept(void) {
    check_half_is_kept(all_alike);
    check_half_is_kept(beyond_any_memory);
}

static const struct check_case cases[] = {
    {"whole segments", test_whole_segments},
    {"pages of one request are one piece", test_pages_of_one_request_are_one_piece},
    {"devices are apart", test_devices_are_apart},
    {"what was there before was for no request", test_what_was_there_before_was_for_no_request},
    {"segments have a request", test_segments_have_a_request},
    {"pages go from pool to pool", test_pages_go_from_pool_to_pool},
    {"pages between mappings", test_pages_between_mappings},
    {"ends of frees that are missing", test_ends_of_frees_that_are_missing},
    {"the peak has a request", test_the_peak_has_a_request},
    {"the smallest are left out", test_the_smallest_are_left_out},
    {"of one size some are kept", test_of_one_size_some_are_kept},
};

int
main(int argc, char **argv) {
    return check_main_with_file(argc, argv, cases, sizeof cases / sizeof *cases, path);
}
