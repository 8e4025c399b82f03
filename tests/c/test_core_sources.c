/* Private pools with a source of memory whose own code uses the heap, as one written in Python does. */
#include "pools.h"

#include <pthread.h>

/* What the source does at its next call, alloc and free alike; NULL: nothing. */
struct source {
    struct world *world;
    void (*act)(struct source *source);
    size_t n_segments;
    size_t n_calls;
    size_t n_acts;
    pya_dptr kept, kept_too;
};

static void
source_act(struct source *source) {
    void (*act)(struct source *) = source->act;
    source->act = NULL;
    if (act != NULL) {
        source->n_acts++;
        act(source);
    }
}

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    struct source *source = arg;
    source_act(source);
    source->n_segments++;
    source->n_calls++;
    return (pya_dptr)source->n_calls << 40 | bytes % 2;
}

static void
source_free(void *arg, pya_dptr addr) {
    struct source *source = arg;
    CHECK(addr >> 40 <= source->n_calls);
    source->n_segments--;
    source_act(source);
}

static void
sources_init(struct world *world, struct source *source, const char *options) {
    *source = (struct source){.world = world};
    const struct pya_segment_source calls = {source_alloc, source_free, NULL, source};
    pools_init(world, options);
    CHECK_OK(pya_pool_set_source(world->heap, 0, POOL, calls));
}

static void
use_heap(struct source *source) {
    struct world *world = source->world;
    give(world, take(world, 3 * MIB, 0));
    source->kept = take(world, 40 * MIB, 0);
    CHECK_OK(pya_empty_cache(world->heap, 0));
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
}

/* Requests of the source itself go to the pool too, so the source is called within its own call. */
static void
test_it_uses_the_heap(void) {
    struct world world = {0};
    struct source source;
    sources_init(&world, &source, "");
    pool_begin(&world);
    source.act = use_heap;
    pya_dptr outer = take(&world, 30 * MIB, 0);
    CHECK_EQ(source.n_acts, 1);
    CHECK_EQ(source.n_segments, 3);
    pool_end(&world);
    give(&world, source.kept);
    give(&world, outer);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    source.act = use_heap; /* from the device now */
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_acts, 2);
    CHECK_EQ(source.n_segments, 0);
    give(&world, source.kept);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(reserved(&world), 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

static void
release_pool(struct source *source) {
    pool_end(source->world);
    CHECK_OK(pya_pool_release(source->world->heap, 0, POOL));
    CHECK_OK(pya_empty_cache(source->world->heap, 0));
}

/* The request goes on: its pool stays until its block is freed. */
static void
test_the_pool_goes_meanwhile(void) {
    struct world world = {0};
    struct source source;
    sources_init(&world, &source, "");
    pool_begin(&world);
    source.act = release_pool;
    pya_dptr ptr = take(&world, 30 * MIB, 0);
    CHECK_EQ(source.n_segments, 1);
    give(&world, ptr);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_segments, 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

static void
take_the_rest(struct source *source) {
    CHECK_OK(pya_pool_end(source->world->heap, 0, POOL));
    source->kept = take(source->world, 80 * MIB, 0);
}

/* Others get what the limit still allowed meanwhile, so the new segment is given back. */
static void
test_the_limit_is_reached_meanwhile(void) {
    struct world world = {0};
    struct source source;
    pya_dptr none = 0;
    sources_init(&world, &source, "limit:100MiB");
    pool_begin(&world);
    source.act = take_the_rest;
    CHECK_EQ(pya_alloc(world.heap, 0, 30 * MIB, 0, &none), PYA_E_NOMEM);
    CHECK(source.n_calls > 0);
    CHECK_EQ(source.n_segments, 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    give(&world, source.kept);
    world_fini(&world);
}

static void
give_kept(struct source *source) {
    give(source->world, source->kept);
    give(source->world, source->kept_too);
}

/* Segments that others free while another pool's source is called were not waited for: they stay until the next time. */
static void
test_what_is_freed_meanwhile_stays(void) {
    static const struct pya_pool_id other = {5, 6};
    struct world world = {0};
    struct source source;
    sources_init(&world, &source, "");
    struct source theirs = {.world = &world};
    const struct pya_segment_source calls = {source_alloc, source_free, NULL, &theirs};
    CHECK_OK(pya_pool_retain(world.heap, 0, other, false));
    CHECK_OK(pya_pool_set_source(world.heap, 0, other, calls));
    CHECK_OK(pya_pool_begin(world.heap, 0, other, (struct pya_stream_filter){0}));
    source.kept = take(&world, 30 * MIB, 0);
    source.kept_too = take(&world, 30 * MIB, 0);
    CHECK_OK(pya_pool_end(world.heap, 0, other));
    CHECK_OK(pya_pool_release(world.heap, 0, other));
    CHECK_OK(pya_pool_release(world.heap, 0, other));
    pool_begin(&world);
    give(&world, take(&world, 30 * MIB, 0));
    pool_end(&world);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    source.act = give_kept;
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_acts, 1);
    CHECK_EQ(source.n_segments, 0);
    CHECK_EQ(theirs.n_segments, 2);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(theirs.n_segments, 0);
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

static void *
run_other_thread(void *arg) {
    struct source *source = arg;
    use_heap(source);
    return NULL;
}

static void
wait_for_another(struct source *source) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, run_other_thread, source), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

/* Like Python's interpreter lock, which a thread that requests memory may hold. */
static void
test_it_waits_for_a_thread_that_uses_the_heap(void) {
    struct world world = {0};
    struct source source;
    sources_init(&world, &source, "");
    pool_begin(&world);
    source.act = wait_for_another;
    pya_dptr outer = take(&world, 30 * MIB, 0);
    pool_end(&world);
    give(&world, source.kept);
    give(&world, outer);
    CHECK_OK(pya_pool_release(world.heap, 0, POOL));
    source.act = wait_for_another;
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(source.n_acts, 2);
    CHECK_EQ(source.n_segments, 0);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"it_uses_the_heap", test_it_uses_the_heap},
    {"the_pool_goes_meanwhile", test_the_pool_goes_meanwhile},
    {"the_limit_is_reached_meanwhile", test_the_limit_is_reached_meanwhile},
    {"what_is_freed_meanwhile_stays", test_what_is_freed_meanwhile_stays},
    {"it_waits_for_a_thread", test_it_waits_for_a_thread_that_uses_the_heap},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
