/* What the calls cost, and which of them wait, while another stream has work. */
#include <stdio.h>

#include "acts.h"

static const struct act acts[] = {
    {"cuMemAddressReserve", act_nothing, act_reserve, act_unreserve, true, true},
    {"cuMemAddressFree", act_reserve, act_unreserve, act_nothing, true, true},
    {"cuMemCreate", act_nothing, act_create, act_release, true, true},
    {"cuMemRelease", act_create, act_release, act_nothing, true, true},
    {"cuMemMap", act_nothing, act_map, act_unmap, true, true},
    {"cuMemSetAccess", act_map, act_set_access, act_unmap, true, true},
    {"cuMemUnmap", act_map_open, act_unmap, act_nothing, true, true},
    {"cuMemUnmap, cuMemRelease of used pages", act_prepare_dropping, act_drop, act_unreserve, true,
     true},
    {"cuMemAlloc", act_nothing, act_alloc, act_free_plain, true, false},
    {"cuMemFree", act_alloc, act_free_plain, act_nothing, true, false},
    {"cuMemGetInfo", act_nothing, act_mem_info, act_nothing, false, false},
    {"cuEventRecord, idle stream", act_nothing, act_record, act_nothing, false, false},
    {"cuEventQuery", act_record, act_query, act_nothing, false, false},
    {"record, cuEventSynchronize, idle stream", act_nothing, act_record_and_wait, act_nothing,
     false, false},
    {"small memset, idle stream", act_nothing, act_launch, act_sync_other, false, false},
    {"small memset and its wait", act_nothing, act_launch_and_wait, act_nothing, false, false},
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
        for (uint64_t n = 1; n <= ACTS_MOST; n += ACTS_MOST - 1) {
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
    costs_work_open(&work, false);
    act_open_standing();
    for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
        for (size_t i = 0; i < N_ACTS; i++) {
            if (acts[i].needs_vmm && !bench.has_vmm) {
                continue;
            }
            for (at.n = 1; at.n <= (acts[i].has_pages ? ACTS_MOST : 1); at.n += ACTS_MOST - 1) {
                perform(&acts[i], &work, 0);
                perform(&acts[i], &work, 25);
            }
        }
    }
    act_close_standing();
    costs_work_close(&work);
    print_acts();
}
