/* The allocator on the simulated device: the input is a settings byte or two,
 * then operations, held against a naive model after each.
 *
 * What must hold: no two live blocks share a byte, through whatever addresses
 * (the sim's shadow); work of two streams never meets in one block, nothing is
 * unmapped under unfinished work (the sim's races); addresses are aligned; a
 * call fails only where something was made to fail; a failed call changes
 * nothing; statistics are exact; after the last free nothing is left, on the
 * device or in host memory. */
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

/* Where no lock is held while the device is waited for, other threads go on. */
static pya_status
world_sync(struct pya_device *dev) {
    struct world *world = filter_world;
    pya_status st = world->device_sync(dev);
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
    return st;
}

static pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    if (world->open_fails > 0) {
        world->open_fails--;
        return PYA_E_DEVICE;
    }
    pya_status st = pya_sim_create(&world->config, index, &world->sims[index]);
    if (st == PYA_OK) {
        *out = pya_sim_device(world->sims[index]);
        world->device_sync = (*out)->ops->device_sync;
        world->device_ops = *(*out)->ops;
        world->device_ops.device_sync = world_sync;
        (*out)->ops = &world->device_ops;
    }
    return st;
}

/* A program may do anything from within: free, allocate. */
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

/* The operation that follows, with one of its host allocations failing. */
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
    /* A device whose card could not be made was opened and closed again. */
    for (int d = 0; d < N_DEVICES; d++) {
        world->sims[d] = pya_heap_open_card(world->heap, d) == NULL ? NULL : world->sims[d];
    }
}

/* Programs repeat themselves: what the bytes before say is done again, some times. */
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

/* A layout of what the input asks for, as far as that can be told beforehand; places follow one another, and begin anew
 * over the first ones. */
static void
world_lay(struct world *world) {
    struct fuzz_input in = world->in;
    uint64_t end = 0;
    size_t n = 0;
    while (n < MAX_PLACES && fuzz_left(&in) > 0) {
        if (fuzz_byte(&in) % 64 >= 20) { /* no op_alloc() */
            continue;
        }
        (void)fuzz_byte(&in);
        uint64_t bytes = pya_round_up(size_of(&in), PYA_ALIGN);
        if (bytes == 0 || bytes > PYA_REQUEST_MAX) {
            continue;
        }
        uint64_t offset = end % (16 * PYA_PAGE);
        end += bytes;
        offset = n % 8 == 7 ? PYA_LAYOUT_ANYWHERE : offset;
        world->places[n++] = (struct pya_layout_place){offset, bytes, bytes / PYA_ALIGN % 5};
    }
    world->layout = (struct pya_layout){world->places, n, n / 2, PYA_LAYOUT_EVERY_DEVICE, NULL};
    world->options.layouts = &world->layout;
}

static void
world_init(struct world *world) {
    static const char *const options[] = {
        "",
        "memory:tight",
        "memory:fast",
        "vmm:False",
        "mappings_per_page:2",
        "memory:tight,mappings_per_page:1",
        "roundup_power2_divisions:4",
        "vmm:False,max_split_size:20MB",
        "limit:64MB",
        "per_process_memory_fraction:0.5,memory:tight",
        "shared_pages:False",
        "shared_pages:False,memory:tight,mappings_per_page:2",
        "soft_limit:40MB,garbage_collection_threshold:0.6",
        "keep_free:30MB,trim_after:2,limit:80MB",
    };
    uint8_t settings = fuzz_byte(&world->in);
    uint8_t device = fuzz_byte(&world->in);
    char message[200];
    pya_options_init(&world->options);
    REQUIRE_EQ(
        pya_options_parse(
            &world->options, options[settings % (sizeof options / sizeof *options)], message,
            sizeof message),
        PYA_OK);
    world->config = (struct pya_sim_config){
        .capacity_bytes = ((size_t)1 + device / 16) * 12 * PYA_PAGE,
        .address_bytes = (uint64_t)1 << 33,
        .work = device % 4 == 0   ? PYA_SIM_WORK_AT_ONCE
                : device % 4 == 1 ? PYA_SIM_WORK_DELAYED
                                  : PYA_SIM_WORK_BY_HAND,
        .work_delay = 3,
        .no_vmm = (device & 12) == 12,
        .quiet = !is_verbose,
    };
    world->has_meanwhile = (settings & 0x20) != 0;
    world->has_pressure = (settings & 0x40) != 0;
    if ((settings & 0x10) != 0) {
        world_lay(world);
    }
    world->open_fails = settings >= 0xF0 ? settings & 3U : 0;
    struct pya_hooks hooks = {
        .arg = world,
        .open_device = world_open,
        .capture_context = context_capture,
        .retain_context = context_retain,
        .release_context = context_release,
        .on_pressure = (settings & 0x40) != 0 ? world_pressure : NULL,
        .on_oom = (settings & 0x40) != 0 ? world_oom : NULL,
    };
    REQUIRE_EQ(pya_heap_create(&world->options, &hooks, &world->heap), PYA_OK);
}

/* Everything ends well, however it went before: all is given back, and the
 * device was used by its rules. */
static void
world_end(struct world *world) {
    world->open_fails = 0;
    for (int d = 0; d < N_DEVICES; d++) {
        if (world->sims[d] != NULL) {
            (void)pya_sim_fail_clear(world->sims[d]);
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
        if (world->sims[d] != NULL) { /* nobody is taken to be capturing any more */
            pya_sim_advance_clock(world->sims[d], UINT64_C(20000000000000));
        }
    }
    check_all(world, false);
    while (world->n_imports > 0) {
        import_close(world, 0);
    }
    REQUIRE_EQ(pya_import_close(world->heap, 1), PYA_E_FOREIGN); /* those that could not go then */
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

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct world world;
    is_verbose = getenv("PYA_FUZZ_VERBOSE") != NULL;
    size_t n_host = fault_live();
    memset(&world, 0, sizeof world);
    filter_world = &world;
    world.in = (struct fuzz_input){data, data + n};
    world.begin = data;
    world_init(&world);
    for (unsigned i = 0; i < MAX_OPS && fuzz_left(&world.in) > 0; i++) {
        op_next(&world, fuzz_byte(&world.in) % 64);
    }
    world.has_meanwhile = false;
    /* Half of the runs leave it to destroy; then only host memory can be looked
   * at. */
    if (n % 2 == 0) {
        world_end(&world);
    }
    pya_heap_destroy(world.heap);
    REQUIRE_EQ(world.n_filters, 0);
    REQUIRE_EQ(world.n_contexts, 0);
    REQUIRE_EQ(fault_live(), n_host);
    return 0;
}
