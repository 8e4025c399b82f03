/* Stitched ranges that begin with the free end of one grain and end with the free start of another. */
#include "loading.h"
#include "pools.h"
#include "sender.h"
#include "sweep.h"

#define GIB ((size_t)1 << 30)

enum { GRAIN = 16, PART = GRAIN - 1 };

/* Grains of 16 pages, all free, and nothing else. */
static void
mosaic_init(struct world *world, const char *options) {
    *world = (struct world){
        .config = {.capacity_bytes = 16 * GIB, .address_bytes = (uint64_t)1 << 38, .quiet = true}};
    world_init(world, options);
    CHECK_OK(pya_reserve(world->heap, 0, 4 * GIB, 0));
    CHECK_EQ(calls(world, PYA_SIM_PAGE_CREATE), 4 * GIB / (GRAIN * PYA_PAGE));
}

/* Blocks of so many pages, one behind the other, and one for the rest, so that the device can add nothing. */
static void
fill(struct world *world, const size_t *n_pages, size_t n, pya_dptr *ptrs) {
    size_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        ptrs[i] = take(world, n_pages[i] * PYA_PAGE, 0);
        CHECK_EQ(ptrs[i], ptrs[0] + sum * PYA_PAGE);
        sum += n_pages[i];
    }
    ptrs[n] = take(world, 4 * GIB - sum * PYA_PAGE, 0);
    CHECK_EQ(reserved(world), 4 * GIB);
    CHECK_OK(pya_reserve(world->heap, 0, 0, 0));
    pya_sim_set_capacity(world->sim, 4 * GIB);
}

/* The same, with two of them freed. */
static void
fill_but(
    struct world *world, const size_t *n_pages, size_t n, size_t one, size_t other,
    pya_dptr *ptrs) {
    mosaic_init(world, "");
    fill(world, n_pages, n, ptrs);
    give(world, ptrs[one]);
    give(world, ptrs[other]);
}

/* A block of so many pages, made of n_handles handles; no page is made for it. */
static pya_dptr
take_mosaic(struct world *world, size_t n_pages, uint64_t n_handles) {
    const uint64_t n_maps = calls(world, PYA_SIM_MAP);
    pya_dptr ptr = take(world, n_pages * PYA_PAGE, 0);
    CHECK_EQ(calls(world, PYA_SIM_MAP) - n_maps, n_handles);
    CHECK_EQ(reserved(world), 4 * GIB);
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    return ptr;
}

struct block {
    pya_dptr ptr;
    size_t bytes;
};

/* No byte belongs to two of them. */
static void
check_apart(struct world *world, const struct block *blocks, size_t n) {
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(pya_sim_own(world->sim, blocks[i].ptr, blocks[i].bytes));
    }
    for (size_t i = 0; i < n; i++) {
        pya_sim_disown(world->sim, blocks[i].ptr, blocks[i].bytes);
    }
}

/* The end of one grain and the start of another, each beside live blocks.  The next such request finds them again.  The
 * grains go once the live blocks are gone. */
static void
test_an_end_and_a_start(void) {
    static const size_t pages[] = {1, PART, GRAIN, PART, 1};
    struct world world;
    pya_dptr ptrs[6];
    fill_but(&world, pages, 5, 1, 3, ptrs);
    pya_dptr ptr = take_mosaic(&world, 2 * PART - 1, 2);
    const struct block blocks[] = {
        {ptrs[0], PYA_PAGE}, {ptr, (2 * PART - 1) * PYA_PAGE}, {ptrs[4], PYA_PAGE}};
    check_apart(&world, blocks, 3);
    give(&world, ptr);
    CHECK_EQ(take_mosaic(&world, 2 * PART - 1, 0), ptr);
    give(&world, ptr);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 4 * GIB); /* live blocks sit in both */
    give(&world, ptrs[0]);
    give(&world, ptrs[4]);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 4 * GIB - 2 * GRAIN * PYA_PAGE);
    world_fini(&world);
}

/* Whole grains and only as much of a part as is missing; the rest of the part serves where it lies. */
static void
test_a_part_is_cut(void) {
    static const size_t pages[] = {GRAIN, GRAIN, PART, 1};
    struct world world;
    pya_dptr ptrs[5];
    fill_but(&world, pages, 4, 0, 2, ptrs);
    pya_dptr ptr = take_mosaic(&world, GRAIN + 7, 2);
    pya_dptr rest = take_mosaic(&world, PART - 7, 0);
    CHECK_EQ(rest, ptrs[2] + 7 * PYA_PAGE);
    const struct block blocks[] = {
        {ptrs[1], GRAIN * PYA_PAGE},
        {ptrs[3], PYA_PAGE},
        {ptr, (GRAIN + 7) * PYA_PAGE},
        {rest, (PART - 7) * PYA_PAGE}};
    check_apart(&world, blocks, 4);
    world_fini(&world);
}

/* If there is no part, a whole grain is split: the last one. */
static void
test_a_grain_is_cut(void) {
    static const size_t pages[] = {GRAIN, 1, PART, GRAIN};
    struct world world;
    pya_dptr ptrs[5];
    fill_but(&world, pages, 4, 0, 3, ptrs);
    pya_dptr ptr = take_mosaic(&world, GRAIN + 5, 2);
    pya_dptr rest = take_mosaic(&world, GRAIN - 5, 0);
    CHECK_EQ(rest, ptrs[3] + 5 * PYA_PAGE);
    const struct block blocks[] = {
        {ptr, (GRAIN + 5) * PYA_PAGE}, {rest, (GRAIN - 5) * PYA_PAGE}, {ptrs[1], PYA_PAGE}};
    check_apart(&world, blocks, 3);
    world_fini(&world);
}

/* The grain that is split may lie before others of the range. */
static void
test_a_grain_before_a_smaller_one_is_cut(void) {
    enum { SMALLER = 4 };
    static const size_t pages[] = {GRAIN, 1, PART, GRAIN};
    struct world world;
    pya_dptr ptrs[5];
    mosaic_init(&world, "");
    fill(&world, pages, 4, ptrs);
    pya_sim_set_capacity(world.sim, 4 * GIB + SMALLER * PYA_PAGE);
    pya_dptr smaller = take(&world, SMALLER * PYA_PAGE, 0);
    CHECK_EQ(reserved(&world), 4 * GIB + SMALLER * PYA_PAGE);
    CHECK(smaller > ptrs[3]);
    give(&world, ptrs[0]);
    give(&world, ptrs[3]);
    give(&world, smaller);
    const size_t n = GRAIN + SMALLER + 5;
    pya_dptr ptr = take(&world, n * PYA_PAGE, 0);
    pya_dptr rest = take(&world, (GRAIN - 5) * PYA_PAGE, 0);
    CHECK_EQ(rest, ptrs[3] + 5 * PYA_PAGE);
    CHECK_EQ(reserved(&world), 4 * GIB + SMALLER * PYA_PAGE);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    const struct block blocks[] = {
        {ptr, n * PYA_PAGE}, {rest, (GRAIN - 5) * PYA_PAGE}, {ptrs[1], PYA_PAGE}};
    check_apart(&world, blocks, 3);
    world_fini(&world);
}

/* The smallest part that is enough; the larger one is left for the next request. */
static void
test_the_smallest_part_that_is_enough(void) {
    static const size_t pages[] = {GRAIN, 4, 12, GRAIN, 9, 7, GRAIN};
    struct world world;
    pya_dptr ptrs[8];
    mosaic_init(&world, "");
    fill(&world, pages, 7, ptrs);
    give(&world, ptrs[2]);                          /* the end of a grain */
    give(&world, ptrs[4]);                          /* the start of one */
    pya_dptr first = take(&world, 3 * PYA_PAGE, 0); /* from the 9, of which 6 are left */
    CHECK_EQ(first, ptrs[4]);
    give(&world, first);
    give(&world, ptrs[0]);
    (void)take_mosaic(&world, GRAIN + 8, 2);
    CHECK_EQ(take_mosaic(&world, 12, 0), ptrs[2]);
    world_fini(&world);
}

/* The pages of the range now belong to another stream.  A part of a grain cannot come back with the range alone. */
static void
test_parts_stay_with_their_grain(void) {
    static const size_t pages[] = {1, PART, GRAIN, PART, 1};
    struct world world;
    pya_dptr ptrs[6];
    fill_but(&world, pages, 5, 1, 3, ptrs);
    pya_dptr ptr = take_mosaic(&world, 2 * PART, 2);
    give(&world, ptr);
    give(&world, ptrs[0]);
    give(&world, ptrs[4]);
    pya_dptr theirs[2] = {
        take(&world, GRAIN * PYA_PAGE, 1),
        take(&world, GRAIN * PYA_PAGE, 1),
    };
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, theirs[0]);
    give(&world, theirs[1]);
    ptr = take(&world, 2 * PART * PYA_PAGE, 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, ptr);
    world_fini(&world);
}

/* A pool in use gives back no page in order to make it again in smaller grains. */
static void
test_a_pool_in_use_is_served(void) {
    struct world world;
    pya_dptr ptrs[5];
    mosaic_init(&world, "");
    CHECK_OK(pya_pool_retain(world.heap, 0, POOL, false));
    (void)take(&world, 4 * GIB, 0);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    pool_begin(&world);
    for (size_t i = 0; i < 5; i++) {
        ptrs[i] = take(&world, GRAIN * PYA_PAGE, 0);
    }
    CHECK_EQ(reserved(&world), 4 * GIB + 5 * GRAIN * PYA_PAGE);
    pya_sim_set_capacity(world.sim, reserved(&world));
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    pya_dptr ptr = take(&world, (GRAIN + 5) * PYA_PAGE, 0);
    const struct block blocks[] = {
        {ptrs[1], GRAIN * PYA_PAGE}, {ptr, (GRAIN + 5) * PYA_PAGE}, {ptrs[3], GRAIN * PYA_PAGE}};
    check_apart(&world, blocks, 3);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    pool_end(&world);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    world_fini(&world);
}

/* What is written into the block is read at home and through another process's import, and nowhere else. */
static void
test_bytes_are_its_own(void) {
    static const size_t pages[] = {1, PART, GRAIN, PART, 1};
    struct world world = {
        .config = {.capacity_bytes = 6 * GIB, .address_bytes = (uint64_t)1 << 37, .backed = true}};
    pya_dptr ptrs[6];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 4 * GIB, 0));
    fill(&world, pages, 5, ptrs);
    give(&world, ptrs[1]);
    give(&world, ptrs[3]);
    const size_t n = 2 * PART;
    pya_dptr ptr = take_mosaic(&world, n, 2);
    for (size_t i = 0; i < n; i++) {
        *(volatile size_t *)(uintptr_t)(ptr + i * PYA_PAGE) = i + 1;
    }
    for (size_t i = 0; i < PART; i++) { /* the grain's end is in front */
        CHECK_EQ(*(volatile size_t *)(uintptr_t)(ptrs[1] + i * PYA_PAGE), i + 1);
        CHECK_EQ(*(volatile size_t *)(uintptr_t)(ptrs[3] + i * PYA_PAGE), PART + i + 1);
    }
    CHECK_EQ(*(volatile size_t *)(uintptr_t)ptrs[0], 0);
    CHECK_EQ(*(volatile size_t *)(uintptr_t)ptrs[4], 0);
    struct sender sender = {.heap = world.heap};
    const struct pya_import_source source = {.arg = &sender, .next = sender_next};
    pya_dptr base;
    CHECK_OK(pya_share(world.heap, ptr, &sender.shared));
    CHECK_EQ(sender.shared.n_pages, 2 * GRAIN);
    CHECK_OK(pya_import_open(world.heap, 0, sender.shared.n_pages, &source, &base));
    for (size_t i = 0; i < n; i++) {
        pya_dptr there = base + sender.shared.offset + i * PYA_PAGE;
        CHECK_EQ(*(volatile size_t *)(uintptr_t)there, i + 1);
    }
    CHECK_OK(pya_import_close(world.heap, base));
    world_fini(&world);
}

/* The free end of a grain, and a free grain of another stream that its work still uses: together they are enough. */
static void
test_a_part_and_another_streams_grain(void) {
    enum { N_END = 13, N_WANTED = 20 };
    struct world world = {
        .config = {
            .capacity_bytes = 16 * GIB,
            .address_bytes = (uint64_t)1 << 38,
            .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 4 * GIB, 0));
    (void)take(&world, (GRAIN - N_END) * PYA_PAGE, 0);
    pya_dptr part = take(&world, N_END * PYA_PAGE, 0);
    pya_dptr theirs = take(&world, GRAIN * PYA_PAGE, 0);
    (void)take(&world, 4 * GIB - 2 * GRAIN * PYA_PAGE, 0);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    pya_sim_set_capacity(world.sim, 4 * GIB);
    give(&world, theirs);
    theirs = take(&world, GRAIN * PYA_PAGE, 1);
    CHECK_EQ(reserved(&world), 4 * GIB);
    CHECK_OK(pya_sim_use(world.sim, 1, theirs, GRAIN * PYA_PAGE));
    give(&world, theirs);
    give(&world, part);
    (void)take(&world, N_WANTED * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 0);
    world_fini(&world);
}

/* During a capture nothing is waited for; sharing pages needs no wait. */
static void
test_a_capture_shares_pages(void) {
    struct world world = {.config = {.capacity_bytes = 3 * PYA_PAGE}};
    pya_dptr ptrs[5];
    world_init(&world, "shared_pages:True");
    CHECK_OK(pya_pool_begin(world.heap, 0, POOL, (struct pya_stream_filter){.began_on = 1}));
    pya_sim_set_capturing(world.sim, 1, true);
    give(&world, take(&world, 3 * PYA_PAGE, 1));
    for (size_t i = 0; i < 5; i++) {
        ptrs[i] = take(&world, i % 2 == 0 ? MIB : 3 * MIB / 2, 1);
        CHECK_EQ(ptrs[i], ptrs[0] + i / 2 * (5 * MIB / 2) + i % 2 * MIB);
    }
    CHECK_EQ(reserved(&world), 3 * PYA_PAGE);
    give(&world, ptrs[1]);
    give(&world, ptrs[3]);
    (void)take(&world, 2 * MIB, 1); /* the end of the first page and the start of the third */
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 1);
    pya_sim_set_capturing(world.sim, 1, false);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    world_fini(&world);
}

/* An idle range is four pages short, and no whole grain is that small.  Together with the free end of a grain it
 * serves, without a new page. */
static void
test_no_page_is_made_to_extend_a_range(void) {
    static const size_t pages[] = {GRAIN, GRAIN, GRAIN, 1, GRAIN - 1};
    struct world world = {
        .config = {.capacity_bytes = 16 * GIB, .address_bytes = (uint64_t)1 << 38}};
    pya_dptr ptrs[5];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 4 * GIB, 0));
    for (size_t i = 0; i < 5; i++) {
        ptrs[i] = take(&world, pages[i] * PYA_PAGE, 0);
    }
    (void)take(&world, 4 * GIB - 4 * GRAIN * PYA_PAGE, 0);
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    give(&world, take(&world, 2 * GRAIN * PYA_PAGE, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    give(&world, ptrs[4]);
    (void)take(&world, (2 * GRAIN + 4) * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 2);
    CHECK_EQ(reserved(&world), 4 * GIB);
    world_fini(&world);
}

/* With shared pages, a range begins and ends within a page of a grain. */
static void
test_parts_of_pages(void) {
    struct world world;
    const size_t mine = PYA_PAGE + MIB;
    const size_t part = PART * PYA_PAGE - MIB;
    mosaic_init(&world, "shared_pages:True");
    pya_dptr first = take(&world, mine, 0);
    pya_dptr end = take(&world, part, 0);
    (void)take(&world, GRAIN * PYA_PAGE, 0);
    pya_dptr start = take(&world, part, 0);
    pya_dptr last = take(&world, mine, 0);
    (void)take(&world, 4 * GIB - 3 * GRAIN * PYA_PAGE, 0);
    CHECK_EQ(reserved(&world), 4 * GIB);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    pya_sim_set_capacity(world.sim, 4 * GIB);
    give(&world, end);
    give(&world, start);
    pya_dptr ptr = take(&world, 2 * part, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 1);
    const struct block blocks[] = {{first, mine}, {ptr, 2 * part}, {last, mine}};
    check_apart(&world, blocks, 3);
    world_fini(&world);
}

/* What the policy charges for one stitch of every second block. */
static double
paid(size_t total_bytes, size_t block_bytes, size_t n_blocks) {
    struct world world = {
        .config = {.capacity_bytes = 16 * GIB, .address_bytes = (uint64_t)1 << 38}};
    pya_dptr ptrs[16];
    world_init(&world, "");
    end_loading(&world);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_OK(pya_reserve(world.heap, 0, total_bytes, 0));
    for (size_t i = 0; i < 2 * n_blocks; i++) {
        ptrs[i] = take(&world, block_bytes, 0);
    }
    (void)take(&world, total_bytes - 2 * n_blocks * block_bytes, 0);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    for (size_t i = 0; i < 2 * n_blocks; i += 2) {
        give(&world, ptrs[i]);
    }
    (void)take(&world, n_blocks * block_bytes, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    double ns = world.heap->cards.open[0]->stitch_ns;
    world_fini(&world);
    return ns;
}

/* Each handle is charged for, however large it is. */
static void
test_a_grain_costs_no_more_than_a_page(void) {
    CHECK(paid(4 * GIB, GRAIN * PYA_PAGE, 8) == paid(GIB, PYA_PAGE, 8));
}

/* Stitched, given back to the device, stitched again, and taken over by another stream. */
static bool
fail_once(const char *options, unsigned long nth, bool host, pya_status with) {
    static const size_t pages[] = {1, PART, GRAIN, GRAIN, GRAIN, 5, GRAIN - 5};
    struct world world;
    pya_dptr ptrs[8], got[4] = {0};
    mosaic_init(&world, options);
    fill(&world, pages, 7, ptrs);
    for (size_t i = 1; i < 7; i += 2) {
        give(&world, ptrs[i]);
    }
    sweep_arm(world.sim, nth, host, with);
    for (size_t i = 0; i < 4; i++) {
        if (pya_alloc(world.heap, 0, (GRAIN + PART) * PYA_PAGE, i == 3, &got[i]) == PYA_OK) {
            (void)!pya_free(world.heap, got[i]);
        }
        (void)!pya_alloc(world.heap, 0, (GRAIN + i) * PYA_PAGE, 0, &got[i]);
        (void)!(got[i] == 0 ? PYA_OK : pya_free(world.heap, got[i]));
        (void)!pya_empty_cache(world.heap, 0);
    }
    bool fired = sweep_disarm(world.sim, host);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    for (size_t i = 0; i < 8; i += i == 6 ? 1 : 2) {
        give(&world, ptrs[i]);
    }
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    return fired;
}

static void
test_failures_lose_nothing(void) {
    sweep_all(fail_once, "");
}

static const struct check_case cases[] = {
    {"an_end_and_a_start", test_an_end_and_a_start},
    {"a_part_is_cut", test_a_part_is_cut},
    {"a_grain_is_cut", test_a_grain_is_cut},
    {"a_grain_before_a_smaller_one_is_cut", test_a_grain_before_a_smaller_one_is_cut},
    {"the_smallest_part_that_is_enough", test_the_smallest_part_that_is_enough},
    {"parts_stay_with_their_grain", test_parts_stay_with_their_grain},
    {"a_pool_in_use_is_served", test_a_pool_in_use_is_served},
    {"bytes_are_its_own", test_bytes_are_its_own},
    {"parts_of_pages", test_parts_of_pages},
    {"a_grain_costs_no_more_than_a_page", test_a_grain_costs_no_more_than_a_page},
    {"a_part_and_another_streams_grain", test_a_part_and_another_streams_grain},
    {"a_capture_shares_pages", test_a_capture_shares_pages},
    {"no_page_is_made_to_extend_a_range", test_no_page_is_made_to_extend_a_range},
    {"failures_lose_nothing", test_failures_lose_nothing},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
