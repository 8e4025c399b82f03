/* Moving the trace out of the heap while it goes on: nothing twice, nothing lost, contexts counted. */
#include "check.h"
#include "core/history.h"
#include "core/snapshot.h"
#include "world.h"

#include <stdlib.h>

/* Contexts are the counter itself: every reference is one. */
static long n_references;

static void *
count_capture(void *arg, bool with_stack) {
    (void)arg;
    (void)with_stack;
    n_references++;
    return &n_references;
}

static void
count_retain(void *arg, void *context) {
    (void)arg;
    n_references += context != NULL;
}

static void
count_release(void *arg, void *context) {
    (void)arg;
    n_references -= context != NULL;
}

static void
counted_world(struct world *world) {
    n_references = 0;
    world->hooks.capture_context = count_capture;
    world->hooks.retain_context = count_retain;
    world->hooks.release_context = count_release;
    world_init(world, "");
}

/* How many entries of an action; gives the part back. */
static size_t
part_count(struct pya_history_part *part, enum pya_action action) {
    size_t n = 0;
    uint64_t last_ns = 0;
    for (size_t i = 0; i < part->n; i++) {
        const struct pya_entry *entry = &part->items[(part->first + i) % part->n];
        CHECK(entry->time_ns >= last_ns);
        last_ns = entry->time_ns;
        n += entry->action == action;
        count_release(NULL, entry->context);
    }
    free(part->items);
    return n;
}

static void
test_taken_once_and_in_order(void) {
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    counted_world(&world);
    CHECK(!pya_history_take(world.heap, 0, &part, &now_ns)); /* the device is not open */
    pya_dptr kept = take(&world, MIB, 0);
    CHECK(!pya_history_take(world.heap, 0, &part, &now_ns)); /* nothing is recorded */
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 1000, 0));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 10; i++) {
            give(&world, take(&world, MIB, 0));
        }
        CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
        CHECK_EQ(part.n_lost, 0);
        CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 10);
    }
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n, 0);
    free(part.items);
    pya_dptr live = take(&world, MIB, 0);
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 1);
    CHECK_EQ(n_references, 1); /* the live block keeps its own */
    give(&world, live);
    give(&world, kept);
    pya_history_stop(world.heap);
    CHECK_EQ(n_references, 0);
    world_fini(&world);
}

static void
test_what_the_ring_lost_is_told(void) {
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    counted_world(&world);
    give(&world, take(&world, MIB, 0));
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 8, 0));
    for (int i = 0; i < 10; i++) {
        give(&world, take(&world, MIB, 0)); /* three entries each */
    }
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n, 8);
    CHECK_EQ(part.n_lost, 22);
    CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 2);
    give(&world, take(&world, MIB, 0));
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n_lost, 0);
    CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 1);
    CHECK_EQ(n_references, 0);
    world_fini(&world);
}

static void
test_uses_on_streams_are_in_the_trace_and_in_no_snapshot(void) {
    struct world world = {0};
    struct pya_history_part part;
    struct pya_snapshot snap;
    uint64_t now_ns = 0;
    counted_world(&world);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_NEVER, true, 100, 0));
    pya_dptr block = take(&world, MIB, 0);
    CHECK_OK(pya_record_stream(world.heap, block, 7));
    CHECK_OK(pya_snapshot_take(world.heap, NULL, true, &snap));
    for (size_t i = 0; i < snap.n_entries; i++) {
        CHECK(snap.entries[i].action != PYA_ACTION_RECORD_STREAM);
    }
    pya_snapshot_fini(&snap);
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part_count(&part, PYA_ACTION_RECORD_STREAM), 1);
    give(&world, block);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"taken_once", test_taken_once_and_in_order},
    {"lost", test_what_the_ring_lost_is_told},
    {"record_stream", test_uses_on_streams_are_in_the_trace_and_in_no_snapshot},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
