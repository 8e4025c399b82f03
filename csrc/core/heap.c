/* The heap: cards by device, requests in and out.  Floor 12.
 *
 * Lock order: heap->lock (opening a card) before card->lock.  pyalloc.h says which hooks run under a lock. */
#include "heap.h"

#include <stdlib.h>
#include <string.h>

#include "fence.h"
#include "import.h"
#include "lay.h"
#include "lost.h"
#include "repeat.h"

pya_status
pya_heap_create(
    const struct pya_options *options, const struct pya_hooks *hooks, struct pya_heap **out) {
    if (hooks->open_device == NULL || !pya_layouts_are_sound(options->layouts)) {
        return PYA_E_INVAL;
    }
    struct pya_heap *heap = calloc(1, sizeof *heap);
    if (heap == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    heap->options = *options;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        heap->fractions[i] = options->per_process_memory_fraction;
    }
    heap->hooks = *hooks;
    heap->record_level = -1;
    pya_heap_watch_forks(heap);
    *out = heap;
    return PYA_OK;
}

static pya_status
heap_open_card(void *arg, int device, struct pya_card **out) {
    struct pya_heap *heap = arg;
    struct pya_card *card = calloc(1, sizeof *card);
    if (card == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_status st = heap->hooks.open_device(heap->hooks.arg, device, &card->dev);
    if (st != PYA_OK) {
        goto free_card;
    }
    st = pya_device_caps(card->dev, &card->caps);
    if (st != PYA_OK) {
        goto close_device;
    }
    card->index = device;
    card->cards = &heap->cards;
    card->contexts = (struct pya_context_owner){
        heap->hooks.arg, heap->hooks.retain_context, heap->hooks.release_context,
        heap->hooks.context_of_free};
    card->options = heap->options;
    card->fits_carefully = card->options.memory == PYA_MEMORY_TIGHT;
    pya_slab_init(&card->blocks, sizeof(struct pya_block));
    pya_slab_init(&card->uses, sizeof(struct pya_use));
    pya_ptrmap_init(&card->live);
    pya_pages_init(&card->pages);
    card->stats.has_one_split_pool = pya_card_has_vmm(card);
    pya_card_set_fraction(card, heap->fractions[device]);
    pya_gc_init(card);
    st = pya_heap_apply_history(heap, card);
    if (st != PYA_OK) {
        goto close_device;
    }
    *out = card;
    return PYA_OK;

close_device:
    pya_device_close(card->dev);
free_card:
    free(card);
    return st;
}

struct pya_card *
pya_heap_open_card(const struct pya_heap *heap, int device) {
    if (device < 0 || device >= PYA_MAX_DEVICES) {
        return NULL;
    }
    return pya_cards_get(&heap->cards, device);
}

pya_status
pya_heap_first_use(struct pya_heap *heap, int device, struct pya_card **out) {
    struct pya_card_opener opener = {heap, heap_open_card, pya_n_forks};
    return pya_cards_open(&heap->cards, &heap->lock, device, opener, out);
}

pya_status
pya_heap_lock_pool(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_card **card,
    struct pya_pool **pool) {
    pya_status st = pya_heap_lock_card(heap, device, card);
    if (st != PYA_OK) {
        return st;
    }
    *pool = pya_pool_find(*card, id);
    if (*pool == NULL) {
        pya_lock_release(&(*card)->lock);
        return PYA_E_INVAL;
    }
    return PYA_OK;
}

static void
card_release_pages(struct pya_card *card) {
    for (size_t i = 0; i < card->pages.n_items; i++) {
        if (card->pages.items[i].handle != 0 && card->pages.items[i].place == 0) {
            (void)!pya_device_page_release(card->dev, card->pages.items[i].handle);
        }
    }
}

static void
context_release(void *arg, struct pya_block *block) {
    const struct pya_hooks *hooks = arg;
    if (block->context != NULL) {
        hooks->release_context(hooks->arg, block->context);
        block->context = NULL;
    }
}

/* The end of the work that may use the card's memory. */
static void
heap_leave_card(const struct pya_heap *heap, struct pya_card *card) {
    if (pya_heap_is_forked(heap)) {
        pya_card_lose_device(card);
    } else if (pya_fences_sync(card, true) != PYA_OK) {
        (void)!pya_device_sync(card->dev);
    }
}

static void
heap_close_card(struct pya_heap *heap, struct pya_card *card) {
    pya_ptrmap_each(&card->live, context_release, &heap->hooks);
    if (card->history != NULL) {
        pya_history_fini(card->history);
        card->history = NULL;
    }
    pya_pending_fini(card);
    pya_fences_fini(card);
    pya_imports_destroy(card);
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        pya_stitches_destroy(arena);
    }
    while (card->arenas != NULL) {
        struct pya_arena *arena = card->arenas;
        card->arenas = arena->next;
        pya_arena_destroy(arena);
    }
    while (card->pools != NULL) {
        struct pya_pool *pool = card->pools;
        card->pools = pool->next;
        pya_pool_free(pool);
    }
    card_release_pages(card);
    pya_device_close(card->dev);
    pya_pages_fini(&card->pages);
    pya_ptrmap_fini(&card->live);
    pya_slab_fini(&card->uses);
    pya_slab_fini(&card->blocks);
    free(card);
}

void
pya_heap_destroy(struct pya_heap *heap) {
    if (heap == NULL) {
        return;
    }
    pya_heap_unwatch_forks(heap);
    for (int i = 0; i < PYA_MAX_DEVICES; i++) { /* all, before the first is closed */
        struct pya_card *card = pya_cards_get(&heap->cards, i);
        if (card != NULL) {
            heap_leave_card(heap, card);
        }
    }
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_cards_get(&heap->cards, i);
        if (card != NULL) {
            heap_close_card(heap, card);
        }
    }
    if (heap->torn_cards == 0) { /* else the remains of those cards point to it */
        free(heap);
    }
}

/* torch's roundup_power2_divisions: rounds up to the next of `divisions` steps between two powers of two. */
static size_t
round_to_division(size_t bytes, size_t divisions) {
    if (divisions <= 1 || bytes <= PYA_ALIGN * divisions) {
        return pya_round_up(bytes, PYA_ALIGN);
    }
    size_t floor = (size_t)1 << (63U - (unsigned)__builtin_clzll(bytes));
    size_t step = floor / divisions;
    return pya_round_up((bytes + step - 1) / step * step, PYA_ALIGN);
}

static inline __attribute__((always_inline)) size_t
card_round(const struct pya_card *card, size_t bytes) {
    size_t divisions = card->options.roundup_power2_divisions;
    if (PYA_UNLIKELY(divisions > 1)) {
        return round_to_division(bytes, divisions);
    }
    return (bytes + PYA_ALIGN - 1) & ~(PYA_ALIGN - 1);
}

size_t
pya_card_round(const struct pya_card *card, size_t bytes) {
    return card_round(card, bytes);
}

static bool
card_is_oversize(const struct pya_card *card, const struct pya_block *block) {
    size_t max_split = card->options.max_split_size;
    return PYA_UNLIKELY(max_split > 0 && block->bytes >= max_split);
}

static inline void
stats_take(struct pya_card *card, const struct pya_block *block) {
    pya_stats_take(&card->stats, block->is_small, block->bytes, block->requested);
    if (PYA_UNLIKELY(card->n_pending > 0)) {
        pya_stats_note_active(&card->stats, block->is_small);
    }
    if (card_is_oversize(card, block)) {
        pya_stat_add(&card->stats.single[PYA_STAT_oversize_allocations], 1);
    }
}

static inline void
stats_drop(struct pya_card *card, const struct pya_block *block) {
    pya_stats_drop(&card->stats, block->is_small, block->bytes, block->requested);
    if (card_is_oversize(card, block)) {
        pya_stat_sub(&card->stats.single[PYA_STAT_oversize_allocations], 1);
    }
}

/* The arena of the latest request, if it serves this request too. */
static inline struct pya_arena *
card_arena_again(const struct pya_card *card, pya_stream stream) {
    struct pya_arena *arena = card->last_arena;
    bool is_it = card->n_active == 0 && arena != NULL && arena->stream == stream;
    return PYA_LIKELY(is_it && arena->pool == NULL) ? arena : NULL;
}

__attribute__((noinline)) static pya_status
card_arena(struct pya_card *card, pya_stream stream, struct pya_arena **out) {
    struct pya_pool *pool = card->n_active > 0 ? pya_pool_route(card, stream) : NULL;
    struct pya_arena *arena = card->last_arena;
    if (arena != NULL && arena->stream == stream && arena->pool == pool) {
        *out = arena;
        return PYA_OK;
    }
    return pya_lay_arena(card, pool, stream, out);
}

/* A separate function, so that the fast path need not save registers for it. */
__attribute__((noinline, cold)) static void
card_trace_alloc(struct pya_card *card, const struct pya_block *block) {
    pya_history_add(
        card->history, PYA_ACTION_ALLOC, block->addr, block->requested,
        pya_arena_place(block->arena), block->context);
}

static inline __attribute__((always_inline)) void
card_hand_out(struct pya_card *card, struct pya_block *block, size_t requested, void *context) {
    block->requested = requested;
    block->uses = NULL;
    block->context = context;
    block->n_request = 0;
    block->is_pending = false;
    card->live_bytes += block->bytes;
    if (card->live_bytes > card->usage.recent_peak) {
        pya_card_note_peak(card);
    }
    stats_take(card, block);
    pya_ptrmap_insert(&card->live, block);
    if (PYA_UNLIKELY(card->history != NULL)) {
        card_trace_alloc(card, block);
    }
}

void
pya_card_hand_out(struct pya_card *card, struct pya_block *block, size_t requested, void *context) {
    card_hand_out(card, block, requested, context);
}

/* The work at each request while something waits for it. */
static void
card_attend(struct pya_card *card) {
    if (card->n_pending > 0 && card->n_active == 0) { /* otherwise ladder_reclaim() does this */
        pya_pending_poll(card);
    }
    if (card->is_timed) {
        pya_gc_note_request(card);
    }
}

struct request {
    size_t requested, bytes;
    void *context;
    bool is_small, may_repeat;
};

/* No free run fits.  A separate function, because the fast path needs nothing of it. */
__attribute__((noinline)) static pya_status
card_climb(
    struct pya_card *card, struct pya_arena *arena, const struct request *request,
    struct pya_block **out) {
    struct pya_block *block;
    const uint64_t n_before = pya_card_requests(card);
    const size_t reserved_before = card->reserved_bytes;
    pya_status st = pya_ladder_climb(arena, request->bytes, request->is_small, &block);
    arena->lacks_pages = 0;
    if (st != PYA_OK) {
        return st;
    }
    /* If the lock was released, other threads' requests may have come in between. */
    bool is_alone = n_before == pya_card_requests(card);
    bool repeats = request->may_repeat && block->arena == arena && is_alone;
    pya_gc_after_growth(card, is_alone ? reserved_before : card->reserved_bytes);
    block->is_small = request->is_small;
    card_hand_out(card, block, request->requested, request->context);
    if (repeats) {
        pya_repeat_note(arena, block);
    }
    *out = block;
    pya_trim_mappings(card);
    return PYA_OK;
}

static pya_status
card_serve(
    struct pya_card *card, size_t requested, pya_stream stream, void *context,
    struct pya_block **out) {
    size_t bytes = card_round(card, requested);
    bool is_small = bytes <= PYA_SMALL_MAX;
    pya_status st = PYA_OK;
    struct pya_arena *arena = card_arena_again(card, stream);
    if (PYA_UNLIKELY(arena == NULL)) {
        st = card_arena(card, stream, &arena);
        if (st != PYA_OK) {
            return st;
        }
    }
    if (PYA_UNLIKELY(card->n_pending + card->is_timed > 0)) {
        card_attend(card); /* before the reserve below: giving back cuts runs too */
    }
    /* The map first: then nothing after a successful cut can fail. */
    st = pya_ptrmap_reserve(&card->live);
    if (PYA_UNLIKELY(st != PYA_OK)) {
        return st;
    }
    st = pya_slab_reserve(&card->blocks, 1);
    if (PYA_UNLIKELY(st != PYA_OK)) {
        return st;
    }
    bool may_repeat = pya_repeat_is_on(arena, bytes);
    struct pya_block *block = may_repeat ? pya_repeat_take(arena, bytes) : NULL;
    if (block == NULL && !(may_repeat && PYA_UNLIKELY(arena->lacks_pages > 0))) {
        block = pya_ladder_fit(arena, bytes, is_small);
    }
    if (PYA_UNLIKELY(block == NULL)) {
        const struct request request = {requested, bytes, context, is_small, may_repeat};
        return card_climb(card, arena, &request, out);
    }
    card->stats.scalar[PYA_STAT_pyalloc_fit_hits] += block->state == PYA_BLOCK_USED;
    block->is_small = is_small;
    card_hand_out(card, block, requested, context);
    if (may_repeat) {
        pya_repeat_note(arena, block);
    }
    *out = block;
    return PYA_OK;
}

/* Segments that a request maps on its way are traced with that request's stack. */
static pya_status
card_alloc(
    struct pya_card *card, size_t requested, pya_stream stream, void *context,
    struct pya_block **out) {
    if (PYA_LIKELY(card->history == NULL)) {
        return card_serve(card, requested, stream, context, out);
    }
    card->history->current = context;
    pya_status st = card_serve(card, requested, stream, context, out);
    pya_history_set_current(card->history, NULL); /* recording may have ended meanwhile */
    return st;
}

pya_status
pya_heap_try(struct pya_card *card, size_t bytes, pya_stream stream, void *context, pya_dptr *out) {
    struct pya_block *block;
    pya_status st = card_alloc(card, bytes, stream, context, &block);
    if (st == PYA_OK) {
        *out = block->addr;
    }
    return st;
}

pya_status
pya_alloc(struct pya_heap *heap, int device, size_t bytes, pya_stream stream, pya_dptr *out) {
    struct pya_card *card;
    if (PYA_UNLIKELY(bytes == 0)) {
        *out = 0;
        return PYA_OK;
    }
    pya_status st = pya_heap_card(heap, device, &card);
    if (PYA_UNLIKELY(st != PYA_OK)) {
        return st;
    }
    if (PYA_UNLIKELY(bytes > PYA_REQUEST_MAX)) {
        pya_heap_note_too_large(device, bytes);
        return PYA_E_TOO_LARGE;
    }
    struct pya_block *block;
    void *context = pya_heap_capture(heap, PYA_RECORD_STATE);
    pya_lock_acquire(&card->lock);
    st = card_alloc(card, bytes, stream, context, &block);
    if (PYA_LIKELY(st == PYA_OK)) {
        *out = block->addr;
        context = NULL;
    }
    pya_lock_release(&card->lock);
    pya_heap_drop_context(heap, context);
    return PYA_UNLIKELY(st == PYA_E_NOMEM) ? pya_heap_run_short(heap, card, bytes, stream, out)
                                           : st;
}

static inline struct pya_card *
heap_find_slot(
    struct pya_heap *heap, pya_dptr ptr, struct pya_ptrmap_slot *slot, struct pya_block **out) {
    uint64_t mask = pya_cards_claiming(&heap->cards, ptr);
    while (mask != 0) {
        struct pya_card *card = pya_cards_lowest(&heap->cards, mask);
        mask &= mask - 1;
        pya_lock_acquire(&card->lock);
        struct pya_block *block = pya_ptrmap_find(&card->live, ptr, slot);
        if (PYA_LIKELY(block != NULL)) {
            *out = block;
            return card;
        }
        pya_lock_release(&card->lock);
    }
    return NULL;
}

struct pya_card *
pya_heap_find(struct pya_heap *heap, pya_dptr ptr, struct pya_block **out) {
    struct pya_ptrmap_slot slot;
    return heap_find_slot(heap, ptr, &slot, out);
}

/* Does ptr point into memory that this heap manages?  Distinguishes a double free from a foreign pointer. */
static bool
card_owns(const struct pya_card *card, pya_dptr ptr) {
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            if (ptr >= r->base && ptr - r->base < r->bytes) {
                return true;
            }
        }
        const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
        for (; s != NULL; s = s->older) {
            if (ptr >= s->base && ptr - s->base < s->range_bytes) {
                return true;
            }
        }
    }
    return false;
}

static pya_status
heap_refuse_free(struct pya_heap *heap, pya_dptr ptr) {
    bool is_ours = false;
    for (int i = 0; i < PYA_MAX_DEVICES && !is_ours; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            is_ours = card_owns(card, ptr) && ptr % PYA_ALIGN == 0;
            pya_lock_release(&card->lock);
        }
    }
    return is_ours ? PYA_E_DOUBLE_FREE : PYA_E_FOREIGN;
}

/* As in torch, a free without its own stack is traced with the stack of its allocation.  Returns the reference that
 * the caller owns instead of `here`. */
__attribute__((noinline, cold)) static void *
card_trace_free(struct pya_card *card, const struct pya_block *block, void *here) {
    here = pya_context_of_free(&card->contexts, here, block->context);
    card->history->current = here;
    pya_history_add(
        card->history, PYA_ACTION_FREE_REQUESTED, block->addr, block->requested,
        pya_arena_place(block->arena), NULL);
    return here;
}

pya_status
pya_free(struct pya_heap *heap, pya_dptr ptr) {
    struct pya_block *block;
    if (PYA_UNLIKELY(ptr == 0)) {
        return PYA_OK;
    }
    if (PYA_UNLIKELY(pya_heap_is_forked(heap))) {
        return PYA_E_FORKED;
    }
    void *here = pya_heap_capture(heap, PYA_RECORD_ALL);
    struct pya_ptrmap_slot slot;
    struct pya_card *card = heap_find_slot(heap, ptr, &slot, &block);
    if (PYA_UNLIKELY(card == NULL)) {
        pya_heap_drop_context(heap, here);
        return heap_refuse_free(heap, ptr);
    }
    if (PYA_UNLIKELY(block->is_pending)) {
        pya_lock_release(&card->lock);
        pya_heap_drop_context(heap, here);
        return PYA_E_DOUBLE_FREE;
    }
    void *context = NULL;
    if (PYA_UNLIKELY(card->history != NULL)) {
        here = card_trace_free(card, block, here);
    }
    if (block->n_request != 0) {
        pya_repeat_note_free(block);
    }
    stats_drop(card, block);
    if (PYA_LIKELY(block->uses == NULL)) {
        context = block->context;
        pya_ptrmap_remove_at(&card->live, slot);
        pya_block_release(block);
    } else {
        pya_pending_free(card, block);
    }
    if (PYA_UNLIKELY(card->history != NULL)) {
        card->history->current = NULL;
    }
    pya_lock_release(&card->lock);
    pya_heap_drop_context(heap, context);
    pya_heap_drop_context(heap, here);
    return PYA_OK;
}

pya_status
pya_record_stream(struct pya_heap *heap, pya_dptr ptr, pya_stream stream) {
    struct pya_block *block;
    if (ptr == 0 || pya_heap_is_forked(heap)) {
        return PYA_OK;
    }
    struct pya_card *card = pya_heap_find(heap, ptr, &block);
    if (card == NULL) {
        return PYA_OK;
    }
    if (pya_stream_device(stream) == card->dev->index) {
        stream = pya_stream_handle(stream);
    }
    struct pya_place place = pya_arena_place(block->arena);
    place.stream = stream;
    pya_history_note(card->history, PYA_ACTION_RECORD_STREAM, ptr, block->requested, place);
    pya_status st = block->is_pending ? PYA_OK : pya_pending_record(card, block, stream);
    pya_lock_release(&card->lock);
    return st;
}
