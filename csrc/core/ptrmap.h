/* Live blocks by address: a hash table that grows a little at every insertion.  Floor 3.
 *
 * Rehashing all at once would stall one unlucky call for milliseconds at a million blocks; here a few
 * entries move with each insertion, so every call is bounded.  The emptied part goes back to the system piece by piece
 * for the same reason: all of it at once takes a millisecond, too.
 *
 * A bucket is one cache line: seven blocks and a byte of each one's hash, compared all at once.  Probing
 * entry by entry would cost less memory traffic but several decisions that no processor can guess. */
#pragma once

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PYA_PTRMAP_WAYS = 7, PYA_PTRMAP_OLD = 8 };

/* tags: a byte for each way, lowest first, 0: blocks[i] is unused; in the top byte how many entries belong here but
 * sit in a later bucket, because this one was full when they came (at 255 it is no longer counted, and stays).
 * One word that is always written whole: it is read right after it was written. */
struct pya_ptrmap_bucket {
    uint64_t tags;
    struct pya_block *blocks[PYA_PTRMAP_WAYS];
};

struct pya_ptrmap_table {
    struct pya_ptrmap_bucket *buckets; /* whole pages of its own */
    size_t n_buckets;                  /* a power of two, at least 2; or 0 */
    size_t n_gone;                     /* so many in front were given back: nothing belongs there */
    size_t n_used;
    unsigned shift; /* 64 - log2(n_buckets) */
};

/* Every live block is `latest` or in exactly one of the two tables.  Programs often free what they got last. */
struct pya_ptrmap {
    struct pya_block *latest; /* the one inserted last, until another is */
    struct pya_ptrmap_table current;
    struct pya_ptrmap_table old; /* being emptied, from bucket `cursor` up */
    size_t cursor;
};

/* Where an entry was found, so that taking it out needs no second search.  Two words, so that it travels in
 * registers: what was just written in parts is slow to read as a whole. */
struct pya_ptrmap_slot {
    struct pya_ptrmap_bucket *bucket; /* NULL: it is the latest */
    size_t way;                       /* PYA_PTRMAP_OLD and more: in the old table */
};

void pya_ptrmap_init(struct pya_ptrmap *map);
void pya_ptrmap_fini(struct pya_ptrmap *map);
/* After this, one insert cannot fail. */
PYA_MUST_CHECK pya_status pya_ptrmap_reserve_slow(struct pya_ptrmap *map);
void pya_ptrmap_insert_table(struct pya_ptrmap *map, struct pya_block *block);
struct pya_block *
pya_ptrmap_find_table(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot);
void pya_ptrmap_remove_table(struct pya_ptrmap *map, struct pya_ptrmap_slot slot);
size_t pya_ptrmap_host_bytes(const struct pya_ptrmap *map);
/* Visits all in no order. */
void pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg);

/* Up to five eighths full: a bucket then rarely overflows, and a block costs 15 to 29 bytes here. */
static inline bool
pya_ptrmap_is_roomy(const struct pya_ptrmap_table *table) {
    return table->n_used < table->n_buckets * PYA_PTRMAP_WAYS / 8 * 5;
}

static inline pya_status PYA_MUST_CHECK
pya_ptrmap_reserve(struct pya_ptrmap *map) {
    bool is_roomy = map->old.n_buckets == 0 && pya_ptrmap_is_roomy(&map->current);
    return PYA_LIKELY(is_roomy) ? PYA_OK : pya_ptrmap_reserve_slow(map);
}

static inline void
pya_ptrmap_insert(struct pya_ptrmap *map, struct pya_block *block) {
    struct pya_block *before = map->latest;
    map->latest = block;
    if (before != NULL) {
        pya_ptrmap_insert_table(map, before);
    }
}

/* NULL when the address is unknown.  *slot is good until the map changes. */
static inline struct pya_block *
pya_ptrmap_find(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    struct pya_block *block = map->latest;
    if (block != NULL && block->addr == addr) {
        slot->bucket = NULL;
        return block;
    }
    return pya_ptrmap_find_table(map, addr, slot);
}

static inline void
pya_ptrmap_remove_at(struct pya_ptrmap *map, struct pya_ptrmap_slot slot) {
    if (slot.bucket == NULL) {
        map->latest = NULL;
        return;
    }
    pya_ptrmap_remove_table(map, slot);
}

#ifdef __cplusplus
}
#endif
