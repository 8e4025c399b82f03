/* Live blocks by address: an open-addressed hash table that grows a little at every insertion.  Floor 3.
 *
 * Rehashing all at once would stall one unlucky call for milliseconds at a million blocks; here a few
 * entries move with each insertion, so every call is bounded. */
#pragma once

#include "block.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_ptrmap_entry {
    pya_dptr addr; /* 0: empty */
    struct pya_block *block;
};

struct pya_ptrmap_table {
    struct pya_ptrmap_entry *entries;
    size_t n_slots; /* a power of two, or 0 */
    size_t n_used;
    unsigned shift; /* 64 - log2(n_slots) */
};

/* Every live block is in exactly one of the two tables. */
struct pya_ptrmap {
    struct pya_ptrmap_table current;
    struct pya_ptrmap_table old; /* being emptied, from `cursor` down */
    size_t cursor;
};

/* Where an entry was found, so that taking it out needs no second search. */
struct pya_ptrmap_slot {
    struct pya_ptrmap_table *table;
    size_t index;
};

void pya_ptrmap_init(struct pya_ptrmap *map);
void pya_ptrmap_fini(struct pya_ptrmap *map);
/* After this, one insert cannot fail. */
PYA_MUST_CHECK pya_status pya_ptrmap_reserve_slow(struct pya_ptrmap *map);
void pya_ptrmap_insert(struct pya_ptrmap *map, struct pya_block *block);
/* NULL when the address is unknown.  *slot is good until the map changes. */
struct pya_block *
pya_ptrmap_find(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot);
void pya_ptrmap_remove_at(struct pya_ptrmap *map, struct pya_ptrmap_slot slot);
size_t pya_ptrmap_host_bytes(const struct pya_ptrmap *map);
/* Visits all in no order. */
void pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg);

static inline size_t
pya_ptrmap_n(const struct pya_ptrmap *map) {
    return map->current.n_used + map->old.n_used;
}

/* Up to three quarters full: half would make probing little shorter and cost 64 bytes for each live block just
 * after the table grew. */
static inline bool
pya_ptrmap_is_roomy(const struct pya_ptrmap_table *table) {
    return table->n_used < table->n_slots / 4 * 3;
}

static inline pya_status PYA_MUST_CHECK
pya_ptrmap_reserve(struct pya_ptrmap *map) {
    bool is_roomy = map->old.n_used == 0 && pya_ptrmap_is_roomy(&map->current);
    return PYA_LIKELY(is_roomy) ? PYA_OK : pya_ptrmap_reserve_slow(map);
}

#ifdef __cplusplus
}
#endif
