/* The grains that are created while a model is loaded, and afterwards. */
#pragma once

#include "world.h"

/* Frees something, which ends the loading phase: from then on, up to 2 GiB, the program gets smaller grains. */
static inline void
end_loading(struct world *world) {
    for (int i = 0; i < 32; i++) {
        give(world, take(world, 2 * MIB, 0));
    }
}
