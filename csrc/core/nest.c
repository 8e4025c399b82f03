/* The nest.  Floor 7. */
#include "nest.h"

#include "debug.h"

/* In programs with fewer pages, a growth of two pages is too much for what it spares. */
#ifdef PYA_TEST_TINY
enum { NEST_FROM = 8 };
#else
enum { NEST_FROM = 128 };
#endif
/* The tensor has not grown for so many requests that took some of the nest: it will not grow any more. */
enum { NEST_LOANS = 64 };
/* Where so many ranges in a row were hidden in vain, as several tensors grow in turn and each needs the memory that the
 * one before left, only one in NEST_RETRY is hidden until one is used again: one tensor may have been too small so far. */
enum { NEST_IN_VAIN = 6, NEST_RETRY = 32 };

/* Hidden bytes are inactive: those outside of wholly free pages stay part of inactive_split. */
static void
nest_count(struct pya_card *card, const struct pya_block *piece, int sign) {
    const size_t n_pages = pya_run_pages(piece->addr, piece->bytes);
    pya_stats_count_split(&card->stats, piece->bytes - n_pages * PYA_PAGE, sign);
}

/* Hides the arena's free bytes in [addr, end).  Two records were reserved. */
static void
nest_hide(struct pya_arena *arena, struct pya_range *range, pya_dptr addr, pya_dptr end) {
    struct pya_card *card = arena->card;
    struct pya_block *block = pya_range_block_at(range, addr, SIZE_MAX);
    for (; block != NULL && block->addr < end; block = block->next) {
        PYA_STEP();
        if (!pya_arena_has_run(arena, block)) {
            continue;
        }
        const pya_dptr from = block->addr > addr ? block->addr : addr;
        const pya_dptr to = pya_block_end(block) < end ? pya_block_end(block) : end;
        block = pya_arena_carve(arena, block, from, (size_t)(to - from), PYA_BLOCK_LENT);
        block->owner = NULL;
        block->next_piece = card->hidden;
        card->hidden = block;
        nest_count(card, block, 1);
    }
}

/* Hides the free bytes of an idle range.  Without host memory they stay free. */
static void
nest_close(struct pya_card *card, const struct pya_stitch *nest) {
    const struct pya_page *items = card->pages.items;
    size_t n_records = 0;
    for (size_t i = 0; i < nest->n_pages; i += pya_stitch_row(nest, i, SIZE_MAX)) {
        n_records += 2;
    }
    if (pya_slab_reserve(&card->blocks, n_records) != PYA_OK) {
        return;
    }
    for (size_t i = 0; i < nest->n_pages;) {
        const size_t n = pya_stitch_row(nest, i, SIZE_MAX);
        const struct pya_page *page = &items[nest->pages[i]];
        if (page->range != NULL) {
            const pya_dptr addr = pya_range_addr(page->range, page->slot);
            nest_hide(nest->arena, page->range, addr, addr + n * PYA_PAGE);
        }
        i += n;
    }
}

/* Does the tensor that left this range grow?  Then its next size has just been made and lives.  Results that are larger
 * in each step of a program, but live one at a time, leave their memory to the rest of the step. */
static bool
nest_grows(const struct pya_stitch *stitch) {
    const struct pya_arena *arena = stitch->arena;
    const struct pya_stitch *newest = arena->stitches->newest;
    return pya_arena_is_growing(arena) && pya_grows_to(stitch->n_pages, arena->large_pages) &&
           newest->block != NULL && pya_grows_to(stitch->n_pages, newest->n_pages);
}

void
pya_nest_give(struct pya_block *block) {
    struct pya_stitch *stitch = block->stitch;
    const struct pya_arena *arena = block->arena;
    struct pya_card *card = arena->card;
    pya_stitch_give(block);
    if (arena->pool == NULL && card->pages.n_live >= NEST_FROM && pya_stitch_is_whole(stitch) &&
        nest_grows(stitch)) {
        pya_nest_open(card);
        card->nest = stitch;
        card->n_loans = 0;
        card->n_in_vain++;
        if (card->n_in_vain <= NEST_IN_VAIN || card->n_in_vain % NEST_RETRY == 0) {
            nest_close(card, stitch);
        }
    }
}

void
pya_nest_close(struct pya_card *card) {
    const struct pya_stitch *nest = card->nest;
    if (++card->n_loans > NEST_LOANS) {
        card->nest = NULL;
    } else if (nest != NULL && nest->block == NULL && card->hidden == NULL) {
        nest_close(card, nest);
    }
}

void
pya_nest_open(struct pya_card *card) {
    while (card->hidden != NULL) {
        struct pya_block *piece = card->hidden;
        PYA_STEP();
        card->hidden = piece->next_piece;
        nest_count(card, piece, -1);
        (void)pya_arena_give(piece->arena, piece);
    }
}
