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

/* What torch would have counted at the user's free (is_active false) or when the last stream was done. */
static struct pya_stat
live_stat(const struct pya_live_pool *live, int measure, bool is_active) {
    int64_t parked = is_active ? live->parked[measure] : 0;
    int64_t base = is_active ? live->base_done[measure] : live->base_out[measure];
    return (struct pya_stat){
        .current = pya_live_now(live, measure) + parked,
        .peak = is_active ? larger(live->peak[measure], live->peak_active[measure])
                          : live->peak[measure],
        .allocated = live->in[measure] - live->base_in[measure],
        .freed = live->out[measure] - parked - base,
    };
}

/* The two pools as one, with the peaks that were kept for it. */
static struct pya_live_pool
live_sum(const struct pya_stats *stats) {
    struct pya_live_pool sum = stats->live_all;
    for (int i = 0; i < PYA_N_LIVE; i++) {
        const struct pya_live_pool *a = &stats->live[0];
        const struct pya_live_pool *b = &stats->live[1];
        sum.in[i] = a->in[i] + b->in[i];
        sum.out[i] = a->out[i] + b->out[i];
        sum.parked[i] = a->parked[i] + b->parked[i];
        sum.base_in[i] = a->base_in[i] + b->base_in[i];
        sum.base_out[i] = a->base_out[i] + b->base_out[i];
        sum.base_done[i] = a->base_done[i] + b->base_done[i];
    }
    return sum;
}

static struct pya_stat
stats_pooled(const struct pya_stats *stats, enum pya_stat_pool pool, enum pya_pooled_stat which) {
    struct pya_live_pool live =
        pool == PYA_STAT_ALL ? live_sum(stats) : stats->live[pool == PYA_STAT_SMALL];
    switch (which) {
    case PYA_STAT_allocation:
        return live_stat(&live, PYA_LIVE_COUNT, false);
    case PYA_STAT_allocated_bytes:
        return live_stat(&live, PYA_LIVE_BYTES, false);
    case PYA_STAT_active:
        return live_stat(&live, PYA_LIVE_COUNT, true);
    case PYA_STAT_active_bytes:
        return live_stat(&live, PYA_LIVE_BYTES, true);
    case PYA_STAT_requested_bytes:
        return live_stat(&live, PYA_LIVE_REQUESTED, true);
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
    struct pya_live_pool *live = &stats->live[is_small];
    const struct pya_live_pool *other = &stats->live[!is_small];
    struct pya_live_pool *all = &stats->live_all;
    for (int i = 0; i < PYA_N_LIVE; i++) {
        int64_t now = pya_live_now(live, i) + live->parked[i];
        int64_t now_all = now + pya_live_now(other, i) + other->parked[i];
        live->peak_active[i] = larger(live->peak_active[i], now);
        all->peak_active[i] = larger(all->peak_active[i], now_all);
    }
}

void
pya_stats_park(struct pya_stats *stats, bool is_small, size_t bytes, size_t requested, int sign) {
    int64_t *parked = stats->live[is_small].parked;
    parked[PYA_LIVE_COUNT] += sign;
    parked[PYA_LIVE_BYTES] += sign * (int64_t)bytes;
    parked[PYA_LIVE_REQUESTED] += sign * (int64_t)requested;
}

int64_t
pya_stats_allocated_bytes(const struct pya_stats *stats) {
    return stats_pooled(stats, PYA_STAT_ALL, PYA_STAT_allocated_bytes).current;
}

int64_t
pya_stats_active(const struct pya_stats *stats) {
    return stats_pooled(stats, PYA_STAT_ALL, PYA_STAT_active).current;
}

void
pya_stats_flatten(const struct pya_stats *stats, int64_t *values) {
    for (int pool = 0; pool < PYA_N_STAT_POOLS; pool++) {
        for (int i = 0; i < PYA_N_POOLED; i++) {
            struct pya_stat stat =
                stats_pooled(stats, (enum pya_stat_pool)pool, (enum pya_pooled_stat)i);
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

static void
live_reset_peak(struct pya_live_pool *live, const struct pya_live_pool *now) {
    for (int i = 0; i < PYA_N_LIVE; i++) {
        live->peak[i] = pya_live_now(now, i);
        live->peak_active[i] = pya_live_now(now, i) + now->parked[i];
    }
}

void
pya_stats_reset_peaks(struct pya_stats *stats) {
    struct pya_live_pool sum = live_sum(stats);
    live_reset_peak(&stats->live[0], &stats->live[0]);
    live_reset_peak(&stats->live[1], &stats->live[1]);
    live_reset_peak(&stats->live_all, &sum);
    stats_each(stats, stat_reset_peak);
}

void
pya_stats_reset_totals(struct pya_stats *stats) {
    for (int pool = 0; pool < 2; pool++) {
        struct pya_live_pool *live = &stats->live[pool];
        for (int i = 0; i < PYA_N_LIVE; i++) {
            live->base_in[i] = live->in[i];
            live->base_out[i] = live->out[i];
            live->base_done[i] = live->out[i] - live->parked[i];
        }
    }
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
        enum pya_pooled_stat which = (enum pya_pooled_stat)i;
        struct pya_stat all = stats_pooled(stats, PYA_STAT_ALL, which);
        struct pya_stat large = stats_pooled(stats, PYA_STAT_LARGE, which);
        struct pya_stat small = stats_pooled(stats, PYA_STAT_SMALL, which);
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
