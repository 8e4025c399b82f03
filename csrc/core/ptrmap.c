/* Buckets of seven; full ones overflow into the next.  There are no tombstones: a bucket counts the entries that
 * passed it, so a table is valid at every moment, and the old one can be emptied entry by entry.  Floor 3. */
#define _GNU_SOURCE /* MAP_ANONYMOUS under -std=c11 */
#include "ptrmap.h"

#include <sys/mman.h>

/* The emptied part of a table is returned in steps of at least PTRMAP_PIECE buckets: whole pages, and not many at
 * once. */
#ifdef PYA_TEST_TINY
enum { PTRMAP_FIRST_BUCKETS = 2, PTRMAP_PIECE = 64 };
#else
enum { PTRMAP_FIRST_BUCKETS = 128, PTRMAP_PIECE = 1024 };
#endif
/* Buckets of the old table that each insertion empties.  The old table is gone, and its memory returned, after half
 * of the insertions that the new one has room for. */
enum { PTRMAP_STEP = 2 };

_Static_assert(sizeof(struct pya_ptrmap_bucket) == 64, "a bucket is a cache line");

enum { COUNT_SHIFT = PYA_PTRMAP_WAYS * PYA_PTRMAP_WAY_BITS };
#define COUNT_ONE (UINT64_C(1) << COUNT_SHIFT)
#define COUNT_MANY (UINT64_C(255) << COUNT_SHIFT)

static inline bool
tags_has(uint64_t tags, unsigned way) {
    return ((tags >> (way * PYA_PTRMAP_WAY_BITS)) & ((1U << PYA_PTRMAP_WAY_BITS) - 1)) != 0;
}

static pya_status
table_init(struct pya_ptrmap_table *table, size_t n_buckets) {
    /* From mmap, not malloc, which would clear a large reused block at once. */
    void *memory = mmap(
        NULL, n_buckets * sizeof(struct pya_ptrmap_bucket), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return PYA_E_HOST_NOMEM;
    }
    *table = (struct pya_ptrmap_table){
        .buckets = memory,
        .n_buckets = n_buckets,
        .n_most = n_buckets * PYA_PTRMAP_WAYS / 8 * 5,
        .shift = 64U - (unsigned)__builtin_ctzll(n_buckets),
    };
    return PYA_OK;
}

static size_t
table_host_bytes(const struct pya_ptrmap_table *table) {
    return (table->n_buckets - table->n_gone) * sizeof(struct pya_ptrmap_bucket);
}

static void
table_fini(struct pya_ptrmap_table *table) {
    if (table->n_gone < table->n_buckets) {
        (void)munmap(table->buckets + table->n_gone, table_host_bytes(table));
    }
    *table = (struct pya_ptrmap_table){0};
}

/* Returns the buckets before `end`, which are empty. */
static void
table_give_back(struct pya_ptrmap_table *table, size_t end) {
    size_t n = (end - table->n_gone) / PTRMAP_PIECE * PTRMAP_PIECE;
    /* An entry that passed the last of them is still searched from its own bucket on. */
    bool is_passed = table->n_used > 0 && table->buckets[end - 1].tags >= COUNT_ONE;
    if (n > 0 && !is_passed &&
        munmap(table->buckets + table->n_gone, n * sizeof(struct pya_ptrmap_bucket)) == 0) {
        table->n_gone += n;
    }
}

static inline void
table_insert(struct pya_ptrmap_table *table, struct pya_block *block) {
    struct pya_ptrmap_place place = pya_ptrmap_place(table, block->addr);
    struct pya_ptrmap_bucket *bucket = &table->buckets[place.bucket];
    uint64_t unused = pya_ptrmap_match(bucket->tags, 0);
    while (PYA_UNLIKELY(unused == 0)) {
        PYA_STEP();
        bucket->tags += bucket->tags < COUNT_MANY ? COUNT_ONE : 0;
        place.bucket = (place.bucket + 1) & (table->n_buckets - 1);
        bucket = &table->buckets[place.bucket];
        unused = pya_ptrmap_match(bucket->tags, 0);
    }
    pya_ptrmap_put(table, bucket, unused, place.tag, block);
}

static inline struct pya_block *
bucket_find(
    struct pya_ptrmap_bucket *bucket, uint64_t tag, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    for (uint64_t match = pya_ptrmap_match(bucket->tags, tag); match != 0; match &= match - 1) {
        PYA_STEP();
        unsigned way = pya_ptrmap_way(match);
        struct pya_block *block = bucket->blocks[way];
        if (PYA_LIKELY(block->addr == addr)) {
            *slot = (struct pya_ptrmap_slot){bucket, way};
            return block;
        }
    }
    return NULL;
}

static struct pya_block *
table_find(const struct pya_ptrmap_table *table, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    struct pya_ptrmap_place place = pya_ptrmap_place(table, addr);
    size_t mask = table->n_buckets - 1;
    for (size_t i = 0; i <= mask; i++) {
        PYA_STEP();
        size_t at = (place.bucket + i) & mask;
        if (at < table->n_gone) {
            return NULL;
        }
        struct pya_ptrmap_bucket *bucket = &table->buckets[at];
        struct pya_block *block = bucket_find(bucket, place.tag, addr, slot);
        if (block != NULL && i > 0) {
            slot->way += PYA_PTRMAP_AWAY;
        }
        if (block != NULL || bucket->tags < COUNT_ONE) {
            return block;
        }
    }
    return NULL;
}

static inline void
table_remove_at(struct pya_ptrmap_table *table, struct pya_ptrmap_bucket *bucket, unsigned way) {
    size_t at = (size_t)(bucket - table->buckets);
    size_t passed = pya_ptrmap_place(table, bucket->blocks[way]->addr).bucket;
    while (PYA_UNLIKELY(passed != at)) {
        PYA_STEP();
        uint64_t *tags = &table->buckets[passed].tags;
        *tags -= *tags < COUNT_MANY ? COUNT_ONE : 0;
        passed = (passed + 1) & (table->n_buckets - 1);
    }
    pya_ptrmap_clear(table, bucket, way);
}

void
pya_ptrmap_init(struct pya_ptrmap *map) {
    *map = (struct pya_ptrmap){0};
}

void
pya_ptrmap_fini(struct pya_ptrmap *map) {
    map->latest = NULL;
    table_fini(&map->current);
    table_fini(&map->old);
}

static void
ptrmap_migrate(struct pya_ptrmap *map, size_t n_buckets) {
    struct pya_ptrmap_table *old = &map->old;
    size_t n_left = old->n_buckets - map->cursor;
    n_buckets = n_buckets < n_left ? n_buckets : n_left;
    for (; n_buckets > 0 && old->n_used > 0; n_buckets--, map->cursor++) {
        struct pya_ptrmap_bucket *bucket = &old->buckets[map->cursor];
        for (unsigned way = 0; way < PYA_PTRMAP_WAYS; way++) {
            PYA_STEP();
            if (tags_has(bucket->tags, way)) {
                table_insert(&map->current, bucket->blocks[way]);
                table_remove_at(old, bucket, way);
            }
        }
    }
    map->cursor += old->n_used > 0 ? 0 : n_buckets;
    if (map->cursor == old->n_buckets) {
        PYA_ASSERT(old->n_used == 0);
        table_fini(old);
        map->cursor = 0;
    } else {
        table_give_back(old, map->cursor);
    }
}

pya_status
pya_ptrmap_reserve_slow(struct pya_ptrmap *map) {
    if (map->old.n_buckets > 0) {
        ptrmap_migrate(map, map->old.n_used > 0 ? PTRMAP_STEP : PTRMAP_PIECE);
    }
    if (pya_ptrmap_is_roomy(&map->current)) {
        return PYA_OK;
    }
    /* An old table is left here only if PTRMAP_STEP was reduced. */
    ptrmap_migrate(map, SIZE_MAX);
    struct pya_ptrmap_table bigger;
    size_t n_buckets =
        map->current.n_buckets == 0 ? PTRMAP_FIRST_BUCKETS : map->current.n_buckets * 2;
    pya_status st = table_init(&bigger, n_buckets);
    if (st != PYA_OK) {
        /* A fuller table is slower, but not wrong. */
        return map->current.n_used < map->current.n_buckets * PYA_PTRMAP_WAYS ? PYA_OK : st;
    }
    map->old = map->current;
    map->cursor = 0;
    map->current = bigger;
    return PYA_OK;
}

void
pya_ptrmap_insert_away(struct pya_ptrmap *map, struct pya_block *block) {
    PYA_ASSERT(map->current.n_used < map->current.n_buckets * PYA_PTRMAP_WAYS);
    table_insert(&map->current, block);
}

struct pya_block *
pya_ptrmap_find_away(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    struct pya_block *block = table_find(&map->current, addr, slot);
    if (block == NULL && map->old.n_used > 0) {
        block = table_find(&map->old, addr, slot);
        if (block != NULL) {
            slot->way += PYA_PTRMAP_OLD;
        }
    }
    return block;
}

void
pya_ptrmap_remove_away(struct pya_ptrmap *map, struct pya_ptrmap_slot slot) {
    bool is_old = (slot.way & PYA_PTRMAP_OLD) != 0;
    table_remove_at(
        is_old ? &map->old : &map->current, slot.bucket, (unsigned)slot.way % PYA_PTRMAP_OLD);
}

size_t
pya_ptrmap_host_bytes(const struct pya_ptrmap *map) {
    return table_host_bytes(&map->current) + table_host_bytes(&map->old);
}

static void
table_each(
    const struct pya_ptrmap_table *table, void (*visit)(void *arg, struct pya_block *block),
    void *arg) {
    for (size_t i = table->n_gone * PYA_PTRMAP_WAYS; i < table->n_buckets * PYA_PTRMAP_WAYS; i++) {
        const struct pya_ptrmap_bucket *bucket = &table->buckets[i / PYA_PTRMAP_WAYS];
        if (tags_has(bucket->tags, (unsigned)(i % PYA_PTRMAP_WAYS))) {
            visit(arg, bucket->blocks[i % PYA_PTRMAP_WAYS]);
        }
    }
}

void
pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg) {
    if (map->latest != NULL) {
        visit(arg, map->latest);
    }
    table_each(&map->current, visit, arg);
    table_each(&map->old, visit, arg);
}
