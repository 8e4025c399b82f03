/* One pass over a trace: totals, moments, phases and the timeline against a naive model.  Any events at all are
 * survived, and running out of host memory anywhere is reported.  Long because every kind of row is looked at. */
#include "check.h"
#include "scans.h"

#include "replay/scan.h"

enum { N_ADDRESSES = 300, N_PAGES = 64 };

static char path[] = "/tmp/pya-scan-XXXXXX";

static struct pya_scan *
scanned(const struct pya_scan_settings *settings) {
    struct pya_scan *scan = NULL;
    CHECK_OK(pya_scan_run(path, settings, &scan));
    return scan;
}

static struct pya_trace_writer *
begin(void) {
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    return writer;
}

static uint32_t
text(struct pya_trace_writer *writer, const char *name) {
    uint32_t number = 0;
    CHECK_OK(pya_trace_string(writer, name, strlen(name), &number));
    return number;
}

static void
put(struct pya_trace_writer *writer, struct pya_trace_event event) {
    CHECK_OK(pya_trace_write(writer, &event));
}

struct model {
    uint64_t bytes[N_ADDRESSES]; /* 0: not alive */
    uint64_t born[N_ADDRESSES];
    bool page[N_PAGES];
    uint64_t allocated, reserved, peak, peak_event, n_live, n_live_at_most, n_unknown;
};

static struct pya_trace_event
model_step(struct model *model, uint64_t *rng, uint64_t event) {
    const size_t i = check_below(rng, N_ADDRESSES);
    struct pya_trace_event e = {.addr = (i + 1) << 20, .time_ns = event};
    if (check_below(rng, 8) == 0) {
        const size_t page = check_below(rng, N_PAGES);
        e.addr = (UINT64_C(1) << 40) + page * PYA_PAGE;
        e.bytes = PYA_PAGE;
        e.kind = model->page[page] ? PYA_TRACE_SEGMENT_UNMAP : PYA_TRACE_SEGMENT_MAP;
        model->reserved += model->page[page] ? -PYA_PAGE : PYA_PAGE;
        model->page[page] = !model->page[page];
        return e;
    }
    const bool was = model->bytes[i] != 0;
    e.kind = check_below(rng, 2) == 0 ? PYA_TRACE_ALLOC : PYA_TRACE_FREE;
    model->n_unknown += was == (e.kind == PYA_TRACE_ALLOC);
    model->allocated -= model->bytes[i];
    model->n_live -= was;
    model->bytes[i] = 0;
    if (e.kind == PYA_TRACE_ALLOC) {
        e.bytes = 1 + check_below(rng, 100000);
        model->bytes[i] = pya_round_up(e.bytes, PYA_ALIGN);
        model->born[i] = event;
        model->allocated += model->bytes[i];
        model->n_live++;
        model->n_live_at_most += model->n_live > model->n_live_at_most;
    }
    if (model->allocated > model->peak) {
        model->peak = model->allocated;
        model->peak_event = event + 1;
    }
    return e;
}

static void
check_moment(const struct pya_scan_moment *moment, const struct model *model) {
    CHECK_EQ(moment->allocated_bytes, model->allocated);
    CHECK_EQ(moment->reserved_bytes, model->reserved);
    CHECK_EQ(moment->n_blocks, model->n_live);
    for (size_t i = 0; i < moment->n_blocks; i++) {
        const struct pya_scan_block *block = &moment->blocks[i];
        const size_t at = (block->addr >> 20) - 1;
        CHECK_EQ(pya_round_up(block->bytes, PYA_ALIGN), model->bytes[at]);
        CHECK_EQ(block->alloc_event, model->born[at]);
        CHECK(block->free_event >= moment->event);
    }
    uint64_t mapped = 0;
    uint64_t end = 0;
    for (size_t i = 0; i < moment->n_segments; i++) {
        CHECK(i == 0 || moment->segments[i].addr > end); /* neighbours are one */
        end = moment->segments[i].addr + moment->segments[i].bytes;
        mapped += moment->segments[i].bytes;
    }
    CHECK_EQ(mapped, model->reserved);
}

/* What has no stack, by phase, adds up to what stack 0 has. */
static void
check_stackless(const struct pya_scan *scan) {
    size_t n = 0;
    size_t n_stacks = 0;
    const struct pya_scan_stackless *parts = pya_scan_stackless(scan, &n);
    const struct pya_scan_stack *stacks = pya_scan_stacks(scan, &n_stacks);
    struct pya_scan_stack sum = {0};
    for (size_t i = 0; i < n; i++) {
        CHECK(parts[i].sums.n_live <= parts[i].sums.n_allocs);
        CHECK(parts[i].sums.live_bytes <= parts[i].sums.bytes);
        sum.n_allocs += parts[i].sums.n_allocs;
        sum.bytes += parts[i].sums.bytes;
        sum.n_live += parts[i].sums.n_live;
        sum.live_bytes += parts[i].sums.live_bytes;
    }
    const struct pya_scan_stack whole = n_stacks > 0 ? stacks[0] : (struct pya_scan_stack){0};
    CHECK_EQ(sum.n_allocs, whole.n_allocs);
    CHECK_EQ(sum.bytes, whole.bytes);
    CHECK_EQ(sum.n_live, whole.n_live);
    CHECK_EQ(sum.live_bytes, whole.live_bytes);
}

static void
test_against_model(void) {
    for (uint64_t seed = 1; seed <= 8; seed++) {
        uint64_t rng = seed;
        struct model model = {0};
        struct model middle = {0};
        const uint64_t n = 20000;
        struct pya_trace_writer *writer = begin();
        for (uint64_t i = 0; i < n; i++) {
            if (i == n / 2) {
                middle = model;
            }
            put(writer, model_step(&model, &rng, i));
        }
        CHECK_OK(pya_trace_close(writer));
        const uint64_t moments[] = {0, n / 2, n};
        const struct pya_scan_settings settings = {
            .device = -1, .n_bins = 100, .moments = moments, .n_moments = 3};
        struct pya_scan *scan = scanned(&settings);
        const struct pya_scan_totals *totals = pya_scan_totals(scan);
        CHECK_EQ(totals->n_events, n);
        CHECK_EQ(totals->peak_bytes, model.peak);
        CHECK_EQ(totals->peak_event, model.peak_event);
        CHECK_EQ(totals->end_bytes, model.allocated);
        CHECK_EQ(totals->n_live, model.n_live);
        CHECK_EQ(totals->n_live_at_most, model.n_live_at_most);
        CHECK_EQ(totals->n_unknown_frees, model.n_unknown);
        CHECK(totals->is_complete);
        check_stackless(scan);
        size_t n_moments = 0;
        const struct pya_scan_moment *found = pya_scan_moments(scan, &n_moments);
        CHECK_EQ(n_moments, 3);
        CHECK_EQ(found[0].n_blocks, 0);
        check_moment(&found[1], &middle);
        check_moment(&found[2], &model);
        size_t n_bins = 0;
        const struct pya_scan_bin *bins = pya_scan_bins(scan, &n_bins);
        CHECK(n_bins >= 100 && n_bins <= 200);
        uint64_t top = 0;
        for (size_t i = 0; i < n_bins; i++) {
            CHECK(bins[i].min_bytes <= bins[i].last_bytes);
            CHECK(bins[i].last_bytes <= bins[i].max_bytes);
            top = bins[i].max_bytes > top ? bins[i].max_bytes : top;
        }
        CHECK_EQ(top, model.peak);
        const uint64_t most = totals->peak_reserved_bytes;
        const uint64_t when[] = {totals->peak_reserved_event};
        pya_scan_destroy(scan);
        scan = scanned(&(struct pya_scan_settings){
            .device = -1, .n_bins = 2, .moments = when, .n_moments = 1});
        CHECK_EQ(pya_scan_moments(scan, &n_moments)->reserved_bytes, most);
        pya_scan_destroy(scan);
    }
}

static void
write_phases(void) {
    struct pya_trace_writer *writer = begin();
    uint32_t outer = text(writer, "outer");
    uint32_t inner = text(writer, "inner");
    uint32_t module = text(writer, "module:a.b");
    uint32_t kept = text(writer, "parameters");
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_STEP, .arg = 7});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = outer});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = module});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 512, .bytes = 1000});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = module});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = inner});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 4096, .bytes = 512});
    /* inner stays open, as after an exception */
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = outer});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_CATEGORY, .addr = 512, .text = kept});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_LABEL, .addr = 512, .text = inner});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_FREE, .addr = 512});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_THREAD, .arg = 7, .text = outer});
    CHECK_OK(pya_trace_close(writer));
}

static void
test_phases(void) {
    write_phases();
    const uint64_t moments[] = {5};
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = moments, .n_moments = 1};
    struct pya_scan *scan = scanned(&settings);
    size_t n = 0;
    const struct pya_scan_phase *phases = pya_scan_phases(scan, &n);
    CHECK_EQ(n, 2);
    CHECK_EQ(phases[0].begin, 1);
    CHECK_EQ(phases[0].end, 7);
    CHECK_EQ(phases[0].step, 8);
    CHECK_EQ(phases[0].begin_bytes, 0);
    CHECK_EQ(phases[0].peak_bytes, 1536);
    CHECK_EQ(phases[0].end_bytes, 1536);
    CHECK_EQ(phases[0].n_made, 2);
    CHECK_EQ(phases[0].n_left, 2);
    CHECK_EQ(phases[1].depth, 1);
    CHECK_EQ(phases[1].end, 7);
    CHECK_EQ(phases[1].begin_bytes, 1024);
    CHECK_EQ(phases[1].left_bytes, 512);
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    const struct pya_trace_reader *reader = pya_scan_reader(scan);
    CHECK_EQ(moment->n_blocks, 1);
    CHECK_EQ(moment->blocks[0].free_event, 10);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].label), "inner") == 0);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].category), "parameters") == 0);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].module), "module:a.b") == 0);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].phase), "outer") == 0);
    pya_scan_destroy(scan);
}

/* The end of a phase or module that is not open ends nothing; the end of an outer one ends those inside it. */
static void
test_ends_that_are_missing(void) {
    struct pya_trace_writer *writer = begin();
    const uint32_t outer[] = {text(writer, "outer"), text(writer, "module:a")};
    const uint32_t inner[] = {text(writer, "inner"), text(writer, "module:a.b")};
    for (uint64_t i = 0; i < 2; i++) {
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = outer[i]});
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = inner[i]});
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = inner[i]});
    }
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 512, .bytes = 1});
    for (uint64_t i = 0; i < 2; i++) {
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = outer[i]});
    }
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 1024, .bytes = 1});
    CHECK_OK(pya_trace_close(writer));
    const uint64_t moments[] = {10};
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = moments, .n_moments = 1};
    struct pya_scan *scan = scanned(&settings);
    size_t n = 0;
    const struct pya_scan_phase *phases = pya_scan_phases(scan, &n);
    CHECK_EQ(n, 2);
    CHECK_EQ(phases[0].end, 7);
    CHECK_EQ(phases[1].begin, 2);
    CHECK_EQ(phases[1].end, 7);
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    CHECK_EQ(moment->n_blocks, 2);
    for (size_t i = 0; i < moment->n_blocks; i++) {
        const struct pya_scan_block *block = &moment->blocks[i];
        CHECK_EQ(block->phase, block->addr == 512 ? inner[0] : 0);
        CHECK_EQ(block->module, block->addr == 512 ? inner[1] : 0);
    }
    pya_scan_destroy(scan);
}

/* Blocks at one address each; the window is events 100 to 299. */
static void
test_window(void) {
    static const struct {
        uint64_t begin, end;
        bool is_in;
    } lives[] = {{0, 99, false}, {1, 100, false},  {2, 101, true},    {150, 160, true},
                 {3, 301, true}, {299, 302, true}, {300, 310, false}, {250, 400, true}};
    enum { N = sizeof lives / sizeof *lives };
    struct pya_trace_writer *writer = begin();
    for (uint64_t event = 0; event < 400; event++) {
        struct pya_trace_event e = {.kind = PYA_TRACE_EMPTY_CACHE};
        for (size_t i = 0; i < N; i++) {
            if (event == lives[i].begin || event == lives[i].end) {
                e = (struct pya_trace_event){
                    .kind = event == lives[i].begin ? PYA_TRACE_ALLOC : PYA_TRACE_FREE,
                    .addr = (i + 1) << 20,
                    .bytes = 512};
            }
        }
        put(writer, e);
    }
    CHECK_OK(pya_trace_close(writer));
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 1000, .window_begin = 100, .window_end = 300};
    struct pya_scan *scan = scanned(&settings);
    size_t n = 0;
    const struct pya_scan_bin *bins = pya_scan_bins(scan, &n);
    CHECK_EQ(n, 200);
    CHECK_EQ(bins[0].event, 100);
    CHECK_EQ(bins[199].event, 299);
    bool found[N] = {false};
    const struct pya_scan_block *spans = pya_scan_spans(scan, &n);
    for (size_t i = 0; i < n; i++) {
        const size_t at = (spans[i].addr >> 20) - 1;
        found[at] = true;
        CHECK_EQ(spans[i].alloc_event, lives[at].begin);
        CHECK_EQ(spans[i].free_event, lives[at].end == 400 ? PYA_SCAN_NEVER : lives[at].end);
    }
    for (size_t i = 0; i < N; i++) {
        CHECK_EQ(found[i], lives[i].is_in);
    }
    pya_scan_destroy(scan);
}

/* More phases and steps than are kept are counted; the last step kept ends when the next begins. */
static void
test_more_than_is_kept(void) {
    enum { N = 65536 + 3 };
    struct pya_trace_writer *writer = begin();
    const uint32_t name = text(writer, "phase");
    for (uint64_t i = 0; i < N; i++) {
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_STEP, .arg = i, .time_ns = 10 * i});
        put(writer, (struct pya_trace_event){
                        .kind = PYA_TRACE_PHASE_BEGIN, .text = name, .time_ns = 10 * i + 1});
        if (i == 1 || i == 2 || i == N - 1) {
            put(writer, (struct pya_trace_event){
                            .kind = PYA_TRACE_ALLOC,
                            .addr = i << 20,
                            .bytes = 512 * i,
                            .time_ns = 10 * i + 2});
        }
        put(writer, (struct pya_trace_event){
                        .kind = PYA_TRACE_PHASE_END, .text = name, .time_ns = 10 * i + 3});
    }
    CHECK_OK(pya_trace_close(writer));
    const uint64_t end = UINT64_MAX;
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = &end, .n_moments = 1};
    struct pya_scan *scan = scanned(&settings);
    size_t n = 0;
    const struct pya_scan_step *steps = pya_scan_steps(scan, &n);
    CHECK_EQ(n, 65536);
    CHECK_EQ(steps[n - 1].peak_bytes, 1536);
    CHECK_EQ(steps[2].number, 2);
    CHECK_EQ(steps[2].time_ns, 20);
    CHECK_EQ(steps[2].event, 7);
    CHECK_EQ(steps[2].allocated_bytes, 512);
    CHECK_EQ(steps[2].peak_bytes, 1536);
    CHECK_EQ(steps[1].peak_bytes, 512);
    const struct pya_scan_phase *phases = pya_scan_phases(scan, &n);
    CHECK_EQ(n, 65536);
    CHECK_EQ(phases[2].begin_ns, 21);
    CHECK_EQ(phases[2].end_ns, 23);
    CHECK_EQ(pya_scan_totals(scan)->n_lost, 6);
    /* Later ones still get their phase and step. */
    CHECK_EQ(pya_scan_totals(scan)->peak_phase, name);
    CHECK_EQ(pya_scan_totals(scan)->peak_step, N);
    CHECK_EQ(pya_scan_totals(scan)->last_ns, 10 * (N - 1) + 3);
    pya_scan_destroy(scan);
}

/* Blocks without a stack are told apart by the first phases; those of all other phases count as without one. */
static void
test_more_phases_than_are_told_apart(void) {
    enum { N = 70 };
    struct pya_trace_writer *writer = begin();
    for (uint64_t i = 0; i < 2 * (uint64_t)N; i++) {
        const char name[] = {'p', (char)('0' + i % N), 0};
        const uint32_t phase = text(writer, name);
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = phase});
        put(writer,
            (struct pya_trace_event){
                .kind = PYA_TRACE_ALLOC, .addr = (i + 1) << 20, .bytes = 512 * (i % N + 1)});
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = phase});
    }
    for (uint64_t i = 0; i < N; i++) {
        put(writer, (struct pya_trace_event){.kind = PYA_TRACE_FREE, .addr = (i + 1) << 20});
    }
    CHECK_OK(pya_trace_close(writer));
    struct pya_scan *scan = scanned(&(struct pya_scan_settings){.device = -1, .n_bins = 2});
    check_stackless(scan);
    size_t n = 0;
    const struct pya_scan_stackless *parts = pya_scan_stackless(scan, &n);
    CHECK_EQ(n, 64);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(parts[i].sums.n_allocs, 2 * parts[i].sums.n_live);
        CHECK_EQ(parts[i].sums.n_live, parts[i].phase == 0 ? N - 63 : 1);
    }
    pya_scan_destroy(scan);
}

/* What belongs to one device counts for it; a scan of one device leaves out the others. */
static void
test_devices(void) {
    struct pya_trace_writer *writer = begin();
    for (int device = 0; device < 2; device++) {
        const uint64_t n = device == 0 ? 1 : 3;
        put(writer,
            (struct pya_trace_event){.kind = PYA_TRACE_DEVICE, .device = device, .bytes = n << 30});
        for (uint64_t i = 0; i < n; i++) {
            put(writer, (struct pya_trace_event){
                            .kind = PYA_TRACE_ALLOC,
                            .device = device,
                            .addr = (i + 1) << 20,
                            .stream = i,
                            .bytes = 512});
            put(writer, (struct pya_trace_event){
                            .kind = PYA_TRACE_RECORD_STREAM, .device = device, .addr = 1 << 20});
        }
        for (int kind = PYA_TRACE_SEGMENT_ALLOC; kind <= PYA_TRACE_SEGMENT_FREE; kind++) {
            put(writer, (struct pya_trace_event){
                            .kind = kind, .device = device, .addr = PYA_PAGE, .bytes = n << 21});
        }
        put(writer, (struct pya_trace_event){
                        .kind = PYA_TRACE_OOM, .device = device, .bytes = 100 + n, .arg = n});
    }
    CHECK_OK(pya_trace_close(writer));
    for (int device = -1; device < 2; device++) {
        const uint64_t n = device < 0 ? 4 : device == 0 ? 1 : 3;
        const struct pya_scan_settings settings = {.device = device, .n_bins = 2};
        struct pya_scan *scan = scanned(&settings);
        const struct pya_scan_totals *totals = pya_scan_totals(scan);
        CHECK_EQ(totals->n_allocs, n);
        CHECK_EQ(totals->n_streams, n);
        CHECK_EQ(totals->n_record_streams, n);
        CHECK_EQ(totals->end_bytes, n * 512);
        CHECK_EQ(totals->device_peak[0], device == 1 ? 0 : 512);
        CHECK_EQ(totals->device_peak_reserved[0], device == 1 ? 0 : PYA_PAGE);
        CHECK_EQ(totals->device_peak_reserved[1], device == 0 ? 0 : 3 * PYA_PAGE);
        CHECK_EQ(totals->peak_reserved_bytes, (device == 0 ? 1 : 3) * PYA_PAGE);
        CHECK_EQ(totals->device_peak[1], device == 0 ? 0 : 3 * 512);
        CHECK_EQ(totals->capacity[1], device == 0 ? 0 : UINT64_C(3) << 30);
        size_t n_ooms = 0;
        const struct pya_scan_oom *ooms = pya_scan_ooms(scan, &n_ooms);
        CHECK_EQ(n_ooms, device < 0 ? 2 : 1);
        CHECK_EQ(ooms[n_ooms - 1].bytes, device == 0 ? 101 : 103);
        CHECK_EQ(ooms[n_ooms - 1].free_bytes, device == 0 ? 1 : 3);
        pya_scan_destroy(scan);
    }
}

/* Part of a mapping goes: its end, its middle, its beginning, all of it. */
static void
test_parts_of_segments(void) {
    static const struct {
        int kind;
        uint64_t page, n_pages, n_segments;
    } steps[] = {
        {PYA_TRACE_SEGMENT_MAP, 0, 10, 1},
        {PYA_TRACE_SEGMENT_UNMAP, 9, 1, 1},
        {PYA_TRACE_SEGMENT_UNMAP, 4, 1, 2},
        {PYA_TRACE_SEGMENT_UNMAP, 0, 1, 2},
        {PYA_TRACE_SEGMENT_MAP, 9, 1, 2},
        {PYA_TRACE_SEGMENT_MAP, 4, 1, 1},
        {PYA_TRACE_SEGMENT_MAP, 0, 1, 1},
        {PYA_TRACE_SEGMENT_ALLOC, 10, 3, 2},
        {PYA_TRACE_SEGMENT_FREE, 10, 3, 1},
        {PYA_TRACE_SEGMENT_UNMAP, 2, 5, 2},
        {PYA_TRACE_SEGMENT_UNMAP, 0, 10, 0},
        {PYA_TRACE_SEGMENT_ALLOC, 0, 8, 1},
        /* given back unseen, and taken again in other sizes */
        {PYA_TRACE_SEGMENT_ALLOC, 0, 8, 1},
        {PYA_TRACE_SEGMENT_ALLOC, 4, 2, 3},
        {PYA_TRACE_SEGMENT_MAP, 3, 2, 4},
    };
    enum { N = sizeof steps / sizeof *steps };
    const uint64_t base = UINT64_C(1) << 40;
    uint64_t moments[N];
    struct pya_trace_writer *writer = begin();
    for (size_t i = 0; i < N; i++) {
        put(writer, (struct pya_trace_event){
                        .kind = steps[i].kind,
                        .addr = base + steps[i].page * PYA_PAGE,
                        .bytes = steps[i].n_pages * PYA_PAGE});
        moments[i] = i + 1;
    }
    CHECK_OK(pya_trace_close(writer));
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = moments, .n_moments = N};
    struct pya_scan *scan = scanned(&settings);
    size_t n = 0;
    const struct pya_scan_moment *found = pya_scan_moments(scan, &n);
    CHECK_EQ(n, N);
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = 0;
        for (size_t k = 0; k < found[i].n_segments; k++) {
            const struct pya_scan_segment *segment = &found[i].segments[k];
            CHECK(k == 0 || segment->addr >= segment[-1].addr + segment[-1].bytes);
            bytes += segment->bytes;
        }
        CHECK_EQ(found[i].n_segments, steps[i].n_segments);
        CHECK_EQ(found[i].reserved_bytes, bytes);
    }
    CHECK_EQ(pya_scan_totals(scan)->peak_reserved_bytes, 13 * PYA_PAGE);
    CHECK_EQ(pya_scan_totals(scan)->n_segment_events, N);
    pya_scan_destroy(scan);
}

/* Blocks whose segment is not in the trace use no other: on another device, or behind them. */
static void
test_blocks_without_their_segment(void) {
    const uint64_t base = UINT64_C(1) << 40;
    struct pya_trace_writer *writer = begin();
    put(writer, (struct pya_trace_event){
                    .kind = PYA_TRACE_SEGMENT_ALLOC, .device = 1, .addr = base, .bytes = PYA_PAGE});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = base, .bytes = 512});
    put(writer, (struct pya_trace_event){
                    .kind = PYA_TRACE_ALLOC, .device = 1, .addr = base - 512, .bytes = 512});
    CHECK_OK(pya_trace_close(writer));
    const uint64_t end = 3;
    struct pya_scan *scan = scanned(
        &(struct pya_scan_settings){.device = -1, .n_bins = 2, .moments = &end, .n_moments = 1});
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    CHECK_EQ(moment->n_segments, 1);
    CHECK(!moment->segments[0].is_used && !moment->segments[0].is_known);
    pya_scan_destroy(scan);
}

/* Events that make no sense together. */
static void
test_nonsense(void) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t rng = seed;
        struct pya_trace_writer *writer = begin();
        uint32_t text = 0;
        CHECK_OK(pya_trace_string(writer, "text", 4, &text));
        for (int i = 0; i < 3000; i++) {
            put(writer, (struct pya_trace_event){
                            .kind = 1 + (int)check_below(&rng, PYA_TRACE_SEGMENT_POOL),
                            .device = (int)check_below(&rng, 3),
                            .addr = check_below(&rng, 40) << (check_below(&rng, 2) * 54),
                            .bytes = check_log_size(&rng, 1, UINT64_C(1) << 50),
                            .arg = check_random(&rng),
                            .text = check_below(&rng, 2) == 0 ? text : 0});
        }
        CHECK_OK(pya_trace_close(writer));
        const uint64_t moments[] = {100, 100, 2000, 1000000};
        const struct pya_scan_range all = {0, UINT64_MAX};
        const struct pya_scan_settings settings = {
            .device = seed % 2 == 0 ? -1 : 1,
            .n_bins = 2,
            .moments = moments,
            .n_moments = 4,
            .ranges = &all,
            .n_ranges = 1};
        struct pya_scan *scan = scanned(&settings);
        size_t n = 0;
        (void)pya_scan_moments(scan, &n);
        CHECK_EQ(n, 3); /* the last lies behind the end */
        check_stackless(scan);
        pya_scan_destroy(scan);
    }
}

/* Blocks have their threads, and names belong to all devices; of too many, the first are kept. */
static void
test_threads(void) {
    enum { N = 65536 + 2 };
    struct pya_trace_event name = {.kind = PYA_TRACE_THREAD, .arg = UINT64_C(1) << 40};
    struct pya_trace_event alloc = {.kind = PYA_TRACE_ALLOC, .addr = 512, .bytes = 512};
    struct pya_trace_writer *writer = begin();
    name.text = text(writer, "worker");
    for (alloc.device = 0; alloc.device < 2; alloc.device++) {
        alloc.thread = name.arg + (uint64_t)alloc.device;
        put(writer, alloc);
    }
    for (size_t i = 0; i < N; i++, name.arg++) {
        put(writer, name);
    }
    CHECK_OK(pya_trace_close(writer));
    const uint64_t end = N + 2;
    struct pya_scan *scan = scanned(
        &(struct pya_scan_settings){.device = 1, .n_bins = 2, .moments = &end, .n_moments = 1});
    size_t n = 0;
    const struct pya_scan_thread *threads = pya_scan_threads(scan, &n);
    CHECK(n == N - 2 && threads[n - 1].thread == name.arg - 3 && threads[n - 1].text == name.text);
    CHECK_EQ(pya_scan_totals(scan)->n_lost, 2);
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    CHECK(moment->n_blocks == 1 && moment->blocks[0].thread == (UINT64_C(1) << 40) + 1);
    pya_scan_destroy(scan);
}

static void
test_no_host_memory(void) {
    write_phases();
    const uint64_t moments[] = {5};
    const struct pya_scan_settings settings = {
        .device = -1,
        .n_bins = 2,
        .moments = moments,
        .n_moments = 1,
        .ranges = &(struct pya_scan_range){0, 100},
        .n_ranges = 1};
    scans_sweep(path, &settings);
}

static const struct check_case cases[] = {
    {"against_model", test_against_model},
    {"phases", test_phases},
    {"missing_ends", test_ends_that_are_missing},
    {"window", test_window},
    {"more_than_is_kept", test_more_than_is_kept},
    {"devices", test_devices},
    {"parts_of_segments", test_parts_of_segments},
    {"blocks_without_their_segment", test_blocks_without_their_segment},
    {"nonsense", test_nonsense},
    {"no_host_memory", test_no_host_memory},
    {"threads", test_threads},
    {"many_phases", test_more_phases_than_are_told_apart},
};

int
main(int argc, char **argv) {
    return check_main_with_file(argc, argv, cases, sizeof cases / sizeof *cases, path);
}
