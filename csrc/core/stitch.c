/* Stitched ranges.  Floor 7. */
#include "stitch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "debug.h"

/* A range is extended only if it lacks at most this share of the request, or one page.  Only the few ranges used last
 * are examined, so that the cost of a miss is bounded. */
enum { SHORT_SHARE = 8, SHORT_TRIES = 64 };

void
pya_stitch_mark(const struct pya_stitch *stitch, bool is_leaving) {
    for (size_t i = 0; i < stitch->n_pages; i++) {
        stitch->arena->card->pages.items[stitch->pages[i]].is_leaving = is_leaving;
    }
}

static struct pya_stitch **
stitch_bucket(struct pya_stitches *stitches, size_t bytes) {
    return &stitches->buckets[pya_pages_for(bytes) % PYA_STITCH_BUCKETS];
}

static void
stitch_link(struct pya_stitch *stitch) {
    struct pya_stitches *all = stitch->arena->stitches;
    struct pya_stitch **bucket = stitch_bucket(all, stitch->bytes);
    stitch->prev_same = NULL;
    stitch->next_same = *bucket;
    if (*bucket != NULL) {
        (*bucket)->prev_same = stitch;
    }
    *bucket = stitch;
    stitch->newer = NULL;
    stitch->older = all->newest;
    if (all->newest != NULL) {
        all->newest->newer = stitch;
    } else {
        all->oldest = stitch;
    }
    all->newest = stitch;
}

static void
stitch_unlink(struct pya_stitch *stitch) {
    struct pya_stitches *all = stitch->arena->stitches;
    if (stitch->prev_same != NULL) {
        stitch->prev_same->next_same = stitch->next_same;
    } else {
        *stitch_bucket(all, stitch->bytes) = stitch->next_same;
    }
    if (stitch->next_same != NULL) {
        stitch->next_same->prev_same = stitch->prev_same;
    }
    if (stitch->newer != NULL) {
        stitch->newer->older = stitch->older;
    } else {
        all->newest = stitch->older;
    }
    if (stitch->older != NULL) {
        stitch->older->newer = stitch->newer;
    } else {
        all->oldest = stitch->newer;
    }
}

/* The part [*first, *end) of page i that the range lends; i lies between the first and the last page that lend. */
static void
stitch_part(const struct pya_stitch *stitch, size_t i, size_t *first, size_t *end) {
    size_t last = stitch->offset + stitch->bytes - i * PYA_PAGE;
    *first = i == pya_stitch_first(stitch) ? stitch->offset % PYA_PAGE : 0;
    *end = last < PYA_PAGE ? last : PYA_PAGE;
}

/* What the pages from i on lend, as far as it is one piece of one free run. */
struct piece {
    struct pya_block *run;
    pya_dptr addr;
    size_t bytes;
    size_t n_pages; /* 0: page i's part is not free in this arena */
};

size_t
pya_stitch_row(const struct pya_stitch *stitch, size_t i, size_t n_most) {
    const struct pya_page *items = stitch->arena->card->pages.items;
    const pya_page_id *ids = stitch->pages + i;
    const struct pya_range *range = items[ids[0]].range;
    size_t slot = items[ids[0]].slot;
    size_t n_left = pya_stitch_end(stitch) - i;
    size_t n = 1;
    n_most = n_most < n_left ? n_most : n_left;
    while (n < n_most && items[ids[n]].range == range && items[ids[n]].slot == slot + n) {
        n++;
    }
    return n;
}

static struct piece
stitch_piece(const struct pya_stitch *stitch, const struct pya_arena *arena, size_t i) {
    const struct pya_page *items = arena->card->pages.items;
    const struct pya_page *page = &items[stitch->pages[i]];
    struct pya_range *range = page->range;
    struct piece piece = {.n_pages = 0};
    if (range == NULL) {
        return piece;
    }
    size_t first;
    size_t end;
    stitch_part(stitch, i, &first, &end);
    piece.addr = pya_range_addr(range, page->slot) + first;
    piece.run = end - first == PYA_PAGE ? pya_range_free_run(range, page->slot)
                                        : pya_range_block_at(range, piece.addr, SIZE_MAX);
    bool is_usable = pya_stitch_is_whole(stitch) ? pya_arena_may_use(arena, piece.run)
                                                 : pya_arena_has_run(arena, piece.run);
    if (!is_usable) {
        return piece;
    }
    size_t room = (size_t)(pya_block_end(piece.run) - piece.addr);
    piece.bytes = end - first;
    if (piece.bytes > room) {
        return piece;
    }
    /* The following pages are whole, except the last. */
    size_t left = room - piece.bytes;
    size_t n_most = 1 + (left >> PYA_PAGE_SHIFT);
    const size_t stop = pya_stitch_end(stitch);
    size_t last_bytes = stitch->offset + stitch->bytes - (stop - 1) * PYA_PAGE;
    n_most += i + n_most + 1 == stop && left % PYA_PAGE >= last_bytes;
    piece.n_pages = pya_stitch_row(stitch, i, n_most);
    piece.bytes += (piece.n_pages - 1) * PYA_PAGE;
    if (piece.n_pages > 1 && i + piece.n_pages == stop) {
        piece.bytes -= PYA_PAGE - last_bytes;
    }
    return piece;
}

/* Can all bytes be lent?  Counts the records needed at most to cut them out of the home runs: one for the rest below
 * a piece and one for the rest above it. */
static bool
stitch_is_free(const struct pya_stitch *stitch, const struct pya_arena *arena, size_t *n_records) {
    *n_records = 0;
    for (size_t i = pya_stitch_first(stitch); i < pya_stitch_end(stitch);) {
        struct piece piece = stitch_piece(stitch, arena, i);
        if (piece.n_pages == 0) {
            return false;
        }
        *n_records += piece.addr > piece.run->addr;
        *n_records += piece.addr + piece.bytes < pya_block_end(piece.run);
        *n_records += piece.run->arena == arena ? 0 : 2;
        i += piece.n_pages;
    }
    return true;
}

/* Searches the ranges of `from`, which is the arena itself or another one of the default pool. */
static struct pya_stitch *
stitch_find_in(const struct pya_arena *from, const struct pya_arena *arena, size_t bytes) {
    size_t whole = pya_round_up(bytes, PYA_PAGE);
    struct pya_stitch *stitch =
        from->stitches == NULL ? NULL : *stitch_bucket(from->stitches, bytes);
    for (; stitch != NULL; stitch = stitch->next_same) {
        bool is_idle = stitch->block == NULL && !stitch->is_broken;
        bool is_fit = stitch->bytes == (stitch->is_shared ? bytes : whole) &&
                      (from == arena || pya_stitch_is_whole(stitch));
        size_t n_records;
        if (is_idle && is_fit && stitch_is_free(stitch, arena, &n_records)) {
            return stitch;
        }
    }
    return NULL;
}

static pya_status
stitch_change_hands(struct pya_stitch *stitch, struct pya_arena *arena) {
    if (stitch->arena == arena) {
        return PYA_OK;
    }
    if (arena->stitches == NULL) {
        arena->stitches = calloc(1, sizeof *arena->stitches);
        if (arena->stitches == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    }
    stitch->arena->stitches->n_mappings -= stitch->n_pages;
    stitch_unlink(stitch);
    stitch->arena = arena;
    stitch_link(stitch);
    arena->stitches->n_mappings += stitch->n_pages;
    return PYA_OK;
}

pya_status
pya_stitch_find(struct pya_arena *arena, size_t bytes, struct pya_stitch **out) {
    *out = stitch_find_in(arena, arena, bytes);
    if (arena->pool != NULL) {
        return PYA_OK;
    }
    const struct pya_arena *from = arena->card->common;
    for (; from != NULL && *out == NULL; from = from->next_common) {
        if (from != arena) {
            *out = stitch_find_in(from, arena, bytes);
        }
    }
    return *out == NULL ? PYA_OK : stitch_change_hands(*out, arena);
}

struct pya_stitch *
pya_stitch_find_short(struct pya_arena *arena, size_t bytes) {
    struct pya_stitch *best = NULL;
    size_t most = pya_pages_for(bytes);
    size_t n_lacking = most / SHORT_SHARE + 1;
    size_t least = most > n_lacking ? most - n_lacking : 1;
    if (arena->pool != NULL && arena->pool->n_users > 0) {
        return NULL; /* its blocks may be claimed again one by one (pya_pool_claim) */
    }
    struct pya_stitch *stitch = arena->stitches == NULL ? NULL : arena->stitches->newest;
    for (int i = 0; stitch != NULL && i < SHORT_TRIES; stitch = stitch->older, i++) {
        bool is_idle = stitch->block == NULL && !stitch->is_broken && pya_stitch_is_whole(stitch);
        size_t n_records;
        if (is_idle && stitch->n_pages >= least && stitch->n_pages < most &&
            stitch->range_bytes >= most * PYA_PAGE && stitch_is_free(stitch, arena, &n_records)) {
            best = stitch;
            least = stitch->n_pages + 1;
        }
    }
    return best;
}

struct pya_stitch *
pya_stitch_of(const struct pya_arena *arena, pya_dptr addr, size_t bytes) {
    struct pya_stitch *stitch =
        arena->stitches == NULL ? NULL : *stitch_bucket(arena->stitches, bytes);
    while (stitch != NULL && stitch->base + stitch->offset != addr) {
        stitch = stitch->next_same;
    }
    return stitch;
}

static bool
stitch_is_usable(const struct pya_stitch *stitch) {
    size_t n_records;
    bool is_idle = stitch->block == NULL && !stitch->is_broken;
    return is_idle && stitch_is_free(stitch, stitch->arena, &n_records);
}

struct pya_stitch *
pya_stitch_again(struct pya_arena *arena, pya_dptr addr, size_t bytes) {
    struct pya_stitch *stitch = pya_stitch_of(arena, addr, bytes);
    bool is_fit = stitch != NULL &&
                  pya_round_up(bytes, stitch->is_shared ? PYA_ALIGN : PYA_PAGE) == stitch->bytes;
    return is_fit && stitch_is_usable(stitch) ? stitch : NULL;
}

struct pya_stitch *
pya_stitch_at(struct pya_arena *arena, pya_dptr addr) {
    struct pya_stitch *stitch = arena->stitches == NULL ? NULL : arena->stitches->newest;
    while (stitch != NULL && stitch->base + stitch->offset != addr) {
        stitch = stitch->older;
    }
    return stitch != NULL && stitch_is_usable(stitch) ? stitch : NULL;
}

/* Maps the pages from n_old on.  On failure none of them is mapped, or the range is broken. */
static pya_status
stitch_map(struct pya_card *card, struct pya_stitch *stitch, size_t n_old) {
    size_t n_new = stitch->n_pages - n_old;
    size_t n_done;
    pya_dptr start = stitch->base + n_old * PYA_PAGE;
    pya_status st =
        pya_pages_map(&card->pages, card->dev, start, stitch->pages + n_old, n_new, &n_done);
    st = st == PYA_OK ? pya_device_set_access(card->dev, start, n_new * PYA_PAGE) : st;
    if (st != PYA_OK && n_done > 0 &&
        pya_device_unmap(card->dev, start, n_done * PYA_PAGE) != PYA_OK) {
        stitch->n_pages = n_old + n_done;
        stitch->is_broken = true;
    }
    return st;
}

/* An idle range is used again. */
static void
stitch_note_use(const struct pya_stitch *stitch) {
    struct pya_card *card = stitch->arena->card;
    card->n_in_vain = card->nest == stitch ? 0 : card->n_in_vain;
}

/* The range is about to change or to go: the card no longer keeps it free. */
static void
stitch_leave_nest(const struct pya_stitch *stitch) {
    struct pya_card *card = stitch->arena->card;
    card->nest = card->nest == stitch ? NULL : card->nest;
}

/* Counts the mappings from n_old on and makes the range known to its arena. */
static void
stitch_adopt(struct pya_stitch *stitch, size_t n_old) {
    struct pya_arena *arena = stitch->arena;
    for (size_t i = n_old; i < stitch->n_pages; i++) {
        pya_page_mapped(&arena->card->pages, stitch->pages[i]);
    }
    arena->stitches->n_mappings += stitch->n_pages - n_old;
    stitch_link(stitch);
}

/* Reserves as much address space again as the range needs, if addresses are not scarce. */
static pya_status
stitch_reserve(struct pya_stitch *stitch) {
    struct pya_card *card = stitch->arena->card;
    struct pya_device *dev = card->dev;
    size_t least = stitch->n_pages * PYA_PAGE;
    stitch->range_bytes = pya_stitch_is_whole(stitch) ? 2 * least : least; /* others never grow */
    pya_status st = pya_device_range_reserve(dev, stitch->range_bytes, &stitch->base);
    if (st != PYA_OK && stitch->range_bytes > least) {
        stitch->range_bytes = least;
        st = pya_device_range_reserve(dev, least, &stitch->base);
    }
    card->lacks_addresses = card->lacks_addresses || st != PYA_OK;
    return st;
}

pya_status
pya_stitch_make(
    struct pya_arena *arena, const struct pya_stitch_plan *plan, struct pya_stitch **out) {
    struct pya_card *card = arena->card;
    if (arena->stitches == NULL) {
        arena->stitches = calloc(1, sizeof *arena->stitches);
        if (arena->stitches == NULL) {
            return PYA_E_HOST_NOMEM;
        }
    }
    struct pya_stitch *stitch = malloc(sizeof *stitch + plan->n_pages * sizeof(pya_page_id));
    if (stitch == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    memcpy(stitch->pages, plan->ids, plan->n_pages * sizeof(pya_page_id));
    stitch->arena = arena;
    stitch->block = NULL;
    stitch->n_pages = plan->n_pages;
    stitch->offset = plan->offset;
    stitch->bytes = plan->bytes;
    stitch->is_shared = plan->offset % PYA_PAGE != 0 || plan->bytes % PYA_PAGE != 0;
    stitch->is_broken = false;
    pya_status st = stitch_reserve(stitch);
    if (st != PYA_OK) {
        goto free_stitch;
    }
    pya_card_claim(card, stitch->base, stitch->range_bytes);
    st = stitch_map(card, stitch, 0);
    if (st != PYA_OK && stitch->is_broken) {
        stitch_adopt(stitch, 0);
        return st;
    }
    if (st != PYA_OK) {
        goto release_range;
    }
    stitch_adopt(stitch, 0);
    card->stats.scalar[PYA_STAT_pyalloc_stitches]++;
    card->n_stitched++;
    card->stats.scalar[PYA_STAT_pyalloc_shared_ranges] += stitch->is_shared;
    *out = stitch;
    return PYA_OK;

release_range:
    (void)!pya_device_range_release(card->dev, stitch->base, stitch->range_bytes);
free_stitch:
    free(stitch);
    return st;
}

/* Makes sure that stitch_lend() has the records it needs. */
static pya_status
stitch_reserve_records(const struct pya_stitch *stitch) {
    size_t n_records;
    bool is_free = stitch_is_free(stitch, stitch->arena, &n_records);
    PYA_ASSERT(is_free);
    (void)is_free;
    return pya_slab_reserve(&stitch->arena->card->blocks, n_records + 1);
}

/* Carves what the range lends out of its pages' homes.  Records were reserved. */
static struct pya_block *
stitch_lend(struct pya_stitch *stitch, size_t bytes) {
    struct pya_arena *arena = stitch->arena;
    struct pya_card *card = arena->card;
    PYA_ASSERT(stitch->block == NULL && bytes <= stitch->bytes);
    stitch_note_use(stitch);
    struct pya_block *block = pya_slab_take(&card->blocks);
    *block = (struct pya_block){
        .addr = stitch->base + stitch->offset,
        .bytes = bytes,
        .stitch = stitch,
        .arena = arena,
        .state = PYA_BLOCK_STITCHED,
    };
    struct pya_block **link = &block->pieces;
    for (size_t i = pya_stitch_first(stitch); i < pya_stitch_end(stitch);) {
        struct piece part = stitch_piece(stitch, arena, i);
        PYA_ASSERT(part.n_pages > 0);
        if (part.run->arena != arena) {
            part.run = pya_arena_adopt(arena, part.run, part.addr, part.bytes);
        }
        struct pya_block *piece =
            pya_arena_carve(arena, part.run, part.addr, part.bytes, PYA_BLOCK_LENT);
        piece->owner = block;
        pya_history_note(
            card->history, PYA_ACTION_SEGMENT_UNMAP, piece->addr, piece->bytes,
            pya_arena_place(arena));
        *link = piece;
        link = &piece->next_piece;
        i += part.n_pages;
    }
    *link = NULL;
    stitch->block = block;
    arena->wasted_bytes += stitch->bytes - bytes;
    stitch_unlink(stitch);
    stitch_link(stitch);
    pya_stats_add(&card->stats, PYA_STAT_LARGE, PYA_STAT_segment, 1);
    pya_history_note(
        card->history, PYA_ACTION_SEGMENT_ALLOC, block->addr, stitch->bytes,
        pya_arena_place(arena));
    return block;
}

pya_status
pya_stitch_take(struct pya_stitch *stitch, size_t bytes, struct pya_block **out) {
    pya_status st = stitch_reserve_records(stitch);
    if (st == PYA_OK) {
        *out = stitch_lend(stitch, bytes);
    }
    return st;
}

pya_status
pya_stitch_extend(
    struct pya_stitch *old, const pya_page_id *ids, size_t n_pages, size_t bytes,
    struct pya_block **out) {
    size_t n_old = old->n_pages;
    size_t n = n_old + n_pages;
    PYA_ASSERT(old->block == NULL && old->range_bytes >= n * PYA_PAGE);
    struct pya_stitch *longer = malloc(sizeof *longer + n * sizeof(pya_page_id));
    if (longer == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    memcpy(longer, old, sizeof *old + n_old * sizeof(pya_page_id));
    memcpy(longer->pages + n_old, ids, n_pages * sizeof(pya_page_id));
    longer->n_pages = n;
    longer->bytes = n * PYA_PAGE;
    struct pya_card *card = old->arena->card;
    pya_status st = stitch_reserve_records(longer);
    st = st == PYA_OK ? stitch_map(card, longer, n_old) : st;
    if (st != PYA_OK && !longer->is_broken) {
        free(longer);
        return st;
    }
    stitch_unlink(old);
    stitch_note_use(old);
    stitch_leave_nest(old);
    free(old);
    stitch_adopt(longer, n_old);
    if (st == PYA_OK) {
        card->stats.scalar[PYA_STAT_pyalloc_stitches]++;
        *out = stitch_lend(longer, bytes);
    }
    return st;
}

void
pya_stitch_give(struct pya_block *block) {
    struct pya_arena *arena = block->arena;
    struct pya_history *history = arena->card->history;
    struct pya_stitch *stitch = block->stitch;
    struct pya_block *piece = block->pieces;
    pya_history_note(
        history, PYA_ACTION_SEGMENT_FREE, block->addr, stitch->bytes, pya_arena_place(arena));
    while (piece != NULL) {
        struct pya_block *next = piece->next_piece;
        pya_history_note(
            history, PYA_ACTION_SEGMENT_MAP, piece->addr, piece->bytes, pya_arena_place(arena));
        (void)pya_arena_give(arena, piece);
        piece = next;
    }
    stitch->block = NULL;
    arena->wasted_bytes -= stitch->bytes - block->bytes;
    pya_slab_put(&arena->card->blocks, block);
    pya_stats_sub(&arena->card->stats, PYA_STAT_LARGE, PYA_STAT_segment, 1);
    pya_arena_offer(arena);
}

static void
stitch_forget(struct pya_stitch *stitch) {
    struct pya_card *card = stitch->arena->card;
    for (size_t i = 0; i < stitch->n_pages; i++) {
        pya_page_unmapped(&card->pages, stitch->pages[i]);
    }
    stitch->arena->stitches->n_mappings -= stitch->n_pages;
    stitch_unlink(stitch);
    stitch_leave_nest(stitch);
    free(stitch);
}

pya_status
pya_stitch_destroy(struct pya_stitch *stitch) {
    struct pya_card *card = stitch->arena->card;
    PYA_ASSERT(stitch->block == NULL);
    size_t range_bytes = stitch->range_bytes;
    pya_dptr base = stitch->base;
    pya_status st = pya_device_unmap(card->dev, base, stitch->n_pages * PYA_PAGE);
    if (st != PYA_OK) {
        return st;
    }
    card->stats.scalar[PYA_STAT_pyalloc_unmaps]++;
    stitch_forget(stitch);
    /* Address space that cannot be released is lost, but no memory is. */
    (void)!pya_device_range_release(card->dev, base, range_bytes);
    return PYA_OK;
}

void
pya_stitches_destroy(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    if (arena->stitches == NULL) {
        return;
    }
    struct pya_stitch *stitch = arena->stitches->newest;
    while (stitch != NULL) {
        struct pya_stitch *older = stitch->older;
        (void)!pya_device_unmap(card->dev, stitch->base, stitch->n_pages * PYA_PAGE);
        (void)!pya_device_range_release(card->dev, stitch->base, stitch->range_bytes);
        stitch_forget(stitch);
        stitch = older;
    }
    free(arena->stitches);
    arena->stitches = NULL;
}

static size_t
stitch_check(const struct pya_stitch *stitch) {
    const struct pya_block *block = stitch->block;
    if (block == NULL) {
        return 0;
    }
    size_t lent = 0;
    size_t n_wrong = 0;
    for (const struct pya_block *p = block->pieces; p != NULL; p = p->next_piece) {
        n_wrong += p->state != PYA_BLOCK_LENT || p->owner != block;
        lent += p->bytes;
    }
    if (block->stitch != stitch || block->state != PYA_BLOCK_STITCHED || lent < block->bytes ||
        n_wrong > 0) {
        (void)fprintf(
            stderr, "stitch %#llx: %zu bytes lent for %zu, %zu pieces not its own\n",
            (unsigned long long)stitch->base, lent, block->bytes, n_wrong);
        return n_wrong + 1;
    }
    return 0;
}

size_t
pya_stitches_host_bytes(const struct pya_arena *arena) {
    size_t bytes = arena->stitches == NULL ? 0 : sizeof *arena->stitches;
    const struct pya_stitch *stitch = arena->stitches == NULL ? NULL : arena->stitches->newest;
    for (; stitch != NULL; stitch = stitch->older) {
        bytes += sizeof *stitch + stitch->n_pages * sizeof(pya_page_id);
    }
    return bytes;
}

size_t
pya_stitches_check(const struct pya_arena *arena) {
    size_t n_wrong = 0;
    size_t n_mappings = 0;
    size_t wasted_bytes = 0;
    if (arena->stitches == NULL) {
        return 0;
    }
    const struct pya_stitch *stitch = arena->stitches->newest;
    for (; stitch != NULL; stitch = stitch->older) {
        n_mappings += stitch->n_pages;
        n_wrong += stitch_check(stitch);
        wasted_bytes += stitch->block == NULL ? 0 : stitch->bytes - stitch->block->bytes;
    }
    if (wasted_bytes != arena->wasted_bytes) {
        (void)fprintf(
            stderr, "stitches: %zu bytes unused, %zu counted\n", wasted_bytes, arena->wasted_bytes);
        n_wrong++;
    }
    if (n_mappings != arena->stitches->n_mappings) {
        (void)fprintf(
            stderr, "stitches: %zu mappings, %zu counted\n", n_mappings,
            arena->stitches->n_mappings);
        n_wrong++;
    }
    return n_wrong;
}
