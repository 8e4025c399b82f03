/* Private pools.  Floor 7. */
#include "pool.h"

#include <stdlib.h>

#include "debug.h"

struct pya_pool *
pya_pool_find(struct pya_card *card, struct pya_pool_id id) {
    struct pya_pool *pool = card->pools;
    while (pool != NULL && (pool->id.first != id.first || pool->id.second != id.second)) {
        pool = pool->next;
    }
    return pool;
}

pya_status
pya_pool_get(struct pya_card *card, struct pya_pool_id id, struct pya_pool **out) {
    struct pya_pool *pool = pya_pool_find(card, id);
    if (pool == NULL) {
        pool = calloc(1, sizeof *pool);
        if (pool == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        pool->id = id;
        pool->next = card->pools;
        card->pools = pool;
    }
    *out = pool;
    return PYA_OK;
}

struct pya_pool *
pya_pool_route(struct pya_card *card, pya_stream stream) {
    struct pya_pool *best = NULL;
    size_t n_left = card->n_active;
    for (struct pya_pool *pool = card->pools; n_left > 0; pool = pool->next) {
        PYA_STEP();
        n_left -= pool->is_active;
        if (!pool->is_active || (best != NULL && best->order > pool->order)) {
            continue;
        }
        if (pool->filter.match == NULL || pool->filter.match(pool->filter.arg, stream)) {
            best = pool;
            pool->is_announced = false;
        }
    }
    return best;
}

struct pya_place
pya_pool_place(struct pya_card *card, pya_stream stream) {
    struct pya_place place = {.stream = stream};
    const struct pya_pool *pool = pya_pool_route(card, stream);
    if (pool != NULL) {
        place.pool = pool->id;
    }
    return place;
}

void
pya_pool_free(struct pya_pool *pool) {
    if (pool->is_active && pool->filter.drop != NULL) {
        pool->filter.drop(pool->filter.arg);
    }
    if (pool->source.drop != NULL) {
        pool->source.drop(pool->source.arg);
    }
    free(pool);
}

bool
pya_arena_is_vacant(const struct pya_arena *arena) {
    for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        for (const struct pya_block *block = range->first; block != NULL; block = block->next) {
            if (block->state == PYA_BLOCK_USED || block->state == PYA_BLOCK_LENT) {
                return false;
            }
        }
    }
    return true;
}

/* Adds to, or removes from, its pool everything that is at home in a vacant arena. */
static void
arena_count_all(struct pya_arena *arena, bool comes) {
    for (struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        for (struct pya_block *block = range->first; block != NULL; block = block->next) {
            if (block->state != PYA_BLOCK_FREE) {
                continue;
            }
            PYA_ASSERT(block->bytes % PYA_PAGE == 0);
            size_t n = block->bytes >> PYA_PAGE_SHIFT;
            if (comes) {
                pya_arena_note_mapped(arena, range, block->addr, n);
            } else {
                size_t n_small = pya_arena_small_pages(arena, range, block->addr, n);
                pya_arena_note_unmapped(arena, range, block->addr, n, n_small);
            }
        }
    }
}

static struct pya_arena **
card_alike(struct pya_card *card, const struct pya_pool *pool, pya_stream stream) {
    uint64_t key = (uint64_t)(uintptr_t)pool ^ (uint64_t)stream << 1;
    return &card->alike[(key * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - PYA_ALIKE_BITS)];
}

static void
card_forget_arena(struct pya_card *card, const struct pya_arena *arena) {
    struct pya_arena **link = card_alike(card, arena->pool, arena->stream);
    card->last_arena = card->last_arena == arena ? NULL : card->last_arena;
    while (*link != arena) {
        PYA_STEP();
        link = &(*link)->next_alike;
    }
    *link = arena->next_alike;
}

/* Reuses the arena of a dropped pool, with its addresses, for the next pool: no device call.  Takes the largest one. */
static struct pya_arena *
pool_inherit(struct pya_card *card, struct pya_pool *pool, struct pya_fence *fence) {
    struct pya_arena *best = NULL;
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        const struct pya_pool *dropped = arena->pool;
        /* Memory freed since the last wait for the device may still be in use. */
        bool is_left = dropped != NULL && dropped->n_users == 0 && dropped->is_settled &&
                       arena->n_waiting == 0 && arena->seq <= arena->idle_seq;
        if (is_left && arena->small_fit == NULL && arena->free_pages > 0 &&
            (best == NULL || arena->free_pages > best->free_pages) && pya_arena_is_vacant(arena)) {
            best = arena;
        }
    }
    if (best != NULL) {
        card_forget_arena(card, best);
        arena_count_all(best, false);
        best->pool = pool;
        best->stream = fence->stream;
        best->fence = fence;
        pya_arena_leave(best);
        best->stitch_debt_ns = 0;
        best->transfer_debt_ns = 0;
        best->n_grown = 0;
        arena_count_all(best, true);
    }
    return best;
}

static pya_status
pool_new_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out) {
    struct pya_fence *fence;
    pya_status st = pya_fences_add(card, stream, &fence);
    if (st == PYA_OK && pool != NULL && !pya_pool_is_plain(pool) && pool->limit_bytes == 0 &&
        pya_card_has_vmm(card)) {
        pya_card_unpark(card);
        *out = pool_inherit(card, pool, fence);
    }
    return st != PYA_OK || *out != NULL ? st : pya_arena_create(card, pool, fence, out);
}

static bool
arena_is_of(const struct pya_arena *arena, const struct pya_pool *pool, pya_stream stream) {
    return arena->pool == pool && arena->stream == stream;
}

pya_status
pya_pool_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out) {
    struct pya_arena **first = card_alike(card, pool, stream);
    struct pya_arena **link = first;
    while (*link != NULL && !arena_is_of(*link, pool, stream)) {
        PYA_STEP();
        link = &(*link)->next_alike;
    }
    struct pya_arena *arena = *link;
    if (arena != NULL) {
        *link = arena->next_alike;
    } else {
        pya_status st = pool_new_arena(card, pool, stream, &arena);
        if (st != PYA_OK) {
            return st;
        }
    }
    arena->next_alike = *first;
    *first = arena;
    pya_fence_hear(card, arena->fence);
    card->last_arena = arena;
    *out = arena;
    return PYA_OK;
}

bool
pya_pool_is_open(const struct pya_arena *arena) {
    return arena->pool == NULL || arena->pool->n_users == 0;
}

void
pya_pool_add_user(struct pya_card *card, struct pya_pool *pool) {
    for (struct pya_arena *arena = pool->is_settled ? card->arenas : NULL; arena != NULL;
         arena = arena->next) {
        if (arena->pool == pool && arena->small_fit == NULL) {
            pya_arena_leave(arena);
        }
    }
    pool->n_users++;
    pool->is_settled = false;
}

void
pya_pool_drop_user(struct pya_card *card, struct pya_pool *pool) {
    if (--pool->n_users == 0) {
        card->n_pool_drops++;
        pya_pool_offer(card, pool);
    }
}

void
pya_pool_offer(struct pya_card *card, const struct pya_pool *pool) {
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        PYA_STEP();
        if (arena->pool == pool) {
            pya_arena_offer(arena);
        }
    }
}

static bool
is_unsettled(const struct pya_arena *arena) {
    const struct pya_pool *pool = arena->pool;
    return pool->n_users == 0 && !pool->is_settled && arena->free_pages > 0;
}

bool
pya_pools_are_unsettled(struct pya_card *card) {
    pya_givers_review(card);
    const struct pya_arena *arena = card->giving;
    while (arena != NULL && !is_unsettled(arena)) {
        PYA_STEP();
        arena = arena->next_giving;
    }
    return arena != NULL && card->n_active == 0;
}

void
pya_pools_note_wait(struct pya_card *card) {
    for (struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        if (arena->pool != NULL && arena->pool->n_users == 0) {
            arena->pool->is_settled = true;
            arena->idle_seq = arena->seq;
        }
    }
}

/* Nothing is mapped, and nothing allocated or about to be: only address space is left. */
static bool
arena_is_empty(const struct pya_arena *arena) {
    for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        if (range->first->state != PYA_BLOCK_HOLE || range->first->next != NULL) {
            return false;
        }
    }
    return arena->stitches == NULL && arena->n_waiting == 0;
}

static bool
pool_may_go(const struct pya_pool *pool) {
    return pool != NULL && pool->n_users == 0 && !pool->is_active;
}

/* Destroys the empty arenas of pools that may be dropped.  An arena that stays holds its pool. */
static void
sweep_arenas(struct pya_card *card) {
    struct pya_arena **link = &card->arenas;
    pya_card_unpark(card);
    pya_givers_review(card); /* those that give have memory, and stay */
    while (*link != NULL) {
        struct pya_arena *arena = *link;
        bool may_go = pool_may_go(arena->pool);
        PYA_STEP();
        if (may_go && arena_is_empty(arena)) {
            *link = arena->next;
            card_forget_arena(card, arena);
            pya_arena_destroy(arena);
            continue;
        }
        if (may_go) {
            arena->pool->is_held = true;
        }
        link = &arena->next;
    }
}

/* All pools in one pass, because a program may drop thousands of graphs one by one. */
void
pya_pools_sweep(struct pya_card *card) {
    bool is_due = false;
    for (struct pya_pool *pool = card->pools; pool != NULL; pool = pool->next) {
        PYA_STEP();
        pool->is_held = !pool_may_go(pool);
        is_due = is_due || !pool->is_held;
    }
    if (!is_due) {
        return;
    }
    sweep_arenas(card);
    struct pya_pool **link = &card->pools;
    while (*link != NULL) {
        struct pya_pool *pool = *link;
        if (!pool->is_held) {
            *link = pool->next;
            pya_pool_free(pool);
        } else {
            link = &pool->next;
        }
    }
}
