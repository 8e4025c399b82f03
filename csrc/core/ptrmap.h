/* Live blocks by address: a hash table that grows gradually, at each insertion.  Floor 3.
 *
 * Rehashing a million blocks at once would stall one call for milliseconds.  Instead a few entries move with each
 * insertion, so every call is bounded.  For the same reason the emptied part is returned to the system piece by
 * piece: returning it at once takes a millisecond too.
 *
 * A bucket is one cache line: seven blocks and one byte of each one's hash; the bytes are compared all at once.
 * Probing entry by entry would save memory traffic, but needs several branches that no processor can predict.
 * Long because the request path is inline. */
#pragma once

#include "block.h"
#include "debug.h"

#ifdef __cplusplus
extern "C" {
#endif

/* PYA_PTRMAP_OLD and PYA_PTRMAP_AWAY: see struct pya_ptrmap_slot. */
enum { PYA_PTRMAP_WAYS = 7, PYA_PTRMAP_OLD = 8, PYA_PTRMAP_AWAY = 16, PYA_PTRMAP_WAY_BITS = 8 };
#define PYA_PTRMAP_LOW UINT64_C(0x01010101010101) /* the lowest bit of each way's byte */

/* tags: one byte for each way, lowest first; 0: blocks[i] is unused.  The top byte counts entries that belong here
 * but lie in a later bucket, because this one was full when they came; at 255 the count stays.  tags is one word that
 * is always written whole, because it is read right after it was written. */
struct pya_ptrmap_bucket {
    uint64_t tags;
    struct pya_block *blocks[PYA_PTRMAP_WAYS];
};

struct pya_ptrmap_table {
    struct pya_ptrmap_bucket *buckets; /* whole pages of its own */
    size_t n_buckets;                  /* a power of two, at least 2; or 0 */
    size_t n_gone;                     /* the first n_gone were released; nothing belongs there */
    size_t n_used;
    size_t n_most;  /* limit for n_used: five eighths of the ways */
    unsigned shift; /* 64 - log2(n_buckets) */
};

/* Every live block is `latest` or in exactly one table.  Programs often free the block they got last. */
struct pya_ptrmap {
    struct pya_block *latest; /* the block inserted last, until the next insertion */
    struct pya_ptrmap_table current;
    struct pya_ptrmap_table old; /* being emptied, from bucket `cursor` on */
    size_t cursor;
};

/* Where an entry was found, so that removing it needs no second search.  Two words, so that it is passed in
 * registers: data just written in parts is slow to read as a whole.
 * way: + PYA_PTRMAP_OLD: in the old table; + PYA_PTRMAP_AWAY: not in its own bucket. */
struct pya_ptrmap_slot {
    struct pya_ptrmap_bucket *bucket; /* NULL: it is the latest */
    size_t way;
};

void pya_ptrmap_init(struct pya_ptrmap *map);
void pya_ptrmap_fini(struct pya_ptrmap *map);
/* After success, one insert cannot fail. */
PYA_MUST_CHECK pya_status pya_ptrmap_reserve_slow(struct pya_ptrmap *map);
/* The rare cases of insert, find and remove. */
void pya_ptrmap_insert_away(struct pya_ptrmap *map, struct pya_block *block);
struct pya_block *
pya_ptrmap_find_away(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot);
void pya_ptrmap_remove_away(struct pya_ptrmap *map, struct pya_ptrmap_slot slot);
size_t pya_ptrmap_host_bytes(const struct pya_ptrmap *map);
/* Visits all blocks in no particular order. */
void pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg);

/* At five eighths a bucket rarely overflows, and a block costs 15 to 29 bytes here. */
static inline bool
pya_ptrmap_is_roomy(const struct pya_ptrmap_table *table) {
    return table->n_used < table->n_most;
}

static inline pya_status PYA_MUST_CHECK
pya_ptrmap_reserve(struct pya_ptrmap *map) {
    bool is_roomy = map->old.n_buckets == 0 && pya_ptrmap_is_roomy(&map->current);
    return PYA_LIKELY(is_roomy) ? PYA_OK : pya_ptrmap_reserve_slow(map);
}

struct pya_ptrmap_place {
    size_t bucket;
    uint64_t tag; /* bit 1 is set, so no tag that a match may confuse it with is 0 (unused) */
};

/* The highest bits of the hash select the bucket; the bits below them are the tag. */
static inline struct pya_ptrmap_place
pya_ptrmap_place(const struct pya_ptrmap_table *table, pya_dptr addr) {
    uint64_t hash = (addr / PYA_ALIGN) * 0x9E3779B97F4A7C15U;
    uint64_t tag =
        (hash >> (table->shift - PYA_PTRMAP_WAY_BITS)) & ((1U << PYA_PTRMAP_WAY_BITS) - 1);
    return (struct pya_ptrmap_place){(size_t)(hash >> table->shift), tag | 2};
}

/* Sets the top bit of each byte whose way has this tag.  A byte above a match may be set by mistake if its tag
 * differs by 1, so each match must be verified; the lowest one is always right. */
static inline uint64_t
pya_ptrmap_match(uint64_t tags, uint64_t tag) {
    uint64_t x = tags ^ (PYA_PTRMAP_LOW * tag);
    return (x - PYA_PTRMAP_LOW) & ~x & (PYA_PTRMAP_LOW << (PYA_PTRMAP_WAY_BITS - 1));
}

static inline unsigned
pya_ptrmap_way(uint64_t match) {
    return (unsigned)__builtin_ctzll(match) / PYA_PTRMAP_WAY_BITS;
}

/* Puts a block into the lowest unused way; `unused` is a match for tag 0. */
static inline void
pya_ptrmap_put(
    struct pya_ptrmap_table *table, struct pya_ptrmap_bucket *bucket, uint64_t unused, uint64_t tag,
    struct pya_block *block) {
    unsigned way = pya_ptrmap_way(unused);
    bucket->tags |= tag << (way * PYA_PTRMAP_WAY_BITS);
    bucket->blocks[way] = block;
    table->n_used++;
}

static inline void
pya_ptrmap_clear(struct pya_ptrmap_table *table, struct pya_ptrmap_bucket *bucket, size_t way) {
    bucket->tags &= ~(UINT64_C(255) << (way * PYA_PTRMAP_WAY_BITS));
    table->n_used--;
}

/* Inserts a block.  The caller has reserved room for one. */
static inline void
pya_ptrmap_insert(struct pya_ptrmap *map, struct pya_block *block) {
    struct pya_block *before = map->latest;
    map->latest = block;
    if (before == NULL) {
        return;
    }
    struct pya_ptrmap_place place = pya_ptrmap_place(&map->current, before->addr);
    struct pya_ptrmap_bucket *bucket = &map->current.buckets[place.bucket];
    uint64_t unused = pya_ptrmap_match(bucket->tags, 0);
    if (PYA_UNLIKELY(unused == 0)) {
        pya_ptrmap_insert_away(map, before);
        return;
    }
    pya_ptrmap_put(&map->current, bucket, unused, place.tag, before);
}

/* Finds the live block at addr; NULL: none.  *slot is valid until the map changes. */
static inline struct pya_block *
pya_ptrmap_find(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    struct pya_block *block = map->latest;
    if (block != NULL && block->addr == addr) {
        slot->bucket = NULL;
        return block;
    }
    if (PYA_UNLIKELY(map->current.n_buckets == 0)) {
        return NULL;
    }
    struct pya_ptrmap_place place = pya_ptrmap_place(&map->current, addr);
    struct pya_ptrmap_bucket *bucket = &map->current.buckets[place.bucket];
    uint64_t match = pya_ptrmap_match(bucket->tags, place.tag);
    PYA_STEP();
    if (PYA_LIKELY(match != 0)) {
        unsigned way = pya_ptrmap_way(match);
        block = bucket->blocks[way];
        if (PYA_LIKELY(block->addr == addr)) {
            *slot = (struct pya_ptrmap_slot){bucket, way};
            return block;
        }
    }
    return pya_ptrmap_find_away(map, addr, slot);
}

static inline void
pya_ptrmap_remove_at(struct pya_ptrmap *map, struct pya_ptrmap_slot slot) {
    if (slot.bucket == NULL) {
        map->latest = NULL;
    } else if (PYA_LIKELY(slot.way < PYA_PTRMAP_WAYS)) {
        pya_ptrmap_clear(&map->current, slot.bucket, slot.way);
    } else {
        pya_ptrmap_remove_away(map, slot);
    }
}

#ifdef __cplusplus
}
#endif
