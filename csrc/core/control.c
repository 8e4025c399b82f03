/* What steers a heap besides requests: pools, statistics, checks.  Floor 12. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fence.h"
#include "heap.h"
#include "repeat.h"

void
pya_heap_device_error(struct pya_heap *heap, int device, struct pya_device_error *out) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    memset(out, 0, sizeof *out);
    if (card != NULL) {
        pya_device_error(card->dev, out);
    }
}

/* Of two streams that capture for one pool, that on which the pool began tells how long. */
static pya_stream
card_origin(struct pya_card *card, pya_stream stream) {
    const struct pya_pool *pool = card->n_active > 0 ? pya_pool_route(card, stream) : NULL;
    return pool == NULL ? stream : pool->filter.began_on;
}

bool
pya_note_foreign_stream(struct pya_heap *heap, pya_stream stream, int device) {
    struct pya_card *own;
    bool is_known = false;
    /* Opens it: it may have to be waited for. */
    bool is_open = pya_heap_card(heap, device, &own) == PYA_OK;
    for (int i = 0; i < PYA_MAX_DEVICES && !pya_heap_is_forked(heap); i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            pya_stream origin = i == device ? card_origin(card, stream) : stream;
            is_known = pya_fences_note_foreign(card, stream, is_open ? own->dev : NULL, origin) ||
                       is_known;
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

pya_status
pya_pool_begin(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_stream_filter filter) {
    struct pya_card *card;
    struct pya_pool *pool;
    struct pya_fence *fence;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    (void)!pya_trim_settle_meanwhile(card); /* while asking is allowed; needs no room itself */
    pya_fences_pass(card);
    st = pya_pool_get(card, id, &pool);
    if (st == PYA_OK && pool->is_active) {
        st = PYA_E_INVAL;
    }
    st = st == PYA_OK ? pya_fences_add(card, filter.began_on, &fence) : st;
    if (st == PYA_OK) {
        pya_pool_add_user(card, pool);
        pool->is_active = true;
        pool->order = __atomic_add_fetch(&heap->pool_order, 1, __ATOMIC_RELAXED);
        pool->filter = filter;
        pool->is_announced = filter.match != NULL && !filter.match(filter.arg, filter.began_on);
        pool->began_at = pya_device_clock_ns(card->dev);
        card->n_active++;
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_pool_end(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    struct pya_pool *pool;
    struct pya_stream_filter filter = {0};
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st != PYA_OK) {
        return st;
    }
    if (!pool->is_active) {
        st = PYA_E_INVAL;
    } else {
        filter = pool->filter;
        pool->is_active = false;
        pool->filter = (struct pya_stream_filter){0};
        if (--card->n_active == 0) {
            pya_pending_resume(card);
        }
        if (pool->n_users == 0) { /* its last user went while requests were routed here */
            pya_pool_offer(card, pool);
            pya_pools_sweep(card);
        }
    }
    pya_lock_release(&card->lock);
    if (filter.drop != NULL) {
        filter.drop(filter.arg);
    }
    return st;
}

pya_status
pya_pool_retain(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    st = pya_pool_get(card, id, &pool);
    if (st == PYA_OK) {
        pya_pool_add_user(card, pool);
        pool->on_oom = pool->on_oom || on_oom;
    }
    pya_lock_release(&card->lock);
    return st;
}

pya_status
pya_pool_set_on_oom(struct pya_heap *heap, int device, struct pya_pool_id id, bool on_oom) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st == PYA_OK) {
        pool->on_oom = on_oom;
        pya_lock_release(&card->lock);
    }
    return st;
}

size_t
pya_pool_list(struct pya_heap *heap, int device, struct pya_pool_info *infos, size_t n_room) {
    size_t n = 0;
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return 0;
    }
    pya_lock_acquire(&card->lock);
    for (const struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
        if (n < n_room) {
            infos[n] = (struct pya_pool_info){pool->id, pool->n_users, pool->is_active, {{0}}};
            memcpy(infos[n].reserved_bytes, pool->reserved, sizeof pool->reserved);
        }
        n++;
    }
    pya_lock_release(&card->lock);
    return n;
}

/* In a forked child, whose torch goes on counting; the memory is the parent's. */
static pya_status
pool_release_forked(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        struct pya_pool *pool = pya_pool_find(card, id);
        if (pool != NULL && pool->n_users > 0) {
            pya_pool_drop_user(card, pool);
        }
        pya_lock_release(&card->lock);
    }
    return PYA_E_FORKED;
}

pya_status
pya_pool_release(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st != PYA_OK) {
        return st == PYA_E_FORKED ? pool_release_forked(heap, device, id) : st;
    }
    if (pool->n_users == 0) {
        st = PYA_E_INVAL;
    } else {
        pya_pool_drop_user(card, pool);
        if (pool->n_users == 0) {
            pya_history_note(
                card->history, PYA_ACTION_POOL_RELEASE, 0, 0, (struct pya_place){.pool = id});
        }
        pya_pools_sweep(card);
    }
    pya_lock_release(&card->lock);
    return st;
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

/* Everything a card keeps on the host for its memory. */
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

/* Those of its private pools too. */
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
        pya_card_unpark(card); /* what was freed before is counted before */
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

pya_status
pya_heap_apply_history(struct pya_heap *heap, struct pya_card *card) {
    int level = __atomic_load_n(&heap->record_level, __ATOMIC_RELAXED);
    if (level < 0 || !heap->record_trace) {
        if (card->history != NULL) {
            pya_history_fini(card->history);
            card->history = NULL;
        }
        return PYA_OK;
    }
    if (card->history == NULL) {
        card->history = calloc(1, sizeof *card->history);
        if (card->history == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    } else if (card->history->max_entries != heap->record_entries) {
        pya_history_resize(card->history, heap->record_entries);
    }
    card->history->dev = card->dev;
    card->history->level = level;
    card->history->max_entries = heap->record_entries;
    card->history->skip_mask = heap->record_skip;
    card->history->owner = (struct pya_context_owner){
        heap->hooks.arg, heap->hooks.retain_context, heap->hooks.release_context};
    return PYA_OK;
}

static pya_status
history_apply_all(struct pya_heap *heap) {
    pya_status st = PYA_OK;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            pya_status one = pya_heap_apply_history(heap, card);
            pya_lock_release(&card->lock);
            st = st == PYA_OK ? one : st;
        }
    }
    return st;
}

pya_status
pya_history_start(
    struct pya_heap *heap, enum pya_record_level level, bool trace, size_t max_entries,
    uint32_t skip_mask) {
    bool has_contexts = heap->hooks.capture_context == NULL ||
                        (heap->hooks.retain_context != NULL && heap->hooks.release_context != NULL);
    if (!has_contexts || (int)level < PYA_RECORD_NEVER || level > PYA_RECORD_ALL) {
        return PYA_E_INVAL;
    }
    pya_lock_acquire(&heap->lock);
    heap->record_trace = trace;
    heap->record_entries = max_entries > 0 ? max_entries : 1;
    heap->record_skip = skip_mask;
    __atomic_store_n(&heap->record_level, (int)level, __ATOMIC_RELAXED);
    pya_status st = history_apply_all(heap);
    pya_lock_release(&heap->lock);
    return st;
}

void
pya_history_forget(struct pya_heap *heap) {
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            if (card->history != NULL) {
                pya_history_clear(card->history);
            }
            pya_lock_release(&card->lock);
        }
    }
}

void
pya_history_stop(struct pya_heap *heap) {
    pya_lock_acquire(&heap->lock);
    __atomic_store_n(&heap->record_level, -1, __ATOMIC_RELAXED);
    (void)!history_apply_all(heap);
    pya_lock_release(&heap->lock);
}

bool
pya_history_take(
    struct pya_heap *heap, int device, struct pya_history_part *out, uint64_t *now_ns) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return false;
    }
    pya_lock_acquire(&card->lock);
    const bool is_recorded = card->history != NULL;
    if (is_recorded) {
        pya_history_move(card->history, out);
        *now_ns = pya_device_clock_ns(card->dev);
    }
    pya_lock_release(&card->lock);
    return is_recorded;
}

void *
pya_history_context(struct pya_heap *heap, pya_dptr ptr) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    void *context = NULL;
    if (card != NULL) {
        context = block->is_pending ? NULL : block->context;
        if (context != NULL) {
            heap->hooks.retain_context(heap->hooks.arg, context);
        }
        pya_lock_release(&card->lock);
    }
    return context;
}

pya_status
pya_history_annotate(struct pya_heap *heap, pya_dptr ptr, void *context) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL || block->is_pending) {
        if (card != NULL) {
            pya_lock_release(&card->lock);
        }
        return PYA_E_FOREIGN;
    }
    if (card->history != NULL) {
        pya_history_add(
            card->history, PYA_ACTION_ANNOTATE, block->addr, block->bytes,
            pya_arena_place(block->arena), context);
    }
    pya_lock_release(&card->lock);
    return PYA_OK;
}

/* Sums over the live map, to hold against the card's own counts. */
struct live_sum {
    size_t n;
    size_t bytes;
};

static void
live_add(void *arg, struct pya_block *block) {
    struct live_sum *sum = arg;
    sum->n++;
    sum->bytes += block->bytes;
}

static size_t
card_violation(const struct pya_card *card, const char *what, size_t found, size_t counted) {
    if (found == counted) {
        return 0;
    }
    (void)fprintf(
        stderr, "card %d: %s: %zu found, %zu counted\n", card->index, what, found, counted);
    return 1;
}

/* What is at home in a range of a private pool, and how much of it small requests made. */
static void
range_add(
    const struct pya_card *card, const struct pya_range *range, size_t bytes[PYA_N_STAT_POOLS]) {
    if (range->slots == NULL) {
        bytes[PYA_STAT_ALL] += range->bytes;
        bytes[pya_stat_pool_of(range->is_small)] += range->bytes;
    }
    for (size_t s = 0; s < range->n_slots; s++) {
        const pya_page_id id = range->slots[s].page;
        const struct pya_page *page = id == PYA_NO_PAGE ? NULL : &card->pages.items[id];
        if (page != NULL && page->range == range && page->slot == s) {
            bytes[PYA_STAT_ALL] += PYA_PAGE;
            bytes[pya_stat_pool_of(page->is_small)] += PYA_PAGE;
        }
    }
}

static size_t
pool_check(const struct pya_card *card, const struct pya_pool *pool) {
    size_t bytes[PYA_N_STAT_POOLS] = {0};
    size_t n_wrong = 0;
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        const struct pya_range *range = arena->pool == pool ? arena->ranges : NULL;
        for (; range != NULL; range = range->next) {
            range_add(card, range, bytes);
        }
    }
    for (int i = 0; i < PYA_N_STAT_POOLS; i++) {
        n_wrong += card_violation(
            card, "bytes of a private pool", bytes[i], (size_t)pool->reserved[i].current);
    }
    return n_wrong;
}

static size_t
card_check(const struct pya_card *card) {
    size_t n_wrong = pya_stats_check(&card->stats);
    struct live_sum live = {0};
    size_t plain_bytes = 0;
    size_t n_live = 0;
    size_t n_mappings = 0;
    size_t n_marked = 0;
    pya_ptrmap_each(&card->live, live_add, &live);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        n_wrong += pya_arena_check(arena) + pya_stitches_check(arena);
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            plain_bytes += r->slots == NULL ? r->bytes : 0;
            for (const struct pya_block *b = r->first; b != NULL; b = b->next) {
                n_live += b->state == PYA_BLOCK_USED;
            }
        }
        const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
        for (; s != NULL; s = s->older) {
            n_live += s->block != NULL;
        }
    }
    n_wrong += pya_pages_check(&card->pages);
    for (size_t i = 0; i < card->pages.n_items; i++) {
        n_mappings += card->pages.items[i].handle != 0 ? card->pages.items[i].n_mappings : 0;
        n_marked += card->pages.items[i].is_leaving;
    }
    for (const struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
        n_wrong += pool_check(card, pool);
    }
    n_wrong += card_violation(card, "pages marked as leaving", n_marked, 0);
    n_wrong += card_violation(card, "live blocks", n_live, live.n);
    n_wrong +=
        card_violation(card, "active blocks", live.n, (size_t)pya_stats_active(&card->stats));
    size_t n_fences = 0;
    for (const struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        n_fences += !fence->is_gone;
    }
    n_wrong += card_violation(card, "fences", n_fences, card->n_fences);
    n_wrong += card_violation(card, "live bytes", live.bytes, card->live_bytes);
    n_wrong += card_violation(card, "mappings", n_mappings, card->pages.n_mappings);
    n_wrong += card_violation(
        card, "reserved bytes", card->pages.n_live * PYA_PAGE + plain_bytes, card->reserved_bytes);
    return n_wrong;
}

size_t
pya_heap_check(struct pya_heap *heap, int device) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL) {
        return 0;
    }
    pya_lock_acquire(&card->lock);
    pya_card_unpark(card);
    size_t n_wrong = card_check(card);
    pya_lock_release(&card->lock);
    return n_wrong;
}
