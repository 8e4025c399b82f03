/* What is freed soon, and requests by size, against a model that knows all lives. */
#include <unistd.h>

#include "check.h"
#include "scans.h"

#include "replay/scan.h"

enum { N_EVENTS = 4000, N_ADDRESSES = 24, N_DEVICES = 2, N_STACKS = 3 };

static char path[] = "/tmp/pya-temporary-XXXXXX";

struct life {
    uint64_t begin, end, request, bytes, asked, n_between;
    uint32_t stack;
    int device;
};

struct model {
    struct life lives[N_EVENTS];
    size_t n_lives;
    size_t at[N_DEVICES][N_ADDRESSES]; /* index of what lives there + 1 */
    uint64_t n_requests[N_DEVICES];
};

static void
life_end(struct model *model, int device, size_t address, uint64_t event) {
    const size_t i = model->at[device][address];
    if (i == 0) {
        return;
    }
    struct life *life = &model->lives[i - 1];
    life->end = event;
    life->n_between = model->n_requests[device] - life->request - 1;
    model->at[device][address] = 0;
}

/* Mostly the newest is freed, so that lives of all lengths occur.  Some frees are of nothing, some are missing. */
static void
event_make(struct model *model, uint64_t *rng, uint64_t event, struct pya_trace_event *e) {
    const int device = (int)check_below(rng, N_DEVICES);
    const size_t address =
        check_below(rng, N_ADDRESSES) * check_below(rng, N_ADDRESSES) / N_ADDRESSES;
    const bool is_alloc = check_below(rng, 2) == 0;
    *e = (struct pya_trace_event){
        .kind = is_alloc ? PYA_TRACE_ALLOC : PYA_TRACE_FREE,
        .addr = (address + 1) << 20,
        .device = device,
        .time_ns = event};
    life_end(model, device, address, event);
    if (!is_alloc) {
        return;
    }
    e->bytes = check_below(rng, 20) == 0 ? 0 : check_log_size(rng, 1, UINT64_C(1) << 33);
    e->stack = (uint32_t)check_below(rng, N_STACKS);
    model->lives[model->n_lives++] = (struct life){
        .begin = event,
        .end = PYA_SCAN_NEVER,
        .request = model->n_requests[device]++,
        .bytes = pya_round_up(e->bytes, PYA_ALIGN),
        .asked = e->bytes,
        .n_between = PYA_SCAN_NEVER,
        .stack = e->stack,
        .device = device};
    model->at[device][address] = model->n_lives;
}

static void
write_events(struct model *model, uint64_t seed) {
    uint64_t rng = seed;
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    uint32_t file = 0;
    CHECK_OK(pya_trace_string(writer, "a.py", 4, &file));
    for (uint32_t i = 1; i < N_STACKS; i++) {
        uint32_t stack = 0;
        const struct pya_trace_frame frame = {.name = file, .file = file, .line = i};
        CHECK_OK(pya_trace_stack(writer, &frame, &stack));
        CHECK_EQ(stack, i);
    }
    for (uint64_t i = 0; i < N_EVENTS; i++) {
        struct pya_trace_event e;
        event_make(model, &rng, i, &e);
        CHECK_OK(pya_trace_write(writer, &e));
    }
    CHECK_OK(pya_trace_close(writer));
}

/* The most that is allocated after an event, on one device, without temporary blocks. */
static uint64_t
lasting_peak(const struct model *model, int device, uint64_t short_life) {
    static int64_t change[N_EVENTS + 1];
    memset(change, 0, sizeof change);
    for (size_t i = 0; i < model->n_lives; i++) {
        const struct life *life = &model->lives[i];
        if (life->device != device || life->n_between < short_life) {
            continue;
        }
        change[life->begin] += (int64_t)life->bytes;
        change[life->end < N_EVENTS ? life->end : N_EVENTS] -= (int64_t)life->bytes;
    }
    int64_t now = 0;
    int64_t most = 0;
    for (size_t i = 0; i < N_EVENTS; i++) {
        now += change[i];
        most = now > most ? now : most;
    }
    return (uint64_t)most;
}

static void
check_sums(const struct pya_scan *scan, const struct model *model, uint64_t short_life) {
    struct pya_scan_stack wanted[N_STACKS] = {{0}};
    struct pya_scan_size sizes[PYA_SCAN_SIZES] = {{0}};
    for (size_t i = 0; i < model->n_lives; i++) {
        const struct life *life = &model->lives[i];
        struct pya_scan_stack *sums = &wanted[life->stack];
        sums->n_allocs++;
        sums->bytes += life->bytes;
        sums->n_temporary += life->n_between < short_life;
        sums->temporary_bytes += life->n_between < short_life ? life->bytes : 0;
        size_t bit = 0;
        while (bit < 63 && life->asked >> (bit + 1) != 0) {
            bit++;
        }
        sizes[bit].n_allocs++;
        sizes[bit].bytes += life->bytes;
    }
    size_t n = 0;
    const struct pya_scan_stack *stacks = pya_scan_stacks(scan, &n);
    CHECK_EQ(n, N_STACKS);
    for (size_t i = 0; i < N_STACKS; i++) {
        CHECK_EQ(stacks[i].n_allocs, wanted[i].n_allocs);
        CHECK_EQ(stacks[i].bytes, wanted[i].bytes);
        CHECK_EQ(stacks[i].n_temporary, wanted[i].n_temporary);
        CHECK_EQ(stacks[i].temporary_bytes, wanted[i].temporary_bytes);
    }
    const struct pya_scan_stackless *stackless = pya_scan_stackless(scan, &n);
    CHECK(n == 1 && stackless->sums.n_temporary == wanted[0].n_temporary);
    CHECK_EQ(stackless->sums.temporary_bytes, wanted[0].temporary_bytes);
    CHECK(memcmp(pya_scan_sizes(scan), sizes, sizeof sizes) == 0);
}

/* What is alive at the moment in the middle knows how long it will be. */
static void
check_moment(const struct pya_scan *scan, const struct model *model) {
    size_t n = 0;
    const struct pya_scan_moment *moment = pya_scan_moments(scan, &n);
    CHECK_EQ(n, 1);
    size_t n_found = 0;
    for (size_t i = 0; i < model->n_lives; i++) {
        const struct life *life = &model->lives[i];
        if (life->begin >= moment->event || life->end < moment->event) {
            continue;
        }
        n_found++;
        const struct pya_scan_block *block = moment->blocks;
        while (block < moment->blocks + moment->n_blocks && block->alloc_event != life->begin) {
            block++;
        }
        CHECK(block < moment->blocks + moment->n_blocks && block->n_between == life->n_between);
    }
    CHECK(n_found > 5 && n_found == moment->n_blocks);
}

static void
test_against_model(void) {
    static struct model model;
    static const size_t lives[] = {0, 1, 2, 3, 17, 400, PYA_SCAN_SHORTEST};
    for (uint64_t seed = 1; seed <= 4; seed++) {
        memset(&model, 0, sizeof model);
        write_events(&model, seed);
        uint64_t before = PYA_SCAN_NEVER;
        for (size_t i = 0; i < sizeof lives / sizeof *lives; i++) {
            const uint64_t middle = N_EVENTS / 2;
            const struct pya_scan_settings settings = {
                .device = -1,
                .n_bins = 2,
                .moments = &middle,
                .n_moments = 1,
                .short_life = lives[i]};
            struct pya_scan *scan = NULL;
            CHECK_OK(pya_scan_run(path, &settings, &scan));
            const struct pya_scan_totals *totals = pya_scan_totals(scan);
            check_sums(scan, &model, lives[i]);
            check_moment(scan, &model);
            for (int device = 0; device < N_DEVICES; device++) {
                const uint64_t lasting = totals->device_peak_lasting[device];
                CHECK_EQ(lasting, lives[i] == 0 ? 0 : lasting_peak(&model, device, lives[i]));
                CHECK(lasting <= totals->device_peak[device]);
            }
            if (lives[i] > 0) { /* the longer a life may be to count as short, the less is left */
                CHECK(totals->device_peak_lasting[0] <= before);
                before = totals->device_peak_lasting[0];
            }
            pya_scan_destroy(scan);
        }
    }
}

static void
test_too_long_is_refused(void) {
    struct pya_scan *scan = NULL;
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .short_life = PYA_SCAN_SHORTEST + 1};
    CHECK_EQ(pya_scan_run(path, &settings, &scan), PYA_E_INVAL);
    CHECK(scan == NULL);
}

static void
test_no_host_memory(void) {
    static struct model model;
    memset(&model, 0, sizeof model);
    write_events(&model, 9);
    const struct pya_scan_settings settings = {.device = -1, .n_bins = 2, .short_life = 8};
    scans_sweep(path, &settings);
}

static const struct check_case cases[] = {
    {"against_model", test_against_model},
    {"too_long_is_refused", test_too_long_is_refused},
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
