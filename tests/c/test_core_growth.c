/* Memory requested anew, a little larger each time, or by pools that come and go: what it reserves in the long run. */
#include "fault.h"
#include "sweep.h"
#include "world.h"

enum { STEPS = 120 };

/* One tensor that grows: each new one is made while the old one lives, with small ones between.  *last is left. */
static pya_status
grow(struct world *world, int n_steps, pya_dptr *last) {
    pya_status st = PYA_OK;
    for (int step = 0; step < n_steps && st == PYA_OK; step++) {
        pya_dptr next = 0;
        pya_dptr small = 0;
        st = pya_alloc(world->heap, 0, 40 * MIB + (size_t)step * 3 * MIB, 0, &next);
        if (st == PYA_OK) {
            st = pya_alloc(world->heap, 0, (size_t)(step % 7 + 1) * MIB, 0, &small);
            CHECK_OK(pya_free(world->heap, *last));
            CHECK_OK(pya_free(world->heap, small));
            *last = next;
        }
    }
    return st;
}

static void
test_growing_tensor_is_extended(void) {
    struct world world = {.config = {.capacity_bytes = 4096 * MIB}};
    pya_dptr last = 0;
    world_init(&world, "");
    CHECK_OK(grow(&world, STEPS, &last));
    size_t peak_live = (size_t)stat_of(world.heap, 0, "allocated_bytes.all.peak");
    uint64_t n_pages = calls(&world, PYA_SIM_PAGE_CREATE);
    CHECK(reserved(&world) <= peak_live + peak_live / 16);
    CHECK(calls(&world, PYA_SIM_MAP) <= 4 * n_pages);
    CHECK(stat_of(world.heap, 0, "pyalloc_stitches") > STEPS / 8); /* a longer range is one more */
    give(&world, last);
    world_fini(&world);
}

/* Every layer leaves a hole and wants more than it.  While live memory rises, the hole is soon filled anyway, so
 * stitching it gains nothing; in the end hardly any memory is idle. */
static void
test_rising_memory_is_not_stitched(void) {
    enum { LAYERS = 60 };
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    pya_dptr ptrs[2 * LAYERS + 1];
    size_t n = 0;
    world_init(&world, "");
    ptrs[n++] = take(&world, 4096 * MIB, 0);
    for (size_t i = 0; i < LAYERS; i++) {
        pya_dptr hole = take(&world, 12 * MIB, 0);
        ptrs[n++] = take(&world, 8 * MIB, 0);
        give(&world, hole);
        ptrs[n++] = take(&world, 20 * MIB, 0);
    }
    size_t peak_live = (size_t)stat_of(world.heap, 0, "allocated_bytes.all.peak");
    CHECK(stat_of(world.heap, 0, "pyalloc_stitches") <= 4);
    CHECK(reserved(&world) <= peak_live + peak_live / 100);
    for (size_t i = 0; i < n; i++) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

enum { LAYERS = 12 };

/* A training with a dozen layers, none of which keeps its intermediate results: backward computes them again, up to 64
 * MiB at a time while 700 MiB are live.  Each step has another length. */
struct checkpointed {
    struct world *world;
    size_t wide, narrow; /* bytes */
    pya_dptr x[LAYERS + 1];
    pya_dptr weights[LAYERS][2], state[LAYERS][4], grads[LAYERS][2];
};

static pya_dptr
instead_of(struct world *world, size_t bytes, pya_dptr old) {
    pya_dptr next = take(world, bytes, 0);
    give(world, old);
    return next;
}

static void
checkpointed_forward(struct checkpointed *c) {
    struct world *world = c->world;
    c->x[0] = take(world, c->narrow, 0);
    for (int i = 0; i < LAYERS; i++) {
        pya_dptr wide = instead_of(world, c->wide, take(world, c->narrow, 0));
        pya_dptr out = instead_of(world, c->narrow, instead_of(world, c->wide, wide));
        c->x[i + 1] = instead_of(world, c->narrow, out);
    }
}

static void
checkpointed_backward(struct checkpointed *c) {
    struct world *world = c->world;
    pya_dptr grad = take(world, c->narrow, 0);
    for (int i = LAYERS - 1; i >= 0; i--) {
        pya_dptr norm = take(world, c->narrow, 0);
        pya_dptr wide = take(world, c->wide, 0);
        pya_dptr active = take(world, c->wide, 0);
        give(world, instead_of(world, c->narrow, take(world, c->narrow, 0)));
        pya_dptr of_active = take(world, c->wide, 0);
        c->grads[i][0] = take(world, 4 * MIB, 0);
        give(world, active);
        pya_dptr of_wide = instead_of(world, c->wide, of_active);
        give(world, wide);
        c->grads[i][1] = take(world, 4 * MIB, 0);
        pya_dptr of_norm = instead_of(world, c->narrow, of_wide);
        give(world, norm);
        grad = instead_of(world, c->narrow, grad);
        give(world, of_norm);
        give(world, c->x[i + 1]);
    }
    give(world, grad);
    give(world, c->x[0]);
}

static void
checkpointed_step(struct checkpointed *c, bool is_first) {
    pya_dptr scratch[2 * LAYERS];
    for (int i = 0; i < 4 * LAYERS && is_first; i++) {
        c->state[i / 4][i % 4] = take(c->world, 4 * MIB, 0);
    }
    for (int i = 0; i < 2 * LAYERS; i++) {
        scratch[i] = take(c->world, 4 * MIB, 0);
    }
    for (int i = 0; i < 2 * LAYERS; i++) {
        give(c->world, scratch[i]);
    }
}

/* Each growth alone is cheap compared with stitching that much.  Together they came to a quarter of what is live. */
static void
test_large_requests_of_a_small_program(void) {
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    struct checkpointed c = {.world = &world};
    world_init(&world, "");
    for (int i = 0; i < 2 * LAYERS; i++) {
        c.weights[i / 2][i % 2] = take(&world, 4 * MIB, 0);
    }
    for (size_t step = 0; step < 40; step++) {
        c.narrow = (5 * MIB + (step * 7919 % 1024 + 1) * 11 * MIB / 1024) & ~(size_t)511;
        c.wide = 4 * c.narrow;
        checkpointed_forward(&c);
        for (int i = 0; i < 2 * LAYERS && step > 0; i++) {
            give(&world, c.grads[i / 2][i % 2]);
        }
        checkpointed_backward(&c);
        checkpointed_step(&c, step == 0);
    }
    size_t peak_live = (size_t)stat_of(world.heap, 0, "allocated_bytes.all.peak");
    CHECK(reserved(&world) <= peak_live + peak_live / 12);
    for (int i = 0; i < 8 * LAYERS; i++) {
        pya_dptr *const of[] = {c.weights[i / 8], c.state[i / 8], c.grads[i / 8]};
        give(&world, i % 8 < 2 ? of[0][i % 8] : i % 8 < 6 ? of[1][i % 8 - 2] : of[2][i % 8 - 6]);
    }
    world_fini(&world);
}

/* What is requested again and again in place of freed blocks: one range that comes back, no pages that move each
 * time. */
static void
test_repeated_tensors_settle(void) {
    enum { TENSORS = 6, ROUNDS = 24 };
    static const size_t mib[TENSORS] = {111, 843, 169, 660, 198, 674};
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    uint64_t n_maps = 0;
    world_init(&world, "");
    for (int round = 0; round < ROUNDS; round++) {
        pya_dptr ptrs[TENSORS];
        for (size_t i = 0; i < TENSORS; i++) {
            ptrs[i] = take(&world, mib[i] * MIB, 0);
        }
        for (size_t i = 0; i < TENSORS; i += 2) {
            give(&world, ptrs[i]);
        }
        ptrs[2] = take(&world, mib[1] * MIB, 0);
        ptrs[0] = take(&world, mib[0] * MIB, 0);
        give(&world, ptrs[2]);
        give(&world, ptrs[0]);
        for (size_t i = 1; i < TENSORS; i += 2) {
            give(&world, ptrs[i]);
        }
        n_maps = round == ROUNDS / 2 ? calls(&world, PYA_SIM_MAP) : n_maps;
    }
    CHECK_EQ(calls(&world, PYA_SIM_MAP), n_maps);
    world_fini(&world);
}

/* A stitched block has its last page to itself, so larger and larger blocks are not stitched without end. */
static void
test_ranges_waste_little(void) {
    enum { HOLES = 40, BLOCKS = 12 };
    struct world world = {.config = {.capacity_bytes = 2048 * MIB}};
    pya_dptr ptrs[HOLES];
    pya_dptr odd[BLOCKS];
    world_init(&world, "");
    for (size_t i = 0; i < HOLES; i++) {
        ptrs[i] = take(&world, 4 * MIB, 0);
    }
    for (size_t i = 0; i < HOLES; i += 2) {
        give(&world, ptrs[i]);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        odd[i] = take(&world, 6 * MIB + 65536, 0);
    }
    int64_t n_stitches = stat_of(world.heap, 0, "pyalloc_stitches");
    CHECK(n_stitches > 0 && n_stitches <= 4);
    for (size_t i = 0; i < BLOCKS; i++) {
        give(&world, odd[i]);
    }
    for (size_t i = 1; i < HOLES; i += 2) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* A small program reserves little more than it uses, at any time. */
static void
test_little_memory_grows_slowly(void) {
    enum { BLOCKS = 60 };
    struct world world = {.config = {.capacity_bytes = 512 * MIB}};
    pya_dptr ptrs[BLOCKS];
    world_init(&world, "");
    for (size_t i = 0; i < BLOCKS; i++) {
        ptrs[i] = take(&world, MIB, 0);
        CHECK(reserved(&world) < (i + 1) * MIB + 4 * MIB);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* Only so many addresses are left beside those of the home, whose range the stitched one does not fit. */
static bool
stitches_with(uint64_t left_bytes) {
    struct world world = {.config = {.capacity_bytes = 512 * MIB, .address_bytes = 4096 * MIB}};
    pya_dptr ptrs[16];
    pya_dptr taken;
    world_init(&world, "");
    for (size_t i = 0; i < 16; i++) {
        ptrs[i] = take(&world, 20 * MIB, 0);
    }
    struct pya_device *dev = pya_sim_device(world.sim);
    const uint64_t taken_bytes = 4096 * MIB - world.heap->cards.open[0]->range_bytes - left_bytes;
    CHECK_OK(pya_device_range_reserve(dev, taken_bytes, &taken));
    for (size_t i = 0; i < 16; i += 2) {
        give(&world, ptrs[i]);
    }
    pya_dptr large = take(&world, 60 * MIB, 0);
    bool is_stitched = stat_of(world.heap, 0, "pyalloc_stitches") == 1;
    give(&world, large);
    for (size_t i = 1; i < 16; i += 2) {
        give(&world, ptrs[i]);
    }
    CHECK_OK(pya_device_range_release(dev, taken, taken_bytes));
    world_fini(&world);
    return is_stitched;
}

/* Without addresses for room behind it, a stitched range is only as long as it must be. */
static void
test_scarce_addresses(void) {
    CHECK(stitches_with(1024 * MIB));
    for (uint64_t mib = 60; mib < 120; mib += 4) {
        CHECK(stitches_with(mib * MIB));
    }
    CHECK(!stitches_with(58 * MIB)); /* and is served nevertheless */
}

/* Pools are captured into, dropped and succeeded, with eager work in between: what one leaves serves the next. */
static void
test_pools_come_and_go(void) {
    struct world world = {.config = {.capacity_bytes = 16384 * MIB}};
    size_t at_first = 0;
    world_init(&world, "");
    for (uint64_t n = 1; n <= 400; n++) {
        const struct pya_pool_id id = {n, 0};
        pya_dptr ptrs[8];
        CHECK_OK(pya_pool_retain(world.heap, 0, id, false));
        CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
        for (size_t i = 0; i < 8; i++) {
            ptrs[i] = take(&world, (10 + (n + i) * 7 % 11) * MIB, 0);
        }
        CHECK_OK(pya_pool_end(world.heap, 0, id));
        CHECK_OK(pya_pool_release(world.heap, 0, id));
        for (size_t i = 0; i < 8; i++) {
            give(&world, ptrs[i]);
        }
        CHECK_OK(pya_pool_release(world.heap, 0, id));
        pya_dptr eager = take(&world, (100 + n % 5 * 10) * MIB, 0);
        give(&world, eager);
        at_first = n == 10 ? reserved(&world) : at_first;
    }
    CHECK(reserved(&world) <= at_first + at_first / 4);
    world_fini(&world);
}

static bool
sweep_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {
        .config = {.capacity_bytes = 512 * MIB, .address_bytes = (uint64_t)1 << 34, .quiet = true}};
    pya_dptr first;
    pya_dptr last = 0;
    size_t live_before = fault_live();
    world_init(&world, options);
    CHECK_OK(pya_alloc(world.heap, 0, 512, 0, &first));
    sweep_arm(world.sim, nth, host, with);
    pya_status st = grow(&world, 12, &last);
    bool fired = sweep_disarm(world.sim, host);
    CHECK(fired || st == PYA_OK);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(grow(&world, 12, &last));
    give(&world, last);
    give(&world, first);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    CHECK_EQ(fault_live(), live_before);
    return fired;
}

static void
test_sweep(void) {
    sweep_all(sweep_once, "");
    sweep_all(sweep_once, "memory:tight");
}

/* A request for more than there is makes the remaining memory once, to see that it is not enough. */
static void
test_memory_is_made_in_vain_once(void) {
    enum { N_LIVE = 16, N_CACHED = 6 };
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    pya_dptr live[N_LIVE], cached[N_CACHED], ptr;
    world_init(&world, "");
    for (size_t i = 0; i < N_LIVE; i++) {
        live[i] = take(&world, 128 * MIB, 0);
    }
    for (size_t i = 0; i < N_CACHED; i++) {
        cached[i] = take(&world, 64 * MIB, i % 2 * 16); /* two streams */
    }
    for (size_t i = 0; i < N_CACHED; i++) {
        give(&world, cached[i]);
    }
    size_t n_free = (8192 * MIB - reserved(&world)) / PYA_PAGE;
    for (size_t bytes = 8000 * MIB; bytes > 6400 * MIB; bytes -= 100 * MIB) {
        uint64_t before = calls(&world, PYA_SIM_PAGE_CREATE);
        CHECK_EQ(pya_alloc(world.heap, 0, bytes, 0, &ptr), PYA_E_NOMEM);
        CHECK(calls(&world, PYA_SIM_PAGE_CREATE) - before <= n_free + 1);
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    }
    /* All that there is. */
    ptr = take(&world, 8192 * MIB - N_LIVE * 128 * MIB, 0);
    give(&world, ptr);
    for (size_t i = 0; i < N_LIVE; i++) {
        give(&world, live[i]);
    }
    world_fini(&world);
}

/* A driver that keeps its mapping tables in the card's own memory, and needs more of it for each mapping. */
static pya_status
map_if_room(struct pya_device *dev, pya_dptr addr, pya_page_handle page, size_t n_pages) {
    size_t free_bytes;
    size_t total_bytes;
    CHECK_OK(pya_device_mem_info(dev, &free_bytes, &total_bytes));
    return free_bytes == 0 ? PYA_E_NOMEM : world_opened.ops->map(dev, addr, page, n_pages);
}

/* On a full card there is no room for a mapping, though much is free in pieces: some of it goes back to the driver. */
static void
test_mappings_need_memory_too(void) {
    enum { N = 32 };
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr ptrs[N], small;
    world_init(&world, "");
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(&world, 32 * MIB, 0);
    }
    CHECK_EQ(reserved(&world), 1024 * MIB);
    for (size_t i = 0; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    world.ops.map = map_if_room;
    CHECK_EQ(pya_alloc(world.heap, 0, 512 * MIB, 0, &small), PYA_E_NOMEM); /* all that is free */
    pya_dptr large = take(&world, 384 * MIB, 0);
    CHECK(reserved(&world) >= 1024 * MIB - 64 * MIB);
    give(&world, large);
    for (size_t i = 1; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* memory:tight saves the last percent only if that takes little time.  If ranges are stitched over and over for
 * requests that never come again, a little more memory is made instead. */
static void
test_tight_gives_way(void) {
    struct world world = {.config = {.capacity_bytes = (size_t)64 << 30}};
    pya_dptr ptrs[2];
    world_init(&world, "memory:tight,mappings_per_page:1");
    (void)take(&world, (size_t)32 << 30, 0);
    for (size_t i = 0; i < 2; i++) {
        ptrs[i] = take(&world, 400 * MIB, 0);
        (void)take(&world, 2 * MIB, 0);
    }
    const size_t least = reserved(&world);
    give(&world, ptrs[0]);
    give(&world, ptrs[1]);
    size_t n = 0;
    for (; n < 2000 && reserved(&world) == least; n++) {
        give(&world, take(&world, (201 + n * 37 % 199) * PYA_PAGE, 0));
    }
    CHECK(n > 100 && n < 1000);
    CHECK(stat_of(world.heap, 0, "pyalloc_stitches") > 100);
    CHECK(reserved(&world) <= least + least / 32);
    world_fini(&world);
}

/* Above the level, what two streams left is given back for a new segment, if what one left is not enough. */
static void
test_segments_of_several_make_room(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    world_init(&world, "vmm:False,soft_limit:118MiB");
    (void)take(&world, 60 * MIB, 0);
    give(&world, take(&world, 20 * MIB, 16));
    give(&world, take(&world, 20 * MIB, 32));
    CHECK_EQ(reserved(&world), 100 * MIB);
    (void)take(&world, 60 * MIB, 0);
    CHECK_EQ(reserved(&world), 120 * MIB);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"tight_gives_way", test_tight_gives_way},
    {"segments_of_several_make_room", test_segments_of_several_make_room},
    {"growing_tensor_is_extended", test_growing_tensor_is_extended},
    {"rising_memory_is_not_stitched", test_rising_memory_is_not_stitched},
    {"large_requests_of_a_small_program", test_large_requests_of_a_small_program},
    {"repeated_tensors_settle", test_repeated_tensors_settle},
    {"ranges_waste_little", test_ranges_waste_little},
    {"little_memory_grows_slowly", test_little_memory_grows_slowly},
    {"scarce_addresses", test_scarce_addresses},
    {"pools_come_and_go", test_pools_come_and_go},
    {"memory_is_made_in_vain_once", test_memory_is_made_in_vain_once},
    {"mappings_need_memory_too", test_mappings_need_memory_too},
    {"sweep", test_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
