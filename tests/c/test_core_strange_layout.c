/* Layouts of other programs: once it shows that a layout is not this program's, the program runs as without one.  A
 * program that comes to its layout late follows it then. */
#include "world.h"

enum { N_LAYERS = 12, N_STEPS = 60 };

/* Steps of ever new lengths with equal requests in each layer: only a step repeats itself.  Returns the peak of
 * reserved bytes. */
static size_t
varying_run(struct world *world, uint64_t seed) {
    pya_dptr kept[2 * N_LAYERS];
    size_t most = 0;
    for (int step = 0; step < N_STEPS; step++) {
        const size_t length = 20 + check_below(&seed, 60);
        const size_t n_layers = N_LAYERS / 2 + check_below(&seed, N_LAYERS / 2);
        for (size_t i = 0; i < n_layers; i++) {
            kept[2 * i] = take(world, length * MIB / 16, 0);
            give(world, take(world, length * MIB / 5, 0));
            kept[2 * i + 1] = take(world, length * MIB / 9, 0);
        }
        most = reserved(world) > most ? reserved(world) : most;
        for (size_t i = n_layers; i-- > 0;) {
            pya_dptr gradient = take(world, length * MIB / 11, 0);
            give(world, kept[2 * i + 1]);
            give(world, take(world, length * MIB / 5, 0));
            give(world, kept[2 * i]);
            give(world, gradient);
        }
        most = reserved(world) > most ? reserved(world) : most;
    }
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    return most;
}

static void
test_a_request_that_is_as_before_is_chance(void) {
    enum { N = 300, FEW = 64 };
    static struct pya_layout_place places[N];
    for (size_t i = 0; i < N; i++) {
        size_t bytes = (100 + i % 7) * MIB; /* none that is requested */
        places[i] = (struct pya_layout_place){i % 4 * 128 * MIB, bytes, 2};
    }
    const struct pya_layout layout = {places, N, N, PYA_LAYOUT_EVERY_DEVICE, NULL};
    for (uint64_t seed = 1; seed <= 10; seed++) {
        size_t most[2];
        int64_t n_repeats[2];
        for (int is_laid = 0; is_laid < 2; is_laid++) {
            struct world world = {.layouts = is_laid ? &layout : NULL};
            world_init(&world, "");
            most[is_laid] = varying_run(&world, seed);
            n_repeats[is_laid] = stat_of(world.heap, 0, "pyalloc_repeats");
            CHECK_EQ(stat_of(world.heap, 0, "pyalloc_planned"), 0);
            world_fini(&world);
        }
        CHECK(n_repeats[1] <= n_repeats[0] + FEW);
        CHECK(most[1] <= most[0] + 2 * PYA_PAGE);
    }
}

/* State that is loaded first when a training is resumed, or an evaluation: the layout was made without it. */
static void
test_a_program_comes_to_its_layout_late(void) {
#ifdef PYA_TEST_TINY
    enum { N = 25, N_BEFORE = 5 * N };
#else
    enum { N = 200, N_BEFORE = 5 * N };
#endif
    static struct pya_layout_place places[2 * N];
    static pya_dptr kept[N_BEFORE];
    uint64_t end = 0;
    for (size_t i = 0; i < N; i++) {
        places[i] = (struct pya_layout_place){end, (i * 7 % 11 + 1) * (MIB / 2) + MIB, N - i};
        places[N + i] = places[i];
        end += places[i].bytes;
    }
    const struct pya_layout layout = {places, 2 * N, N, PYA_LAYOUT_EVERY_DEVICE, NULL};
    for (size_t n_before = N_BEFORE / 10; n_before <= N_BEFORE; n_before *= 10) {
        struct world world = {.layouts = &layout};
        world_init(&world, "");
        for (size_t i = 0; i < n_before; i++) {
            kept[i] = take(&world, MIB + 512 * (i + 1), 0);
        }
        for (size_t i = 0; i < n_before; i++) {
            give(&world, kept[i]);
        }
        for (size_t i = 0; i < 2 * N; i++) {
            kept[i % N] = take(&world, places[i].bytes, 0);
            for (size_t k = 0; (i + 1) % N == 0 && k < N; k++) {
                give(&world, kept[k]);
            }
        }
        CHECK(stat_of(world.heap, 0, "pyalloc_planned") >= N / 2);
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        world_fini(&world);
    }
}

static const struct check_case cases[] = {
    {"a_request_that_is_as_before_is_chance", test_a_request_that_is_as_before_is_chance},
    {"a_program_comes_to_its_layout_late", test_a_program_comes_to_its_layout_late},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
