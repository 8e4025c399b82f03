/* Which idle memory is given back first: the order that docs/limits.md describes. */
#include <pthread.h>
#include <sched.h>

#include "pools.h"

/* A full card of 10 pages: blocks of 2, 4, 2, 4, 2 and 4 MiB, and two blocks in the last page. */
static void
world_full(struct world *world, pya_dptr *ptrs) {
    static const size_t mib[] = {2, 4, 2, 4, 2, 4, 1, 1};
    world->config.capacity_bytes = 20 * MIB;
    world_init(world, "memory:tight");
    for (size_t i = 0; i < sizeof mib / sizeof *mib; i++) {
        ptrs[i] = take(world, mib[i] * MIB, 0);
        CHECK_EQ(ptrs[i] - ptrs[0], i == 0 ? 0 : ptrs[i - 1] + mib[i - 1] * MIB - ptrs[0]);
    }
}

/* Makes everything freed so far so old that one more free makes no difference.  ptrs[7] is replaced meanwhile. */
static void
grow_old(struct world *world, pya_dptr *ptrs) {
    for (size_t i = 0; i < 40; i++) {
        give(world, ptrs[7]);
        ptrs[7] = take(world, MIB, 0);
    }
}

/* Of two pieces that have been free for equally long, the larger is given back (docs/limits.md). */
static void
test_the_largest_of_the_oldest_goes_first(void) {
    struct world world = {0};
    pya_dptr ptrs[8];
    world_full(&world, ptrs);
    give(&world, ptrs[4]);
    give(&world, ptrs[1]); /* of equals the highest goes: not this one */
    grow_old(&world, ptrs);
    CHECK_OK(pya_trim(world.heap, 0, 18 * MIB));
    CHECK_EQ(reserved(&world), 18 * MIB);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[1]);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[4]);
    CHECK_EQ(reserved(&world), 18 * MIB);
    world_fini(&world);
}

/* Of equals the highest goes, also if it is the only free page; and at least as much as was requested. */
static void
test_the_highest_of_equals_goes_first(void) {
    struct world world = {0};
    pya_dptr ptrs[8];
    world_full(&world, ptrs);
    give(&world, ptrs[2]);
    give(&world, ptrs[4]);
    grow_old(&world, ptrs);
    CHECK_EQ(collect(&world, PYA_PAGE), PYA_PAGE);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[2]);
    give(&world, ptrs[2]);
    CHECK_EQ(collect(&world, 1), PYA_PAGE);
    world_fini(&world);
}

/* Pages mapped at a second address go last, because that mapping would have to be made again too. */
static void
test_what_has_a_second_address_goes_last(void) {
    struct world world = {0};
    pya_dptr ptrs[8];
    world_full(&world, ptrs);
    give(&world, ptrs[3]);
    give(&world, ptrs[5]);
    give(&world, take(&world, 8 * MIB, 0)); /* stitched from both */
    give(&world, ptrs[1]);                  /* of equals the highest goes: not this one */
    grow_old(&world, ptrs);
    CHECK_OK(pya_trim(world.heap, 0, 18 * MIB));
    int64_t n_hits = stat_of(world.heap, 0, "pyalloc_range_hits");
    give(&world, take(&world, 8 * MIB, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_range_hits"), n_hits + 1);
    world_fini(&world);
}

/* What has been free for longest goes before all of those. */
static void
the_oldest_goes_first(bool have_events_passed) {
    struct world world = {0};
    pya_dptr ptrs[8];
    world_full(&world, ptrs);
    give(&world, ptrs[0]);
    /* Age counts memory that is freed for good, not memory that is requested again at once. */
    for (size_t i = 0; i < 200; i++) {
        give(&world, ptrs[6 + i % 2]);
        give(&world, ptrs[7 - i % 2]);
        ptrs[6] = take(&world, MIB, 0);
        ptrs[7] = take(&world, MIB, 0);
    }
    give(&world, ptrs[3]);
    if (!have_events_passed) {
        pya_sim_fail(world.sim, 1U << PYA_SIM_EVENT_QUERY, 1, PYA_E_DEVICE, true);
    }
    CHECK_OK(pya_trim(world.heap, 0, 18 * MIB));
    (void)pya_sim_fail_clear(world.sim);
    CHECK_EQ(reserved(&world), 18 * MIB);
    CHECK_EQ(take(&world, 4 * MIB, 0), ptrs[3]);
    CHECK_EQ(reserved(&world), 18 * MIB);
    world_fini(&world);
}

/* Also while an event that was just recorded has not completed: the trim waited for the device. */
static void
test_the_oldest_goes_first(void) {
    the_oldest_goes_first(true);
    the_oldest_goes_first(false);
}

/* Segments are given back whole, first the one that has been free for longest. */
static void
test_the_oldest_segment_goes_first(void) {
    static const size_t mib[] = {22, 24, 20};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[3];
    world_init(&world, "vmm:False");
    for (size_t i = 0; i < 3; i++) {
        ptrs[i] = take(&world, mib[i] * MIB, 0);
    }
    CHECK_EQ(reserved(&world), 66 * MIB);
    for (size_t i = 0; i < 3; i++) {
        give(&world, ptrs[i]);
    }
    CHECK_OK(pya_trim(world.heap, 0, 60 * MIB));
    CHECK_EQ(reserved(&world), 44 * MIB);
    world_fini(&world);
}

/* No more is given back than was requested, whichever stream had it, and nothing while it is unknown what is idle. */
static void
test_segments_of_two_streams(void) {
    static const struct pya_pool_id pool = {3, 4};
    for (int i = 0; i < 2; i++) {
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        pya_dptr ptrs[6];
        world_init(&world, "vmm:False");
        for (size_t k = 0; k < 6; k++) {
            ptrs[k] = take(&world, 20 * MIB, 16 * (k % 2));
        }
        for (size_t k = 0; k < 6; k++) {
            give(&world, ptrs[k]);
        }
        if (i == 1) {
            CHECK_OK(pya_pool_begin(world.heap, 0, pool, (struct pya_stream_filter){0}));
        }
        CHECK_OK(pya_trim(world.heap, 0, (i == 0 ? 70 : 40) * MIB)); /* segments go whole */
        CHECK_EQ(reserved(&world), (i == 0 ? 60 : 40) * MIB);
        world_fini(&world);
    }
}

/* keep_free: the level is what is reserved now plus what is to stay free.  Collection never goes below it. */
static void
test_what_is_left_to_others_is_kept_free(void) {
    static const char *const options[] = {
        "vmm:False,keep_free:900MiB", "vmm:False,keep_free:884MiB", "vmm:False,keep_free:880MiB",
        "vmm:False,keep_free:2000MiB"};
    for (size_t i = 0; i < 4; i++) { /* the second: to the byte; the last: more than there is */
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        world_init(&world, options[i]);
        (void)take(&world, 60 * MIB, 0);
        give(&world, take(&world, 40 * MIB, 16));
        (void)take(&world, 40 * MIB, 0);
        CHECK_EQ(reserved(&world), (i == 0 || i == 3 ? 100 : 140) * MIB);
        world_fini(&world);
    }
}

/* Above the level, too, a little more than was needed stays. */
static void
test_a_little_stays(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr small[8];
    world_init(&world, "vmm:False,soft_limit:80MiB");
    (void)take(&world, 60 * MIB, 0);
    for (size_t i = 0; i < 8; i++) {
        small[i] = take(&world, MIB, 16);
    }
    for (size_t i = 0; i < 8; i++) {
        give(&world, small[i]);
    }
    (void)take(&world, 20 * MIB, 0);
    CHECK_EQ(reserved(&world), 88 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pressed"), 1);
    world_fini(&world);
}

/* Memory given back before a request leaves the request the block record that it was promised. */
static void
test_what_goes_takes_no_record_of_the_request(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "trim_after:10");
    (void)take(&world, 512, 0);
    pya_sim_advance_clock(world.sim, 1);
    pya_dptr large = take(&world, 100 * MIB, 0);
    (void)take(&world, 512, 0);
    give(&world, large); /* its pages leave a part of a page on both sides */
    const struct pya_slab *blocks = &world.heap->cards.open[0]->blocks;
    do {
        (void)take(&world, 512, 0);
    } while (blocks->n_free != 2);
    pya_sim_advance_clock(world.sim, UINT64_C(11000000000));
    (void)take(&world, 1024, 0); /* from a larger piece */
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_idle_trims"), 1);
    world_fini(&world);
}

/* Memory that a stream is done with may go.  Memory that it freed later and still uses may not. */
static void
test_busy_memory_stays(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {
            .config = {.capacity_bytes = 1024 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
        world_init(&world, options[i]);
        pya_dptr idle = take(&world, 20 * MIB, 0);
        pya_dptr between = take(&world, 20 * MIB, 0);
        pya_dptr busy = take(&world, 20 * MIB, 0);
        give(&world, idle);
        CHECK_EQ(collect(&world, 100 * MIB), 0); /* the event has not completed */
        CHECK_OK(pya_sim_use(world.sim, 0, busy, 20 * MIB));
        give(&world, busy);
        pya_sim_finish(world.sim, 0);
        CHECK_OK(pya_sim_use(world.sim, 0, busy, 20 * MIB));
        CHECK_EQ(collect(&world, 100 * MIB), 20 * MIB);
        give(&world, between);
        pya_sim_finish_all(world.sim);
        world_fini(&world);
    }
}

/* Memory of a pool in use stays too, even if the pool was dropped once and left some of it to others: kernels of a
 * graph hold its addresses. */
static void
test_a_pool_in_use_keeps_its_memory(void) {
    struct world world = {0};
    pools_init(&world, "");
    pya_dptr eager = take(&world, 30 * MIB, 0);
    pool_begin(&world);
    pya_dptr captured = take(&world, 40 * MIB, 0);
    pool_end(&world);
    give(&world, captured);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    (void)take(&world, 2 * MIB, 16); /* waits for the device */
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    pool_begin(&world);
    give(&world, take(&world, 20 * MIB, 0));
    pool_end(&world);
    give(&world, eager);
    CHECK_EQ(collect(&world, 100 * MIB), 30 * MIB);
    world_fini(&world);
}

/* A graph that still uses the pool when its MemPool is dropped holds the addresses of its free memory. */
static void
test_a_pool_in_use_is_not_trimmed(void) {
    struct world world = {0};
    pools_init(&world, "");
    pool_begin(&world);
    give(&world, take(&world, 20 * MIB, 0));
    pool_end(&world); /* its user stays */
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(reserved(&world), 20 * MIB);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

/* Memory that the pending request can use stays too. */
static void
test_what_is_wanted_stays(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[4];
    world_init(&world, "");
    for (size_t i = 0; i < 4; i++) {
        ptrs[i] = take(&world, 20 * MIB, 0);
    }
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    struct pya_card *card = world.heap->cards.open[0];
    CHECK_EQ(pya_gc_collect(card, 100 * MIB, card->common, 14), 12 * MIB);
    CHECK_EQ(pya_gc_collect(card, 100 * MIB, card->common, 14), 0);
    CHECK_EQ(reserved(&world), 68 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_collected"), 6);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages_released"), 6);
    CHECK_EQ(stat_of(world.heap, 0, "num_device_free"), 1);
    world_fini(&world);
}

/* A range that was mapped half-way, and could not be unmapped, goes at the next chance, whatever its pages are used
 * for. */
static void
test_half_a_range_goes(void) {
    struct world world = {.config = {.quiet = true}};
    pya_dptr ptrs[8], ptr;
    world_full(&world, ptrs);
    give(&world, ptrs[3]);
    give(&world, ptrs[5]);
    pya_sim_fail(world.sim, 1U << PYA_SIM_MAP | 1U << PYA_SIM_UNMAP, 2, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 8 * MIB, 0, &ptr), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(world.sim));
    (void)take(&world, 4 * MIB, 0);
    (void)take(&world, 4 * MIB, 0);
    give(&world, ptrs[0]);
    CHECK(stat_of(world.heap, 0, "pyalloc_mappings") > stat_of(world.heap, 0, "pyalloc_pages"));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pages"), 9);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), 9);
    world_fini(&world);
}

/* Memory that still has a second address because unmapping failed stays where it is and goes on serving requests. */
static void
test_memory_that_cannot_go_serves_on(void) {
    struct world world = {.config = {.quiet = true}};
    pya_dptr ptrs[8];
    world_full(&world, ptrs);
    give(&world, ptrs[3]);
    give(&world, ptrs[5]);
    give(&world, take(&world, 8 * MIB, 0)); /* stitched from both */
    pya_sim_fail(world.sim, 1U << PYA_SIM_UNMAP, 1, PYA_E_DEVICE, false);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK_EQ(take(&world, 4 * MIB, 0), ptrs[3]);
    CHECK_EQ(take(&world, 4 * MIB, 0), ptrs[5]);
    world_fini(&world);
}

/* The same for addresses at which another stream had the pages. */
static void
test_memory_that_moved_and_cannot_go_serves_on(void) {
    struct world world = {.config = {.capacity_bytes = 40 * MIB, .quiet = true}};
    pya_dptr ptrs[10];
    world_init(&world, "");
    for (size_t i = 0; i < 10; i++) {
        ptrs[i] = take(&world, 4 * MIB, 16);
    }
    for (size_t i = 0; i < 10; i += 2) {
        give(&world, ptrs[i]);
    }
    pya_dptr moved = take(&world, 12 * MIB, 32);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_page_moves"), 6);
    give(&world, moved);
    int64_t n_unmaps = stat_of(world.heap, 0, "pyalloc_unmaps");
    pya_sim_fail(world.sim, 1U << PYA_SIM_UNMAP, 1, PYA_E_DEVICE, false);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK(reserved(&world) < 40 * MIB); /* all but what lay there */
    CHECK(stat_of(world.heap, 0, "pyalloc_unmaps") > n_unmaps);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    CHECK_EQ(take(&world, 4 * MIB, 32), moved);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    CHECK_EQ(reserved(&world), 24 * MIB);
    world_fini(&world);
}

/* Memory reserved for the program stays, so nothing waits for it. */
static void
test_reserved_memory_costs_no_wait(void) {
    struct world world = {0};
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 64 * MIB, 0));
    give(&world, take(&world, 5 * MIB, 0));
    uint64_t n = calls(&world, PYA_SIM_DEVICE_SYNC);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n);
    world_fini(&world);
}

/* A pool's does too: what is kept of it is for everybody. */
static void
test_what_is_reserved_outlives_a_pool(void) {
    struct world world = {0};
    pools_init(&world, "");
    pool_begin(&world);
    give(&world, take(&world, 20 * MIB, 0));
    pool_end(&world);
    CHECK_OK(pya_reserve(world.heap, 0, 12 * MIB, 0));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(reserved(&world), 12 * MIB);
    (void)take(&world, 12 * MIB, 16);
    CHECK_EQ(reserved(&world), 12 * MIB);
    world_fini(&world);
}

/* What another thread does while the device is waited for: its stream uses some memory, which then becomes free. */
static struct {
    struct world *world;
    pya_dptr ptr;
    bool is_graph;
} meanwhile;

static pya_status
sync_meanwhile(struct pya_device *dev) {
    pya_status st = world_opened.ops->device_sync(dev);
    struct world *world = meanwhile.world;
    meanwhile.world = NULL;
    if (world != NULL) {
        CHECK_OK(pya_sim_use(world->sim, 16, meanwhile.ptr, 20 * MIB));
        if (meanwhile.is_graph) {
            CHECK_OK(pya_pool_release(world->heap, 0, POOL));
        } else {
            give(world, meanwhile.ptr);
        }
    }
    return st;
}

/* While memory is short, another thread uses up the records of blocks, stops the history, and frees what is needed. */
static pya_status
sync_while_short(struct pya_device *dev) {
    pya_status st = world_opened.ops->device_sync(dev);
    struct world *world = meanwhile.world;
    const struct pya_card *card = world == NULL ? NULL : world->heap->cards.open[0];
    meanwhile.world = NULL;
    if (card != NULL && CHECK(!pya_lock_is_held(&card->lock))) {
        const struct pya_slab *blocks = &card->blocks;
        do {
            (void)take(world, 512, 0);
        } while (blocks->n_free > 0);
        pya_history_stop(world->heap);
        CHECK_OK(pya_sim_use(world->sim, 16, meanwhile.ptr, 20 * MIB));
        give(world, meanwhile.ptr);
    }
    return st;
}

static void
test_others_go_on_while_memory_is_short(void) {
    struct world world = {.config = {.capacity_bytes = 40 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 100, 0));
    (void)take(&world, 512, 0);
    meanwhile.ptr = take(&world, 20 * MIB, 16);
    pya_dptr low = take(&world, 10 * MIB, 0);
    (void)take(&world, 512, 0);
    give(&world, low);
    world.ops.device_sync = sync_while_short;
    meanwhile.world = &world;
    uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    pya_dptr ptr = take(&world, 24 * MIB, 0);
    CHECK_OK(pya_sim_use(world.sim, 0, ptr, 24 * MIB));
    CHECK_EQ(
        calls(&world, PYA_SIM_DEVICE_SYNC),
        n_waits + 2); /* the second for what was freed meanwhile */
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_saved_by_transfer"), 1);
    pya_sim_finish_all(world.sim);
    world_fini(&world);
}

/* While memory is short, another thread frees what is needed and begins to capture. */
static pya_status
sync_before_capture(struct pya_device *dev) {
    pya_status st = world_opened.ops->device_sync(dev);
    struct world *world = meanwhile.world;
    meanwhile.world = NULL;
    if (world != NULL) {
        give(world, meanwhile.ptr);
        pya_sim_set_capturing(world->sim, 16, true);
    }
    return st;
}

static void
test_what_is_freed_before_a_capture_serves(void) {
    for (int has_vmm = 0; has_vmm < 2; has_vmm++) {
        struct world world = {.config = {.capacity_bytes = 40 * MIB}};
        world_init(&world, has_vmm ? "" : "vmm:False");
        (void)take(&world, 512, 16);
        meanwhile.ptr = take(&world, 20 * MIB, 0);
        (void)take(&world, 10 * MIB, 0);
        world.ops.device_sync = sync_before_capture;
        meanwhile.world = &world;
        CHECK(take(&world, 20 * MIB, 0) != 0);
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_saved_by_wait"), 1);
        pya_sim_set_capturing(world.sim, 16, false);
        world_fini(&world);
    }
}

static bool has_begun; /* atomic */

static void *
begin_pool(void *arg) {
    pool_begin(arg);
    __atomic_store_n(&has_begun, true, __ATOMIC_RELEASE);
    return NULL;
}

static pthread_t beginner;

/* Another thread is about to begin a capture.  Waits until it has begun, or waits at the gate. */
static pya_status
sync_while_beginning(struct pya_device *dev) {
    struct world *world = meanwhile.world;
    meanwhile.world = NULL;
    if (world != NULL && CHECK_EQ(pthread_create(&beginner, NULL, begin_pool, world), 0)) {
        const struct pya_lock *gate = &world->heap->cards.open[0]->gate;
        while (__atomic_load_n(&gate->state, __ATOMIC_ACQUIRE) != 2 &&
               !__atomic_load_n(&has_begun, __ATOMIC_ACQUIRE)) {
            sched_yield();
        }
        CHECK(!__atomic_load_n(&has_begun, __ATOMIC_ACQUIRE));
    }
    return world_opened.ops->device_sync(dev);
}

static void
test_no_capture_begins_while_the_device_is_waited_for(void) {
    struct world world = {0};
    pools_init(&world, "");
    (void)take(&world, 900 * MIB, 0);
    world.ops.device_sync = sync_while_beginning;
    meanwhile.world = &world;
    CHECK_EQ(pya_alloc(world.heap, 0, 200 * MIB, 0, &(pya_dptr){0}), PYA_E_NOMEM);
    CHECK_EQ(pthread_join(beginner, NULL), 0);
    CHECK(has_begun);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    world_fini(&world);
}

enum during { NOTHING, A_FREE, A_GRAPH_GOES, N_DURING };

static void
check_waits(const char *options, enum during during, size_t left) {
    struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
    pools_init(&world, options);
    pool_begin(&world);
    pya_dptr captured = take(&world, 20 * MIB, 16);
    give(&world, captured);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL)); /* one user stays: the graph */
    pya_dptr eager = take(&world, 20 * MIB, 16);
    give(&world, take(&world, 40 * MIB, 0));
    world.ops.device_sync = sync_meanwhile;
    meanwhile.world = during == NOTHING ? NULL : &world;
    meanwhile.is_graph = during == A_GRAPH_GOES;
    meanwhile.ptr = meanwhile.is_graph ? captured : eager;
    uint64_t n = calls(&world, PYA_SIM_DEVICE_SYNC);
    CHECK_OK(pya_trim(world.heap, 0, left));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n + (during == NOTHING ? 1 : 2));
    CHECK(reserved(&world) <= left + 40 * MIB);
    world_fini(&world);
}

/* Once, without the lock, and once more under it if a block or a graph's memory became free meanwhile. */
static void
test_waits_once(void) {
    for (enum during during = NOTHING; during < N_DURING; during++) {
        check_waits("", during, 0);
        check_waits("", during, 10 * MIB);
        check_waits("vmm:False", during, 0);
    }
}

static const struct check_case cases[] = {
    {"what_is_left_to_others_is_kept_free", test_what_is_left_to_others_is_kept_free},
    {"a_little_stays", test_a_little_stays},
    {"what_goes_takes_no_record", test_what_goes_takes_no_record_of_the_request},
    {"half_a_range_goes", test_half_a_range_goes},
    {"busy_memory_stays", test_busy_memory_stays},
    {"a_pool_in_use_keeps_its_memory", test_a_pool_in_use_keeps_its_memory},
    {"a_pool_in_use_is_not_trimmed", test_a_pool_in_use_is_not_trimmed},
    {"what_is_wanted_stays", test_what_is_wanted_stays},
    {"oldest_goes_first", test_the_oldest_goes_first},
    {"largest_goes_first", test_the_largest_of_the_oldest_goes_first},
    {"highest_goes_first", test_the_highest_of_equals_goes_first},
    {"second_address_goes_last", test_what_has_a_second_address_goes_last},
    {"segments_of_two_streams", test_segments_of_two_streams},
    {"oldest_segment_goes_first", test_the_oldest_segment_goes_first},
    {"what_is_freed_before_a_capture_serves", test_what_is_freed_before_a_capture_serves},
    {"no_capture_begins_while_the_device_is_waited_for",
     test_no_capture_begins_while_the_device_is_waited_for},
    {"waits_once", test_waits_once},
    {"others_go_on_while_memory_is_short", test_others_go_on_while_memory_is_short},
    {"memory_that_cannot_go_serves_on", test_memory_that_cannot_go_serves_on},
    {"memory_that_moved_serves_on", test_memory_that_moved_and_cannot_go_serves_on},
    {"reserved_memory_costs_no_wait", test_reserved_memory_costs_no_wait},
    {"what_is_reserved_outlives_a_pool", test_what_is_reserved_outlives_a_pool},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
