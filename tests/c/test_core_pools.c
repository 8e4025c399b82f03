/* Private pools of a special kind: blocks claimed again at their addresses, a source of their own, whole segments,
 * memory opened to peers. */
#include "core/snapshot.h"
#include "fault.h"
#include "world.h"

static const struct pya_pool_id POOL = {3, 4};

static bool
match_nothing(void *arg, pya_stream stream) {
    (void)arg;
    (void)stream;
    return false;
}

static void
pools_init(struct world *world, const char *text) {
    world->config.capacity_bytes = 1024 * MIB;
    world_init(world, text);
    CHECK_OK(pya_pool_retain(world->heap, 0, POOL, false));
}

static void
pool_begin(struct world *world) {
    CHECK_OK(pya_pool_begin(world->heap, 0, POOL, (struct pya_stream_filter){0}));
}

static void
pool_end(struct world *world) {
    CHECK_OK(pya_pool_end(world->heap, 0, POOL));
    CHECK_OK(pya_pool_release(world->heap, 0, POOL));
}

static pya_status
claim(struct world *world, pya_dptr addr, size_t bytes) {
    const struct pya_claim wanted = {.addr = addr, .bytes = bytes, .requested = bytes};
    return pya_pool_claim(world->heap, 0, POOL, &wanted);
}

static void
test_claim(void) {
    struct world world = {0};
    pya_dptr ptrs[3];
    pools_init(&world, "");
    pool_begin(&world);
    for (size_t i = 0; i < 3; i++) {
        ptrs[i] = take(&world, 3 * MIB, 0);
    }
    pool_end(&world);
    CHECK_EQ(claim(&world, ptrs[1], 3 * MIB), PYA_E_INVAL); /* live */
    CHECK_OK(pya_free(world.heap, ptrs[1]));
    CHECK_EQ(claim(&world, ptrs[1], 4 * MIB), PYA_E_INVAL); /* reaches into the next */
    CHECK_OK(claim(&world, ptrs[1] + 512, MIB));
    CHECK_EQ(claim(&world, ptrs[1], MIB), PYA_E_INVAL);
    CHECK_OK(pya_free(world.heap, ptrs[1] + 512));
    CHECK_OK(claim(&world, ptrs[1], 3 * MIB));
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    CHECK_EQ(claim(&world, (pya_dptr)4096, MIB), PYA_E_INVAL);
    world_fini(&world);
}

/* Every other page of a pool is free and a large block is stitched from them; its address stays good while the pool is
 * in use, also when mappings are many: a graph may have it in its kernels. */
static void
test_addresses_of_a_pool_in_use_stay_mapped(void) {
    struct world world = {0};
    pya_dptr ptrs[16];
    pools_init(&world, "memory:tight,mappings_per_page:1");
    pool_begin(&world);
    for (size_t i = 0; i < 16; i++) {
        ptrs[i] = take(&world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < 16; i += 2) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    pya_dptr stitched = take(&world, 16 * MIB, 0);
    pool_end(&world);
    CHECK_OK(pya_free(world.heap, stitched));
    for (size_t i = 0; i < 16; i++) {
        ptrs[i] = i % 2 != 0 ? ptrs[i] : take(&world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < 16; i += 2) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
        ptrs[i] = take(&world, (4 + i) * MIB, 0);
    }
    CHECK_OK(claim(&world, stitched, 16 * MIB));
    CHECK_OK(pya_free(world.heap, stitched));
    world_fini(&world);
}

/* Nor does it come to show another page: the blocks of an earlier state of the pool are claimed each on its own. */
static void
test_stitched_ranges_of_a_pool_keep_their_pages(void) {
    struct world world = {0};
    pya_dptr ptrs[16];
    pools_init(&world, "memory:tight");
    pool_begin(&world);
    for (size_t i = 0; i < 16; i++) {
        ptrs[i] = take(&world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < 16; i += 2) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    pya_dptr stitched = take(&world, 16 * MIB, 0);
    CHECK_OK(pya_free(world.heap, stitched));
    CHECK_OK(pya_free(world.heap, ptrs[1]));
    pya_dptr larger = take(&world, 18 * MIB, 0);
    pool_end(&world);
    CHECK_OK(pya_free(world.heap, larger));
    CHECK_OK(claim(&world, ptrs[1], 2 * MIB));
    CHECK_OK(claim(&world, stitched, 16 * MIB));
    CHECK_OK(pya_free(world.heap, stitched));
    world_fini(&world);
}

/* ---- a source of memory ---- */

struct source {
    size_t n_segments;
    size_t n_calls;
    bool is_dropped;
    bool is_empty;
};

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    struct source *source = arg;
    if (source->is_empty) {
        return 0;
    }
    source->n_segments++;
    source->n_calls++;
    return ((pya_dptr)source->n_calls << 40) + bytes % 2;
}

static void
source_free(void *arg, pya_dptr addr) {
    struct source *source = arg;
    CHECK(addr >> 40 <= source->n_calls);
    CHECK(!source->is_dropped);
    source->n_segments--;
}

static void
source_drop(void *arg) {
    struct source *source = arg;
    CHECK_EQ(source->n_segments, 0);
    CHECK(!source->is_dropped);
    source->is_dropped = true;
}

static struct pya_segment_source
source_of(struct source *source) {
    return (struct pya_segment_source){source_alloc, source_free, source_drop, source};
}

static void
run_source(const char *options) {
    struct world world = {0};
    struct source source = {0};
    struct source second = {0};
    struct pya_sim_state state;
    pools_init(&world, options);
    CHECK_OK(pya_pool_set_source(world.heap, 0, POOL, source_of(&source)));
    CHECK_EQ(pya_pool_set_source(world.heap, 0, POOL, source_of(&second)), PYA_E_INVAL);
    CHECK(second.is_dropped);
    pool_begin(&world);
    pya_dptr small = take(&world, 100, 0);
    pya_dptr large = take(&world, 3 * MIB, 0);
    pya_dptr other = take(&world, 30 * MIB, 0);
    CHECK_EQ(source.n_segments, 3);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    source.is_empty = true;
    pya_dptr none = 0;
    CHECK_EQ(pya_alloc(world.heap, 0, 40 * MIB, 0, &none), PYA_E_NOMEM);
    pool_end(&world);
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.used_bytes, 0); /* nothing of the device's */
    CHECK_OK(pya_free(world.heap, small));
    CHECK_OK(pya_free(world.heap, large));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_segments, 3); /* the pool has a user */
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_segments, 1);
    CHECK(!source.is_dropped);
    CHECK_OK(pya_free(world.heap, other));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(source.is_dropped);
    world_fini(&world);
}

static void
test_source(void) {
    run_source("");
    run_source("vmm:False");
}

static void
test_source_dies_with_the_heap(void) {
    struct world world = {0};
    struct source source = {0};
    pools_init(&world, "");
    CHECK_OK(pya_pool_set_source(world.heap, 0, POOL, source_of(&source)));
    pool_begin(&world);
    (void)take(&world, 5 * MIB, 0);
    pool_end(&world);
    world_fini(&world);
    CHECK(source.is_dropped);
}

static void
test_no_split(void) {
    struct world world = {0};
    pya_dptr base = 0;
    size_t bytes = 0;
    int device = 0;
    pools_init(&world, "");
    CHECK_OK(pya_pool_set_no_split(world.heap, 0, POOL));
    pool_begin(&world);
    pya_dptr first = take(&world, 5 * MIB, 0);
    pya_dptr second = take(&world, 5 * MIB, 0);
    pool_end(&world);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(pya_block_info(world.heap, i == 0 ? first : second, &base, &bytes, &device));
        CHECK_EQ(bytes, 20 * MIB);
        CHECK_OK(pya_segment_info(world.heap, base, &base, &bytes));
        CHECK_EQ(base, i == 0 ? first : second);
        CHECK_EQ(bytes, 20 * MIB);
    }
    CHECK_EQ(pya_pool_set_no_split(world.heap, 0, POOL), PYA_E_INVAL); /* too late */
    CHECK_OK(pya_free(world.heap, first));
    CHECK_OK(pya_free(world.heap, second));
    world_fini(&world);
}

static void
test_counts_by_kind(void) {
    struct world world = {0};
    struct pya_pool_info info;
    pools_init(&world, "");
    pool_begin(&world);
    pya_dptr small = take(&world, 1000, 0);
    pya_dptr large = take(&world, 64 * MIB, 0);
    pool_end(&world);
    CHECK_EQ(pya_pool_list(world.heap, 0, &info, 1), 1);
    CHECK(info.reserved_bytes[PYA_STAT_SMALL].current >= (int64_t)(2 * MIB));
    CHECK(info.reserved_bytes[PYA_STAT_LARGE].current >= (int64_t)(32 * MIB));
    CHECK_EQ(
        info.reserved_bytes[PYA_STAT_SMALL].current + info.reserved_bytes[PYA_STAT_LARGE].current,
        info.reserved_bytes[PYA_STAT_ALL].current);
    CHECK_OK(pya_free(world.heap, small));
    CHECK_OK(pya_free(world.heap, large));
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(pya_pool_list(world.heap, 0, &info, 1), 1);
    for (int i = 0; i < PYA_N_STAT_POOLS; i++) {
        CHECK_EQ(info.reserved_bytes[i].current, 0);
    }
    world_fini(&world);
}

static void
test_trace_knows_the_pool(void) {
    struct world world = {0};
    struct pya_snapshot snap;
    pools_init(&world, "");
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_NEVER, true, 100, 0));
    pool_begin(&world);
    pya_dptr inside = take(&world, MIB, 0);
    pool_end(&world);
    pya_dptr outside = take(&world, MIB, 0);
    CHECK_OK(pya_history_annotate(world.heap, inside, NULL));
    CHECK_OK(pya_free(world.heap, inside));
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(pya_history_annotate(world.heap, inside, NULL), PYA_E_FOREIGN);
    CHECK_OK(pya_snapshot_take(world.heap, NULL, true, &snap));
    size_t n_inside = 0;
    for (size_t i = 0; i < snap.n_entries; i++) {
        const struct pya_entry *entry = &snap.entries[i];
        bool is_pool =
            entry->place.pool.first == POOL.first && entry->place.pool.second == POOL.second;
        n_inside += is_pool;
        CHECK(entry->addr != inside || is_pool);
        CHECK(entry->addr != outside || !is_pool);
    }
    CHECK_EQ(
        n_inside, 6); /* map, alloc, annotate, free twice, unmap: long after its segment went */
    pya_snapshot_fini(&snap);
    CHECK_OK(pya_free(world.heap, outside));
    world_fini(&world);
}

static void
test_peers(void) {
    struct world world = {0};
    struct pya_sim_state before;
    struct pya_sim_state after;
    pools_init(&world, "");
    pool_begin(&world);
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    pool_end(&world);
    pya_sim_query(world.sim, &before);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    pya_sim_query(world.sim, &after);
    CHECK_EQ(after.n_calls[PYA_SIM_ENABLE_PEER], before.n_calls[PYA_SIM_ENABLE_PEER] + 1);
    CHECK(after.n_calls[PYA_SIM_SET_ACCESS] > before.n_calls[PYA_SIM_SET_ACCESS]);
    CHECK_OK(pya_free(world.heap, ptr));
    world_fini(&world);
}

/* Found by fuzzing: what took the last of a pool's memory was a request of others, and then nobody removed the pool. */
static void
test_emptied_pool_goes(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {0};
        pya_dptr ptr, none;
        pools_init(&world, options[i]);
        pool_begin(&world);
        ptr = take(&world, 300 * MIB, 0);
        pool_end(&world);
        CHECK_OK(pya_pool_release(world.heap, 0, POOL));
        CHECK_OK(pya_free(world.heap, ptr));
        CHECK_EQ(pya_alloc(world.heap, 0, 2048 * MIB, 0, &none), PYA_E_NOMEM);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
        world_fini(&world);
    }
}

/* A pool with free memory whose last user has gone; its graphs may still run, on a stream nobody told us of. */
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

/* The next pool waits for the device when it begins, because during its capture that is forbidden. */
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

/* Whether the device may be asked, or the waiting fails, or the pool has a user again: its memory stays its own. */
static void
test_unsettled_pool_keeps_its_memory(void) {
    struct world world = {0};
    world_with_dropped_pool(&world);
    uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
    pya_sim_set_capturing(world.sim, 0, true); /* by somebody who did not tell */
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

/* A program that captures again and again: what others took the memory of leaves nothing behind, not even addresses. */
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
        inside[0] = take(&world, 35 * MIB, 0); /* stitched, or grown */
        CHECK_OK(pya_pool_end(world.heap, 0, id));
        CHECK_OK(pya_pool_release(world.heap, 0, id));
        give(&world, inside[0]);
        give(&world, inside[1]);
        give(&world, take(&world, 60 * MIB, 0)); /* of others, who take the pool's pages */
        pya_sim_query(world.sim, &state);
        CHECK(pya_pool_list(world.heap, 0, NULL, 0) <= 2);
        CHECK(state.n_ranges <= 8);
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

/* While a pool is routed to without a capture, blocks that other streams used come back before memory grows; nothing is
 * asked of the device while one is under way. */
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

/* The same where no event can be had: short of memory, the streams are waited for. */
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

/* Every request of the world's until one fails, and what it fails with; all goes back. */
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

/* A capture may need no memory at all; others who run short meanwhile must not wait for the device, which would break it.
 * Where even its stream is unknown, the device refuses, and that means no memory either. */
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

/* Nobody captures a stream that was destroyed: memory of a dropped pool is to be had all the same. */
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

/* The next pool, on another stream, takes over what a dropped one left as it lies; what it does not touch of it stays
 * everybody's, what it touches becomes its own. */
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

/* Emptying the cache gives back what a pool in use has not touched, and nothing else of it. */
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

/* A pool that is used again has what it left itself, on the same terms. */
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

static const struct check_case cases[] = {
    {"recorded_streams_while_routing", test_recorded_streams_while_routing},
    {"recorded_streams_without_events", test_recorded_streams_without_events},
    {"pools_come_and_go", test_pools_come_and_go},
    {"capture_that_asks_for_nothing", test_capture_that_asks_for_nothing},
    {"destroyed_stream_captures_nothing", test_destroyed_stream_captures_nothing},
    {"next_pool_takes_over", test_next_pool_takes_over},
    {"untouched_goes_back", test_untouched_goes_back},
    {"same_pool_again", test_same_pool_again},
    {"dropped_pool_serves_others", test_dropped_pool_serves_others},
    {"dropped_pool_serves_the_next", test_dropped_pool_serves_the_next},
    {"unsettled_pool_keeps_its_memory", test_unsettled_pool_keeps_its_memory},
    {"emptied_pool_goes", test_emptied_pool_goes},
    {"claim", test_claim},
    {"ranges_keep_their_pages", test_stitched_ranges_of_a_pool_keep_their_pages},
    {"addresses_stay_mapped", test_addresses_of_a_pool_in_use_stay_mapped},
    {"source", test_source},
    {"source_dies_with_the_heap", test_source_dies_with_the_heap},
    {"no_split", test_no_split},
    {"counts_by_kind", test_counts_by_kind},
    {"trace_knows_the_pool", test_trace_knows_the_pool},
    {"peers", test_peers},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
