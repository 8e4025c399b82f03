/* One device's part of the heap: the state that its arenas share.  Floor 4.
 *
 * `lock` guards everything here except `dev`, `index` and `cards`, which never change.
 * Long because every floor above keeps state here. */
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
struct pya_stitch;

/* A private pool: memory of CUDA graphs or of torch.cuda.MemPool, kept apart.  n_users counts graphs and MemPools.
 * At 0 the pool's idle memory may be given back or taken by others, and the pool disappears with its last block. */
struct pya_pool {
    struct pya_pool *next; /* of the card */
    struct pya_pool_id id;
    size_t n_users;
    bool is_settled; /* device waited for since the last user left: its graphs are done */
    bool is_held;    /* during a sweep: the pool is in use or has memory */
    bool on_oom;     /* others may use its idle memory before a request fails with out of memory */
    bool is_active;  /* its filter routes requests; the pool activated last is asked first */
    bool is_announced; /* begun for a capture that had not started and has not been seen since */
    uint64_t order;    /* activation order */
    uint64_t began_at; /* activation time by the device's clock */
    struct pya_stream_filter filter;
    struct pya_stat reserved[PYA_N_STAT_POOLS]; /* home bytes of its arenas */
    struct pya_segment_source source;
    bool no_split;      /* every request gets a segment of its own */
    size_t limit_bytes; /* limit of its reserved bytes; 0: none */
};

/* Do the pool's arenas use plain segments, whatever the card supports? */
static inline bool
pya_pool_is_plain(const struct pya_pool *pool) {
    return pool != NULL && (pool->source.alloc != NULL || pool->no_split);
}

/* Buckets of arenas by pool and stream, so that a lookup stays fast when each of many graphs or streams has its own. */
enum { PYA_ALIKE_BITS = 8 };

/* The fields that every request and every free reads come first, side by side: between two requests a program often
 * fills the processor's caches with its own data. */
struct pya_card {
    struct pya_lock lock;
    int index;
    struct pya_cards *cards; /* the heap's table of cards, which includes this one */
    struct pya_device *dev;
    struct pya_arena *last_arena; /* the latest request's */
    /* Pools with an active filter: during a capture or the use of a MemPool; almost always 0. */
    size_t n_active;
    size_t n_pending;            /* uses waiting in the queues of `pending` */
    struct pya_history *history; /* NULL: not recording */
    bool is_timed;               /* requests look at the clock (option trim_after) */
    struct pya_slab blocks;      /* struct pya_block */
    struct pya_ptrmap live;      /* live blocks, including pending ones, by address */
    struct pya_options options;
    size_t live_bytes;      /* rounded bytes of live blocks, including pending ones */
    struct pya_usage usage; /* what was needed lately */
    struct pya_stats stats;

    struct pya_device_caps caps;
    struct pya_context_owner contexts; /* counts references to blocks' and entries' contexts */
    struct pya_slab uses;              /* struct pya_use (pending.h) */
    struct pya_pages pages;

    struct pya_arena *arenas;                     /* all, newest first */
    struct pya_arena *common;                     /* those of the default pool, in the same order */
    struct pya_arena *parking;                    /* may have a parked block */
    struct pya_arena *giving;                     /* in private pools that have pages for others */
    struct pya_arena *alike[1 << PYA_ALIKE_BITS]; /* in each, the one used last comes first */
    struct pya_pool *pools;
    const struct pya_stitch
        *nest;                /* the latest idle range of a growing tensor (nest.h); NULL: none */
    struct pya_block *hidden; /* its free bytes: LENT blocks without an owner; NULL: none */
    unsigned n_loans;         /* requests that took some of them since the tensor last grew */
    unsigned n_in_vain;       /* nests since one was last used for the tensor's next size */
    uint64_t n_pool_drops;    /* how often a pool lost its last user */
    struct pya_pending *pending; /* queues of streams with recorded blocks; NULL: none so far */
    struct pya_fence *fences;    /* one for each known stream (fence.h) */
    size_t n_fences;             /* without those that are gone */
    uint64_t fenced_at;          /* the card's requests when the fences were last recorded */
    uint64_t n_late_polls; /* polls that found memory which was freed after its stream was gone */
    bool are_fences_open;  /* recorded, completion not yet seen */
    struct pya_fence *late_fence; /* the latest fence that was the only one still open */
    struct pya_import *imports;   /* other processes' memory (import.h) */
    uint64_t peers; /* bit per device that has access to everything mapped, now and later */

    /* Physical memory, in pages and plain segments; == stats reserved_bytes.all.current. */
    size_t reserved_bytes;
    size_t limit_bytes;     /* reserved_bytes may not exceed this */
    size_t peak_live_bytes; /* largest live_bytes so far: needed in any case */
    size_t keep_bytes;      /* nothing is given back below this (pya_reserve()) */
    double stitch_ns;       /* modelled time of all stitching, moving and transfers so far */
    size_t n_stitched;      /* stitched ranges */
    size_t n_reused; /* times a stitched range was reused, or pages returned to an old address */
    /* The tight policy's bucket: stitching fills it, requests drain it.  When it overflows, the policy allows more
     * memory: slack grows. */
    double bucket_ns;
    double slack;
    int64_t bucket_requests; /* number of requests when it was last drained */
    bool is_short;           /* the capacity was reached, and there has been no room since */
    bool fits_carefully;     /* break few wholly free pages: tight; others while short */
    /* Mappings above the unmapping's target that could not be unmapped: pools in use and live blocks hold them. */
    size_t n_held_mappings;
    size_t range_bytes;   /* addresses reserved for the arenas' ranges */
    bool lacks_addresses; /* reserving a range has failed since addresses were last released */
    bool told_lost;       /* the error that made the device unusable was explained; atomic */
    struct pya_lock gate; /* held while n_waiting is not 0 */
    unsigned n_waiting;   /* threads waiting for the device without the lock */
};

static inline bool
pya_card_has_vmm(const struct pya_card *card) {
    return card->caps.has_vmm && card->options.vmm;
}

/* Requests served so far; ages are counted in them. */
static inline uint64_t
pya_card_requests(const struct pya_card *card) {
    const int64_t *n = card->stats.live.in[PYA_LIVE_COUNT];
    return (uint64_t)(n[PYA_LIVE_LARGE] + n[PYA_LIVE_SMALL]);
}

/* Blocks freed so far. */
static inline uint64_t
pya_card_frees(const struct pya_card *card) {
    const int64_t *n = card->stats.live.out[PYA_LIVE_COUNT];
    return (uint64_t)(n[PYA_LIVE_LARGE] + n[PYA_LIVE_SMALL]);
}

/* Counts the reuse of a stitched range. */
static inline void
pya_card_note_reuse(struct pya_card *card) {
    card->stats.scalar[PYA_STAT_pyalloc_range_hits]++;
    card->n_reused++;
}

/* While this value does not change, no memory has become free. */
static inline uint64_t
pya_card_n_given(const struct pya_card *card) {
    return pya_card_frees(card) + card->n_pool_drops;
}

/* live_bytes exceeds the largest value since usage was last examined. */
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

/* Sets the fraction, and the limit as the lower of the fraction of the card and the limit in bytes. */
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

/* Bytes that may still be reserved; 0 if the limit was lowered below reserved_bytes. */
static inline size_t
pya_card_room(const struct pya_card *card) {
    return card->limit_bytes > card->reserved_bytes ? card->limit_bytes - card->reserved_bytes : 0;
}

/* Counts physical memory that was added (positive) or released. */
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
