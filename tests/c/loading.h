/* Grains as they come while a model is loaded, and afterwards. */
#pragma once

#include "world.h"

/* A program that has freed something does not load its model any more: up to 2 GiB it gets smaller grains from then on. */
static inline void
end_loading(struct world *world) {
    for (int i = 0; i < 32; i++) {
        give(world, take(world, 2 * MIB, 0));
    }
}
