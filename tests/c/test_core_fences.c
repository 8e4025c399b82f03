/* Fences of streams that were destroyed, whose handles come back, or that are many (core/fence.h). */
#include "streams.h"

/* If no event can be recorded, the stream is waited for. */
static void
test_stream_without_events(void) {
    struct world world;
    struct pya_sim_state state;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    pya_sim_fail(world.sim, 1U << PYA_SIM_EVENT_RECORD, 1, PYA_E_INVAL, false);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK(second >= first && second + 48 * MIB <= first + 64 * MIB);
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.n_calls[PYA_SIM_STREAM_SYNC], 1);
    CHECK_EQ(state.n_calls[PYA_SIM_DEVICE_SYNC], 0);
    put(&world, second, 48 * MIB);
    streams_fini(&world);
}

/* The others' events are done when queried.  A destroyed stream is waited for once, and then delays nobody. */
static void
test_destroyed_stream(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_DELAYED);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    pya_dptr third = get(&world, 2 * MIB, THREE);
    pya_sim_finish(world.sim, ONE);
    CHECK_OK(pya_sim_use(world.sim, THREE, first, 64 * MIB));
    put(&world, first, 64 * MIB);
    pya_sim_set_destroyed(world.sim, THREE, true);
    pya_dptr second = get(&world, 48 * MIB, TWO); /* THREE was waited for, or the sim complains */
    CHECK(second >= first && second + 48 * MIB <= first + 64 * MIB);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    put(&world, second, 48 * MIB);
    uint64_t n_gone = calls(&world, PYA_SIM_IS_CAPTURING) - 2 * calls(&world, PYA_SIM_EVENT_RECORD);
    CHECK_EQ(n_gone, 1);
    for (int i = 0; i < 20; i++) {
        CHECK(exchange(&world));
    }
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    n_gone = calls(&world, PYA_SIM_IS_CAPTURING) - 2 * calls(&world, PYA_SIM_EVENT_RECORD);
    CHECK_EQ(n_gone, 1);
    put(&world, third, 2 * MIB);
    streams_fini(&world);
}

/* A stream of another library may be destroyed at any time, and drivers were seen to crash when asked about one.  So it
 * is asked nothing, and its memory is reused after a wait for the device now and then. */
static void
test_foreign_stream(void) {
    struct world world;
    struct pya_sim_state state;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr third = get(&world, 64 * MIB, THREE);
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    put(&world, third, 64 * MIB);
    pya_dptr kept = get(&world, 2 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, kept, THREE));
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0)); /* it may have been forgotten by now */
    put(&world, kept, 2 * MIB);
    pya_sim_set_destroyed(world.sim, THREE, true);
    size_t n_exchanged = 0;
    for (int i = 0; i < 20; i++) {
        n_exchanged += exchange(&world);
    }
    CHECK(n_exchanged >= 18); /* the first may be served from what THREE left */
    uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    CHECK(n_waits > 0 && n_waits < 10);
    CHECK_OK(pya_trim(world.heap, 0, 0));
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.n_stale, 0);
    streams_fini(&world);
}

/* A capture that the program begins by hand: a request on its stream makes it known, and from then on nothing waits.
 * That request may have been the last before the capture ended, so it does not count for ever. */
static void
test_foreign_stream_captures(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    CHECK(!pya_note_foreign_stream(world.heap, THREE, 0));
    pya_dptr third = get(&world, 2 * MIB, THREE);
    pya_sim_set_capturing(world.sim, THREE, true);
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    CHECK(!exchange(&world));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    pya_sim_set_capturing(world.sim, THREE, false);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(reserved(&world) > 100 * MIB);
    pya_sim_advance_clock(world.sim, UINT64_C(11) * 1000 * 1000 * 1000);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 2 * MIB);
    put(&world, third, 2 * MIB);
    streams_fini(&world);
}

/* The same if the capture began after the last request, and a block recorded on the stream is freed: querying an event
 * would end the capture, and so would a wait.  Also if the stream was forgotten, as one without memory is. */
static void
foreign_stream_captures_at_a_free(bool is_forgotten) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr third = get(&world, 2 * MIB, is_forgotten ? ONE : THREE);
    pya_dptr block = get(&world, 64 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, block, THREE));
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    (void)exchange(&world);
    while (is_forgotten && world.heap->cards.open[0]->n_fences == 3) {
        (void)exchange(&world);
    }
    pya_sim_set_capturing(world.sim, THREE, true);
    pya_sim_reset_counts(world.sim);
    put(&world, block, 64 * MIB);
    for (int i = 0; i < 9; i++) {
        put(&world, get(&world, 2 * MIB, ONE), 2 * MIB);
    }
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    pya_sim_set_capturing(world.sim, THREE, false);
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0)); /* its next request */
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 2 * MIB);
    put(&world, third, 2 * MIB);
    streams_fini(&world);
}

static void
test_foreign_stream_captures_at_a_free(void) {
    foreign_stream_captures_at_a_free(false);
    foreign_stream_captures_at_a_free(true);
}

/* Nobody need say when the capture has ended: before a request fails, the stream is asked whether blocks freed
 * meanwhile can be waited for. */
static void
foreign_stream_captured_before_a_large_request(bool no_vmm) {
    pya_dptr failed;
    struct world world = {.config = {.capacity_bytes = 1024 * MIB, .no_vmm = no_vmm}};
    world_init(&world, "");
    pya_dptr block = get(&world, 700 * MIB, ONE);
    CHECK_OK(pya_record_stream(world.heap, block, THREE));
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    pya_sim_set_capturing(world.sim, THREE, true);
    put(&world, block, 700 * MIB);
    CHECK_EQ(pya_alloc(world.heap, 0, 600 * MIB, ONE, &failed), PYA_E_NOMEM);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    pya_sim_set_capturing(world.sim, THREE, false);
    put(&world, get(&world, 600 * MIB, ONE), 600 * MIB);
    streams_fini(&world);
}

static void
test_foreign_stream_captured_before_a_large_request(void) {
    foreign_stream_captured_before_a_large_request(false);
    foreign_stream_captured_before_a_large_request(true);
}

static const struct pya_pool_id POOL = {3, 4};

/* Like torch's filter: requests of one stream, while it is captured. */
struct capture {
    pya_stream stream;
    bool is_on;
};

static bool
capture_match(void *arg, pya_stream stream) {
    const struct capture *capture = arg;
    return capture->is_on && capture->stream == stream;
}

static void
capture_begin(struct world *world, struct capture *capture, pya_stream began_on) {
    CHECK_OK(pya_pool_begin(
        world->heap, 0, POOL,
        (struct pya_stream_filter){.match = capture_match, .arg = capture, .began_on = began_on}));
    pya_sim_set_capturing(world->sim, capture->stream, true);
    capture->is_on = true;
}

static void
capture_end(struct world *world, struct capture *capture) {
    pya_sim_set_capturing(world->sim, capture->stream, false);
    capture->is_on = false;
    CHECK_OK(pya_pool_end(world->heap, 0, POOL));
}

/* The body of a conditional node is captured on a stream of its own, and nobody says when that ends.  But it ends
 * before the graph, whose stream tells.  Afterwards the body's stream delays nobody. */
static void
test_foreign_stream_of_a_conditional_node(void) {
    struct world world;
    struct capture graph = {.stream = ONE};
    struct capture body = {.stream = THREE};
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    pya_dptr kept = get(&world, 2 * MIB, TWO);
    capture_begin(&world, &graph, ONE);
    CHECK_OK(pya_pool_end(world.heap, 0, POOL));
    capture_begin(&world, &body, ONE);
    pya_dptr third = get(&world, 2 * MIB, THREE);
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    capture_end(&world, &body);
    pya_sim_set_destroyed(world.sim, THREE, true);
    CHECK_OK(pya_empty_cache(world.heap, 0)); /* the graph's capture goes on */
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    pya_sim_set_capturing(world.sim, ONE, false);
    put(&world, get(&world, 64 * MIB, TWO), 64 * MIB);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(reserved(&world) < 16 * MIB);
    for (int i = 0; i < 20; i++) {
        CHECK(exchange(&world));
    }
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) <= 2);
    put(&world, kept, 2 * MIB);
    put(&world, third, 2 * MIB);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    streams_fini(&world);
}

/* Between the announcement of a capture and its beginning nothing is waited for either, because a wait might end it.  A
 * capture that failed, at its beginning or later, prevents no wait. */
static void
test_announced_capture(void) {
    struct world world;
    struct capture graph = {.stream = ONE};
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    for (int has_requests = 0; has_requests < 2; has_requests++) {
        put(&world, get(&world, 64 * MIB, TWO), 64 * MIB);
        CHECK_OK(pya_pool_begin(
            world.heap, 0, POOL,
            (struct pya_stream_filter){.match = capture_match, .arg = &graph, .began_on = ONE}));
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK_EQ(reserved(&world), 64 * MIB);
        if (has_requests == 1) {
            graph.is_on = true;
            put(&world, get(&world, 2 * MIB, ONE), 2 * MIB);
            graph.is_on = false;
        } else {
            pya_sim_advance_clock(world.sim, UINT64_C(2) * 1000 * 1000 * 1000);
        }
        CHECK_OK(pya_empty_cache(world.heap, 0));
        CHECK(reserved(&world) < 16 * MIB);
        CHECK_OK(pya_pool_end(world.heap, 0, POOL));
        CHECK_OK(pya_pool_release(world.heap, 0, POOL));
        CHECK_OK(pya_empty_cache(world.heap, 0));
    }
    streams_fini(&world);
}

/* As long as the stream holds blocks, it counts.  It is waited for ever more rarely, and its work is respected. */
static void
test_foreign_stream_in_use(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    enum { N = 20 };
    pya_dptr kept[N];
    pya_dptr third = get(&world, 2 * MIB, THREE);
    CHECK(pya_note_foreign_stream(world.heap, THREE, 0));
    for (int i = 0; i < N; i += 2) {
        pya_dptr first = get(&world, 64 * MIB, ONE);
        pya_sim_finish(world.sim, ONE);
        CHECK_OK(pya_sim_use(world.sim, THREE, first, 64 * MIB));
        put(&world, first, 64 * MIB);
        for (int k = i; k < i + 2; k++) { /* the sim complains if the memory is still in use */
            kept[k] = get(&world, 40 * MIB, TWO);
            pya_sim_finish(world.sim, ONE);
            pya_sim_finish(world.sim, TWO);
        }
        pya_sim_finish_all(world.sim);
    }
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) < 10);
    for (int i = 0; i < N; i++) {
        put(&world, kept[i], 40 * MIB);
    }
    put(&world, third, 2 * MIB);
    streams_fini(&world);
}

/* A new stream may get the handle of a destroyed one.  It counts from its first request or record_stream() on. */
enum hearing { HEAR_REQUEST, HEAR_RECORD, HEAR_RECORD_AGAIN, HEAR_RECORD_OTHER, HEAR_RECORD_OWN };

static void
stream_is_reborn(enum hearing how) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr third = get(&world, 2 * MIB, THREE);
    pya_dptr kept = get(&world, 2 * MIB, ONE);
    pya_dptr other = get(&world, 2 * MIB, ONE);
    if (how == HEAR_RECORD_AGAIN || how == HEAR_RECORD_OTHER) {
        CHECK_OK(pya_record_stream(world.heap, kept, THREE));
    }
    pya_sim_finish_all(world.sim);
    pya_sim_set_destroyed(world.sim, THREE, true);
    (void)exchange(&world);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    pya_sim_finish_all(world.sim);
    pya_sim_set_destroyed(world.sim, THREE, false);
    pya_dptr first = get(&world, 128 * MIB, ONE);
    if (how == HEAR_REQUEST) {
        put(&world, get(&world, 2 * MIB, THREE), 2 * MIB);
    } else {
        pya_dptr of = how == HEAR_RECORD_OTHER ? other : how == HEAR_RECORD_OWN ? third : kept;
        CHECK_OK(pya_record_stream(world.heap, of, THREE));
    }
    pya_sim_finish(world.sim, ONE);
    CHECK_OK(pya_sim_use(world.sim, THREE, first, 128 * MIB)); /* ONE will wait for it */
    put(&world, first, 128 * MIB);
    pya_dptr next[4];
    for (int i = 0; i < 4; i++) {
        next[i] = get(&world, 64 * MIB, TWO); /* from other memory, or the sim complains */
        pya_sim_finish(world.sim, ONE);
        pya_sim_finish(world.sim, TWO);
        CHECK(next[i] + 64 * MIB <= first || next[i] >= first + 128 * MIB);
    }
    pya_sim_finish_all(world.sim);
    put(&world, get(&world, 96 * MIB, TWO), 96 * MIB);
    pya_sim_finish_all(world.sim);
    pya_dptr last = get(&world, 128 * MIB, TWO);
    CHECK(last == first);
    for (int i = 0; i < 4; i++) {
        put(&world, next[i], 64 * MIB);
    }
    put(&world, last, 128 * MIB);
    put(&world, kept, 2 * MIB);
    put(&world, other, 2 * MIB);
    put(&world, third, 2 * MIB);
    streams_fini(&world);
}

static void
test_stream_is_reborn(void) {
    for (enum hearing how = HEAR_REQUEST; how <= HEAR_RECORD_OWN; how++) {
        stream_is_reborn(how);
    }
}

/* Memory freed on a handle after its stream was destroyed may be in use by a new stream of that handle that never
 * requested any.  It stays until the device was waited for, ever more rarely, while the others go on. */
static void
test_destroyed_stream_leaves_blocks(void) {
    enum { N = 33 };
    pya_dptr blocks[N];
    struct world world;
    streams_init(&world, PYA_SIM_WORK_DELAYED);
    for (size_t i = 0; i < N; i++) {
        blocks[i] = get(&world, 8 * MIB, THREE);
    }
    pya_sim_set_destroyed(world.sim, THREE, true);
    CHECK(exchange(&world));
    pya_sim_set_destroyed(world.sim, THREE, false);
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(pya_sim_use(world.sim, THREE, blocks[i], 8 * MIB));
        put(&world, blocks[i], 8 * MIB);
        (void)exchange(&world); /* never of what THREE still uses, or the sim complains */
    }
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) <= 10);
    CHECK(reserved(&world) <= (8 * N + 64 + 32) * MIB); /* ONE and TWO share 64 MiB */
    streams_fini(&world);
}

/* A block recorded on a stream that was destroyed before the block's free comes back, though no event can tell. */
static void
test_recorded_on_destroyed_stream(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr ptr = get(&world, 30 * MIB, ONE);
    pya_sim_finish(world.sim, ONE);
    CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
    CHECK_OK(pya_sim_use(world.sim, TWO, ptr, 30 * MIB));
    pya_sim_set_destroyed(world.sim, TWO, true);
    put(&world, ptr, 30 * MIB);
    pya_dptr next = get(&world, 30 * MIB, ONE);
    CHECK(next == ptr);
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), 1);
    CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), 1);
    put(&world, next, 30 * MIB);
    streams_fini(&world);
}

/* With many streams, the cost of asking them is spread over the requests. */
static void
test_many_streams(void) {
    enum { N = 400, ROUNDS = 200, FROM = 1000 };
    struct world world = {.config = {.capacity_bytes = 16384 * MIB}};
    struct pya_sim_state before;
    struct pya_sim_state after;
    world_init(&world, "");
    for (uint64_t i = 0; i < N; i++) {
        give(&world, take(&world, 512, FROM + i));
    }
    pya_sim_query(world.sim, &before);
    for (size_t i = 0; i < ROUNDS; i++) { /* each larger than any free memory */
        give(&world, take(&world, (64 + 2 * i) * MIB, ONE));
        give(&world, take(&world, (64 + 2 * i) * MIB, TWO));
    }
    pya_sim_query(world.sim, &after);
    static const enum pya_sim_call asking[] = {
        PYA_SIM_IS_CAPTURING, PYA_SIM_EVENT_RECORD, PYA_SIM_EVENT_QUERY};
    for (size_t i = 0; i < 3; i++) {
        uint64_t n = after.n_calls[asking[i]] - before.n_calls[asking[i]];
        CHECK(n > 0 && n <= (i == 0 ? 2 : 1) * (2 * ROUNDS * 16 + 2 * N)); /* two for each record */
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_page_transfers") > 0);
    streams_fini(&world);
}

/* A destroyed stream's handle may come back as a stream of another device, where the earlier events are of no use. */
static void
test_handle_comes_back_elsewhere(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    CHECK(exchange(&world));
    for (int context = 0; context < 3; context++) {
        pya_sim_set_context(world.sim, TWO, context);
        for (int i = 0; i < 2; i++) {
            pya_dptr ptr = take(&world, 4 * MIB, ONE);
            CHECK_OK(pya_record_stream(world.heap, ptr, TWO));
            give(&world, ptr);
            give(
                &world,
                take(&world, (64 + 64 * (size_t)context) * MIB, ONE)); /* looks at what waits */
            CHECK_EQ(stat_of(world.heap, 0, "active_bytes.all.current"), 0);
        }
        CHECK(exchange(&world));
    }
    CHECK_EQ(calls(&world, PYA_SIM_STREAM_SYNC) + calls(&world, PYA_SIM_DEVICE_SYNC), 0);
    streams_fini(&world);
}

/* If the event of a stream with unfinished work is lost and there is no other, the stream is waited for. */
static void
test_event_is_lost_while_open(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    pya_sim_finish(world.sim, ONE);
    pya_dptr third = get(&world, 48 * MIB, TWO); /* now the only stream with unfinished work */
    CHECK(third >= first && third + 48 * MIB <= first + 64 * MIB);
    put(&world, get(&world, 64 * MIB, ONE), 64 * MIB);
    pya_sim_finish(world.sim, ONE);
    uint32_t events = 1U << PYA_SIM_EVENT_RECORD | 1U << PYA_SIM_EVENT_CREATE;
    pya_sim_fail(world.sim, events, 1, PYA_E_DEVICE, true);
    pya_dptr fourth = get(&world, 200 * MIB, TWO);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK_EQ(calls(&world, PYA_SIM_STREAM_SYNC), 2);
    put(&world, second, 48 * MIB);
    put(&world, third, 48 * MIB);
    put(&world, fourth, 200 * MIB);
    streams_fini(&world);
}

static bool is_of_a_graph;

static pya_status
query_unless_of_a_graph(struct pya_device *dev, pya_event event, bool *done) {
    return is_of_a_graph ? PYA_E_CAPTURE : world_opened.ops->event_query(dev, event, done);
}

static pya_status
record_out_of_a_graph(struct pya_device *dev, pya_event event, pya_stream stream) {
    is_of_a_graph = false;
    return world_opened.ops->event_record(dev, event, stream);
}

/* If another thread captures a stream just as its event is recorded, the event completes only after another record. */
static void
test_event_became_part_of_a_graph(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_BY_HAND);
    pya_dptr first = get(&world, 64 * MIB, ONE);
    put(&world, first, 64 * MIB);
    pya_dptr second = get(&world, 48 * MIB, TWO);
    world.ops.event_query = query_unless_of_a_graph;
    world.ops.event_record = record_out_of_a_graph;
    is_of_a_graph = true;
    pya_sim_finish_all(world.sim);
    pya_dptr third = get(&world, 70 * MIB, TWO);
    pya_sim_finish_all(world.sim);
    pya_dptr fourth = get(&world, 48 * MIB, TWO);
    CHECK(fourth >= first && fourth + 48 * MIB <= first + 64 * MIB);
    put(&world, second, 48 * MIB);
    put(&world, third, 70 * MIB);
    put(&world, fourth, 48 * MIB);
    streams_fini(&world);
}

/* Programs empty the cache in every step, even if nothing is free.  Then there is no wait. */
static void
test_nothing_to_give_back_is_not_waited_for(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_DELAYED);
    pya_dptr kept = get(&world, MIB, ONE);
    pya_dptr used = get(&world, 8 * MIB, ONE);
    CHECK_OK(pya_empty_cache(world.heap, 0)); /* gives back what was reserved beyond them */
    const uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    const size_t n_reserved = reserved(&world);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_OK(pya_trim(world.heap, 0, MIB));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits);
    pya_sim_finish(world.sim, ONE);
    CHECK_OK(pya_record_stream(world.heap, used, TWO));
    CHECK_OK(pya_sim_use(world.sim, TWO, used, 8 * MIB));
    put(&world, used, 8 * MIB); /* free once TWO is done */
    pya_sim_fail(world.sim, 1U << PYA_SIM_PAGE_RELEASE, 1, PYA_E_DEVICE, false);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK(calls(&world, PYA_SIM_DEVICE_SYNC) > n_waits);
    const size_t n_left = reserved(&world);
    CHECK(n_left < n_reserved);
    CHECK_OK(pya_empty_cache(world.heap, 0)); /* now the page goes whose release failed */
    CHECK(reserved(&world) < n_left);
    put(&world, kept, MIB);
    streams_fini(&world);
}

/* Free memory of a pool in use stays there, so emptying the cache does not wait for it. */
static void
test_a_pool_in_use_gives_nothing_back(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_DELAYED);
    const struct pya_pool_id pool = {3, 4};
    CHECK_OK(pya_pool_begin(world.heap, 0, pool, (struct pya_stream_filter){0}));
    put(&world, get(&world, 8 * MIB, ONE), 8 * MIB);
    CHECK_OK(pya_pool_end(world.heap, 0, pool));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    const uint64_t n_waits = calls(&world, PYA_SIM_DEVICE_SYNC);
    const size_t n_reserved = reserved(&world);
    CHECK(n_reserved > 0);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(calls(&world, PYA_SIM_DEVICE_SYNC), n_waits);
    CHECK_EQ(reserved(&world), n_reserved);
    CHECK_OK(pya_pool_release(world.heap, 0, pool));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    streams_fini(&world);
}

/* A block freed while its recorded stream is captured is asked about ever more rarely.  That interval starts anew once
 * an event has completed. */
static void
test_captured_again(void) {
    struct world world;
    streams_init(&world, PYA_SIM_WORK_AT_ONCE);
    put(&world, get(&world, MIB, ONE), MIB);
    for (int i = 0; i < 3; i++) {
        pya_sim_set_capturing(world.sim, TWO, i % 2 == 0);
        pya_dptr block = get(&world, 2 * MIB, ONE);
        CHECK_OK(pya_record_stream(world.heap, block, TWO));
        put(&world, block, 2 * MIB);
        for (int k = i == 0 ? 33 : 2; k > 0; k--) {
            put(&world, get(&world, MIB, ONE), MIB);
        }
        CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), i % 2 == 0);
        pya_sim_set_capturing(world.sim, TWO, false);
        if (i == 0) {
            CHECK_OK(pya_empty_cache(world.heap, 0));
        }
        put(&world, get(&world, MIB, ONE), MIB);
        put(&world, get(&world, MIB, ONE), MIB);
        CHECK_EQ(stat_of(world.heap, 0, "active.all.current"), 0);
    }
    streams_fini(&world);
}

static const struct check_case cases[] = {
    {"nothing_to_give_back_is_not_waited_for", test_nothing_to_give_back_is_not_waited_for},
    {"a_pool_in_use_gives_nothing_back", test_a_pool_in_use_gives_nothing_back},
    {"event_is_lost_while_open", test_event_is_lost_while_open},
    {"event_became_part_of_a_graph", test_event_became_part_of_a_graph},
    {"handle_comes_back_elsewhere", test_handle_comes_back_elsewhere},
    {"stream_without_events", test_stream_without_events},
    {"destroyed_stream", test_destroyed_stream},
    {"foreign_stream", test_foreign_stream},
    {"foreign_stream_in_use", test_foreign_stream_in_use},
    {"foreign_stream_captures", test_foreign_stream_captures},
    {"foreign_stream_captures_at_a_free", test_foreign_stream_captures_at_a_free},
    {"foreign_stream_captured_before_a_large_request",
     test_foreign_stream_captured_before_a_large_request},
    {"captured_again", test_captured_again},
    {"foreign_stream_of_a_conditional_node", test_foreign_stream_of_a_conditional_node},
    {"announced_capture", test_announced_capture},
    {"stream_is_reborn", test_stream_is_reborn},
    {"destroyed_stream_leaves_blocks", test_destroyed_stream_leaves_blocks},
    {"recorded_on_destroyed_stream", test_recorded_on_destroyed_stream},
    {"many_streams", test_many_streams},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
