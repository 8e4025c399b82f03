/* Special pools and access: a pool's own source of memory, blocks claimed at their addresses, peers.  Floor 12. */
#include "heap.h"
#include "import.h"
#include "pending.h"
#include "pool.h"

static bool
pool_has_arena(const struct pya_card *card, const struct pya_pool *pool) {
    const struct pya_arena *arena = card->arenas;
    while (arena != NULL && arena->pool != pool) {
        arena = arena->next;
    }
    return arena != NULL;
}

/* Finds the pool if it has no memory yet, with its card LOCKED; otherwise NULL and no lock. */
static struct pya_pool *
pool_begin_new(struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_card **out) {
    struct pya_pool *pool;
    if (pya_heap_lock_pool(heap, device, id, out, &pool) != PYA_OK) {
        return NULL;
    }
    if (pool_has_arena(*out, pool)) {
        pya_lock_release(&(*out)->lock);
        return NULL;
    }
    return pool;
}

pya_status
pya_pool_set_source(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_segment_source source) {
    struct pya_card *card;
    struct pya_pool *pool = pool_begin_new(heap, device, id, &card);
    bool is_set = false;
    if (pool != NULL) {
        if (pool->source.alloc == NULL) {
            pool->source = source;
            is_set = true;
        }
        pya_lock_release(&card->lock);
    }
    if (!is_set && source.drop != NULL) {
        source.drop(source.arg);
    }
    return is_set ? PYA_OK : PYA_E_INVAL;
}

pya_status
pya_pool_set_no_split(struct pya_heap *heap, int device, struct pya_pool_id id) {
    struct pya_card *card;
    struct pya_pool *pool = pool_begin_new(heap, device, id, &card);
    if (pool == NULL) {
        return PYA_E_INVAL;
    }
    pool->no_split = true;
    pya_lock_release(&card->lock);
    return PYA_OK;
}

/* The arena's run there, in whichever range: streams take over parts of each other's. */
static struct pya_block *
arena_find_run(const struct pya_arena *arena, const struct pya_claim *claim) {
    const struct pya_range *range = NULL;
    for (const struct pya_arena *a = arena->card->arenas; a != NULL && range == NULL; a = a->next) {
        range = a->ranges;
        while (range != NULL &&
               (claim->addr < range->base || claim->addr - range->base >= range->bytes)) {
            range = range->next;
        }
    }
    struct pya_block *block = range == NULL ? NULL : range->first;
    while (block != NULL && pya_block_end(block) <= claim->addr) {
        block = block->next;
    }
    bool is_free =
        pya_arena_has_run(arena, block) && claim->bytes <= pya_block_end(block) - claim->addr;
    return is_free ? block : NULL;
}

static pya_status
arena_claim(struct pya_arena *arena, const struct pya_claim *claim, struct pya_block **out) {
    pya_arena_unpark(arena);
    pya_nest_open(arena->card);
    struct pya_block *run = arena_find_run(arena, claim);
    if (run != NULL) {
        *out = pya_arena_carve(arena, run, claim->addr, claim->bytes, PYA_BLOCK_USED);
        return PYA_OK;
    }
    struct pya_stitch *stitch = pya_stitch_at(arena, claim->addr);
    if (stitch == NULL || claim->bytes > stitch->bytes) {
        return PYA_E_INVAL;
    }
    return pya_stitch_take(stitch, claim->bytes, out);
}

/* pool: NULL is the default pool. */
static pya_status
card_claim(
    struct pya_card *card, const struct pya_pool *pool, const struct pya_claim *claim,
    void *context) {
    struct pya_arena *arena = card->arenas;
    if (claim->bytes == 0 || (claim->addr | claim->bytes) % PYA_ALIGN != 0) {
        return PYA_E_INVAL; /* was never a block */
    }
    while (arena != NULL && (arena->pool != pool || arena->stream != claim->stream)) {
        arena = arena->next;
    }
    if (arena == NULL) {
        return PYA_E_INVAL;
    }
    struct pya_block *block;
    pya_status st = pya_ptrmap_reserve(&card->live);
    if (st == PYA_OK) {
        st = pya_slab_reserve(&card->blocks, 2);
    }
    if (st == PYA_OK) {
        st = arena_claim(arena, claim, &block);
    }
    if (st == PYA_OK) {
        pya_fence_hear(card, arena->fence);
        block->is_small = claim->bytes <= PYA_SMALL_MAX;
        pya_card_hand_out(card, block, claim->requested, context);
    }
    return st;
}

pya_status
pya_pool_claim(
    struct pya_heap *heap, int device, struct pya_pool_id id, const struct pya_claim *claim) {
    struct pya_card *card;
    struct pya_pool *pool;
    pya_status st = pya_heap_lock_pool(heap, device, id, &card, &pool);
    if (st == PYA_OK) {
        st = card_claim(card, pool, claim, NULL);
        pya_lock_release(&card->lock);
    }
    return st;
}

pya_status
pya_alloc_at(struct pya_heap *heap, int device, size_t bytes, pya_stream stream, pya_dptr addr) {
    struct pya_claim claim = {.addr = addr, .requested = bytes, .stream = stream};
    struct pya_card *card;
    void *context = pya_heap_capture(heap, PYA_RECORD_STATE);
    pya_status st = bytes > PYA_REQUEST_MAX ? PYA_E_INVAL : pya_heap_lock_card(heap, device, &card);
    if (st == PYA_OK) {
        const struct pya_pool *pool = card->n_active > 0 ? pya_pool_route(card, stream) : NULL;
        claim.bytes = pya_card_round(card, bytes);
        if (card->n_pending > 0 && card->n_active == 0) {
            pya_pending_poll(card);
        }
        st = card_claim(card, pool, &claim, context);
        context = st == PYA_OK ? NULL : context;
        pya_lock_release(&card->lock);
    }
    pya_heap_drop_context(heap, context);
    return st;
}

/* Gives one more peer access to everything mapped in a range. */
static pya_status
range_open_peer(struct pya_card *card, int peer, const struct pya_range *range) {
    for (size_t s = 0; s < range->n_slots; s++) {
        size_t first = s;
        while (s < range->n_slots && range->slots[s].page != PYA_NO_PAGE) {
            s++;
        }
        if (s > first) {
            pya_status st = pya_device_open_peer(
                card->dev, peer, pya_range_addr(range, first), (s - first) * PYA_PAGE);
            if (st != PYA_OK) {
                return st;
            }
        }
    }
    return PYA_OK;
}

static pya_status
arena_open_peer(struct pya_card *card, int peer, const struct pya_arena *arena) {
    pya_status st = PYA_OK;
    for (const struct pya_range *r = arena->ranges; r != NULL && st == PYA_OK; r = r->next) {
        st = r->slots == NULL ? PYA_OK : range_open_peer(card, peer, r);
    }
    const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
    for (; s != NULL && st == PYA_OK; s = s->older) {
        st = pya_device_open_peer(card->dev, peer, s->base, s->n_pages * PYA_PAGE);
    }
    return st;
}

/* Gives a new peer access to everything mapped and, from now on, to everything new.  If nothing is mapped, a page is
 * tried: a driver that refuses the peer must do so now, not when the program needs memory. */
static pya_status
card_let_in(struct pya_card *card, int peer) {
    pya_status st = pya_device_set_peer(card->dev, peer, true);
    if (st != PYA_OK) {
        return st;
    }
    for (struct pya_arena *arena = card->arenas; arena != NULL && st == PYA_OK;
         arena = arena->next) {
        st = arena_open_peer(card, peer, arena);
    }
    st = st == PYA_OK ? pya_imports_open_peer(card, peer) : st;
    st = st == PYA_OK && card->pages.n_mappings == 0 ? pya_import_try(card) : st;
    if (st == PYA_OK) {
        card->peers |= UINT64_C(1) << peer;
    } else { /* else the device could not open its own new memory */
        (void)!pya_device_set_peer(card->dev, peer, false);
    }
    return st;
}

pya_status
pya_enable_peer(struct pya_heap *heap, int device, int peer) {
    struct pya_card *card;
    pya_status st = pya_heap_card(heap, device, &card);
    if (st != PYA_OK || !pya_card_has_vmm(card)) {
        return st; /* plain memory: the caller uses cudaDeviceEnablePeerAccess */
    }
    pya_lock_acquire(&card->lock);
    bool is_in = peer >= 0 && peer < PYA_MAX_DEVICES && (card->peers >> peer & 1) != 0;
    st = is_in ? PYA_OK : card_let_in(card, peer);
    pya_lock_release(&card->lock);
    return st;
}

bool
pya_lacks_peer(struct pya_heap *heap, int device, int peer) {
    struct pya_card *card = pya_heap_open_card(heap, device);
    if (card == NULL || !pya_card_has_vmm(card) || peer < 0 || peer >= PYA_MAX_DEVICES) {
        return false;
    }
    pya_lock_acquire(&card->lock);
    bool lacks = (card->peers >> peer & 1) == 0;
    pya_lock_release(&card->lock);
    return lacks;
}
