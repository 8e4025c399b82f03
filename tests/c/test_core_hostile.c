/* Callers that are hostile or unlucky, and what fuzzing found: each finding is a case here. */
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/snapshot.h"
#include "fault.h"
#include "world.h"

/* Few addresses: 16 GiB. */
static void
world_narrow(struct world *world, const char *text, size_t capacity) {
    *world =
        (struct world){.config = {.capacity_bytes = capacity, .address_bytes = (uint64_t)1 << 34}};
    world_init(world, text);
}

/* The heap can give everything back. */
static void
world_empty_fini(struct world *world) {
    struct pya_sim_state state;
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    CHECK_OK(pya_empty_cache(world->heap, -1));
    pya_sim_query(world->sim, &state);
    CHECK_EQ(state.used_bytes, 0);
    world_fini(world);
}

/* A segment of 20 MiB is not "too large to split" for the request that it was made for. */
static void
test_small_max_split(void) {
    static const char *const options[] = {
        "vmm:False,max_split_size:20MB", "vmm:False,max_split_size:1MB"};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        pya_dptr small, large;
        world_narrow(&world, options[i], (size_t)1 << 30);
        CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &small));
        CHECK_OK(pya_alloc(world.heap, 0, (size_t)7 << 20, 0, &large));
        CHECK_OK(pya_free(world.heap, small));
        CHECK_OK(pya_free(world.heap, large));
        world_empty_fini(&world);
    }
}

/* Blocks of max_split_size and more are counted, not split, not used for small requests, and waste little: torch's
 * rules. */
static void
test_oversize_blocks(void) {
    const size_t mib = (size_t)1 << 20;
    struct world world;
    pya_dptr ptr, other;
    world_narrow(&world, "vmm:False,max_split_size:30MB", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 20 * mib, 0, &other));
    CHECK_OK(pya_alloc(world.heap, 0, 60 * mib, 0, &ptr));
    CHECK_EQ(stat_of(world.heap, 0, "oversize_allocations.current"), 1);
    CHECK_EQ(stat_of(world.heap, 0, "oversize_segments.current"), 1);
    CHECK_OK(pya_free(world.heap, other));
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_EQ(stat_of(world.heap, 0, "oversize_allocations.current"), 0);
    CHECK_EQ(stat_of(world.heap, 0, "oversize_segments.current"), 1);
    static const size_t sizes[] = {8, 40, 44};
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(pya_alloc(world.heap, 0, sizes[i] * mib, 0, &other));
        CHECK_EQ(other == ptr, sizes[i] == 44);
        CHECK_OK(pya_free(world.heap, other));
    }
    CHECK_EQ(stat_of(world.heap, 0, "oversize_segments.peak"), 2);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(stat_of(world.heap, 0, "oversize_segments.current"), 0);
    world_empty_fini(&world);
}

/* Memory freed before a reset is in no peak and no total after it. */
static void
test_resets_come_after_what_was_freed(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        pya_dptr ptrs[5];
        int64_t values[PYA_N_STATS];
        world_narrow(&world, options[i], (size_t)1 << 30);
        for (size_t k = 0; k < 5; k++) {
            CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptrs[k]));
        }
        CHECK_OK(pya_free(world.heap, ptrs[1]));
        CHECK_OK(pya_free(world.heap, ptrs[3]));
        CHECK_OK(pya_free(world.heap, ptrs[2])); /* the three become one */
        CHECK_OK(pya_stats_reset_peak(world.heap, 0));
        CHECK_OK(pya_stats_reset_accumulated(world.heap, 0));
        CHECK_OK(pya_stats_get(world.heap, 0, values));
        for (size_t k = 0; k < PYA_N_STATS - PYA_N_SCALAR; k += 4) {
            if (!CHECK(values[k + 1] == values[k] && values[k + 2] == 0 && values[k + 3] == 0)) {
                fprintf(stderr, "    %s\n", pya_stat_key(k));
            }
        }
        CHECK_OK(pya_free(world.heap, ptrs[0]));
        CHECK_OK(pya_free(world.heap, ptrs[4]));
        world_empty_fini(&world);
    }
}

/* More than the card has: out of device memory, whatever else there is, and not one page is requested. */
static void
test_impossible_sizes(void) {
    static const size_t sizes[] = {
        ((size_t)1 << 30) + 1, (size_t)1 << 40, (size_t)1 << 50, PYA_REQUEST_MAX};
    struct world world;
    pya_dptr one, two, ptr = 7;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &one));
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 16, &two));
    struct pya_sim_state before, after;
    pya_sim_query(world.sim, &before);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_EQ(pya_alloc(world.heap, 0, sizes[i], 16, &ptr), PYA_E_NOMEM);
    }
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)1 << 60, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)1 << 63, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, SIZE_MAX, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(ptr, 7);
    pya_sim_query(world.sim, &after);
    CHECK_EQ(after.n_calls[PYA_SIM_PAGE_CREATE], before.n_calls[PYA_SIM_PAGE_CREATE]);
    CHECK_OK(pya_free(world.heap, one));
    CHECK_OK(pya_free(world.heap, two));
    world_empty_fini(&world);
}

/* A pool whose only user leaves between begin and end is gone after end. */
static void
test_release_before_end(void) {
    struct world world;
    struct pya_pool_id id = {7, 1};
    pya_dptr ptr;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptr));
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    CHECK_EQ(pya_pool_release(world.heap, 0, id), PYA_E_INVAL);
    CHECK_OK(pya_pool_trim(world.heap, 0, id));
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    CHECK_EQ(pya_pool_end(world.heap, 0, id), PYA_E_INVAL);
    world_empty_fini(&world);
}

/* Pages whose move to another stream failed half-way, and could not be undone, are mapped there without access.  Nobody
 * may get that address later. */
static void
test_failed_move_is_not_used(void) {
    struct world world;
    pya_dptr own, ptr;
    pya_dptr others[8];
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 32, &own));
    for (int i = 0; i < 8; i++) {
        CHECK_OK(pya_alloc(world.heap, 0, (size_t)4 << 20, 16, &others[i]));
    }
    for (int i = 0; i < 8; i += 2) { /* nowhere 8 MiB in one piece */
        CHECK_OK(pya_free(world.heap, others[i]));
    }
    pya_sim_fail(world.sim, 1U << PYA_SIM_SET_ACCESS | 1U << PYA_SIM_UNMAP, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)8 << 20, 32, &ptr), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)8 << 20, 32, &ptr));
    CHECK_OK(pya_sim_own(world.sim, ptr, (size_t)8 << 20));
    pya_sim_disown(world.sim, ptr, (size_t)8 << 20);
    for (int i = 1; i < 8; i += 2) {
        CHECK_OK(pya_free(world.heap, others[i]));
    }
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_OK(pya_free(world.heap, own));
    world_empty_fini(&world);
}

/* 10^6 blocks of 512 bytes are alive at once and are freed in another order. */
static void
test_a_million_tiny_blocks(void) {
    const size_t n = check_is_slow() ? 50000 : 1000000;
    struct world world;
    pya_dptr *ptrs = malloc(n * sizeof *ptrs);
    world_narrow(&world, "", (size_t)1 << 30);
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(pya_alloc(world.heap, 0, 1 + i % 512, 0, &ptrs[i]));
    }
    struct pya_sim_state state;
    pya_sim_query(world.sim, &state);
    CHECK(state.used_bytes <= pya_round_up(n * 512, PYA_PAGE) + 8 * PYA_PAGE);
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(pya_free(world.heap, ptrs[i * 7919 % n]));
    }
    free(ptrs);
    world_empty_fini(&world);
}

/* What a hook may do: everything. */
struct nested {
    struct world world;
    pya_dptr spare, from_hook;
    unsigned n_pressure, n_oom;
};

static pya_status
nested_open(void *arg, int index, struct pya_device **out) {
    return world_open(&((struct nested *)arg)->world, index, out);
}

static bool
nested_pressure(void *arg, int device, size_t bytes) {
    struct nested *nested = arg;
    struct pya_heap *heap = nested->world.heap;
    int64_t values[PYA_N_STATS];
    pya_dptr ptr;
    (void)bytes;
    CHECK_OK(pya_alloc(heap, device, 512, 0, &ptr));
    CHECK_OK(pya_free(heap, ptr));
    CHECK_OK(pya_stats_get(heap, device, values));
    CHECK_OK(pya_empty_cache(heap, device));
    CHECK_OK(pya_free(heap, nested->spare));
    nested->spare = 0;
    return nested->n_pressure++ == 0;
}

static void
nested_oom(void *arg, int device, size_t bytes) {
    struct nested *nested = arg;
    pya_dptr ptr;
    (void)bytes;
    if (nested->n_oom++ == 0) {
        CHECK_EQ(pya_alloc(nested->world.heap, device, (size_t)1 << 40, 0, &ptr), PYA_E_NOMEM);
        CHECK_OK(pya_alloc(nested->world.heap, device, 512, 0, &nested->from_hook));
    }
}

static void
test_hooks_allocate(void) {
    struct nested nested = {
        .world.config = {.capacity_bytes = (size_t)64 << 20, .address_bytes = (uint64_t)1 << 34}};
    struct pya_options options;
    struct pya_hooks hooks = {
        .arg = &nested,
        .open_device = nested_open,
        .on_pressure = nested_pressure,
        .on_oom = nested_oom,
    };
    pya_dptr large, never;
    pya_options_init(&options);
    CHECK_OK(pya_heap_create(&options, &hooks, &nested.world.heap));
    CHECK_OK(pya_alloc(nested.world.heap, 0, (size_t)40 << 20, 0, &nested.spare));
    CHECK_OK(pya_alloc(nested.world.heap, 0, (size_t)50 << 20, 0, &large));
    CHECK_EQ(nested.n_pressure, 1);
    CHECK_EQ(pya_alloc(nested.world.heap, 0, (size_t)50 << 20, 0, &never), PYA_E_NOMEM);
    CHECK(nested.from_hook != 0 && nested.n_oom == 2);
    CHECK_OK(pya_free(nested.world.heap, large));
    CHECK_OK(pya_free(nested.world.heap, nested.from_hook));
    world_empty_fini(&nested.world);
}

/* A clock that stands still or goes back changes the times in the history and nothing else. */
static void
test_clock_going_back(void) {
    struct world world;
    pya_dptr ptrs[16];
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 100, 0));
    for (size_t i = 0; i < 200; i++) {
        size_t slot = i % 16;
        if (i >= 16) {
            CHECK_OK(pya_free(world.heap, ptrs[slot]));
        }
        CHECK_OK(pya_alloc(world.heap, 0, (i % 7 + 1) << 20, 16 * (i % 3), &ptrs[slot]));
        CHECK_OK(pya_record_stream(world.heap, ptrs[slot], 16 * ((i + 1) % 3)));
        pya_sim_advance_clock(world.sim, i % 2 == 0 ? (uint64_t)0 - 1000000000 : 5);
        if (i % 50 == 49) {
            CHECK_OK(pya_trim(world.heap, 0, (size_t)32 << 20));
        }
    }
    for (size_t i = 0; i < 16; i++) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    pya_history_stop(world.heap);
    world_empty_fini(&world);
}

static volatile sig_atomic_t n_signals;

static void
on_signal(int number) {
    (void)number;
    n_signals++;
}

/* Signals arrive in the middle of everything. */
static void
test_signals(void) {
    struct world world;
    struct sigaction action = {.sa_handler = on_signal}, before;
    struct itimerval often = {{0, 100}, {0, 100}}, never = {{0, 0}, {0, 0}};
    uint64_t seed = check_seed();
    pya_dptr ptrs[64] = {0};
    n_signals = 0;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_EQ(sigaction(SIGALRM, &action, &before), 0);
    CHECK_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    for (size_t i = 0; i < 2000000 && n_signals < 50; i++) {
        size_t slot = check_below(&seed, 64);
        CHECK_OK(pya_free(world.heap, ptrs[slot]));
        CHECK_OK(pya_alloc(world.heap, 0, check_log_size(&seed, 512, 4 << 20), 0, &ptrs[slot]));
        if (i % 1000 == 0) {
            CHECK_OK(pya_empty_cache(world.heap, 0));
        }
    }
    CHECK_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    (void)signal(SIGALRM, SIG_IGN); /* one that is still on its way is dropped */
    CHECK_EQ(sigaction(SIGALRM, &before, NULL), 0);
    CHECK(n_signals > 0);
    for (size_t i = 0; i < 64; i++) {
        CHECK_OK(pya_free(world.heap, ptrs[i]));
    }
    world_empty_fini(&world);
}

static size_t n_device_calls; /* of the heap's end in a child */

static pya_status
count_call(struct pya_device *dev, uint64_t any) {
    (void)dev;
    (void)any;
    n_device_calls++;
    return PYA_OK;
}

static pya_status
count_range(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    (void)bytes;
    return count_call(dev, addr);
}

static pya_status
count_sync(struct pya_device *dev) {
    return count_call(dev, 0);
}

static void
source_free(void *arg, pya_dptr addr) {
    (void)arg;
    (void)addr;
    n_device_calls++;
}

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    (void)arg;
    (void)bytes;
    return (pya_dptr)1 << 40;
}

/* In a child: ends the heap, which gives back all host memory and touches nothing of the parent's device. */
static bool
child_ends(struct world *world, size_t n_before) {
    struct pya_device *dev = pya_sim_device(world->sim);
    struct pya_device_ops counting = *dev->ops;
    counting.unmap = counting.range_release = counting.set_access = count_range;
    counting.event_destroy = counting.page_release = counting.plain_free = count_call;
    counting.stream_sync = counting.event_sync = count_call;
    counting.device_sync = count_sync;
    dev->ops = &counting;
    pya_heap_destroy(world->heap);
    return n_device_calls == 0 && fault_live() == n_before;
}

/* Everything that a card can hold: small, large and stitched blocks, recorded streams, pools, a source, a trace. */
static void
world_fill(struct world *world) {
    struct pya_heap *heap = world->heap;
    struct pya_segment_source source = {.alloc = source_alloc, .free = source_free};
    pya_dptr ptrs[16], big, ptr;
    CHECK_OK(pya_history_start(heap, PYA_RECORD_ALL, true, 100, 0));
    for (size_t i = 0; i < 16; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)4 << 20, 0, &ptrs[i]));
    }
    for (size_t i = 0; i < 16; i += 2) {
        CHECK_OK(pya_free(heap, ptrs[i]));
    }
    CHECK_OK(pya_alloc(heap, 0, (size_t)16 << 20, 0, &big));
    CHECK_OK(pya_record_stream(heap, ptrs[1], 32));
    CHECK_OK(pya_free(heap, ptrs[1]));
    for (uint64_t i = 1; i <= 2; i++) {
        struct pya_pool_id id = {7, i};
        CHECK_OK(pya_pool_retain(heap, 0, id, false));
        if (i == 2) {
            CHECK_OK(pya_pool_set_source(heap, 0, id, source));
        }
        CHECK_OK(pya_pool_begin(heap, 0, id, (struct pya_stream_filter){0}));
        CHECK_OK(pya_alloc(heap, 0, 5000, 0, &ptr));
        CHECK_OK(pya_pool_end(heap, 0, id));
    }
}

static void
child_passes(pid_t child) {
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

static void
test_fork_gives_host_memory_back(void) {
    size_t n_before = fault_live();
    struct world world;
    world_narrow(&world, "", (size_t)96 << 20);
    world_fill(&world);
    pid_t child = fork();
    if (child == 0) {
        _exit(child_ends(&world, n_before) ? 0 : 1);
    }
    child_passes(child);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    pya_heap_destroy(world.heap);
    CHECK_EQ(fault_live(), n_before);
}

/* A thread that holds the heap's lock and a card's lock until it is told to stop. */
struct holder {
    struct pya_heap *heap;
    pthread_barrier_t barrier;
};

static void *
holder_run(void *arg) {
    struct holder *holder = arg;
    struct pya_lock *card_lock = &holder->heap->cards.open[0]->lock;
    pya_lock_acquire(&holder->heap->lock);
    pya_lock_acquire(card_lock);
    (void)pthread_barrier_wait(&holder->barrier);
    (void)pthread_barrier_wait(&holder->barrier);
    pya_lock_release(card_lock);
    pya_lock_release(&holder->heap->lock);
    return NULL;
}

/* Nobody looks at what the thread left half done, or waits for a thread that the child does not have. */
static bool
torn_child_looks(struct world *world, pya_dptr ptr) {
    static int64_t values[1024];
    struct pya_heap *heap = world->heap;
    pya_dptr base;
    size_t bytes;
    int device;
    uint64_t n_allocs, n_frees;
    struct pya_snapshot snap;
    struct pya_history_part part;
    struct pya_segment_info segment;
    uint64_t now;
    (void)alarm(60); /* a child that hangs is killed, which the parent sees */
    bool good = pya_stats_get(heap, 0, values) == PYA_E_FORKED;
    good = good && pya_stats_get(heap, 1, values) == PYA_OK;
    good = good && pya_stats_reset_peak(heap, 0) == PYA_E_FORKED;
    good = good && pya_stats_reset_accumulated(heap, 0) == PYA_E_FORKED;
    good = good && pya_free(heap, ptr) == PYA_E_FORKED;
    good = good && pya_alloc(heap, 0, 1, 0, &base) == PYA_E_FORKED;
    good = good && pya_block_info(heap, ptr, &base, &bytes, &device) == PYA_E_FOREIGN;
    good = good && pya_segment_info(heap, ptr, &segment) == PYA_E_FOREIGN;
    good = good && pya_pool_list(heap, 0, NULL, 0) == 0;
    good = good && pya_history_start(heap, PYA_RECORD_STATE, true, 10, 0) == PYA_OK;
    good = good && pya_history_annotate(heap, ptr, NULL) == PYA_E_FOREIGN;
    good = good && !pya_history_take(heap, 0, &part, &now);
    pya_history_stop(heap);
    pya_heap_counts(heap, &n_allocs, &n_frees);
    good = good && n_allocs + n_frees == 0 && pya_heap_check(heap, 0) == 0;
    good = good && pya_snapshot_take(heap, NULL, false, &snap) == PYA_E_FORKED;
    pya_heap_destroy(heap);
    return good;
}

static void
test_fork_while_another_thread_works(void) {
    struct world world;
    struct holder holder;
    pthread_t thread;
    pya_dptr ptr;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptr));
    holder.heap = world.heap;
    CHECK_EQ(pthread_barrier_init(&holder.barrier, NULL, 2), 0);
    CHECK_EQ(pthread_create(&thread, NULL, holder_run, &holder), 0);
    (void)pthread_barrier_wait(&holder.barrier);
    pid_t child = fork();
    if (child == 0) {
        _exit(torn_child_looks(&world, ptr) ? 0 : 1);
    }
    child_passes(child);
    (void)pthread_barrier_wait(&holder.barrier);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(pthread_barrier_destroy(&holder.barrier), 0);
    CHECK_OK(pya_free(world.heap, ptr)); /* the parent notices nothing */
    world_empty_fini(&world);
}

/* A child may look and may end, but must not use its parent's memory.  The parent notices nothing. */
static void
test_fork(void) {
    struct world world;
    pya_dptr ptr, other = 0;
    const struct pya_pool_id id = {7, 1};
    struct pya_pool_info pool;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptr));
    CHECK_OK(pya_pool_retain(world.heap, 0, id, false));
    CHECK_OK(pya_pool_retain(world.heap, 0, id, false));
    pid_t child = fork();
    if (child == 0) {
        struct pya_memory_info info;
        bool good = pya_alloc(world.heap, 0, 5000, 0, &other) == PYA_E_FORKED;
        good = good && pya_free(world.heap, ptr) == PYA_E_FORKED;
        good = good && pya_record_stream(world.heap, ptr, 16) == PYA_OK;
        good = good && pya_empty_cache(world.heap, -1) == PYA_E_FORKED;
        good = good && pya_memory_info(world.heap, 0, &info) == PYA_E_FORKED;
        for (size_t n_users = 2; n_users > 0; n_users--) { /* torch asks how many are left */
            good = good && pya_pool_list(world.heap, 0, &pool, 1) == 1 && pool.n_users == n_users;
            good = good && pya_pool_release(world.heap, 0, id) == PYA_E_FORKED;
        }
        good = good && pya_pool_release(world.heap, 0, id) == PYA_E_FORKED;
        good = good && pya_pool_list(world.heap, 0, &pool, 1) == 1 && pool.n_users == 0;
        pya_heap_destroy(world.heap);
        _exit(good ? 0 : 1);
    }
    child_passes(child);
    CHECK_EQ(pya_pool_list(world.heap, 0, &pool, 1), 1);
    CHECK_EQ(pool.n_users, 2);
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    CHECK_OK(pya_free(world.heap, ptr));
    world_empty_fini(&world);
}

/* While a stream is captured, memory comes and goes, but nothing waits and nothing is given back. */
static void
test_during_capture(void) {
    struct world world;
    struct pya_pool_id id = {7, 1};
    pya_dptr before, during, again;
    world_narrow(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)8 << 20, 16, &before));
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    pya_sim_set_capturing(world.sim, 16, true);
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)8 << 20, 16, &during));
    CHECK_OK(pya_record_stream(world.heap, during, 32));
    CHECK_OK(pya_free(world.heap, during));
    CHECK_EQ(pya_free(world.heap, during), PYA_E_DOUBLE_FREE);
    CHECK_OK(pya_free(world.heap, before));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)2 << 30, 16, &again), PYA_E_NOMEM);
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)8 << 20, 16, &again));
    CHECK(again != during); /* it is unknown whether its other stream is done */
    pya_sim_set_capturing(world.sim, 16, false);
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    CHECK_OK(pya_free(world.heap, again));
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    world_empty_fini(&world);
}

static const struct check_case cases[] = {
    {"a_million_tiny_blocks", test_a_million_tiny_blocks},
    {"hooks_allocate", test_hooks_allocate},
    {"clock_going_back", test_clock_going_back},
    {"signals", test_signals},
    {"fork", test_fork},
    {"fork_while_another_thread_works", test_fork_while_another_thread_works},
    {"fork_gives_host_memory_back", test_fork_gives_host_memory_back},
    {"during_capture", test_during_capture},
    {"failed_move_is_not_used", test_failed_move_is_not_used},
    {"release_before_end", test_release_before_end},
    {"impossible_sizes", test_impossible_sizes},
    {"small_max_split", test_small_max_split},
    {"resets_come_after_what_was_freed", test_resets_come_after_what_was_freed},
    {"oversize_blocks", test_oversize_blocks},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
