/* The allocator on the simulated device: the input is some bytes of settings (core_settings.c), then operations,
 * compared with a naive model after each.
 *
 * What must hold: no two live blocks share a byte, through any addresses (the sim's shadow); work of two streams never
 * meets in one block, nothing is unmapped under unfinished work (the sim's races); addresses are aligned; a call fails
 * only if something was made to fail; a failed call changes nothing; statistics are exact; after the last free nothing
 * is left, on the device or in host memory. */
#include "core_model.h"

/* ---- hooks ---- */

static void op_next(struct world *world, unsigned kind);

static bool
is_locked(const struct world *world) {
    bool is_any = false;
    for (int d = 0; d < N_DEVICES; d++) {
        const struct pya_card *card = pya_heap_open_card(world->heap, d);
        is_any = is_any || (card != NULL && pya_lock_is_held(&card->lock));
    }
    return is_any;
}

/* While the device or a pool's allocator is waited for without a lock, other threads go on. */
void
world_meanwhile(struct world *world) {
    if (world->has_meanwhile && world->depth == 0 && !world->has_host_fault &&
        world->open_fails == 0 && !is_locked(world)) {
        world->depth = HOOK_DEPTH;
        world->is_meanwhile = true;
        for (unsigned n = fuzz_byte(&world->in) % 8; n > 0; n--) {
            SAY("meanwhile: ");
            op_next(world, fuzz_byte(&world->in) % 64);
        }
        world->is_meanwhile = false;
        world->depth = 0;
    }
}

static pya_status
world_sync(struct pya_device *dev) {
    struct world *world = filter_world;
    pya_status st = world->device_sync(dev);
    if (st == PYA_OK) {
        streams_finish_abroad(world, dev->index);
    }
    if (world->may_fork && fuzz_byte(&world->in) % 4 == 0) {
        world_fork(world); /* in the child, another thread may have held the card's lock */
    }
    world_meanwhile(world);
    return st;
}

static pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    if (world->open_fails > 0) {
        world->open_fails--;
        return PYA_E_DEVICE;
    }
    pya_status st = pya_sim_create(&world->configs[index], index, &world->sims[index]);
    if (st == PYA_OK) {
        for (unsigned i = 0; i < N_STREAMS; i++) {
            world->contexts[index][i] = index;
        }
        *out = pya_sim_device(world->sims[index]);
        world->device_sync = (*out)->ops->device_sync;
        world->device_ops[index] = *(*out)->ops;
        world->device_ops[index].device_sync = world_sync;
        (*out)->ops = &world->device_ops[index];
    }
    return st;
}

/* A program may do anything from within a hook: free, allocate. */
static bool
world_pressure(void *arg, int device, size_t bytes) {
    struct world *world = arg;
    REQUIRE(device >= 0 && device < N_DEVICES && bytes > 0);
    if (world->depth >= HOOK_DEPTH || world->n_live == 0 || fuzz_byte(&world->in) % 2 == 0) {
        return false;
    }
    world->depth++;
    op_free(world);
    if (fuzz_byte(&world->in) % 4 == 0) {
        op_alloc(world);
    }
    world->depth--;
    return true;
}

static void
world_oom(void *arg, int device, size_t bytes) {
    struct world *world = arg;
    REQUIRE(device >= 0 && device < N_DEVICES && bytes > 0);
    if (world->depth < HOOK_DEPTH && fuzz_byte(&world->in) % 8 == 1) {
        world->depth++;
        op_alloc(world);
        world->depth--;
    }
}

/* ---- operations ---- */

/* The next operation, with one of its host allocations failing. */
static void
op_host_fault(struct world *world) {
    uint8_t nth = fuzz_byte(&world->in);
    unsigned kind = fuzz_byte(&world->in) % 28;
    /* Not those whose own bookkeeping allocates in the model or the sim. */
    world->has_host_fault = true;
    fault_arm(1 + nth % 8);
    if (kind < 12) {
        uint8_t where = fuzz_byte(&world->in);
        size_t bytes = size_of(&world->in);
        struct live live = {
            .requested = bytes, .device = where % N_DEVICES, .stream = stream_of(where >> 1)};
        pya_status st = world->n_live < MAX_LIVE && bytes > 0
                            ? pya_alloc(world->heap, live.device, bytes, live.stream, &live.ptr)
                            : PYA_E_NOMEM;
        (void)fault_disarm();
        if (st == PYA_OK) {
            live_add(world, live);
        }
    } else if (kind < 14) {
        op_snapshot(world);
    } else if (kind < 18) {
        op_pool(world);
    } else if (kind < 20) {
        op_history(world);
    } else if (kind < 22) {
        op_give_back(world);
    } else if (kind < 24) {
        op_record(world);
    } else if (kind < 26) {
        op_steer(world);
    } else {
        op_rare(world);
    }
    (void)fault_disarm();
    world->has_host_fault = false;
    /* A device whose card could not be created was opened and closed again. */
    for (int d = 0; d < N_DEVICES; d++) {
        world->sims[d] = pya_heap_open_card(world->heap, d) == NULL ? NULL : world->sims[d];
    }
}

/* Programs repeat themselves: the bytes before are run again, several times. */
static void
op_again(struct world *world) {
    const uint8_t *at = world->in.at;
    size_t n_back = 8 + fuzz_byte(&world->in) % 128;
    unsigned n_times = 4 + fuzz_byte(&world->in) % 4 * 16;
    size_t most = (size_t)(at - world->begin);
    if (world->depth > 0 || (world->again_at != NULL && at < world->again_at)) {
        return; /* one at a time */
    }
    if (at != world->again_at) {
        world->again_at = at;
        world->n_again = n_times;
    }
    if (world->n_again > 0) {
        world->n_again--;
        world->in.at = at - (n_back < most ? n_back : most);
    }
}

static void
op_next(struct world *world, unsigned kind) {
    /* So many of 64. */
    static const struct {
        unsigned n;
        void (*run)(struct world *);
    } ops[] = {{20, op_alloc},     {16, op_free},    {6, op_record},  {3, op_finish},
               {1, op_give_back},  {1, op_steer},    {2, op_limit},   {4, op_pool},
               {2, op_fault},      {1, op_query},    {1, op_history}, {1, op_snapshot},
               {2, op_host_fault}, {1, op_bad_free}, {1, op_rare},    {1, op_again},
               {1, op_check}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (kind < ops[i].n) {
            ops[i].run(world);
            return;
        }
        kind -= ops[i].n;
    }
    REQUIRE(false);
}

/* ---- a run ---- */

static void
world_init(struct world *world) {
    settings_take(world);
    const bool has_places = world->has_places;
    struct pya_hooks hooks = {
        .arg = world,
        .open_device = world_open,
        .capture_context = context_capture,
        .retain_context = context_retain,
        .release_context = context_release,
        .context_of_free = has_places ? context_of_free : NULL,
        .context_key = has_places ? context_key : NULL,
        .describe_context = has_places ? context_describe : NULL,
        .on_pressure = world->has_pressure ? world_pressure : NULL,
        .on_oom = world->has_pressure ? world_oom : NULL,
    };
    REQUIRE_EQ(pya_heap_create(&world->options, &hooks, &world->heap), PYA_OK);
}

/* Every run must end well: everything is given back, and the device saw no violation. */
static void
world_end(struct world *world) {
    world->open_fails = 0;
    for (int d = 0; d < N_DEVICES; d++) {
        if (world->sims[d] != NULL) {
            (void)pya_sim_fail_clear(world->sims[d]);
            captures_end(world, d);
            REQUIRE_EQ(pya_reserve(world->heap, d, 0, 0), PYA_OK);
        }
        for (int i = 0; i < N_POOLS; i++) {
            if (world->pools[d][i].is_active) {
                pool_end(world, d, i);
            }
            while (world->pools[d][i].n_users > 0) {
                pool_release(world, d, i);
            }
        }
    }
    for (int d = 0; d < N_DEVICES; d++) {
        if (world->sims[d] != NULL) { /* no stream counts as capturing any more */
            pya_sim_advance_clock(world->sims[d], UINT64_C(20000000000000));
        }
    }
    check_all(world, false);
    while (world->n_imports > 0) {
        import_close(world, 0);
    }
    while (world->n_live > 0) {
        op_free(world);
    }
    REQUIRE_EQ(pya_empty_cache(world->heap, -1), PYA_OK);
    check_all(world, true);
    for (int d = 0; d < N_DEVICES; d++) {
        struct pya_sim_state state;
        REQUIRE_EQ(stat_of(world->heap, d, "reserved_bytes.all.current"), 0);
        REQUIRE_EQ(stat_of(world->heap, d, "active.all.current"), 0);
        REQUIRE_EQ(stat_of(world->heap, d, "segment.all.current"), 0);
        REQUIRE_EQ(pya_pool_list(world->heap, d, NULL, 0), 0);
        if (world->sims[d] != NULL) {
            pya_sim_query(world->sims[d], &state);
            REQUIRE_EQ(state.used_bytes, 0);
            REQUIRE_EQ(state.n_mappings, 0);
            REQUIRE_EQ(pya_sim_check(world->sims[d]), 0);
        }
    }
}

static void
run(const uint8_t *data, size_t n, struct plan *plan, bool is_rehearsal) {
    static struct world world;
    memset(&world, 0, sizeof world);
    world.n_host = fault_live();
    world.plan = plan;
    world.is_rehearsal = is_rehearsal;
    filter_world = &world;
    world.in = (struct fuzz_input){data, data + n};
    world.begin = data;
    world_init(&world);
    for (unsigned i = 0; i < MAX_OPS && fuzz_left(&world.in) > 0; i++) {
        op_next(&world, fuzz_byte(&world.in) % 64);
    }
    world.has_meanwhile = false;
    world.may_fork = false;
    /* Half of the runs leave it to destroy; then only host memory can be checked. */
    if (n % 2 == 0) {
        world_end(&world);
    }
    pya_heap_destroy(world.heap);
    REQUIRE_EQ(world.n_filters, 0);
    REQUIRE_EQ(world.n_contexts, 0);
    REQUIRE_EQ(fault_live(), world.n_host);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct plan plan;
    const bool has_plan = settings_want_plan(data, n);
    is_verbose = getenv("PYA_FUZZ_VERBOSE") != NULL;
    memset(&plan, 0, sizeof plan);
    if (has_plan) {
        run(data, n, &plan, true);
        plan_finish(&plan, data);
    }
    run(data, n, has_plan ? &plan : NULL, false);
    return 0;
}
