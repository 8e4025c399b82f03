/* Placing blocks of known lifetimes at offsets so that all of them take little room.  Floor 1.
 *
 * This is dynamic storage allocation, which is NP-hard; we search with a heuristic.  Place the largest block first, each at
 * the lowest offset that is free throughout its life.  Then repeat, with the blocks that ended highest moved to the front.
 * Once that stops improving, restart from other orders (longest life first; bytes^2 * life), and finally from the best order
 * with some randomly drawn blocks at its front. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [begin, end) in any unit; an empty range is never alive.  A block that returns to the same place has two lives. */
struct pya_life {
    uint64_t begin, end;
};

struct pya_placed {
    uint64_t bytes;
    struct pya_life lives[2];
    uint64_t offset; /* out */
};

struct pya_placement {
    uint64_t live_bytes;   /* peak of live bytes: a lower bound for extent_bytes */
    uint64_t extent_bytes; /* end of the highest block */
};

/* Called now and then with the work done and the most there can be (without the first round); false: stop. */
struct pya_placement_watch {
    bool (*go_on)(void *arg, uint64_t n_done, uint64_t n_all);
    void *arg;
};

/* n_rounds: at most this many placements.  watch may be NULL.  PYA_E_TOO_LARGE: the sizes add up to more than any device
 * has; PYA_E_LIMIT: the watch stopped the search. */
PYA_MUST_CHECK pya_status pya_placement_find(
    struct pya_placed *blocks, size_t n, unsigned n_rounds, const struct pya_placement_watch *watch,
    struct pya_placement *out);

#ifdef __cplusplus
}
#endif
