/* A block: a run of bytes with one owner.  Floor 2.
 *
 * Home blocks tile a range: every byte of a range lies in exactly one home block; blocks are linked in address order.
 * A stitched block is a live block outside that tiling: home blocks have LENT its bytes. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_arena;
struct pya_block;
struct pya_range;
struct pya_stitch;
struct pya_use;

enum pya_block_state {
    PYA_BLOCK_FREE, /* in the arena's fit index; never beside another FREE block */
    PYA_BLOCK_USED, /* handed out at its home address */
    PYA_BLOCK_LENT, /* its bytes are part of the stitched block `owner`, or hidden (nest.h) if NULL */
    PYA_BLOCK_HOLE,     /* address space without a page */
    PYA_BLOCK_DEAD,     /* still mapped, but the home of its pages is elsewhere now */
    PYA_BLOCK_STITCHED, /* handed out at a stitched address; not in any range */
};

struct pya_block {
    pya_dptr addr;
    size_t bytes;
    union {
        struct pya_block *prev;    /* home: the neighbour below, NULL at the range's start */
        struct pya_stitch *stitch; /* STITCHED */
    };
    union {
        struct pya_block *next;   /* home: the neighbour above */
        struct pya_block *pieces; /* STITCHED: the LENT blocks, in order of stitched address */
    };
    struct pya_arena *arena;
    struct pya_range *range; /* NULL when STITCHED */
    union {
        struct { /* FREE */
            union {
                struct { /* ring of runs of one size; NULL: the only one */
                    struct pya_block *before, *after;
                };
                struct { /* tree of runs of similar sizes */
                    struct pya_block *left, *right;
                };
            };
            uint64_t seq; /* the arena's seq when these bytes last became free */
        };
        struct { /* USED, STITCHED */
            size_t requested;
            struct pya_use *uses;
            void *context; /* call stack of the allocation, owned */
        };
        struct { /* LENT */
            struct pya_block *next_piece;
            struct pya_block *owner;
        };
        struct { /* HOLE: the arena's chain */
            struct pya_block *prev_gap, *next_gap;
        };
    };
    union {
        uint32_t n_events;  /* pending: events that have not completed */
        uint32_t n_request; /* USED, STITCHED: its number in repeat.c; 0: none */
    };
    uint8_t state;   /* enum pya_block_state */
    bool is_small;   /* USED, STITCHED: counted in torch's small pool */
    bool is_pending; /* freed by its user, waiting for recorded streams */
    uint8_t recent;  /* home: its number among the range's recent blocks, from 1; 0: none */
};

static inline pya_dptr
pya_block_end(const struct pya_block *block) {
    return block->addr + block->bytes;
}

static inline bool
pya_block_is(const struct pya_block *block, enum pya_block_state state) {
    return block != NULL && block->state == state;
}

/* Number of pages needed for `bytes` from a page's start on. */
static inline size_t
pya_pages_for(size_t bytes) {
    return (bytes + PYA_PAGE - 1) >> PYA_PAGE_SHIFT;
}

/* Number of pages that lie wholly in [addr, addr + bytes). */
static inline size_t
pya_run_pages(pya_dptr addr, size_t bytes) {
    int64_t first = (int64_t)((addr + PYA_PAGE - 1) >> PYA_PAGE_SHIFT);
    int64_t n = (int64_t)((addr + bytes) >> PYA_PAGE_SHIFT) - first;
    return (size_t)(n & ~(n >> 63)); /* n < 0 means 0; computed without a branch */
}

#ifdef __cplusplus
}
#endif
