/* Where a block goes that cannot lie where its like lay one period ago, and what a period is (core/repeat.h). */
#include "core/repeat.h"
#include "loading.h"

enum { N_HOLES = 20, HOLE_BYTES = 4 << 20, N_FILLERS = 38, N_ALIKE = 14 };

/* What lives throughout, with holes between.  Returns the guard behind the room for the small ones. */
static pya_dptr
make_holes(struct world *world) {
    pya_dptr held[2 * N_HOLES];
    end_loading(world);
    (void)take(world, 400 * MIB, 0); /* large compared with what lives: not stitched */
    for (size_t i = 0; i < 2 * (size_t)N_HOLES; i++) {
        held[i] = take(world, HOLE_BYTES, 0);
    }
    pya_dptr room = take(world, MIB / 2, 0);
    pya_dptr guard = take(world, 512, 0);
    give(world, room);
    for (size_t i = 0; i < 2 * (size_t)N_HOLES; i += 2) {
        give(world, held[i]);
    }
    return guard;
}

static void
take_fillers(struct world *world) {
    for (size_t i = 0; i < N_FILLERS; i++) {
        give(world, take(world, PYA_REPEAT_FROM + i * 4096, 0));
    }
}

/* Small ones, one that fits in any hole, and one stitched from all the others but one.  Returns the second. */
static pya_dptr
period_of_holes(struct world *world, pya_dptr *stitched) {
    take_fillers(world);
    pya_dptr single = take(world, HOLE_BYTES, 0);
    *stitched = take(world, (size_t)(N_HOLES - 2) * HOLE_BYTES, 0);
    give(world, *stitched);
    return single;
}

/* A block that cannot lie where it lay is not put into the pages of a stitched one that will come while it lives,
 * however long the last one lived (is_kept: it still lives). */
static void
test_pages_of_stitched_ranges_are_left_alone(void) {
    for (int is_kept = 0; is_kept < 2; is_kept++) {
        struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
        pya_dptr before, after;
        world_init(&world, "");
        pya_dptr guard = make_holes(&world);
        pya_dptr kept = 0;
        for (size_t i = 0; i < N_ALIKE; i++) {
            kept = period_of_holes(&world, &before);
            if (!is_kept || i + 1 < N_ALIKE) {
                give(&world, kept);
            }
        }
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
        if (!is_kept) {
            CHECK_EQ(take(&world, HOLE_BYTES, 0), kept); /* another block lies there now */
        }
        uint64_t n_calls = calls(&world, PYA_SIM_MAP);
        pya_dptr single = period_of_holes(&world, &after);
        CHECK(single != kept);
        CHECK_EQ(after, before);
        CHECK_EQ(calls(&world, PYA_SIM_MAP), n_calls);
        give(&world, single);
        give(&world, guard);
        world_fini(&world);
    }
}

/* Each of two stitched blocks of one size gets its own range again, not the range used last.  Each request counts
 * once. */
static void
test_ranges_are_not_swapped(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB}};
    pya_dptr before[2] = {0, 0};
    world_init(&world, "");
    pya_dptr guard = make_holes(&world);
    for (size_t i = 0; i < N_ALIKE; i++) {
        pya_dptr pair[2];
        take_fillers(&world);
        for (int k = 0; k < 2; k++) {
            pair[k] = take(&world, (size_t)(N_HOLES / 2 - 1) * HOLE_BYTES, 0);
        }
        for (int k = 0; k < 2; k++) {
            give(&world, pair[k]);
            CHECK(i + 4 < N_ALIKE || pair[k] == before[k]);
            before[k] = pair[k];
        }
    }
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 2);
    int64_t n_served =
        stat_of(world.heap, 0, "pyalloc_fit_hits") + stat_of(world.heap, 0, "pyalloc_range_hits");
    int64_t n_before = stat_of(world.heap, 0, "pyalloc_range_hits");
    pya_dptr again = take(&world, (size_t)(N_HOLES / 2 - 1) * HOLE_BYTES, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_range_hits"), n_before + 1);
    CHECK_EQ(
        stat_of(world.heap, 0, "pyalloc_fit_hits") + stat_of(world.heap, 0, "pyalloc_range_hits"),
        n_served + 1);
    give(&world, again);
    give(&world, guard);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    world_fini(&world);
}

enum { N_LITTLE = 4 };

/* Four small ones among large ones: two of one size, one that lives for a whole period. */
static void
period_with_littles(struct world *world, pya_dptr little[N_LITTLE], size_t unlike) {
    pya_dptr batch = take(world, MIB, 0);
    give(world, take(world, unlike, 0));
    little[0] = take(world, 1024, 0);
    little[1] = take(world, 1024, 0);
    take_fillers(world);
    little[2] = take(world, 1536, 0);
    give(world, take(world, 2 * MIB, 0));
    if (little[3] != 0) {
        give(world, little[3]);
    }
    little[3] = take(world, 2048, 0);
    give(world, little[0]);
    give(world, little[1]);
    give(world, little[2]);
    give(world, batch);
}

/* Once the large blocks around them have settled, small requests lie where they lay too, whatever else became free
 * meanwhile and whatever fits best. */
static void
test_little_ones_find_their_places_again(void) {
    struct world world = {0};
    world_init(&world, "");
    pya_dptr guests[2 * N_LITTLE];
    for (size_t i = 0; i < 2 * (size_t)N_LITTLE; i++) {
        guests[i] = take(&world, 1024 + i / 4 * 512, 0);
    }
    pya_dptr little[N_LITTLE] = {0}, before[N_LITTLE];
    for (size_t i = 0; i < N_ALIKE + 4; i++) {
        period_with_littles(&world, little, 512);
    }
    memcpy(before, little, sizeof before);
    for (size_t i = 0; i < 2 * (size_t)N_LITTLE; i += 2) {
        give(&world, guests[i]); /* best fit would take these */
    }
    period_with_littles(&world, little, 512);
    CHECK(memcmp(before, little, sizeof before) == 0);
    /* one of another size: the others lie where they lay */
    period_with_littles(&world, little, 3072);
    CHECK(memcmp(before, little, sizeof before) == 0);
    /* a place that is taken is left alone; the next one is that of the last time */
    pya_dptr thief = take(&world, 1024, 0);
    while (thief != before[0]) {
        thief = take(&world, 1024, 0);
    }
    period_with_littles(&world, little, 512);
    CHECK(little[0] != before[0]);
    memcpy(before, little, sizeof before);
    give(&world, thief);
    period_with_littles(&world, little, 512);
    CHECK(memcmp(before, little, sizeof before) == 0);
    world_fini(&world);
}

/* The requests of a step that are still remembered. */
#ifdef PYA_TEST_TINY
enum { N_LONG = 200 };
#else
enum { N_LONG = 5000 };
#endif

static void
test_a_long_step_repeats(void) {
    struct world world = {0};
    world_init(&world, "");
    for (size_t i = 0; i < 3 * (size_t)N_LONG; i++) {
        give(&world, take(&world, PYA_REPEAT_FROM + i % N_LONG * 512, 0));
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_repeats") > N_LONG);
    world_fini(&world);
}

#ifndef PYA_TEST_TINY
enum { BANK_STEP = 64, BANK_KEPT = 4, BANK_STEPS = 300, BANK_MOST = 24 };

/* Some blocks of each step live for several steps (a memory bank): equal lives of two of them do not mark a step. */
static void
test_lives_by_chance_make_no_period(void) {
    struct world world = {0};
    static pya_dptr held[(BANK_MOST + 1) * BANK_STEP];
    static size_t until[(BANK_MOST + 1) * BANK_STEP];
    uint64_t seed = 1;
    world_init(&world, "");
    for (size_t i = 0; i < (size_t)BANK_STEPS * BANK_STEP; i++) {
        size_t at = 0;
        for (size_t k = 0; k < sizeof held / sizeof *held; k++) {
            if (held[k] != 0 && until[k] == i) {
                give(&world, held[k]);
                held[k] = 0;
            }
            at = held[k] == 0 ? k : at;
        }
        size_t k = i % BANK_STEP;
        bool is_kept = k >= BANK_STEP - BANK_KEPT;
        held[at] = take(&world, MIB + k * 37 % BANK_STEP * (MIB / 8), 0);
        until[at] =
            i + (is_kept ? (2 + check_random(&seed) % (BANK_MOST - 2)) * BANK_STEP : 1 + k % 7);
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_repeats") > BANK_STEPS * BANK_STEP * 2 / 3);
    for (size_t k = 0; k < sizeof held / sizeof *held; k++) {
        if (held[k] != 0) {
            give(&world, held[k]);
        }
    }
    world_fini(&world);
}
#endif

static const struct check_case cases[] = {
    {"pages_of_stitched_ranges_are_left_alone", test_pages_of_stitched_ranges_are_left_alone},
    {"ranges_are_not_swapped", test_ranges_are_not_swapped},
    {"little_ones_find_their_places_again", test_little_ones_find_their_places_again},
    {"a_long_step_repeats", test_a_long_step_repeats},
#ifndef PYA_TEST_TINY
    {"lives_by_chance_make_no_period", test_lives_by_chance_make_no_period},
#endif
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
