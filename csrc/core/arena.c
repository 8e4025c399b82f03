/* Arenas: taking from free runs, giving back to them, growing at a hole.  Floor 6. */
#include "arena.h"

#include <stdlib.h>

#include "debug.h"
#include "fence.h"
#include "segment.h"

/* Size of a range's address space, in multiples of the card's memory.  More than one, because pages that move to the
 * end leave dead addresses behind; a private pool rarely holds much and may get further ranges.  New ranges get
 * smaller for every RANGE_ARENAS arenas that exist, and where few addresses are left, each takes a share of them:
 * there may be thousands of streams and graphs. */
enum { RANGE_TIMES_DEFAULT = 2, RANGE_SHARE_PRIVATE = 4, RANGE_ARENAS = 16, RANGE_SHARE_LEFT = 2 };

static struct pya_fit *
arena_fit(struct pya_arena *arena, const struct pya_range *range) {
    return range->is_small ? arena->small_fit : &arena->fit;
}

/* Plain segments: a run counts as torch's inactive_split unless it is a whole segment. */
static void
arena_count_plain(struct pya_arena *arena, const struct pya_range *range, size_t bytes, int sign) {
    struct pya_stats *stats = &arena->card->stats;
    bool is_small = range->is_small && !stats->has_one_split_pool;
    enum pya_stat_pool pool = pya_stat_pool_of(is_small);
    arena->free_bytes += (size_t)sign * bytes;
    if (bytes == range->bytes) {
        return;
    }
    if (sign > 0) {
        pya_stats_add(stats, pool, PYA_STAT_inactive_split, 1);
        pya_stats_add(stats, pool, PYA_STAT_inactive_split_bytes, bytes);
    } else {
        pya_stats_sub(stats, pool, PYA_STAT_inactive_split, 1);
        pya_stats_sub(stats, pool, PYA_STAT_inactive_split_bytes, bytes);
    }
}

/* Counts a run that was added (sign 1) or removed (-1).  inactive_split is the part that cannot be given back: the
 * bytes outside its wholly free pages. */
static inline void
arena_count_run(
    struct pya_arena *arena, const struct pya_range *range, pya_dptr addr, size_t bytes, int sign) {
    if (PYA_UNLIKELY(range->slots == NULL)) {
        arena_count_plain(arena, range, bytes, sign);
        return;
    }
    size_t n_pages = pya_run_pages(addr, bytes);
    arena->free_bytes += (size_t)sign * bytes;
    arena->free_pages += (size_t)sign * n_pages;
    pya_stats_count_split(&arena->card->stats, bytes - n_pages * PYA_PAGE, sign);
}

static void
arena_insert_run(struct pya_arena *arena, struct pya_block *run) {
    run->state = PYA_BLOCK_FREE;
    arena_count_run(arena, run->range, run->addr, run->bytes, 1);
    pya_fit_insert(arena_fit(arena, run->range), run);
}

static void
arena_remove_run(struct pya_arena *arena, struct pya_block *run) {
    arena_count_run(arena, run->range, run->addr, run->bytes, -1);
    pya_fit_remove(arena_fit(arena, run->range), run);
}

/* The same as arena_count_run() for the old bounds and for the new ones, in one step: this is half the cost of an
 * allocation in a fragmented arena. */
static inline void
arena_recount_run(
    struct pya_arena *arena, const struct pya_block *run, pya_dptr addr, size_t bytes) {
    struct pya_stat *stats = arena->card->stats.pooled[PYA_STAT_LARGE];
    size_t n_pages = pya_run_pages(addr, bytes);
    size_t n_before = pya_run_pages(run->addr, run->bytes);
    int64_t split = (int64_t)(bytes - n_pages * PYA_PAGE);
    int64_t before = (int64_t)(run->bytes - n_before * PYA_PAGE);
    arena->free_bytes += bytes - run->bytes;
    arena->free_pages += n_pages - n_before;
    pya_stat_replace(&stats[PYA_STAT_inactive_split], before > 0, split > 0);
    pya_stat_replace(&stats[PYA_STAT_inactive_split_bytes], before, split);
}

__attribute__((noinline, cold)) static void
arena_replace_plain(
    struct pya_arena *arena, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes) {
    const struct pya_range *range = run->range;
    arena_count_plain(arena, range, run->bytes, -1);
    arena_count_plain(arena, range, bytes, 1);
    pya_fit_replace(arena_fit(arena, range), run, heir, addr, bytes);
}

/* Replaces a run's record with `heir` and new bounds.  The caller has made sure that the bytes it loses or gains
 * belong to no other block.  When two records become one or one becomes two, the record at the lower address stays,
 * so that the range need not learn a new start. */
static inline void
arena_replace_run(
    struct pya_arena *arena, struct pya_block *run, struct pya_block *heir, pya_dptr addr,
    size_t bytes) {
    heir->state = PYA_BLOCK_FREE;
    if (PYA_UNLIKELY(run->range->slots == NULL)) {
        arena_replace_plain(arena, run, heir, addr, bytes);
        return;
    }
    arena_recount_run(arena, run, addr, bytes);
    pya_fit_replace(&arena->fit, run, heir, addr, bytes);
}

struct pya_block *
pya_arena_take(struct pya_arena *arena, struct pya_block *run, size_t bytes) {
    PYA_ASSERT(run->state == PYA_BLOCK_FREE && run->bytes >= bytes);
    if (run->bytes == bytes) {
        arena_remove_run(arena, run);
        run->state = PYA_BLOCK_USED;
        return run;
    }
    struct pya_block *rest = pya_slab_take(&arena->card->blocks);
    arena_replace_run(arena, run, rest, run->addr + bytes, run->bytes - bytes);
    rest->seq = run->seq;
    run->bytes = bytes;
    run->state = PYA_BLOCK_USED;
    pya_range_link_above(run->range, run, rest);
    return run;
}

struct pya_block *
pya_arena_take_high(struct pya_arena *arena, struct pya_block *run, size_t bytes) {
    PYA_ASSERT(run->state == PYA_BLOCK_FREE && run->bytes > bytes);
    struct pya_block *block = pya_slab_take(&arena->card->blocks);
    arena_replace_run(arena, run, run, run->addr, run->bytes - bytes);
    block->addr = pya_block_end(run);
    block->bytes = bytes;
    block->state = PYA_BLOCK_USED;
    pya_range_link_above(run->range, run, block);
    return block;
}

struct pya_block *
pya_arena_carve(
    struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes,
    enum pya_block_state state) {
    PYA_ASSERT(run->addr <= addr && addr + bytes <= pya_block_end(run));
    size_t above = (size_t)(pya_block_end(run) - (addr + bytes));
    uint64_t seq = run->seq;
    struct pya_block *piece = run;
    if (addr > run->addr) {
        piece = pya_arena_take_high(arena, run, bytes + above);
    } else {
        arena_remove_run(arena, run);
    }
    if (above > 0) {
        struct pya_block *rest = pya_slab_take(&arena->card->blocks);
        piece->bytes = bytes;
        rest->addr = addr + bytes;
        rest->bytes = above;
        rest->seq = seq;
        pya_range_link_above(piece->range, piece, rest);
        arena_insert_run(arena, rest);
    }
    piece->state = (uint8_t)state;
    return piece;
}

/* Memory that becomes free after use is the arena's own again: its pages are no longer marked as left. */
static void
arena_touch(struct pya_arena *arena, const struct pya_block *block) {
    const struct pya_slot *slots = block->range->slots;
    size_t last = pya_range_slot(block->range, pya_block_end(block) - 1);
    for (size_t s = pya_range_slot(block->range, block->addr); slots != NULL && s <= last; s++) {
        arena->card->pages.items[slots[s].page].is_left = false;
    }
}

struct pya_block *
pya_arena_give(struct pya_arena *arena, struct pya_block *block) {
    if (PYA_UNLIKELY(arena->has_left)) {
        arena_touch(arena, block);
    }
    struct pya_block *prev = block->prev;
    struct pya_block *next = block->next;
    struct pya_range *range = block->range;
    struct pya_slab *slab = &arena->card->blocks;
    uint64_t seq = ++arena->seq;
    size_t bytes = block->bytes;
    bool joins_next = pya_arena_has_run(arena, next);
    if (pya_arena_has_run(arena, prev)) {
        if (joins_next) {
            bytes += next->bytes;
            arena_remove_run(arena, next);
            pya_range_unlink(range, next);
            pya_slab_put(slab, next);
        }
        pya_range_unlink(range, block);
        pya_slab_put(slab, block);
        arena_replace_run(arena, prev, prev, prev->addr, prev->bytes + bytes);
        prev->seq = seq;
        return prev;
    }
    if (joins_next) {
        arena_replace_run(arena, next, block, block->addr, bytes + next->bytes);
        pya_range_unlink(range, next);
        pya_slab_put(slab, next);
    } else {
        arena_insert_run(arena, block);
    }
    block->seq = seq;
    return block;
}

struct pya_block *
pya_arena_adopt(struct pya_arena *arena, struct pya_block *run, pya_dptr addr, size_t bytes) {
    struct pya_history *history = arena->card->history;
    struct pya_block *piece = pya_arena_carve(run->arena, run, addr, bytes, PYA_BLOCK_USED);
    pya_history_note(history, PYA_ACTION_SEGMENT_UNMAP, addr, bytes, pya_arena_place(piece->arena));
    pya_history_note(history, PYA_ACTION_SEGMENT_MAP, addr, bytes, pya_arena_place(arena));
    piece->arena = arena;
    return pya_arena_give(arena, piece);
}

static void
arena_add_hole(struct pya_arena *arena, struct pya_block *hole) {
    hole->state = PYA_BLOCK_HOLE;
    hole->prev_gap = NULL;
    hole->next_gap = arena->holes;
    if (arena->holes != NULL) {
        arena->holes->prev_gap = hole;
    }
    arena->holes = hole;
}

static void
arena_drop_hole(struct pya_arena *arena, struct pya_block *hole) {
    if (hole->prev_gap != NULL) {
        hole->prev_gap->next_gap = hole->next_gap;
    } else {
        arena->holes = hole->next_gap;
    }
    if (hole->next_gap != NULL) {
        hole->next_gap->prev_gap = hole->prev_gap;
    }
}

void
pya_arena_unpark(struct pya_arena *arena) {
    struct pya_block *block = arena->parked;
    if (block != NULL) {
        arena->parked = NULL;
        (void)pya_arena_give(arena, block);
    }
}

void
pya_card_unpark(struct pya_card *card) {
    while (card->parking != NULL) {
        struct pya_arena *arena = card->parking;
        PYA_STEP();
        card->parking = arena->next_parking;
        arena->is_parking = false;
        pya_arena_unpark(arena);
        pya_arena_offer(arena);
    }
}

void
pya_block_make_hole(struct pya_block *block) {
    struct pya_range *range = block->range;
    struct pya_arena *arena = range->arena;
    block->arena = arena;
    struct pya_block *next = block->next;
    struct pya_block *prev = block->prev;
    if (pya_block_is(next, PYA_BLOCK_HOLE)) {
        arena_drop_hole(arena, next);
        pya_range_unlink(range, next);
        block->bytes += next->bytes;
        pya_slab_put(&arena->card->blocks, next);
    }
    if (pya_block_is(prev, PYA_BLOCK_HOLE)) {
        pya_range_unlink(range, block);
        prev->bytes += block->bytes;
        pya_slab_put(&arena->card->blocks, block);
        return;
    }
    arena_add_hole(arena, block);
}

/* Takes the first n_pages slots from a hole as one block in state USED, which is in no index. */
static struct pya_block *
hole_cut(struct pya_arena *arena, struct pya_block *hole, size_t n_pages) {
    struct pya_range *range = hole->range;
    size_t bytes = n_pages * PYA_PAGE;
    if (hole->bytes == bytes) {
        arena_drop_hole(arena, hole);
        hole->state = PYA_BLOCK_USED;
        return hole;
    }
    struct pya_block *block = pya_slab_take(&arena->card->blocks);
    block->addr = hole->addr;
    block->bytes = bytes;
    block->state = PYA_BLOCK_USED;
    pya_range_drop_start(range, hole);
    hole->addr += bytes;
    hole->bytes -= bytes;
    pya_range_add_start(range, hole);
    pya_range_link_below(range, hole, block);
    return block;
}

pya_status
pya_arena_settle(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages) {
    struct pya_card *card = arena->card;
    struct pya_range *range = hole->range;
    size_t first = pya_range_slot(range, hole->addr);
    size_t n_more = hole->bytes > n_pages * PYA_PAGE ? 1 : 0;
    pya_status st = pya_range_reserve_slots(range, first + n_pages + n_more);
    if (st != PYA_OK) {
        return st;
    }
    st = pya_slab_reserve(&card->blocks, 1);
    if (st != PYA_OK) {
        return st;
    }
    size_t n_done;
    st = pya_pages_map(&card->pages, card->dev, hole->addr, ids, n_pages, &n_done);
    if (st != PYA_OK) {
        goto unmap;
    }
    st = pya_device_set_access(card->dev, hole->addr, n_pages * PYA_PAGE);
    if (st != PYA_OK) {
        goto unmap;
    }
    struct pya_block *block = hole_cut(arena, hole, n_pages);
    for (size_t i = 0; i < n_pages; i++) {
        struct pya_page *page = &card->pages.items[ids[i]];
        page->range = range;
        page->slot = (uint32_t)(first + i);
        page->is_left = false; /* refers to the arena that it comes from */
        pya_page_mapped(&card->pages, ids[i]);
        range->slots[first + i].page = ids[i];
    }
    (void)pya_arena_give(arena, block);
    pya_arena_offer(arena); /* its pool may have lost its last user during the request */
    return PYA_OK;

unmap:
    if (n_done > 0 && pya_device_unmap(card->dev, hole->addr, n_done * PYA_PAGE) != PYA_OK) {
        /* The pages stay mapped at addresses that nobody may use again: a dead block records both. */
        pya_range_kill(range, hole_cut(arena, hole, n_done));
        for (size_t i = 0; i < n_done; i++) {
            pya_page_mapped(&card->pages, ids[i]);
            range->slots[first + i].page = ids[i];
        }
    }
    return st;
}

/* Releases pages that were never mapped, or leaves them to the trimmer if the device refuses. */
static void
arena_drop_pages(struct pya_card *card, const pya_page_id *ids, size_t n_pages, bool is_small) {
    for (size_t i = 0; i < n_pages;) {
        const size_t n = pya_page_n(&card->pages, ids[i]);
        if (card->pages.items[ids[i]].n_mappings == 0 &&
            pya_grain_release(&card->pages, card->dev, ids[i]) == PYA_OK) {
            pya_card_reserved(card, is_small, -(int64_t)(n * PYA_PAGE));
        }
        i += n;
    }
}

pya_status
pya_arena_grow(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, unsigned grain,
    bool is_small) {
    struct pya_card *card = arena->card;
    PYA_ASSERT(n_pages > 0 && hole->bytes >= n_pages * PYA_PAGE);
    if (n_pages > pya_card_room(card) / PYA_PAGE ||
        n_pages > pya_arena_pool_room(arena) / PYA_PAGE) {
        return PYA_E_LIMIT;
    }
    pya_status st = pya_pages_reserve(&card->pages, n_pages);
    if (st != PYA_OK) {
        return st;
    }
    pya_page_id *ids = malloc(n_pages * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t n_made;
    st = pya_pages_make(&card->pages, card->dev, n_pages, grain, ids, &n_made);
    for (size_t i = 0; i < n_made; i++) {
        card->pages.items[ids[i]].is_small = is_small;
    }
    pya_card_reserved(card, is_small, (int64_t)(n_made * PYA_PAGE));
    struct pya_range *range = hole->range;
    pya_dptr addr = hole->addr;
    if (st != PYA_OK) {
        goto done;
    }
    st = pya_arena_settle(arena, hole, ids, n_pages);
    if (st == PYA_OK) {
        pya_arena_note_mapped(arena, range, addr, n_pages);
        card->stats.scalar[PYA_STAT_num_device_alloc]++;
        card->stats.scalar[PYA_STAT_pyalloc_growths]++;
    } else {
        arena_drop_pages(card, ids, n_pages, is_small);
    }
done:
    free(ids);
    return st;
}

static size_t
arena_range_bytes(const struct pya_arena *arena, size_t n_pages) {
    const struct pya_card *card = arena->card;
    size_t total = pya_round_up(card->caps.total_bytes, PYA_PAGE);
    size_t bytes = arena->pool == NULL ? total * RANGE_TIMES_DEFAULT : total / RANGE_SHARE_PRIVATE;
    size_t n_arenas = 0;
    for (const struct pya_arena *a = card->arenas; a != NULL; a = a->next) {
        n_arenas++;
    }
    bytes /= 1 + n_arenas / RANGE_ARENAS;
    size_t all = (size_t)card->caps.address_bytes;
    size_t left = all > card->range_bytes ? all - card->range_bytes : 0;
    size_t share = left / (RANGE_SHARE_LEFT + n_arenas);
    bytes = pya_round_up(bytes < share ? bytes : share, PYA_PAGE);
    size_t least = (n_pages + 1) * PYA_PAGE;
    return bytes > least ? bytes : least;
}

struct pya_block *
pya_arena_link_range(struct pya_arena *arena, struct pya_range *range) {
    struct pya_card *card = arena->card;
    pya_card_claim(card, range->base, range->bytes);
    range->arena = arena;
    range->next = arena->ranges;
    arena->ranges = range;
    struct pya_block *block = pya_slab_take(&card->blocks);
    block->addr = range->base;
    block->bytes = range->bytes;
    pya_range_link_below(range, NULL, block);
    return block;
}

static pya_status
arena_add_range(struct pya_arena *arena, size_t n_pages, struct pya_block **out) {
    struct pya_card *card = arena->card;
    pya_status st = pya_slab_reserve(&card->blocks, 1);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_range *range = calloc(1, sizeof *range);
    if (range == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    st = pya_range_reserve_slots(range, 1);
    if (st != PYA_OK) {
        goto free_range;
    }
    range->bytes = arena_range_bytes(arena, n_pages);
    st = pya_device_range_reserve(card->dev, range->bytes, &range->base);
    while (st != PYA_OK && range->bytes / 2 >= (n_pages + 1) * PYA_PAGE) {
        range->bytes = pya_round_down(range->bytes / 2, PYA_PAGE);
        st = pya_device_range_reserve(card->dev, range->bytes, &range->base);
    }
    if (st != PYA_OK) {
        card->lacks_addresses = true;
        goto free_range;
    }
    card->range_bytes += range->bytes;
    *out = pya_arena_link_range(arena, range);
    arena_add_hole(arena, *out);
    return PYA_OK;

free_range:
    pya_range_fini(range);
    free(range);
    return st;
}

pya_status
pya_arena_last_hole(struct pya_arena *arena, size_t n_pages, struct pya_block **out) {
    for (struct pya_block *hole = arena->holes; hole != NULL; hole = hole->next_gap) {
        if (hole->next == NULL && hole->bytes >= n_pages * PYA_PAGE) {
            *out = hole;
            return PYA_OK;
        }
    }
    return arena_add_range(arena, n_pages, out);
}

void
pya_arena_drop_ranges(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    struct pya_range **link = &arena->ranges;
    while (*link != NULL) {
        struct pya_range *range = *link;
        struct pya_block *hole = range->first;
        bool is_empty = range->slots != NULL && hole->state == PYA_BLOCK_HOLE && hole->next == NULL;
        if (!is_empty || pya_device_range_release(card->dev, range->base, range->bytes) != PYA_OK) {
            link = &range->next;
            continue;
        }
        *link = range->next;
        card->range_bytes -= range->bytes;
        arena_drop_hole(arena, hole);
        pya_slab_put(&card->blocks, hole);
        pya_range_fini(range);
        free(range);
    }
}

pya_status
pya_arena_create(
    struct pya_card *card, struct pya_pool *pool, struct pya_fence *fence, struct pya_arena **out) {
    struct pya_arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    if (!pya_card_has_vmm(card) || pya_pool_is_plain(pool)) {
        arena->small_fit = calloc(1, sizeof *arena->small_fit);
        if (arena->small_fit == NULL) {
            free(arena);
            return PYA_E_HOST_NOMEM;
        }
        pya_fit_init(arena->small_fit);
    }
    pya_fit_init(&arena->fit);
    arena->card = card;
    arena->pool = pool;
    arena->stream = fence->stream;
    arena->fence = fence;
    arena->next = card->arenas;
    card->arenas = arena;
    if (pool == NULL) {
        arena->next_common = card->common;
        card->common = arena;
    }
    *out = arena;
    return PYA_OK;
}

static void
range_return(struct pya_card *card, struct pya_range *range) {
    if (range->slots == NULL) {
        (void)!pya_segment_free(card, range->arena->pool, range->base);
        return;
    }
    size_t s = 0;
    while (s < range->n_slots) {
        size_t first = s;
        for (; s < range->n_slots && range->slots[s].page != PYA_NO_PAGE; s++) {
            pya_page_unmapped(&card->pages, range->slots[s].page);
        }
        if (s > first) {
            (void)!pya_device_unmap(
                card->dev, pya_range_addr(range, first), (s - first) * PYA_PAGE);
        } else {
            s++;
        }
    }
    (void)!pya_device_range_release(card->dev, range->base, range->bytes);
    card->range_bytes -= range->bytes;
}

void
pya_arena_destroy(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    while (arena->ranges != NULL) {
        struct pya_range *range = arena->ranges;
        arena->ranges = range->next;
        range_return(card, range);
        while (range->first != NULL) {
            struct pya_block *block = range->first;
            range->first = block->next;
            pya_slab_put(&card->blocks, block);
        }
        pya_range_fini(range);
        free(range);
    }
    free(arena->small_fit);
    free(arena->repeat);
    free(arena->stays);
    free(arena->littles);
    free(arena);
}
