/* Out of memory: the program's callbacks, another attempt, and a record of who holds what.  Floor 12. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "heap.h"
#include "mosaic.h"

/* How often callbacks may ask for another attempt while they do free something. */
enum { PRESSURE_ROUNDS = 8 };
/* Stacks examined; those that name the same place are merged afterwards. */
enum { TALLY_TOP = 16 };

static _Thread_local struct pya_oom_info last_oom;
static _Thread_local bool is_pressing; /* this thread is running callbacks */

/* ---- who holds memory ---- */

/* Live memory with one key: a call stack, or without one an arena. */
struct tally {
    uint64_t key; /* 0: an unused entry */
    size_t bytes;
    size_t n_blocks;
    void *context;                 /* of one of the blocks; with its own reference once chosen */
    const struct pya_arena *arena; /* of one of the blocks */
    bool is_pending;               /* freed by its user, still used by other streams */
};

/* There are few keys, however many blocks: the table must not grow with a million small blocks. */
struct tallies {
    const struct pya_hooks *hooks;
    struct tally *items;
    size_t n_room; /* a power of two, at least twice n_used */
    size_t n_used;
};

static struct tally *
tally_slot(const struct tallies *all, uint64_t key) {
    size_t i = (size_t)((key * UINT64_C(0x9E3779B97F4A7C15)) >> 20) & (all->n_room - 1);
    while (all->items[i].key != 0 && all->items[i].key != key) {
        i = (i + 1) & (all->n_room - 1);
    }
    return &all->items[i];
}

/* Makes room for one more; false: no host memory. */
static bool
tallies_grow(struct tallies *all) {
    if (2 * all->n_used < all->n_room) {
        return true;
    }
    struct tallies more = *all;
    more.n_room = 2 * all->n_room;
    more.items = calloc(more.n_room, sizeof *more.items);
    if (more.items == NULL) {
        return false;
    }
    for (size_t i = 0; i < all->n_room; i++) {
        if (all->items[i].key != 0) {
            *tally_slot(&more, all->items[i].key) = all->items[i];
        }
    }
    free(all->items);
    *all = more;
    return true;
}

static void
tally_add(void *arg, struct pya_block *block) {
    struct tallies *all = arg;
    const struct pya_hooks *hooks = all->hooks;
    uint64_t key = 0;
    if (block->is_pending) {
        key = 1;
    } else if (block->context != NULL && hooks->context_key != NULL) {
        key = hooks->context_key(hooks->arg, block->context);
    }
    void *context = key > 1 ? block->context : NULL;
    key = key != 0 ? key : (uint64_t)(uintptr_t)block->arena;
    struct tally *item = tally_slot(all, key);
    if (item->key == 0) {
        if (!tallies_grow(all)) {
            return; /* reported without this one */
        }
        item = tally_slot(all, key);
        all->n_used++;
    }
    item->key = key;
    item->bytes += block->bytes;
    item->n_blocks++;
    item->context = context;
    item->arena = block->arena;
    item->is_pending = block->is_pending;
}

static int
tally_compare(const void *a, const void *b) {
    const struct tally *left = a;
    const struct tally *right = b;
    return (left->bytes < right->bytes) - (left->bytes > right->bytes);
}

/* The largest holders of memory on a locked card, with their contexts retained.  Returns their number. */
static size_t
card_tally(struct pya_card *card, const struct pya_hooks *hooks, struct tally *top) {
    struct tallies all = {.hooks = hooks, .n_room = 64};
    all.items = calloc(all.n_room, sizeof *all.items);
    if (all.items == NULL) {
        return 0;
    }
    pya_ptrmap_each(&card->live, tally_add, &all);
    qsort(all.items, all.n_room, sizeof *all.items, tally_compare);
    size_t n = 0;
    while (n < TALLY_TOP && all.items[n].key != 0) {
        top[n] = all.items[n];
        if (top[n].context != NULL) {
            hooks->retain_context(hooks->arg, top[n].context);
        }
        n++;
    }
    free(all.items);
    return n;
}

/* Names a holder as far as possible while the card is locked. */
static void
holder_name(struct pya_oom_holder *holder, const struct tally *tally) {
    const struct pya_arena *arena = tally->arena;
    char stream[40];
    (void)snprintf(
        stream, sizeof stream, arena->stream == 0 ? "the default stream" : "stream %#llx",
        (unsigned long long)arena->stream);
    holder->bytes = tally->bytes;
    holder->n_blocks = tally->n_blocks;
    if (tally->is_pending) {
        (void)snprintf(
            holder->what, sizeof holder->what, "freed tensors that other streams still use");
    } else if (arena->pool == NULL) {
        (void)snprintf(holder->what, sizeof holder->what, "the default pool on %s", stream);
    } else {
        (void)snprintf(
            holder->what, sizeof holder->what, "pool (%llu, %llu) on %s",
            (unsigned long long)arena->pool->id.first, (unsigned long long)arena->pool->id.second,
            stream);
    }
}

static int
holder_compare(const void *a, const void *b) {
    const struct pya_oom_holder *left = a;
    const struct pya_oom_holder *right = b;
    return (left->bytes < right->bytes) - (left->bytes > right->bytes);
}

/* Without a lock: names the places in the program, merges equal places, keeps the largest. */
static void
oom_name_holders(
    const struct pya_hooks *hooks, struct tally *top, struct pya_oom_holder *holders, size_t n) {
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++) {
        struct pya_oom_holder holder = holders[i];
        if (top[i].context != NULL) {
            if (hooks->describe_context != NULL) {
                (void)hooks->describe_context(
                    hooks->arg, top[i].context, holder.what, sizeof holder.what);
            }
            hooks->release_context(hooks->arg, top[i].context);
        }
        size_t k = 0;
        while (k < n_kept && strcmp(holders[k].what, holder.what) != 0) {
            k++;
        }
        if (k < n_kept) {
            holders[k].bytes += holder.bytes;
            holders[k].n_blocks += holder.n_blocks;
        } else {
            holders[n_kept++] = holder;
        }
    }
    qsort(holders, n_kept, sizeof *holders, holder_compare);
    last_oom.n_holders = (int)(n_kept < PYA_OOM_HOLDERS ? n_kept : PYA_OOM_HOLDERS);
    memcpy(last_oom.holders, holders, (size_t)last_oom.n_holders * sizeof *holders);
}

/* ---- what there is ---- */

static size_t
larger_free(const struct pya_arena *arena, size_t bytes) {
    const struct pya_block *run = pya_fit_largest(&arena->fit);
    return run != NULL && run->bytes > bytes ? run->bytes : bytes;
}

/* Free memory for a request of that pool (NULL: of the default pool), and apart from it. */
static void
oom_note_free(const struct pya_card *card, const struct pya_pool *pool, struct pya_oom_info *info) {
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        if (arena->pool != NULL && arena->pool != pool) {
            info->private_bytes += arena->free_bytes;
        } else {
            info->largest_free_bytes = larger_free(arena, info->largest_free_bytes);
        }
    }
}

static void
oom_note(struct pya_card *card, size_t bytes, pya_stream stream) {
    struct pya_oom_info *info = &last_oom;
    const struct pya_pool *pool = card->n_active > 0 ? pya_pool_route(card, stream) : NULL;
    *info = (struct pya_oom_info){
        .device = card->index,
        .requested_bytes = bytes,
        .total_bytes = card->caps.total_bytes,
        .limit_bytes = card->limit_bytes,
        .allocated_bytes = (size_t)pya_stats_allocated_bytes(&card->stats),
        .reserved_bytes = card->reserved_bytes,
        .keep_bytes = card->keep_bytes,
        .has_vmm = pya_card_has_vmm(card),
        .lacks_addresses = card->lacks_addresses,
    };
    if (pool != NULL && pool->limit_bytes > 0) {
        info->pool_limit_bytes = pool->limit_bytes;
        info->pool_bytes = (size_t)pool->reserved[PYA_STAT_ALL].current;
    }
    oom_note_free(card, pool, info);
    pya_device_error(card->dev, &info->error);
    if (pya_device_mem_info(card->dev, &info->free_bytes, &info->total_bytes) != PYA_OK) {
        info->free_bytes = 0;
    }
}

void
pya_heap_note_too_large(int device, size_t bytes) {
    last_oom = (struct pya_oom_info){.device = device, .requested_bytes = bytes};
}

void
pya_heap_oom_info(struct pya_heap *heap, struct pya_oom_info *out) {
    (void)heap;
    *out = last_oom;
}

pya_status
pya_memory_info(struct pya_heap *heap, int device, struct pya_memory_info *out) {
    struct pya_card *card;
    struct pya_memory_info info = {0};
    pya_status st = pya_heap_card(heap, device, &card);
    if (st != PYA_OK) {
        return st;
    }
    pya_lock_acquire(&card->lock);
    st = pya_device_mem_info(card->dev, &info.free_bytes, &info.total_bytes);
    info.limit_bytes = card->limit_bytes;
    pya_card_unpark(card);
    pya_nest_open(card);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        const size_t all = arena->free_pages * PYA_PAGE;
        size_t stitchable = all - pya_mosaic_plan(arena, all, false).n_lacking * PYA_PAGE;
        info.cached_bytes += arena->free_bytes;
        info.largest_free_bytes =
            stitchable > info.largest_free_bytes ? stitchable : info.largest_free_bytes;
        info.largest_free_bytes = larger_free(arena, info.largest_free_bytes);
    }
    pya_lock_release(&card->lock);
    if (st == PYA_OK) {
        *out = info;
    }
    return st;
}

/* ---- running short ---- */

/* Runs callbacks and tries again while they help.  No lock is held meanwhile. */
static pya_status
run_callbacks(
    struct pya_heap *heap, struct pya_card *card, size_t bytes, pya_stream stream, pya_dptr *out) {
    const struct pya_hooks *hooks = &heap->hooks;
    pya_status st = PYA_E_NOMEM;
    bool has_helped = true;
    for (int round = 0; st == PYA_E_NOMEM && has_helped && round < PRESSURE_ROUNDS; round++) {
        pya_lock_acquire(&card->lock);
        uint64_t n_frees = pya_card_frees(card);
        pya_lock_release(&card->lock);
        is_pressing = true;
        bool tries_again = hooks->on_pressure(hooks->arg, card->index, bytes);
        is_pressing = false;
        if (!tries_again) {
            break;
        }
        void *context = pya_heap_capture(heap, PYA_RECORD_STATE);
        pya_lock_acquire(&card->lock);
        card->stats.scalar[PYA_STAT_pyalloc_pressure_calls]++;
        has_helped = pya_card_frees(card) != n_frees;
        st = pya_heap_try(card, bytes, stream, context, out);
        card->stats.scalar[PYA_STAT_pyalloc_saved_by_callback] += st == PYA_OK;
        pya_lock_release(&card->lock);
        pya_heap_drop_context(heap, st == PYA_OK ? NULL : context);
    }
    return st;
}

pya_status
pya_heap_run_short(
    struct pya_heap *heap, struct pya_card *card, size_t bytes, pya_stream stream, pya_dptr *out) {
    const struct pya_hooks *hooks = &heap->hooks;
    /* No callback makes the card larger: whatever it dropped would be dropped in vain. */
    if (hooks->on_pressure != NULL && !is_pressing && bytes <= card->caps.total_bytes) {
        pya_status st = run_callbacks(heap, card, bytes, stream, out);
        if (st != PYA_E_NOMEM) {
            return st;
        }
    }
    struct tally top[TALLY_TOP];
    struct pya_oom_holder holders[TALLY_TOP];
    void *context = pya_heap_capture(heap, PYA_RECORD_STATE); /* as for a block that is allocated */
    pya_lock_acquire(&card->lock);
    card->stats.scalar[PYA_STAT_num_ooms]++;
    oom_note(card, bytes, stream);
    size_t n_top = card_tally(card, hooks, top);
    for (size_t i = 0; i < n_top; i++) {
        holder_name(&holders[i], &top[i]);
    }
    if (card->history != NULL) {
        pya_history_add(
            card->history, PYA_ACTION_OOM, last_oom.free_bytes, pya_card_round(card, bytes),
            pya_pool_place(card, stream), context);
    }
    pya_lock_release(&card->lock);
    pya_heap_drop_context(heap, context);
    oom_name_holders(hooks, top, holders, n_top);
    if (hooks->on_oom != NULL) {
        const struct pya_oom_info kept = last_oom; /* an observer may itself run out of memory */
        hooks->on_oom(hooks->arg, card->index, bytes);
        last_oom = kept;
    }
    return PYA_E_NOMEM;
}
