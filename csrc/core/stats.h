/* Statistics in torch's vocabulary: one table of names, from which C, Python and the CLI take their keys.  Floor 2.
 * Long because of the tables of names. */
#pragma once

#include "counter.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counted three ways (all, large_pool, small_pool), each as current, peak, allocated, freed. */
#define PYA_POOLED_STATS(X)                                                                        \
    X(allocation)                                                                                  \
    X(segment)                                                                                     \
    X(active)                                                                                      \
    X(inactive_split)                                                                              \
    X(allocated_bytes)                                                                             \
    X(reserved_bytes)                                                                              \
    X(active_bytes)                                                                                \
    X(inactive_split_bytes)                                                                        \
    X(requested_bytes)

/* Counted once, as current, peak, allocated, freed. */
#define PYA_SINGLE_STATS(X)                                                                        \
    X(oversize_allocations)                                                                        \
    X(oversize_segments)

/* Plain numbers.  The second group is our own: where requests were served, and the steps before out of memory. */
#define PYA_SCALAR_STATS(X)                                                                        \
    X(num_alloc_retries)                                                                           \
    X(num_ooms)                                                                                    \
    X(num_oom_rejections)                                                                          \
    X(num_sync_all_streams)                                                                        \
    X(num_device_alloc)                                                                            \
    X(num_device_free)                                                                             \
    X(max_split_size)                                                                              \
    X(pyalloc_fit_hits)                                                                            \
    X(pyalloc_repeats)                                                                             \
    X(pyalloc_planned)                                                                             \
    X(pyalloc_range_hits)                                                                          \
    X(pyalloc_stitches)                                                                            \
    X(pyalloc_shared_ranges)                                                                       \
    X(pyalloc_growths)                                                                             \
    X(pyalloc_page_moves)                                                                          \
    X(pyalloc_page_transfers)                                                                      \
    X(pyalloc_pages_released)                                                                      \
    X(pyalloc_event_polls)                                                                         \
    X(pyalloc_event_frees)                                                                         \
    X(pyalloc_collections)                                                                         \
    X(pyalloc_pages_collected)                                                                     \
    X(pyalloc_pages_regretted)                                                                     \
    X(pyalloc_idle_trims)                                                                          \
    X(pyalloc_recoveries)                                                                          \
    X(pyalloc_pressed)                                                                             \
    X(pyalloc_saved_by_stitch)                                                                     \
    X(pyalloc_saved_by_wait)                                                                       \
    X(pyalloc_saved_by_transfer)                                                                   \
    X(pyalloc_saved_by_release)                                                                    \
    X(pyalloc_saved_by_callback)                                                                   \
    X(pyalloc_pressure_calls)                                                                      \
    X(pyalloc_unmaps)                                                                              \
    X(pyalloc_pages)                                                                               \
    X(pyalloc_mappings)                                                                            \
    X(pyalloc_host_bytes)

enum pya_pooled_stat {
#define X(name) PYA_STAT_##name,
    PYA_POOLED_STATS(X)
#undef X
        PYA_N_POOLED
};

enum pya_single_stat {
#define X(name) PYA_STAT_##name,
    PYA_SINGLE_STATS(X)
#undef X
        PYA_N_SINGLE
};

enum pya_scalar_stat {
#define X(name) PYA_STAT_##name,
    PYA_SCALAR_STATS(X)
#undef X
        PYA_N_SCALAR
};

enum pya_stat_pool { PYA_STAT_ALL, PYA_STAT_LARGE, PYA_STAT_SMALL, PYA_N_STAT_POOLS };

/* Each pooled statistic has four numbers for each pool, and each single one has four numbers. */
#define PYA_N_POOLED_NUMBERS ((int)PYA_N_POOLED * (int)PYA_N_STAT_POOLS * 4)
#define PYA_N_STATS (PYA_N_POOLED_NUMBERS + PYA_N_SINGLE * 4 + PYA_N_SCALAR)

/* pooled[] holds only those statistics that `live` does not.  The two pools add up to "all".  Checked by
 * pya_stats_check(). */
struct pya_stats {
    bool has_one_split_pool; /* virtual memory: "all" of inactive_split* is its large pool */
    struct pya_live live;
    struct pya_stat pooled[PYA_N_STAT_POOLS][PYA_N_POOLED];
    struct pya_stat single[PYA_N_SINGLE];
    int64_t scalar[PYA_N_SCALAR];
};

static inline void
pya_stats_add(
    struct pya_stats *stats, enum pya_stat_pool pool, enum pya_pooled_stat which, size_t amount) {
    pya_stat_add(&stats->pooled[PYA_STAT_ALL][which], (int64_t)amount);
    pya_stat_add(&stats->pooled[pool][which], (int64_t)amount);
}

static inline void
pya_stats_sub(
    struct pya_stats *stats, enum pya_stat_pool pool, enum pya_pooled_stat which, size_t amount) {
    pya_stat_sub(&stats->pooled[PYA_STAT_ALL][which], (int64_t)amount);
    pya_stat_sub(&stats->pooled[pool][which], (int64_t)amount);
}

/* Counts a run of pages that came (sign 1) or went (-1) with so many bytes outside of its wholly free pages. */
static inline void
pya_stats_count_split(struct pya_stats *stats, size_t split, int sign) {
    struct pya_stat *large = stats->pooled[PYA_STAT_LARGE];
    if (sign > 0) {
        pya_stat_add(&large[PYA_STAT_inactive_split], split > 0);
        pya_stat_add(&large[PYA_STAT_inactive_split_bytes], (int64_t)split);
    } else {
        pya_stat_sub(&large[PYA_STAT_inactive_split], split > 0);
        pya_stat_sub(&large[PYA_STAT_inactive_split_bytes], (int64_t)split);
    }
}

/* The slow half of pya_stats_take(), for when blocks are parked. */
void pya_stats_note_active(struct pya_stats *stats, bool is_small);

/* Counts a block that was handed out. */
static inline void
pya_stats_take(struct pya_stats *stats, bool is_small, size_t bytes, size_t requested) {
    struct pya_live *live = &stats->live;
    const int64_t amount[PYA_N_LIVE] = {1, (int64_t)bytes, (int64_t)requested};
#pragma GCC unroll 3
    for (int i = 0; i < PYA_N_LIVE; i++) {
        live->in[i][is_small] += amount[i];
        int64_t now = pya_live_now(live, i, is_small);
        int64_t now_both = now + pya_live_now(live, i, !is_small);
        if (now > live->peak[i][is_small]) {
            live->peak[i][is_small] = now;
        }
        if (now_both > live->peak[i][PYA_LIVE_BOTH]) {
            live->peak[i][PYA_LIVE_BOTH] = now_both;
        }
    }
}

/* Counts a block that its user freed. */
static inline void
pya_stats_drop(struct pya_stats *stats, bool is_small, size_t bytes, size_t requested) {
    struct pya_live *live = &stats->live;
    live->out[PYA_LIVE_COUNT][is_small] += 1;
    live->out[PYA_LIVE_BYTES][is_small] += (int64_t)bytes;
    live->out[PYA_LIVE_REQUESTED][is_small] += (int64_t)requested;
}

/* sign 1: a freed block is parked, because other streams may still use it.  sign -1: they are done with it. */
void
pya_stats_park(struct pya_stats *stats, bool is_small, size_t bytes, size_t requested, int sign);

/* Bytes handed out, and blocks handed out or parked, in both pools. */
int64_t pya_stats_allocated_bytes(const struct pya_stats *stats);
int64_t pya_stats_active(const struct pya_stats *stats);

/* "allocated_bytes.all.current" and so on; NULL for index >= PYA_N_STATS.  The string is static. */
const char *pya_stat_key(size_t index);
/* values: PYA_N_STATS numbers, in the order of pya_stat_key(). */
void pya_stats_flatten(const struct pya_stats *stats, int64_t *values);
void pya_stats_reset_peaks(struct pya_stats *stats);
void pya_stats_reset_totals(struct pya_stats *stats);
size_t pya_stats_check(const struct pya_stats *stats);

#ifdef __cplusplus
}
#endif
