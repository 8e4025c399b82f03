/* What the calls cost, and which of them wait, while another stream has work; and what the work loses by the calls. */
#include "work.h"

#include <stdio.h>

enum { MOST = 64 };

/* Pages that are mapped and open at home throughout, so that a call meets what it meets in the allocator. */
static struct {
    size_t n; /* of the calls at hand */
    uint64_t pages[MOST];
    uint64_t fresh[MOST];
    pya_dptr home, view, range, plain;
    cuda_stream other; /* with nothing to do */
    cuda_event event;
} at;

static void
open_standing(void) {
    at.other = costs_stream();
    at.event = costs_event();
    at.plain = costs_alloc(PYA_PAGE);
    if (bench.has_vmm) {
        at.home = costs_reserve(MOST * PYA_PAGE);
        at.view = costs_reserve(MOST * PYA_PAGE);
        for (size_t i = 0; i < MOST; i++) {
            at.pages[i] = costs_create(PYA_PAGE);
            costs_map(at.home + i * PYA_PAGE, PYA_PAGE, at.pages[i]);
        }
        costs_set_access(at.home, MOST * PYA_PAGE);
    }
}

static void
close_standing(void) {
    if (bench.has_vmm) {
        costs_unmap(at.home, MOST * PYA_PAGE);
        for (size_t i = 0; i < MOST; i++) {
            costs_release(at.pages[i]);
        }
        costs_unreserve(at.home, MOST * PYA_PAGE);
        costs_unreserve(at.view, MOST * PYA_PAGE);
    }
    costs_free(at.plain);
    WANT(cuEventDestroy, at.event);
    WANT_MORE(cuStreamDestroy, at.other);
}

/* ---- acts: each with what comes before and after, which is not timed ---- */

static void
nothing(void) {}

static void
reserve(void) {
    at.range = costs_reserve(at.n * PYA_PAGE);
}

static void
unreserve(void) {
    costs_unreserve(at.range, at.n * PYA_PAGE);
}

static void
create(void) {
    for (size_t i = 0; i < at.n; i++) {
        at.fresh[i] = costs_create(PYA_PAGE);
    }
}

static void
release(void) {
    for (size_t i = 0; i < at.n; i++) {
        costs_release(at.fresh[i]);
    }
}

static void
map(void) {
    for (size_t i = 0; i < at.n; i++) {
        costs_map(at.view + i * PYA_PAGE, PYA_PAGE, at.pages[at.n - 1 - i]);
    }
}

static void
set_access(void) {
    costs_set_access(at.view, at.n * PYA_PAGE);
}

static void
unmap(void) {
    costs_unmap(at.view, at.n * PYA_PAGE);
}

static void
map_open(void) {
    map();
    set_access();
}

/* Memory that was in use, given back: its last mapping goes, too. */
static void
prepare_dropping(void) {
    reserve();
    create();
    for (size_t i = 0; i < at.n; i++) {
        costs_map(at.range + i * PYA_PAGE, PYA_PAGE, at.fresh[i]);
    }
    costs_set_access(at.range, at.n * PYA_PAGE);
    WANT_MORE(cuMemsetD32Async, at.range, 1, at.n * PYA_PAGE / 4, at.other);
    WANT(cuStreamSynchronize, at.other);
}

static void
drop(void) {
    costs_unmap(at.range, at.n * PYA_PAGE);
    release();
}

static void
alloc(void) {
    at.range = costs_alloc(at.n * PYA_PAGE);
}

static void
free_plain(void) {
    costs_free(at.range);
}

static void
mem_info(void) {
    size_t free_bytes;
    size_t total;
    WANT(cuMemGetInfo, &free_bytes, &total);
}

static void
record(void) {
    WANT(cuEventRecord, at.event, at.other);
}

static void
query(void) {
    const cuda_result result = bench.cu->cuEventQuery(at.event);
    if (result != CUDA_NOT_READY) {
        costs_want(result, "cuEventQuery");
    }
}

static void
record_and_wait(void) {
    record();
    WANT(cuEventSynchronize, at.event);
}

static void
launch(void) {
    WANT_MORE(cuMemsetD32Async, at.plain, 1, 1024, at.other);
}

static void
launch_and_wait(void) {
    launch();
    WANT(cuStreamSynchronize, at.other);
}

static void
sync_other(void) {
    WANT(cuStreamSynchronize, at.other);
}

struct act {
    const char *what;
    void (*before)(void);
    void (*act)(void);
    void (*after)(void);
    bool has_pages;
    bool needs_vmm;
};

static const struct act acts[] = {
    {"cuMemAddressReserve", nothing, reserve, unreserve, true, true},
    {"cuMemAddressFree", reserve, unreserve, nothing, true, true},
    {"cuMemCreate", nothing, create, release, true, true},
    {"cuMemRelease", create, release, nothing, true, true},
    {"cuMemMap", nothing, map, unmap, true, true},
    {"cuMemSetAccess", map, set_access, unmap, true, true},
    {"cuMemUnmap", map_open, unmap, nothing, true, true},
    {"cuMemUnmap, cuMemRelease of used pages", prepare_dropping, drop, unreserve, true, true},
    {"cuMemAlloc", nothing, alloc, free_plain, true, false},
    {"cuMemFree", alloc, free_plain, nothing, true, false},
    {"cuMemGetInfo", nothing, mem_info, nothing, false, false},
    {"cuEventRecord, idle stream", nothing, record, nothing, false, false},
    {"cuEventQuery", record, query, nothing, false, false},
    {"record, cuEventSynchronize, idle stream", nothing, record_and_wait, nothing, false, false},
    {"small memset, idle stream", nothing, launch, sync_other, false, false},
    {"small memset and its wait", nothing, launch_and_wait, nothing, false, false},
};
enum { N_ACTS = sizeof acts / sizeof *acts };

static const char BUSY[] = "busy";
static const char QUIET[] = "quiet"; /* the same without work */

static void
perform(const struct act *act, struct costs_work *work, double work_ms) {
    const uint64_t pages = act->has_pages ? at.n : 0;
    act->before();
    if (work_ms > 0) {
        costs_work_queue(work, work_ms);
    }
    const bool was_over = costs_work_is_over(work);
    const double began = now_ns();
    act->act();
    costs_add(work_ms > 0 ? BUSY : QUIET, act->what, pages, "us", (now_ns() - began) / 1e3);
    if (!was_over) {
        costs_add(BUSY, act->what, pages, "waited", costs_work_is_over(work) ? 1 : 0);
    }
    if (work_ms > 0) {
        costs_add(BUSY, act->what, pages, "work ms", costs_work_wait(work));
    }
    act->after();
}

static void
print_acts(void) {
    printf(
        "us of the whole call (or calls, for pages); waited: the work was over when it came back\n\n");
    printf(
        "| call | pages | idle us | busy us | waited | the work ms |\n|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < N_ACTS; i++) {
        for (uint64_t n = 1; n <= MOST; n += MOST - 1) {
            const uint64_t pages = acts[i].has_pages ? n : 0;
            if (n > 1 && !acts[i].has_pages) {
                break;
            }
            const struct costs_summed waited = costs_sum(BUSY, acts[i].what, pages, "waited");
            char times[48] = "too little work to tell";
            if (waited.n > 0) {
                (void)snprintf(
                    times, sizeof times, "%.0f of %zu", waited.mean * (double)waited.n, waited.n);
            }
            printf(
                "| %s | %llu | %s | %s | %s | %s |\n", acts[i].what, (unsigned long long)pages,
                costs_cell(QUIET, acts[i].what, pages, "us", 1),
                costs_cell(BUSY, acts[i].what, pages, "us", 1), times,
                costs_cell(BUSY, acts[i].what, pages, "work ms", 1));
        }
    }
}

void
costs_busy(void) {
    struct costs_work work;
    const int rounds = bench.is_small ? 2 : 5;
    const double end = now_ns() + 6e9;
    costs_work_open(&work);
    open_standing();
    for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
        for (size_t i = 0; i < N_ACTS; i++) {
            if (acts[i].needs_vmm && !bench.has_vmm) {
                continue;
            }
            for (at.n = 1; at.n <= (acts[i].has_pages ? MOST : 1); at.n += MOST - 1) {
                perform(&acts[i], &work, 0);
                perform(&acts[i], &work, 25);
            }
        }
    }
    close_standing();
    costs_work_close(&work);
    print_acts();
}

/* ---- what the work loses ---- */

static void
stitch(void) {
    map_open();
    unmap();
}

static void
create_release(void) {
    create();
    release();
}

static void
alloc_free(void) {
    alloc();
    free_plain();
}

/* The allocator's growth: everything at once, 20 MiB. */
static void
grow_shrink(void) {
    prepare_dropping();
    drop();
    unreserve();
}

static const struct act loops[] = {
    {"nothing else", nothing, nothing, nothing, false, false},
    {"launches on another stream", nothing, launch_and_wait, nothing, false, false},
    {"cuMemCreate, cuMemRelease", nothing, create_release, nothing, false, true},
    {"cuMemMap, cuMemSetAccess, cuMemUnmap", nothing, stitch, nothing, false, true},
    {"cuMemSetAccess of an open range", map_open, set_access, unmap, false, true},
    {"create, map, open, memset, unmap, release", nothing, grow_shrink, nothing, false, true},
    {"cuMemAlloc, cuMemFree", nothing, alloc_free, nothing, false, false},
};
enum { N_LOOPS = sizeof loops / sizeof *loops };

void
costs_beside(void) {
    static const char BESIDE[] = "beside";
    struct costs_work work;
    const int rounds = bench.is_small ? 2 : 5;
    const double end = now_ns() + 5e9;
    costs_work_open(&work);
    open_standing();
    at.n = 10;
    for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
        for (size_t i = 0; i < N_LOOPS; i++) {
            if (loops[i].needs_vmm && !bench.has_vmm) {
                continue;
            }
            double times = 0;
            loops[i].before();
            costs_work_queue(&work, 60);
            do {
                loops[i].act();
                times++;
            } while (!costs_work_is_over(&work));
            costs_add(BESIDE, loops[i].what, at.n, "work ms", costs_work_wait(&work));
            costs_add(BESIDE, loops[i].what, at.n, "times", times);
            loops[i].after();
        }
    }
    close_standing();
    costs_work_close(&work);
    printf(
        "the same work, ms by its events, while the calls of 10 pages are repeated beside it\n\n");
    printf("| beside it | the work ms | of alone | times |\n|---|---|---|---|\n");
    const double alone = costs_sum(BESIDE, loops[0].what, at.n, "work ms").median;
    for (size_t i = 0; i < N_LOOPS; i++) {
        const double ms = costs_sum(BESIDE, loops[i].what, at.n, "work ms").median;
        printf(
            "| %s | %s | %.3f | %s |\n", loops[i].what,
            costs_cell(BESIDE, loops[i].what, at.n, "work ms", 1), alone > 0 ? ms / alone : 0,
            costs_cell(BESIDE, loops[i].what, at.n, "times", 1));
    }
}
