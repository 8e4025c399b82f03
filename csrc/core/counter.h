/* The building blocks of statistics: a counter with a peak, and the bare sums behind torch's five busiest statistics.
 * Floor 1. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* current <= peak, and allocated - freed == current until the totals are reset. */
struct pya_stat {
    int64_t current;
    int64_t peak;
    int64_t allocated;
    int64_t freed;
};

/* The three measures of one block. */
enum { PYA_LIVE_COUNT, PYA_LIVE_BYTES, PYA_LIVE_REQUESTED, PYA_N_LIVE };

/* torch's pools, and the sum of the two. */
enum { PYA_LIVE_LARGE, PYA_LIVE_SMALL, PYA_LIVE_BOTH, PYA_N_LIVE_POOLS };

/* The sums that every request updates, as few as possible: five of torch's statistics are derived from them.
 * allocated now == in - out; active now == in - out + parked (freed, but waiting for other streams).
 * The peaks of "active" can exceed those of "allocated" only while something is parked.
 * Indexed by measure, then by pool, to save address arithmetic.  For PYA_LIVE_BOTH only the peaks are kept; the other
 * sums are computed on demand. */
struct pya_live {
    int64_t in[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t out[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t peak[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t parked[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t peak_active[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    /* in, out and out - parked when the totals were last reset */
    int64_t base_in[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t base_out[PYA_N_LIVE][PYA_N_LIVE_POOLS];
    int64_t base_done[PYA_N_LIVE][PYA_N_LIVE_POOLS];
};

static inline void
pya_stat_add(struct pya_stat *stat, int64_t amount) {
    stat->allocated += amount;
    stat->current += amount;
    stat->peak = stat->current > stat->peak ? stat->current : stat->peak;
}

static inline void
pya_stat_sub(struct pya_stat *stat, int64_t amount) {
    stat->freed += amount;
    stat->current -= amount;
}

/* The same as pya_stat_sub() of `before`, then pya_stat_add() of `amount`. */
static inline void
pya_stat_replace(struct pya_stat *stat, int64_t before, int64_t amount) {
    stat->freed += before;
    stat->allocated += amount;
    stat->current += amount - before;
    stat->peak = stat->current > stat->peak ? stat->current : stat->peak;
}

static inline void
pya_stat_reset_peak(struct pya_stat *stat) {
    stat->peak = stat->current;
}

/* torch's accumulated counters restart at zero; current does not change. */
static inline void
pya_stat_reset_total(struct pya_stat *stat) {
    stat->allocated = 0;
    stat->freed = 0;
}

static inline int64_t
pya_live_now(const struct pya_live *live, int measure, int pool) {
    return live->in[measure][pool] - live->out[measure][pool];
}

#ifdef __cplusplus
}
#endif
