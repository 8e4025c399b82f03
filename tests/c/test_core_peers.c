/* Other devices' access to a device's memory. */
#include "pools.h"
#include "sender.h"
#include "sweep.h"

static void
test_peers(void) {
    struct world world = {0};
    pools_init(&world, "");
    pool_begin(&world);
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    pool_end(&world);
    uint64_t n_let_in = calls(&world, PYA_SIM_ENABLE_PEER);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_EQ(calls(&world, PYA_SIM_ENABLE_PEER), n_let_in + 1);
    CHECK_OK(pya_free(world.heap, ptr));
    world_fini(&world);
}

/* A hole lies between the pages that are mapped: the peer is let into both parts. */
static void
test_peers_reach_every_part(void) {
    struct world world = {0};
    pya_dptr ptrs[3];
    pools_init(&world, "");
    for (size_t i = 0; i < 3; i++) {
        ptrs[i] = take(&world, 32 * MIB, 0);
    }
    give(&world, ptrs[1]);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 64 * MIB);
    uint64_t n_opened = calls(&world, PYA_SIM_SET_ACCESS);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_EQ(calls(&world, PYA_SIM_SET_ACCESS), n_opened + 2);
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    world_fini(&world);
}

/* The owner's later requests do not fail for a peer that cannot be let in; another peer still can. */
static void
test_refused_peer(void) {
    struct world world = {.config = {.refused_peers = 2}};
    pools_init(&world, "");
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    CHECK_EQ(pya_enable_peer(world.heap, 0, 1), PYA_E_DEVICE);
    pya_dptr more = take(&world, 300 * MIB, 0);
    CHECK_OK(pya_enable_peer(world.heap, 0, 2));
    give(&world, ptr);
    give(&world, more);
    world_fini(&world);
}

/* A refusal is told when the peer is enabled, also if nothing is mapped that it could be given access to. */
static void
test_refused_peer_of_an_empty_device(void) {
    for (int was_used = 0; was_used < 2; was_used++) {
        struct world world = {.config = {.refused_peers = 2}};
        world_init(&world, "");
        if (was_used) {
            give(&world, take(&world, 5 * MIB, 0));
            CHECK_OK(pya_empty_cache(world.heap, 0));
        }
        CHECK(!pya_lacks_peer(world.heap, 0, 1) || was_used); /* not opened yet */
        CHECK_EQ(pya_enable_peer(world.heap, 0, 1), PYA_E_DEVICE);
        CHECK_EQ(reserved(&world), 0);
        CHECK_OK(pya_enable_peer(world.heap, 0, 2));
        CHECK(pya_lacks_peer(world.heap, 0, 1) && !pya_lacks_peer(world.heap, 0, 2));
        CHECK(!pya_lacks_peer(world.heap, 0, -1) && !pya_lacks_peer(world.heap, 1, 0));
        give(&world, take(&world, 5 * MIB, 0));
        sweep_check_empty(world.heap, world.sim);
        world_fini(&world);
    }
}

/* Enabling a peer again changes nothing: its access does not depend on calls that may fail. */
static void
test_enabled_once(void) {
    struct world world = {0};
    world_init(&world, "");
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    const uint64_t n_calls = all_calls(&world);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_EQ(all_calls(&world), n_calls);
    give(&world, ptr);
    world_fini(&world);
}

/* A request that needs memory which a peer cannot be given access to fails, names the peer, and loses nothing. */
static void
test_refused_later(void) {
    struct world world = {.config = {.quiet = true}};
    pya_dptr ptr, none;
    char text[600];
    world_init(&world, "");
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_OK(pya_enable_peer(world.heap, 0, 3));
    ptr = take(&world, 5 * MIB, 0);
    pya_sim_fail(world.sim, 1U << PYA_SIM_SET_ACCESS, 1, PYA_E_DEVICE, false);
    CHECK_EQ(pya_alloc(world.heap, 0, 50 * MIB, 0, &none), PYA_E_DEVICE);
    CHECK(pya_heap_error_text(world.heap, PYA_E_DEVICE, "failed", 0, text, sizeof text) > 0);
    if (!CHECK(
            strstr(text, "cuMemSetAccess on GPU 0 with access for GPUs 1, 3 returned 999") !=
            NULL)) {
        fprintf(stderr, "    %s\n", text);
    }
    CHECK_EQ(reserved(&world), 6 * MIB);
    give(&world, ptr);
    CHECK_EQ(take(&world, 5 * MIB, 0), ptr);
    give(&world, ptr);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
}

/* The device has room, but what gives its peers access has not: the message says so.  Once it has, the request is
 * served. */
static void
test_no_memory_for_a_peer(void) {
    struct world world = {.config = {0}};
    struct pya_oom_info info;
    pya_dptr none;
    char text[PYA_OOM_TEXT_BYTES];
    world_init(&world, "");
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    pya_sim_fail(world.sim, 1U << PYA_SIM_SET_ACCESS, 1, PYA_E_NOMEM, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 50 * MIB, 0, &none), PYA_E_NOMEM);
    CHECK(pya_sim_fail_clear(world.sim));
    pya_heap_oom_info(world.heap, &info);
    CHECK(pya_oom_text(&info, text, sizeof text) > 0);
    if (!CHECK(strstr(text, "none was found for mappings with access for GPU 1: ") != NULL)) {
        fprintf(stderr, "    %s\n", text);
    }
    give(&world, take(&world, 50 * MIB, 0));
    give(&world, ptr);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
}

/* Memory at home, stitched, and of another process. */
static void
peers_fill(struct world *world, pya_dptr *ptrs, pya_dptr *base) {
    struct pya_shared shared;
    for (size_t i = 0; i < 4; i++) {
        ptrs[i] = take(world, 16 * MIB, 0);
    }
    give(world, ptrs[0]);
    give(world, ptrs[2]);
    ptrs[0] = take(world, 32 * MIB, 0);
    CHECK(stat_of(world->heap, 0, "pyalloc_stitches") > 0);
    CHECK_OK(pya_share(world->heap, ptrs[1], &shared));
    CHECK_OK(import_all(world->heap, &shared, base));
}

static void
peers_drop(struct world *world, const pya_dptr *ptrs, pya_dptr base) {
    CHECK_OK(pya_import_close(world->heap, base));
    give(world, ptrs[0]);
    give(world, ptrs[1]);
    give(world, ptrs[3]);
}

/* While a peer is enabled, every call and host allocation fails once. */
static bool
peers_once(bool is_full, unsigned long nth, bool host, pya_status with) {
    struct world world = {.config = {.quiet = true}};
    pya_dptr ptrs[4];
    pya_dptr base = 0;
    world_init(&world, "memory:tight");
    peers_fill(
        &world, ptrs, &base); /* tables have grown by then, the simulated device's own, too */
    peers_drop(&world, ptrs, base);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    size_t live = fault_live();
    if (is_full) {
        peers_fill(&world, ptrs, &base);
    }
    size_t before = reserved(&world);
    sweep_arm(world.sim, nth, host, with);
    pya_status st = pya_enable_peer(world.heap, 0, 1);
    bool fired = sweep_disarm(world.sim, host);
    CHECK(st == PYA_OK || fired);
    CHECK_EQ(reserved(&world), before);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_EQ(pya_sim_check(world.sim), 0); /* the peer has access to everything */
    if (is_full) {
        peers_drop(&world, ptrs, base);
    }
    give(&world, take(&world, 160 * MIB, 0));
    CHECK_EQ(pya_sim_check(world.sim), 0);
    sweep_check_empty(world.heap, world.sim);
    CHECK_EQ(fault_live(), live);
    world_fini(&world);
    return fired;
}

static void
test_failures_lose_nothing(void) {
    for (int is_full = 0; is_full < 2; is_full++) {
        unsigned long n = 1;
        for (; peers_once(is_full, n, false, PYA_E_DEVICE) && check_failures < 20; n++) {
            (void)peers_once(is_full, n, false, PYA_E_NOMEM);
        }
        CHECK(n > (is_full ? 3 : 7));
        CHECK(peers_once(is_full, 1, true, PYA_OK) == !is_full);
        CHECK(!peers_once(is_full, 2, true, PYA_OK));
    }
}

static const struct check_case cases[] = {
    {"peers", test_peers},
    {"reach_every_part", test_peers_reach_every_part},
    {"refused_peer", test_refused_peer},
    {"refused_peer_of_an_empty_device", test_refused_peer_of_an_empty_device},
    {"enabled_once", test_enabled_once},
    {"refused_later", test_refused_later},
    {"no_memory_for_a_peer", test_no_memory_for_a_peer},
    {"failures_lose_nothing", test_failures_lose_nothing},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
