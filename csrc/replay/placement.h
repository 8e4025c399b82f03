/* Placing blocks whose lives are known: where each is to lie so that all take little room.  Floor 1.
 *
 * This is dynamic storage allocation, which is NP-hard: the largest first, each at the lowest place that is free for all
 * of its life; then again and again with those in front that ended highest.  Where that leads no further the same begins
 * anew from other orders (the longest life first, by both), and in the end from the best order with some blocks drawn to
 * its front. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* [begin, end) in any unit; empty: it never lives.  A block that comes again at the same place lives twice. */
struct pya_life {
    uint64_t begin, end;
};

struct pya_placed {
    uint64_t bytes;
    struct pya_life lives[2];
    uint64_t offset; /* out */
};

struct pya_placement {
    uint64_t live_bytes;   /* most alive at once: no placement takes less */
    uint64_t extent_bytes; /* end of the highest block */
};

/* Told now and then how much work is done, and how much there is at most but for the first round; false: end it. */
struct pya_placement_watch {
    bool (*go_on)(void *arg, uint64_t n_done, uint64_t n_all);
    void *arg;
};

/* n_rounds: how often to place anew at most.  watch: NULL for none.  PYA_E_TOO_LARGE: sizes add up to more than any device
 * has; PYA_E_LIMIT: the watch ended it. */
PYA_MUST_CHECK pya_status pya_placement_find(
    struct pya_placed *blocks, size_t n, unsigned n_rounds, const struct pya_placement_watch *watch,
    struct pya_placement *out);

#ifdef __cplusplus
}
#endif
