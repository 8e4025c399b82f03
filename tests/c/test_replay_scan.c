/* One pass over a trace: totals, moments, phases and the timeline against a naive model; any events whatever are
 * survived, and running out of host memory anywhere is told. */
#include <unistd.h>

#include "check.h"
#include "fault.h"

#include "replay/scan.h"

enum { N_ADDRESSES = 300, N_PAGES = 64 };

static char path[] = "/tmp/pya-scan-XXXXXX";

static struct pya_trace_writer *
begin(void) {
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    return writer;
}

static void
put(struct pya_trace_writer *writer, struct pya_trace_event event) {
    CHECK_OK(pya_trace_write(writer, &event));
}

struct model {
    uint64_t bytes[N_ADDRESSES]; /* 0: not alive */
    uint64_t born[N_ADDRESSES];
    bool page[N_PAGES];
    uint64_t allocated, reserved, peak, peak_event, n_live, n_unknown;
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
        struct pya_scan *scan = NULL;
        CHECK_OK(pya_scan_run(path, &settings, &scan));
        const struct pya_scan_totals *totals = pya_scan_totals(scan);
        CHECK_EQ(totals->n_events, n);
        CHECK_EQ(totals->peak_bytes, model.peak);
        CHECK_EQ(totals->peak_event, model.peak_event);
        CHECK_EQ(totals->end_bytes, model.allocated);
        CHECK_EQ(totals->n_live, model.n_live);
        CHECK_EQ(totals->n_unknown_frees, model.n_unknown);
        CHECK(totals->is_complete);
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
        pya_scan_destroy(scan);
    }
}

static void
write_phases(void) {
    struct pya_trace_writer *writer = begin();
    uint32_t outer = 0;
    uint32_t inner = 0;
    uint32_t module = 0;
    uint32_t kept = 0;
    CHECK_OK(pya_trace_string(writer, "outer", 5, &outer));
    CHECK_OK(pya_trace_string(writer, "inner", 5, &inner));
    CHECK_OK(pya_trace_string(writer, "module:a.b", 10, &module));
    CHECK_OK(pya_trace_string(writer, "parameters", 10, &kept));
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_STEP, .arg = 7});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = outer});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = module});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 512, .bytes = 1000});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = module});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_BEGIN, .text = inner});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .addr = 4096, .bytes = 512});
    /* inner is left open, as by an exception */
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_PHASE_END, .text = outer});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_CATEGORY, .addr = 512, .text = kept});
    put(writer, (struct pya_trace_event){.kind = PYA_TRACE_FREE, .addr = 512});
    CHECK_OK(pya_trace_close(writer));
}

static void
test_phases(void) {
    write_phases();
    const uint64_t moments[] = {5};
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = moments, .n_moments = 1};
    struct pya_scan *scan = NULL;
    CHECK_OK(pya_scan_run(path, &settings, &scan));
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
    CHECK_EQ(moment->blocks[0].free_event, 9);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].category), "parameters") == 0);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].module), "module:a.b") == 0);
    CHECK(strcmp(pya_trace_text(reader, moment->blocks[0].phase), "outer") == 0);
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
                            .kind = 1 + (int)check_below(&rng, PYA_TRACE_SYNC),
                            .device = (int)check_below(&rng, 3),
                            .addr = check_below(&rng, 40) << (check_below(&rng, 2) * 54),
                            .bytes = check_log_size(&rng, 1, UINT64_C(1) << 50),
                            .arg = check_random(&rng),
                            .text = check_below(&rng, 2) == 0 ? text : 0});
        }
        CHECK_OK(pya_trace_close(writer));
        const uint64_t moments[] = {100, 100, 2000, 1000000};
        const struct pya_scan_settings settings = {
            .device = seed % 2 == 0 ? -1 : 1, .n_bins = 2, .moments = moments, .n_moments = 4};
        struct pya_scan *scan = NULL;
        CHECK_OK(pya_scan_run(path, &settings, &scan));
        size_t n = 0;
        (void)pya_scan_moments(scan, &n);
        CHECK_EQ(n, 3); /* the last lies behind the end */
        pya_scan_destroy(scan);
    }
}

static void
test_no_host_memory(void) {
    write_phases();
    const uint64_t moments[] = {5};
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .moments = moments, .n_moments = 1};
    for (unsigned nth = 1;; nth++) {
        const size_t live = fault_live();
        struct pya_scan *scan = NULL;
        fault_arm(nth);
        const pya_status status = pya_scan_run(path, &settings, &scan);
        const bool fired = fault_disarm();
        if (!fired) {
            CHECK_OK(status);
            pya_scan_destroy(scan);
            break;
        }
        CHECK(status != PYA_OK);
        pya_scan_destroy(scan);
        CHECK_EQ(fault_live(), live);
    }
}

static const struct check_case cases[] = {
    {"against_model", test_against_model},
    {"phases", test_phases},
    {"nonsense", test_nonsense},
    {"no_host_memory", test_no_host_memory},
};

int
main(int argc, char **argv) {
    const int file = mkstemp(path);
    if (file < 0) {
        return 1;
    }
    close(file);
    const int result = check_main(argc, argv, cases, sizeof cases / sizeof *cases);
    unlink(path);
    return result;
}
