/* One heap on one simulated device. */
#pragma once

#include <unistd.h>

#include "check.h"
#include "core/heap.h"
#include "device/sim.h"
#include "stat.h"

#define MIB ((size_t)1 << 20)

struct world {
    struct pya_heap *heap;
    struct pya_sim *sim;
    struct pya_sim_config config;
    struct pya_hooks hooks;
    const struct pya_layout *layouts; /* for its options; NULL: none */
    struct pya_device_ops ops;        /* the sim's, with our own begin, end and close */
};

static struct {
    const struct pya_device_ops *ops;
    pid_t pid;
    bool quiet;
    int n_begun;
} world_opened; /* the latest: tests have one at a time */

/* begin without end would leave the device's context current in the thread, so the calls are counted. */
static inline void
world_begin(struct pya_device *dev) {
    (void)dev;
    (void)__atomic_add_fetch(&world_opened.n_begun, 1, __ATOMIC_RELAXED);
}

static inline void
world_end(struct pya_device *dev) {
    (void)dev;
    CHECK(__atomic_sub_fetch(&world_opened.n_begun, 1, __ATOMIC_RELAXED) >= 0);
}

/* Everything must have been given back by now, including live blocks.  Except in a forked child; and a call that
 * failed may have lost addresses. */
static inline void
world_close(struct pya_device *dev) {
    struct pya_sim_state state;
    dev->ops = world_opened.ops;
    pya_sim_query(pya_sim_of(dev), &state);
    if (getpid() == world_opened.pid) {
        CHECK_EQ(state.used_bytes, 0);
        CHECK_EQ(state.n_mappings, 0);
        CHECK(state.n_ranges == 0 || world_opened.quiet);
        CHECK_EQ(state.n_events, 0);
        CHECK_EQ(world_opened.n_begun, 0);
    }
    pya_device_close(dev);
}

static inline pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    pya_status st = pya_sim_create(&world->config, index, &world->sim);
    if (st == PYA_OK) {
        *out = pya_sim_device(world->sim);
        world_opened.ops = (*out)->ops;
        world_opened.pid = getpid();
        world_opened.quiet = world->config.quiet;
        world->ops = *world_opened.ops;
        world->ops.begin = world_begin;
        world->ops.end = world_end;
        world->ops.close = world_close;
        (*out)->ops = &world->ops;
    }
    return st;
}

static inline void
world_init(struct world *world, const char *text) {
    struct pya_options options;
    char message[200] = "";
    pya_options_init(&options);
    CHECK_OK(pya_options_parse(&options, text, message, sizeof message));
    options.layouts = world->layouts;
    world->hooks.arg = world;
    world_opened.n_begun = 0;
    world->hooks.open_device = world_open;
    CHECK_OK(pya_heap_create(&options, &world->hooks, &world->heap));
}

static inline void
world_fini(struct world *world) {
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    if (world->sim != NULL) {
        struct pya_sim_state state;
        pya_sim_query(world->sim, &state);
        if (!CHECK_EQ(state.n_violations, 0)) {
            fprintf(stderr, "    %s\n", pya_sim_violation(world->sim));
        }
        CHECK_EQ(pya_sim_check(world->sim), 0);
    }
    pya_heap_destroy(world->heap);
}

static inline size_t
reserved(struct world *world) {
    return (size_t)stat_of(world->heap, 0, "reserved_bytes.all.current");
}

static inline uint64_t
calls(struct world *world, enum pya_sim_call call) {
    struct pya_sim_state state;
    pya_sim_query(world->sim, &state);
    return state.n_calls[call];
}

/* Calls of every kind. */
static inline uint64_t
all_calls(struct world *world) {
    struct pya_sim_state state;
    uint64_t n = 0;
    pya_sim_query(world->sim, &state);
    for (size_t i = 0; i < sizeof state.n_calls / sizeof *state.n_calls; i++) {
        n += state.n_calls[i];
    }
    return n;
}

static inline pya_dptr
take(struct world *world, size_t bytes, pya_stream stream) {
    pya_dptr ptr = 0;
    CHECK_OK(pya_alloc(world->heap, 0, bytes, stream, &ptr));
    return ptr;
}

static inline void
give(struct world *world, pya_dptr ptr) {
    CHECK_OK(pya_free(world->heap, ptr));
}

/* Calls the collector directly, because a program reaches it only indirectly. */
static inline size_t
collect(struct world *world, size_t bytes) {
    struct pya_card *card = world->heap->cards.open[0];
    pya_lock_acquire(&card->lock);
    size_t n_freed = pya_gc_collect(card, bytes, NULL, 0);
    pya_lock_release(&card->lock);
    return n_freed;
}
