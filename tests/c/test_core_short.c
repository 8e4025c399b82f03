/* Running out of memory on the simulated device: callbacks, what the error says, and that nothing else changes. */
#include <pthread.h>

#include "fault.h"
#include "sweep.h"
#include "world.h"

struct pressure {
    struct world world;
    pya_dptr spare[4];
    int n_spare;
    int n_calls;
    int depth;
    bool lies;      /* claims that it helped, and did not */
    bool allocates; /* requests too much itself */
};

static bool
pressure_call(void *arg, int device, size_t bytes) {
    struct pressure *pressure = arg;
    pya_dptr ptr;
    CHECK_EQ(device, 0);
    CHECK(bytes > 0);
    CHECK_EQ(pressure->depth, 0);
    pressure->depth++;
    pressure->n_calls++;
    if (pressure->allocates) {
        give(&pressure->world, take(&pressure->world, 512, 0));
        CHECK_EQ(pya_alloc(pressure->world.heap, 0, 4096 * MIB, 0, &ptr), PYA_E_NOMEM);
    }
    bool helps = pressure->n_spare > 0;
    if (helps) {
        give(&pressure->world, pressure->spare[--pressure->n_spare]);
    }
    pressure->depth--;
    return helps || pressure->lies;
}

static pya_status
pressure_open(void *arg, int index, struct pya_device **out) {
    return world_open(&((struct pressure *)arg)->world, index, out);
}

static void
pressure_init(struct pressure *pressure) {
    struct pya_options options;
    struct pya_hooks hooks = {
        .arg = pressure, .open_device = pressure_open, .on_pressure = pressure_call};
    pressure->world.config.capacity_bytes = 256 * MIB;
    pya_options_init(&options);
    CHECK_OK(pya_heap_create(&options, &hooks, &pressure->world.heap));
    for (int i = 0; i < 4; i++) {
        pressure->spare[pressure->n_spare++] = take(&pressure->world, 50 * MIB, 0);
    }
}

static void
test_callbacks_save_a_request(void) {
    struct pressure pressure = {.allocates = true};
    pressure_init(&pressure);
    pya_dptr ptr = take(&pressure.world, 140 * MIB, 0);
    CHECK_EQ(pressure.n_calls, 2);
    CHECK_EQ(stat_of(pressure.world.heap, 0, "pyalloc_pressure_calls"), 2);
    CHECK_EQ(stat_of(pressure.world.heap, 0, "pyalloc_saved_by_callback"), 1);
    CHECK_EQ(stat_of(pressure.world.heap, 0, "num_ooms"), 2); /* the callback's own requests */
    give(&pressure.world, ptr);
    world_fini(&pressure.world);
}

/* Callbacks are called at most eight times for one request, even if each call frees something. */
static void
test_callbacks_are_asked_eight_times(void) {
    struct pressure pressure = {.allocates = true, .lies = true};
    pya_dptr ptr;
    pressure_init(&pressure);
    pressure.n_spare = 0; /* they stay */
    CHECK_EQ(pya_alloc(pressure.world.heap, 0, 250 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(pressure.n_calls, 8);
    world_fini(&pressure.world);
}

static void
test_callbacks_that_do_not_help_end(void) {
    struct pressure pressure = {.lies = true};
    struct pya_oom_info info;
    pya_dptr ptr;
    pressure_init(&pressure);
    (void)take(&pressure.world, 10 * MIB, 0);
    CHECK_EQ(pya_alloc(pressure.world.heap, 0, 256 * MIB + 1, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(pressure.n_calls, 0); /* the card does not become larger */
    CHECK_EQ(pya_alloc(pressure.world.heap, 0, 250 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(pressure.n_spare, 0);
    CHECK_EQ(pressure.n_calls, 5); /* four that helped, one that did not */
    pya_heap_oom_info(pressure.world.heap, &info);
    CHECK_EQ(info.requested_bytes, 250 * MIB);
    CHECK_EQ(info.n_holders, 1);
    world_fini(&pressure.world);
}

/* Threads that run short together, while callbacks free blocks of all of them. */
enum { N_THREADS = 6, N_SHELF = 64 };

struct crowd {
    struct world world;
    pya_dptr shelf[N_SHELF]; /* atomic */
};

static bool
crowd_call(void *arg, int device, size_t bytes) {
    struct crowd *crowd = arg;
    int n = 0;
    CHECK(device == 0 && bytes > 0);
    for (int i = 0; i < N_SHELF && n < 8; i++) {
        pya_dptr ptr = __atomic_exchange_n(&crowd->shelf[i], 0, __ATOMIC_ACQ_REL);
        CHECK_OK(pya_free(crowd->world.heap, ptr));
        n += ptr != 0;
    }
    return n > 0;
}

static void *
crowd_thread(void *arg) {
    struct crowd *crowd = arg;
    uint64_t seed = check_seed() + (uint64_t)(uintptr_t)&seed;
    for (int i = 0; i < 400; i++) {
        pya_dptr ptr = 0;
        size_t bytes = (1 + check_below(&seed, 24)) * MIB;
        pya_status st = pya_alloc(crowd->world.heap, 0, bytes, 16 * check_below(&seed, 3), &ptr);
        CHECK(st == PYA_OK || st == PYA_E_NOMEM);
        ptr =
            __atomic_exchange_n(&crowd->shelf[check_below(&seed, N_SHELF)], ptr, __ATOMIC_ACQ_REL);
        CHECK_OK(pya_free(crowd->world.heap, ptr));
    }
    return NULL;
}

static pya_status
crowd_open(void *arg, int index, struct pya_device **out) {
    return world_open(&((struct crowd *)arg)->world, index, out);
}

static void
test_callbacks_of_many_threads(void) {
    struct crowd crowd = {.world.config = {.capacity_bytes = 256 * MIB}};
    struct pya_options options;
    struct pya_hooks hooks = {.arg = &crowd, .open_device = crowd_open, .on_pressure = crowd_call};
    pthread_t threads[N_THREADS];
    pya_options_init(&options);
    options.soft_limit = 64 * MIB;
    CHECK_OK(pya_heap_create(&options, &hooks, &crowd.world.heap));
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, crowd_thread, &crowd), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK(stat_of(crowd.world.heap, 0, "pyalloc_saved_by_callback") > 0);
    for (int i = 0; i < N_SHELF; i++) {
        give(&crowd.world, crowd.shelf[i]);
    }
    CHECK_EQ(stat_of(crowd.world.heap, 0, "allocation.all.current"), 0);
    world_fini(&crowd.world);
}

/* Counters of attempts may differ; nothing else. */
static bool
may_change(const char *key) {
    return strncmp(key, "num_", 4) == 0 || strncmp(key, "pyalloc_", 8) == 0 ||
           strncmp(key, "reserved_bytes", 14) == 0 || strncmp(key, "inactive_split", 14) == 0 ||
           strncmp(key, "segment", 7) == 0;
}

static void
test_out_of_memory_changes_nothing(void) {
    static const char *const options[] = {"", "memory:tight", "memory:fast", "vmm:False"};
    for (size_t k = 0; k < 4; k++) {
        struct world world = {.config = {.capacity_bytes = 256 * MIB, .no_vmm = k == 3}};
        int64_t before[PYA_N_STATS];
        int64_t after[PYA_N_STATS];
        pya_dptr ptrs[20];
        pya_dptr ptr = 1;
        world_init(&world, options[k]);
        for (size_t i = 0; i < 20; i++) {
            ptrs[i] = take(&world, (1 + i % 7) * 3 * MIB, 16 * (i % 3));
        }
        for (size_t i = 0; i < 20; i += 3) {
            CHECK_OK(pya_record_stream(world.heap, ptrs[i], 64));
            give(&world, ptrs[i]);
        }
        CHECK_EQ(pya_alloc(world.heap, 0, 250 * MIB, 0, &ptr), PYA_E_NOMEM);
        CHECK(stat_of(world.heap, 0, "num_sync_all_streams") > 0);
        CHECK(stat_of(world.heap, 0, "num_alloc_retries") > 0);
        CHECK_OK(pya_stats_get(world.heap, 0, before));
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(pya_alloc(world.heap, 0, 250 * MIB, 16 * (pya_stream)i, &ptr), PYA_E_NOMEM);
            CHECK_EQ(ptr, 1);
            CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        }
        CHECK_OK(pya_stats_get(world.heap, 0, after));
        for (size_t i = 0; i < PYA_N_STATS; i++) {
            if (!may_change(pya_stat_key(i)) && !CHECK_EQ(before[i], after[i])) {
                fprintf(stderr, "    %s, %s\n", options[k], pya_stat_key(i));
            }
        }
        for (size_t i = 0; i < 20; i++) {
            if (i % 3 != 0) {
                give(&world, ptrs[i]);
            }
        }
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(reserved(&world), 0);
        give(&world, take(&world, 250 * MIB, 0));
        world_fini(&world);
    }
}

static void
test_holders(void) {
    struct world world = {.config = {.capacity_bytes = 256 * MIB}};
    struct pya_pool_id id = {0, 9};
    struct pya_oom_info info;
    char text[PYA_OOM_TEXT_BYTES];
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr a = take(&world, 30 * MIB, 0);
    pya_dptr b = take(&world, 40 * MIB, 0);
    pya_dptr c = take(&world, 50 * MIB, 32);
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    pya_dptr d = take(&world, 20 * MIB, 0);
    pya_dptr e = take(&world, 8 * MIB, 48);
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    CHECK_EQ(pya_alloc(world.heap, 0, 200 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    if (CHECK_EQ(info.n_holders, 3)) {
        CHECK_EQ(info.holders[0].bytes, 70 * MIB);
        CHECK_EQ(info.holders[0].n_blocks, 2);
        CHECK(strcmp(info.holders[0].what, "the default pool on the default stream") == 0);
        CHECK_EQ(info.holders[1].bytes, 50 * MIB);
        CHECK(strcmp(info.holders[1].what, "the default pool on stream 0x20") == 0);
        CHECK_EQ(info.holders[2].bytes, 20 * MIB);
        CHECK(strcmp(info.holders[2].what, "pool (0, 9) on the default stream") == 0);
    }
    int length = pya_oom_text(&info, text, sizeof text);
    CHECK(length > 0 && (size_t)length < sizeof text);
    CHECK(
        strstr(
            text, "Held: 70.00 MiB in 2 blocks by the default pool on the default stream; "
                  "50.00 MiB in 1 block by ") != NULL);
    CHECK(strstr(text, "Next: use a smaller batch") != NULL);
    const pya_dptr all[] = {a, b, c, d, e};
    for (size_t i = 0; i < 5; i++) {
        give(&world, all[i]);
    }
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    world_fini(&world);
}

/* A table with as many places as there are blocks would be slow to sort under the lock. */
static void
test_many_blocks_are_told_with_little_memory(void) {
    struct world world = {.config = {.capacity_bytes = 256 * MIB}};
    pya_dptr ptr;
    world_init(&world, "");
    for (size_t i = 0; i < 4000; i++) {
        (void)take(&world, 512, 0);
    }
    const size_t before = fault_bytes();
    CHECK_EQ(pya_alloc(world.heap, 0, 300 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK(fault_bytes() - before < (1 << 16));
    world_fini(&world);
}

/* Freed, but in use by a stream that cannot be waited for: nobody holds it, and the report names it. */
static void
test_pending_memory_is_a_holder(void) {
    enum { ONE = 16 };
    struct world world = {.config = {.capacity_bytes = 256 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    struct pya_oom_info info;
    pya_dptr ptr;
    world_init(&world, "");
    pya_dptr shared = take(&world, 100 * MIB, 0);
    pya_dptr kept = take(&world, 30 * MIB, 0);
    CHECK_OK(pya_record_stream(world.heap, shared, ONE));
    CHECK_OK(pya_sim_use(world.sim, ONE, shared, 100 * MIB));
    give(&world, shared);
    pya_sim_set_capturing(world.sim, 0, true);
    CHECK_EQ(pya_alloc(world.heap, 0, 200 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_sim_set_capturing(world.sim, 0, false);
    pya_heap_oom_info(world.heap, &info);
    if (CHECK_EQ(info.n_holders, 2)) {
        CHECK(strcmp(info.holders[0].what, "freed tensors that other streams still use") == 0);
        CHECK_EQ(info.holders[0].bytes, 100 * MIB);
        CHECK_EQ(info.holders[0].n_blocks, 1);
    }
    pya_sim_finish_all(world.sim);
    give(&world, kept);
    world_fini(&world);
}

/* If stacks are recorded, blocks from one place in the program are one holder, however many places there are. */
enum { PLACES = 100 };

static char place_contexts[PLACES];
static size_t place_now;

static void *
place_capture(void *arg, bool with_stack) {
    (void)arg;
    (void)with_stack;
    return &place_contexts[place_now];
}

static void
place_ignore(void *arg, void *context) {
    (void)arg;
    (void)context;
}

static uint64_t
place_key(void *arg, void *context) {
    (void)arg;
    return 1000 + (uint64_t)((char *)context - place_contexts);
}

static bool
place_describe(void *arg, void *context, char *text, size_t text_bytes) {
    (void)snprintf(text, text_bytes, "line %zu", (size_t)(place_key(arg, context) - 1000));
    return true;
}

static void
test_places_are_holders(void) {
    struct world world = {
        .config = {.capacity_bytes = 512 * MIB},
        .hooks = {
            .capture_context = place_capture,
            .retain_context = place_ignore,
            .release_context = place_ignore,
            .context_key = place_key,
            .describe_context = place_describe}};
    struct pya_oom_info info;
    pya_dptr ptrs[3 * PLACES];
    pya_dptr ptr;
    world_init(&world, "");
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 10, 0));
    for (size_t i = 0; i < 3 * PLACES; i++) {
        place_now = i % PLACES;
        ptrs[i] = take(&world, place_now == 42 ? 3 * MIB : MIB, 0);
    }
    CHECK_EQ(pya_alloc(world.heap, 0, 500 * MIB, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    if (CHECK_EQ(info.n_holders, 3)) {
        CHECK(strstr(info.holders[0].what, "line 42") != NULL);
        CHECK_EQ(info.holders[0].bytes, 9 * MIB);
        CHECK_EQ(info.holders[0].n_blocks, 3);
        CHECK_EQ(info.holders[1].bytes, 3 * MIB);
    }
    for (size_t i = 0; i < 3 * PLACES; i++) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* A request larger than the card counts as one retry and one out of memory, as in torch. */
static void
test_impossible_request_is_counted(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {.config = {.capacity_bytes = 256 * MIB}};
        pya_dptr ptr;
        world_init(&world, options[i]);
        CHECK_EQ(pya_alloc(world.heap, 0, 512 * MIB, 0, &ptr), PYA_E_NOMEM);
        CHECK_EQ(stat_of(world.heap, 0, "num_alloc_retries"), 1);
        CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 1);
        world_fini(&world);
    }
}

/* A request that the card or its limit could never hold costs nobody a wait or cached memory. */
static void
test_impossible_request_changes_nothing(void) {
    static const char *const options[] = {
        "", "vmm:False", "limit:100MiB", "limit:100MiB,vmm:False"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        struct world world = {.config = {.capacity_bytes = 128 * MIB}};
        pya_dptr ptr;
        world_init(&world, options[i]);
        (void)take(&world, 20 * MIB, 0);
        give(&world, take(&world, 40 * MIB, 0));
        give(&world, take(&world, 20 * MIB, 16));
        uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
        int64_t n_taken = stat_of(world.heap, 0, "pyalloc_page_transfers");
        size_t most = reserved(&world);
        CHECK_EQ(pya_alloc(world.heap, 0, (i < 2 ? 130 : 102) * MIB, 0, &ptr), PYA_E_NOMEM);
        CHECK_EQ(stat_of(world.heap, 0, "num_sync_all_streams"), 0);
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_page_transfers"), n_taken);
        CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits);
        CHECK_EQ(reserved(&world), most);
        world_fini(&world);
    }
}

/* But the cache may hold more than a limit that was lowered since. */
static void
test_more_than_the_limit_is_cached(void) {
    struct world world = {.config = {.capacity_bytes = 128 * MIB}};
    world_init(&world, "memory:tight");
    pya_dptr low = take(&world, 30 * MIB, 0);
    pya_dptr between = take(&world, 2 * MIB, 0);
    pya_dptr high = take(&world, 30 * MIB, 0);
    CHECK_OK(pya_set_limit(world.heap, 0, PYA_LIMIT_HARD, 40 * MIB));
    give(&world, low);
    give(&world, high);
    (void)take(&world, 50 * MIB, 0);
    give(&world, between);
    world_fini(&world);
}

/* ---- every call may fail ---- */

enum { SWEEP_HELD = 10 };

static void
sweep_program(struct world *world, pya_dptr *held) {
    struct pya_pool_id id = {1, 2};
    pya_dptr gaps[SWEEP_HELD] = {0};
    (void)!pya_reserve(world->heap, 0, 16 * MIB, 16);
    for (size_t i = 0; i < SWEEP_HELD; i++) {
        (void)!pya_alloc(world->heap, 0, 4 * MIB, 0, &gaps[i]);
        (void)!pya_alloc(world->heap, 0, 4 * MIB, 0, &held[i]);
    }
    for (size_t i = 0; i < SWEEP_HELD; i++) {
        (void)!pya_free(world->heap, gaps[i]);
    }
    for (int i = 0; i < 3; i++) {
        pya_dptr ptr = 0;
        pya_sim_advance_clock(world->sim, UINT64_C(2000000000));
        (void)!pya_alloc(world->heap, 0, (size_t)(6 + 2 * i) * MIB, 0, &ptr);
        (void)!pya_free(world->heap, ptr);
    }
    (void)!pya_set_limit(world->heap, 0, PYA_LIMIT_HARD, 70 * MIB);
    (void)!pya_trim(world->heap, 0, 50 * MIB);
    if (pya_pool_begin(world->heap, 0, id, (struct pya_stream_filter){0}) == PYA_OK) {
        pya_dptr ptr = 0;
        (void)!pya_pool_set_limit(world->heap, 0, id, 8 * MIB);
        (void)!pya_alloc(world->heap, 0, 10 * MIB, 0, &ptr);
        (void)!pya_free(world->heap, ptr);
        (void)!pya_pool_end(world->heap, 0, id);
        (void)!pya_pool_release(world->heap, 0, id);
    }
    pya_dptr ptr = 0;
    (void)!pya_alloc(world->heap, 0, 300 * MIB, 0, &ptr);
}

static bool
sweep_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {
        .config = {.capacity_bytes = 128 * MIB, .address_bytes = (uint64_t)1 << 34, .quiet = true}};
    pya_dptr held[SWEEP_HELD] = {0};
    size_t live_before = fault_live();
    world_init(&world, options);
    pya_dptr first = take(&world, 512, 0);
    sweep_arm(world.sim, nth, host, with);
    sweep_program(&world, held);
    bool fired = sweep_disarm(world.sim, host);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    for (size_t i = 0; i < SWEEP_HELD; i++) {
        give(&world, held[i]);
    }
    give(&world, first);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    CHECK_EQ(fault_live(), live_before);
    return fired;
}

static void
test_sweep(void) {
    static const char *const options[] = {
        "soft_limit:40MiB,trim_after:1", "garbage_collection_threshold:0.2,memory:tight",
        "keep_free:100MiB,trim_after:1", "trim_after:1,vmm:False"};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        sweep_all(sweep_once, options[i]);
    }
}

static const struct check_case cases[] = {
    {"callbacks_save_a_request", test_callbacks_save_a_request},
    {"callbacks_are_asked_eight_times", test_callbacks_are_asked_eight_times},
    {"callbacks_that_do_not_help_end", test_callbacks_that_do_not_help_end},
    {"callbacks_of_many_threads", test_callbacks_of_many_threads},
    {"out_of_memory_changes_nothing", test_out_of_memory_changes_nothing},
    {"holders", test_holders},
    {"many_blocks", test_many_blocks_are_told_with_little_memory},
    {"pending_memory_is_a_holder", test_pending_memory_is_a_holder},
    {"places_are_holders", test_places_are_holders},
    {"impossible_request_is_counted", test_impossible_request_is_counted},
    {"impossible_request_changes_nothing", test_impossible_request_changes_nothing},
    {"more_than_the_limit_is_cached", test_more_than_the_limit_is_cached},
    {"sweep", test_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
