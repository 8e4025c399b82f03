/* Programs that do the same again and again: their blocks come to lie where they lay, and the device is left alone. */
#include "world.h"

#include <stdlib.h>

#include "core/debug.h"
#include "core/repeat.h"
#include "fault.h"

enum { N_LAYERS = 24, N_TEMPORARY = 3 };
/* The numbers of large requests after which nobody looks any longer if nothing repeated, of steps that are let pass
 * then, and of requests after which five steps should be known. */
#ifdef PYA_TEST_TINY
enum { N_AWAKE = 512, N_ASLEEP = 10, N_PAST = 150 };
#else
enum { N_AWAKE = 16384, N_ASLEEP = 100, N_PAST = 1200 };
#endif

/* What a training step keeps: the gradient of each layer lives until the next step's backward pass. */
struct training {
    struct world world;
    pya_stream stream;
    pya_dptr gradients[N_LAYERS];
    pya_dptr places[4096]; /* of one step's requests */
    size_t n_places;
    uint64_t seed; /* other sizes; 0: the first ones */
    bool adds;     /* gradients are added to existing ones */
};

static size_t
layer_bytes(const struct training *t, size_t layer, size_t kind) {
    if (t->seed == 0) {
        return ((layer * 7 + kind * 5) % 11 + 2) * (MIB / 2) + layer * 512 * 64;
    }
    uint64_t rng = t->seed * 1000 + kind * N_LAYERS + layer;
    (void)check_random(&rng);
    uint64_t n = check_random(&rng) >> 32;
    return (n % 24 + 1) * (MIB / 2) + n / 24 % 8 * 64 * 1024;
}

static pya_dptr
training_take(struct training *t, size_t bytes) {
    pya_dptr ptr = take(&t->world, bytes, t->stream);
    t->places[t->n_places++] = ptr;
    return ptr;
}

/* Forward: activations.  Backward: they go, gradients and temporaries come.  All but those are `extra` bytes larger. */
static void
training_step(struct training *t, size_t extra) {
    pya_dptr kept[N_LAYERS];
    t->n_places = 0;
    pya_dptr batch = training_take(t, 3 * MIB + extra);
    for (size_t i = 0; i < N_LAYERS; i++) {
        kept[i] = training_take(t, layer_bytes(t, i, 0) + extra);
        give(&t->world, training_take(t, layer_bytes(t, i, 1)));
    }
    for (size_t i = 0; i < N_LAYERS; i++) {
        if (t->gradients[i] != 0 && !t->adds) {
            give(&t->world, t->gradients[i]);
        }
    }
    for (size_t i = N_LAYERS; i-- > 0;) {
        pya_dptr temporary[N_TEMPORARY];
        for (size_t k = 0; k < N_TEMPORARY; k++) {
            temporary[k] = training_take(t, layer_bytes(t, i, k + 2) + extra);
        }
        pya_dptr gradient = training_take(t, layer_bytes(t, i, 5));
        for (size_t k = 0; k < N_TEMPORARY; k++) {
            give(&t->world, temporary[k]);
        }
        if (t->adds) {
            give(&t->world, gradient);
        } else {
            t->gradients[i] = gradient;
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
training_end(struct training *t) {
    for (size_t i = 0; i < N_LAYERS; i++) {
        give(&t->world, t->gradients[i]);
        t->gradients[i] = 0;
    }
}

static void
training_fini(struct training *t) {
    training_end(t);
    world_fini(&t->world);
}

/* n requests, hardly two of the same size. */
static void
never_alike(struct training *t, size_t n, uint64_t *rng) {
    for (size_t i = 0; i < n; i++) {
        give(&t->world, take(&t->world, PYA_REPEAT_FROM + (check_random(rng) >> 40), t->stream));
    }
}

static int64_t
n_repeats(struct training *t) {
    return stat_of(t->world.heap, 0, "pyalloc_repeats");
}

static void
test_a_step_finds_its_places_again(void) {
    struct training t = {0};
    pya_dptr before[4096];
    world_init(&t.world, "");
    training_steps(&t, 8);
    memcpy(before, t.places, sizeof before);
    uint64_t n = all_calls(&t.world);
    int64_t n_before = n_repeats(&t);
    for (int step = 0; step < 4; step++) {
        training_step(&t, 0);
        CHECK_EQ(memcmp(before, t.places, t.n_places * sizeof *before), 0);
    }
    CHECK_EQ(all_calls(&t.world), n);
    CHECK(n_repeats(&t) - n_before > 3 * (int64_t)t.n_places); /* all but what is stitched */
    training_fini(&t);
}

/* Whatever the sizes: a block that cannot lie where it lay is not put in another's way, which would go on for steps. */
static void
test_places_settle_soon(void) {
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct training t = {.seed = seed};
        world_init(&t.world, "");
        training_steps(&t, 6);
        uint64_t n = all_calls(&t.world);
        training_steps(&t, 5);
        CHECK_EQ(all_calls(&t.world), n);
        CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
        training_fini(&t);
    }
}

#if PYA_ASSERT_LEVEL >= 2
/* If free pages go back in each step, everything lies elsewhere in the next, and nobody looks for who will be in whose
 * way. Looking would take 3.2 rounds a request here, and dozens in a longer step. */
static void
test_what_goes_back_does_not_settle(void) {
    unsigned long n_rounds = 0;
    size_t n_all = 0;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct training t = {.seed = seed};
        world_init(&t.world, "");
        training_steps(&t, 4);
        for (int step = 0; step < 8; step++) {
            CHECK_EQ(pya_empty_cache(t.world.heap, 0), PYA_OK);
            unsigned long before = pya_debug_steps;
            training_step(&t, 0);
            n_rounds += pya_debug_steps - before;
            n_all += t.n_places;
        }
        training_fini(&t);
    }
    CHECK(n_rounds * 10 < n_all * 27);
}
#endif

#ifndef PYA_TEST_TINY /* which remembers less than such a step */
/* Gradients of several batches are added up.  No request marks the first batch; only its gradients live longer. */
static void
accumulating_steps(struct training *t, int n, int n_batches) {
    for (int batch = 0; batch < n * n_batches; batch++) {
        t->adds = batch % n_batches > 0;
        training_step(t, 0);
    }
}

static void
steps_made_of_batches(uint64_t seed, int n_batches) {
    struct training t = {.seed = seed};
    world_init(&t.world, "");
    accumulating_steps(&t, 8, n_batches);
    uint64_t n = all_calls(&t.world);
    accumulating_steps(&t, 4, n_batches);
    CHECK_EQ(all_calls(&t.world), n);
    CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
    training_fini(&t);
}

static void
test_steps_made_of_batches_settle(void) {
    for (uint64_t seed = 1; seed <= 24; seed++) {
        steps_made_of_batches(seed, 4);
    }
    for (uint64_t seed = 1; seed <= 6; seed++) {
        steps_made_of_batches(seed, 40);
    }
}
#endif

/* The optimizer's state is made in the first step.  The steps count as alike all the same. */
static void
test_a_step_that_was_longer_once(void) {
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct training t = {.seed = seed};
        pya_dptr state[N_LAYERS];
        world_init(&t.world, "");
        training_steps(&t, 1);
        for (size_t i = 0; i < N_LAYERS; i++) {
            state[i] = take(&t.world, layer_bytes(&t, i, 5), 0);
        }
        training_steps(&t, 2);
        int64_t n_before = n_repeats(&t);
        training_steps(&t, 1);
        CHECK(n_repeats(&t) - n_before > (int64_t)t.n_places / 4);
        for (size_t i = 0; i < N_LAYERS; i++) {
            give(&t.world, state[i]);
        }
        training_fini(&t);
    }
}

/* Once the steps are known to be alike, late because of what came before, it is also known who is in whose way. */
static void
test_places_settle_at_once(void) {
    int64_t n_again = 0;
    size_t n_all = 0;
    for (uint64_t seed = 1; seed <= 24; seed++) {
        struct training t = {.seed = seed};
        uint64_t rng = seed;
        world_init(&t.world, "");
        never_alike(&t, N_PAST, &rng);
        training_steps(&t, 5);
        int64_t n_before = n_repeats(&t);
        training_steps(&t, 1);
        n_again += n_repeats(&t) - n_before;
        n_all += t.n_places;
        training_fini(&t);
    }
    CHECK(n_again * 100 > (int64_t)n_all * 93);
}

/* The next host allocation fails.  Counts the requests that were served all the same; the others are served later. */
static pya_dptr
take_at_fault(struct training *t, size_t bytes, int *n_served) {
    pya_dptr ptr;
    fault_arm(1);
    pya_status st = pya_alloc(t->world.heap, 0, bytes, t->stream, &ptr);
    bool has_failed = fault_disarm();
    *n_served += st == PYA_OK && has_failed;
    return st == PYA_OK ? ptr : take(&t->world, bytes, t->stream);
}

/* Without the host memory to find out what is in whose way, best fit serves the request. */
static void
test_no_host_memory_to_settle(void) {
    struct training t = {.seed = 10};
    pya_dptr taken[N_LAYERS];
    pya_dptr guests[640];
    int n_served = 0;
    world_init(&t.world, "");
    training_steps(&t, 6);
    for (size_t i = 0; i < 640; i++) {
        guests[i] = take(&t.world, PYA_REPEAT_FROM / 2, 0);
    }
    pya_dptr batch = take(&t.world, 3 * MIB, 0);
    for (size_t i = 0; i < N_LAYERS; i++) {
        taken[i] = take_at_fault(&t, layer_bytes(&t, i, 0), &n_served);
        give(&t.world, take_at_fault(&t, layer_bytes(&t, i, 1), &n_served));
    }
    CHECK(n_served > 0);
    CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
    for (size_t i = 0; i < N_LAYERS; i++) {
        give(&t.world, taken[i]);
    }
    give(&t.world, batch);
    for (size_t i = 0; i < 640; i++) {
        give(&t.world, guests[i]);
    }
    training_fini(&t);
}

/* If its place is taken, a request goes elsewhere, and nothing else changes. */
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

/* Steps of different sizes are left to best fit. */
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

/* A stretch that repeats does not make differing steps alike. */
static void
test_a_stretch_that_repeats_is_not_enough(void) {
    struct training t = {0};
    uint64_t rng = 1;
    world_init(&t.world, "");
    for (int step = 0; step < 6; step++) {
        never_alike(&t, 900, &rng);
        for (size_t i = 0; i < 100; i++) {
            give(&t.world, take(&t.world, PYA_REPEAT_FROM + i * 4096, 0));
        }
    }
    CHECK_EQ(n_repeats(&t), 0);
    world_fini(&t.world);
}

/* Something else comes between two steps (an evaluation).  The seventh step after it has all places of the sixth,
 * before these steps are a large enough share of all again. */
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
    training_steps(&t, 6);
    memcpy(before, t.places, sizeof before);
    training_step(&t, 0);
    CHECK_EQ(memcmp(before, t.places, t.n_places * sizeof *before), 0);
    CHECK(n_repeats(&t) - n >= (int64_t)t.n_places);
    training_fini(&t);
}

/* If nothing ever repeats, nobody looks any longer.  A program that begins to repeat itself is noticed later. */
static void
test_what_never_repeats_costs_nothing(void) {
    struct training t = {0};
    uint64_t rng = 1;
    world_init(&t.world, "");
    never_alike(&t, 200000, &rng);
    CHECK_EQ(n_repeats(&t), 0);
    /* asleep or not, by then it looks again */
    for (size_t step = 0; n_repeats(&t) == 0 && step < 4000; step++) {
        training_step(&t, 0);
    }
    CHECK(n_repeats(&t) > 0);
    training_fini(&t);
}

/* After so many requests, a program may repeat itself for a while unnoticed, even if it did so before. */
static void
asleep(bool has_repeated) {
    struct training t = {0};
    uint64_t rng = 1;
    world_init(&t.world, "");
    training_steps(&t, has_repeated ? 30 : 0);
    never_alike(&t, (size_t)N_AWAKE * (has_repeated ? 2 : 1), &rng);
    int64_t n_before = n_repeats(&t);
    CHECK_EQ(n_before > 0, has_repeated);
    for (size_t step = 0; step < N_ASLEEP; step++) {
        training_step(&t, 4096);
    }
    CHECK_EQ(n_repeats(&t), n_before);
    for (size_t step = 0; n_repeats(&t) == n_before && step < 20 * (size_t)N_ASLEEP; step++) {
        training_step(&t, 4096);
    }
    CHECK(n_repeats(&t) > n_before);
    training_fini(&t);
}

static void
test_what_never_repeats_is_left_alone_for_a_while(void) {
    asleep(false);
    asleep(true);
}

/* However long the process did something else before, it is enough that all that is remembered repeats. */
static void
test_a_long_past_does_not_count(void) {
    struct training t = {0};
    world_init(&t.world, "");
    training_steps(&t, 2000);
    int64_t n_before = n_repeats(&t);
    for (size_t step = 0; step < 100; step++) {
        training_step(&t, 4096);
        give(&t.world, take(&t.world, 5 * MIB, 0)); /* steps are longer now */
    }
    CHECK(n_repeats(&t) - n_before > 10 * (int64_t)t.n_places);
    training_fini(&t);
}

/* In every step a program requests more than there is, gets an error and goes on. */
static void
test_a_request_that_fails_is_not_one(void) {
    struct training t = {.world = {.config = {.capacity_bytes = 1024 * MIB}}};
    pya_dptr before[4096];
    pya_dptr ptr;
    world_init(&t.world, "");
    for (int step = 0; step < 12; step++) {
        training_step(&t, 0);
        CHECK_EQ(pya_alloc(t.world.heap, 0, 1024 * MIB, 0, &ptr), PYA_E_NOMEM);
    }
    memcpy(before, t.places, sizeof before);
    int64_t n_before = n_repeats(&t);
    for (int step = 0; step < 4; step++) {
        CHECK_EQ(pya_alloc(t.world.heap, 0, 2048 * MIB, 0, &ptr), PYA_E_NOMEM);
        training_step(&t, 0);
        CHECK_EQ(memcmp(before, t.places, t.n_places * sizeof *before), 0);
    }
    CHECK(n_repeats(&t) - n_before > 3 * (int64_t)t.n_places);
    training_fini(&t);
}

/* The places are gone. */
static void
test_places_that_went_back_to_the_device(void) {
    struct training t = {0};
    world_init(&t.world, "");
    training_steps(&t, 8);
    training_end(&t);
    CHECK_OK(pya_empty_cache(t.world.heap, 0));
    pya_dptr other = take(&t.world, MIB, 0);
    training_steps(&t, 4);
    CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
    give(&t.world, other);
    training_fini(&t);
}

/* Memory that came from another stream with its addresses. */
static void
test_places_of_another_stream(void) {
    struct training t = {0};
    world_init(&t.world, "");
    give(&t.world, take(&t.world, 600 * MIB, 0));
    t.stream = 1;
    training_steps(&t, 8);
    int64_t n_before = n_repeats(&t);
    training_steps(&t, 4);
    CHECK(n_repeats(&t) - n_before > 3 * (int64_t)t.n_places);
    training_fini(&t);
}

/* A few requests, each alone.  The place of the first is in the middle of a free run once the lower memory is free. */
static void
few_requests(struct world *world) {
    for (size_t i = 0; i < 5; i++) {
        give(world, take(world, 4 * MIB + i * 512, 0));
    }
}

/* Such a place takes two records; at some time none is left. */
static void
test_records_run_out(void) {
    struct training t = {0};
    pya_dptr small[600];
    world_init(&t.world, "");
    pya_dptr below = take(&t.world, 8 * MIB, 0);
    for (size_t i = 0; i < 100; i++) {
        few_requests(&t.world);
    }
    give(&t.world, below);
    int64_t n_before = n_repeats(&t);
    for (size_t i = 0; i < 600; i++) {
        small[i] = take(&t.world, 512, 0);
        if (i % 2 == 0 || i == 301) { /* first at odd numbers of records, then at even ones */
            few_requests(&t.world);
        }
    }
    CHECK_EQ(n_repeats(&t) - n_before, 301 * 5);
    CHECK_EQ(pya_heap_check(t.world.heap, 0), 0);
    for (size_t i = 0; i < 600; i++) {
        give(&t.world, small[i]);
    }
    world_fini(&t.world);
}

/* Without host memory to remember requests, they are served all the same, and what is remembered does not grow, even
 * when there is memory again. */
static void
test_no_host_memory_to_remember(void) {
    struct training t = {0};
    world_init(&t.world, "");
    pya_dptr small = take(&t.world, 512, 0);
    for (size_t i = 0; i < 8; i++) { /* whatever else needs host memory has it by then */
        give(&t.world, take(&t.world, PYA_REPEAT_FROM / 2, 0));
    }
    int64_t n_none = stat_of(t.world.heap, 0, "pyalloc_host_bytes");
    fault_arm(1);
    give(&t.world, take(&t.world, PYA_REPEAT_FROM, 0));
    CHECK(fault_disarm());
    CHECK_EQ(stat_of(t.world.heap, 0, "pyalloc_host_bytes"), n_none);
    give(&t.world, take(&t.world, PYA_REPEAT_FROM, 0));
    int64_t n_first = stat_of(t.world.heap, 0, "pyalloc_host_bytes");
    CHECK(n_first > n_none);
    for (size_t i = 0; i < 4000; i++) {
        if (i < 2000) {
            fault_arm(1);
        }
        give(&t.world, take(&t.world, PYA_REPEAT_FROM + i % 3 * 512, 0));
        (void)fault_disarm();
    }
    CHECK(n_repeats(&t) > 3000);
    CHECK_EQ(stat_of(t.world.heap, 0, "pyalloc_host_bytes"), n_first);
    give(&t.world, small);
    world_fini(&t.world);
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
    {"settle", test_places_settle_soon},
#if PYA_ASSERT_LEVEL >= 2
    {"no_settling", test_what_goes_back_does_not_settle},
#endif
#ifndef PYA_TEST_TINY
    {"settle_batches", test_steps_made_of_batches_settle},
#endif
    {"settle_without_host_memory", test_no_host_memory_to_settle},
    {"longer_once", test_a_step_that_was_longer_once},
    {"settle_at_once", test_places_settle_at_once},
    {"taken", test_a_place_that_is_taken_is_left_alone},
    {"differ", test_steps_that_differ_do_not_repeat},
    {"stretch", test_a_stretch_that_repeats_is_not_enough},
    {"interruption", test_an_interruption_is_got_over},
    {"never", test_what_never_repeats_costs_nothing},
    {"asleep", test_what_never_repeats_is_left_alone_for_a_while},
    {"long_past", test_a_long_past_does_not_count},
    {"fails", test_a_request_that_fails_is_not_one},
    {"given_back", test_places_that_went_back_to_the_device},
    {"other_stream", test_places_of_another_stream},
    {"records", test_records_run_out},
    {"no_host_memory", test_no_host_memory_to_remember},
    {"plain", test_plain_memory_takes_no_part},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
