/* A range: reserved address space tiled by home blocks.  Floor 5.
 *
 * sum(block.bytes) == bytes; blocks are in address order; no two FREE blocks of one arena touch.  Holes belong to the
 * arena that made the range; other blocks may belong to other arenas (annex.h), but each page belongs to one arena
 * only.
 * With virtual memory a range is cut into slots of one page.  For each slot the range knows the last block that
 * starts in it, so the block that covers a page is found without walking the list.  A plain segment (cudaMalloc) is a
 * range without slots. */
#pragma once

#include "block.h"
#include "page.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_slot {
    struct pya_block *last_start; /* NULL: no block starts in this slot */
    pya_page_id page;             /* mapped here; PYA_NO_PAGE in a hole */
};

/* A page may hold thousands of small blocks, so for each part of a page the block found last is remembered. */
enum { PYA_RANGE_RECENT = 128, PYA_RANGE_PART_SHIFT = PYA_PAGE_SHIFT - 6 };

struct pya_range {
    struct pya_range *next; /* of the arena */
    struct pya_arena *arena;
    pya_dptr base;
    size_t bytes;
    struct pya_block *first;
    struct pya_slot *slots; /* NULL: a plain segment */
    uint64_t *starts;       /* bit s == (slots[s].last_start != NULL) */
    size_t n_slots;         /* slots in use: all mapped ones and the first slot of the last hole */
    size_t n_room;
    size_t n_mapped; /* slots with a page, without dead ones; 1 for a plain segment */
    size_t n_dead;   /* dead blocks */
    bool is_small;   /* plain segment of the small pool */
    uint64_t order;  /* plain segment: the arena's seq when it was added */
    /* For each part: the block that pya_range_block_at() found last, or one next to it; linked, or NULL. */
    struct pya_block **recent;
};

/* Makes slots 0 .. n - 1 usable.  Needs host memory only. */
PYA_MUST_CHECK pya_status pya_range_reserve_slots(struct pya_range *range, size_t n);
void pya_range_fini(struct pya_range *range);

/* Host memory besides the record itself. */
static inline size_t
pya_range_host_bytes(const struct pya_range *range) {
    size_t recent = range->recent == NULL ? 0 : PYA_RANGE_RECENT * sizeof(struct pya_block *);
    return range->n_room * sizeof(struct pya_slot) + range->n_room / 8 + recent;
}

static inline size_t
pya_range_slot(const struct pya_range *range, pya_dptr addr) {
    return (size_t)((addr - range->base) >> PYA_PAGE_SHIFT);
}

static inline pya_dptr
pya_range_addr(const struct pya_range *range, size_t slot) {
    return range->base + ((pya_dptr)slot << PYA_PAGE_SHIFT);
}

/* The page mapped at an address.  Its slot must be in use. */
static inline pya_page_id
pya_range_page(const struct pya_range *range, pya_dptr addr) {
    return range->slots[pya_range_slot(range, addr)].page;
}

/* The pages that lie wholly in a home block: the slot of the first one and the slot after the last one; end < first
 * if there is none. */
static inline size_t
pya_block_first_slot(const struct pya_block *block) {
    return pya_range_slot(block->range, pya_round_up(block->addr, PYA_PAGE));
}

static inline size_t
pya_block_end_slot(const struct pya_block *block) {
    return pya_range_slot(block->range, pya_round_down(pya_block_end(block), PYA_PAGE));
}

/* Whether a neighbour starts in the same slot is as random as the blocks' sizes are. */
static inline bool
pya_range_starts_in(const struct pya_range *range, const struct pya_block *block, size_t slot) {
    return PYA_LIKELY(block != NULL) && PYA_RANDOM(pya_range_slot(range, block->addr) == slot);
}

/* Call after linking the block. */
static inline void
pya_range_add_start(struct pya_range *range, struct pya_block *block) {
    if (range->slots == NULL) {
        return;
    }
    size_t s = pya_range_slot(range, block->addr);
    struct pya_block *last = range->slots[s].last_start;
    last = PYA_RANDOM(pya_range_starts_in(range, block->next, s)) ? last : block;
    range->slots[s].last_start = last;
    range->starts[s / 64] |= (uint64_t)1 << (s % 64);
}

/* Call before unlinking the block. */
static inline void
pya_range_drop_start(struct pya_range *range, const struct pya_block *block) {
    if (range->slots == NULL) {
        return;
    }
    size_t s = pya_range_slot(range, block->addr);
    struct pya_block *last = range->slots[s].last_start;
    struct pya_block *heir =
        PYA_RANDOM(pya_range_starts_in(range, block->prev, s)) ? block->prev : NULL;
    last = PYA_RANDOM(pya_range_starts_in(range, block->next, s)) ? last : heir;
    range->slots[s].last_start = last;
    range->starts[s / 64] &= ~((uint64_t)(last == NULL) << (s % 64));
}

/* Links block directly below `above`, which may be NULL only in an empty range. */
void
pya_range_link_below(struct pya_range *range, struct pya_block *above, struct pya_block *block);
void
pya_range_link_above(struct pya_range *range, struct pya_block *below, struct pya_block *block);
void pya_range_unlink(struct pya_range *range, struct pya_block *block);
/* Marks a USED block as dead: it stays mapped, but its pages have their homes elsewhere, or none. */
static inline void
pya_range_kill(struct pya_range *range, struct pya_block *block) {
    block->state = PYA_BLOCK_DEAD;
    range->n_dead++;
}

/* The home block that covers an address in a slot in use.  NULL: more than n_most blocks lie between it and the known
 * ones. */
struct pya_block *pya_range_block_at(struct pya_range *range, pya_dptr addr, size_t n_most);
/* The FREE run that covers the whole slot; NULL if any byte of the slot is not free. */
struct pya_block *pya_range_free_run(const struct pya_range *range, size_t slot);
/* Checks only the structure: tiling, links and slots.  Prints each violation and returns their number. */
size_t pya_range_check(const struct pya_range *range);

#ifdef __cplusplus
}
#endif
