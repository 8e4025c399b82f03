/* The names of the statistics and their flat order.  Floor 2. */
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

static int64_t
larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static void
live_sum_up(int64_t of[PYA_N_LIVE][PYA_N_LIVE_POOLS]) {
    for (int i = 0; i < PYA_N_LIVE; i++) {
        of[i][PYA_LIVE_BOTH] = of[i][PYA_LIVE_LARGE] + of[i][PYA_LIVE_SMALL];
    }
}

/* Adds the sums of both pools. */
static struct pya_live
live_sum(const struct pya_stats *stats) {
    struct pya_live sum = stats->live;
    live_sum_up(sum.in);
    live_sum_up(sum.out);
    live_sum_up(sum.parked);
    live_sum_up(sum.base_in);
    live_sum_up(sum.base_out);
    live_sum_up(sum.base_done);
    return sum;
}

/* What torch would have counted when the user freed (is_active false), or when the last stream had finished. */
static struct pya_stat
live_stat(const struct pya_live *live, enum pya_stat_pool which, int measure, bool is_active) {
    static const int pools[PYA_N_STAT_POOLS] = {
        [PYA_STAT_ALL] = PYA_LIVE_BOTH,
        [PYA_STAT_LARGE] = PYA_LIVE_LARGE,
        [PYA_STAT_SMALL] = PYA_LIVE_SMALL,
    };
    int pool = pools[which];
    int64_t parked = is_active ? live->parked[measure][pool] : 0;
    int64_t base = is_active ? live->base_done[measure][pool] : live->base_out[measure][pool];
    int64_t peak = live->peak[measure][pool];
    return (struct pya_stat){
        .current = pya_live_now(live, measure, pool) + parked,
        .peak = is_active ? larger(peak, live->peak_active[measure][pool]) : peak,
        .allocated = live->in[measure][pool] - live->base_in[measure][pool],
        .freed = live->out[measure][pool] - parked - base,
    };
}

/* live: the result of live_sum(). */
static struct pya_stat
stats_pooled(
    const struct pya_stats *stats, const struct pya_live *live, enum pya_stat_pool pool,
    enum pya_pooled_stat which) {
    switch (which) {
    case PYA_STAT_allocation:
        return live_stat(live, pool, PYA_LIVE_COUNT, false);
    case PYA_STAT_allocated_bytes:
        return live_stat(live, pool, PYA_LIVE_BYTES, false);
    case PYA_STAT_active:
        return live_stat(live, pool, PYA_LIVE_COUNT, true);
    case PYA_STAT_active_bytes:
        return live_stat(live, pool, PYA_LIVE_BYTES, true);
    case PYA_STAT_requested_bytes:
        return live_stat(live, pool, PYA_LIVE_REQUESTED, true);
    case PYA_STAT_inactive_split:
    case PYA_STAT_inactive_split_bytes:
        if (pool == PYA_STAT_ALL && stats->has_one_split_pool) {
            pool = PYA_STAT_LARGE;
        }
        break;
    case PYA_STAT_segment:
    case PYA_STAT_reserved_bytes:
    case PYA_N_POOLED:
        break;
    }
    return stats->pooled[pool][which];
}

void
pya_stats_note_active(struct pya_stats *stats, bool is_small) {
    struct pya_live *live = &stats->live;
    for (int i = 0; i < PYA_N_LIVE; i++) {
        int64_t *peaks = live->peak_active[i];
        int64_t now = pya_live_now(live, i, is_small) + live->parked[i][is_small];
        int64_t other = pya_live_now(live, i, !is_small) + live->parked[i][!is_small];
        peaks[is_small] = larger(peaks[is_small], now);
        peaks[PYA_LIVE_BOTH] = larger(peaks[PYA_LIVE_BOTH], now + other);
    }
}

void
pya_stats_park(struct pya_stats *stats, bool is_small, size_t bytes, size_t requested, int sign) {
    struct pya_live *live = &stats->live;
    live->parked[PYA_LIVE_COUNT][is_small] += sign;
    live->parked[PYA_LIVE_BYTES][is_small] += sign * (int64_t)bytes;
    live->parked[PYA_LIVE_REQUESTED][is_small] += sign * (int64_t)requested;
}

int64_t
pya_stats_allocated_bytes(const struct pya_stats *stats) {
    const struct pya_live live = live_sum(stats);
    return stats_pooled(stats, &live, PYA_STAT_ALL, PYA_STAT_allocated_bytes).current;
}

int64_t
pya_stats_active(const struct pya_stats *stats) {
    const struct pya_live live = live_sum(stats);
    return stats_pooled(stats, &live, PYA_STAT_ALL, PYA_STAT_active).current;
}

void
pya_stats_flatten(const struct pya_stats *stats, int64_t *values) {
    const struct pya_live live = live_sum(stats);
    for (int pool = 0; pool < PYA_N_STAT_POOLS; pool++) {
        for (int i = 0; i < PYA_N_POOLED; i++) {
            struct pya_stat stat =
                stats_pooled(stats, &live, (enum pya_stat_pool)pool, (enum pya_pooled_stat)i);
            values = stats_put(values, &stat);
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

void
pya_stats_reset_peaks(struct pya_stats *stats) {
    const struct pya_live now = live_sum(stats);
    for (int i = 0; i < PYA_N_LIVE; i++) {
        for (int pool = 0; pool < PYA_N_LIVE_POOLS; pool++) {
            int64_t current = pya_live_now(&now, i, pool);
            stats->live.peak[i][pool] = current;
            stats->live.peak_active[i][pool] = current + now.parked[i][pool];
        }
    }
    stats_each(stats, pya_stat_reset_peak);
}

void
pya_stats_reset_totals(struct pya_stats *stats) {
    struct pya_live *live = &stats->live;
    for (int i = 0; i < PYA_N_LIVE; i++) {
        for (int pool = 0; pool < PYA_LIVE_BOTH; pool++) {
            live->base_in[i][pool] = live->in[i][pool];
            live->base_out[i][pool] = live->out[i][pool];
            live->base_done[i][pool] = live->out[i][pool] - live->parked[i][pool];
        }
    }
    stats_each(stats, pya_stat_reset_total);
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
    const struct pya_live live = live_sum(stats);
    for (int i = 0; i < PYA_N_POOLED; i++) {
        enum pya_pooled_stat which = (enum pya_pooled_stat)i;
        struct pya_stat all = stats_pooled(stats, &live, PYA_STAT_ALL, which);
        struct pya_stat large = stats_pooled(stats, &live, PYA_STAT_LARGE, which);
        struct pya_stat small = stats_pooled(stats, &live, PYA_STAT_SMALL, which);
        if (all.current != large.current + small.current || all.current < 0 || large.current < 0 ||
            small.current < 0 || all.peak < all.current) {
            (void)fprintf(
                stderr, "stats: %s: all %lld (peak %lld) != large %lld + small %lld\n",
                stat_keys[i * 4], (long long)all.current, (long long)all.peak,
                (long long)large.current, (long long)small.current);
            n_wrong++;
        }
    }
    return n_wrong;
}
