/* Private pools that were dropped, and their successors: who gets the memory, and when. */
#include "pools.h"

static bool
match_nothing(void *arg, pya_stream stream) {
    (void)arg;
    (void)stream;
    return false;
}

/* A pool with free memory whose last user has gone.  Its graphs may still run, on a stream unknown to pyalloc. */
static void
world_with_dropped_pool(struct world *world) {
    pools_init(world, "");
    pool_begin(world);
    pya_dptr ptr = take(world, 100 * MIB, 0);
    pool_end(world);
    CHECK_OK(pya_free(world->heap, ptr));
    CHECK_OK(pya_pool_release(world->heap, 0, POOL));
}

static void
test_dropped_pool_serves_others(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_dptr first = take(&world, 60 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    pya_dptr second = take(&world, 40 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    CHECK_OK(pya_free(world.heap, first));
    CHECK_OK(pya_free(world.heap, second));
    world_fini(&world);
}

/* The next pool waits for the device when it begins, because waiting is forbidden during its capture. */
static void
test_dropped_pool_serves_the_next(void) {
    static const struct pya_pool_id next = {5, 6};
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    CHECK_OK(pya_pool_begin(world.heap, 0, next, (struct pya_stream_filter){0}));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    pya_sim_set_capturing(world.sim, 0, true);
    pya_dptr ptr = take(&world, 100 * MIB, 0);
    pya_sim_set_capturing(world.sim, 0, false);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    CHECK_OK(pya_pool_end(world.heap, 0, next));
    CHECK_OK(pya_free(world.heap, ptr));
    world_fini(&world);
}

/* The pool's memory stays its own while a capture forbids waiting, if the wait fails, or if it has a user again. */
static void
test_unsettled_pool_keeps_its_memory(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_sim_set_capturing(world.sim, 0, true); /* without telling pyalloc */
    pya_dptr captured = take(&world, 10 * MIB, 0);
    pya_sim_set_capturing(world.sim, 0, false);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made + 5);
    pya_sim_fail(world.sim, (uint32_t)1 << PYA_SIM_DEVICE_SYNC, 1, PYA_E_DEVICE, false);
    pya_dptr failed = take(&world, 10 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made + 10);
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    pya_dptr used = take(&world, 10 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made + 15);
    CHECK_OK(pya_free(world.heap, captured));
    CHECK_OK(pya_free(world.heap, failed));
    CHECK_OK(pya_free(world.heap, used));
    world_fini(&world);
}

/* What a pool took over from another is its own.  That still holds once it was dropped and has a user again: memory
 * freed since the wait for the device may be in use. */
static void
test_leavings_that_were_taken_are_left_no_more(void) {
    static const struct pya_pool_id next = {5, 6};
    struct world world = {0};
    world_with_dropped_pool(&world);
    give(&world, take(&world, 10 * MIB, 0)); /* settles it */
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    CHECK_OK(pya_pool_begin(world.heap, 0, next, (struct pya_stream_filter){0}));
    pya_dptr late = take(&world, 30 * MIB, 0);
    pya_dptr early = take(&world, 30 * MIB, 0);
    CHECK_OK(pya_pool_end(world.heap, 0, next));
    give(&world, early);
    CHECK_OK(pya_pool_release(world.heap, 0, next));
    uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    pya_dptr others = take(&world, 80 * MIB, 0); /* settles the second */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits + 1);
    give(&world, late);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0); /* merges it with its neighbours */
    CHECK_OK(pya_pool_retain(world.heap, 0, next, false));
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_dptr more = take(&world, 30 * MIB, 0);
    CHECK(calls(&world, PYA_SIM_PAGE_CREATE) >= n_made + 15);
    give(&world, others);
    give(&world, more);
    world_fini(&world);
}

/* Nor is memory left to others that was in use when the pool was settled: it may still be in use after its free. */
static void
test_what_was_in_use_meanwhile_is_not_left(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    give(&world, take(&world, 512, 16)); /* settles it */
    pool_begin(&world);
    pya_dptr ptr = take(&world, 90 * MIB, 0);
    give(&world, take(&world, 8 * MIB, 0));
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    pya_dptr others = take(&world, 20 * MIB, 16);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    pya_dptr more = take(&world, 40 * MIB, 16); /* settles it again */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits + 1);
    give(&world, ptr);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0); /* merges it with its neighbours */
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_dptr last = take(&world, 60 * MIB, 16);
    CHECK(calls(&world, PYA_SIM_PAGE_CREATE) >= n_made + 25);
    give(&world, others);
    give(&world, more);
    give(&world, last);
    world_fini(&world);
}

/* A program captures again and again.  A pool whose memory others took leaves nothing behind, not even addresses. */
static void
test_pools_come_and_go(void) {
    struct world world = {0};
    struct pya_sim_state state;
    world.config.capacity_bytes = 1024 * MIB;
    world_init(&world, "");
    for (uint64_t i = 1; i < 30; i++) {
        const struct pya_pool_id id = {i, 1};
        CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
        pya_dptr inside[3] = {
            take(&world, 20 * MIB, 0), take(&world, MIB, 0), take(&world, 20 * MIB, 0)};
        give(&world, inside[0]);
        give(&world, inside[2]);
        inside[0] = take(&world, 35 * MIB, 0); /* stitched or grown */
        CHECK_OK(pya_pool_end(world.heap, 0, id));
        CHECK_OK(pya_pool_release(world.heap, 0, id));
        give(&world, inside[0]);
        give(&world, inside[1]);
        give(&world, take(&world, 60 * MIB, 0)); /* by others, who take the pool's pages */
        pya_sim_query(world.sim, &state);
        CHECK(pya_pool_list(world.heap, 0, NULL, 0) <= 2);
        CHECK(state.n_ranges <= 8);
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

/* While requests are routed to a pool without a capture, blocks that other streams used come back before memory grows.
 * During a capture the device is asked nothing. */
static void
test_recorded_streams_while_routing(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 4; i++) {
        struct world world = {0};
        bool is_capture = i >= 2;
        pools_init(&world, options[i % 2]);
        pool_begin(&world);
        pya_sim_set_capturing(world.sim, 0, is_capture);
        for (size_t k = 0; k < 10; k++) {
            pya_dptr ptr = take(&world, 60 * MIB, 0);
            CHECK_OK(pya_record_stream(world.heap, ptr, 5));
            give(&world, ptr);
        }
        CHECK_EQ(calls(&world, PYA_SIM_EVENT_RECORD) == 0, is_capture);
        CHECK_EQ(calls(&world, PYA_SIM_EVENT_QUERY) == 0, is_capture);
        CHECK_EQ(reserved(&world) <= 140 * MIB, !is_capture);
        pya_sim_set_capturing(world.sim, 0, false);
        pool_end(&world);
        world_fini(&world);
    }
}

/* Blocks freed during a capture get their event when it ends, not at the next request, after later work. */
static void
test_freed_under_a_capture_is_marked_at_its_end(void) {
    struct world world = {0};
    pools_init(&world, "");
    pya_dptr ptr = take(&world, 60 * MIB, 0);
    CHECK_OK(pya_record_stream(world.heap, ptr, 5));
    pool_begin(&world);
    pya_sim_set_capturing(world.sim, 0, true);
    give(&world, ptr);
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_RECORD), 0);
    pya_sim_set_capturing(world.sim, 0, false);
    pool_end(&world);
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_RECORD), 1);
    world_fini(&world);
}

/* The same for an event that became part of a graph that was captured by hand: it is made anew when a capture ends. */
static void
test_event_of_a_graph_is_made_anew_when_a_capture_ends(void) {
    struct world world = {0};
    pools_init(&world, "");
    pya_dptr ptr = take(&world, 60 * MIB, 0);
    CHECK_OK(pya_record_stream(world.heap, ptr, 5));
    give(&world, ptr);
    pya_sim_fail(world.sim, UINT32_C(1) << PYA_SIM_EVENT_QUERY, 1, PYA_E_CAPTURE, false);
    (void)take(&world, 512, 0);
    CHECK(pya_sim_fail_clear(world.sim));
    pool_begin(&world);
    uint64_t n_records = calls(&world, PYA_SIM_EVENT_RECORD);
    pool_end(&world);
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_RECORD), n_records + 1);
    world_fini(&world);
}

/* A dropped pool without memory is removed, with its addresses, when the next dropped pool is settled. */
static void
test_pool_without_memory_goes(void) {
    static const struct pya_pool_id next = {5, 6};
    struct world world = {0};
    pools_init(&world, "");
    pool_begin(&world);
    CHECK_OK(pya_pool_begin(world.heap, 0, next, (struct pya_stream_filter){0}));
    pya_dptr other = take(&world, 40 * MIB, 0);
    CHECK_OK(pya_pool_end(world.heap, 0, next));
    pya_dptr ptr = take(&world, 100 * MIB, 0);
    pool_end(&world);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    give(&world, ptr);
    (void)take(&world, 100 * MIB, 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 2);
    CHECK_OK(pya_pool_release(world.heap, 0, next));
    give(&world, other);
    (void)take(&world, 20 * MIB, 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 1);
    world_fini(&world);
}

/* The same if no event can be recorded: when memory is short, the streams are waited for. */
static void
test_recorded_streams_without_events(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {0};
        pools_init(&world, options[i]);
        pool_begin(&world);
        pya_sim_fail(world.sim, (uint32_t)1 << PYA_SIM_EVENT_RECORD, 1, PYA_E_DEVICE, true);
        for (size_t k = 0; k < 10; k++) {
            pya_dptr ptr = take(&world, 300 * MIB, 0);
            CHECK_OK(pya_record_stream(world.heap, ptr, 5));
            give(&world, ptr);
        }
        (void)pya_sim_fail_clear(world.sim);
        pool_end(&world);
        world_fini(&world);
    }
}

/* Takes blocks until a request fails, and frees them all.  Returns that request's status. */
static pya_status
fill_until_it_fails(struct world *world, pya_stream stream) {
    pya_dptr ptrs[64];
    size_t n = 0;
    pya_status st = PYA_OK;
    while (n < 64 && st == PYA_OK) {
        st = pya_alloc(world->heap, 0, 30 * MIB, stream, &ptrs[n]);
        n += st == PYA_OK;
    }
    while (n > 0) {
        give(world, ptrs[--n]);
    }
    return st;
}

/* A capture may request no memory at all.  Others that run short meanwhile must not wait for the device, which would
 * break it.  If even its stream is unknown, the device refuses to wait, which also means out of memory. */
static void
test_capture_that_asks_for_nothing(void) {
    static const char *const options[] = {"", "vmm:False"};
    static const pya_stream known[] = {9, 0};
    for (size_t i = 0; i < 4; i++) {
        struct world world = {0};
        pools_init(&world, options[i % 2]);
        give(&world, take(&world, 30 * MIB, 0));
        CHECK_OK(pya_pool_begin(
            world.heap, 0, POOL,
            (struct pya_stream_filter){.match = match_nothing, .began_on = known[i / 2]}));
        pya_sim_set_capturing(world.sim, 9, true);
        CHECK_EQ(fill_until_it_fails(&world, 0), PYA_E_NOMEM);
        if (known[i / 2] != 0) {
            CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
            CHECK_OK(pya_empty_cache(world.heap, 0));
            CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
        }
        pya_sim_set_capturing(world.sim, 9, false);
        CHECK_OK(pya_pool_end(world.heap, 0, POOL));
        CHECK_OK(pya_empty_cache(world.heap, 0));
        world_fini(&world);
    }
}

/* A destroyed stream captures nothing, so a dropped pool's memory can still be had. */
static void
test_destroyed_stream_captures_nothing(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_sim_fail(world.sim, (uint32_t)1 << PYA_SIM_IS_CAPTURING, 1, PYA_E_DEVICE, true);
    pya_dptr ptr = take(&world, 60 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    give(&world, ptr);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    (void)pya_sim_fail_clear(world.sim);
    world_fini(&world);
}

/* The next pool, on another stream, takes over a dropped pool's memory as it lies.  What it touches becomes its own;
 * the rest stays everybody's. */
static void
test_next_pool_takes_over(void) {
    static const struct pya_pool_id next = {5, 6};
    struct world world = {0};
    struct pya_pool_info infos[2];
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    CHECK_OK(pya_pool_begin(world.heap, 0, next, (struct pya_stream_filter){0}));
    uint64_t n_mapped = calls(&world, PYA_SIM_MAP);
    pya_dptr own = take(&world, 40 * MIB, 32);
    CHECK_EQ(calls(&world, PYA_SIM_MAP), n_mapped);
    CHECK_OK(pya_pool_end(world.heap, 0, next));
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    size_t n_pools = pya_pool_list(world.heap, 0, infos, 2);
    for (size_t i = 0; i < n_pools; i++) {
        bool is_next = infos[i].id.first == next.first;
        size_t bytes = (size_t)infos[i].reserved_bytes[PYA_STAT_ALL].current;
        CHECK_EQ(bytes, is_next ? reserved(&world) : 0);
    }
    pya_dptr eager = take(&world, 60 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    give(&world, own);
    pya_dptr more = take(&world, 40 * MIB, 0); /* the graph may still run */
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made + 20);
    give(&world, eager);
    give(&world, more);
    CHECK_OK(pya_pool_release(world.heap, 0, next));
    world_fini(&world);
}

/* Emptying the cache gives back what a pool in use has not touched, and no more of the pool. */
static void
test_untouched_goes_back(void) {
    static const struct pya_pool_id next = {5, 6};
    struct world world = {0};
    world_with_dropped_pool(&world);
    CHECK_OK(pya_pool_begin(world.heap, 0, next, (struct pya_stream_filter){0}));
    pya_dptr own = take(&world, 40 * MIB, 0);
    CHECK_OK(pya_pool_end(world.heap, 0, next));
    give(&world, own);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 40 * MIB);
    CHECK_OK(pya_pool_release(world.heap, 0, next));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

/* A pool that is used again finds what it left, on the same terms. */
static void
test_same_pool_again(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_dptr eager = take(&world, 20 * MIB, 0); /* settles it */
    pool_begin(&world);
    pya_dptr own = take(&world, 40 * MIB, 0);
    pool_end(&world);
    pya_dptr second = take(&world, 40 * MIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
    give(&world, eager);
    give(&world, own);
    give(&world, second);
    world_fini(&world);
}

/* A tensor of a dropped pool may be in use, and be freed, long after the wait for the device.  No other stream takes
 * over that part before its work is done. */
static void
freed_after_settling(bool begins_again) {
    static const struct pya_pool_id next = {5, 6};
    enum { ONE = 16, TWO = 32 };
    struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
    pools_init(&world, "");
    pool_begin(&world);
    pya_dptr freed = take(&world, 60 * MIB, ONE);
    pya_dptr kept = take(&world, 40 * MIB, ONE);
    pool_end(&world);
    give(&world, freed);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    pya_dptr other = take(&world, 2 * MIB, TWO); /* waits for the device */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    CHECK_OK(pya_sim_use(world.sim, ONE, kept, 40 * MIB));
    give(&world, kept);
    const struct pya_pool_id *id = begins_again ? &POOL : &next;
    CHECK_OK(pya_pool_begin(world.heap, 0, *id, (struct pya_stream_filter){0}));
    pya_dptr ptr = 0;
    if (begins_again) { /* the pool's own memory, untouched so far; others may have what is idle of it */
        CHECK_OK(pya_pool_end(world.heap, 0, *id));
    }
    ptr = take(&world, 90 * MIB, TWO);
    CHECK_OK(pya_sim_use(world.sim, TWO, ptr, 90 * MIB));
    if (!begins_again) {
        CHECK_OK(pya_pool_end(world.heap, 0, *id));
    }
    pya_sim_finish_all(world.sim);
    give(&world, ptr);
    give(&world, other);
    CHECK_OK(pya_pool_release(world.heap, 0, *id));
    world_fini(&world);
}

static void
test_freed_after_settling(void) {
    freed_after_settling(false);
    freed_after_settling(true);
}

static void
begin(struct world *world, struct pya_pool_id id) {
    CHECK_OK(pya_pool_begin(world->heap, 0, id, (struct pya_stream_filter){0}));
}

/* Of several dropped pools, the next pool takes over the one that left most. */
static void
test_the_next_pool_takes_over_the_largest(void) {
    static const size_t mib[] = {20, 60, 40};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[3];
    world_init(&world, "");
    for (uint64_t i = 0; i < 3; i++) {
        begin(&world, (struct pya_pool_id){i, 1});
        ptrs[i] = take(&world, mib[i] * MIB, 0);
        CHECK_OK(pya_pool_end(world.heap, 0, (struct pya_pool_id){i, 1}));
    }
    for (uint64_t i = 0; i < 3; i++) {
        CHECK_OK(pya_pool_release(world.heap, 0, (struct pya_pool_id){i, 1}));
        give(&world, ptrs[i]);
    }
    begin(&world, POOL);
    CHECK_EQ(take(&world, 60 * MIB, 0), ptrs[1]);
    pool_end(&world);
    world_fini(&world);
}

/* If two pools want a request, the one that began last gets it. */
static void
test_the_pool_begun_last_serves(void) {
    static const struct pya_pool_id inner = {1, 1};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    struct pya_pool_info infos[2];
    world_init(&world, "");
    begin(&world, inner);
    CHECK_OK(pya_pool_end(world.heap, 0, inner)); /* known for longer, but begun later */
    begin(&world, POOL);
    begin(&world, inner);
    (void)take(&world, 20 * MIB, 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, infos, 2), 2);
    for (size_t i = 0; i < 2; i++) {
        bool is_inner = infos[i].id.first == inner.first;
        CHECK_EQ(infos[i].reserved_bytes[PYA_STAT_ALL].current > 0, is_inner);
    }
    CHECK_OK(pya_pool_end(world.heap, 0, inner));
    pool_end(&world);
    world_fini(&world);
}

/* A dropped pool's memory is offered to others whatever frees it last: here a stitched block. */
static void
test_stitched_block_of_a_dropped_pool(void) {
    struct world world = {0};
    pya_dptr pieces[16];
    world_init(&world, "memory:tight");
    pya_dptr guard = take(&world, 512, 0);
    CHECK_OK(pya_pool_begin(world.heap, 0, POOL, (struct pya_stream_filter){.began_on = 64}));
    for (size_t i = 0; i < 16; i++) {
        pieces[i] = take(&world, 2 * MIB, 64);
    }
    for (size_t i = 0; i < 16; i += 2) {
        give(&world, pieces[i]);
    }
    pya_dptr stitched = take(&world, 16 * MIB, 64);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    pya_dptr other = take(&world, 100 * MIB, 8);
    give(&world, stitched);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    for (size_t i = 1; i < 16; i += 2) {
        give(&world, pieces[i]);
    }
    give(&world, other);
    give(&world, guard);
    world_fini(&world);
}

static void
test_pool_that_is_dropped_while_routed_to(void) {
    struct world world = {0};
    world_init(&world, "");
    give(&world, take(&world, 512, 0));
    CHECK_OK(pya_pool_begin(world.heap, 0, POOL, (struct pya_stream_filter){.began_on = 64}));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    pya_dptr ptr = take(&world, 512, 64);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, ptr);
    world_fini(&world);
}

/* From then on no request looks for its memory. */
static void
test_pool_that_goes_with_the_cache(void) {
    struct world world = {0};
    world_init(&world, "");
    pya_dptr guard = take(&world, 512, 0);
    CHECK_OK(pya_pool_begin(world.heap, 0, POOL, (struct pya_stream_filter){.began_on = 64}));
    pya_dptr ptr = take(&world, 9 * MIB, 64);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    give(&world, ptr);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    pya_dptr first = take(&world, 50 * MIB, 8);
    pya_dptr second = take(&world, 50 * MIB, 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, guard);
    give(&world, first);
    give(&world, second);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"freed_after_settling", test_freed_after_settling},
    {"dropped_pool_serves_others", test_dropped_pool_serves_others},
    {"dropped_pool_serves_the_next", test_dropped_pool_serves_the_next},
    {"leavings_that_were_taken_are_left_no_more", test_leavings_that_were_taken_are_left_no_more},
    {"in_use_meanwhile_is_not_left", test_what_was_in_use_meanwhile_is_not_left},
    {"unsettled_pool_keeps_its_memory", test_unsettled_pool_keeps_its_memory},
    {"pools_come_and_go", test_pools_come_and_go},
    {"recorded_streams_while_routing", test_recorded_streams_while_routing},
    {"marked_when_a_capture_ends", test_freed_under_a_capture_is_marked_at_its_end},
    {"made_anew_when_a_capture_ends", test_event_of_a_graph_is_made_anew_when_a_capture_ends},
    {"pool_without_memory_goes", test_pool_without_memory_goes},
    {"recorded_streams_without_events", test_recorded_streams_without_events},
    {"capture_that_asks_for_nothing", test_capture_that_asks_for_nothing},
    {"destroyed_stream_captures_nothing", test_destroyed_stream_captures_nothing},
    {"next_pool_takes_over", test_next_pool_takes_over},
    {"untouched_goes_back", test_untouched_goes_back},
    {"same_pool_again", test_same_pool_again},
    {"next_takes_over_the_largest", test_the_next_pool_takes_over_the_largest},
    {"begun_last_serves", test_the_pool_begun_last_serves},
    {"stitched_block_of_a_dropped_pool", test_stitched_block_of_a_dropped_pool},
    {"dropped_while_routed_to", test_pool_that_is_dropped_while_routed_to},
    {"goes_with_the_cache", test_pool_that_goes_with_the_cache},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
