/* Following a layout.  Floor 8. */
#include "lay.h"

#include <stdlib.h>

#include "debug.h"
#include "move.h"
#include "repeat_internal.h"

/* Limit of blocks passed to find what covers an address: more than a page can hold of the smallest ones. */
enum { LAY_STEPS = 2 * PYA_PAGE / PYA_ALIGN };

_Static_assert(PYA_LAYOUT_MOST + 2 <= REPEAT_KEPT, "a layout and its ends are remembered whole");

/* Adds a request that matches no other, so that no size is looked up across the layout's ends. */
static void
lay_end(struct pya_arena *arena) {
    struct pya_repeat *repeat = arena->repeat;
    arena->littles->first[repeat->n] = arena->littles->n;
    repeat->n++;
}

static void
lay_little(struct pya_littles *littles, pya_dptr addr, size_t bytes) {
    littles->kept[littles->n++] = addr / PYA_ALIGN << LITTLE_SIZE_BITS | bytes / PYA_ALIGN;
}

static void
lay_large(struct pya_arena *arena, pya_dptr addr, const struct pya_layout_place *place) {
    struct pya_repeat *repeat = arena->repeat;
    size_t n = repeat->n;
    uint64_t mixed = repeat_mixed((size_t)place->bytes);
    uint64_t units = place->bytes / PYA_ALIGN;
    repeat->kept[n] = addr / PYA_ALIGN << REPEAT_SIZE_BITS | mixed;
    repeat->recent = repeat_recent(repeat, mixed);
    repeat->places[repeat_place(repeat->recent)] = (uint32_t)n;
    arena->littles->first[n] = arena->littles->n;
    arena->stays[n].units = units < UINT32_MAX ? (uint32_t)units : UINT32_MAX;
    arena->stays[n].life = place->life < UINT32_MAX ? (uint32_t)place->life : 0;
    repeat->n++;
}

/* False: no host memory. */
static bool
lay_make_room(struct pya_arena *arena) {
    arena->repeat = calloc(1, sizeof *arena->repeat + REPEAT_KEPT * sizeof *arena->repeat->kept);
    arena->stays = calloc(REPEAT_KEPT, sizeof *arena->stays);
    arena->littles = calloc(1, sizeof *arena->littles);
    if (arena->repeat != NULL && arena->stays != NULL && arena->littles != NULL) {
        return true;
    }
    free(arena->repeat);
    free(arena->stays);
    free(arena->littles);
    arena->repeat = NULL;
    arena->stays = NULL;
    arena->littles = NULL;
    return false;
}

/* The arena has served nothing yet.  A layout that needs a larger card is ignored. */
static void
lay_begin(struct pya_arena *arena, const struct pya_layout *layout) {
    struct pya_block *hole;
    size_t bytes;
    if (!pya_layout_measure(layout, &bytes) || bytes == 0 ||
        bytes > arena->card->caps.total_bytes ||
        pya_arena_last_hole(arena, pya_pages_for(bytes), &hole) != PYA_OK ||
        !lay_make_room(arena)) {
        return;
    }
    struct pya_repeat *repeat = arena->repeat;
    repeat->laid_from = hole->addr;
    repeat->laid_to = hole->addr + bytes;
    lay_end(arena);
    for (size_t i = 0; i < layout->n; i++) {
        const struct pya_layout_place *place = &layout->places[i];
        bool is_placed = place->offset != PYA_LAYOUT_ANYWHERE;
        pya_dptr addr = is_placed ? hole->addr + place->offset : 0; /* where nothing ever lies */
        bool is_of_period = layout->n - i <= layout->n_period;
        if (place->bytes < PYA_REPEAT_FROM) {
            lay_little(arena->littles, addr, (size_t)place->bytes);
            continue;
        }
        lay_large(arena, addr, place);
        repeat->laid_period += is_of_period;
    }
    lay_end(arena);
    arena->littles->is_followed = true;
    repeat->n_room = REPEAT_KEPT;
    repeat->n_most = REPEAT_KEPT;
    repeat->n_laid = repeat->n;
    repeat->is_laid = true;
    repeat->n_review = repeat->n + REPEAT_KEPT;
    repeat->follow = 1;
    repeat->streak = repeat->n;
    repeat->is_promising = true;
}

pya_status
pya_lay_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out) {
    bool is_first = pool == NULL && card->common == NULL;
    pya_status st = pya_pool_arena(card, pool, stream, out);
    if (st != PYA_OK || !is_first || (*out)->small_fit != NULL) {
        return st;
    }
    const struct pya_layout *layout = pya_layout_of(card->options.layouts, card->index);
    if (layout != NULL) {
        lay_begin(*out, layout);
    }
    return PYA_OK;
}

static size_t
hole_pages(const struct pya_block *hole, pya_dptr end) {
    return pya_pages_for((pya_block_end(hole) < end ? pya_block_end(hole) : end) - hole->addr);
}

/* The lowest hole in an otherwise free place, and the number of pages that all its holes lack.  NULL: there is no
 * hole, or the place is not free. */
static struct pya_block *
lay_hole(const struct pya_arena *arena, pya_dptr addr, size_t bytes, size_t *n_pages) {
    struct pya_range *range = arena->ranges;
    *n_pages = 0;
    while (range != NULL && (addr < range->base || addr + bytes > range->base + range->bytes)) {
        PYA_STEP();
        range = range->next;
    }
    if (range == NULL || range->slots == NULL) {
        return NULL;
    }
    /* Only the first slot of the last hole is in use. */
    size_t slot = pya_range_slot(range, addr + bytes - 1);
    bool is_behind = slot >= range->n_slots;
    pya_dptr last = is_behind ? pya_range_addr(range, range->n_slots - 1) : addr + bytes - 1;
    struct pya_block *hole = NULL;
    struct pya_block *block = pya_range_block_at(range, last, LAY_STEPS);
    for (; block != NULL; block = block->prev) {
        PYA_STEP();
        if (block->state == PYA_BLOCK_HOLE) {
            hole = block;
            *n_pages += hole_pages(block, addr + bytes);
        } else if (!pya_arena_has_run(arena, block)) {
            return NULL;
        }
        if (block->addr <= addr) {
            return hole;
        }
    }
    return NULL;
}

/* Creating pages that are not available costs one call a page, and the same again to release them. */
static bool
lay_has_room(const struct pya_arena *arena, size_t n_pages) {
    size_t free_bytes;
    size_t total_bytes;
    return pya_device_mem_info(arena->card->dev, &free_bytes, &total_bytes) != PYA_OK ||
           n_pages <= free_bytes / PYA_PAGE;
}

bool
pya_lay_lacks(struct pya_arena *arena, pya_dptr addr, size_t bytes) {
    const bool is_laid = arena->repeat->is_laid && addr != 0;
    size_t n_pages = 0;
    bool is_free = is_laid && lay_hole(arena, addr, bytes, &n_pages) != NULL;
    arena->lacks_pages = is_free ? n_pages : 0;
    return is_free;
}

/* Creates pages up to that address, or beyond while below the level of garbage collection: everything between the
 * layout's ends is used in each step sooner or later. */
static pya_status
lay_grow(
    struct pya_arena *arena, struct pya_block *hole, pya_dptr end, bool is_ahead, bool is_small) {
    const struct pya_repeat *repeat = arena->repeat;
    const struct pya_card *card = arena->card;
    const size_t n_all = pya_pages_for(repeat->laid_to - repeat->laid_from);
    const size_t level = card->usage.level_bytes;
    const size_t reserved = card->reserved_bytes;
    const size_t n_room = level > reserved ? (level - reserved) / PYA_PAGE : 0;
    const size_t n_pages = hole_pages(hole, end);
    const bool is_between = hole->addr >= repeat->laid_from && hole->addr < repeat->laid_to;
    const size_t n_ahead = is_between ? hole_pages(hole, repeat->laid_to) : 0;
    const size_t n_most = n_ahead < n_room ? n_ahead : n_room;
    return pya_pages_grow_foreseen(
        arena, hole, n_pages, is_ahead && n_most > n_pages ? n_most : n_pages, n_all, is_small);
}

pya_status
pya_lay_fill(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    const struct pya_repeat *repeat = arena->repeat;
    bool is_large = bytes >= PYA_REPEAT_FROM;
    pya_dptr addr = is_large ? repeat_addr(repeat, repeat->like) : pya_littles_place(arena, bytes);
    size_t n_pages;
    struct pya_block *hole = lay_hole(arena, addr, bytes, &n_pages);
    pya_status st = PYA_OK;
    *out = NULL;
    arena->lacks_pages = 0;
    if (hole == NULL || !lay_has_room(arena, n_pages)) {
        return PYA_OK;
    }
    /* NULL: it was filled, or taken, while others had the lock. */
    bool is_ahead = true;
    while (hole != NULL && st == PYA_OK) {
        st = lay_grow(arena, hole, addr + bytes, is_ahead, is_small);
        if (is_ahead && pya_is_shortage(st)) {
            is_ahead = false;
            st = PYA_OK;
        }
        hole = st == PYA_OK ? lay_hole(arena, addr, bytes, &n_pages) : NULL;
    }
    st = st == PYA_OK ? pya_slab_reserve(&arena->card->blocks, 2) : st;
    if (st != PYA_OK) {
        return pya_is_shortage(st) ? PYA_OK : st;
    }
    struct pya_block *run = pya_repeat_run_at(arena, addr, bytes, SIZE_MAX);
    if (run != NULL) {
        *out = pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED);
        pya_lay_count(arena);
    }
    return PYA_OK;
}

void
pya_lay_count(const struct pya_arena *arena) {
    const struct pya_repeat *repeat = arena->repeat;
    arena->card->stats.scalar[PYA_STAT_pyalloc_planned] += repeat->follow < repeat->n_laid;
}
