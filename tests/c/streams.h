/* Three streams on one simulated card.  The sim watches their work and the memory they own. */
#pragma once

#include "world.h"

enum { ONE = 16, TWO = 32, THREE = 48 };

static inline void
streams_init(struct world *world, enum pya_sim_work work) {
    *world = (struct world){.config = {.capacity_bytes = 1024 * MIB, .work = work}};
    world_init(world, "");
}

/* All freed memory can be given back, whichever stream had it last. */
static inline void
streams_fini(struct world *world) {
    struct pya_sim_state state;
    pya_sim_finish_all(world->sim);
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    CHECK_OK(pya_empty_cache(world->heap, 0));
    pya_sim_query(world->sim, &state);
    CHECK_EQ(state.used_bytes, 0);
    CHECK_EQ(state.n_mappings, 0);
    world_fini(world);
}

static inline pya_dptr
get(struct world *world, size_t bytes, pya_stream stream) {
    pya_dptr ptr = take(world, bytes, stream);
    CHECK_OK(pya_sim_own(world->sim, ptr, bytes));
    CHECK_OK(pya_sim_use(world->sim, stream, ptr, bytes));
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    return ptr;
}

static inline void
put(struct world *world, pya_dptr ptr, size_t bytes) {
    pya_sim_disown(world->sim, ptr, bytes);
    give(world, ptr);
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
}

/* TWO requests memory that ONE has freed.  True: it got that memory. */
static inline bool
exchange(struct world *world) {
    pya_dptr first = get(world, 64 * MIB, ONE);
    put(world, first, 64 * MIB);
    pya_dptr second = get(world, 48 * MIB, TWO);
    put(world, second, 48 * MIB);
    return second >= first && second + 48 * MIB <= first + 64 * MIB;
}
