/* Live blocks by address: a hash table that grows a little at every insertion.  Floor 3.
 *
 * Rehashing all at once would stall one unlucky call for milliseconds at a million blocks; here a few
 * entries move with each insertion, so every call is bounded.  The emptied part goes back to the system piece by piece
 * for the same reason: all of it at once takes a millisecond, too.
 *
 * A bucket is one cache line: seven blocks and a byte of each one's hash, compared all at once.  Probing
 * entry by entry would cost less memory traffic but several decisions that no processor can guess.
 * Long because what every request passes through is inline. */
#pragma once

#include "block.h"
#include "debug.h"

#ifdef __cplusplus
extern "C" {
#endif

/* PYA_PTRMAP_OLD and PYA_PTRMAP_AWAY: see struct pya_ptrmap_slot. */
enum { PYA_PTRMAP_WAYS = 7, PYA_PTRMAP_OLD = 8, PYA_PTRMAP_AWAY = 16, PYA_PTRMAP_WAY_BITS = 8 };
#define PYA_PTRMAP_LOW UINT64_C(0x01010101010101) /* the lowest bit of each way's byte */

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
    size_t n_most;  /* entries it should have at most: five eighths of its ways */
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
 * registers: what was just written in parts is slow to read as a whole.
 * way: + PYA_PTRMAP_OLD: in the old table; + PYA_PTRMAP_AWAY: not in the bucket where it belongs. */
struct pya_ptrmap_slot {
    struct pya_ptrmap_bucket *bucket; /* NULL: it is the latest */
    size_t way;
};

void pya_ptrmap_init(struct pya_ptrmap *map);
void pya_ptrmap_fini(struct pya_ptrmap *map);
/* After this, one insert cannot fail. */
PYA_MUST_CHECK pya_status pya_ptrmap_reserve_slow(struct pya_ptrmap *map);
/* The other ways of insert, find and remove. */
void pya_ptrmap_insert_away(struct pya_ptrmap *map, struct pya_block *block);
struct pya_block *
pya_ptrmap_find_away(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot);
void pya_ptrmap_remove_away(struct pya_ptrmap *map, struct pya_ptrmap_slot slot);
size_t pya_ptrmap_host_bytes(const struct pya_ptrmap *map);
/* Visits all in no order. */
void pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg);

/* Five eighths full a bucket rarely overflows, and a block costs 15 to 29 bytes here. */
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
    uint64_t tag; /* with bit 1 set: no tag that a match may confuse it with is 0, an unused way */
};

/* The bucket by the hash's highest bits, the tag by those after them. */
static inline struct pya_ptrmap_place
pya_ptrmap_place(const struct pya_ptrmap_table *table, pya_dptr addr) {
    uint64_t hash = (addr / PYA_ALIGN) * 0x9E3779B97F4A7C15U;
    uint64_t tag =
        (hash >> (table->shift - PYA_PTRMAP_WAY_BITS)) & ((1U << PYA_PTRMAP_WAY_BITS) - 1);
    return (struct pya_ptrmap_place){(size_t)(hash >> table->shift), tag | 2};
}

/* The top bit of each byte whose way has this tag; perhaps of one above it whose tag differs by 1, so a match is to
 * be verified.  The lowest is always right. */
static inline uint64_t
pya_ptrmap_match(uint64_t tags, uint64_t tag) {
    uint64_t x = tags ^ (PYA_PTRMAP_LOW * tag);
    return (x - PYA_PTRMAP_LOW) & ~x & (PYA_PTRMAP_LOW << (PYA_PTRMAP_WAY_BITS - 1));
}

static inline unsigned
pya_ptrmap_way(uint64_t match) {
    return (unsigned)__builtin_ctzll(match) / PYA_PTRMAP_WAY_BITS;
}

/* Into the lowest of the ways that are unused, as a match tells them. */
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

/* There is room for one. */
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

/* NULL when the address is unknown.  *slot is good until the map changes. */
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
