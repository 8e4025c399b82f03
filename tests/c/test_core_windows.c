/* What collection remembers: how long which memory was not needed, in requests and in time. */
#include "pools.h"

#define SECOND UINT64_C(1000000000)

/* More requests than a window lasts at first, in every variant. */
enum { WINDOW = 17000 };

static void
pass_requests(struct world *world, size_t n) {
    for (size_t i = 0; i < n; i++) {
        give(world, take(world, 4096, 0));
    }
}

/* A request so many seconds later. */
static void
pass_seconds(struct world *world, uint64_t n) {
    pya_sim_advance_clock(world->sim, n * SECOND);
    pass_requests(world, 1);
}

/* First go the segments of the stream that has needed none of its memory for longest. */
static void
test_streams_age(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "vmm:False");
    pass_requests(&world, 1);
    give(&world, take(&world, 20 * MIB, 16));
    give(&world, take(&world, 20 * MIB, 32));
    (void)take(&world, 30 * MIB, 0); /* memory grows: what the others did until now is seen */
    pass_requests(&world, 1000);
    give(&world, take(&world, 20 * MIB, 32));
    (void)take(&world, 32 * MIB, 0);
    CHECK_EQ(collect(&world, MIB), 20 * MIB);
    uint64_t n_made = calls(&world, PYA_SIM_PLAIN_ALLOC);
    give(&world, take(&world, 20 * MIB, 32));
    CHECK_EQ(calls(&world, PYA_SIM_PLAIN_ALLOC), n_made);
    world_fini(&world);
}

/* While requests go to a pool, a graph may be captured: nothing is given back, even if it is known to be idle. */
static void
test_nothing_goes_under_a_capture(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {0};
        pya_dptr ptrs[2];
        pools_init(&world, options[i]);
        for (size_t k = 0; k < 2; k++) {
            ptrs[k] = take(&world, 20 * MIB, 0);
        }
        give(&world, ptrs[0]);
        give(&world, ptrs[1]);
        CHECK_EQ(collect(&world, 20 * MIB), 20 * MIB);
        pool_begin(&world);
        CHECK_EQ(collect(&world, 20 * MIB), 0);
        pool_end(&world);
        CHECK_EQ(collect(&world, 20 * MIB), 20 * MIB);
        world_fini(&world);
    }
}

/* What lies above the level, including what is to come, is given back, and then nothing for a window. */
static void
test_a_window_lies_between_collections(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[6];
    world_init(&world, "vmm:False");
    (void)take(&world, 20 * MIB, 0);
    for (size_t i = 0; i < 6; i++) {
        ptrs[i] = take(&world, 20 * MIB, 16);
    }
    for (size_t i = 0; i < 6; i++) {
        give(&world, ptrs[i]);
    }
    for (size_t i = 0; i < 3; i++) {
        pass_requests(&world, WINDOW);
        give(&world, take(&world, (30 + 2 * i) * MIB, 0));
    }
    size_t before = reserved(&world);
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_SOFT, before + 26 * MIB));
    (void)take(&world, 36 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 1);
    CHECK_EQ(reserved(&world), before + 16 * MIB);
    (void)take(&world, 38 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pressed"), 2);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_collections"), 1);
    world_fini(&world);
}

/* A segment is larger than its request.  With it more is reserved than needed, and that is given back. */
static void
test_segments_make_room_for_the_next(void) {
    static const size_t mib[] = {30, 5};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        world_init(&world, "vmm:False,soft_limit:98MiB");
        for (size_t k = 0; k < 3; k++) {
            (void)take(&world, 20 * MIB, 0);
        }
        give(&world, take(&world, 20 * MIB, 16));
        CHECK_EQ(reserved(&world), 80 * MIB);
        (void)take(&world, mib[i] * MIB, 0);
        CHECK_EQ(reserved(&world), (mib[i] == 5 ? 80 : 90) * MIB);
        world_fini(&world);
    }
}

/* What is needed again and again is not idle, though it is always there. */
static void
test_what_is_needed_does_not_go(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "trim_after:10");
    give(&world, take(&world, 200 * MIB, 0));
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    for (size_t i = 0; i < 50; i++) {
        pass_seconds(&world, 1);
        give(&world, take(&world, 150 * MIB, 0));
    }
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    CHECK(reserved(&world) < 200 * MIB);
    world_fini(&world);
}

/* Nor is what is kept for good given back. */
static void
test_what_is_reserved_does_not_go(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "trim_after:10");
    CHECK_OK(pya_reserve(world.heap, 0, 64 * MIB, 0));
    give(&world, take(&world, 200 * MIB, 0));
    pass_seconds(&world, 1);
    pass_seconds(&world, 30);
    CHECK_EQ(reserved(&world), 64 * MIB);
    world_fini(&world);
}

/* A program that did nothing for so long needed nothing, whatever earlier windows say; new needs count from then on. */
static void
test_a_pause_ends_all_windows(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "trim_after:10");
    pass_requests(&world, 1);
    give(&world, take(&world, 200 * MIB, 0));
    pass_seconds(&world, 9);
    pass_seconds(&world, 2);
    CHECK(reserved(&world) >= 200 * MIB);
    pass_seconds(&world, 15);
    CHECK(reserved(&world) <= 16 * MIB);
    give(&world, take(&world, 200 * MIB, 0));
    for (size_t i = 0; i < 14; i++) {
        pass_seconds(&world, 1);
    }
    CHECK(reserved(&world) >= 200 * MIB);
    for (size_t i = 0; i < 10; i++) {
        pass_seconds(&world, 1);
    }
    CHECK(reserved(&world) <= 16 * MIB);
    world_fini(&world);
}

#ifndef PYA_TEST_TINY
static bool
is_careful(struct world *world) {
    return world->heap->cards.open[0]->fits_carefully;
}

/* Memory is short while a limit makes it so, whatever the device has.  That is checked only now and then, and tight
 * goes on being careful. */
static void
test_a_limit_is_a_shortage(void) {
    static const char *const options[] = {"", "memory:tight"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        pya_dptr ptr;
        world_init(&world, options[i]);
        (void)take(&world, 180 * MIB, 0);
        CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_HARD, 200 * MIB));
        CHECK_EQ(pya_alloc(world.heap, 0, 100 * MIB, 0, &ptr), PYA_E_NOMEM);
        pass_requests(&world, WINDOW);
        (void)take(&world, 10 * MIB, 0);
        CHECK(is_careful(&world));
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_recoveries"), 0);
        CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_HARD, 0));
        uint64_t n_asked = calls(&world, PYA_SIM_MEM_INFO);
        (void)take(&world, 20 * MIB, 0);
        CHECK_EQ(calls(&world, PYA_SIM_MEM_INFO), n_asked);
        pass_requests(&world, WINDOW);
        (void)take(&world, 20 * MIB, 0);
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_recoveries"), 1);
        CHECK_EQ(is_careful(&world), i == 1);
        world_fini(&world);
    }
}
#endif

/* While a request waits, another thread's memory grows. */
static struct world *growing;
static pya_dptr given;

static pya_status
sync_while_others_grow(struct pya_device *dev) {
    struct world *world = growing;
    growing = NULL;
    if (world != NULL) {
        CHECK_OK(pya_set_limit(world->heap, 0, PYA_LIMIT_HARD, 0));
        (void)take(world, 40 * MIB, 16);
        give(world, given);
    }
    return world_opened.ops->device_sync(dev);
}

/* What others made is regretted once, by their own requests. */
static void
test_what_others_made_meanwhile_is_theirs(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "limit:100MiB,memory:tight");
    given = take(&world, 60 * MIB, 0);
    (void)take(&world, 40 * MIB, 0);
    struct pya_usage *usage = &world.heap->cards.open[0]->usage;
    usage->collected_at = 1; /* as after a collection */
    usage->collected_pages = usage->owed_pages = 100;
    growing = &world;
    world.ops.device_sync = sync_while_others_grow;
    (void)take(&world, 60 * MIB, 0);
    CHECK(growing == NULL);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_regretted"), 20);
    (void)take(&world, 20 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_regretted"), 30);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"streams_age", test_streams_age},
    {"nothing_goes_under_a_capture", test_nothing_goes_under_a_capture},
    {"a_window_lies_between_collections", test_a_window_lies_between_collections},
    {"segments_make_room_for_the_next", test_segments_make_room_for_the_next},
    {"what_is_needed_does_not_go", test_what_is_needed_does_not_go},
    {"what_is_reserved_does_not_go", test_what_is_reserved_does_not_go},
    {"a_pause_ends_all_windows", test_a_pause_ends_all_windows},
    {"what_others_made_meanwhile_is_theirs", test_what_others_made_meanwhile_is_theirs},
#ifndef PYA_TEST_TINY
    {"a_limit_is_a_shortage", test_a_limit_is_a_shortage},
#endif
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
