/* One private pool in a world. */
#pragma once

#include "world.h"

static const struct pya_pool_id POOL = {3, 4};

static inline void
pools_init(struct world *world, const char *text) {
    world->config.capacity_bytes = 1024 * MIB;
    world_init(world, text);
    CHECK_OK(pya_pool_retain(world->heap, 0, POOL, false));
}

static inline void
pool_begin(struct world *world) {
    CHECK_OK(pya_pool_begin(world->heap, 0, POOL, (struct pya_stream_filter){0}));
}

static inline void
pool_end(struct world *world) {
    CHECK_OK(pya_pool_end(world->heap, 0, POOL));
    CHECK_OK(pya_pool_release(world->heap, 0, POOL));
}
