/* The names of the statistics and their flat order.  Floor 1. */
#include "stats.h"

#include <stdio.h>

#define POOLED_KEYS(name, pool)                                                                    \
    #name "." pool ".current", #name "." pool ".peak", #name "." pool ".allocated",                \
        #name "." pool ".freed",

static const char *const stat_keys[] = {
#define X(name) POOLED_KEYS(name, "all")
    PYA_POOLED_STATS(X)
#undef X
#define X(name) POOLED_KEYS(name, "large_pool")
        PYA_POOLED_STATS(X)
#undef X
#define X(name) POOLED_KEYS(name, "small_pool")
            PYA_POOLED_STATS(X)
#undef X
#define X(name) #name ".current", #name ".peak", #name ".allocated", #name ".freed",
                PYA_SINGLE_STATS(X)
#undef X
#define X(name) #name,
                    PYA_SCALAR_STATS(X)
#undef X
};

_Static_assert(sizeof stat_keys / sizeof stat_keys[0] == PYA_N_STATS, "one key per number");

const char *
pya_stat_key(size_t index) {
    return index < PYA_N_STATS ? stat_keys[index] : NULL;
}

static int64_t *
stats_put(int64_t *values, const struct pya_stat *stat) {
    *values++ = stat->current;
    *values++ = stat->peak;
    *values++ = stat->allocated;
    *values++ = stat->freed;
    return values;
}

void
pya_stats_flatten(const struct pya_stats *stats, int64_t *values) {
    for (int pool = 0; pool < PYA_N_STAT_POOLS; pool++) {
        for (int i = 0; i < PYA_N_POOLED; i++) {
            values = stats_put(values, &stats->pooled[pool][i]);
        }
    }
    for (int i = 0; i < PYA_N_SINGLE; i++) {
        values = stats_put(values, &stats->single[i]);
    }
    for (int i = 0; i < PYA_N_SCALAR; i++) {
        *values++ = stats->scalar[i];
    }
}

static void
stats_each(struct pya_stats *stats, void (*visit)(struct pya_stat *)) {
    for (int pool = 0; pool < PYA_N_STAT_POOLS; pool++) {
        for (int i = 0; i < PYA_N_POOLED; i++) {
            visit(&stats->pooled[pool][i]);
        }
    }
    for (int i = 0; i < PYA_N_SINGLE; i++) {
        visit(&stats->single[i]);
    }
}

static void
stat_reset_peak(struct pya_stat *stat) {
    stat->peak = stat->current;
}

/* torch's accumulated counters restart at zero while current goes on. */
static void
stat_reset_total(struct pya_stat *stat) {
    stat->allocated = 0;
    stat->freed = 0;
}

void
pya_stats_reset_peaks(struct pya_stats *stats) {
    stats_each(stats, stat_reset_peak);
}

void
pya_stats_reset_totals(struct pya_stats *stats) {
    stats_each(stats, stat_reset_total);
    stats->scalar[PYA_STAT_num_alloc_retries] = 0;
    stats->scalar[PYA_STAT_num_ooms] = 0;
    stats->scalar[PYA_STAT_num_oom_rejections] = 0;
    stats->scalar[PYA_STAT_num_sync_all_streams] = 0;
    stats->scalar[PYA_STAT_num_device_alloc] = 0;
    stats->scalar[PYA_STAT_num_device_free] = 0;
}

size_t
pya_stats_check(const struct pya_stats *stats) {
    size_t n_wrong = 0;
    for (int i = 0; i < PYA_N_POOLED; i++) {
        const struct pya_stat *all = &stats->pooled[PYA_STAT_ALL][i];
        const struct pya_stat *large = &stats->pooled[PYA_STAT_LARGE][i];
        const struct pya_stat *small = &stats->pooled[PYA_STAT_SMALL][i];
        if (all->current != large->current + small->current || all->current < 0
            || large->current < 0 || small->current < 0 || all->peak < all->current) {
            (void)fprintf(
                stderr, "stats: %s: all %lld (peak %lld) != large %lld + small %lld\n",
                stat_keys[i * 4], (long long)all->current, (long long)all->peak,
                (long long)large->current, (long long)small->current);
            n_wrong++;
        }
    }
    return n_wrong;
}
