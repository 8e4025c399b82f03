/* Moving the history out of the heap while it goes on: nothing twice, nothing lost, contexts counted. */
#include "check.h"
#include "core/heap.h"
#include "core/history.h"
#include "core/snapshot.h"
#include "fault.h"
#include "world.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

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

/* The number of entries of an action; gives the part back. */
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
    CHECK(pya_history_context(world.heap, live) == &n_references);
    CHECK_EQ(n_references, 2); /* and gives another */
    count_release(NULL, &n_references);
    CHECK(pya_history_context(world.heap, kept) == NULL);
    CHECK(pya_history_context(world.heap, live + 512) == NULL);
    give(&world, kept);
    pya_history_forget(world.heap);
    CHECK(pya_history_is_on(world.heap));
    pya_history_stop(world.heap);
    CHECK(!pya_history_is_on(world.heap));
    CHECK_EQ(n_references, 1); /* also after that */
    give(&world, live);
    CHECK(pya_history_context(world.heap, live) == NULL);
    CHECK_EQ(n_references, 0);
    give(&world, take(&world, MIB, 0));
    CHECK(!pya_history_take(world.heap, 0, &part, &now_ns));
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

/* The oldest entries are dropped, as many as there is no room for. */
static void
test_the_newest_stay_in_a_ring_of_another_size(void) {
    static const size_t sizes[] = {8, 20, 5, 1000};
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    counted_world(&world);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 10, 0));
    for (int i = 0; i < 7; i++) {
        give(
            &world,
            take(&world, MIB + (size_t)i * 512, 0)); /* three entries each, except for a segment */
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, sizes[i], 0));
    }
    give(&world, take(&world, MIB, 0));
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n, 5 + 3);
    CHECK_EQ(part.first, 0);
    for (size_t i = 0; i < part.n; i++) {
        size_t bytes = i < 2 ? MIB + 5 * 512 : i < 5 ? MIB + 6 * 512 : MIB;
        CHECK_EQ(part.items[i].bytes, bytes);
    }
    part_count(&part, PYA_ACTION_ALLOC);
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
    const struct pya_pool_id pool = {3, 4};
    CHECK_OK(pya_pool_retain(world.heap, 0, pool, false));
    CHECK_OK(pya_pool_retain(world.heap, 0, pool, false));
    CHECK_OK(pya_pool_release(world.heap, 0, pool)); /* it has another user */
    CHECK_OK(pya_pool_release(world.heap, 0, pool));
    CHECK_OK(pya_snapshot_take(world.heap, NULL, true, &snap));
    for (size_t i = 0; i < snap.n_entries; i++) {
        CHECK(snap.entries[i].action < PYA_ACTION_RECORD_STREAM);
    }
    pya_snapshot_fini(&snap);
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    const struct pya_entry *last = &part.items[part.n - 3]; /* before the snapshot's */
    CHECK_EQ(last[0].action, PYA_ACTION_RECORD_STREAM);
    CHECK_EQ(last[1].action, PYA_ACTION_POOL_RELEASE);
    CHECK_EQ(last[1].place.pool.second, 4);
    CHECK_EQ(part_count(&part, PYA_ACTION_RECORD_STREAM), 1);
    give(&world, block);
    world_fini(&world);
}

/* The number of entries of the action that have a context; then forgets the trace. */
static size_t
n_told(struct world *world, enum pya_action action) {
    struct pya_history_part part;
    uint64_t now_ns = 0;
    size_t n = 0;
    CHECK(pya_history_take(world->heap, 0, &part, &now_ns));
    for (size_t i = 0; i < part.n; i++) {
        const struct pya_entry *entry = &part.items[(part.first + i) % part.n];
        n += entry->action == action && entry->context != NULL;
    }
    (void)part_count(&part, action);
    return n;
}

/* A freed block keeps its context until the other streams are done with it, even if the history was stopped. */
static void
test_what_waits_keeps_its_context(void) {
    for (int ends = 0; ends < 3; ends++) {
        struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
        struct pya_snapshot snap;
        counted_world(&world);
        CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 100, 0));
        pya_dptr block = take(&world, MIB, 0);
        CHECK_OK(pya_record_stream(world.heap, block, 7));
        give(&world, block);
        CHECK_EQ(n_told(&world, PYA_ACTION_FREE_REQUESTED), 1);
        CHECK_EQ(n_references, 1);
        CHECK_OK(pya_snapshot_take(world.heap, NULL, false, &snap));
        CHECK_EQ(snap.blocks[0].state, PYA_SNAP_PENDING);
        CHECK(snap.blocks[0].context == &n_references);
        pya_snapshot_fini(&snap);
        CHECK(pya_history_context(world.heap, block) == NULL); /* no live block's */
        if (ends == 1) {
            pya_history_stop(world.heap);
        }
        if (ends < 2) {
            CHECK_OK(pya_empty_cache(world.heap, 0));
            CHECK_EQ(ends == 0 ? n_told(&world, PYA_ACTION_FREE_COMPLETED) : 1, 1);
            CHECK_EQ(n_references, 0);
        }
        world_fini(&world);
        CHECK_EQ(n_references, 0);
    }
}

static void
test_a_bad_level_or_half_the_hooks_are_refused(void) {
    struct world world = {0};
    counted_world(&world);
    CHECK_EQ(
        pya_history_start(world.heap, (enum pya_record_level)(PYA_RECORD_ALL + 1), true, 9, 0),
        PYA_E_INVAL);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 9, 0));
    world_fini(&world);
    for (int i = 0; i < 2; i++) { /* contexts that could not be kept, or can never be given back */
        struct world half = {.hooks = {.capture_context = count_capture}};
        half.hooks.retain_context = i == 0 ? count_retain : NULL;
        half.hooks.release_context = i == 0 ? NULL : count_release;
        world_init(&half, "");
        CHECK_EQ(pya_history_start(half.heap, PYA_RECORD_ALL, true, 9, 0), PYA_E_INVAL);
        world_fini(&half);
    }
}

/* A block that was freed and waits for another stream belongs to nobody: it cannot be annotated, and the heap goes
 * on. */
static void
test_what_waits_is_not_annotated(void) {
    struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    world_init(&world, "");
    pya_dptr ptr = take(&world, MIB, 0);
    CHECK_OK(pya_history_annotate(world.heap, ptr, NULL)); /* for nobody */
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_NEVER, true, 100, 0));
    CHECK_OK(pya_history_annotate(world.heap, ptr, NULL));
    CHECK_OK(pya_record_stream(world.heap, ptr, 7));
    CHECK_OK(pya_sim_use(world.sim, 7, ptr, MIB));
    give(&world, ptr);
    CHECK_EQ(pya_history_annotate(world.heap, ptr, NULL), PYA_E_FOREIGN);
    give(&world, take(&world, MIB, 0));
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part_count(&part, PYA_ACTION_ANNOTATE), 1);
    pya_sim_finish_all(world.sim);
    world_fini(&world);
}

static pya_dptr spare[3];

/* Gives some of them back, and asks for another attempt in any case. */
static bool
give_a_spare_one(void *arg, int device, size_t bytes) {
    struct world *world = arg;
    (void)device;
    (void)bytes;
    for (size_t i = 0; i < 3; i++) {
        if (spare[i] != 0) {
            give(world, spare[i]);
            spare[i] = 0;
            break;
        }
    }
    return true;
}

/* Of all attempts of one request, at most one stack is kept, whether it is served in the end or not. */
static void
test_tries_leave_no_contexts(void) {
    for (size_t kept = 0; kept < 2; kept++) {
        struct world world = {
            .config = {.capacity_bytes = (12 + 2 * kept) * MIB},
            .hooks = {.on_pressure = give_a_spare_one}};
        pya_dptr ptr;
        counted_world(&world);
        CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 100, 0));
        for (size_t i = 0; i < 3; i++) {
            spare[i] = take(&world, 4 * MIB, 0);
        }
        if (kept > 0) {
            (void)take(&world, MIB, 0);
        }
        CHECK_EQ(
            pya_alloc(world.heap, 0, (12 + 2 * kept) * MIB, 0, &ptr),
            kept > 0 ? PYA_E_NOMEM : PYA_OK);
        CHECK_EQ(stat_of(world.heap, 0, "pyalloc_pressure_calls"), 3 + (kept > 0));
        world_fini(&world);
        CHECK_EQ(n_references, 0);
    }
}

/* A snapshot is complete or fails and then keeps no contexts.  It tells torch's two kinds of segments apart. */
static void
test_a_snapshot_without_host_memory(void) {
    struct world world = {.config = {.no_vmm = true}};
    struct pya_snapshot snap;
    bool fired = true;
    counted_world(&world);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 1000, 0));
    for (size_t i = 0; i < 200; i++) {
        (void)take(&world, i % 2 == 0 ? 512 : 20 * MIB, 0);
    }
    const long n_before = n_references;
    for (unsigned long nth = 1; fired; nth++) {
        const size_t live = fault_live();
        fault_arm(nth);
        const pya_status st = pya_snapshot_take(world.heap, NULL, true, &snap);
        fired = fault_disarm();
        CHECK_EQ(st, fired ? PYA_E_HOST_NOMEM : PYA_OK);
        if (st != PYA_OK) {
            CHECK_EQ(fault_live(), live);
            CHECK_EQ(n_references, n_before);
        }
    }
    CHECK_EQ(snap.n_segments, 101);
    for (size_t i = 0; i < snap.n_segments; i++) {
        CHECK_EQ(snap.segments[i].is_small, snap.segments[i].total_bytes < 20 * MIB);
    }
    pya_snapshot_fini(&snap);
    world_fini(&world);
}

static pya_status
caps_fail(struct pya_device *dev, struct pya_device_caps *out) {
    (void)dev;
    (void)out;
    return PYA_E_DEVICE;
}

static pya_status
open_without_caps(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    const pya_status st = world_open(arg, index, out);
    world->ops.caps = caps_fail;
    return st;
}

/* A device that does not open, or whose trace has no room, is closed again.  It opens at the next request. */
static void
test_a_device_that_does_not_open(void) {
    bool fired = true;
    pya_dptr ptr;
    for (unsigned long nth = 1; fired; nth++) {
        struct world world = {0};
        counted_world(&world);
        CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALL, true, 100, 0));
        const size_t live = fault_live();
        world.heap->hooks.open_device = open_without_caps;
        CHECK_EQ(pya_alloc(world.heap, 0, MIB, 0, &ptr), PYA_E_DEVICE);
        CHECK_EQ(fault_live(), live);
        world.heap->hooks.open_device = world_open;
        fault_arm(nth);
        const pya_status st = pya_alloc(world.heap, 0, MIB, 0, &ptr);
        fired = fault_disarm();
        CHECK(st == PYA_OK || (fired && st == PYA_E_HOST_NOMEM)); /* some are dispensable */
        CHECK(st == PYA_OK || pya_cards_get(&world.heap->cards, 0) != NULL || fault_live() == live);
        (void)take(&world, MIB, 0);
        world_fini(&world);
        CHECK_EQ(n_references, 0);
    }
}

enum { TURNS = 3000 };

static uint32_t turns_number; /* the thread's, as the system numbers it */

static void *
turns_thread(void *arg) {
    struct world *world = arg;
    __atomic_store_n(&turns_number, (uint32_t)syscall(SYS_gettid), __ATOMIC_RELAXED);
    for (int i = 0; i < TURNS; i++) {
        give(world, take(world, MIB, 0));
    }
    return NULL;
}

/* Nothing twice, nothing lost, while other threads go on; each entry names its thread. */
static void
test_taken_while_others_go_on(void) {
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    size_t n = 0;
    pthread_t thread;
    world_init(&world, "");
    give(&world, take(&world, MIB, 0));
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_NEVER, true, 1000000, 0));
    CHECK_EQ(pthread_create(&thread, NULL, turns_thread, &world), 0);
    while (n < TURNS) {
        CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
        CHECK_EQ(part.n_lost, 0);
        for (size_t i = 0; i < part.n; i++) {
            CHECK_EQ(part.items[i].thread, __atomic_load_n(&turns_number, __ATOMIC_RELAXED));
        }
        n += part_count(&part, PYA_ACTION_ALLOC);
    }
    CHECK_EQ(n, TURNS);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    give(&world, take(&world, MIB, 0));
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.items[part.n - 1].thread, (uint32_t)getpid());
    part_count(&part, PYA_ACTION_ALLOC);
    world_fini(&world);
}

static void
test_recording_again_with_other_settings(void) {
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    counted_world(&world);
    give(&world, take(&world, MIB, 0));
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 4, 0));
    give(&world, take(&world, MIB, 0));
    give(&world, take(&world, MIB, 0)); /* two entries more than the ring holds */
    uint32_t skip_mask = 1U << PYA_ACTION_FREE_REQUESTED | 1U << PYA_ACTION_FREE_COMPLETED;
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 50, skip_mask));
    for (int i = 0; i < 20; i++) {
        give(&world, take(&world, MIB, 0));
    }
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n, 4 + 20);
    CHECK_EQ(part.n_lost, 2);
    CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 1 + 20);
    CHECK_EQ(n_references, 0);
    world_fini(&world);
}

/* What the trace says of memory and blocks matches the statistics, whatever was stitched, moved, taken over or given
 * back: readers rebuild every moment from it. */
struct ledger {
    int64_t reserved;
    int64_t most_reserved;
    int64_t allocated;
    int64_t active;
};

static void
ledger_add(struct ledger *ledger, const struct pya_entry *entry) {
    static const struct ledger signs[PYA_N_ACTIONS] = {
        [PYA_ACTION_SEGMENT_ALLOC] = {.reserved = 1},
        [PYA_ACTION_SEGMENT_MAP] = {.reserved = 1},
        [PYA_ACTION_SEGMENT_FREE] = {.reserved = -1},
        [PYA_ACTION_SEGMENT_UNMAP] = {.reserved = -1},
        [PYA_ACTION_ALLOC] = {.allocated = 1, .active = 1},
        [PYA_ACTION_FREE_REQUESTED] = {.allocated = -1},
        [PYA_ACTION_FREE_COMPLETED] = {.active = -1},
    };
    int64_t bytes = (int64_t)entry->bytes;
    ledger->reserved += bytes * signs[entry->action].reserved;
    ledger->allocated += bytes * signs[entry->action].allocated;
    ledger->active += bytes * signs[entry->action].active;
    if (ledger->reserved > ledger->most_reserved) {
        ledger->most_reserved = ledger->reserved;
    }
}

static void
ledger_check(struct ledger *ledger, struct pya_heap *heap) {
    struct pya_history_part part;
    uint64_t now_ns;
    CHECK(pya_history_take(heap, 0, &part, &now_ns));
    CHECK_EQ(part.n_lost, 0);
    for (size_t i = 0; i < part.n; i++) {
        ledger_add(ledger, &part.items[(part.first + i) % part.n]);
    }
    free(part.items);
    CHECK_EQ(ledger->reserved, stat_of(heap, 0, "reserved_bytes.all.current"));
    /* A growth that failed half-way is in the statistics only. */
    CHECK(ledger->most_reserved <= stat_of(heap, 0, "reserved_bytes.all.peak"));
    CHECK_EQ(ledger->allocated, stat_of(heap, 0, "requested_bytes.all.current"));
    CHECK_EQ(ledger->active, stat_of(heap, 0, "requested_bytes.all.current"));
}

static void
ledger_run(const char *options) {
    enum { N = 24, STEPS = 2000 };
    struct world world = {.config = {.capacity_bytes = 320 * MIB}};
    struct ledger ledger = {0};
    pya_dptr live[N] = {0};
    uint64_t seed = check_seed();
    world_init(&world, options);
    give(&world, take(&world, 512, 0));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_NEVER, true, 100000, 0));
    for (int i = 0; i < STEPS && check_failures < 20; i++) {
        pya_dptr *slot = &live[check_below(&seed, N)];
        CHECK_OK(pya_free(world.heap, *slot));
        *slot = 0;
        size_t bytes = check_log_size(&seed, 100, 60 * MIB);
        pya_status st = pya_alloc(world.heap, 0, bytes, 16 * check_below(&seed, 2), slot);
        CHECK(st == PYA_OK || st == PYA_E_NOMEM);
        if (i % 100 == 99) {
            CHECK_OK(pya_trim(world.heap, 0, check_below(&seed, 320) * MIB));
        }
        if (i % 10 == 9) {
            ledger_check(&ledger, world.heap);
        }
    }
    for (size_t i = 0; i < N; i++) {
        give(&world, live[i]);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    ledger_check(&ledger, world.heap);
    CHECK_EQ(ledger.reserved, 0);
    world_fini(&world);
}

static void
test_the_trace_adds_up(void) {
    static const char *const options[] = {
        "", "memory:tight", "shared_pages:False", "vmm:False", "mappings_per_page:2"};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        ledger_run(options[i]);
    }
}

static void
test_a_history_of_no_entries_has_one(void) {
    struct world world = {0};
    struct pya_history_part part;
    uint64_t now_ns = 0;
    counted_world(&world);
    CHECK_OK(pya_history_start(world.heap, PYA_RECORD_ALLOC, true, 0, 0));
    pya_dptr first = take(&world, MIB, 0);
    pya_dptr last = take(&world, MIB, 0);
    CHECK(pya_history_take(world.heap, 0, &part, &now_ns));
    CHECK_EQ(part.n, 1);
    CHECK_EQ(part.items[0].addr, last);
    CHECK_EQ(part_count(&part, PYA_ACTION_ALLOC), 1);
    give(&world, first);
    give(&world, last);
    pya_history_stop(world.heap);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"no_entries", test_a_history_of_no_entries_has_one},
    {"what_waits", test_what_waits_is_not_annotated},
    {"taken_once", test_taken_once_and_in_order},
    {"lost", test_what_the_ring_lost_is_told},
    {"the_newest_stay_in_a_ring_of_another_size", test_the_newest_stay_in_a_ring_of_another_size},
    {"record_stream", test_uses_on_streams_are_in_the_trace_and_in_no_snapshot},
    {"what_waits_keeps_its_context", test_what_waits_keeps_its_context},
    {"refused", test_a_bad_level_or_half_the_hooks_are_refused},
    {"tries_leave_no_contexts", test_tries_leave_no_contexts},
    {"a_snapshot_without_host_memory", test_a_snapshot_without_host_memory},
    {"a_device_that_does_not_open", test_a_device_that_does_not_open},
    {"taken_while_others_go_on", test_taken_while_others_go_on},
    {"recording_again", test_recording_again_with_other_settings},
    {"adds_up", test_the_trace_adds_up},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
