/* Found in review: what mosaics make possible and a request is still refused. */
#include "pools.h"
#include "sender.h"

#define GIB ((size_t)1 << 30)

enum { GRAIN = 16 };

/* Grains of 16 pages, the device has no more. */
static void
review_init(struct world *world, const char *options, pya_stream stream) {
    *world = (struct world){
        .config = {.capacity_bytes = 16 * GIB, .address_bytes = (uint64_t)1 << 38, .quiet = true}};
    world_init(world, options);
    CHECK_OK(pya_reserve(world->heap, 0, 4 * GIB, stream));
    CHECK_OK(pya_reserve(world->heap, 0, 0, stream));
    pya_sim_set_capacity(world->sim, 4 * GIB);
}

/* 13 pages beside live ones and another stream's free grain are more than the 20 that are wanted, and the 7 that lack can be
 * made of it. */
static void
test_parts_and_another_streams_grain(void) {
    struct world world;
    review_init(&world, "", 1);
    (void)take(&world, GRAIN * PYA_PAGE, 1); /* stream 1 keeps the low grain of its stretch */
    pya_dptr theirs = take(&world, GRAIN * PYA_PAGE, 1);
    (void)take(&world, GRAIN * PYA_PAGE, 1);
    pya_dptr rest = take(&world, 4 * GIB - 3 * GRAIN * PYA_PAGE, 1);
    give(&world, rest);
    CHECK_OK(pya_alloc(world.heap, 0, 3 * PYA_PAGE, 0, &rest)); /* what stream 0 has from now on */
    (void)take(&world, 4 * GIB - 3 * GRAIN * PYA_PAGE - GRAIN * PYA_PAGE, 0);
    CHECK_EQ(reserved(&world), 4 * GIB);
    give(&world, theirs);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    (void)take(&world, 20 * PYA_PAGE, 0);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 0);
    world_fini(&world);
}

/* In a capture nothing may be waited for; a page shared by two blocks needs no waiting. */
static void
test_a_capture_shares_pages(void) {
    struct world world = {.config = {.capacity_bytes = 64 * PYA_PAGE}};
    pya_dptr a, b, c;
    world_init(&world, "shared_pages:True");
    CHECK_OK(pya_pool_begin(world.heap, 0, POOL, (struct pya_stream_filter){.began_on = 16}));
    pya_sim_set_capturing(world.sim, 16, true);
    a = take(&world, PYA_PAGE + MIB, 16);
    b = take(&world, 2 * PYA_PAGE - 2 * MIB, 16);
    c = take(&world, PYA_PAGE + MIB, 16);
    (void)a;
    (void)c;
    (void)b;
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"parts_and_another_streams_grain", test_parts_and_another_streams_grain},
    {"a_capture_shares_pages", test_a_capture_shares_pages},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
