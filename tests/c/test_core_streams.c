/* Streams that share a card: what one has finished with another takes over, with its addresses. */
#include "core/snapshot.h"
#include "fault.h"
#include "streams.h"

static uint64_t
n_calls(const struct world *world) {
    struct pya_sim_state state;
    pya_sim_query(world->sim, &state);
    return state.n_memory_calls;
}

/* The stream of the segment that shows the address. */
static pya_stream
stream_of(struct world *world, pya_dptr addr) {
    struct pya_snapshot snap;
    CHECK_OK(pya_snapshot_take(world->heap, NULL, false, &snap));
    pya_stream stream = 0;
    size_t total = 0;
    for (size_t i = 0; i < snap.n_segments; i++) {
        const struct pya_snap_segment *s = &snap.segments[i];
        total += s->total_bytes;
        stream = addr >= s->addr && addr < s->addr + s->total_bytes ? s->stream : stream;
    }
    CHECK_EQ((int64_t)total, stat_of(world->heap, 0, "reserved_bytes.all.current"));
    pya_snapshot_fini(&snap);
    return stream;
}

static void
test_idle_memory_changes_hands(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    uint64_t before = n_calls(&world);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    CHECK(second >= first && second + 48 * MIB <= first + 64 * MIB);
    CHECK_EQ(stream_of(&world, second), TWO);
    put(&world, second, 48 * MIB);
    CHECK_EQ(get(&world, 64 * MIB, ONE), first);
    CHECK_EQ(stream_of(&world, first), ONE);
    CHECK_EQ(n_calls(&world), before);
    CHECK(stat_of(world.heap, 0, "pyalloc_page_transfers") >= 48 / 2);
    put(&world, first, 64 * MIB);
    streams_fini(&world);
}

/* Work of the other stream may still be running: not one of its bytes is handed on. */
static void
test_busy_memory_does_not(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    CHECK(second + 48 * MIB <= first || second >= first + 64 * MIB);
    pya_sim_finish(world.sim, ONE);
    uint64_t before = n_calls(&world);
    pya_dptr third = get(&world, 48 * MIB, TWO);
    CHECK(third >= first && third + 48 * MIB <= first + 64 * MIB);
    CHECK_EQ(n_calls(&world), before);
    put(&world, second, 48 * MIB);
    put(&world, third, 48 * MIB);
    streams_fini(&world);
}

/* The owner has finished, but another stream still uses the freed memory.  That is legal if the owner will wait for it;
 * torch's allocator would give the memory to the owner alone. */
static void
test_memory_others_use_does_not(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    pya_dptr known = get(&world, 2 * MIB, TWO);
    pya_sim_finish(world.sim, ONE);
    CHECK_OK(pya_sim_use(world.sim, TWO, first, 64 * MIB));
    put(&world, first, 64 * MIB);
    pya_dptr third = get(&world, 48 * MIB, THREE);
    CHECK(third + 48 * MIB <= first || third >= first + 64 * MIB);
    pya_sim_finish(world.sim, ONE); /* asked since then whether it is idle */
    pya_sim_finish(world.sim, TWO);
    pya_dptr fourth = get(&world, 48 * MIB, THREE);
    CHECK(fourth >= first && fourth + 48 * MIB <= first + 64 * MIB);
    put(&world, known, 2 * MIB);
    put(&world, third, 48 * MIB);
    put(&world, fourth, 48 * MIB);
    streams_fini(&world);
}

/* A stream that cannot be queried repeatedly, or not be waited for, never counts as idle (found by fuzzing). */
static void
test_events_that_fail(void) {
    static const uint32_t waits[] = {0, 1U << PYA_SIM_STREAM_SYNC | 1U << PYA_SIM_DEVICE_SYNC};
    for (size_t k = 0; k < 2; k++) {
        struct world world;
        streams_init(&world, PYA_SIM_WORK_BY_HAND);
        pya_dptr small = get(&world, 512, ONE);
        pya_sim_fail(world.sim, 1U << PYA_SIM_EVENT_RECORD | waits[k], 1, PYA_E_DEVICE, true);
        for (int i = 0; i < 9; i++) {
            CHECK(!exchange(&world) || k == 0);
        }
        CHECK(pya_sim_fail_clear(world.sim));
        put(&world, small, 512);
        streams_fini(&world);
    }
}

/* An event recorded on a stream that is being captured would become part of the graph. */
static void
test_captured_stream_is_not_asked(void) {
    struct world world;
    struct pya_sim_state before, after;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    pya_sim_set_capturing(world.sim, ONE, true);
    pya_sim_query(world.sim, &before);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    pya_sim_query(world.sim, &after);
    CHECK_EQ(after.n_calls[PYA_SIM_EVENT_QUERY], before.n_calls[PYA_SIM_EVENT_QUERY]);
    CHECK(second + 48 * MIB <= first || second >= first + 64 * MIB);
    pya_sim_set_capturing(world.sim, ONE, false);
    put(&world, second, 48 * MIB);
    streams_fini(&world);
}

/* Nothing is waited for either while somebody captures without telling pyalloc. */
static void
test_capture_forbids_asking(void) {
    static const uint32_t calls[] = {1U << PYA_SIM_IS_CAPTURING, 1U << PYA_SIM_EVENT_RECORD};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        struct pya_sim_state state;
        streams_init(&world, PYA_SIM_WORK_AT_ONCE);
        pya_dptr first = get(&world, 64 * MIB, ONE);
        put(&world, first, 64 * MIB);
        pya_sim_fail(world.sim, calls[i], 1, PYA_E_CAPTURE, true);
        pya_dptr second = get(&world, 48 * MIB, TWO);
        CHECK(pya_sim_fail_clear(world.sim));
        CHECK(second + 48 * MIB <= first || second >= first + 64 * MIB);
        pya_sim_query(world.sim, &state);
        CHECK_EQ(state.n_calls[PYA_SIM_DEVICE_SYNC], 0);
        put(&world, second, 48 * MIB);
        streams_fini(&world);
    }
}

/* Adjacent parts of two streams serve a third one as a whole. */
static void
test_parts_of_two_streams(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr guard;
    pya_dptr first = get(&world, 300 * MIB, ONE);
    guard = get(&world, 2 * MIB, ONE);
    put(&world, first, 300 * MIB);
    pya_dptr second = get(&world, 280 * MIB, TWO);
    put(&world, second, 280 * MIB);
    uint64_t before = n_calls(&world);
    pya_dptr third = get(&world, 300 * MIB, THREE);
    CHECK_EQ(third, first);
    CHECK_EQ(n_calls(&world), before);
    put(&world, third, 300 * MIB);
    put(&world, guard, 2 * MIB);
    streams_fini(&world);
}

/* Bytes of a page stay together: the rest of a page beside a live block is not handed on. */
static void
test_part_of_a_page_stays(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr small = get(&world, 512, ONE);
    pya_dptr large = get(&world, 30 * MIB, ONE);
    put(&world, large, 30 * MIB);
    pya_dptr other = get(&world, 8 * MIB, TWO);
    CHECK_EQ(other % PYA_PAGE, 0);
    CHECK_EQ(stream_of(&world, small), ONE);
    CHECK_EQ(stream_of(&world, other), TWO);
    put(&world, small, 512);
    put(&world, other, 8 * MIB);
    streams_fini(&world);
}

/* A stitched range of one stream serves another that requests as much. */
static void
test_stitched_range_changes_hands(void) {
    struct world world;
    pya_dptr parts[40];
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    for (int i = 0; i < 40; i++) {
        parts[i] = get(&world, 4 * MIB, ONE);
    }
    for (int i = 0; i < 40; i += 2) {
        put(&world, parts[i], 4 * MIB);
    }
    pya_dptr stitched = get(&world, 20 * MIB, ONE);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    put(&world, stitched, 20 * MIB);
    uint64_t before = n_calls(&world);
    pya_dptr again = get(&world, 20 * MIB, TWO);
    CHECK_EQ(again, stitched);
    CHECK_EQ(stream_of(&world, again), TWO);
    CHECK_EQ(n_calls(&world), before);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_range_hits"), 1);
    put(&world, again, 20 * MIB);
    for (int i = 1; i < 40; i += 2) {
        put(&world, parts[i], 4 * MIB);
    }
    streams_fini(&world);
}

/* The device knows a destroyed stream no more, but waiting for all work waits for that stream's work too. */
static void
test_recorded_stream_is_destroyed(void) {
    const uint32_t of_streams = UINT32_C(1) << PYA_SIM_EVENT_RECORD | UINT32_C(1)
                                                                          << PYA_SIM_STREAM_SYNC;
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr ptr = take(&world, 30 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    pya_sim_fail(world.sim, of_streams, 1, PYA_E_DEVICE, true);
    give(&world, ptr);
    pya_sim_fail(world.sim, of_streams | UINT32_C(1) << PYA_SIM_DEVICE_SYNC, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_empty_cache(world.heap, 0), PYA_E_DEVICE);
    CHECK(stat_of(world.heap, 0, "active_bytes.all.current") > 0);
    pya_sim_fail(world.sim, of_streams, 1, PYA_E_DEVICE, true);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(stat_of(world.heap, 0, "active_bytes.all.current"), 0);
    CHECK_EQ(reserved(&world), 0);
    (void)pya_sim_fail_clear(world.sim);
    streams_fini(&world);
}

/* One event that could not be had does not keep later blocks from the stream. */
static void
test_event_that_failed_once(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    for (size_t i = 0; i < 8; i++) {
        pya_dptr ptr = take(&world, 30 * MIB, ONE);
        if (i == 0) {
            pya_sim_fail(world.sim, UINT32_C(1) << PYA_SIM_EVENT_RECORD, 1, PYA_E_DEVICE, false);
        }
        CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
        give(&world, ptr);
    }
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK_EQ(calls(&world, PYA_SIM_STREAM_SYNC), 0);
    CHECK(stat_of(world.heap, 0, "active_bytes.all.current") <= (int64_t)(60 * MIB));
    CHECK(reserved(&world) <= 100 * MIB);
    streams_fini(&world);
}

static void
recorded_round(struct world *world, pya_dptr *ptrs, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ptrs[i] = take(world, 512, ONE);
        CHECK_OK(pya_record_stream(world->heap, ptrs[i], TWO));
    }
    for (size_t i = 0; i < n; i++) {
        give(world, ptrs[i]);
    }
    pya_sim_finish_all(world->sim);
    give(world, take(world, 512, ONE)); /* notices that they are done */
    CHECK_EQ(stat_of(world->heap, 0, "active.all.current"), 0);
}

/* An event is made once and recorded again for the next block.  After a burst, most go back to the device. */
static void
test_events_are_kept(void) {
    enum { BURST = 1000 };
    static pya_dptr ptrs[BURST];
    struct world world;
    struct pya_sim_state state;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    recorded_round(&world, ptrs, 2);
    uint64_t n_made = calls(&world, PYA_SIM_EVENT_CREATE);
    CHECK(n_made >= 2);
    for (int i = 0; i < 20; i++) {
        recorded_round(&world, ptrs, 2);
    }
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_CREATE), n_made);
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_DESTROY), 0);
    recorded_round(&world, ptrs, BURST);
    pya_sim_query(world.sim, &state);
    CHECK(state.n_events < BURST / 2);
    streams_fini(&world);
}

/* A kept event that cannot be recorded is replaced at once; if that fails too, it is kept for the next try. */
static void
test_kept_event_fails(void) {
    struct world world;
    pya_dptr ptrs[2];
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    recorded_round(&world, ptrs, 2);
    uint64_t n_made = calls(&world, PYA_SIM_EVENT_CREATE);
    pya_dptr ptr = take(&world, 30 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    pya_sim_fail(world.sim, UINT32_C(1) << PYA_SIM_EVENT_RECORD, 1, PYA_E_DEVICE, true);
    give(&world, ptr);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK(stat_of(world.heap, 0, "active_bytes.all.current") > 0);
    for (int i = 0; i < 2; i++) {
        give(&world, take(&world, 512, ONE));
        pya_sim_finish_all(world.sim);
    }
    give(&world, take(&world, 512, ONE));
    CHECK_EQ(stat_of(world.heap, 0, "active_bytes.all.current"), 0);
    recorded_round(&world, ptrs, 2);
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_CREATE), n_made + 1);
    streams_fini(&world);
}

/* Streams that share a card use up addresses, of which there are few here.  Requests are served while there is memory,
 * whatever step first lacks addresses; unused addresses go back. */
static void
addresses_run_out(const char *options, uint64_t address_bytes) {
    enum { N_BLOCKS = 400, N_STEPS = 10000 };
    struct world world = {.config = {.capacity_bytes = 256 * MIB, .address_bytes = address_bytes}};
    struct {
        pya_dptr ptr;
        size_t bytes;
    } blocks[N_BLOCKS];
    size_t n = 0;
    size_t live = 0;
    uint64_t seed = check_seed();
    world_init(&world, options);
    for (int i = 0; i < N_STEPS; i++) {
        if (n < N_BLOCKS && check_below(&seed, 100) < 55) {
            blocks[n].bytes = check_log_size(&seed, 512, 32 * MIB);
            blocks[n].ptr = take(&world, blocks[n].bytes, ONE * (1 + check_below(&seed, 4)));
            live += blocks[n++].bytes;
        } else if (n > 0) {
            size_t k = check_below(&seed, n);
            give(&world, blocks[k].ptr);
            live -= blocks[k].bytes;
            blocks[k] = blocks[--n];
        }
        while (n > 0 && live > 100 * MIB) {
            give(&world, blocks[--n].ptr);
            live -= blocks[n].bytes;
        }
        if (i % 500 == 0) {
            CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        }
    }
    while (n > 0) {
        give(&world, blocks[--n].ptr);
    }
    streams_fini(&world);
}

/* Each of many streams, and each of many graphs, gets its memory: the first ones do not hold all addresses, although
 * there are only as many as 32 full ranges take. */
static void
test_addresses_are_there_for_many(void) {
    enum { N_STREAMS = 400 / CHECK_ONE_IN, N_POOLS = 2000 / CHECK_ONE_IN };
    struct world world = {
        .config = {.capacity_bytes = 65536 * MIB, .address_bytes = (uint64_t)1 << 42}};
    world_init(&world, "");
    for (size_t i = 0; i < N_STREAMS; i++) {
        (void)take(&world, 4 * MIB, 8 * i);
    }
    for (size_t i = 1; i <= N_POOLS; i++) {
        const struct pya_pool_id id = {0, i};
        CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
        (void)take(&world, 4 * MIB, 0);
        CHECK_OK(pya_pool_end(world.heap, 0, id));
    }
    world_fini(&world);
}

/* One stream took all addresses and has no page at them any more: another gets them. */
static void
test_addresses_of_nothing_go_to_others(void) {
    struct world world = {.config = {.capacity_bytes = 256 * MIB, .address_bytes = 512 * MIB}};
    world_init(&world, "");
    give(&world, take(&world, 64 * MIB, ONE));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    pya_dptr other = take(&world, 64 * MIB, TWO);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    pya_dptr again = take(&world, 64 * MIB, TWO);
    give(&world, other);
    give(&world, again);
    streams_fini(&world);
}

static void
test_addresses_run_out(void) {
    addresses_run_out("", 4800 * MIB);
    addresses_run_out("memory:tight", 4800 * MIB);
    addresses_run_out("memory:fast", 4800 * MIB);
}

/* Streams that share memory move pages and hardly ever stitch them.  The addresses left behind go back too. */
static void
test_moved_pages_leave_few_addresses(void) {
    enum { N_BLOCKS = 200, N_STEPS = 8000, MOST = 4 };
    struct world world = {.config = {.capacity_bytes = 256 * MIB}};
    pya_dptr ptrs[N_BLOCKS] = {0};
    uint64_t seed = check_seed();
    int64_t worst = 0;
    world_init(&world, "mappings_per_page:4");
    for (int i = 0; i < N_STEPS; i++) {
        size_t k = check_below(&seed, N_BLOCKS);
        if (ptrs[k] != 0) {
            give(&world, ptrs[k]);
            ptrs[k] = 0;
        } else if (stat_of(world.heap, 0, "allocated_bytes.all.current") < (int64_t)(70 * MIB)) {
            size_t bytes = check_log_size(&seed, 512, 32 * MIB);
            ptrs[k] = take(&world, bytes, ONE * (1 + check_below(&seed, 4)));
        }
        int64_t n_pages = stat_of(world.heap, 0, "pyalloc_pages");
        int64_t over = stat_of(world.heap, 0, "pyalloc_mappings") - MOST * n_pages;
        worst = over > worst ? over : worst;
    }
    CHECK(
        stat_of(world.heap, 0, "pyalloc_page_moves") > 4 * stat_of(world.heap, 0, "pyalloc_pages"));
    CHECK_EQ(worst, 0);
    for (size_t k = 0; k < N_BLOCKS; k++) {
        if (ptrs[k] != 0) {
            give(&world, ptrs[k]);
        }
    }
    streams_fini(&world);
}

/* Of another stream's idle memory that is large enough, the smallest stretch changes hands. */
static void
test_the_smallest_stretch_changes_hands(void) {
    struct world world;
    pya_dptr ptrs[4];
    static const size_t mib[] = {18, 2, 16, 2};
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    for (size_t i = 0; i < 4; i++) {
        ptrs[i] = take(&world, mib[i] * MIB, ONE);
    }
    give(&world, ptrs[0]);
    give(&world, ptrs[2]);
    CHECK_EQ(take(&world, 12 * MIB, TWO), ptrs[2]);
    world_fini(&world);
}

/* One handle on all devices: on the block's own device it is the block's stream, on another it is not. */
static void
test_default_streams_of_devices(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    pya_dptr ptr = take(&world, 4 * MIB, 0);
    CHECK_OK(pya_record_stream(world.heap, ptr, pya_stream_of_device(0, 0)));
    give(&world, ptr);
    CHECK_EQ(take(&world, 4 * MIB, 0), ptr);
    pya_stream other = pya_stream_of_device(0, 1);
    CHECK(pya_stream_device(other) == 1 && pya_stream_handle(other) == 0);
    CHECK_OK(pya_sim_use(world.sim, other, ptr, 4 * MIB));
    CHECK_OK(pya_record_stream(world.heap, ptr, other));
    give(&world, ptr);
    pya_dptr next = take(&world, 4 * MIB, 0);
    CHECK(next != ptr);
    give(&world, next);
    pya_sim_finish_all(world.sim);
    world_fini(&world);
}

/* Waiting for a stream that another library may have destroyed, or one of another device: its event tells when it is
 * done; waiting for the own device would not. */
static void
test_events_are_waited_for(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    pya_dptr ptr = take(&world, 4 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    CHECK(pya_note_foreign_stream(world.heap, TWO, 0));
    CHECK_OK(pya_sim_use(world.sim, TWO, ptr, 4 * MIB));
    give(&world, ptr);
    pya_sim_set_destroyed(world.sim, TWO, true);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_EVENT_SYNC), 1);
    CHECK_EQ(reserved(&world), 0);
    world_fini(&world);
}

/* Nothing tells of a foreign stream but a wait for its device, which need not be that of the memory. */
static void
test_foreign_stream_of_another_device(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    pya_dptr ptr = take(&world, 4 * MIB, ONE);
    struct pya_sim *first = world.sim;
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
    if (!CHECK(world.sim != first)) { /* on the second device now */
        return;
    }
    pya_sim_fail(first, 1U << PYA_SIM_EVENT_CREATE, 1, PYA_E_DEVICE, false);
    give(&world, ptr);
    pya_sim_fail(world.sim, 1U << PYA_SIM_DEVICE_SYNC, 1, PYA_E_DEVICE, false);
    CHECK_EQ(pya_empty_cache(world.heap, 0), PYA_E_DEVICE);
    CHECK_EQ(reserved(&world), 4 * MIB);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 3); /* without the lock, and for the block */
    CHECK_EQ(reserved(&world), 0);
    pya_dptr known = take(&world, 2 * MIB, ONE);
    ptr = take(&world, 4 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, known, TWO));
    CHECK(pya_note_foreign_stream(world.heap, TWO, 1));
    give(&world, ptr);
    CHECK_EQ(
        take(&world, 4 * MIB, THREE),
        ptr); /* every known stream is asked, TWO through its device */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 4);
    give(&world, known);
    give(&world, ptr);
    world_fini(&world);
}

/* An event recorded while the program captured the stream by hand never completes, even after the capture. */
static void
test_event_became_part_of_a_graph(void) {
    struct world world = {.config = {.capacity_bytes = 64 * MIB, .work = PYA_SIM_WORK_BY_HAND}};
    world_init(&world, "");
    for (int is_polled = 0; is_polled < 2; is_polled++) {
        pya_dptr ptr = take(&world, 4 * MIB, ONE);
        CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
        CHECK_OK(pya_sim_use(world.sim, TWO, ptr, 4 * MIB));
        give(&world, ptr);
        uint32_t asked = is_polled ? PYA_SIM_EVENT_QUERY : PYA_SIM_EVENT_SYNC;
        pya_sim_fail(world.sim, 1U << asked, 1, PYA_E_CAPTURE, false);
        if (is_polled) {
            pya_dptr other = take(&world, 8 * MIB, ONE);
            pya_sim_finish(world.sim, TWO);
            give(&world, other);
            other = take(&world, 12 * MIB, ONE);
            CHECK_EQ(stat_of(world.heap, 0, "pyalloc_event_frees"), 1);
            give(&world, other);
        }
        CHECK_OK(pya_empty_cache(world.heap, 0)); /* the sim complains if TWO was not waited for */
        CHECK_EQ(reserved(&world), 0);
    }
    world_fini(&world);
}

/* Without host memory for the note the caller gets an error, or the other stream's work would be overwritten. */
static void
test_record_without_host_memory(void) {
    bool fired = true;
    for (unsigned long n = 1; fired; n++) {
        struct world world;
        streams_init(&world, PYA_SIM_WORK_BY_HAND);
        pya_dptr ptr = get(&world, 30 * MIB, ONE);
        fault_arm(n);
        pya_status st = pya_record_stream(world.heap, ptr, TWO);
        fired = fault_disarm();
        CHECK_EQ(st, fired ? PYA_E_HOST_NOMEM : PYA_OK);
        CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
        pya_sim_finish(world.sim, ONE);
        CHECK_OK(pya_sim_use(world.sim, TWO, ptr, 30 * MIB));
        put(&world, ptr, 30 * MIB);
        pya_dptr next = get(&world, 30 * MIB, ONE); /* the sim complains if it is in use */
        CHECK(next != ptr);
        put(&world, next, 30 * MIB);
        CHECK(!fired || n < 10);
        streams_fini(&world);
    }
}

static const struct check_case cases[] = {
    {"event_became_part_of_a_graph", test_event_became_part_of_a_graph},
    {"foreign_stream_of_another_device", test_foreign_stream_of_another_device},
    {"events_are_waited_for", test_events_are_waited_for},
    {"default_streams_of_devices", test_default_streams_of_devices},
    {"addresses_of_nothing", test_addresses_of_nothing_go_to_others},
    {"addresses_run_out", test_addresses_run_out},
    {"moved_pages_leave_few_addresses", test_moved_pages_leave_few_addresses},
    {"addresses_are_there_for_many", test_addresses_are_there_for_many},
    {"event_that_failed_once", test_event_that_failed_once},
    {"idle_memory_changes_hands", test_idle_memory_changes_hands},
    {"busy_memory_does_not", test_busy_memory_does_not},
    {"memory_others_use_does_not", test_memory_others_use_does_not},
    {"events_that_fail", test_events_that_fail},
    {"captured_stream_is_not_asked", test_captured_stream_is_not_asked},
    {"capture_forbids_asking", test_capture_forbids_asking},
    {"smallest_stretch_changes_hands", test_the_smallest_stretch_changes_hands},
    {"parts_of_two_streams", test_parts_of_two_streams},
    {"part_of_a_page_stays", test_part_of_a_page_stays},
    {"stitched_range_changes_hands", test_stitched_range_changes_hands},
    {"recorded_stream_is_destroyed", test_recorded_stream_is_destroyed},
    {"events_are_kept", test_events_are_kept},
    {"kept_event_fails", test_kept_event_fails},
    {"record_without_host_memory", test_record_without_host_memory},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
