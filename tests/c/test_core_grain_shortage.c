/* Grains when memory is short: free memory that is enough serves the request, whatever grains it is in. */
#include "pools.h"
#include "streams.h"

#define GIB ((size_t)1 << 30)

/* Another process has the rest of the card, so the last quarter of what is left comes in grains too. */
static void
shortage_init(struct world *world, const char *options, size_t bytes) {
    world->config =
        (struct pya_sim_config){.capacity_bytes = 2 * bytes, .address_bytes = (uint64_t)1 << 36};
    world_init(world, options);
    CHECK_OK(pya_reserve(world->heap, 0, 0, 0)); /* opens the card */
    pya_sim_set_capacity(world->sim, bytes);
}

/* A growth that failed found out how many pages the device has, whole grains or not: all of them are requested. */
static void
test_what_the_device_has_is_used_up(void) {
    enum { N = 28, N_LEFT = 100 };
    struct world world = {0};
    pya_dptr ptrs[N];
    shortage_init(&world, "memory:fast", 4 * GIB + N_LEFT * PYA_PAGE);
    CHECK_OK(pya_reserve(world.heap, 0, 2 * N * PYA_PAGE, 0));
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(&world, PYA_PAGE, 0);
        (void)take(&world, PYA_PAGE, 0);
    }
    CHECK_EQ(reserved(&world), 2 * N * PYA_PAGE);
    (void)take(&world, 4 * GIB - 2 * N * PYA_PAGE, 0);
    CHECK_EQ(reserved(&world), 4 * GIB);
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[i]);
    }
    (void)take(&world, (N + N_LEFT) * PYA_PAGE, 0);
    CHECK_EQ(reserved(&world), 4 * GIB + N_LEFT * PYA_PAGE);
    world_fini(&world);
}

/* Smaller grains do not help a pool that may not grow: what pya_reserve() keeps is not given back for it. */
static void
test_a_pools_limit_gives_nothing_back(void) {
    struct world world = {.config = {.capacity_bytes = 8 * GIB}};
    const struct pya_pool_id id = {3, 4};
    pya_dptr ptr;
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 2 * GIB, 0));
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    CHECK_OK(pya_pool_set_limit(world.heap, 0, id, 640 * MIB));
    (void)take(&world, 400 * MIB, 0);
    const size_t before = reserved(&world);
    CHECK_EQ(pya_alloc(world.heap, 0, 400 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(reserved(&world), before);
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    world_fini(&world);
}

/* Every second one of 64 grains is free, and nothing else.  A request for less than what is free must not fail only
 * because the part beyond whole grains is smaller than a grain. */
static void
reserve_every_second_grain(struct world *world, pya_stream stream) {
    enum { N = 128, N_GRAIN = 16 };
    pya_dptr ptrs[N];
    CHECK_OK(pya_reserve(world->heap, 0, N * N_GRAIN * PYA_PAGE, stream));
    CHECK_EQ(calls(world, PYA_SIM_PAGE_CREATE), N);
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(world, N_GRAIN * PYA_PAGE, stream);
    }
    for (size_t i = 0; i < N / 2; i += 2) {
        give(world, ptrs[i]);
    }
    CHECK_EQ(reserved(world), 4 * GIB);
}

static void
test_grains_serve_less_than_one(void) {
    struct world world = {0};
    shortage_init(&world, "", 4 * GIB);
    reserve_every_second_grain(&world, 0);
    (void)take(&world, 20 * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 0);
    CHECK(
        reserved(&world) >=
        4 * GIB - 64 * PYA_PAGE); /* not all the free memory was given back for it */
    world_fini(&world);
}

/* The same from one stream to another, down to the last page. */
static void
test_streams_are_served_from_larger_grains(void) {
    struct world world = {0};
    shortage_init(&world, "", 4 * GIB);
    reserve_every_second_grain(&world, 2);
    for (size_t n = 32 * 16; n >= 20; n -= 20) {
        (void)take(&world, 20 * PYA_PAGE, 1);
    }
    (void)take(&world, 32 * 16 % 20 * PYA_PAGE, 1);
    CHECK_EQ(reserved(&world), 4 * GIB);
    world_fini(&world);
}

/* Smaller grains are made only of what is free elsewhere and may be taken: a request for more than that fails, and
 * nothing was given back for it. */
static void
test_nothing_is_given_back_in_vain(void) {
    enum { N_FREE = 32 * 16, N_POOL = 64 };
    struct world world = {0};
    pya_dptr ptr;
    shortage_init(&world, "", 4 * GIB);
    reserve_every_second_grain(&world, 0);
    pya_sim_set_capacity(world.sim, 8 * GIB);
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    pool_begin(&world);
    pya_dptr held = take(&world, N_POOL * PYA_PAGE, 0);
    pool_end(&world);
    pya_sim_set_capacity(world.sim, PYA_PAGE);
    give(&world, held);
    CHECK_EQ(reserved(&world), 4 * GIB + N_POOL * PYA_PAGE);
    const size_t before = reserved(&world);
    CHECK_EQ(pya_alloc(world.heap, 0, (N_FREE + N_POOL / 2) * PYA_PAGE, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(reserved(&world), before);
    world_fini(&world);
}

/* Another process takes what is given back, so no smaller grains can be made: one more whole grain changes hands. */
static void
test_larger_grains_serve_as_they_are_where_none_can_be_made(void) {
    struct world world = {0};
    shortage_init(&world, "", 4 * GIB);
    reserve_every_second_grain(&world, 2);
    pya_sim_set_capacity(world.sim, PYA_PAGE);
    (void)take(&world, 20 * PYA_PAGE, 1);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    world_fini(&world);
}

/* A stitched range lacks five pages, which the free grain of 16 cannot be: the two grains of 16 serve instead. */
static void
test_a_range_is_extended_only_where_it_helps(void) {
    enum { N = 6 };
    static const size_t pages[N] = {16, 1, 11, 1, 16, 1};
    struct world world = {0};
    size_t total = 4 * GIB;
    pya_dptr ptrs[N];
    shortage_init(&world, "memory:fast", 4 * GIB + 46 * PYA_PAGE);
    (void)take(&world, total, 0);
    for (size_t i = 0; i < N; i++) {
        total += pages[i] * PYA_PAGE;
        CHECK_OK(pya_reserve(world.heap, 0, total, 0));
        ptrs[i] = take(&world, pages[i] * PYA_PAGE, 0);
    }
    CHECK_EQ(reserved(&world), total);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    give(&world, take(&world, 27 * PYA_PAGE, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    give(&world, ptrs[4]);
    (void)take(&world, 32 * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 2);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_RELEASE), 0);
    world_fini(&world);
}

/* A pool's own allocator is called without the lock: when it takes back a segment, another thread frees these blocks, which
 * queued work of stream 2 still uses. */
static struct {
    pya_dptr ptrs[3];
    size_t n, bytes;
    bool captures; /* and begins to capture stream 2 */
    pya_dptr own;  /* and frees this block of the request's stream, which nothing uses; 0: none */
} late;

static pya_dptr
late_alloc(void *arg, size_t bytes) {
    struct world *world = arg;
    pya_dptr addr = 0;
    CHECK_OK(pya_device_plain_alloc(pya_sim_device(world->sim), bytes, &addr));
    return addr;
}

static void
late_free(void *arg, pya_dptr addr) {
    struct world *world = arg;
    CHECK_OK(pya_device_plain_free(pya_sim_device(world->sim), addr));
    while (late.n > 0) {
        pya_dptr ptr = late.ptrs[--late.n];
        CHECK_OK(pya_sim_use(world->sim, 2, ptr, late.bytes));
        pya_sim_disown(world->sim, ptr, late.bytes);
        give(world, ptr);
    }
    if (late.own != 0) {
        give(world, late.own);
        late.own = 0;
    }
    pya_sim_set_capturing(world->sim, 2, late.captures);
}

/* As above, and while memory is given back more becomes free: what the request got by waiting it knows nothing of. */
static void
run_short_beside_late_frees(bool captures, bool frees_own) {
    enum { N = 128, N_GRAIN = 16, N_WANTED = 20 };
    static const size_t grain = N_GRAIN * PYA_PAGE;
    struct world world = {
        .config = {
            .capacity_bytes = 8 * GIB,
            .address_bytes = (uint64_t)1 << 36,
            .work = PYA_SIM_WORK_BY_HAND}};
    const struct pya_segment_source source = {late_alloc, late_free, NULL, &world};
    pya_dptr ptrs[N];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, N * grain, 2));
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), N);
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = get(&world, grain, 2);
    }
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    late.own = frees_own ? take(&world, N_WANTED * PYA_PAGE, 1) : 0;
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    CHECK_OK(pya_pool_set_source(world.heap, 0, POOL, source));
    pool_begin(&world);
    give(&world, take(&world, 20 * MIB, 0));
    pool_end(&world);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    for (size_t i = 0; i < 4; i += 2) {
        put(&world, ptrs[i], grain);
        late.ptrs[late.n++] = ptrs[i + 1];
    }
    late.ptrs[late.n++] = ptrs[5];
    pya_sim_set_capacity(world.sim, PYA_PAGE);
    late.bytes = grain;
    late.captures = captures;
    pya_dptr ptr;
    if (captures && !frees_own) { /* which a wait would end */
        CHECK_EQ(pya_alloc(world.heap, 0, N_WANTED * PYA_PAGE, 1, &ptr), PYA_E_NOMEM);
    } else { /* a violation where stream 2's work is not over */
        ptr = get(&world, N_WANTED * PYA_PAGE, 1);
        put(&world, ptr, N_WANTED * PYA_PAGE);
    }
    pya_sim_set_capturing(world.sim, 2, false);
    CHECK_EQ(late.n, 0);
    CHECK_EQ(late.own, 0);
    pya_sim_finish_all(world.sim);
    world_fini(&world);
}

static void
test_what_was_freed_since_the_wait_is_waited_for(void) {
    run_short_beside_late_frees(false, false);
    run_short_beside_late_frees(true, false);
    run_short_beside_late_frees(true, true);
}

/* A request for less than a grain gets nothing of what a pool left, and must not have it forgotten. */
static void
test_left_grains_wait_for_a_larger_request(void) {
    struct world world = {
        .config = {.capacity_bytes = 8 * GIB, .address_bytes = (uint64_t)1 << 36}};
    static const struct pya_pool_id heir = {5, 6};
    world_init(&world, "");
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    (void)take(&world, 4 * GIB, 0);
    pool_begin(&world);
    pya_dptr ptr = take(&world, 256 * PYA_PAGE, 0);
    pool_end(&world);
    give(&world, ptr);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_trim(world.heap, 0, 4 * GIB + 255 * PYA_PAGE)); /* settles the pool */
    CHECK_OK(pya_pool_retain(world.heap, 0, heir, false));
    CHECK_OK(pya_pool_begin(world.heap, 0, heir, (struct pya_stream_filter){0}));
    (void)take(&world, 512, 0);
    CHECK_OK(pya_pool_end(world.heap, 0, heir));
    CHECK_OK(pya_pool_release(world.heap, 0, heir));
    (void)take(&world, 3 * PYA_PAGE, 3);
    size_t before = reserved(&world);
    (void)take(&world, 128 * PYA_PAGE, 4);
    CHECK_EQ(reserved(&world), before);
    world_fini(&world);
}

/* Pages that a stitched range shows but that another stream took over do not count as free pages of this arena. */
static void
test_pages_of_a_range_count_where_they_are(void) {
    enum { N = 10, N_ALL = 64 };
    struct world world = {.config = {.capacity_bytes = N_ALL * PYA_PAGE}};
    pya_dptr ptrs[N_ALL], theirs[N], ptr;
    world_init(&world, "");
    for (size_t i = 0; i < N_ALL; i++) {
        ptrs[i] = take(&world, PYA_PAGE, 0);
    }
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[2 * i]);
    }
    give(&world, take(&world, N * PYA_PAGE, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    for (size_t i = 0; i < N; i++) {
        theirs[i] = take(&world, PYA_PAGE, 1);
    }
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_page_transfers"), N);
    for (size_t i = 0; i < N; i++) {
        give(&world, theirs[i]);
    }
    give(&world, ptrs[N_ALL - 1]);
    struct pya_card *card = world.heap->cards.open[0];
    pya_lock_acquire(&card->lock);
    for (struct pya_arena *a = card->common; a != NULL; a = a->next_common) {
        a->transfer_debt_ns = 1e18; /* so that the range is tried first */
    }
    pya_lock_release(&card->lock);
    CHECK_EQ(pya_alloc(world.heap, 0, (N + 2) * PYA_PAGE, 0, &ptr), PYA_E_NOMEM);
    give(&world, ptrs[N_ALL - 2]);
    (void)take(&world, (N + 2) * PYA_PAGE, 0);
    world_fini(&world);
}

/* Grains made late would only be broken: when memory may soon be short, is short, or lies in many broken grains. */
static void
take_in_single_pages(struct world *world, size_t n_pages) {
    uint64_t n_made = calls(world, PYA_SIM_PAGE_CREATE);
    size_t before = reserved(world);
    (void)take(world, n_pages * PYA_PAGE, 0);
    CHECK_EQ(reserved(world) - before, n_pages * PYA_PAGE);
    CHECK_EQ(calls(world, PYA_SIM_PAGE_CREATE) - n_made, n_pages);
}

static void
test_the_last_quarter_comes_in_single_pages(void) {
    static const char *const options[] = {"", "limit:8GiB"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {
            .config = {.capacity_bytes = (8 + 8 * i) * GIB, .address_bytes = (uint64_t)1 << 37}};
        world_init(&world, options[i]);
        (void)take(&world, 6 * GIB, 0);
        CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), 6 * GIB / (16 * PYA_PAGE));
        take_in_single_pages(&world, 64);
        world_fini(&world);
    }
}

static void
test_no_grains_are_made_while_memory_is_short(void) {
    struct world world = {0};
    pya_dptr ptr;
    shortage_init(&world, "", 4 * GIB);
    (void)take(&world, 4 * GIB, 0);
    CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), 4 * GIB / (16 * PYA_PAGE));
    CHECK_EQ(pya_alloc(world.heap, 0, PYA_PAGE, 0, &ptr), PYA_E_NOMEM);
    pya_sim_set_capacity(world.sim, 5 * GIB); /* the other process gives some back */
    take_in_single_pages(&world, 64);
    world_fini(&world);
}

static void
test_no_grains_are_made_beside_many_broken_ones(void) {
    enum { N = 8 };
    struct world world = {
        .config = {.capacity_bytes = 32 * GIB, .address_bytes = (uint64_t)1 << 38}};
    pya_dptr ptrs[N];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 4 * GIB, 0));
    for (size_t i = 0; i < N; i++) {
        (void)take(&world, PYA_PAGE, 0);
        ptrs[i] = take(&world, 14 * PYA_PAGE, 0);
        (void)take(&world, PYA_PAGE, 0);
    }
    (void)take(&world, 4 * GIB - (size_t)N * 16 * PYA_PAGE, 0);
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[i]);
    }
    take_in_single_pages(&world, 64);
    world_fini(&world);
}

/* Nor where each of many streams breaks a few: what they have to spare serves the others. */
static void
test_many_streams_break_few_grains(void) {
    enum { N = 600 };
    struct world world = {
        .config = {
            .capacity_bytes = N * 2 * PYA_PAGE * 17 / 16, .address_bytes = (uint64_t)1 << 40}};
    world_init(&world, "");
    for (size_t i = 1; i <= N; i++) {
        (void)take(&world, 3 * MIB, 16 * i);
    }
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"what_was_freed_since_the_wait_is_waited_for",
     test_what_was_freed_since_the_wait_is_waited_for},
    {"what_the_device_has_is_used_up", test_what_the_device_has_is_used_up},
    {"a_pools_limit_gives_nothing_back", test_a_pools_limit_gives_nothing_back},
    {"grains_serve_less_than_one", test_grains_serve_less_than_one},
    {"nothing_is_given_back_in_vain", test_nothing_is_given_back_in_vain},
    {"streams_are_served_from_larger_grains", test_streams_are_served_from_larger_grains},
    {"larger_grains_serve_as_they_are_where_none_can_be_made",
     test_larger_grains_serve_as_they_are_where_none_can_be_made},
    {"a_range_is_extended_only_where_it_helps", test_a_range_is_extended_only_where_it_helps},
    {"left_grains_wait_for_a_larger_request", test_left_grains_wait_for_a_larger_request},
    {"pages_of_a_range_count_where_they_are", test_pages_of_a_range_count_where_they_are},
    {"the_last_quarter_comes_in_single_pages", test_the_last_quarter_comes_in_single_pages},
    {"no_grains_are_made_while_memory_is_short", test_no_grains_are_made_while_memory_is_short},
    {"no_grains_are_made_beside_many_broken_ones", test_no_grains_are_made_beside_many_broken_ones},
    {"many_streams_break_few_grains", test_many_streams_break_few_grains},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
