/* What a request costs: rounds of every loop with a million live blocks, host memory, system calls. */
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "core/arena.h"
#include "core/debug.h"
#include "core/pyalloc.h"
#include "device/sim.h"
#include "fault.h"
#include "stat.h"

/* Far above the most seen (46; 153 while the map empties its old table): treaps, and clusters of the map. */
enum { MOST_STEPS = 400 };
enum { N_LIVE = 1000000, N_PAGES = 20000 };

static struct pya_sim *sim;

static pya_status
open_sim(void *arg, int index, struct pya_device **out) {
    const struct pya_sim_config config = {
        .capacity_bytes = (size_t)1 << 37, .address_bytes = (uint64_t)1 << 46};
    (void)arg;
    pya_status st = pya_sim_create(&config, index, &sim);
    if (st == PYA_OK) {
        *out = pya_sim_device(sim);
    }
    return st;
}

static struct pya_heap *
heap_new(const char *text) {
    struct pya_options options;
    struct pya_heap *heap = NULL;
    char message[200];
    struct pya_hooks hooks = {.open_device = open_sim};
    pya_options_init(&options);
    CHECK_OK(pya_options_parse(&options, text, message, sizeof message));
    CHECK_OK(pya_heap_create(&options, &hooks, &heap));
    return heap;
}

#if PYA_ASSERT_LEVEL >= 2
static uint64_t
device_calls(void) {
    struct pya_sim_state state;
    pya_sim_query(sim, &state);
    return state.n_memory_calls;
}

static void
check_steps(size_t n_live) {
    struct pya_heap *heap = heap_new("");
    pya_dptr *ptrs = calloc(n_live, sizeof *ptrs);
    uint64_t seed = check_seed();
    unsigned long most = 0;
    unsigned long n_free_of_calls = 0;
    for (size_t i = 0; i < n_live; i++) {
        CHECK_OK(pya_alloc(heap, 0, 1 + check_random(&seed) % 65536, 0, &ptrs[i]));
    }
    for (size_t k = 0; k < n_live / 4; k++) {
        size_t i = check_random(&seed) % n_live;
        size_t bytes = 1 + check_random(&seed) % (k % 8 == 0 ? (size_t)4 << 20 : 65536);
        unsigned long before = pya_debug_steps;
        CHECK_OK(pya_free(heap, ptrs[i]));
        unsigned long steps = pya_debug_steps - before;
        most = steps > most ? steps : most;
        uint64_t calls = device_calls();
        before = pya_debug_steps;
        CHECK_OK(pya_alloc(heap, 0, bytes, 0, &ptrs[i]));
        steps = pya_debug_steps - before;
        if (device_calls() == calls) {
            n_free_of_calls++;
            most = steps > most ? steps : most;
        }
    }
    printf("%zu live: at most %lu rounds of any loop in a request\n", n_live, most);
    CHECK(n_free_of_calls > n_live / 8);
    CHECK(most > 0 && most <= MOST_STEPS);
    pya_heap_destroy(heap);
    free(ptrs);
}

/* In the middle between two sizes of the map's table, and just after it has grown. */
static void
test_steps_are_bounded(void) {
    check_steps(check_budget(N_LIVE));
    check_steps(check_budget(N_LIVE) / 10);
}

enum { N_POOLS = 1000, N_SIZES = 100, POOL_STREAM = 64 };

static struct pya_pool_id
pool_id(size_t i) {
    return (struct pya_pool_id){1, i};
}

/* The rounds of a request and its free. */
static unsigned long
steps_of_pair(struct pya_heap *heap, size_t bytes, pya_stream stream) {
    pya_dptr ptr = 0;
    unsigned long before = pya_debug_steps;
    CHECK_OK(pya_alloc(heap, 0, bytes, stream, &ptr));
    CHECK_OK(pya_free(heap, ptr));
    return pya_debug_steps - before;
}

/* Makes n pools with some free memory each, as a captured graph leaves it.  Returns the most rounds of a request. */
static unsigned long
make_pools(struct pya_heap *heap, size_t n) {
    unsigned long most = 0;
    for (size_t i = 0; i < n; i++) {
        const struct pya_stream_filter filter = {.began_on = POOL_STREAM};
        CHECK_OK(pya_pool_begin(heap, 0, pool_id(i), filter));
        (void)steps_of_pair(heap, (size_t)5 << 20, POOL_STREAM);
        unsigned long steps = steps_of_pair(heap, (size_t)5 << 20, POOL_STREAM);
        most = steps > most ? steps : most;
        CHECK_OK(pya_pool_end(heap, 0, pool_id(i)));
    }
    return most;
}

/* A program that repeats itself, with a graph for each of many shapes, and takes turns on two streams. */
static void
test_pools_cost_others_little(void) {
    struct pya_heap *heap = heap_new("");
    unsigned long by_turns = 0;
    unsigned long repeated = 0;
    unsigned long released = 0;
    pya_dptr held[2];
    CHECK_OK(pya_alloc(heap, 0, (size_t)1 << 28, 0, &held[0]));
    CHECK_OK(pya_alloc(heap, 0, (size_t)1 << 28, 8, &held[1]));
    CHECK_OK(pya_free(heap, held[0]));
    CHECK_OK(pya_free(heap, held[1]));
    unsigned long most = make_pools(heap, N_POOLS);
    for (size_t i = 0; i < N_SIZES; i++) {
        unsigned long steps = steps_of_pair(heap, 4096, 8 * (i % 2));
        by_turns = i > 1 && steps > by_turns ? steps : by_turns;
    }
    for (size_t i = 0; i < 20 * (size_t)N_SIZES; i++) {
        unsigned long steps = steps_of_pair(heap, ((size_t)1 << 17) + i % N_SIZES * 4096, 0);
        repeated = i > 0 && steps > repeated ? steps : repeated;
    }
    CHECK(stat_of(heap, 0, "pyalloc_repeats") > N_SIZES);
    unsigned long grown = 0;
    int64_t n_pages = stat_of(heap, 0, "pyalloc_pages");
    for (size_t i = 0; i < N_SIZES; i++) {
        pya_dptr kept = 0;
        unsigned long before = pya_debug_steps;
        CHECK_OK(pya_alloc(heap, 0, (size_t)20 << 20, 8 * (i % 2), &kept));
        unsigned long steps = pya_debug_steps - before;
        grown = steps > grown ? steps : grown;
    }
    CHECK(stat_of(heap, 0, "pyalloc_pages") > n_pages);
    for (size_t i = 0; i < N_POOLS; i++) {
        unsigned long before = pya_debug_steps;
        CHECK_OK(pya_pool_release(heap, 0, pool_id(i)));
        released += pya_debug_steps - before;
    }
    printf(
        "%d pools: at most %lu rounds in a request of one, %lu by turns, %lu repeated, %lu grown; %lu to release "
        "one\n",
        N_POOLS, most, by_turns, repeated, grown, released / N_POOLS);
    CHECK(most <= MOST_STEPS && by_turns <= MOST_STEPS && repeated <= MOST_STEPS);
    CHECK(grown <= MOST_STEPS);
    CHECK(released / N_POOLS <= 8 * (unsigned long)N_POOLS);
    pya_heap_destroy(heap);
}

/* The graphs are gone, but their return values are kept, so their pools stay.  Once others have taken a pool's free
 * memory, no request looks at the pool again. */
static void
test_dropped_pools_cost_others_little(void) {
    struct pya_heap *heap = heap_new("");
    pya_dptr kept = 0;
    CHECK_OK(pya_alloc(heap, 0, 512, 8, &kept));
    for (size_t i = 0; i < N_POOLS; i++) {
        const struct pya_stream_filter filter = {.began_on = POOL_STREAM};
        CHECK_OK(pya_pool_begin(heap, 0, pool_id(i), filter));
        CHECK_OK(pya_alloc(heap, 0, 512, POOL_STREAM, &kept));
        CHECK_OK(pya_pool_end(heap, 0, pool_id(i)));
        CHECK_OK(pya_pool_release(heap, 0, pool_id(i)));
    }
    CHECK_EQ(pya_pool_list(heap, 0, NULL, 0), N_POOLS);
    unsigned long before = pya_debug_steps;
    for (size_t i = 0; i < N_SIZES; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)20 << 20, 8 * (i % 2), &kept));
    }
    unsigned long steps = (pya_debug_steps - before) / N_SIZES;
    printf("%d dropped pools: %lu rounds in a request that grows\n", N_POOLS, steps);
    CHECK(stat_of(heap, 0, "pyalloc_page_transfers") > 0);
    CHECK(steps > 0 && steps <= MOST_STEPS);
    pya_heap_destroy(heap);
}

/* Graphs that were captured again: their pools took over what the earlier ones left, all of it. */
static void
test_heirs_cost_others_little(void) {
    const struct pya_stream_filter filter = {.began_on = POOL_STREAM};
    struct pya_heap *heap = heap_new("");
    pya_dptr kept = 0;
    CHECK_OK(pya_alloc(heap, 0, 512, 8, &kept));
    (void)make_pools(heap, N_POOLS);
    for (size_t i = 0; i < N_POOLS; i++) {
        CHECK_OK(pya_pool_release(heap, 0, pool_id(i)));
    }
    for (size_t i = 0; i < N_POOLS; i++) {
        CHECK_OK(pya_pool_begin(heap, 0, pool_id(N_POOLS + i), filter));
        (void)steps_of_pair(heap, (size_t)5 << 20, POOL_STREAM);
        CHECK_OK(pya_pool_end(heap, 0, pool_id(N_POOLS + i)));
    }
    CHECK_OK(pya_empty_cache(heap, 0)); /* what they did not touch */
    CHECK_EQ(pya_pool_list(heap, 0, NULL, 0), N_POOLS);
    (void)steps_of_pair(heap, (size_t)20 << 20, 8);
    unsigned long before = pya_debug_steps;
    for (size_t i = 0; i < N_SIZES; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)20 << 20, 8 * (i % 2), &kept));
    }
    unsigned long steps = (pya_debug_steps - before) / N_SIZES;
    printf(
        "%d pools that took over from others: %lu rounds in a request that grows\n", N_POOLS,
        steps);
    CHECK(steps > 0 && steps <= MOST_STEPS);
    pya_heap_destroy(heap);
}

enum { N_PENDING = 4000 };

/* Many blocks wait for a stream's work while requests are routed to a pool.  A request that grows does not look again
 * at those that have their event. */
static void
test_what_waits_costs_a_pool_little(void) {
    const struct pya_stream_filter filter = {.began_on = POOL_STREAM};
    struct pya_heap *heap = heap_new("");
    pya_dptr ptrs[N_PENDING];
    for (size_t i = 0; i < N_PENDING; i++) {
        CHECK_OK(pya_alloc(heap, 0, 512, 0, &ptrs[i]));
        CHECK_OK(pya_record_stream(heap, ptrs[i], 8));
    }
    pya_sim_fail(sim, UINT32_C(1) << PYA_SIM_EVENT_QUERY, 1, PYA_E_DEVICE, true); /* never done */
    CHECK_OK(pya_pool_begin(heap, 0, pool_id(0), filter));
    for (size_t i = 0; i < N_PENDING; i++) {
        CHECK_OK(pya_free(heap, ptrs[i]));
    }
    unsigned long before = pya_debug_steps;
    for (size_t i = 0; i < N_SIZES; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)20 << 20, 0, &ptrs[i]));
    }
    unsigned long steps = (pya_debug_steps - before) / N_SIZES;
    printf("%d blocks that wait: %lu rounds in a request that grows\n", N_PENDING, steps);
    CHECK_EQ(stat_of(heap, 0, "active.all.current"), N_PENDING + N_SIZES);
    CHECK(steps >= N_PENDING / N_SIZES && steps <= MOST_STEPS);
    (void)pya_sim_fail_clear(sim);
    pya_heap_destroy(heap);
}

enum { N_HOLES = 16000 };

/* A request takes the lowest of many free pages between live blocks: it neither searches nor sorts the others. */
static void
test_holes_cost_a_stitched_request_little(void) {
    struct pya_heap *heap = heap_new("");
    pya_dptr *held = calloc(2 * (size_t)N_HOLES, sizeof *held);
    pya_dptr ptr = 0;
    for (size_t i = 0; i < 2 * (size_t)N_HOLES; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)2 << 20, 0, &held[i]));
    }
    for (size_t i = 0; i < 2 * (size_t)N_HOLES; i += 2) {
        CHECK_OK(pya_free(heap, held[i * 7 % (2 * (size_t)N_HOLES)]));
    }
    unsigned long before = pya_debug_steps;
    CHECK_OK(pya_alloc(heap, 0, (size_t)64 << 20, 0, &ptr));
    unsigned long steps = (pya_debug_steps - before) / (N_HOLES / 10);
    CHECK_EQ(stat_of(heap, 0, "pyalloc_stitches"), 1);
    printf("%d holes: %lu rounds for ten of them in a stitched request\n", N_HOLES, steps);
    CHECK(steps > 0 && steps <= 80);
    pya_heap_destroy(heap);
    free(held);
}

enum { N_CROWD = 3500, CROWD_PERIODS = 40, CROWD_LARGE = 40 };

/* In a program that repeats itself, a small request lay below thousands of others: no search goes that far. */
static void
test_places_in_a_crowd_cost_little(void) {
    struct pya_heap *heap = heap_new("");
    pya_dptr first = 0, ptr = 0;
    unsigned long most = 0;
    CHECK_OK(pya_alloc(heap, 0, 512, 0, &first));
    for (size_t i = 0; i < N_CROWD; i++) {
        CHECK_OK(pya_alloc(heap, 0, 512, 0, &ptr));
    }
    CHECK_OK(pya_free(heap, first));
    for (size_t k = 0; k < CROWD_PERIODS; k++) {
        for (size_t i = 0; i < CROWD_LARGE; i++) {
            CHECK_OK(pya_alloc(heap, 0, ((size_t)4 << 20) + i * 4096, 0, &ptr));
            CHECK_OK(pya_free(heap, ptr));
            unsigned long before = pya_debug_steps;
            CHECK_OK(pya_alloc(heap, 0, 512, 0, &ptr));
            unsigned long steps = pya_debug_steps - before;
            most = steps > most ? steps : most;
            CHECK_EQ(ptr, first);
            CHECK_OK(pya_free(heap, ptr));
        }
    }
    printf("%d small blocks: at most %lu rounds in a request below them\n", N_CROWD, most);
    CHECK(stat_of(heap, 0, "pyalloc_repeats") > CROWD_LARGE);
    CHECK(most > 0 && most <= MOST_STEPS);
    pya_heap_destroy(heap);
}

/* Many streams that take turns find their memory at once.  It is given back: one look finds out how far all of them
 * are. */
static void
test_streams_cost_each_other_little(void) {
    static const char *const options[] = {"", "vmm:False"};
    for (size_t k = 0; k < 2; k++) {
        struct pya_heap *heap = heap_new(options[k]);
        pya_dptr ptrs[N_POOLS];
        for (size_t i = 0; i < N_POOLS; i++) {
            CHECK_OK(pya_alloc(heap, 0, (size_t)20 << 20, 8 * (i + 1), &ptrs[i]));
        }
        for (size_t i = 0; i < N_POOLS; i++) {
            CHECK_OK(pya_free(heap, ptrs[i]));
        }
        unsigned long most = 0;
        for (size_t i = 0; i < N_POOLS; i++) {
            unsigned long steps = steps_of_pair(heap, (size_t)20 << 20, 8 * (i + 1));
            most = steps > most ? steps : most;
        }
        CHECK(most > 0 && most <= 40);
        unsigned long before = pya_debug_steps;
        CHECK_OK(pya_trim(heap, 0, (size_t)10 << 20));
        unsigned long steps = (pya_debug_steps - before) / N_POOLS;
        printf(
            "%d streams: at most %lu rounds in a request by turns, %lu for each in a collection\n",
            N_POOLS, most, steps);
        CHECK(steps > 0 && steps <= 40);
        CHECK(stat_of(heap, 0, "pyalloc_collections") > 0);
        pya_heap_destroy(heap);
    }
}

enum { N_BUFFERS = 4000, N_ROUNDS = 8 };

/* A program that makes everything anew from what it has, in every step: each request finds the like one of the last
 * step still in its place. */
static void
test_places_that_are_never_free_cost_little(void) {
    struct pya_heap *heap = heap_new("");
    pya_dptr *held = calloc(N_BUFFERS, sizeof *held);
    size_t *bytes = calloc(N_BUFFERS, sizeof *bytes);
    uint64_t seed = check_seed();
    for (size_t i = 0; i < N_BUFFERS; i++) {
        bytes[i] = ((size_t)64 << 10) + check_random(&seed) % 4096 * 512;
    }
    unsigned long before = pya_debug_steps;
    for (size_t i = 0; i < (size_t)N_ROUNDS * N_BUFFERS; i++) {
        size_t k = i % N_BUFFERS;
        pya_dptr fresh = 0;
        CHECK_OK(pya_alloc(heap, 0, bytes[k], 0, &fresh));
        CHECK_OK(pya_free(heap, held[k]));
        held[k] = fresh;
    }
    unsigned long steps = (pya_debug_steps - before) / ((unsigned long)N_ROUNDS * N_BUFFERS);
    printf("%d blocks made anew %d times: %lu rounds each\n", N_BUFFERS, N_ROUNDS, steps);
    CHECK(steps > 0 && steps <= MOST_STEPS);
    pya_heap_destroy(heap);
    free(held);
    free(bytes);
}

/* An allocator of the program's own: any addresses will do. */
static pya_dptr
own_alloc(void *arg, size_t bytes) {
    pya_dptr *next = arg;
    pya_dptr addr = *next;
    *next += pya_round_up(bytes, PYA_PAGE);
    return addr;
}

static void
own_free(void *arg, pya_dptr addr) {
    (void)arg;
    (void)addr;
}

/* Finding the oldest of like runs does not look at thousands of them. */
static void
test_crumbs_of_a_pool_cost_little(void) {
    enum { N = 20000, MOST_ROUNDS = 150 };
    static pya_dptr held[N];
    struct pya_heap *heap = heap_new("");
    pya_dptr next = (pya_dptr)1 << 40;
    const struct pya_segment_source source = {own_alloc, own_free, NULL, &next};
    const struct pya_stream_filter filter = {.began_on = POOL_STREAM};
    CHECK_OK(pya_pool_retain(heap, 0, pool_id(0), false));
    CHECK_OK(pya_pool_set_source(heap, 0, pool_id(0), source));
    CHECK_OK(pya_pool_begin(heap, 0, pool_id(0), filter));
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(pya_alloc(heap, 0, 512, POOL_STREAM, &held[i]));
    }
    for (size_t i = 0; i < N; i += 2) {
        CHECK_OK(pya_free(heap, held[i]));
    }
    unsigned long before = pya_debug_steps;
    for (size_t i = 0; i < N; i += 2) {
        CHECK_OK(pya_alloc(heap, 0, 512, POOL_STREAM, &held[i]));
    }
    CHECK(pya_debug_steps - before < N / 2 * (unsigned long)MOST_ROUNDS);
    CHECK_OK(pya_pool_end(heap, 0, pool_id(0)));
    pya_heap_destroy(heap);
}

/* Free runs of one size at equal distances are no deeper in their tree than any others. */
static void
test_equal_distances_cost_little(void) {
    static const size_t between[] = {24576, 43520};
    enum { N = 4000, MOST_ROUNDS = 60 };
    static pya_dptr held[N];
    for (size_t k = 0; k < sizeof between / sizeof *between; k++) {
        struct pya_heap *heap = heap_new("");
        for (size_t i = 0; i < N; i++) {
            pya_dptr guard;
            CHECK_OK(pya_alloc(heap, 0, PYA_PAGE, 0, &held[i]));
            CHECK_OK(pya_alloc(heap, 0, between[k], 0, &guard));
        }
        unsigned long before = pya_debug_steps;
        for (size_t i = 0; i < N; i++) {
            CHECK_OK(pya_free(heap, held[i * 7919 % N]));
        }
        for (size_t i = 0; i < N; i++) {
            CHECK_OK(pya_alloc(heap, 0, PYA_PAGE, 0, &held[i]));
        }
        CHECK(pya_debug_steps - before < 2UL * N * MOST_ROUNDS);
        pya_heap_destroy(heap);
    }
}
#endif

static size_t
host_bytes(struct pya_heap *heap) {
    return (size_t)stat_of(heap, 0, "pyalloc_host_bytes");
}

/* A heap with n live blocks of one size. */
static size_t
host_bytes_of(size_t n, size_t bytes) {
    struct pya_heap *heap = heap_new("");
    pya_dptr ptr;
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(pya_alloc(heap, 0, bytes, 0, &ptr));
    }
    size_t all = host_bytes(heap) - sizeof(struct pya_arena);
    pya_heap_destroy(heap);
    return all;
}

/* The first four numbers: the address map has grown and freed the old table.  The others: it still has the old one. */
static void
test_host_memory_of_blocks(void) {
    static const struct {
        size_t n, most;
    } cases[] = {{10000, 128},  {60000, 128}, {240000, 128},
                 {N_LIVE, 128}, {50000, 150}, {200000, 150}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t per_block = host_bytes_of(cases[i].n, 512) / cases[i].n;
        printf("%zu live blocks: %zu bytes of host memory each\n", cases[i].n, per_block);
        CHECK(per_block > 0 && per_block <= cases[i].most);
    }
}

/* The same number of blocks, with and without a page for each. */
static void
test_host_memory_of_pages(void) {
    for (size_t n = 1000; n <= N_PAGES; n += n / 3) {
        size_t with = host_bytes_of(n, (size_t)2 << 20);
        size_t without = host_bytes_of(n, 512);
        CHECK(with > without);
        size_t per_page = (with - without) / n;
        CHECK(per_page > 0 && per_page <= 64);
        printf("%zu pages: %zu bytes of host memory each\n", n, per_page);
    }
}

/* Every other page is held.  The pages between are stitched, and the stitched ranges stay when they are freed. */
static void
test_host_memory_of_mappings(void) {
    struct pya_heap *heap = heap_new("memory:tight");
    enum { N_HELD = 4096, N_RANGES = 16, RANGE_PAGES = N_HELD / N_RANGES };
    pya_dptr *held = calloc(2 * N_HELD, sizeof *held);
    pya_dptr ranges[N_RANGES];
    for (size_t i = 0; i < 2 * (size_t)N_HELD; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)2 << 20, 0, &held[i]));
    }
    for (size_t i = 0; i < 2 * (size_t)N_HELD; i += 2) {
        CHECK_OK(pya_free(heap, held[i]));
    }
    size_t before = host_bytes(heap);
    for (size_t i = 0; i < N_RANGES; i++) {
        CHECK_OK(pya_alloc(heap, 0, (size_t)RANGE_PAGES << 21, 0, &ranges[i]));
    }
    for (size_t i = 0; i < N_RANGES; i++) {
        CHECK_OK(pya_free(heap, ranges[i]));
    }
    size_t per_mapping = (host_bytes(heap) - before) / N_HELD;
    CHECK_EQ(stat_of(heap, 0, "pyalloc_stitches"), N_RANGES);
    printf("%d alias mappings: %zu bytes of host memory each\n", N_HELD, per_mapping);
    CHECK(per_mapping > 0 && per_mapping <= 8);
    pya_heap_destroy(heap);
    free(held);
}

enum { N_WARM = 1200, N_SET = 1000, N_PAIRS = 100000 };

/* n frees and requests on the first `n_live` blocks, of random sizes up to 1 MiB.  False: one failed. */
static bool
replace_blocks(struct pya_heap *heap, pya_dptr *ptrs, size_t n_live, size_t n, uint64_t *seed) {
    for (size_t k = 0; k < n; k++) {
        size_t i = check_random(seed) % n_live;
        if (pya_free(heap, ptrs[i]) != PYA_OK ||
            pya_alloc(heap, 0, 1 + check_random(seed) % (1U << 20), 0, &ptrs[i]) != PYA_OK) {
            return false;
        }
    }
    return true;
}

/* In a child: once warm, frees and requests under a filter that kills a process at any system call except read, write
 * and exit. Exit codes: 0 good, 1 something failed, 2 host memory was requested, 3 there is no such filter here. */
static int
run_filtered(void) {
    struct pya_heap *heap = heap_new("");
    pya_dptr ptrs[N_WARM] = {0};
    pya_dptr room;
    uint64_t seed = 7;
    if (pya_alloc(heap, 0, (size_t)2 << 30, 0, &room) != PYA_OK || pya_free(heap, room) != PYA_OK ||
        !replace_blocks(heap, ptrs, N_WARM, N_PAIRS, &seed)) {
        return 1;
    }
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
        return 3;
    }
    unsigned long before = fault_calls();
    bool good = replace_blocks(heap, ptrs, N_SET, N_PAIRS, &seed);
    return good ? (fault_calls() == before ? 0 : 2) : 1;
}

/* A request that a free block serves, and its free, make no system call and request no host memory. */
static void
test_fast_path_asks_nobody(void) {
    if (check_is_slow()) {
        return; /* sanitizers and valgrind make system calls */
    }
    pid_t child = fork();
    if (child == 0) {
        int code = run_filtered();
        (void)syscall(SYS_exit, code); /* exit() makes system calls that the filter forbids */
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 3) {
        printf("no filter for system calls here\n");
    }
}

static const struct check_case cases[] = {
#if PYA_ASSERT_LEVEL >= 2
    {"steps_are_bounded", test_steps_are_bounded},
    {"pools_cost_others_little", test_pools_cost_others_little},
    {"dropped_pools_cost_others_little", test_dropped_pools_cost_others_little},
    {"heirs_cost_others_little", test_heirs_cost_others_little},
    {"what_waits_costs_a_pool_little", test_what_waits_costs_a_pool_little},
    {"holes_cost_a_stitched_request_little", test_holes_cost_a_stitched_request_little},
    {"places_in_a_crowd_cost_little", test_places_in_a_crowd_cost_little},
    {"streams_cost_each_other_little", test_streams_cost_each_other_little},
    {"places_that_are_never_free_cost_little", test_places_that_are_never_free_cost_little},
    {"equal_distances_cost_little", test_equal_distances_cost_little},
    {"crumbs_of_a_pool_cost_little", test_crumbs_of_a_pool_cost_little},
#endif
    {"host_memory_of_blocks", test_host_memory_of_blocks},
    {"host_memory_of_pages", test_host_memory_of_pages},
    {"host_memory_of_mappings", test_host_memory_of_mappings},
    {"fast_path_asks_nobody", test_fast_path_asks_nobody},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
