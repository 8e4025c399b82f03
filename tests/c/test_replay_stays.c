/* Who held memory from one mark to another, and how high the rest stood, against a model that knows all lives. */
#include <unistd.h>

#include "check.h"
#include "scans.h"

#include "replay/scan.h"

enum { N_EVENTS = 4000, N_ADDRESSES = 64, N_DEVICES = 2, N_STACKS = 5, N_MARKS = 40 };

static char path[] = "/tmp/pya-stays-XXXXXX";

struct life {
    uint64_t begin, end, bytes, thread;
    uint32_t stack;
    int device;
};

struct model {
    struct life lives[N_EVENTS];
    size_t n_lives;
    size_t at[N_DEVICES][N_ADDRESSES]; /* index of what lives there + 1 */
};

static void
life_end(struct model *model, int device, size_t address, uint64_t event) {
    if (model->at[device][address] != 0) {
        model->lives[model->at[device][address] - 1].end = event;
        model->at[device][address] = 0;
    }
}

static void
event_make(struct model *model, uint64_t *rng, uint64_t event, struct pya_trace_event *e) {
    const int device = (int)check_below(rng, N_DEVICES);
    const size_t address = check_below(rng, N_ADDRESSES);
    const bool is_alloc = check_below(rng, 2) == 0;
    *e = (struct pya_trace_event){
        .kind = is_alloc ? PYA_TRACE_ALLOC : PYA_TRACE_FREE,
        .addr = (address + 1) << 20,
        .device = device,
        .time_ns = event};
    life_end(model, device, address, event);
    if (is_alloc) {
        e->bytes = check_log_size(rng, 1, UINT64_C(1) << 33);
        e->stack = (uint32_t)check_below(rng, N_STACKS);
        e->thread = 1 + check_below(rng, 2);
        model->lives[model->n_lives++] = (struct life){
            event, PYA_SCAN_NEVER, pya_round_up(e->bytes, PYA_ALIGN), e->thread, e->stack, device};
        model->at[device][address] = model->n_lives;
    }
}

static void
write_model(struct model *model, uint64_t *rng) {
    struct pya_trace_writer *writer = NULL;
    uint32_t name = 0;
    uint32_t stacks[N_STACKS] = {0};
    CHECK_OK(pya_trace_create(path, true, &writer));
    CHECK_OK(pya_trace_string(writer, "work", 4, &name));
    for (uint32_t i = 1; i < N_STACKS; i++) {
        CHECK_OK(pya_trace_stack(writer, &(struct pya_trace_frame){0, name, name, i}, &stacks[i]));
        CHECK_EQ(stacks[i], i);
    }
    for (uint64_t i = 0; i < N_EVENTS; i++) {
        struct pya_trace_event e;
        event_make(model, rng, i, &e);
        CHECK_OK(pya_trace_write(writer, &e));
    }
    CHECK_OK(pya_trace_close(writer));
}

static bool
is_alive(const struct life *life, uint64_t moment) {
    return life->begin < moment && life->end >= moment;
}

/* What is alive at a mark, by device, stack and thread. */
static void
check_mark(
    const struct model *model, const struct pya_scan *scan, const uint64_t *marks, uint32_t mark) {
    uint64_t of[N_DEVICES][N_STACKS][3] = {{{0}}};
    uint64_t n_blocks = 0;
    size_t n = 0;
    const struct pya_scan_stay *stays = pya_scan_stays(scan, &n);
    for (size_t i = 0; i < n; i++) {
        const struct pya_scan_stay *p = &stays[i];
        CHECK(p->first <= p->last && p->last < N_MARKS);
        if (p->first <= mark && mark <= p->last) {
            of[p->device][p->stack][p->thread] += p->bytes;
            n_blocks += p->n_blocks;
        }
    }
    for (size_t i = 0; i < model->n_lives; i++) {
        const struct life *life = &model->lives[i];
        if (is_alive(life, marks[mark])) {
            of[life->device][life->stack][life->thread] -= life->bytes;
            n_blocks--;
        }
    }
    CHECK_EQ(n_blocks, 0);
    for (size_t i = 0; i < sizeof of / sizeof(uint64_t); i++) {
        CHECK_EQ((&of[0][0][0])[i], 0);
    }
}

static void
test_against_model(void) {
    for (uint64_t seed = 1; seed <= 8; seed++) {
        uint64_t rng = seed;
        struct model *model = calloc(1, sizeof *model);
        uint64_t marks[N_MARKS]; /* before everything ... two at one moment ... at the end */
        write_model(model, &rng);
        for (uint64_t i = 0; i < N_MARKS; i++) {
            marks[i] = i == 7 ? marks[6] : i * N_EVENTS / (N_MARKS - 1);
        }
        struct pya_scan *scan = NULL;
        CHECK_OK(pya_scan_run(
            path,
            &(struct pya_scan_settings){
                .device = -1, .n_bins = 2, .marks = marks, .n_marks = N_MARKS},
            &scan));
        for (uint32_t i = 0; i < N_MARKS; i++) {
            check_mark(model, scan, marks, i);
        }
        size_t n = 0;
        const struct pya_scan_stay *stays = pya_scan_stays(scan, &n);
        for (size_t i = 0; i < n; i++) { /* they have everything in common, so they are one */
            for (size_t k = 0; k < i; k++) {
                struct pya_scan_stay other = stays[k];
                other.bytes = stays[i].bytes;
                other.n_blocks = stays[i].n_blocks;
                CHECK(memcmp(&other, &stays[i], sizeof other) != 0);
            }
        }
        pya_scan_destroy(scan);
        free(model);
    }
}

static uint64_t
bytes_at(const struct model *model, uint64_t moment) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < model->n_lives; i++) {
        bytes += is_alive(&model->lives[i], moment) ? model->lives[i].bytes : 0;
    }
    return bytes;
}

/* Bins lie end to end, and each knows the most, the least and the last of its own events. */
static void
test_bins(void) {
    uint64_t rng = 3;
    struct model *model = calloc(1, sizeof *model);
    write_model(model, &rng);
    struct pya_scan *scan = NULL;
    const struct pya_scan_settings settings = {.device = -1, .n_bins = 10};
    CHECK_OK(pya_scan_run(path, &settings, &scan));
    size_t n = 0;
    const struct pya_scan_bin *bins = pya_scan_bins(scan, &n);
    const uint64_t n_events = pya_scan_totals(scan)->n_events;
    CHECK(n >= 10);
    for (size_t i = 0; i < n; i++) {
        const uint64_t end = i + 1 == n ? n_events : bins[i + 1].event;
        uint64_t most = 0;
        uint64_t least = UINT64_MAX;
        for (uint64_t moment = bins[i].event + 1; moment <= end; moment++) {
            const uint64_t now = bytes_at(model, moment);
            most = now > most ? now : most;
            least = now < least ? now : least;
        }
        CHECK_EQ(bins[i].event, i * bins[1].event);
        CHECK_EQ(bins[i].max_bytes, most);
        CHECK_EQ(bins[i].min_bytes, least);
        CHECK_EQ(bins[i].last_bytes, bytes_at(model, end));
        CHECK(bins[i].max_event > bins[i].event && bins[i].max_event <= end);
        CHECK_EQ(bytes_at(model, bins[i].max_event), most);
    }
    pya_scan_destroy(scan);
    free(model);
}

/* Does something that is alive at a moment begin or end with the event before another moment? */
static bool
is_change(const struct model *model, uint64_t around, uint64_t moment) {
    for (size_t i = 0; i < model->n_lives; i++) {
        const struct life *life = &model->lives[i];
        if (is_alive(life, around) && (life->begin + 1 == moment || life->end + 1 == moment)) {
            return true;
        }
    }
    return false;
}

static void
test_heights(void) {
    const uint64_t arounds[] = {1, 300, 2000, N_EVENTS};
    for (uint64_t seed = 1; seed <= sizeof arounds / sizeof arounds[0]; seed++) {
        const uint64_t around = arounds[seed - 1];
        uint64_t rng = seed;
        struct model *model = calloc(1, sizeof *model);
        write_model(model, &rng);
        struct pya_scan *scan = NULL;
        const struct pya_scan_settings settings = {.device = -1, .n_bins = 2, .around = around};
        CHECK_OK(pya_scan_run(path, &settings, &scan));
        size_t n = 0;
        const struct pya_scan_height *heights = pya_scan_heights(scan, &n);
        size_t at = 0;
        uint64_t most = 0;
        CHECK(n > 0 && heights[0].event == 0);
        for (uint64_t moment = 0; moment <= N_EVENTS && at < n; moment++) {
            const bool begins = moment == 0 || is_change(model, around, moment);
            CHECK_EQ(begins, heights[at].event == moment);
            most = begins ? 0 : most;
            const uint64_t now = bytes_at(model, moment);
            most = now > most ? now : most;
            if (at + 1 == n ? moment == N_EVENTS : heights[at + 1].event == moment + 1) {
                CHECK_EQ(heights[at++].max_bytes, most);
            }
        }
        CHECK_EQ(at, n);
        pya_scan_destroy(scan);
        free(model);
    }
}

static void
test_no_host_memory(void) {
    uint64_t rng = 5;
    struct model *model = calloc(1, sizeof *model);
    write_model(model, &rng);
    free(model);
    const uint64_t marks[] = {50, 500, 2000, 3999};
    const struct pya_scan_settings settings = {
        .device = -1, .n_bins = 2, .marks = marks, .n_marks = 4, .around = 2000};
    scans_sweep(path, &settings);
}

static const struct check_case cases[] = {
    {"against_model", test_against_model},
    {"bins", test_bins},
    {"heights", test_heights},
    {"no_host_memory", test_no_host_memory},
};

int
main(int argc, char **argv) {
    const int fd = mkstemp(path);
    if (fd < 0) {
        return 1;
    }
    close(fd);
    const int failed = check_main(argc, argv, cases, sizeof cases / sizeof *cases);
    unlink(path);
    return failed;
}
