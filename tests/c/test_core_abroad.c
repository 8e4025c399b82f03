/* Streams of another device that use a card's memory: a wait for the card's own device tells nothing of their work. */
#include "pools.h"
#include "streams.h"

#include <pthread.h>

/* Which of them uses the memory. */
enum abroad { ABROAD_OWN, ABROAD_DEFAULT, ABROAD_FOREIGN, N_ABROAD };

static struct {
    struct pya_sim *first;
    pya_stream stream;
    pya_status (*sync)(struct pya_device *dev);
} abroad;

/* What the second device's stream does with the first one's memory ends with a wait for the second. */
static pya_status
abroad_sync(struct pya_device *dev) {
    pya_status st = abroad.sync(dev);
    if (st == PYA_OK && dev->index == 1) {
        pya_sim_finish(abroad.first, abroad.stream);
    }
    return st;
}

/* The card hears of the stream.  `known` stays live, so that nothing waits for the stream because of it. */
static void
abroad_record(struct world *world, enum abroad kind, pya_dptr known) {
    CHECK_OK(pya_record_stream(world->heap, known, abroad.stream));
    CHECK(kind != ABROAD_FOREIGN || pya_note_foreign_stream(world->heap, abroad.stream, 1));
    world->sim = abroad.first;
}

static pya_dptr
abroad_init(struct world *world, enum abroad kind, const char *text) {
    *world = (struct world){
        .config = {.capacity_bytes = 128 * MIB, .work = PYA_SIM_WORK_BY_HAND, .quiet = true}};
    world_init(world, text);
    pya_dptr known = take(world, 512, ONE);
    abroad.first = world->sim;
    abroad.stream = kind == ABROAD_DEFAULT ? pya_stream_of_device(0, 1) : TWO;
    pya_sim_set_context(world->sim, abroad.stream, 1);
    abroad_record(world, kind, known); /* this may open the second device */
    abroad.sync = world->ops.device_sync;
    world->ops.device_sync = abroad_sync;
    return known;
}

/* The first device saw nothing unmapped, and nothing used by two streams, under unfinished work.  No stream was waited
 * for itself, which a capture that begins there meanwhile might not survive. */
static void
abroad_fini(struct world *world, pya_dptr known) {
    CHECK_EQ(calls(world, PYA_SIM_STREAM_SYNC), 0);
    pya_sim_finish_all(world->sim);
    give(world, known);
    CHECK_OK(pya_empty_cache(world->heap, -1));
    CHECK_EQ(reserved(world), 0);
    world_fini(world);
}

/* ONE frees memory that the other device still uses, because ONE will wait for that before its next use. */
static void
abroad_free(struct world *world, size_t bytes) {
    pya_dptr ptr = take(world, bytes, ONE);
    CHECK_OK(pya_sim_use(world->sim, abroad.stream, ptr, bytes));
    give(world, ptr);
}

static void
test_memory_given_back(void) {
    for (enum abroad kind = 0; kind < N_ABROAD; kind++) {
        struct world world;
        pya_dptr known = abroad_init(&world, kind, "");
        abroad_free(&world, 32 * MIB);
        CHECK_OK(pya_trim(world.heap, 0, 16 * MIB));
        CHECK_EQ(reserved(&world), 16 * MIB);
        abroad_record(&world, kind, known); /* a wait makes a foreign stream unknown again */
        abroad_free(&world, 32 * MIB);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(reserved(&world), 2 * MIB);
        abroad_fini(&world, known);
    }
}

static void
test_memory_changes_hands(void) {
    for (enum abroad kind = 0; kind < N_ABROAD; kind++) {
        struct world world;
        pya_dptr known = abroad_init(&world, kind, "");
        abroad_free(&world, 100 * MIB);
        pya_dptr ptr = take(&world, 90 * MIB, THREE); /* at the capacity */
        CHECK_OK(pya_sim_use(world.sim, THREE, ptr, 90 * MIB));
        give(&world, ptr);
        abroad_fini(&world, known);
    }
}

static void
test_memory_of_a_dropped_pool(void) {
    for (enum abroad kind = 0; kind < N_ABROAD; kind++) {
        struct world world;
        pya_dptr known = abroad_init(&world, kind, "");
        pool_begin(&world);
        abroad_free(&world, 32 * MIB);
        pool_end(&world);
        pya_dptr ptr = take(&world, 30 * MIB, THREE);
        CHECK_OK(pya_sim_use(world.sim, THREE, ptr, 30 * MIB));
        give(&world, ptr);
        abroad_fini(&world, known);
    }
}

static pya_status
no_record(struct pya_device *dev, pya_event event, pya_stream stream) {
    (void)dev;
    (void)event;
    (void)stream;
    return PYA_E_DEVICE;
}

static pya_status
no_stream_sync(struct pya_device *dev, pya_stream stream) {
    (void)dev;
    (void)stream;
    return PYA_E_DEVICE;
}

/* The stream cannot be asked, but its device is known. */
static void
test_memory_whose_use_no_event_marks(void) {
    for (enum abroad kind = ABROAD_DEFAULT; kind < N_ABROAD; kind++) {
        struct world world;
        pya_dptr known = abroad_init(&world, kind, "");
        pya_dptr there = 0;
        CHECK_OK(pya_alloc(world.heap, 1, 512, ONE, &there)); /* opens the second device */
        world.sim = abroad.first;
        world.ops.device_sync = abroad_sync; /* opening set it back */
        pya_dptr ptr = take(&world, 32 * MIB, ONE);
        CHECK_OK(pya_record_stream(world.heap, ptr, abroad.stream));
        CHECK_OK(pya_sim_use(world.sim, abroad.stream, ptr, 32 * MIB));
        world.ops.event_record = no_record;
        world.ops.stream_sync = no_stream_sync;
        give(&world, ptr);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(reserved(&world), 2 * MIB);
        give(&world, there);
        abroad_fini(&world, known);
    }
}

static size_t n_at_the_end; /* violations */

static void
end_close(struct pya_device *dev) {
    struct pya_sim_state state;
    dev->ops = world_opened.ops;
    pya_sim_query(pya_sim_of(dev), &state);
    n_at_the_end += state.n_violations;
    world_close(dev);
}

static void
test_memory_of_a_heap_that_ends(void) {
    for (enum abroad kind = 0; kind < N_ABROAD; kind++) {
        struct world world;
        (void)abroad_init(&world, kind, "");
        abroad_free(&world, 32 * MIB);
        n_at_the_end = 0;
        world.ops.close = end_close;
        pya_heap_destroy(world.heap);
        CHECK_EQ(n_at_the_end, 0);
    }
}

/* One of two threads: its card's memory is used by a foreign stream of the other card. */
struct party {
    struct pya_heap *heap;
    int device;
    pya_stream guest;
};

static void *
party_run(void *arg) {
    const struct party *party = arg;
    for (int i = 0; i < 200; i++) {
        pya_dptr ptr = 0;
        CHECK_OK(pya_alloc(party->heap, party->device, 4 * MIB, ONE, &ptr));
        CHECK_OK(pya_record_stream(party->heap, ptr, party->guest));
        (void)pya_note_foreign_stream(party->heap, party->guest, 1 - party->device);
        CHECK_OK(pya_free(party->heap, ptr));
        CHECK_OK(pya_empty_cache(party->heap, party->device));
    }
    return NULL;
}

/* Neither waits for a lock while it holds its own. */
static void
test_two_cards_wait_for_each_other(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB}};
    world_init(&world, "");
    struct party parties[2] = {{world.heap, 0, TWO}, {world.heap, 1, THREE}};
    pthread_t threads[2];
    for (int i = 0; i < 2;
         i++) { /* one after the other: the harness opens devices without a lock */
        pya_dptr ptr = 0;
        CHECK_OK(pya_alloc(world.heap, i, MIB, ONE, &ptr));
        CHECK_OK(pya_free(world.heap, ptr));
    }
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, party_run, &parties[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    CHECK_OK(pya_empty_cache(world.heap, -1));
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"two_cards_wait_for_each_other", test_two_cards_wait_for_each_other},
    {"memory_of_a_heap_that_ends", test_memory_of_a_heap_that_ends},
    {"memory_given_back", test_memory_given_back},
    {"memory_changes_hands", test_memory_changes_hands},
    {"memory_of_a_dropped_pool", test_memory_of_a_dropped_pool},
    {"memory_whose_use_no_event_marks", test_memory_whose_use_no_event_marks},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
