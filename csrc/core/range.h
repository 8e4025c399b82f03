/* A range: reserved address space tiled by home blocks.  Floor 5.
 *
 * sum(block.bytes) == bytes, blocks are in address order, no two FREE ones of one arena touch.  Holes belong to the
 * arena that made the range; other blocks may be another's (annex.h), a page never has parts of two arenas.
 * With virtual memory a range is cut into slots of one page.  For each slot the range knows the last block
 * that starts in it, so the block that covers a page is found without walking the list.  A plain segment
 * (cudaMalloc) is a range without slots. */
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

/* A page of small blocks may have thousands: in each part of it the block found latest is known. */
enum { PYA_RANGE_RECENT = 128, PYA_RANGE_PART_SHIFT = PYA_PAGE_SHIFT - 6 };

struct pya_range {
    struct pya_range *next; /* of the arena */
    struct pya_arena *arena;
    pya_dptr base;
    size_t bytes;
    struct pya_block *first;
    struct pya_slot *slots; /* NULL: a plain segment */
    uint64_t *starts;       /* bit s == (slots[s].last_start != NULL) */
    size_t n_slots;         /* slots in use: all mapped ones and the first of the last hole */
    size_t n_room;
    size_t n_mapped; /* slots with a page, dead ones not counted; 1 for a plain segment */
    size_t n_dead;   /* dead blocks */
    bool is_small;   /* plain segment of the small pool */
    uint64_t order;  /* plain segment: the arena's seq when it came */
    /* By part: what pya_range_block_at() found latest, or what was beside it; linked, or NULL. */
    struct pya_block **recent;
};

/* Slots 0 .. n - 1 can be used; host memory only. */
PYA_MUST_CHECK pya_status pya_range_reserve_slots(struct pya_range *range, size_t n);
void pya_range_fini(struct pya_range *range);

/* Beside the record. */
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

/* The page mapped at an address in a slot in use. */
static inline pya_page_id
pya_range_page(const struct pya_range *range, pya_dptr addr) {
    return range->slots[pya_range_slot(range, addr)].page;
}

/* The pages that lie in a home block as a whole: the first one's slot, and that behind the last, less where there is none. */
static inline size_t
pya_block_first_slot(const struct pya_block *block) {
    return pya_range_slot(block->range, pya_round_up(block->addr, PYA_PAGE));
}

static inline size_t
pya_block_end_slot(const struct pya_block *block) {
    return pya_range_slot(block->range, pya_round_down(pya_block_end(block), PYA_PAGE));
}

/* Whether a neighbour starts in the same slot is as random as the blocks' sizes. */
static inline bool
pya_range_starts_in(const struct pya_range *range, const struct pya_block *block, size_t slot) {
    return PYA_LIKELY(block != NULL) && PYA_RANDOM(pya_range_slot(range, block->addr) == slot);
}

/* block is linked. */
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

/* block is linked still. */
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

/* Links block directly below `above` (NULL is allowed only in an empty range). */
void
pya_range_link_below(struct pya_range *range, struct pya_block *above, struct pya_block *block);
void
pya_range_link_above(struct pya_range *range, struct pya_block *below, struct pya_block *block);
void pya_range_unlink(struct pya_range *range, struct pya_block *block);
/* A USED block that stays mapped, but whose pages have their homes elsewhere, or none. */
static inline void
pya_range_kill(struct pya_range *range, struct pya_block *block) {
    block->state = PYA_BLOCK_DEAD;
    range->n_dead++;
}

/* The home block that covers an address of a slot in use; NULL: more than n_most blocks lie between it and those known. */
struct pya_block *pya_range_block_at(struct pya_range *range, pya_dptr addr, size_t n_most);
/* The FREE run that covers the whole slot; NULL when any byte of it is not free. */
struct pya_block *pya_range_free_run(const struct pya_range *range, size_t slot);
/* Structure only: tiling, links, slots.  Prints each violation and returns their number. */
size_t pya_range_check(const struct pya_range *range);

#ifdef __cplusplus
}
#endif
