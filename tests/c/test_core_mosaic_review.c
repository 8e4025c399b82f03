/* Found in review: what is there is enough, and a request is refused all the same. */
#include "pools.h"

#define GIB ((size_t)1 << 30)

enum { GRAIN = 16 };

/* The free end of a grain, and of another stream a free grain that its work still uses: together they are enough. */
static void
test_a_part_and_another_streams_grain(void) {
    enum { PART = 13, WANTED = 20 };
    struct world world = {
        .config = {
            .capacity_bytes = 16 * GIB,
            .address_bytes = (uint64_t)1 << 38,
            .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 4 * GIB, 0));
    (void)take(&world, (GRAIN - PART) * PYA_PAGE, 0);
    pya_dptr part = take(&world, PART * PYA_PAGE, 0);
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
    (void)take(&world, WANTED * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 0);
    world_fini(&world);
}

/* While a stream captures nothing is waited for; to share pages nothing need be. */
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

/* Behind an idle range four pages lack, which no whole grain is: the range and the free end of a grain, anew, need none. */
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

static const struct check_case cases[] = {
    {"no_page_is_made_to_extend_a_range", test_no_page_is_made_to_extend_a_range},
    {"a_part_and_another_streams_grain", test_a_part_and_another_streams_grain},
    {"a_capture_shares_pages", test_a_capture_shares_pages},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
