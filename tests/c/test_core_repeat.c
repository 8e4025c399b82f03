/* Programs that do the same again and again: their blocks come to lie where they lay, and the device is left alone. */
#include "world.h"

#include <stdlib.h>

#include "core/repeat.h"

enum { N_LAYERS = 24, N_TEMPORARY = 3 };

/* What a training step keeps: a gradient of each layer lives until the next step's backward pass. */
struct training {
    struct world world;
    pya_dptr gradients[N_LAYERS];
    pya_dptr places[4096]; /* of one step's requests */
    size_t n_places;
};

static size_t
layer_bytes(size_t layer, size_t kind) {
    return ((layer * 7 + kind * 5) % 11 + 2) * (MIB / 2) + layer * 512 * 64;
}

static pya_dptr
training_take(struct training *t, size_t bytes) {
    pya_dptr ptr = take(&t->world, bytes, 0);
    t->places[t->n_places++] = ptr;
    return ptr;
}

/* Forward: activations; backward: they go, gradients and temporaries come; but for them all are `extra`
 * bytes larger. */
static void
training_step(struct training *t, size_t extra) {
    pya_dptr kept[N_LAYERS];
    t->n_places = 0;
    pya_dptr batch = training_take(t, 3 * MIB + extra);
    for (size_t i = 0; i < N_LAYERS; i++) {
        kept[i] = training_take(t, layer_bytes(i, 0) + extra);
        give(&t->world, training_take(t, layer_bytes(i, 1)));
    }
    for (size_t i = 0; i < N_LAYERS; i++) {
        if (t->gradients[i] != 0) {
            give(&t->world, t->gradients[i]);
        }
    }
    for (size_t i = N_LAYERS; i-- > 0;) {
        pya_dptr temporary[N_TEMPORARY];
        for (size_t k = 0; k < N_TEMPORARY; k++) {
            temporary[k] = training_take(t, layer_bytes(i, k + 2) + extra);
        }
        t->gradients[i] = training_take(t, layer_bytes(i, 5));
        for (size_t k = 0; k < N_TEMPORARY; k++) {
            give(&t->world, temporary[k]);
        }
        give(&t->world, kept[i]);
    }
    give(&t->world, batch);
}

/* All alike. */
static void
training_steps(struct training *t, int n) {
    for (int step = 0; step < n; step++) {
        training_step(t, 0);
    }
}

static void
training_fini(struct training *t) {
    for (size_t i = 0; i < N_LAYERS; i++) {
        give(&t->world, t->gradients[i]);
    }
    world_fini(&t->world);
}

static int64_t
n_repeats(struct training *t) {
    return stat_of(t->world.heap, 0, "pyalloc_repeats");
}

static uint64_t
n_calls(struct training *t) {
    struct pya_sim_state state;
    uint64_t n = 0;
    pya_sim_query(t->world.sim, &state);
    for (size_t i = 0; i < sizeof state.n_calls / sizeof *state.n_calls; i++) {
        n += state.n_calls[i];
    }
    return n;
}

static void
test_a_step_finds_its_places_again(void) {
    struct training t = {0};
    pya_dptr before[4096];
    world_init(&t.world, "");
    training_steps(&t, 8);
    memcpy(before, t.places, sizeof before);
    uint64_t n = n_calls(&t);
    int64_t n_before = n_repeats(&t);
    for (int step = 0; step < 4; step++) {
        training_step(&t, 0);
        CHECK_EQ(memcmp(before, t.places, t.n_places * sizeof *before), 0);
    }
    CHECK_EQ(n_calls(&t), n);
    CHECK(n_repeats(&t) - n_before > 3 * (int64_t)t.n_places); /* all, but for what is stitched */
    training_fini(&t);
}

/* Where somebody else lies the request goes elsewhere, and nothing else changes. */
static void
test_a_place_that_is_taken_is_left_alone(void) {
    struct training t = {0};
    world_init(&t.world, "");
    training_steps(&t, 8);
    pya_dptr first = t.places[0];
    pya_dptr guests[64];
    size_t n_guests = 0;
    do { /* small blocks take what is free, in the end that place too */
        guests[n_guests] = take(&t.world, 32 << 10, 0);
    } while (guests[n_guests++] != first && n_guests < 64);
    pya_dptr guest = 0;
    if (guests[n_guests - 1] != first) {
        guest = take(&t.world, 3 * MIB, 0); /* is like the batch */
        CHECK_EQ(guest, first);
    }
    training_step(&t, 0);
    CHECK(t.places[0] != first);
    CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
    while (n_guests > 0) {
        give(&t.world, guests[--n_guests]);
    }
    if (guest != 0) {
        give(&t.world, guest);
    }
    training_fini(&t);
}

/* Steps whose sizes differ are left to best fit. */
static void
test_steps_that_differ_do_not_repeat(void) {
    struct training t = {0};
    world_init(&t.world, "");
    for (size_t step = 0; step < 12; step++) {
        training_step(&t, step * 4096);
    }
    CHECK_EQ(n_repeats(&t), 0);
    training_fini(&t);
}

/* Something else between two steps (an evaluation): the fifth step after it has all places of the fourth, long before those
 * steps are a share of all again. */
static void
test_an_interruption_is_got_over(void) {
    struct training t = {0};
    pya_dptr before[4096];
    world_init(&t.world, "");
    training_steps(&t, 30);
    for (size_t i = 0; i < 100; i++) {
        give(&t.world, take(&t.world, (i % 9 + 1) * MIB + i * 512, 0));
    }
    int64_t n = n_repeats(&t);
    training_steps(&t, 4);
    memcpy(before, t.places, sizeof before);
    training_step(&t, 0);
    CHECK_EQ(memcmp(before, t.places, t.n_places * sizeof *before), 0);
    CHECK(n_repeats(&t) - n >= (int64_t)t.n_places);
    training_fini(&t);
}

/* Where nothing ever repeats nobody looks any longer; a program that begins to repeat itself is noticed later. */
static void
test_what_never_repeats_costs_nothing(void) {
    struct training t = {0};
    uint64_t rng = 1;
    world_init(&t.world, "");
    for (size_t i = 0; i < 200000; i++) {
        rng = rng * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        give(&t.world, take(&t.world, PYA_REPEAT_FROM + (rng >> 40), 0));
    }
    CHECK_EQ(n_repeats(&t), 0);
    /* asleep or not, by then it looks again */
    for (size_t step = 0; n_repeats(&t) == 0 && step < 4000; step++) {
        training_step(&t, 0);
    }
    CHECK(n_repeats(&t) > 0);
    training_fini(&t);
}

/* Pools of graphs, which keep their own order, and memory without pages take no part. */
static void
test_plain_memory_takes_no_part(void) {
    struct training t = {0};
    world_init(&t.world, "vmm:false");
    training_steps(&t, 12);
    CHECK_EQ(n_repeats(&t), 0);
    training_fini(&t);
}

static const struct check_case cases[] = {
    {"places_again", test_a_step_finds_its_places_again},
    {"taken", test_a_place_that_is_taken_is_left_alone},
    {"differ", test_steps_that_differ_do_not_repeat},
    {"interruption", test_an_interruption_is_got_over},
    {"never", test_what_never_repeats_costs_nothing},
    {"plain", test_plain_memory_takes_no_part},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
