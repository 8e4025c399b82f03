/* Captures that a card cannot see coming: another thread begins one after a stream was queried and before its event is
 * recorded, or one begins on another card, which may not be open yet (core/fence.h). */
#include "core/heap.h"
#include "streams.h"

/* An event that became part of a graph.  As with a driver, querying it ends the capture. */
static struct {
    struct world *world;
    pya_stream stream;
    bool is_about_to_begin, is_on, is_spoiled;
    pya_event event;
} capture;

static pya_status
record_in_a_capture(struct pya_device *dev, pya_event event, pya_stream stream) {
    if (!capture.is_about_to_begin || stream != capture.stream) {
        capture.event = capture.event == event ? 0 : capture.event;
        return world_opened.ops->event_record(dev, event, stream);
    }
    capture.is_about_to_begin = false;
    capture.is_on = true;
    capture.event = event;
    pya_sim_set_capturing(capture.world->sim, stream, true);
    return PYA_OK;
}

static pya_status
query_in_a_capture(struct pya_device *dev, pya_event event, bool *done) {
    if (event == capture.event) {
        capture.is_spoiled = capture.is_spoiled || capture.is_on;
        return PYA_E_CAPTURE;
    }
    return world_opened.ops->event_query(dev, event, done);
}

static void
capture_expect(struct world *world, pya_stream stream) {
    capture.world = world;
    capture.stream = stream;
    capture.is_about_to_begin = true;
    capture.is_on = capture.is_spoiled = false;
    capture.event = 0;
    world->ops.event_record = record_in_a_capture;
    world->ops.event_query = query_in_a_capture;
}

static void
capture_end(struct world *world) {
    CHECK(capture.is_on && !capture.is_spoiled);
    capture.is_on = false;
    pya_sim_set_capturing(world->sim, capture.stream, false);
}

/* The captured stream is the one that owns the free memory, or the one that would take it. */
static void
test_a_fence_leaves_the_capture_whole(void) {
    static const pya_stream captured[] = {ONE, TWO};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        streams_init(&world, PYA_SIM_WORK_AT_ONCE);
        CHECK(exchange(&world));
        capture_expect(&world, captured[i]);
        for (int k = 0; k < 4; k++) {
            (void)exchange(&world);
        }
        capture_end(&world);
        streams_fini(&world);
    }
}

/* The event was made for the block, or had served before. */
static void
test_a_freed_block_leaves_the_capture_whole(void) {
    for (int has_spare = 0; has_spare < 2; has_spare++) {
        struct world world;
        streams_init(&world, PYA_SIM_WORK_AT_ONCE);
        for (int k = !has_spare; k < 2; k++) {
            pya_dptr block = take(&world, 4 * MIB, ONE);
            CHECK_OK(pya_record_stream(world.heap, block, TWO));
            if (k == 1) {
                capture_expect(&world, TWO);
            }
            give(&world, block);
            for (int n = 0; n < 9; n++) {
                give(&world, take(&world, MIB, ONE));
            }
            CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), k);
        }
        capture_end(&world);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), 0);
        streams_fini(&world);
    }
}

/* A block waits for a foreign stream, which only the stream's own device knows.  While that device captures, nothing
 * waits for the stream; blocks that wait for other streams come back. */
static void
test_a_capture_on_the_device_of_a_foreign_stream(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    pya_dptr block = take(&world, 4 * MIB, ONE);
    pya_dptr other = take(&world, 8 * MIB, ONE);
    struct pya_sim *first = world.sim;
    CHECK_OK(pya_record_stream(world.heap, other, THREE));
    CHECK_OK(pya_record_stream(world.heap, block, TWO));
    CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
    pya_sim_fail(first, 1U << PYA_SIM_EVENT_CREATE, 1, PYA_E_DEVICE, false);
    give(&world, block);
    give(&world, other);
    pya_dptr kept;
    CHECK_OK(pya_alloc(world.heap, 1, 4 * MIB, ONE, &kept));
    pya_sim_set_capturing(world.sim, ONE, true); /* on the second device */
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), 1);
    CHECK_OK(pya_empty_cache(world.heap, -1));
    pya_sim_set_capturing(world.sim, ONE, false);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 2); /* without the lock, and for the block */
    CHECK_EQ(stat_of(world.heap, 0, "reserved_bytes.all.current"), 0);
    CHECK_OK(pya_free(world.heap, kept));
    world_fini(&world);
}

/* Freed blocks wait for two streams.  One must not be waited for now, and the wait for the other fails: that error is
 * reported, whichever stream was used first. */
static void
test_a_capture_hides_no_failure(void) {
    for (int is_first = 0; is_first < 2; is_first++) {
        struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
        world_init(&world, "");
        pya_dptr blocks[] = {take(&world, 4 * MIB, ONE), take(&world, 8 * MIB, ONE)};
        struct pya_sim *first = world.sim;
        CHECK_OK(pya_record_stream(world.heap, blocks[0], is_first ? TWO : THREE));
        CHECK_OK(pya_record_stream(world.heap, blocks[1], is_first ? THREE : TWO));
        CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
        pya_dptr kept;
        CHECK_OK(pya_alloc(world.heap, 1, 4 * MIB, ONE, &kept));
        pya_sim_set_capturing(world.sim, ONE, true); /* on the second device */
        pya_sim_fail(first, 1U << PYA_SIM_EVENT_CREATE, 1, PYA_E_DEVICE, true);
        give(&world, blocks[0]);
        give(&world, blocks[1]);
        pya_sim_fail(first, 1U << PYA_SIM_STREAM_SYNC, 1, PYA_E_INVAL, true);
        CHECK_EQ(pya_empty_cache(world.heap, is_first ? 0 : -1), PYA_E_INVAL);
        (void)pya_sim_fail_clear(first);
        pya_sim_set_capturing(world.sim, ONE, false);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_OK(pya_free(world.heap, kept));
        world_fini(&world);
    }
}

/* A capture that grows its pool holds its card's lock meanwhile. */
static void
test_a_locked_card_may_capture(void) {
    struct world world = {.config = {.capacity_bytes = 1024 * MIB, .work = PYA_SIM_WORK_AT_ONCE}};
    world_init(&world, "");
    pya_dptr block = take(&world, 4 * MIB, ONE), kept;
    CHECK_OK(pya_record_stream(world.heap, block, TWO));
    CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
    CHECK_OK(pya_alloc(world.heap, 1, 4 * MIB, ONE, &kept));
    struct pya_card *card = pya_cards_get(&world.heap->cards, 1);
    pya_lock_acquire(&card->lock);
    give(&world, block); /* another stream may get it after a wait for TWO's device */
    give(&world, take(&world, 4 * MIB, THREE));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    pya_lock_release(&card->lock);
    for (size_t i = 1; i < 9; i++) { /* each larger than any free block */
        give(&world, take(&world, 8 * i * MIB, i % 2 == 0 ? THREE : ONE));
    }
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) > 0);
    CHECK_OK(pya_free(world.heap, kept));
    world_fini(&world);
}

/* The device of a foreign stream could not be opened when the stream was noted.  Once it can be, it is waited for. */
static void
test_foreign_stream_of_a_device_that_opens_later(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    pya_dptr ptr = take(&world, 4 * MIB, ONE), other;
    struct pya_sim *first = world.sim;
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    world.config.address_bytes = 1; /* too little to open a device */
    CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
    world.config.address_bytes = 0;
    pya_sim_fail(first, 1U << PYA_SIM_EVENT_CREATE, 1, PYA_E_DEVICE, false);
    give(&world, ptr);
    CHECK_EQ(pya_empty_cache(world.heap, 0), PYA_E_BUSY);
    CHECK_EQ(stat_of(world.heap, 0, "reserved_bytes.all.current"), 4 * MIB);
    CHECK_OK(pya_alloc(world.heap, 1, 4 * MIB, ONE, &other));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 2); /* on the second device */
    CHECK_EQ(stat_of(world.heap, 0, "reserved_bytes.all.current"), 0);
    CHECK_OK(pya_free(world.heap, other));
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"a_fence_leaves_the_capture_whole", test_a_fence_leaves_the_capture_whole},
    {"a_freed_block_leaves_the_capture_whole", test_a_freed_block_leaves_the_capture_whole},
    {"a_capture_on_the_device_of_a_foreign_stream",
     test_a_capture_on_the_device_of_a_foreign_stream},
    {"a_capture_hides_no_failure", test_a_capture_hides_no_failure},
    {"a_locked_card_may_capture", test_a_locked_card_may_capture},
    {"foreign_stream_of_a_device_that_opens_later",
     test_foreign_stream_of_a_device_that_opens_later},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
