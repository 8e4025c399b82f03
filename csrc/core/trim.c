/* Giving memory back.  Floor 9.
 *
 * A page can be released only when no address maps it any more.  So the order is: choose pages, unmap every idle
 * stitched range and dead address that maps one of them, unmap their homes, release.  A page whose addresses cannot
 * all be unmapped is kept. */
#include "trim.h"

#include <stdlib.h>

#include "move.h"

static bool
arena_in_scope(
    const struct pya_arena *arena, enum pya_trim_scope scope, const struct pya_pool *pool) {
    return scope == PYA_TRIM_POOL ? arena->pool == pool : pya_pool_is_open(arena);
}

static bool
page_is_going(const struct pya_card *card, pya_page_id id) {
    const struct pya_page *page = &card->pages.items[id];
    return page->is_leaving || page->range == NULL;
}

/* Frees an empty list of stitched ranges, so that the arena looks as if it never had any and its pool may be
 * dropped. */
static void
forget_no_stitches(struct pya_arena *arena) {
    if (arena->stitches != NULL && arena->stitches->newest == NULL) {
        free(arena->stitches);
        arena->stitches = NULL;
    }
}

/* Unmaps the ranges that map leaving pages and, if the device was waited for, the broken ones.  The pages of a range
 * that stays do not leave. */
static void
trim_stitches(struct pya_card *card, struct pya_arena *arena, bool has_waited) {
    struct pya_stitch *stitch = arena->stitches == NULL ? NULL : arena->stitches->oldest;
    while (stitch != NULL) {
        struct pya_stitch *next = stitch->newer;
        bool is_going = stitch->is_broken;
        for (size_t i = 0; i < stitch->n_pages && !is_going; i++) {
            is_going = page_is_going(card, stitch->pages[i]);
        }
        if (is_going && stitch->block == NULL &&
            ((stitch->is_broken && !has_waited) || pya_stitch_destroy(stitch) != PYA_OK)) {
            pya_stitch_mark(stitch, false);
        }
        stitch = next;
    }
    forget_no_stitches(arena);
}

/* Unmaps a run of slots and turns it into a hole.  On failure nothing has changed. */
static pya_status
slots_unmap(struct pya_card *card, struct pya_block *block) {
    struct pya_range *range = block->range;
    pya_status st = pya_device_unmap(card->dev, block->addr, block->bytes);
    if (st != PYA_OK) {
        return st;
    }
    card->stats.scalar[PYA_STAT_pyalloc_unmaps]++;
    size_t first = pya_range_slot(range, block->addr);
    for (size_t i = 0; i < block->bytes / PYA_PAGE; i++) {
        pya_page_unmapped(&card->pages, range->slots[first + i].page);
        range->slots[first + i].page = PYA_NO_PAGE;
    }
    range->n_dead -= block->state == PYA_BLOCK_DEAD;
    pya_block_make_hole(block);
    return PYA_OK;
}

/* everything: all dead addresses, not only those that map a leaving page. */
static void
trim_dead(struct pya_card *card, struct pya_arena *arena, bool everything) {
    for (struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        struct pya_block *block = range->n_dead == 0 ? NULL : range->first;
        while (block != NULL) {
            struct pya_block *next = block->next;
            if (block->state != PYA_BLOCK_DEAD) {
                block = next;
                continue;
            }
            size_t first = pya_range_slot(range, block->addr);
            size_t n = block->bytes / PYA_PAGE;
            bool is_going = everything;
            for (size_t i = 0; i < n && !is_going; i++) {
                is_going = page_is_going(card, range->slots[first + i].page);
            }
            /* A hole above it is merged into it. */
            while (pya_block_is(next, PYA_BLOCK_HOLE)) {
                next = next->next;
            }
            if (is_going && slots_unmap(card, block) != PYA_OK) {
                for (size_t i = 0; i < n; i++) {
                    card->pages.items[range->slots[first + i].page].is_leaving = false;
                }
            }
            block = next;
        }
    }
}

/* Removes adjacent pages ids[0..n) from their run and unmaps their home.  ids[0] begins a grain.  Returns how many
 * pages it has dealt with. */
static size_t
pages_unhome(struct pya_card *card, const pya_page_id *ids, size_t n) {
    struct pya_page *items = card->pages.items;
    struct pya_range *range = items[ids[0]].range;
    size_t slot = items[ids[0]].slot;
    struct pya_block *run = pya_range_free_run(range, slot);
    if (run == NULL || !items[ids[0]].is_leaving || pya_slab_reserve(&card->blocks, 2) != PYA_OK) {
        return pya_page_n(&card->pages, ids[0]);
    }
    struct pya_arena *arena = run->arena;
    size_t end = pya_block_end_slot(run);
    size_t k = 1;
    while (k < n && slot + k < end && items[ids[k]].range == range &&
           items[ids[k]].slot == slot + k && items[ids[k]].is_leaving) {
        k++;
    }
    struct pya_block *block =
        pya_arena_carve(arena, run, pya_range_addr(range, slot), k * PYA_PAGE, PYA_BLOCK_USED);
    if (slots_unmap(card, block) != PYA_OK) {
        (void)pya_arena_give(arena, block);
        return k;
    }
    size_t n_small = 0;
    for (size_t i = 0; i < k; i++) {
        items[ids[i]].range = NULL;
        n_small += items[ids[i]].is_small;
    }
    pya_arena_note_unmapped(arena, range, pya_range_addr(range, slot), k, n_small);
    card->stats.scalar[PYA_STAT_num_device_free]++;
    return k;
}

/* Releases every page without home and mapping, including those of earlier failures. */
static size_t
pages_release_homeless(struct pya_card *card) {
    size_t n_bytes = 0;
    for (size_t i = 0; i < card->pages.n_items; i++) {
        struct pya_page *page = &card->pages.items[i];
        bool is_small = page->is_small;
        page->is_leaving = false;
        if (page->handle != 0 && page->place == 0 && page->range == NULL && page->n_mappings == 0 &&
            pya_grain_release(&card->pages, card->dev, (pya_page_id)i) == PYA_OK) {
            size_t bytes = pya_page_n(&card->pages, (pya_page_id)i) * PYA_PAGE;
            pya_card_reserved(card, is_small, -(int64_t)bytes);
            n_bytes += bytes;
        }
    }
    return n_bytes;
}

/* Rounds to whole grains: how many of the n_here pages stay.  Rather fewer than n_keep than more, unless
 * pya_reserve() needs them.  n_gone other pages are leaving already. */
static size_t
trim_round(
    const struct pya_card *card, const pya_page_id *ids, size_t n_keep, size_t n_here,
    size_t n_gone) {
    size_t spare =
        card->reserved_bytes > card->keep_bytes ? card->reserved_bytes - card->keep_bytes : 0;
    size_t place = n_keep < n_here ? card->pages.items[ids[n_keep]].place : 0;
    if (place == 0) {
        return n_keep;
    }
    size_t n_less = n_keep - place;
    bool is_spare = n_gone + n_here - n_less <= spare / PYA_PAGE;
    return is_spare ? n_less : n_less + pya_page_n(&card->pages, ids[n_keep]);
}

/* Chooses the wholly free pages of the scope that leave: ids[0..*n), arena by arena. */
static pya_status
trim_choose(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t n_most,
    pya_page_id *ids, size_t *n_out) {
    size_t n = 0;
    for (struct pya_arena *arena = card->arenas; arena != NULL && n < n_most; arena = arena->next) {
        bool is_whole = arena_in_scope(arena, scope, pool);
        if (!is_whole && (scope != PYA_TRIM_OPEN || !arena->has_left)) {
            continue;
        }
        /* In a pool in use, only pages that it has not touched. */
        const struct pya_arena *taker = is_whole ? NULL : arena;
        size_t n_here;
        pya_status st = pya_pages_pick(arena, SIZE_MAX, taker, NULL, ids + n, &n_here);
        if (st != PYA_OK) {
            return st;
        }
        /* The highest addresses leave, because best fit packs blocks at the low ones. */
        size_t n_keep = n + n_here > n_most ? n + n_here - n_most : 0;
        n_keep = trim_round(card, ids + n, n_keep, n_here, n);
        for (size_t i = 0; n_keep > 0 && i + n_keep < n_here; i++) {
            ids[n + i] = ids[n + i + n_keep];
        }
        n += n_here - n_keep;
    }
    *n_out = n;
    return PYA_OK;
}

size_t
pya_trim_pages(struct pya_card *card, const pya_page_id *ids, size_t n, bool has_waited) {
    for (size_t i = 0; i < n; i++) {
        card->pages.items[ids[i]].is_leaving = true;
    }
    pya_device_begin(card->dev);
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        trim_stitches(card, arena, has_waited);
        trim_dead(card, arena, false);
    }
    for (size_t i = 0; i < n;) {
        struct pya_range *range = card->pages.items[ids[i]].range;
        i += range == NULL ? pya_page_n(&card->pages, ids[i]) : pages_unhome(card, ids + i, n - i);
    }
    size_t n_bytes = pages_release_homeless(card);
    pya_device_end(card->dev);
    card->stats.scalar[PYA_STAT_pyalloc_pages_released] += (int64_t)(n_bytes / PYA_PAGE);
    return n_bytes;
}

static pya_status
trim_pages(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t n_bytes,
    size_t *n_freed) {
    size_t n_most = n_bytes / PYA_PAGE + (n_bytes % PYA_PAGE != 0);
    size_t n = 0;
    pya_page_id *ids = malloc((card->pages.n_live + 1) * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_status st = trim_choose(card, scope, pool, n_most, ids, &n);
    if (st == PYA_OK) {
        *n_freed += pya_trim_pages(card, ids, n, true);
    }
    free(ids);
    return st;
}

pya_status
pya_trim_card(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t n_bytes,
    size_t *n_freed) {
    pya_status st = PYA_OK;
    *n_freed = 0;
    pya_card_unpark(card);
    pya_nest_open(card);
    if (pya_card_has_vmm(card)) {
        st = trim_pages(card, scope, pool, n_bytes, n_freed);
        if (st != PYA_OK) {
            return st;
        }
    }
    struct pya_range *gone = NULL;
    for (struct pya_arena *arena = card->arenas; arena != NULL && st == PYA_OK;
         arena = arena->next) {
        bool is_plain = arena->small_fit != NULL;
        if (is_plain && arena_in_scope(arena, scope, pool) && *n_freed < n_bytes) {
            size_t n_here;
            size_t n_left = n_bytes == SIZE_MAX ? SIZE_MAX : n_bytes - *n_freed;
            st = pya_plain_trim(arena, n_left, &n_here, &gone);
            *n_freed += n_here;
        }
    }
    pya_plain_hand_back(gone); /* last, because others free memory meanwhile */
    return st;
}

/* While the card has more than n_keep mappings: unmaps dead addresses and stitched ranges, least recently used
 * first. */
static pya_status
arena_drop_addresses(struct pya_card *card, struct pya_arena *arena, size_t n_keep) {
    pya_status st = PYA_OK;
    trim_dead(card, arena, true);
    struct pya_stitch *stitch = arena->stitches == NULL ? NULL : arena->stitches->oldest;
    while (stitch != NULL && card->pages.n_mappings > n_keep) {
        struct pya_stitch *next = stitch->newer;
        pya_status one = stitch->block == NULL ? pya_stitch_destroy(stitch) : PYA_OK;
        st = st == PYA_OK ? one : st;
        stitch = next;
    }
    forget_no_stitches(arena);
    return st;
}

static void
settle(struct pya_card *card) {
    pya_pools_note_wait(card);
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        const struct pya_pool *pool = arena->pool;
        /* Others took all of its memory, but old addresses may be left. */
        if (pool != NULL && pool->n_users == 0 && !pool->is_active && arena->free_bytes == 0 &&
            pya_arena_is_vacant(arena)) {
            (void)!arena_drop_addresses(card, arena, 0);
        }
    }
    pya_pools_sweep(card);
}

/* If the wait fails, the pools stay closed, and the next user of the device learns why. */
pya_status
pya_trim_settle_meanwhile(struct pya_card *card) {
    bool is_idle;
    if (!pya_pools_are_unsettled(card)) {
        return PYA_OK;
    }
    pya_status st = pya_fences_wait_meanwhile(card, &is_idle);
    pya_card_unpark(card);
    if (st == PYA_OK && (is_idle || pya_fences_sync(card, false) == PYA_OK)) {
        settle(card);
    }
    return st == PYA_E_HOST_NOMEM ? st : PYA_OK;
}

/* Skips pools in use: a graph's kernels may contain their addresses, even if the memory there is free now. */
static pya_status
card_drop_addresses(struct pya_card *card, size_t n_keep) {
    pya_status st = PYA_OK;
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        pya_status one =
            pya_pool_is_open(arena) ? arena_drop_addresses(card, arena, n_keep) : PYA_OK;
        st = st == PYA_OK ? one : st;
    }
    return st;
}

bool
pya_trim_addresses(struct pya_card *card) {
    bool is_due = card->lacks_addresses;
    card->lacks_addresses = false;
    if (is_due) {
        (void)!card_drop_addresses(card, 0);
    }
    for (struct pya_arena *arena = card->arenas; is_due && arena != NULL; arena = arena->next) {
        pya_arena_drop_ranges(arena);
    }
    return is_due;
}

/* Does the card have more mappings than its options allow, not counting those that cannot be unmapped? */
static bool
card_is_crowded(const struct pya_card *card) {
    size_t most = card->pages.n_live * card->options.mappings_per_page;
    return card->pages.n_mappings > most + card->n_held_mappings;
}

void
pya_trim_mappings(struct pya_card *card) {
    bool is_idle;
    if (!card_is_crowded(card)) {
        return;
    }
    pya_status st = pya_fences_wait_meanwhile(card, &is_idle);
    st = st == PYA_OK && !is_idle ? pya_fences_sync(card, false) : st;
    if (st != PYA_OK || !card_is_crowded(card)) {
        return;
    }
    size_t n_keep = card->pages.n_live * card->options.mappings_per_page / 2;
    pya_device_begin(card->dev);
    (void)!card_drop_addresses(card, n_keep);
    pya_device_end(card->dev);
    /* If some cannot be unmapped, the next wait comes only after as many new mappings. */
    size_t n_left = card->pages.n_mappings;
    card->n_held_mappings = n_left > n_keep ? n_left - n_keep : 0;
}
