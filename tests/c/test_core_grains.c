/* Pages behind one handle: when they are made, that they are mapped and given back as a whole, and what they cost. */
#include "fault.h"
#include "sender.h"
#include "sweep.h"
#include "world.h"

#define GIB ((size_t)1 << 30)

static uint64_t
made(struct world *world) {
    return calls(world, PYA_SIM_PAGE_CREATE);
}

/* A large program has few handles.  A small one, and one that wants the last page, has a handle for each page. */
static void
test_large_programs_have_few_handles(void) {
    static const struct {
        const char *options;
        size_t bytes;
        uint64_t n_most, n_least;
    } cases[] = {
        {"", 100 * MIB, 50, 50},
        {"", 16 * GIB, 16 * GIB / (32 * MIB) + 4, 16 * GIB / (32 * MIB)},
        {"memory:tight", 2 * GIB, 2 * GIB / PYA_PAGE, 2 * GIB / PYA_PAGE},
        {"memory:fast", 5 * GIB / 8, 5 * GIB / 8 / (8 * MIB), 5 * GIB / 8 / (8 * MIB)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world world = {.config = {.capacity_bytes = 32 * GIB}};
        world_init(&world, cases[i].options);
        pya_dptr ptr = take(&world, cases[i].bytes, 0);
        CHECK(made(&world) >= cases[i].n_least && made(&world) <= cases[i].n_most);
        CHECK(calls(&world, PYA_SIM_MAP) == made(&world));
        CHECK_EQ(reserved(&world), cases[i].bytes);
        give(&world, ptr);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(reserved(&world), 0);
        CHECK_EQ(calls(&world, PYA_SIM_PAGE_RELEASE), made(&world));
        world_fini(&world);
    }
}

/* What a program loads comes in grains early, because none of it is freed.  That ends with the first free. */
static void
test_what_is_loaded_has_few_handles(void) {
    static const struct {
        bool is_loading;
        size_t n_handles; /* of the last 160 pages; 384 MiB were there */
    } cases[] = {{true, 40}, {false, 160}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct world world = {.config = {.capacity_bytes = 32 * GIB}};
        world_init(&world, "");
        pya_dptr first = take(&world, 32 * MIB, 0);
        (void)take(&world, 352 * MIB, 0);
        if (!cases[i].is_loading) {
            give(&world, first);
            first = take(&world, 32 * MIB, 0);
        }
        uint64_t n_before = made(&world);
        for (size_t k = 0; k < 10; k++) {
            (void)take(&world, 32 * MIB, 0);
        }
        CHECK_EQ(made(&world) - n_before, cases[i].n_handles);
        world_fini(&world);
    }
}

/* A layout of 2 GiB, almost all of it in two blocks that are freed at once: its pages come in grains from the first
 * block on. Without a layout they would come one by one until 1.5 GiB are reserved. */
static void
test_those_of_a_layout_come_at_once(void) {
    enum { N = 60 };
    const size_t bytes = 33 * MIB;
    struct pya_layout_place places[N];
    for (size_t i = 0; i < N; i++) {
        places[i] = (struct pya_layout_place){i * bytes, bytes, 1 + i % 2 * N};
    }
    struct pya_layout layout = {places, N, N, PYA_LAYOUT_EVERY_DEVICE, NULL};
    struct world world = {.layouts = &layout, .config = {.capacity_bytes = 32768 * MIB}};
    pya_dptr ptrs[N];
    world_init(&world, "");
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(&world, bytes, 0);
        CHECK_EQ(ptrs[i], ptrs[0] + i * bytes);
        CHECK(reserved(&world) < (i + 1) * bytes + 5 * PYA_PAGE);
        if (i % 2 == 0) {
            give(&world, ptrs[i]);
        }
    }
    CHECK_EQ(reserved(&world), pya_round_up(N * bytes, PYA_PAGE));
    CHECK(made(&world) < N * bytes / PYA_PAGE / 3);
    for (size_t i = 1; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* What such a program requests beyond its layout lies behind it.  After the cache was emptied, the layout's memory is
 * made again where it was, and no further than what lies above. */
static void
test_what_lies_behind_a_layout_comes_back(void) {
    const size_t bytes = 1536 * MIB;
    const size_t unforeseen[] = {5 * MIB, 10 * MIB, 3 * MIB};
    const struct pya_layout_place place = {0, bytes, 0};
    struct pya_layout layout = {&place, 1, 1, PYA_LAYOUT_EVERY_DEVICE, NULL};
    struct world world = {.layouts = &layout, .config = {.capacity_bytes = 32768 * MIB}};
    pya_dptr before[3];
    world_init(&world, "");
    for (int step = 0; step < 3; step++) {
        pya_dptr first = take(&world, bytes, 0);
        pya_dptr ptrs[3];
        for (size_t i = 0; i < 3; i++) {
            ptrs[i] = take(&world, unforeseen[i], 0);
            before[i] = step == 0 ? ptrs[i] : before[i];
            CHECK_EQ(ptrs[i], before[i]);
            CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        }
        give(&world, ptrs[1]);
        CHECK_OK(pya_empty_cache(world.heap, 0)); /* a hole of the second one's pages */
        give(&world, ptrs[0]);
        give(&world, ptrs[2]);
        give(&world, first);
    }
    world_fini(&world);
}

/* Every second block of 32 MiB is free.  A request for all of that is served by their grains as they are. */
static void
test_whole_grains_are_stitched(void) {
    enum { N = 256 };
    struct world world = {.config = {.capacity_bytes = 32 * GIB}};
    pya_dptr ptrs[N];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, N * 32 * MIB, 0));
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(&world, 32 * MIB, 0);
    }
    for (size_t i = 0; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    size_t before = reserved(&world);
    uint64_t n_maps = calls(&world, PYA_SIM_MAP);
    pya_dptr ptr = take(&world, N / 4 * 32 * MIB, 0);
    CHECK_EQ(reserved(&world), before);
    CHECK_EQ(calls(&world, PYA_SIM_MAP) - n_maps, N / 4);
    give(&world, ptr);
    for (size_t i = 1; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* As many pages are free as a grain has, but in two grains with live blocks: another grain is given back. */
static void
test_a_grain_that_begins_below_a_run_stays(void) {
    struct world world = {.config = {.capacity_bytes = 32 * GIB}};
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 8 * GIB, 0));
    (void)take(&world, 8 * GIB - 96 * MIB, 0);
    pya_dptr other = take(&world, 32 * MIB, 0);
    pya_dptr low = take(&world, 2 * MIB, 0);
    pya_dptr middle = take(&world, 32 * MIB, 0); /* of equals the highest goes */
    pya_dptr high = take(&world, 30 * MIB, 0);
    CHECK(low == other + 32 * MIB && middle == low + 2 * MIB && high == middle + 32 * MIB);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    give(&world, middle);
    give(&world, other);
    CHECK_EQ(collect(&world, 32 * MIB), 32 * MIB);
    CHECK_EQ(collect(&world, 32 * MIB), 0);
    give(&world, low);
    CHECK_EQ(collect(&world, 32 * MIB), 32 * MIB);
    world_fini(&world);
}

/* Of grains with live blocks, one gives its free start; only the missing pages are made. */
static void
test_broken_grains_stay(void) {
    enum { N = 64 };
    struct world world = {.config = {.capacity_bytes = 32 * GIB}};
    pya_dptr ptrs[2 * N];
    world_init(&world, "");
    CHECK_OK(pya_reserve(world.heap, 0, 8 * GIB, 0));
    pya_dptr rest = take(&world, 8 * GIB - (size_t)N * 32 * MIB, 0);
    for (size_t i = 0; i < N; i++) {
        ptrs[2 * i] = take(&world, 30 * MIB, 0);
        ptrs[2 * i + 1] = take(&world, 2 * MIB, 0);
    }
    CHECK_EQ(reserved(&world), 8 * GIB);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0));
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[2 * i]);
    }
    pya_dptr ptr = take(&world, 64 * MIB, 0);
    CHECK_EQ(reserved(&world), 8 * GIB + 34 * MIB);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 8 * GIB + 34 * MIB);
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[2 * i + 1]);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 8 * GIB - (size_t)(N - 1) * 32 * MIB + 34 * MIB);
    give(&world, ptr);
    give(&world, rest);
    world_fini(&world);
}

/* Grains are given back whole: at least what was requested, unless that would take what is reserved for good. */
static void
test_a_little_is_trimmed(void) {
    struct world world = {.config = {.capacity_bytes = 32 * GIB}};
    world_init(&world, "");
    give(&world, take(&world, 8 * GIB, 0));
    CHECK_OK(pya_trim(world.heap, 0, 8 * GIB - 2 * MIB));
    CHECK_EQ(reserved(&world), 8 * GIB - 32 * MIB);
    CHECK_OK(pya_reserve(world.heap, 0, 8 * GIB - 40 * MIB, 0));
    CHECK_OK(pya_trim(world.heap, 0, 0));
    CHECK_EQ(reserved(&world), 8 * GIB - 32 * MIB);
    world_fini(&world);
}

/* What is written at one address is read at the others, through grains and single pages in one range. */
static void
test_bytes_are_the_same(void) {
    enum { N = 40 };
    struct world world = {
        .config = {.capacity_bytes = 4 * GIB, .address_bytes = (uint64_t)1 << 36, .backed = true}};
    pya_dptr ptrs[N];
    world_init(&world, "memory:fast,limit:1500MiB");
    for (size_t i = 0; i < N; i++) {
        ptrs[i] = take(&world, 37 * MIB, 0);
    }
    for (size_t i = 0; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    const size_t bytes = 290 * MIB;
    pya_dptr ptr = take(&world, bytes, 0);
    CHECK(stat_of(world.heap, 0, "pyalloc_stitches") > 0);
    volatile unsigned *words = (volatile unsigned *)(uintptr_t)ptr;
    for (size_t i = 0; i < bytes / PYA_PAGE; i++) {
        words[i * (PYA_PAGE / 4)] = (unsigned)i + 1;
        words[(i + 1) * (PYA_PAGE / 4) - 1] = (unsigned)i + 1001;
    }
    for (size_t i = 0; i < bytes / PYA_PAGE; i++) {
        CHECK_EQ(words[i * (PYA_PAGE / 4)], (unsigned)i + 1);
        CHECK_EQ(words[(i + 1) * (PYA_PAGE / 4) - 1], (unsigned)i + 1001);
    }
    for (size_t i = 1; i < N; i += 2) { /* no bytes of others */
        CHECK_EQ(*(volatile unsigned *)(uintptr_t)ptrs[i], 0);
    }
    /* The same through another process's mapping. */
    struct sender sender = {.heap = world.heap};
    const struct pya_import_source source = {.arg = &sender, .next = sender_next};
    pya_dptr base = 0;
    for (int k = 0; k < 2; k++) {
        pya_dptr shared = k == 0 ? ptr : ptrs[1];
        sender.next = 0;
        CHECK_OK(pya_share(world.heap, shared, &sender.shared));
        CHECK_OK(pya_import_open(world.heap, 0, sender.shared.n_pages, &source, &base));
        *(volatile unsigned *)(uintptr_t)(base + sender.shared.offset) = 7;
        CHECK_EQ(*(volatile unsigned *)(uintptr_t)shared, 7);
        CHECK_OK(pya_import_close(world.heap, base));
    }
    give(&world, ptr);
    for (size_t i = 1; i < N; i += 2) {
        give(&world, ptrs[i]);
    }
    world_fini(&world);
}

/* Blocks of all sizes come and go on three streams, with stitching, moving and collection: grains stay whole. */
static void
random_program(struct world *world, uint64_t seed, int n_operations) {
    enum { N = 48 };
    pya_dptr ptrs[N] = {0};
    for (int i = 0; i < n_operations; i++) {
        size_t k = check_below(&seed, N);
        if (ptrs[k] != 0) {
            give(world, ptrs[k]);
            ptrs[k] = 0;
            continue;
        }
        size_t bytes = (size_t)512 << check_below(&seed, 19);
        bytes += check_below(&seed, 2) != 0 ? check_below(&seed, bytes) : 0;
        pya_status st = pya_alloc(world->heap, 0, bytes, check_below(&seed, 3), &ptrs[k]);
        CHECK(st == PYA_OK || st == PYA_E_NOMEM);
        if (check_below(&seed, 64) == 0) {
            CHECK_OK(pya_trim(world->heap, 0, check_below(&seed, 4) * GIB));
        }
        if (i % 16 == 0) {
            CHECK_EQ(pya_heap_check(world->heap, 0), 0);
        }
    }
    for (size_t k = 0; k < N; k++) {
        if (ptrs[k] != 0) {
            give(world, ptrs[k]);
        }
    }
}

static void
test_grains_stay_whole(void) {
    static const char *const options[] = {
        "",
        "memory:fast",
        "memory:fast,soft_limit:1GiB",
        "memory:fast,limit:1500MiB",
        "memory:fast,limit:1500MiB,shared_pages:False",
        "garbage_collection_threshold:0.4",
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        struct world world = {.config = {.capacity_bytes = 6 * GIB}};
        world_init(&world, options[i]);
        random_program(&world, check_seed() + i, 3000);
        CHECK(made(&world) < calls(&world, PYA_SIM_MAP) || i > 0);
        sweep_check_empty(world.heap, world.sim);
        world_fini(&world);
    }
}

/* Large blocks, stitched ones, another stream, and a cache that is emptied. */
static bool
fail_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {
        .config = {.capacity_bytes = 4 * GIB, .address_bytes = (uint64_t)1 << 36, .quiet = true}};
    pya_dptr ptrs[12] = {0};
    world_init(&world, options);
    give(&world, take(&world, 512, 0));
    sweep_arm(world.sim, nth, host, with);
    for (size_t i = 0; i < 10; i++) {
        (void)!pya_alloc(world.heap, 0, (60 + i) * MIB, i % 4 == 3, &ptrs[i]);
    }
    for (size_t i = 0; i < 10; i += 2) {
        (void)!(ptrs[i] != 0 ? pya_free(world.heap, ptrs[i]) : PYA_OK);
        ptrs[i] = 0;
    }
    (void)!pya_alloc(world.heap, 0, 200 * MIB, 0, &ptrs[10]);
    (void)!pya_trim(world.heap, 0, 500 * MIB);
    (void)!pya_alloc(world.heap, 0, 90 * MIB, 1, &ptrs[11]);
    bool fired = sweep_disarm(world.sim, host);
    for (size_t i = 0; i < 12; i++) {
        if (ptrs[i] != 0) {
            give(&world, ptrs[i]);
        }
    }
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    return fired;
}

static void
test_failures_lose_nothing(void) {
    sweep_all(fail_once, "memory:fast");
    sweep_all(fail_once, "memory:fast,limit:700MiB");
}

static const struct check_case cases[] = {
    {"large_programs_have_few_handles", test_large_programs_have_few_handles},
    {"what_is_loaded_has_few_handles", test_what_is_loaded_has_few_handles},
    {"those_of_a_layout_come_at_once", test_those_of_a_layout_come_at_once},
    {"what_lies_behind_a_layout_comes_back", test_what_lies_behind_a_layout_comes_back},
    {"whole_grains_are_stitched", test_whole_grains_are_stitched},
    {"a_grain_that_begins_below_a_run_stays", test_a_grain_that_begins_below_a_run_stays},
    {"broken_grains_stay", test_broken_grains_stay},
    {"a_little_is_trimmed", test_a_little_is_trimmed},
    {"bytes_are_the_same", test_bytes_are_the_same},
    {"grains_stay_whole", test_grains_stay_whole},
    {"failures_lose_nothing", test_failures_lose_nothing},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
