/* Memory at an address that the caller names. */
#include "pools.h"

static pya_status
take_at(struct world *world, pya_dptr addr, size_t bytes, pya_stream stream) {
    return pya_alloc_at(world->heap, 0, bytes, stream, addr);
}

/* A request for an address is served where any other request on the stream would be. */
static void
test_alloc_at(void) {
    struct world world = {.config.work = PYA_SIM_WORK_BY_HAND};
    pya_dptr ptrs[3];
    pools_init(&world, "");
    for (size_t i = 0; i < 3; i++) {
        ptrs[i] = take(&world, 3 * MIB, 1);
    }
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB, 1), PYA_E_INVAL); /* live */
    give(&world, ptrs[1]);
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB + 1, 1), PYA_E_INVAL);
    CHECK_EQ(take_at(&world, ptrs[1] - 512, 3 * MIB, 1), PYA_E_INVAL);
    CHECK_EQ(take_at(&world, ptrs[1] + 8, 512, 1), PYA_E_INVAL);
    CHECK_EQ(take_at(&world, ptrs[1], 0, 1), PYA_E_INVAL);
    CHECK_EQ(take_at(&world, ptrs[1], SIZE_MAX - 7, 1), PYA_E_INVAL);
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB, 2), PYA_E_INVAL); /* another stream */
    pool_begin(&world);
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB, 1), PYA_E_INVAL); /* of the default pool */
    pya_dptr mine = take(&world, MIB, 1);
    give(&world, mine);
    CHECK_OK(take_at(&world, mine, MIB, 1));
    give(&world, mine);
    pool_end(&world);
    CHECK_EQ(take_at(&world, mine, MIB, 1), PYA_E_INVAL);
    CHECK_OK(take_at(&world, ptrs[1] + 512, MIB - 100, 1));
    CHECK_EQ(stat_of(world.heap, 0, "allocated_bytes.all.current"), 7 * MIB);
    CHECK_EQ(stat_of(world.heap, 0, "requested_bytes.all.current"), 7 * MIB - 100);
    give(&world, ptrs[1] + 512);
    CHECK_OK(take_at(&world, ptrs[1], 3 * MIB, 1));
    CHECK_OK(pya_record_stream(world.heap, ptrs[1], 2));
    give(&world, ptrs[1]);
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB, 1), PYA_E_INVAL); /* stream 2 still works with it */
    pya_sim_finish_all(world.sim);
    CHECK_OK(take_at(&world, ptrs[1], 3 * MIB, 1));
    for (size_t i = 0; i < 3; i++) {
        give(&world, ptrs[i]);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(take_at(&world, ptrs[1], 3 * MIB, 1), PYA_E_INVAL); /* no memory there any more */
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    world_fini(&world);
}

/* Streams take over parts of each other's ranges: the bytes are then another stream's, wherever they lie. */
static void
test_memory_that_changed_hands(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "");
    pya_dptr first = take(&world, 64 * MIB, 16);
    give(&world, first);
    pya_dptr ptrs[2] = {take(&world, 24 * MIB, 32), take(&world, 20 * MIB, 32)};
    CHECK(ptrs[0] >= first && ptrs[0] + 24 * MIB <= first + 64 * MIB);
    give(&world, ptrs[0]);
    give(&world, ptrs[1]);
    CHECK_EQ(take_at(&world, ptrs[0], 24 * MIB, 16), PYA_E_INVAL);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(take_at(&world, ptrs[0], 24 * MIB, 32));
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, ptrs[0]);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"alloc_at", test_alloc_at},
    {"memory_that_changed_hands", test_memory_that_changed_hands},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
