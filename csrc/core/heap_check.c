/* A card's invariants across its arenas, pools and pages.  Floor 12. */
#include <stdio.h>

#include "heap.h"

/* Sums over the live map, to compare with the card's own counts. */
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

/* Bytes at home in a range of a private pool, and how many of them small requests created. */
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
    size_t range_bytes = 0;
    size_t n_live = 0;
    size_t n_hidden = 0;
    size_t n_in_nest = 0;
    size_t n_mappings = 0;
    size_t n_marked = 0;
    pya_ptrmap_each(&card->live, live_add, &live);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        n_wrong += pya_arena_check(arena) + pya_stitches_check(arena);
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            plain_bytes += r->slots == NULL ? r->bytes : 0;
            range_bytes += r->slots == NULL ? 0 : r->bytes;
            for (const struct pya_block *b = r->first; b != NULL; b = b->next) {
                n_live += b->state == PYA_BLOCK_USED;
                n_hidden += b->state == PYA_BLOCK_LENT && b->owner == NULL;
            }
        }
        const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
        for (; s != NULL; s = s->older) {
            n_live += s->block != NULL;
        }
    }
    for (const struct pya_block *b = card->hidden; b != NULL; b = b->next_piece) {
        n_in_nest += b->state == PYA_BLOCK_LENT && b->owner == NULL;
    }
    n_wrong += card_violation(card, "hidden blocks", n_hidden, n_in_nest);
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
    n_wrong += card_violation(card, "bytes of ranges", range_bytes, card->range_bytes);
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
