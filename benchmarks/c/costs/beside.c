/* What the card's work loses by calls that are made beside it. */
#include <stdio.h>

#include "acts.h"

static void
stitch(void) {
    act_map_open();
    act_unmap();
}

static void
create_release(void) {
    act_create();
    act_release();
}

static void
alloc_free(void) {
    act_alloc();
    act_free_plain();
}

/* The allocator's growth: everything at once, 20 MiB. */
static void
grow_shrink(void) {
    act_prepare_dropping();
    act_drop();
    act_unreserve();
}

static const struct act loops[] = {
    {"nothing else", act_nothing, act_nothing, act_nothing, false, false},
    {"launches on another stream", act_nothing, act_launch_and_wait, act_nothing, false, false},
    {"cuMemCreate, cuMemRelease", act_nothing, create_release, act_nothing, false, true},
    {"cuMemMap, cuMemSetAccess, cuMemUnmap", act_nothing, stitch, act_nothing, false, true},
    {"cuMemSetAccess of an open range", act_map_open, act_set_access, act_unmap, false, true},
    {"create, map, open, memset, unmap, release", act_nothing, grow_shrink, act_nothing, false,
     true},
    {"cuMemAlloc, cuMemFree", act_nothing, alloc_free, act_nothing, false, false},
};
enum { N_LOOPS = sizeof loops / sizeof *loops };

static void
measure_loops(const char *section, bool is_gather) {
    struct costs_work work;
    const int rounds = bench.is_small ? 2 : 5;
    const double end = now_ns() + 4e9;
    costs_work_open(&work, is_gather);
    act_open_standing();
    at.n = 10;
    for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
        for (size_t i = 0; i < N_LOOPS; i++) {
            if (loops[i].needs_vmm && !bench.has_vmm) {
                continue;
            }
            double times = 0;
            loops[i].before();
            costs_work_queue(&work, 40);
            do {
                loops[i].act();
                times++;
            } while (!costs_work_is_over(&work));
            costs_add(section, loops[i].what, at.n, "work ms", costs_work_wait(&work));
            costs_add(section, loops[i].what, at.n, "times", times);
            loops[i].after();
        }
    }
    act_close_standing();
    costs_work_close(&work);
    printf("| beside it | %s, ms | of alone | times |\n|---|---|---|---|\n", section);
    const double alone = costs_sum(section, loops[0].what, at.n, "work ms").median;
    for (size_t i = 0; i < N_LOOPS; i++) {
        const double ms = costs_sum(section, loops[i].what, at.n, "work ms").median;
        printf(
            "| %s | %s | %.3f | %s |\n", loops[i].what,
            costs_cell(section, loops[i].what, at.n, "work ms", 1), alone > 0 ? ms / alone : 0,
            costs_cell(section, loops[i].what, at.n, "times", 1));
    }
    printf("\n");
}

void
costs_beside(void) {
    printf(
        "the same work, ms by its events, while the calls of 10 pages are repeated beside it\n\n");
    measure_loops("copies", false);
    if (costs_gather_load()) {
        measure_loops("random reads", true);
    }
}
