/* Data structures of the two models of torch's allocator.  Floor 2, private. */
#pragma once

#include "../core/debug.h"
#include "model.h"
#include "tree.h"

#define MODEL_SMALL_SEGMENT ((size_t)2 << 20)
#define MODEL_LARGE_SEGMENT ((size_t)20 << 20)
#define MODEL_MIN_LARGE ((size_t)10 << 20)  /* from here a request gets a segment of its own */
#define MODEL_SPLIT_LARGE ((size_t)1 << 20) /* a large block splits when more than this remains */

/* An address range that is mapped and unmapped in units. */
struct model_segment {
    struct model_segment *next;
    pya_dptr base;
    size_t bytes;
    size_t unit;            /* bytes of one page handle; mappings are multiples of it */
    pya_page_handle *units; /* one per unit; 0: not mapped */
};

/* The blocks of a segment tile it, linked by prev and next in address order.  Two neighbours are never both free with the same
 * is_mapped.  A free block is in its pool's `free` tree, or in `unmapped` if it is not mapped. */
struct pya_model_block {
    struct tree_node node; /* first; key is bytes in `free`, 0 in `unmapped` */
    pya_dptr addr;
    size_t bytes;
    struct pya_model_block *prev;
    struct pya_model_block *next;
    struct model_segment *segment;    /* NULL with plain segments */
    struct pya_model_block *all_prev; /* every block of the model */
    struct pya_model_block *all_next;
    struct model_event *uses; /* one per other stream that uses it; not recorded yet */
    unsigned n_events;        /* events still pending; the block is free only at 0 */
    uint16_t stream;
    uint16_t pool;
    bool is_large;
    bool is_allocated;
    bool is_mapped;
};

struct model_pool {
    struct tree_node *free;
    struct tree_node *unmapped;
};

/* One pool. */
struct model_pool_set {
    unsigned n_users; /* of a private pool; at 0 its cache may be released */
    uint64_t caching[PYA_MODEL_STREAMS / 64]; /* bit per stream: it may have free blocks */
    struct model_pool by_stream[][2];         /* [config.n_streams][is_large] */
};

/* Before its block is freed: one entry of block->uses.  Afterwards: one pending event of a stream. */
struct model_event {
    struct model_event *next;
    pya_event event;
    struct pya_model_block *block;
    uint16_t stream;
};

struct model_stream {
    pya_stream stream;         /* what the device is told */
    struct model_event *first; /* oldest first */
    struct model_event **last;
};

struct pya_model {
    struct pya_device *dev;
    struct pya_model_config config;
    size_t total_bytes;                            /* of the device */
    uint64_t n_addresses;                          /* in no segment yet */
    struct model_pool_set *pools[PYA_MODEL_POOLS]; /* 0 is the default one; NULL before first use */
    uint64_t caching[PYA_MODEL_POOLS / 64];        /* bit per pool: it may have free blocks */
    unsigned pool;                                 /* of new requests */
    struct model_stream *streams;                  /* config.n_streams of them */
    uint64_t waiting[PYA_MODEL_STREAMS / 64];      /* bit per stream: it has pending events */
    struct model_segment *segments;
    struct pya_model_block *blocks;
    struct pya_model_block *spare; /* linked by next */
    struct pya_model_stats stats;
};

static inline void
bits_set(uint64_t *bits, unsigned bit) {
    bits[bit / 64] |= UINT64_C(1) << bit % 64;
}

static inline void
bits_clear(uint64_t *bits, unsigned bit) {
    bits[bit / 64] &= ~(UINT64_C(1) << bit % 64);
}

static inline bool
bits_has(const uint64_t *bits, unsigned bit) {
    return (bits[bit / 64] >> bit % 64 & 1) != 0;
}

/* The next bit that is set, from `bit` on; n: there is none. */
static inline unsigned
bits_next(const uint64_t *bits, unsigned n, unsigned bit) {
    while (bit < n) {
        PYA_STEP();
        const uint64_t left = bits[bit / 64] >> bit % 64;
        if (left != 0) {
            return bit + (unsigned)__builtin_ctzll(left);
        }
        bit = (bit / 64 + 1) * 64;
    }
    return n;
}

static inline struct model_pool *
model_pool_of(struct pya_model *model, const struct pya_model_block *block) {
    return &model->pools[block->pool]->by_stream[block->stream][block->is_large];
}

static inline struct pya_model_block *
model_from_node(struct tree_node *node) {
    return (struct pya_model_block *)node;
}

/* model.c */
struct pya_model_block *model_block_create(struct pya_model *model);
void model_block_destroy(struct pya_model *model, struct pya_model_block *block);
void model_free_insert(struct pya_model *model, struct pya_model_block *block);
void model_free_remove(struct pya_model *model, struct pya_model_block *block);
void model_unmapped_insert(struct pya_model *model, struct pya_model_block *block);
void model_unmapped_remove(struct pya_model *model, struct pya_model_block *block);
/* Merges a free neighbour into block; the neighbour no longer exists afterwards. */
void model_merge(
    struct pya_model *model, struct pya_model_block *block, struct pya_model_block *neighbour);
void model_reserved(struct pya_model *model, size_t added, size_t removed);
static inline bool
model_is_idle(const struct pya_model_block *block) {
    return block != NULL && !block->is_allocated && block->n_events == 0 && block->uses == NULL;
}

/* model_expandable.c: a free block of at least `bytes`, out of its tree.  On PYA_E_NOMEM what was mapped stays mapped. */
pya_status model_expand(
    struct pya_model *model, size_t bytes, unsigned stream, bool is_large,
    struct pya_model_block **out);
/* Unmaps the whole units inside a free block. */
pya_status model_shrink(struct pya_model *model, struct pya_model_block *block);
void model_segment_destroy(struct pya_model *model, struct model_segment *segment);
