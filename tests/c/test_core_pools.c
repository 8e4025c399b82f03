/* Private pools of special kinds: blocks claimed again at their addresses, a source of their own, whole segments,
 * memory opened to peers. */
#include "core/snapshot.h"
#include "fault.h"
#include "pools.h"

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
    CHECK_EQ(claim(&world, ptrs[1], 0), PYA_E_INVAL);
    CHECK_EQ(claim(&world, ptrs[1], 700), PYA_E_INVAL);
    CHECK_EQ(claim(&world, ptrs[1] + 8, 512), PYA_E_INVAL);
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

/* Every other page of a pool is free, and a large block is stitched from them.  Its address stays valid while the pool
 * is in use, even with many mappings: a graph may have it in its kernels. */
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

/* Nor does that address come to show another page: the blocks of an earlier state are claimed one by one. */
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

/* Every second one of n_pages pages is free.  Then blocks of 2 to n_most pages were stitched of those, one after
 * another. Returns with the other pages taken: ptrs[1], ptrs[3], ... */
static void
stitch_sizes(struct world *world, pya_dptr *ptrs, size_t n_pages, size_t n_most) {
    for (size_t i = 0; i < n_pages; i++) {
        ptrs[i] = take(world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < n_pages; i += 2) {
        give(world, ptrs[i]);
    }
    for (size_t n = 2; n <= n_most; n++) {
        give(world, take(world, n * 2 * MIB, 0));
    }
}

/* What a pool in use keeps mapped cannot be unmapped: stitched requests of others do not wait for it each time. */
static void
test_mappings_of_a_pool_in_use_cost_others_no_wait(void) {
    struct world world = {0};
    pya_dptr kept[32];
    pya_dptr ptrs[16];
    pools_init(&world, "memory:tight,mappings_per_page:3");
    pool_begin(&world);
    stitch_sizes(&world, kept, 32, 16);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL)); /* its user stays */
    stitch_sizes(&world, ptrs, 16, 2);
    CHECK(stat_of(world.heap, 0, "pyalloc_mappings") > 3 * stat_of(world.heap, 0, "pyalloc_pages"));
    uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    for (size_t i = 0; i < 20; i++) {
        give(&world, take(&world, (i % 2 == 0 ? 10 : 4) * MIB, 0));
    }
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) - n_waits <= 1);
    CHECK(stat_of(world.heap, 0, "pyalloc_range_hits") >= 15);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    for (size_t i = 1; i < 16; i += 2) {
        give(&world, ptrs[i]);
        give(&world, kept[i]);
        give(&world, kept[i + 16]);
    }
    world_fini(&world);
}

/* While requests go to a pool, nothing is known to be idle, so a trim chooses by address: the high end goes, the low
 * end is where best fit packs. */
static void
test_trim_leaves_the_low_end(void) {
    struct world world = {0};
    pools_init(&world, "");
    pya_dptr whole = take(&world, 32 * MIB, 0);
    give(&world, whole);
    pool_begin(&world);
    CHECK_OK(pya_trim(world.heap, 0, 16 * MIB));
    pool_end(&world);
    CHECK_EQ(reserved(&world), 16 * MIB);
    CHECK_EQ(take(&world, 16 * MIB, 0), whole);
    CHECK_EQ(reserved(&world), 16 * MIB);
    world_fini(&world);
}

/* Free memory of a pool in use is its own, unless the pool was made to lend before out of memory. */
static void
test_a_pool_lends_on_oom(void) {
    struct world world = {0};
    pya_dptr ptr;
    pools_init(&world, "");
    pool_begin(&world);
    give(&world, take(&world, 900 * MIB, 0));
    CHECK_OK(pya_pool_end(world.heap, 0, POOL)); /* its user stays */
    CHECK_EQ(pya_alloc(world.heap, 0, 500 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_OK(pya_pool_set_on_oom(world.heap, 0, POOL, true));
    CHECK_EQ(pya_pool_set_on_oom(world.heap, 0, (struct pya_pool_id){9, 9}, true), PYA_E_INVAL);
    CHECK_OK(pya_alloc(world.heap, 0, 500 * MIB, 0, &ptr));
    CHECK(stat_of(world.heap, 0, "pyalloc_saved_by_transfer") == 1);
    world_fini(&world);
}

/* ---- a source of memory ---- */

struct source {
    size_t n_segments;
    size_t n_calls;
    bool is_dropped;
    bool is_empty;
    bool goes_down;
};

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    struct source *source = arg;
    if (source->is_empty) {
        return 0;
    }
    source->n_segments++;
    source->n_calls++;
    pya_dptr place = source->goes_down ? 999 - source->n_calls : source->n_calls;
    return (place << 40) + bytes % 2;
}

static void
source_free(void *arg, pya_dptr addr) {
    struct source *source = arg;
    CHECK(source->goes_down || addr >> 40 <= source->n_calls);
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
    pya_dptr other = take(&world, 3000 * MIB, 0); /* more than the card has */
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

/* Of several like segments the oldest is used again, wherever they lie: the ranks of a job take the same ones. */
static void
test_source_order(void) {
    struct world world = {0};
    struct source source = {.goes_down = true};
    pools_init(&world, "");
    CHECK_OK(pya_pool_set_source(world.heap, 0, POOL, source_of(&source)));
    pool_begin(&world);
    pya_dptr first = take(&world, 30 * MIB, 0);
    give(&world, take(&world, 30 * MIB, 0));
    give(&world, first);
    give(&world, take(&world, 100, 0)); /* what was freed last is used first */
    CHECK_EQ(take(&world, 30 * MIB, 0), first);
    world_fini(&world);
}

static void
test_source(void) {
    run_source("");
    run_source("vmm:False");
}

/* Such memory is lent by the block, on its own stream, and only by a pool that was made to lend. */
static void
run_lent_source(const char *options) {
    struct world world = {0};
    struct source source = {0};
    pya_dptr none = 0;
    pools_init(&world, options);
    CHECK_OK(pya_pool_set_source(world.heap, 0, POOL, source_of(&source)));
    pool_begin(&world);
    pya_dptr inside = take(&world, 700 * MIB, 0);
    pya_dptr little = take(&world, 1000, 0);
    give(&world, inside);
    give(&world, little);
    pool_end(&world);
    CHECK_EQ(pya_alloc(world.heap, 0, 600 * MIB, 0, &none), PYA_E_NOMEM);
    CHECK_OK(pya_pool_set_on_oom(world.heap, 0, POOL, true));
    CHECK_EQ(pya_alloc(world.heap, 0, 600 * MIB, 7, &none), PYA_E_NOMEM);
    CHECK_EQ(pya_alloc(world.heap, 0, 800 * MIB, 0, &none), PYA_E_NOMEM);
    CHECK_EQ(take(&world, 600 * MIB, 0), inside);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_saved_by_transfer"), 1);
    CHECK_EQ(source.n_segments, 2);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_segments, 1); /* a lent block outlives the pool */
    CHECK(!source.is_dropped);
    give(&world, inside);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(source.is_dropped);
    world_fini(&world);
}

static void
test_source_lends_on_oom(void) {
    run_lent_source("limit:1GiB");
    run_lent_source("limit:1GiB,vmm:False");
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
        struct pya_segment_info segment;
        CHECK_OK(pya_segment_info(world.heap, base, &segment));
        CHECK_EQ(segment.base, i == 0 ? first : second);
        CHECK_EQ(segment.bytes, 20 * MIB);
        CHECK(segment.is_plain);
    }
    struct pya_segment_info pages;
    pya_dptr outside = take(&world, 3 * MIB, 0);
    CHECK_OK(pya_segment_info(world.heap, outside, &pages));
    CHECK(pages.base == outside && pages.bytes == 3 * MIB && !pages.is_plain);
    CHECK_OK(pya_free(world.heap, outside));
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
    (void)take(&world, 1000, 0);
    pya_dptr large = take(&world, 64 * MIB, 0);
    pool_end(&world);
    CHECK_EQ(pya_pool_list(world.heap, 0, &info, 1), 1);
    CHECK(info.reserved_bytes[PYA_STAT_SMALL].current >= (int64_t)(2 * MIB));
    CHECK(info.reserved_bytes[PYA_STAT_LARGE].current >= (int64_t)(32 * MIB));
    CHECK_EQ(
        info.reserved_bytes[PYA_STAT_SMALL].current + info.reserved_bytes[PYA_STAT_LARGE].current,
        info.reserved_bytes[PYA_STAT_ALL].current);
    CHECK_OK(pya_free(world.heap, large));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_pool_trim(world.heap, 0, POOL));
    CHECK_EQ(pya_pool_list(world.heap, 0, &info, 1), 1);
    CHECK_EQ(info.reserved_bytes[PYA_STAT_SMALL].current, 2 * MIB);
    CHECK_EQ(info.reserved_bytes[PYA_STAT_ALL].current, 2 * MIB);
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
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
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

/* A claimed block counts as what it is, small or large, until it is freed. */
static void
test_claimed_blocks_are_counted(void) {
    static const size_t sizes[] = {1024, 3 * MIB};
    static const char *const keys[] = {
        "allocated_bytes.small_pool.current", "allocated_bytes.large_pool.current"};
    struct world world = {0};
    pya_dptr ptrs[2];
    pools_init(&world, "");
    pool_begin(&world);
    for (size_t i = 0; i < 2; i++) {
        ptrs[i] = take(&world, sizes[i], 0);
    }
    pool_end(&world);
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQ(stat_of(world.heap, 0, keys[i]), sizes[i]);
        give(&world, ptrs[i]);
        CHECK_EQ(stat_of(world.heap, 0, keys[i]), 0);
        CHECK_OK(claim(&world, ptrs[i], sizes[i]));
        CHECK_EQ(stat_of(world.heap, 0, keys[i]), sizes[i]);
        CHECK_EQ(stat_of(world.heap, 0, "allocated_bytes.all.current"), sizes[0] + sizes[1]);
    }
    for (size_t i = 0; i < 2; i++) {
        give(&world, ptrs[i]);
        CHECK_EQ(stat_of(world.heap, 0, keys[i]), 0);
    }
    CHECK_OK(claim(&world, ptrs[1], sizes[0])); /* where a large one was */
    CHECK_EQ(stat_of(world.heap, 0, keys[0]), sizes[0]);
    CHECK_EQ(stat_of(world.heap, 0, keys[1]), 0);
    give(&world, ptrs[1]);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    world_fini(&world);
}

static void
filter_drop(void *arg) {
    ++*(int *)arg;
}

/* A filter is dropped once, whether its pool ends before the heap or with it. */
static void
test_filters_are_dropped_once(void) {
    static const struct pya_pool_id other = {5, 6};
    struct world world = {0};
    int n_ended = 0;
    int n_open = 0;
    pools_init(&world, "");
    CHECK_OK(pya_pool_begin(
        world.heap, 0, POOL, (struct pya_stream_filter){.drop = filter_drop, .arg = &n_ended}));
    CHECK_OK(pya_pool_begin(
        world.heap, 0, other, (struct pya_stream_filter){.drop = filter_drop, .arg = &n_open}));
    pool_end(&world);
    CHECK_EQ(n_ended, 1);
    CHECK_EQ(n_open, 0);
    world_fini(&world);
    CHECK_EQ(n_ended, 1);
    CHECK_EQ(n_open, 1);
}

/* One user who lends the pool's memory to others before out of memory is enough. */
static void
test_a_lending_user_is_enough(void) {
    for (int i = 0; i < 2; i++) {
        struct world world = {0};
        pools_init(&world, "");
        CHECK_OK(pya_pool_retain(world.heap, 0, POOL, i == 0));
        CHECK_OK(pya_pool_retain(world.heap, 0, POOL, i != 0));
        pool_begin(&world);
        give(&world, take(&world, 900 * MIB, 0));
        CHECK_OK(pya_pool_end(world.heap, 0, POOL));
        give(&world, take(&world, 500 * MIB, 0));
        world_fini(&world);
    }
}

/* Two streams that take turns in a pool get their own memory again. */
static void
test_streams_of_a_pool_take_turns(void) {
    struct world world = {0};
    pools_init(&world, "");
    pool_begin(&world);
    pya_dptr ptrs[2];
    for (int i = 0; i < 8; i++) {
        pya_dptr ptr = take(&world, 20 * MIB, 16 * (pya_stream)(i % 2));
        CHECK(i < 2 || ptr == ptrs[i % 2]);
        ptrs[i % 2] = ptr;
        give(&world, ptr);
    }
    CHECK_EQ(reserved(&world), 40 * MIB);
    pool_end(&world);
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

static const struct check_case cases[] = {
    {"emptied_pool_goes", test_emptied_pool_goes},
    {"claim", test_claim},
    {"ranges_keep_their_pages", test_stitched_ranges_of_a_pool_keep_their_pages},
    {"addresses_stay_mapped", test_addresses_of_a_pool_in_use_stay_mapped},
    {"mappings_cost_no_wait", test_mappings_of_a_pool_in_use_cost_others_no_wait},
    {"lends_on_oom", test_a_pool_lends_on_oom},
    {"source_lends_on_oom", test_source_lends_on_oom},
    {"trim_leaves_the_low_end", test_trim_leaves_the_low_end},
    {"source", test_source},
    {"source_order", test_source_order},
    {"source_dies_with_the_heap", test_source_dies_with_the_heap},
    {"no_split", test_no_split},
    {"counts_by_kind", test_counts_by_kind},
    {"trace_knows_the_pool", test_trace_knows_the_pool},
    {"streams_take_turns", test_streams_of_a_pool_take_turns},
    {"a_lending_user_is_enough", test_a_lending_user_is_enough},
    {"filters_are_dropped_once", test_filters_are_dropped_once},
    {"claimed_blocks_are_counted", test_claimed_blocks_are_counted},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
