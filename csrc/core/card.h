/* One device's part of the heap: what its arenas share.  Floor 4.
 *
 * Everything here is guarded by `lock`, except `dev`, `index` and `cards`, which never change.
 * Long because every floor above keeps its part here. */
#pragma once

#include "cards.h"
#include "history.h"
#include "options.h"
#include "page.h"
#include "pool_id.h"
#include "ptrmap.h"
#include "slab.h"
#include "stats.h"
#include "usage.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_arena;
struct pya_fence;
struct pya_import;
struct pya_pending;

/* A private pool: memory of CUDA graphs or of torch.cuda.MemPool, kept apart.  n_users counts graphs and
 * MemPools; at 0 the pool's idle memory may be given back or taken by others, and the pool disappears with
 * its last block. */
struct pya_pool {
    struct pya_pool *next; /* of the card */
    struct pya_pool_id id;
    size_t n_users;
    bool is_settled;   /* the device was waited for since the last user went: its graphs are done */
    bool is_held;      /* within a sweep: it is in use, or has memory */
    bool on_oom;       /* others may use its idle memory before out of memory */
    bool is_active;    /* filter decides; among active pools the latest begun comes first */
    bool is_announced; /* it began for a capture that had not begun, and was not seen since */
    uint64_t order;    /* when it began */
    uint64_t began_at; /* the same, by the device's clock */
    struct pya_stream_filter filter;
    struct pya_stat reserved[PYA_N_STAT_POOLS]; /* bytes at home in its arenas */
    struct pya_segment_source source;
    bool no_split;      /* every request gets a segment of its own */
    size_t limit_bytes; /* reserved may not pass this; 0: no limit of its own */
};

/* Are the pool's arenas made of plain segments, whatever the card can do? */
static inline bool
pya_pool_is_plain(const struct pya_pool *pool) {
    return pool != NULL && (pool->source.alloc != NULL || pool->no_split);
}

/* Arenas found lately are found again at once, also where each of many graphs has one. */
enum { PYA_RECENT_BITS = 8 };

/* First what every request and every free looks at, side by side: between two of them a program often fills the
 * processor's caches with its own data. */
struct pya_card {
    struct pya_lock lock;
    int index;
    struct pya_cards *cards; /* of the heap, with this one */
    struct pya_device *dev;
    struct pya_arena *last_arena; /* of the latest request */
    /* Pools with a filter, while a capture or a MemPool is under way; 0 almost always. */
    size_t n_active;
    size_t n_pending;            /* uses waiting in the queues of `pending` */
    struct pya_history *history; /* NULL: not recording */
    bool is_timed;               /* requests look at the clock (option trim_after) */
    struct pya_slab blocks;      /* struct pya_block */
    struct pya_ptrmap live;      /* handed-out blocks and pending ones, by address */
    struct pya_options options;
    size_t live_bytes;      /* rounded bytes handed out, pending ones included */
    struct pya_usage usage; /* what was needed lately */
    struct pya_stats stats;

    struct pya_device_caps caps;
    struct pya_context_owner contexts; /* of blocks, and of the history's entries */
    struct pya_slab uses;              /* struct pya_use (pending.h) */
    struct pya_pages pages;

    struct pya_arena *arenas;  /* all, most recently created first */
    struct pya_arena *common;  /* those of the default pool, in the same order */
    struct pya_arena *parking; /* those that may have a parked block */
    struct pya_arena *giving;  /* those of pools that have pages for others */
    struct pya_arena *recent[1 << PYA_RECENT_BITS]; /* by pool and stream */
    struct pya_pool *pools;
    uint64_t n_pool_drops;        /* times one of them lost its last user */
    struct pya_pending *pending;  /* queues of streams with recorded blocks; NULL: never used */
    struct pya_fence *fences;     /* one for each stream ever heard of (fence.h) */
    size_t n_fences;              /* but for those that are gone */
    uint64_t fenced_at;           /* the card's requests when they were last recorded */
    uint64_t n_late_polls;        /* polls that found memory freed after its stream was gone */
    bool are_fences_open;         /* recorded, not yet seen to have passed */
    struct pya_fence *late_fence; /* the latest to be the only one still open */
    struct pya_import *imports;   /* other processes' memory (import.h) */

    /* Physical: pages and plain segments; == stats reserved_bytes.all.current. */
    size_t reserved_bytes;
    size_t limit_bytes;     /* reserved_bytes may not pass this */
    size_t peak_live_bytes; /* largest live_bytes so far: memory up to here is needed anyway */
    size_t keep_bytes;      /* reserved for good: nothing is given back below this */
    double stitch_ns;       /* modelled time of all stitching, moving and transfers so far */
    size_t n_stitched;      /* ranges */
    size_t n_reused; /* times one of them was used again, or pages came back to an old address */
    /* The tight policy's bucket: stitching fills it, requests empty it, and when it runs over the policy gives
     * way: slack grows. */
    double bucket_ns;
    double slack;
    int64_t bucket_requests; /* how many there had been when it was last emptied */
    bool is_short;           /* the capacity was reached, and there was no room again since */
    bool fits_carefully;     /* few wholly free pages are broken: tight, and everyone while short */
    /* More than the last unmapping meant to leave: pools in use and live blocks hold them. */
    size_t n_held_mappings;
    bool lacks_addresses; /* a range could not be reserved since addresses were last given back */
    bool told_lost;       /* the error after which the device is lost was explained; atomic */
    struct pya_lock gate; /* held while n_waiting is not 0 */
    unsigned n_waiting;   /* threads that wait for the device without the lock */
};

static inline bool
pya_card_has_vmm(const struct pya_card *card) {
    return card->caps.has_vmm && card->options.vmm;
}

/* Requests served so far: what ages are counted in. */
static inline uint64_t
pya_card_requests(const struct pya_card *card) {
    const int64_t *n = card->stats.live.in[PYA_LIVE_COUNT];
    return (uint64_t)(n[PYA_LIVE_LARGE] + n[PYA_LIVE_SMALL]);
}

/* Blocks given back so far. */
static inline uint64_t
pya_card_frees(const struct pya_card *card) {
    const int64_t *n = card->stats.live.out[PYA_LIVE_COUNT];
    return (uint64_t)(n[PYA_LIVE_LARGE] + n[PYA_LIVE_SMALL]);
}

/* A stitched range serves again. */
static inline void
pya_card_note_reuse(struct pya_card *card) {
    card->stats.scalar[PYA_STAT_pyalloc_range_hits]++;
    card->n_reused++;
}

/* As long as it stays the same, what is free was free before. */
static inline uint64_t
pya_card_n_given(const struct pya_card *card) {
    return pya_card_frees(card) + card->n_pool_drops;
}

/* live_bytes passed the largest value since usage was last looked at. */
static inline void
pya_card_note_peak(struct pya_card *card) {
    card->usage.recent_peak = card->live_bytes;
    if (card->live_bytes > card->peak_live_bytes) {
        card->peak_live_bytes = card->live_bytes;
    }
}

static inline enum pya_stat_pool
pya_stat_pool_of(bool is_small) {
    return is_small ? PYA_STAT_SMALL : PYA_STAT_LARGE;
}

static inline void
pya_card_claim(struct pya_card *card, pya_dptr addr, size_t bytes) {
    pya_cards_claim(card->cards, card->index, addr, bytes);
}

/* The smaller of the fraction of the card and the limit in bytes. */
static inline void
pya_card_set_fraction(struct pya_card *card, double fraction) {
    size_t by_fraction = SIZE_MAX;
    if (fraction < 1) {
        by_fraction = (size_t)(fraction * (double)card->caps.total_bytes);
    }
    size_t by_bytes = card->options.limit > 0 ? card->options.limit : SIZE_MAX;
    card->options.per_process_memory_fraction = fraction;
    card->limit_bytes = by_fraction < by_bytes ? by_fraction : by_bytes;
}

/* What may still be reserved; the limit may have been lowered below what is. */
static inline size_t
pya_card_room(const struct pya_card *card) {
    return card->limit_bytes > card->reserved_bytes ? card->limit_bytes - card->reserved_bytes : 0;
}

/* Physical memory came (positive) or went. */
static inline void
pya_card_reserved(struct pya_card *card, bool is_small, int64_t bytes) {
    enum pya_stat_pool pool = pya_stat_pool_of(is_small);
    if (bytes >= 0) {
        pya_stats_add(&card->stats, pool, PYA_STAT_reserved_bytes, (size_t)bytes);
        card->reserved_bytes += (size_t)bytes;
    } else {
        pya_stats_sub(&card->stats, pool, PYA_STAT_reserved_bytes, (size_t)-bytes);
        card->reserved_bytes -= (size_t)-bytes;
    }
}

#ifdef __cplusplus
}
#endif
