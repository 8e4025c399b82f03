/* Where a request is placed; which ranges are stitched, shared, extended, unmapped; mappings that failed half-way. */
#include "core/repeat.h"
#include "core/snapshot.h"
#include "fault.h"
#include "streams.h"

#define HALF_MIB (MIB / 2)

/* Blocks that fill a card from its first byte on, in order of their addresses. */
static void
fill(struct world *world, const size_t *sizes, size_t n, pya_dptr *ptrs) {
    for (size_t i = 0; i < n; i++) {
        ptrs[i] = take(world, sizes[i], 0);
        CHECK_EQ(ptrs[i] - ptrs[0], i == 0 ? 0 : ptrs[i - 1] + sizes[i - 1] - ptrs[0]);
    }
}

/* Frees the two named blocks, which are parts of pages, and whole pages.  Then takes what only fits if the first
 * request spares the larger part. */
static void
take_two_shared(const size_t *sizes, size_t smaller, size_t larger) {
    const size_t freed[] = {smaller, larger, 6};
    struct world world = {.config = {.capacity_bytes = 16 * MIB}};
    pya_dptr ptrs[10];
    world_init(&world, "shared_pages:True");
    fill(&world, sizes, 10, ptrs);
    for (size_t i = 0; i < 3; i++) {
        give(&world, ptrs[freed[i]]);
    }
    pya_dptr first = take(&world, 5 * HALF_MIB, 0);
    give(&world, ptrs[8]);
    pya_dptr second = take(&world, 7 * HALF_MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 2);
    give(&world, first);
    give(&world, second);
    world_fini(&world);
}

/* The last 512 KiB of one page are free, and the last 1.5 MiB of another. */
static void
test_a_shared_range_begins_in_the_smallest_end(void) {
    static const size_t sizes[] = {3 * HALF_MIB, HALF_MIB, 2 * MIB, HALF_MIB, 3 * HALF_MIB,
                                   2 * MIB,      2 * MIB,  2 * MIB, 2 * MIB,  2 * MIB};
    take_two_shared(sizes, 1, 4);
}

/* The first ones, where a range may end. */
static void
test_a_shared_range_ends_in_the_smallest_start(void) {
    static const size_t sizes[] = {HALF_MIB, 3 * HALF_MIB, 2 * MIB, 3 * HALF_MIB, HALF_MIB,
                                   2 * MIB,  2 * MIB,      2 * MIB, 2 * MIB,      2 * MIB};
    take_two_shared(sizes, 0, 3);
}

/* If only the largest end of a page is enough, it is found, whichever free runs are larger. */
static void
test_the_largest_end_of_all_is_found(void) {
    static const size_t sizes[] = {HALF_MIB, 3 * HALF_MIB, 3 * HALF_MIB, 5 * HALF_MIB, 4 * MIB};
    struct world world = {.config = {.capacity_bytes = 10 * MIB}};
    pya_dptr ptrs[5];
    world_init(&world, "shared_pages:True");
    fill(&world, sizes, 5, ptrs);
    give(&world, ptrs[1]); /* an end of 1.5 MiB */
    give(&world, ptrs[3]); /* one of 512 KiB, and a page */
    (void)take(&world, 7 * HALF_MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 1);
    world_fini(&world);
}

/* The end of one page and the start of another, and nothing else: each byte of the three pages belongs to one block. */
static void
test_two_halves_are_shared(void) {
    static const size_t sizes[] = {MIB, MIB, 2 * MIB, MIB, MIB};
    struct world world = {.config = {.capacity_bytes = 6 * MIB}};
    pya_dptr ptrs[5];
    world_init(&world, "shared_pages:True");
    fill(&world, sizes, 5, ptrs);
    give(&world, ptrs[1]);
    give(&world, ptrs[3]);
    ptrs[1] = take(&world, 2 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 1);
    CHECK_OK(pya_sim_own(world.sim, ptrs[0], MIB));
    CHECK_OK(pya_sim_own(world.sim, ptrs[1], 2 * MIB));
    CHECK_OK(pya_sim_own(world.sim, ptrs[2], 2 * MIB));
    CHECK_OK(pya_sim_own(world.sim, ptrs[4], MIB));
    world_fini(&world);
}

/* The end of a page and the start of another save up to two pages of what a request needs, whether the device has one
 * more or none. */
static void
test_sharing_saves_two_pages(void) {
    static const size_t sizes[] = {512, PYA_PAGE - 512, PYA_PAGE, PYA_PAGE - 512, 512};
    for (size_t n_left = 0; n_left < 2; n_left++) {
        struct world world = {.config = {.capacity_bytes = 4 * PYA_PAGE}};
        pya_dptr ptrs[5];
        world_init(&world, "shared_pages:True");
        CHECK_OK(pya_reserve(world.heap, 0, 3 * PYA_PAGE, 0));
        pya_sim_set_capacity(world.sim, (3 + n_left) * PYA_PAGE);
        fill(&world, sizes, 5, ptrs);
        give(&world, ptrs[1]);
        give(&world, ptrs[3]);
        (void)take(&world, (2 + n_left) * PYA_PAGE - 2 * 512, 0);
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_shared_ranges"), 1);
        CHECK_EQ(reserved(&world), (3 + n_left) * PYA_PAGE);
        world_fini(&world);
    }
}

/* A range neither begins nor ends in free bytes that have live ones on both sides within their page. */
static void
test_the_middle_of_a_page_is_not_shared(void) {
    static const size_t sizes[] = {MIB / 4, 3 * HALF_MIB, MIB / 4, 2 * MIB, 2 * MIB};
    struct world world = {.config = {.capacity_bytes = 6 * MIB}};
    pya_dptr ptrs[5];
    pya_dptr ptr;
    world_init(&world, "shared_pages:True");
    fill(&world, sizes, 5, ptrs);
    give(&world, ptrs[1]);
    give(&world, ptrs[3]);
    CHECK_EQ(pya_alloc(world.heap, 0, 5 * HALF_MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[3]);
    CHECK_EQ(take(&world, 3 * HALF_MIB, 0), ptrs[1]);
    world_fini(&world);
}

/* The stream of the segment that contains ptr. */
static pya_stream
stream_at(struct world *world, pya_dptr ptr) {
    struct pya_snapshot snap;
    pya_stream found = UINT64_MAX;
    CHECK_OK(pya_snapshot_take(world->heap, NULL, false, &snap));
    for (size_t i = 0; i < snap.n_segments; i++) {
        const struct pya_snap_segment *segment = &snap.segments[i];
        bool is_inside = ptr >= segment->addr && ptr - segment->addr < segment->total_bytes;
        found = is_inside ? segment->stream : found;
    }
    pya_snapshot_fini(&snap);
    return found;
}

/* A range changes streams as a whole or not at all, however much host memory there is. */
static void
test_ranges_change_streams_whole(void) {
    static const size_t sizes[] = {2 * MIB, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB};
    bool has_failed = true;
    for (unsigned long nth = 1; has_failed && check_failures < 20; nth++) {
        struct world world = {.config = {.capacity_bytes = 14 * MIB}};
        pya_dptr ptrs[5], ptr = 0;
        world_init(&world, "memory:tight");
        fill(&world, sizes, 5, ptrs);
        give(&world, ptrs[1]);
        give(&world, ptrs[3]);
        give(&world, take(&world, 8 * MIB, 0));
        fault_arm(nth);
        pya_status st = pya_alloc(world.heap, 0, 8 * MIB, 16, &ptr);
        has_failed = fault_disarm();
        CHECK(st == PYA_OK || (has_failed && st == PYA_E_HOST_NOMEM));
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        if (st == PYA_OK) {
            CHECK(has_failed || stat_of(world.heap, 0, "pyalloc_range_hits") == 1);
            CHECK_EQ(stream_at(&world, ptr), 16);
        }
        world_fini(&world);
    }
}

/* Reserved memory serves any request, unless host memory is short, which the request reports. */
static void
test_what_is_reserved_is_there(void) {
#ifdef PYA_TEST_TINY
    enum { N_MOST = 8 };
#else
    enum { N_MOST = 256 }; /* records of blocks come in so many */
#endif
    for (size_t n = N_MOST - 6; n < N_MOST; n++) {
        bool has_failed = true;
        for (unsigned long nth = 1; has_failed && check_failures < 20; nth++) {
            struct world world = {.config = {.capacity_bytes = 64 * MIB}};
            world_init(&world, "");
            for (size_t i = 0; i < n; i++) {
                (void)take(&world, 512, 0);
            }
            fault_arm(nth);
            pya_status st = pya_reserve(world.heap, 0, reserved(&world) + 4 * MIB, 16);
            has_failed = fault_disarm();
            CHECK(st == PYA_OK || (has_failed && st == PYA_E_HOST_NOMEM));
            if (st == PYA_OK) {
                uint64_t n_made = calls(&world, PYA_SIM_PAGE_CREATE);
                (void)take(&world, 4 * MIB, 16);
                CHECK_EQ(calls(&world, PYA_SIM_PAGE_CREATE), n_made);
            }
            world_fini(&world);
        }
    }
}

enum { N_PAGES = 32 };

/* Every other page is free: anything larger than one page is stitched. */
static void
make_gaps(struct world *world, const char *options, pya_dptr *ptrs) {
    world_init(world, options);
    for (size_t i = 0; i < N_PAGES; i++) {
        ptrs[i] = take(world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < N_PAGES; i += 2) {
        give(world, ptrs[i]);
    }
}

static const uint32_t ACCESS_CALLS = 1U << PYA_SIM_SET_ACCESS | 1U << PYA_SIM_UNMAP;

/* A range that could not be made accessible, nor unmapped, is given to nobody and unmapped later; its pages stay. */
static void
test_a_broken_range_is_unmapped(void) {
    struct world world = {.config = {.capacity_bytes = N_PAGES * 2 * MIB}};
    pya_dptr ptrs[N_PAGES];
    pya_dptr none;
    make_gaps(&world, "", ptrs);
    pya_sim_fail(world.sim, ACCESS_CALLS, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 6 * MIB, 0, &none), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(world.sim));
    pya_dptr sound = take(&world, 6 * MIB, 0);
    CHECK_OK(pya_sim_own(world.sim, sound, 6 * MIB)); /* a violation if it is not accessible */
    pya_sim_disown(world.sim, sound, 6 * MIB);
    give(&world, sound);
    for (size_t i = 0; i < N_PAGES; i += 2) {
        ptrs[i] = take(&world, 2 * MIB, 0);
    }
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 3 + 3);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 3);
    world_fini(&world);
}

/* A range is to be extended by the only page that is known to be idle, while queued work still uses the others under the
 * range's address.  Extending it fails with the range left as it is, which the collector must not unmap. */
static void
extend_beside_work(unsigned long nth_host) {
    enum { N_RANGE = 14 };
    struct world world = {
        .config = {.capacity_bytes = N_PAGES * 2 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    pya_dptr ptrs[N_PAGES];
    pya_dptr ptr = 0;
    make_gaps(&world, "memory:tight", ptrs);
    give(&world, ptrs[N_PAGES - 1]); /* cutting one of two free pages takes a record more */
    while (nth_host > 0 && world.heap->cards.open[0]->blocks.n_free > 1) {
        (void)take(&world, 512, 0);
    }
    for (int i = 0; i < 2; i++) { /* the second time it is known that all that is free is idle */
        (void)collect(&world, 0);
        pya_sim_finish_all(world.sim);
    }
    ptr = get(&world, N_RANGE * 2 * MIB, 0);
    put(&world, ptr, N_RANGE * 2 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + N_RANGE);
    if (nth_host > 0) {
        fault_arm(nth_host);
    } else {
        pya_sim_fail(world.sim, ACCESS_CALLS, 1, PYA_E_DEVICE, true);
    }
    pya_status st = pya_alloc(world.heap, 0, (N_RANGE + 1) * 2 * MIB, 0, &ptr);
    bool has_failed = nth_host > 0 ? fault_disarm() : pya_sim_fail_clear(world.sim);
    CHECK(st == PYA_OK || has_failed);
    (void)collect(&world, 4 * MIB); /* a violation if it unmaps the range */
    if (st == PYA_OK) {
        give(&world, ptr);
    }
    for (size_t i = 1; i < N_PAGES - 1; i += 2) {
        give(&world, ptrs[i]);
    }
    pya_sim_finish_all(world.sim);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    world_fini(&world);
}

static void
test_a_range_that_was_not_extended_is_left_to_its_work(void) {
    for (unsigned long nth_host = 0; nth_host < 8; nth_host++) {
        extend_beside_work(nth_host);
    }
}

/* Addresses to which pages could not be moved stay unusable after a trim that had to leave them. */
static void
test_broken_addresses_stay_broken_in_a_trim(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[8];
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr own = take(&world, 5000, 32);
    for (size_t i = 0; i < 8; i++) {
        ptrs[i] = take(&world, 4 * MIB, 16);
    }
    for (size_t i = 0; i < 8; i += 2) { /* nowhere 8 MiB in one piece */
        give(&world, ptrs[i]);
    }
    pya_sim_fail(world.sim, ACCESS_CALLS, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 8 * MIB, 32, &ptr), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(world.sim));
    for (size_t i = 0; i < 8; i += 2) {
        ptrs[i] = take(&world, 4 * MIB, 16);
    }
    int64_t n_mappings = stat_of(world.heap, 0, "pyalloc_mappings");
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(stat_of(world.heap, 0, "pyalloc_mappings") > stat_of(world.heap, 0, "pyalloc_pages"));
    CHECK(n_mappings > stat_of(world.heap, 0, "pyalloc_pages"));
    for (size_t i = 0; i < 8; i += 2) {
        give(&world, ptrs[i]);
    }
    ptr = take(&world, 8 * MIB, 32);
    CHECK_OK(pya_sim_own(world.sim, ptr, 8 * MIB));
    pya_sim_disown(world.sim, ptr, 8 * MIB);
    give(&world, own);
    world_fini(&world);
}

/* A request that fits in several places of one run goes, with care, where it leaves whole pages whole. */
static void
test_careful_fit_breaks_no_page(void) {
    static const size_t sizes[] = {2 * MIB, MIB, MIB};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[3];
    world_init(&world, "memory:tight");
    fill(&world, sizes, 3, ptrs);
    give(&world, ptrs[0]);
    give(&world, ptrs[1]);
    CHECK_EQ(take(&world, HALF_MIB, 0), ptrs[2] - HALF_MIB);
    world_fini(&world);
}

/* Of equally good holes, the lowest is filled. */
static void
test_growth_fills_the_lowest_hole(void) {
    static const size_t sizes[] = {2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[5];
    world_init(&world, "memory:tight");
    fill(&world, sizes, 5, ptrs);
    give(&world, ptrs[1]);
    give(&world, ptrs[3]);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[1]);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[3]);
    world_fini(&world);
}

/* Growth is by more than what is needed, because each growth makes the range accessible once, but never by much. */
static void
test_growth_is_bounded(void) {
    struct world world = {.config = {.capacity_bytes = 16384 * MIB}};
    world_init(&world, "");
    (void)take(&world, 8000 * MIB, 0);
    size_t before = reserved(&world);
    while (reserved(&world) == before) {
        (void)take(&world, 2 * MIB, 0);
    }
    CHECK_EQ(reserved(&world) - before, 16 * 2 * MIB);
    world_fini(&world);
}

/* The lowest free pages are stitched, whatever runs they belong to, so that the others may become larger runs. */
static void
test_the_lowest_pages_are_stitched(void) {
    static const size_t sizes[] = {4 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB};
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[6];
    world_init(&world, "memory:tight");
    fill(&world, sizes, 6, ptrs);
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    give(&world, ptrs[4]);
    (void)take(&world, 6 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    CHECK_EQ(take(&world, 2 * MIB, 0), ptrs[4]);
    world_fini(&world);
}

/* Of two ranges that are a few pages short, the one with fewer missing gets them, whichever was used last. */
static void
test_the_longest_short_range_is_extended(void) {
    static const size_t n_pages[] = {15, 13, 15, 13};
    for (size_t n = 3; n <= 4; n++) {
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        pya_dptr ptrs[N_PAGES];
        make_gaps(&world, "memory:tight", ptrs);
        for (size_t i = 0; i < n; i++) {
            give(&world, take(&world, n_pages[i] * 2 * MIB, 0));
        }
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 15 + 13);
        give(&world, take(&world, 16 * 2 * MIB, 0));
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 16 + 13);
        world_fini(&world);
    }
}

/* One step: a request that shows where the program is, then two that fit no hole; in_the_way has the second's place. */
static void
step_beside_holes(struct world *world, pya_dptr in_the_way) {
    for (size_t i = 0; i < 80; i++) {
        give(world, take(world, PYA_REPEAT_FROM + i * PYA_ALIGN, 0));
    }
    give(world, take(world, 20 * MIB, 0));
    if (in_the_way != 0) {
        give(world, in_the_way);
    }
    give(world, take(world, 22 * MIB, 0));
}

/* A stitched range that comes again in each step keeps its length: another is made for a slightly larger request. */
static void
test_what_comes_again_is_not_extended(void) {
    enum { N_HOLES = 40 };
    struct world world = {0};
    pya_dptr holes[N_HOLES];
    world_init(&world, "");
    for (size_t i = 0; i < N_HOLES; i++) {
        holes[i] = take(&world, 4 * MIB, 0);
        (void)take(&world, 4 * MIB, 0);
    }
    pya_dptr end = take(&world, 22 * MIB, 0);
    (void)take(&world, 4 * MIB, 0);
    for (size_t i = 0; i < N_HOLES; i++) {
        give(&world, holes[i]);
    }
    give(&world, end);
    step_beside_holes(&world, take(&world, 8 * MIB, 0));
    (void)take(&world, 22 * MIB, 0); /* the optimizer's state */
    step_beside_holes(&world, 0);
    int64_t n = stat_of(world.heap, 0, "pyalloc_mappings");
    step_beside_holes(&world, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), n);
    world_fini(&world);
}

/* If there are too many ranges, those unused for longest are unmapped, down to half of what is allowed. */
static void
test_the_least_recently_used_ranges_are_unmapped(void) {
    static const size_t n_pages[] = {3,  16, 15, 14,
                                     13, 2,  3}; /* 63 mappings: the last is the first again */
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[N_PAGES];
    make_gaps(&world, "memory:tight,mappings_per_page:3", ptrs);
    for (size_t i = 0; i < sizeof n_pages / sizeof *n_pages; i++) {
        give(&world, take(&world, n_pages[i] * 2 * MIB, 0));
    }
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 63);
    give(
        &world, take(&world, 5 * 2 * MIB, 0)); /* 68: more than two for each page beside its home */
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_mappings"), N_PAGES + 3 + 2 + 5);
    int64_t n_hits = stat_of(world.heap, 0, "pyalloc_range_hits");
    give(&world, take(&world, 3 * 2 * MIB, 0));
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_range_hits"), n_hits + 1);
    world_fini(&world);
}

/* Adjacent free pages that belong to two streams leave together for a third, each out of its own run. */
static void
test_pages_of_neighbours_move(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "");
    pya_dptr first = take(&world, 300 * MIB, ONE);
    (void)take(&world, 2 * MIB, ONE);
    give(&world, first);
    pya_dptr second = take(&world, 280 * MIB, TWO);
    CHECK_EQ(second, first);
    give(&world, second);
    int64_t n_moved = stat_of(world.heap, 0, "pyalloc_page_moves");
    (void)take(&world, 304 * MIB, THREE); /* more than there is in one piece */
    CHECK(stat_of(world.heap, 0, "pyalloc_page_moves") >= n_moved + 150);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"pages_of_neighbours_move", test_pages_of_neighbours_move},
    {"two_halves_are_shared", test_two_halves_are_shared},
    {"sharing_saves_two_pages", test_sharing_saves_two_pages},
    {"the_middle_of_a_page_is_not_shared", test_the_middle_of_a_page_is_not_shared},
    {"largest_end_of_all_is_found", test_the_largest_end_of_all_is_found},
    {"ranges_change_streams_whole", test_ranges_change_streams_whole},
    {"what_is_reserved_is_there", test_what_is_reserved_is_there},
    {"begins_in_the_smallest_end", test_a_shared_range_begins_in_the_smallest_end},
    {"ends_in_the_smallest_start", test_a_shared_range_ends_in_the_smallest_start},
    {"careful_fit", test_careful_fit_breaks_no_page},
    {"lowest_hole", test_growth_fills_the_lowest_hole},
    {"growth_is_bounded", test_growth_is_bounded},
    {"lowest_pages", test_the_lowest_pages_are_stitched},
    {"longest_is_extended", test_the_longest_short_range_is_extended},
    {"what_comes_again", test_what_comes_again_is_not_extended},
    {"least_recently_used", test_the_least_recently_used_ranges_are_unmapped},
    {"broken_range_is_unmapped", test_a_broken_range_is_unmapped},
    {"left_to_its_work", test_a_range_that_was_not_extended_is_left_to_its_work},
    {"broken_addresses_stay_broken", test_broken_addresses_stay_broken_in_a_trim},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
