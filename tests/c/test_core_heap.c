/* The whole allocator on the simulated device: random operations against a model, faults, the promises of pyalloc.h. */
#include <pthread.h>

#include "check.h"
#include "core/heap.h"
#include "core/snapshot.h"
#include "device/sim.h"
#include "fault.h"
#include "stat.h"
#include "sweep.h"

enum { N_DEVICES = 2, N_STREAMS = 4, MAX_LIVE = 800 };

struct world {
    struct pya_heap *heap;
    struct pya_sim *sims[N_DEVICES];
    struct pya_sim_config config;
};

struct live {
    pya_dptr ptr;
    size_t bytes;
    int device;
    pya_stream stream;
};

static pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    pya_status st = pya_sim_create(&world->config, index, &world->sims[index]);
    if (st == PYA_OK) {
        *out = pya_sim_device(world->sims[index]);
    }
    return st;
}

static struct pya_options
options_of(const char *text) {
    struct pya_options options;
    char message[200] = "";
    pya_options_init(&options);
    CHECK_OK(pya_options_parse(&options, text, message, sizeof message));
    return options;
}

static void
world_init(struct world *world, const char *text) {
    struct pya_options options = options_of(text);
    struct pya_hooks hooks = {.arg = world, .open_device = world_open};
    CHECK_OK(pya_heap_create(&options, &hooks, &world->heap));
}

/* The heap gives everything back, and the device saw no violation. */
static void
world_fini(struct world *world) {
    for (int d = 0; d < N_DEVICES; d++) {
        if (world->sims[d] == NULL) {
            continue;
        }
        struct pya_sim_state state;
        pya_sim_query(world->sims[d], &state);
        if (!CHECK_EQ(state.n_violations, 0)) {
            fprintf(stderr, "    %s\n", pya_sim_violation(world->sims[d]));
        }
        CHECK_EQ(pya_sim_check(world->sims[d]), 0);
    }
    pya_heap_destroy(world->heap);
}

/* Half of the requests come in a few sizes, as real ones do, so that exact fits and cached ranges occur. */
static size_t
random_bytes(uint64_t *seed) {
    if (check_random(seed) % 2 == 0) {
        return (size_t)(1 + check_random(seed) % 12) * 9437184 + 512;
    }
    size_t top = (size_t)512 << (check_random(seed) % 22);
    return 1 + check_random(seed) % top;
}

struct fuzz {
    struct world world;
    uint64_t seed;
    struct live *live;
    size_t n_live;
    size_t live_bytes[N_DEVICES];
    size_t n_alloc[N_DEVICES];
    size_t n_oom;
    bool faulty;
};

static bool
fuzz_may_fail(pya_status st) {
    return st == PYA_E_NOMEM || st == PYA_E_DEVICE;
}

static void
fuzz_alloc(struct fuzz *fuzz) {
    struct live live = {
        .bytes = random_bytes(&fuzz->seed),
        .device = (int)(check_random(&fuzz->seed) % N_DEVICES),
        .stream = 16 * (check_random(&fuzz->seed) % N_STREAMS),
    };
    pya_status st = pya_alloc(fuzz->world.heap, live.device, live.bytes, live.stream, &live.ptr);
    if (st != PYA_OK) {
        CHECK(fuzz_may_fail(st));
        fuzz->n_oom++;
        return;
    }
    size_t rounded = pya_round_up(live.bytes, PYA_ALIGN);
    CHECK_EQ(live.ptr % PYA_ALIGN, 0);
    CHECK_OK(pya_sim_own(fuzz->world.sims[live.device], live.ptr, rounded));
    fuzz->live_bytes[live.device] += rounded;
    fuzz->n_alloc[live.device]++;
    fuzz->live[fuzz->n_live++] = live;
}

static void
fuzz_free(struct fuzz *fuzz) {
    size_t i = check_random(&fuzz->seed) % fuzz->n_live;
    struct live live = fuzz->live[i];
    size_t rounded = pya_round_up(live.bytes, PYA_ALIGN);
    if (check_random(&fuzz->seed) % 8 == 0) {
        pya_stream other = 16 * (check_random(&fuzz->seed) % N_STREAMS);
        CHECK_OK(pya_record_stream(fuzz->world.heap, live.ptr, other));
    }
    pya_sim_disown(fuzz->world.sims[live.device], live.ptr, rounded);
    CHECK_OK(pya_free(fuzz->world.heap, live.ptr));
    fuzz->live_bytes[live.device] -= rounded;
    fuzz->n_alloc[live.device]--;
    fuzz->live[i] = fuzz->live[--fuzz->n_live];
}

static void
fuzz_rare(struct fuzz *fuzz) {
    int device = (int)(check_random(&fuzz->seed) % N_DEVICES);
    pya_status st = PYA_OK;
    switch (check_random(&fuzz->seed) % 4) {
    case 0:
        st = pya_empty_cache(fuzz->world.heap, device);
        break;
    case 1:
        st = pya_trim(fuzz->world.heap, device, check_random(&fuzz->seed) % ((size_t)8 << 30));
        break;
    default:
        if (fuzz->world.sims[device] != NULL) {
            pya_sim_advance_clock(fuzz->world.sims[device], 1000000);
            pya_sim_finish(fuzz->world.sims[device], 16 * (check_random(&fuzz->seed) % N_STREAMS));
        }
        break;
    }
    CHECK(st == PYA_OK || (fuzz->faulty && fuzz_may_fail(st)));
}

/* Each page is in exactly one segment, each live block in one, and the sums match the statistics. */
static void
fuzz_check_snapshot(struct fuzz *fuzz) {
    struct pya_snapshot snap;
    size_t total[N_DEVICES] = {0};
    size_t active[N_DEVICES] = {0};
    pya_dptr end = 0;
    CHECK_OK(pya_snapshot_take(fuzz->world.heap, NULL, true, &snap));
    for (size_t i = 0; i < snap.n_segments; i++) {
        const struct pya_snap_segment *segment = &snap.segments[i];
        pya_dptr addr = segment->addr;
        CHECK(i == 0 || segment->device != snap.segments[i - 1].device || segment->addr >= end);
        for (size_t k = 0; k < segment->n_blocks; k++) {
            CHECK_EQ(snap.blocks[segment->first_block + k].addr, addr);
            addr += snap.blocks[segment->first_block + k].bytes;
        }
        end = addr;
        CHECK_EQ(addr, segment->addr + segment->total_bytes);
        total[segment->device] += segment->total_bytes;
        active[segment->device] += segment->active_bytes;
    }
    for (int d = 0; d < N_DEVICES; d++) {
        CHECK_EQ(active[d], stat_of(fuzz->world.heap, d, "active_bytes.all.current"));
        if (!fuzz->faulty) { /* a page whose release failed is reserved, but in no segment */
            CHECK_EQ(total[d], stat_of(fuzz->world.heap, d, "reserved_bytes.all.current"));
        }
    }
    pya_snapshot_fini(&snap);
}

/* The shortcuts to some of them return the same. */
static void
fuzz_check_quick_stats(struct fuzz *fuzz, int device, const int64_t values[PYA_N_STATS]) {
    struct pya_heap *heap = fuzz->world.heap;
    int64_t quick[PYA_N_STATS];
    size_t n_differ = 0;
    size_t allocated = 0;
    size_t total = 0;
    CHECK_OK(pya_stats_get_quickly(heap, device, quick));
    for (size_t k = 0; k < PYA_N_STATS; k++) {
        n_differ += quick[k] != values[k];
    }
    CHECK_EQ(n_differ, stat_of(heap, device, "pyalloc_host_bytes") != 0);
    CHECK_OK(pya_stats_bytes(heap, device, &allocated, &total));
    CHECK_EQ(allocated, stat_of(heap, device, "allocated_bytes.all.current"));
    CHECK_EQ(total, stat_of(heap, device, "reserved_bytes.all.current"));
}

/* No statistic is negative.  With nothing alive and nothing cached, every current value is 0. */
static void
fuzz_check_stats(struct fuzz *fuzz, int device, bool is_empty) {
    int64_t values[PYA_N_STATS];
    CHECK_OK(pya_stats_get(fuzz->world.heap, device, values));
    fuzz_check_quick_stats(fuzz, device, values);
    for (size_t k = 0; k < PYA_N_STATS; k++) {
        const char *key = pya_stat_key(k);
        bool is_left = is_empty && values[k] != 0 && strstr(key, ".current") != NULL;
        bool is_setting = strcmp(key, "max_split_size") == 0; /* -1: none */
        if (!CHECK((values[k] >= 0 || is_setting) && !is_left)) {
            fprintf(stderr, "    %s %lld\n", key, (long long)values[k]);
        }
    }
    CHECK(
        stat_of(fuzz->world.heap, device, "pyalloc_pages_regretted") <=
        stat_of(fuzz->world.heap, device, "pyalloc_pages_collected"));
}

static void
fuzz_check(struct fuzz *fuzz) {
    fuzz_check_snapshot(fuzz);
    for (int d = 0; d < N_DEVICES; d++) {
        CHECK_EQ(pya_heap_check(fuzz->world.heap, d), 0);
        size_t allocated = (size_t)stat_of(fuzz->world.heap, d, "allocated_bytes.all.current");
        /* Like torch's, plain segments are not split down to the last byte. */
        CHECK(
            fuzz->world.config.no_vmm ? allocated >= fuzz->live_bytes[d]
                                      : allocated == fuzz->live_bytes[d]);
        CHECK_EQ(stat_of(fuzz->world.heap, d, "allocation.all.current"), fuzz->n_alloc[d]);
        fuzz_check_stats(fuzz, d, false);
    }
}

static void
fuzz_step(struct fuzz *fuzz) {
    uint64_t dice = check_random(&fuzz->seed) % 1000;
    /* Drifts around MAX_LIVE / 2 live blocks. */
    bool grows = fuzz->n_live == 0 ||
                 (fuzz->n_live < MAX_LIVE && dice < 900 - 800 * fuzz->n_live / MAX_LIVE);
    if (dice >= 998) {
        fuzz_rare(fuzz);
    } else if (grows) {
        fuzz_alloc(fuzz);
    } else {
        fuzz_free(fuzz);
    }
}

static void
fuzz_run(const char *options, unsigned long n_steps, unsigned check_every, bool faulty) {
    struct fuzz fuzz = {.seed = check_seed(), .faulty = faulty};
    n_steps /= CHECK_ONE_IN;
    fuzz.world.config = (struct pya_sim_config){
        .capacity_bytes = (size_t)11 << 30,
        .address_bytes = (uint64_t)1 << 40,
        .work = PYA_SIM_WORK_DELAYED,
        .work_delay = 5,
        .no_vmm = strstr(options, "vmm:False") != NULL,
    };
    fuzz.live = calloc(MAX_LIVE, sizeof *fuzz.live);
    world_init(&fuzz.world, options);
    CHECK_OK(pya_history_start(fuzz.world.heap, PYA_RECORD_ALL, true, 300, 0));
    for (unsigned long i = 0; i < n_steps && check_failures < 20; i++) {
        int d = (int)(check_random(&fuzz.seed) % N_DEVICES);
        if (faulty && fuzz.world.sims[d] != NULL && i % 50 == 0) {
            uint64_t nth = 1 + check_random(&fuzz.seed) % 40;
            pya_status with = check_random(&fuzz.seed) % 2 ? PYA_E_NOMEM : PYA_E_DEVICE;
            pya_sim_fail(fuzz.world.sims[d], PYA_SIM_ANY_CALL, nth, with, false);
        }
        fuzz_step(&fuzz);
        if (i % check_every == 0) {
            fuzz_check(&fuzz);
        }
    }
    for (int d = 0; d < N_DEVICES; d++) {
        if (fuzz.world.sims[d] != NULL) {
            (void)pya_sim_fail_clear(fuzz.world.sims[d]);
        }
    }
    fuzz_check(&fuzz);
    if (getenv("PYA_TEST_VERBOSE") != NULL) {
        for (size_t k = 0; k < PYA_N_STATS; k++) {
            if (strncmp(pya_stat_key(k), "pyalloc", 7) == 0 ||
                strncmp(pya_stat_key(k), "num", 3) == 0) {
                printf(
                    "%s %lld  ", pya_stat_key(k),
                    (long long)stat_of(fuzz.world.heap, 0, pya_stat_key(k)));
            }
        }
        printf("\n");
    }
    while (fuzz.n_live > 0) {
        fuzz_free(&fuzz);
    }
    CHECK_OK(pya_empty_cache(fuzz.world.heap, -1));
    fuzz_check(&fuzz);
    for (int d = 0; d < N_DEVICES; d++) {
        struct pya_sim_state state;
        pya_sim_query(fuzz.world.sims[d], &state);
        CHECK_EQ(state.used_bytes, 0);
        fuzz_check_stats(&fuzz, d, true);
    }
    world_fini(&fuzz.world);
    free(fuzz.live);
}

static void
test_fuzz_balanced(void) {
    fuzz_run("", check_budget(20000), 97, false);
}

/* The full million if a step costs microseconds; a share of it under sanitizers. */
static void
test_fuzz_million(void) {
    if (check_is_slow()) {
        fuzz_run("", check_budget(30000), 997, false);
    } else {
        fuzz_run("", 1000000, 49999, false);
    }
}

/* Blocks change hands between threads; statistics and structure must come out exact. */
enum { N_THREADS = 8, N_SHELF = 64 };

struct shelf {
    struct world *world;
    pya_dptr ptrs[N_SHELF]; /* exchanged atomically: whoever takes a pointer frees it */
    uint64_t seed;
};

static void *
thread_run(void *arg) {
    struct shelf *shelf = arg;
    uint64_t seed = __atomic_add_fetch(&shelf->seed, 0x9E3779B97F4A7C15U, __ATOMIC_RELAXED);
    unsigned long n_steps = check_budget(4000);
    for (unsigned long i = 0; i < n_steps; i++) {
        size_t slot = check_random(&seed) % N_SHELF;
        size_t bytes = (size_t)512 << (check_random(&seed) % 14);
        pya_dptr ptr = 0;
        pya_status st = pya_alloc(
            shelf->world->heap, (int)(slot % N_DEVICES), bytes, 16 * (slot % N_STREAMS), &ptr);
        CHECK(st == PYA_OK || st == PYA_E_NOMEM);
        if (slot % 7 == 0) {
            CHECK_OK(pya_record_stream(shelf->world->heap, ptr, 16 * (i % N_STREAMS)));
        }
        pya_dptr old = __atomic_exchange_n(&shelf->ptrs[slot], ptr, __ATOMIC_ACQ_REL);
        CHECK_OK(pya_free(shelf->world->heap, old));
        if (i % 1000 == 999) {
            CHECK_OK(pya_empty_cache(shelf->world->heap, -1));
        }
    }
    return NULL;
}

static void
test_threads(void) {
    struct world world = {
        .config = {.capacity_bytes = (size_t)1 << 30, .address_bytes = (uint64_t)1 << 36}};
    struct shelf shelf = {.world = &world, .seed = check_seed()};
    pthread_t threads[N_THREADS];
    world_init(&world, "");
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, thread_run, &shelf), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    for (size_t i = 0; i < N_SHELF; i++) {
        CHECK_OK(pya_free(world.heap, shelf.ptrs[i]));
    }
    CHECK_OK(pya_empty_cache(world.heap, -1));
    for (int d = 0; d < N_DEVICES; d++) {
        CHECK_EQ(pya_heap_check(world.heap, d), 0);
        CHECK_EQ(stat_of(world.heap, d, "allocation.all.current"), 0);
        CHECK_EQ(stat_of(world.heap, d, "reserved_bytes.all.current"), 0);
        CHECK_EQ(
            stat_of(world.heap, d, "allocation.all.allocated"),
            stat_of(world.heap, d, "allocation.all.freed"));
    }
    world_fini(&world);
}

/* A pointer freed twice, one that was never ours, one into the middle of a block; sizes of 0, 2^60 and 2^63. */
static void
test_bad_calls(void) {
    struct world world = {
        .config = {.capacity_bytes = (size_t)3 << 30, .address_bytes = (uint64_t)1 << 36}};
    struct pya_oom_info info;
    char text[600];
    pya_dptr ptr = 1;
    world_init(&world, "");
    uint64_t n_allocs = 7;
    uint64_t n_frees = 9;
    pya_heap_counts(world.heap, &n_allocs, &n_frees);
    CHECK(n_allocs == 0 && n_frees == 0);
    CHECK_OK(pya_alloc(world.heap, 0, 0, 0, &ptr));
    CHECK_EQ(ptr, 0);
    CHECK_OK(pya_free(world.heap, 0));
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptr));
    CHECK_EQ(pya_free(world.heap, ptr + 512), PYA_E_DOUBLE_FREE);
    CHECK_EQ(pya_free(world.heap, ptr + 8), PYA_E_FOREIGN);
    CHECK_EQ(pya_free(world.heap, 0x1000), PYA_E_FOREIGN);
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_EQ(pya_free(world.heap, ptr), PYA_E_DOUBLE_FREE);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)1 << 60, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)1 << 63, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, PYA_REQUEST_MAX, 0, &ptr), PYA_E_NOMEM);
    CHECK_EQ(pya_alloc(world.heap, -1, 512, 0, &ptr), PYA_E_INVAL);
    CHECK_EQ(pya_alloc(world.heap, PYA_MAX_DEVICES, 512, 0, &ptr), PYA_E_INVAL);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)4 << 30, 0, &ptr), PYA_E_NOMEM);
    pya_heap_oom_info(world.heap, &info);
    CHECK_EQ(info.requested_bytes, (size_t)4 << 30);
    CHECK(pya_oom_text(&info, text, sizeof text) > 0);
    static const char wanted[] =
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total "
        "capacity of 3.00 GiB of which ";
    CHECK(strncmp(text, wanted, sizeof wanted - 1) == 0);
    CHECK_EQ(stat_of(world.heap, 0, "num_ooms"), 2);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_EQ(stat_of(world.heap, 0, "allocation.all.current"), 0);
    world_fini(&world);
}

static void
test_fuzz_every_step(void) {
    fuzz_run("", check_budget(1500), 1, false);
}

static void
test_fuzz_tight(void) {
    fuzz_run("memory:tight", check_budget(20000), 97, false);
}

static void
test_fuzz_fast(void) {
    fuzz_run("memory:fast", check_budget(20000), 97, false);
}

static void
test_fuzz_plain(void) {
    fuzz_run("vmm:False", check_budget(20000), 97, false);
}

static void
test_fuzz_few_mappings(void) {
    fuzz_run("mappings_per_page:2", check_budget(20000), 97, false);
}

/* Every reason to give memory back, each on its own. */
#define UNDER_PRESSURE                                                                             \
    "soft_limit:2GiB,garbage_collection_threshold:0.2,keep_free:9GiB,trim_after:0.002"

static void
test_fuzz_pressure(void) {
    fuzz_run(UNDER_PRESSURE, check_budget(40000), 97, false);
    fuzz_run(UNDER_PRESSURE ",memory:fast", check_budget(20000), 97, false);
    fuzz_run(UNDER_PRESSURE ",vmm:False", check_budget(20000), 97, false);
    fuzz_run(UNDER_PRESSURE, check_budget(20000), 97, true);
}

static void
test_fuzz_shared(void) {
    fuzz_run("shared_pages:False", check_budget(20000), 97, false);
    fuzz_run("shared_pages:True,memory:tight,mappings_per_page:2", check_budget(20000), 97, false);
}

static void
test_fuzz_faults(void) {
    fuzz_run("", check_budget(20000), 97, true);
    fuzz_run("shared_pages:False", check_budget(20000), 97, true);
    fuzz_run("memory:tight,mappings_per_page:2", check_budget(20000), 97, true);
    fuzz_run("vmm:False", check_budget(20000), 97, true);
}

/* A fixed small program that goes down every step of the ladder; any of its calls may fail. */
enum { SWEEP_LARGE = 24, SWEEP_ODD = 8, SWEEP_BLOCKS = SWEEP_LARGE + 3 * SWEEP_ODD };

static void
sweep_program(struct world *world, pya_dptr *ptrs) {
    const size_t mib = (size_t)1 << 20;
    struct pya_pool_id id = {7, 1};
    for (size_t i = 0; i < 12; i++) {
        (void)!pya_alloc(world->heap, 0, (3 + i) * mib, i % 3 * 16, &ptrs[i]);
    }
    (void)!pya_record_stream(world->heap, ptrs[3], 64);
    for (size_t i = 0; i < 12; i += 2) {
        (void)!pya_free(world->heap, ptrs[i]);
        ptrs[i] = 0;
    }
    for (size_t i = 12; i < 16; i++) {
        (void)!pya_alloc(world->heap, 0, 24 * mib, i % 2 * 16, &ptrs[i]);
    }
    (void)!pya_free(world->heap, ptrs[3]);
    ptrs[3] = 0;
    (void)!pya_trim(world->heap, 0, 64 * mib);
    if (pya_pool_begin(world->heap, 0, id, (struct pya_stream_filter){0}) == PYA_OK) {
        (void)!pya_alloc(world->heap, 0, 8 * mib, 0, &ptrs[16]);
        CHECK_OK(pya_pool_end(world->heap, 0, id));
        (void)!pya_free(world->heap, ptrs[16]);
        ptrs[16] = 0;
        CHECK_OK(pya_pool_release(world->heap, 0, id));
        (void)!pya_pool_trim(world->heap, 0, id);
    }
    for (size_t i = 17; i < SWEEP_LARGE; i++) {
        (void)!pya_alloc(world->heap, 0, 30 * mib, 0, &ptrs[i]);
    }
    /* What is left, in pieces that end within pages; every other one is freed, then larger requests want them. */
    (void)!pya_free(world->heap, ptrs[12]);
    ptrs[12] = 0;
    for (size_t i = SWEEP_LARGE; i < SWEEP_LARGE + 2 * SWEEP_ODD; i++) {
        (void)!pya_alloc(world->heap, 0, 3 * mib, 0, &ptrs[i]);
    }
    for (size_t i = SWEEP_LARGE; i < SWEEP_LARGE + 2 * SWEEP_ODD; i += 2) {
        (void)!pya_free(world->heap, ptrs[i]);
        ptrs[i] = 0;
    }
    for (size_t i = SWEEP_LARGE + 2 * SWEEP_ODD; i < SWEEP_BLOCKS; i++) {
        (void)!pya_alloc(world->heap, 0, 5 * mib, 0, &ptrs[i]);
    }
}

static bool
sweep_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {
        .config = {
            .capacity_bytes = (size_t)192 << 20,
            .address_bytes = (uint64_t)1 << 34,
            .quiet = true}};
    pya_dptr ptrs[SWEEP_BLOCKS] = {0};
    pya_dptr first;
    size_t live_before = fault_live();
    world_init(&world, options);
    CHECK_OK(pya_alloc(world.heap, 0, 512, 0, &first));
    sweep_arm(world.sims[0], nth, host, with);
    sweep_program(&world, ptrs);
    bool fired = sweep_disarm(world.sims[0], host);
    bool shares = *options == '\0';
    CHECK(fired || !shares || stat_of(world.heap, 0, "pyalloc_shared_ranges") > 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    for (size_t i = 0; i < SWEEP_BLOCKS; i++) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    CHECK_OK(pya_free(world.heap, first));
    sweep_check_empty(world.heap, world.sims[0]);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_EQ(stat_of(world.heap, 0, "segment.all.current"), 0);
    CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), 0);
    world_fini(&world);
    CHECK_EQ(fault_live(), live_before);
    return fired;
}

static void
test_sweep(void) {
    static const char *const options[] = {
        "", "memory:tight", "mappings_per_page:1", "vmm:False", "shared_pages:False"};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        sweep_all(sweep_once, options[i]);
    }
}

static const struct check_case cases[] = {
    {"bad_calls", test_bad_calls},
    {"threads", test_threads},
    {"sweep", test_sweep},
    {"fuzz_million", test_fuzz_million},
    {"fuzz_every_step", test_fuzz_every_step},
    {"fuzz_balanced", test_fuzz_balanced},
    {"fuzz_tight", test_fuzz_tight},
    {"fuzz_fast", test_fuzz_fast},
    {"fuzz_plain", test_fuzz_plain},
    {"fuzz_few_mappings", test_fuzz_few_mappings},
    {"fuzz_shared", test_fuzz_shared},
    {"fuzz_pressure", test_fuzz_pressure},
    {"fuzz_faults", test_fuzz_faults},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
