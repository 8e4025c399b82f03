/* Queries of a heap besides memory: foreign streams, the owner of an address, statistics.  Floor 12. */
#include "fence.h"
#include "heap.h"
#include "repeat.h"

/* If several streams capture for one pool, the stream on which the pool began tells how long the capture lasts. */
static pya_stream
card_origin(struct pya_card *card, pya_stream stream) {
    const struct pya_pool *pool = card->n_active > 0 ? pya_pool_route(card, stream) : NULL;
    return pool == NULL ? stream : pool->filter.began_on;
}

bool
pya_note_foreign_stream(struct pya_heap *heap, pya_stream stream, int device) {
    struct pya_card *own;
    bool is_known = false;
    (void)!pya_heap_card(heap, device, &own); /* opens it, to wait for it later */
    for (int i = 0; i < PYA_MAX_DEVICES && !pya_heap_is_forked(heap); i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            pya_stream origin = i == device ? card_origin(card, stream) : stream;
            is_known = pya_fences_note_foreign(card, stream, device, origin) || is_known;
            pya_lock_release(&card->lock);
        }
    }
    return is_known;
}

pya_status
pya_block_info(struct pya_heap *heap, pya_dptr ptr, pya_dptr *base, size_t *bytes, int *device) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL) {
        return PYA_E_FOREIGN;
    }
    *base = block->addr;
    *bytes = block->bytes;
    *device = card->index;
    pya_lock_release(&card->lock);
    return PYA_OK;
}

pya_status
pya_segment_info(struct pya_heap *heap, pya_dptr ptr, struct pya_segment_info *out) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL) {
        return PYA_E_FOREIGN;
    }
    bool is_plain = block->state == PYA_BLOCK_USED && block->range->slots == NULL;
    out->base = is_plain ? block->range->base : block->addr;
    out->bytes = is_plain ? block->range->bytes : block->bytes;
    out->is_plain = is_plain;
    pya_lock_release(&card->lock);
    return PYA_OK;
}

void
pya_heap_counts(struct pya_heap *heap, uint64_t *allocs, uint64_t *frees) {
    *allocs = 0;
    *frees = 0;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            *allocs += pya_card_requests(card);
            *frees += pya_card_frees(card);
            pya_lock_release(&card->lock);
        }
    }
}

/* All host memory that a card uses to manage its device memory. */
static size_t
card_host_bytes(const struct pya_card *card) {
    size_t bytes = card->blocks.host_bytes + card->uses.host_bytes +
                   pya_ptrmap_host_bytes(&card->live) +
                   card->pages.n_room * sizeof(struct pya_page);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        bytes += sizeof *arena + pya_stitches_host_bytes(arena) + pya_repeat_host_bytes(arena);
        for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
            bytes += sizeof *range + pya_range_host_bytes(range);
        }
    }
    return bytes;
}

static pya_status
stats_may_be_read(const struct pya_heap *heap, int device) {
    if (device < 0 || device >= PYA_MAX_DEVICES) {
        return PYA_E_INVAL;
    }
    return pya_heap_is_torn(heap, device) ? PYA_E_FORKED : PYA_OK;
}

static pya_status
stats_get(struct pya_heap *heap, int device, bool with_host_bytes, int64_t *values) {
    struct pya_stats none = {0};
    struct pya_card *card = pya_heap_open_card(heap, device);
    int64_t no_bound =
        heap->options.max_split_size == 0 ? -1 : (int64_t)heap->options.max_split_size;
    pya_status st = stats_may_be_read(heap, device);
    if (st != PYA_OK) {
        return st;
    }
    none.scalar[PYA_STAT_max_split_size] = no_bound;
    if (card == NULL) {
        pya_stats_flatten(&none, values);
        return PYA_OK;
    }
    pya_lock_acquire(&card->lock);
    pya_card_unpark(card);
    int64_t *scalar = card->stats.scalar;
    scalar[PYA_STAT_max_split_size] = no_bound;
    scalar[PYA_STAT_pyalloc_pages] = (int64_t)card->pages.n_live;
    scalar[PYA_STAT_pyalloc_mappings] = (int64_t)card->pages.n_mappings;
    scalar[PYA_STAT_pyalloc_host_bytes] = with_host_bytes ? (int64_t)card_host_bytes(card) : 0;
    pya_stats_flatten(&card->stats, values);
    pya_lock_release(&card->lock);
    return PYA_OK;
}

pya_status
pya_stats_get(struct pya_heap *heap, int device, int64_t *values) {
    return stats_get(heap, device, true, values);
}

pya_status
pya_stats_get_quickly(struct pya_heap *heap, int device, int64_t *values) {
    return stats_get(heap, device, false, values);
}

pya_status
pya_stats_bytes(struct pya_heap *heap, int device, size_t *allocated, size_t *reserved) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    pya_status st = stats_may_be_read(heap, device);
    if (st != PYA_OK) {
        return st;
    }
    *allocated = 0;
    *reserved = 0;
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        *allocated = (size_t)pya_stats_allocated_bytes(&card->stats);
        *reserved = card->reserved_bytes;
        pya_lock_release(&card->lock);
    }
    return PYA_OK;
}

/* Also resets the statistics of its private pools. */
static pya_status
stats_reset(
    struct pya_heap *heap, int device, void (*reset)(struct pya_stats *),
    void (*reset_one)(struct pya_stat *)) {
    pya_status st = stats_may_be_read(heap, device);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        pya_card_unpark(card); /* so that earlier frees are counted before the reset */
        reset(&card->stats);
        for (struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
            for (int i = 0; i < PYA_N_STAT_POOLS; i++) {
                reset_one(&pool->reserved[i]);
            }
        }
        pya_lock_release(&card->lock);
    }
    return PYA_OK;
}

pya_status
pya_stats_reset_peak(struct pya_heap *heap, int device) {
    return stats_reset(heap, device, pya_stats_reset_peaks, pya_stat_reset_peak);
}

pya_status
pya_stats_reset_accumulated(struct pya_heap *heap, int device) {
    return stats_reset(heap, device, pya_stats_reset_totals, pya_stat_reset_total);
}
