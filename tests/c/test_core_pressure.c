/* Memory under pressure on the simulated device: collection, limits, reservations. */
#include "loading.h"

/* More requests than a window lasts at first, in every variant. */
enum { WINDOW = 17000, N_HELD = 60 };

/* Requests that find their memory at once: only their count goes on. */
static void
pass_time(struct world *world, size_t n) {
    for (size_t i = 0; i < n; i++) {
        give(world, take(world, 4096, 0));
    }
}

/* A request that no free run holds, for its side effects. */
static void
miss(struct world *world, size_t bytes) {
    give(world, take(world, bytes, 0));
}

/* Live pairs of pages with as many free ones between them: no free run is larger than one pair. */
static void
make_gaps(struct world *world, pya_dptr *held, pya_stream stream) {
    pya_dptr gaps[N_HELD];
    end_loading(world);
    for (size_t i = 0; i < N_HELD; i++) {
        gaps[i] = take(world, 4 * MIB, stream);
        held[i] = take(world, 4 * MIB, stream);
    }
    for (size_t i = 0; i < N_HELD; i++) {
        give(world, gaps[i]);
    }
    CHECK(reserved(world) >= 8 * N_HELD * MIB);
}

static void
give_all(struct world *world, pya_dptr *held) {
    for (size_t i = 0; i < N_HELD; i++) {
        give(world, held[i]);
        held[i] = 0;
    }
}

/* Two windows without need: then the next miss gives back what is above the level.  Sizes that were stitched before
 * would not miss, so each call in a test begins at another size. */
static void
let_windows_pass(struct world *world, size_t from_mib) {
    for (size_t i = 0; i < 3; i++) {
        pass_time(world, WINDOW);
        miss(world, (from_mib + 2 * i) * MIB);
    }
}

static void
check_collects(const char *options, size_t level) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, options);
    make_gaps(&world, held, 0);
    uint64_t n_syncs = calls(&world, PYA_SIM_DEVICE_SYNC) + calls(&world, PYA_SIM_STREAM_SYNC);
    let_windows_pass(&world, 6);
    CHECK(reserved(&world) <= level);
    CHECK(reserved(&world) >= 4 * N_HELD * MIB);
    CHECK(stat_of(world.heap, 0, "pyalloc_collections") > 0);
    CHECK(stat_of(world.heap, 0, "pyalloc_pages_collected") > 0);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC) + calls(&world, PYA_SIM_STREAM_SYNC), n_syncs);
    give_all(&world, held);
    world_fini(&world);
}

static void
test_collects_to_the_level(void) {
    check_collects("soft_limit:300MiB", 300 * MIB);
    check_collects("garbage_collection_threshold:0.3", 308 * MIB);
    check_collects("limit:500MiB,garbage_collection_threshold:0.6", 300 * MIB);
    check_collects("memory:fast,soft_limit:300MiB", 300 * MIB);
    check_collects("memory:tight,soft_limit:300MiB", 300 * MIB);
}

static void
test_does_not_collect_below_the_level(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "garbage_collection_threshold:0.9,soft_limit:900MiB");
    make_gaps(&world, held, 0);
    let_windows_pass(&world, 6);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pressed"), 0);
    give_all(&world, held);
    world_fini(&world);
}

/* What was needed within the window stays, however far above the level it is. */
static void
test_keeps_what_was_needed_lately(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "soft_limit:100MiB");
    make_gaps(&world, held, 0);
    miss(&world, 6 * MIB);
    miss(&world, 10 * MIB);
    CHECK(stat_of(world.heap, 0, "pyalloc_pressed") > 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 0);
    give_all(&world, held);
    world_fini(&world);
}

#ifndef PYA_TEST_TINY
/* Memory was taken away and needed again soon: the next collection waits longer. */
static void
test_regret_makes_it_wait_longer(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "soft_limit:300MiB");
    make_gaps(&world, held, 0);
    let_windows_pass(&world, 6);
    int64_t n_collections = stat_of(world.heap, 0, "pyalloc_collections");
    CHECK(n_collections > 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_regretted"), 0);
    give(&world, take(&world, 400 * MIB, 0));
    CHECK(stat_of(world.heap, 0, "pyalloc_pages_regretted") > 0);
    pass_time(&world, WINDOW);
    miss(&world, 402 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), n_collections);
    give_all(&world, held);
    world_fini(&world);
}

/* Segments too. */
static void
test_segments_are_regretted(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "vmm:False,soft_limit:100MiB");
    pya_dptr held = take(&world, 60 * MIB, 0);
    give(&world, take(&world, 40 * MIB, 0));
    for (size_t i = 1; i < 4; i++) {
        pass_time(&world, WINDOW);
        miss(&world, (40 + 2 * i) * MIB);
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_collections") > 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_regretted"), 0);
    pya_dptr kept = take(&world, 46 * MIB, 0);
    give(&world, take(&world, 40 * MIB, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_regretted"), 20);
    give(&world, kept);
    give(&world, held);
    world_fini(&world);
}

/* Needs everything once more, and then half of it.  Returns after how many half windows the other half is collected.
 * Each miss is of *mib, which grows. */
static size_t
halves_until_collected(struct world *world, pya_dptr *held, size_t *mib) {
    enum { HALVES_MOST = 20 };
    give_all(world, held);
    make_gaps(world, held, 0);
    int64_t n_before = stat_of(world->heap, 0, "pyalloc_collections");
    size_t n = 0;
    while (n < HALVES_MOST && stat_of(world->heap, 0, "pyalloc_collections") == n_before) {
        pass_time(world, WINDOW / 2);
        miss(world, (*mib += 2) * MIB);
        n++;
    }
    CHECK(n > 0 && n < HALVES_MOST);
    return n;
}

/* A wait that regret doubled is halved after four such waits without regret, no sooner. */
static void
test_four_windows_without_regret(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    size_t mib = 4;
    world_init(&world, "soft_limit:300MiB");
    make_gaps(&world, held, 0);
    size_t first = halves_until_collected(&world, held, &mib);
    size_t regretted = halves_until_collected(&world, held, &mib);
    CHECK(stat_of(world.heap, 0, "pyalloc_pages_regretted") > 0);
    CHECK(regretted > first);
    pass_time(&world, 6 * WINDOW); /* three of the doubled waits */
    CHECK(halves_until_collected(&world, held, &mib) > first);
    pass_time(&world, 9 * WINDOW);
    CHECK_EQ(halves_until_collected(&world, held, &mib), first);
    give_all(&world, held);
    world_fini(&world);
}

#endif

static void
test_busy_streams_keep_theirs(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    pya_dptr held[N_HELD];
    world_init(&world, "soft_limit:300MiB");
    pya_dptr early = take(&world, 4 * MIB, 0);
    CHECK_OK(pya_sim_use(world.sim, 0, early, 4 * MIB));
    make_gaps(&world, held, 0);
    let_windows_pass(&world, 6);
    CHECK(stat_of(world.heap, 0, "pyalloc_pressed") > 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 0);
    pya_sim_finish_all(world.sim);
    let_windows_pass(&world, 12);
    pya_sim_finish_all(world.sim);
    let_windows_pass(&world, 18);
    CHECK(stat_of(world.heap, 0, "pyalloc_collections") > 0);
    give(&world, early);
    give_all(&world, held);
    world_fini(&world);
}

static void
test_collects_plain_segments(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB, .no_vmm = true}};
    pya_dptr held[12];
    world_init(&world, "garbage_collection_threshold:0.25");
    for (size_t i = 0; i < 12; i++) {
        held[i] = take(&world, 20 * MIB, 0);
    }
    for (size_t i = 0; i < 12; i++) {
        give(&world, held[i]);
    }
    for (size_t i = 1; i < 4; i++) {
        pass_time(&world, WINDOW);
        miss(&world, (20 + 2 * i) * MIB);
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_collections") > 0);
    CHECK(reserved(&world) <= 256 * MIB);
    CHECK(stat_of(world.heap, 0, "segment.all.freed") > 0);
    world_fini(&world);
}

static void
test_leaves_room_for_others(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "keep_free:100MiB");
    make_gaps(&world, held, 0);
    let_windows_pass(&world, 6);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 0);
    /* Another process takes all but 20 MiB of what is left. */
    pya_sim_set_capacity(world.sim, reserved(&world) + 20 * MIB);
    let_windows_pass(&world, 12);
    struct pya_memory_info info;
    CHECK_OK(pya_memory_info(world.heap, 0, &info));
    CHECK(info.free_bytes >= 100 * MIB);
    CHECK(info.free_bytes < 108 * MIB); /* what else is idle stays */
    give_all(&world, held);
    world_fini(&world);
}

/* An error of the device while all work is waited for, or while a segment is released, reaches the caller.  A page that
 * cannot be released stays, the heap is sound, and the next attempt gives back everything. */
static void
failing_trim(const char *options, enum pya_sim_call call, pya_status told) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB, .quiet = true}};
    world_init(&world, options);
    give(&world, take(&world, 64 * MIB, 0));
    pya_sim_fail(world.sim, 1U << call, 1, PYA_E_DEVICE, false);
    CHECK_EQ(pya_empty_cache(world.heap, 0), told);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK(reserved(&world) > 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

static void
test_failures_of_giving_back_are_told(void) {
    failing_trim("", PYA_SIM_DEVICE_SYNC, PYA_E_DEVICE);
    failing_trim("", PYA_SIM_UNMAP, PYA_OK);
    failing_trim("", PYA_SIM_PAGE_RELEASE, PYA_OK);
    failing_trim("vmm:false", PYA_SIM_DEVICE_SYNC, PYA_E_DEVICE);
    failing_trim("vmm:false", PYA_SIM_PLAIN_FREE, PYA_E_DEVICE);
}

static void
test_trims_what_was_idle_for_long(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "trim_after:10");
    pya_dptr first = take(&world, 4 * MIB, 0);
    pya_sim_advance_clock(world.sim, 1);
    give(&world, take(&world, 200 * MIB, 0));
    pya_sim_advance_clock(world.sim, UINT64_C(9000000000));
    pass_time(&world, 1);
    CHECK(reserved(&world) >= 200 * MIB);
    /* Backwards: nothing may be concluded from that. */
    pya_sim_advance_clock(world.sim, (uint64_t)0 - UINT64_C(8000000000));
    pass_time(&world, 1);
    CHECK(reserved(&world) >= 200 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_idle_trims"), 0);
    pya_sim_advance_clock(world.sim, UINT64_C(10000000000));
    pass_time(&world, 1);
    CHECK(reserved(&world) <= 16 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_idle_trims"), 1);
    /* A steady trickle of small requests counts as idle for the rest too. */
    give(&world, take(&world, 200 * MIB, 0));
    for (int i = 0; i < 30; i++) {
        pya_sim_advance_clock(world.sim, UINT64_C(1000000000));
        pass_time(&world, 1);
    }
    CHECK(reserved(&world) <= 16 * MIB);
    give(&world, first);
    world_fini(&world);
}

#ifndef PYA_TEST_TINY
static void
test_shortage_ends(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr first = take(&world, 4 * MIB, 0);
    pya_sim_set_capacity(world.sim, 40 * MIB);
    CHECK_EQ(pya_alloc(world.heap, 0, 200 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK(world.heap->cards.open[0]->is_short);
    pass_time(&world, WINDOW);
    miss(&world, 8 * MIB);
    CHECK(world.heap->cards.open[0]->is_short);
    pya_sim_set_capacity(world.sim, 1024 * MIB);
    pass_time(&world, WINDOW);
    miss(&world, 40 * MIB);
    CHECK(!world.heap->cards.open[0]->is_short);
    CHECK(!world.heap->cards.open[0]->fits_carefully);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_recoveries"), 1);
    give(&world, first);
    world_fini(&world);
}

#endif

/* ---- limits ---- */

static void
test_soft_limit_prefers_reuse(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "memory:fast");
    make_gaps(&world, held, 0);
    pya_dptr grown = take(&world, 20 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 0);
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_SOFT, 400 * MIB));
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_SOFT), 400 * MIB);
    size_t before = reserved(&world);
    pya_dptr stitched = take(&world, 22 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    CHECK(reserved(&world) <= before);
    /* A soft limit never refuses. */
    pya_dptr large = take(&world, 450 * MIB, 0);
    CHECK(reserved(&world) > 400 * MIB);
    give(&world, grown);
    give(&world, stitched);
    give(&world, large);
    give_all(&world, held);
    world_fini(&world);
}

static void
test_hard_limit(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    struct pya_oom_info info;
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr kept = take(&world, 30 * MIB, 0);
    give(&world, take(&world, 300 * MIB, 0));
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_HARD, 100 * MIB));
    CHECK(reserved(&world) <= 100 * MIB);
    CHECK_EQ(pya_alloc(world.heap, 0, 80 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    CHECK_EQ(info.limit_bytes, 100 * MIB);
    give(&world, take(&world, 60 * MIB, 0));
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_HARD, 0));
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_HARD), 0);
    give(&world, take(&world, 80 * MIB, 0));
    give(&world, kept);
    world_fini(&world);
}

static void
check_pool_limit(const char *options) {
    struct world world = {
        .config = {.capacity_bytes = 1024 * MIB, .no_vmm = strstr(options, "vmm:False") != NULL}};
    struct pya_pool_id id = {3, 4};
    struct pya_oom_info info;
    struct pya_pool_info pool;
    char text[PYA_OOM_TEXT_BYTES];
    pya_dptr ptr;
    world_init(&world, options);
    CHECK_EQ(pya_pool_set_limit(world.heap, 0, id, 64 * MIB), PYA_E_INVAL);
    give(&world, take(&world, 200 * MIB, 0));
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    CHECK_OK(pya_pool_set_limit(world.heap, 0, id, 64 * MIB));
    pya_dptr inside = take(&world, 40 * MIB, 0);
    const size_t before = reserved(&world);
    const uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    CHECK_EQ(pya_alloc(world.heap, 0, 80 * MIB, 0, &ptr), PYA_E_NOMEM); /* refused at once */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits);
    CHECK_EQ(pya_alloc(world.heap, 0, 40 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) > n_waits);
    CHECK(reserved(&world) >= before); /* what others have cached does not help */
    pya_heap_oom_info(world.heap, &info);
    CHECK_EQ(info.pool_limit_bytes, 64 * MIB);
    (void)pya_oom_text(&info, text, sizeof text);
    CHECK(strstr(text, "the pool is limited to 64.00 MiB") != NULL);
    CHECK_EQ(pya_pool_list(world.heap, 0, &pool, 1), 1);
    CHECK(pool.reserved_bytes[PYA_STAT_ALL].current <= (int64_t)(64 * MIB));
    CHECK(!world.heap->cards.open[0]->is_short);
    CHECK_OK(pya_pool_set_limit(world.heap, 0, id, 0));
    give(&world, take(&world, 40 * MIB, 0));
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    give(&world, take(&world, 100 * MIB, 0));
    give(&world, inside);
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    world_fini(&world);
}

static void
test_pool_limit(void) {
    check_pool_limit("");
    check_pool_limit("memory:tight");
    check_pool_limit("vmm:False");
}

static void
check_reserve(const char *options) {
    struct world world = {
        .config = {.capacity_bytes = 1024 * MIB, .no_vmm = strstr(options, "vmm:False") != NULL}};
    world_init(&world, options);
    CHECK_OK(pya_reserve(world.heap, 0, 200 * MIB, 0));
    CHECK(reserved(&world) >= 200 * MIB);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE) + calls(&world, PYA_SIM_PLAIN_ALLOC);
    give(&world, take(&world, 150 * MIB, 0));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_OK(pya_trim(world.heap, 0, 10 * MIB));
    CHECK(reserved(&world) >= 200 * MIB);
    give(&world, take(&world, 190 * MIB, 0));
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE) + calls(&world, PYA_SIM_PLAIN_ALLOC), n_made);
    size_t before = reserved(&world);
    CHECK_EQ(pya_reserve(world.heap, 0, 4096 * MIB, 0), PYA_E_NOMEM);
    CHECK_EQ(
        pya_reserve(world.heap, 0, MIB << 20, 0),
        PYA_E_NOMEM); /* far more than the card has: nothing is tried for it */
    CHECK(stat_of(world.heap, 0, "pyalloc_host_bytes") < (int64_t)MIB);
    CHECK_EQ(pya_reserve(world.heap, 0, SIZE_MAX, 0), PYA_E_TOO_LARGE);
    CHECK_EQ(reserved(&world), before);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

static void
test_reserve(void) {
    check_reserve("");
    check_reserve("vmm:False");
}

/* Segments and pages are given back whole, but never so that less than was asked for stays. */
static void
check_reserve_exactly(const char *options) {
    struct world world = {
        .config = {.capacity_bytes = 1024 * MIB, .no_vmm = strstr(options, "vmm:False") != NULL}};
    world_init(&world, options);
    size_t wanted = 201 * MIB + 512;
    CHECK_OK(pya_reserve(world.heap, 0, wanted, 0));
    pya_dptr held[4];
    for (size_t i = 0; i < 4; i++) {
        held[i] = take(&world, (30 + 60 * i) * MIB, 0);
    }
    for (size_t i = 0; i < 4; i++) {
        give(&world, held[i]);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_OK(i == 0 ? pya_trim(world.heap, 0, 220 * MIB) : pya_empty_cache(world.heap, 0));
        CHECK(reserved(&world) >= wanted);
    }
    /* A request that needs the room gets it. */
    give(&world, take(&world, 900 * MIB, 0));
    world_fini(&world);
}

static void
test_reserve_exactly(void) {
    check_reserve_exactly("");
    check_reserve_exactly("vmm:False");
    check_reserve_exactly("trim_after:1");
}

/* Other streams may use what was reserved. */
static void
test_reserve_serves_every_stream(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 200 * MIB, 0));
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_dptr ptr = take(&world, 150 * MIB, 16);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    give(&world, ptr);
    world_fini(&world);
}

static void
test_trim_to_a_target(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr held[N_HELD];
    world_init(&world, "");
    make_gaps(&world, held, 0);
    size_t before = reserved(&world);
    CHECK_OK(pya_trim(world.heap, 0, before - 50 * MIB));
    CHECK(reserved(&world) <= before - 50 * MIB);
    CHECK(reserved(&world) > before - 54 * MIB);
    CHECK_OK(pya_trim(world.heap, 0, 1));
    CHECK(reserved(&world) >= 4 * N_HELD * MIB);
    CHECK(reserved(&world) <= 4 * N_HELD * MIB + 8 * MIB);
    give_all(&world, held);
    world_fini(&world);
}

/* Limits can be set before the device is used, hold from its first use on, and are refused if they make no sense. */
static void
test_limits_before_first_use(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptr;
    world_init(&world, "limit:700MiB,soft_limit:300MiB,per_process_memory_fraction:0.5");
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_HARD), 700 * MIB);
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_SOFT), 300 * MIB);
    CHECK(pya_get_fraction(world.heap, 0) == 0.5);
    CHECK_OK(pya_set_fraction(world.heap, 0, 0.25));
    CHECK(pya_get_fraction(world.heap, 0) == 0.25);
    CHECK(world.sim == NULL);
    CHECK_EQ(pya_alloc(world.heap, 0, 300 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_OK(pya_set_fraction(world.heap, 0, 0.5));
    CHECK_EQ(pya_alloc(world.heap, 0, 600 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_OK(pya_set_fraction(world.heap, 0, 0.625));
    CHECK(pya_get_fraction(world.heap, 0) == 0.625);
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_SOFT, 200 * MIB));
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_SOFT), 200 * MIB);
    CHECK_EQ(pya_get_limit(world.heap, 0, PYA_LIMIT_HARD), 700 * MIB);
    give(&world, take(&world, 600 * MIB, 0));
    CHECK_EQ(pya_set_fraction(world.heap, 0, 1.5), PYA_E_INVAL);
    CHECK_EQ(pya_set_fraction(world.heap, 0, -0.5), PYA_E_INVAL);
    CHECK_EQ(pya_set_fraction(world.heap, -1, 0.5), PYA_E_INVAL);
    CHECK_EQ(pya_set_fraction(world.heap, PYA_MAX_DEVICES, 0.5), PYA_E_INVAL);
    CHECK_EQ(pya_set_fraction(world.heap, 0, strtod("nan", NULL)), PYA_E_INVAL);
    CHECK_EQ(pya_set_limit(world.heap, PYA_MAX_DEVICES, PYA_LIMIT_HARD, 0), PYA_E_INVAL);
    CHECK_EQ(pya_reserve(world.heap, -1, MIB, 0), PYA_E_INVAL);
    CHECK(pya_get_fraction(world.heap, 0) == 0.625);
    CHECK_OK(pya_set_fraction(world.heap, 0, 0)); /* the least and the most that there is */
    CHECK(pya_get_fraction(world.heap, 0) == 0);
    CHECK_OK(pya_set_fraction(world.heap, 0, 1));
    CHECK(pya_get_fraction(world.heap, 0) == 1);
    world_fini(&world);
}

/* Addresses are short, not memory, and the advice says so. */
static void
test_lack_of_addresses_is_told(void) {
    struct world world = {
        .config = {.capacity_bytes = 1024 * MIB, .address_bytes = 64 * MIB, .quiet = true}};
    struct pya_oom_info info;
    char text[PYA_OOM_TEXT_BYTES];
    pya_dptr ptr = 0;
    world_init(&world, "");
    CHECK(pya_alloc(world.heap, 0, 80 * MIB, 16, &ptr) == PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    CHECK(pya_oom_text(&info, text, sizeof text) > 0);
    CHECK(strstr(text, "no address space left") != NULL);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"failing_trim", test_failures_of_giving_back_are_told},
    {"lack_of_addresses_is_told", test_lack_of_addresses_is_told},
    {"collects_to_the_level", test_collects_to_the_level},
    {"does_not_collect_below_the_level", test_does_not_collect_below_the_level},
    {"keeps_what_was_needed_lately", test_keeps_what_was_needed_lately},
#ifndef PYA_TEST_TINY /* there a window is too short to regret anything, and four pages are no shortage */
    {"regret_makes_it_wait_longer", test_regret_makes_it_wait_longer},
    {"segments_are_regretted", test_segments_are_regretted},
    {"four_windows_without_regret", test_four_windows_without_regret},
    {"shortage_ends", test_shortage_ends},
#endif
    {"busy_streams_keep_theirs", test_busy_streams_keep_theirs},
    {"collects_plain_segments", test_collects_plain_segments},
    {"leaves_room_for_others", test_leaves_room_for_others},
    {"trims_what_was_idle_for_long", test_trims_what_was_idle_for_long},
    {"soft_limit_prefers_reuse", test_soft_limit_prefers_reuse},
    {"hard_limit", test_hard_limit},
    {"pool_limit", test_pool_limit},
    {"reserve", test_reserve},
    {"reserve_exactly", test_reserve_exactly},
    {"reserve_serves_every_stream", test_reserve_serves_every_stream},
    {"trim_to_a_target", test_trim_to_a_target},
    {"limits_before_first_use", test_limits_before_first_use},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
