/* Linear probing with backward-shift deletion: no tombstones, and a table is valid at every moment, which
 * is what lets the old table be emptied entry by entry.  Floor 3. */
#include "ptrmap.h"

#include <stdlib.h>

#include "debug.h"

#ifdef PYA_TEST_TINY
enum { PTRMAP_FIRST_SLOTS = 4 };
#else
enum { PTRMAP_FIRST_SLOTS = 1024 };
#endif
/* Slots of the old table looked at per insertion: it is empty, and its memory back, once a seventh more blocks
 * live than when the new one was made. */
enum { PTRMAP_STEP = 16 };

static inline size_t
table_slot(const struct pya_ptrmap_table *table, pya_dptr addr) {
    return (size_t)(((addr / PYA_ALIGN) * 0x9E3779B97F4A7C15U) >> table->shift);
}

static pya_status
table_init(struct pya_ptrmap_table *table, size_t n_slots) {
    struct pya_ptrmap_entry *entries = calloc(n_slots, sizeof *entries);
    if (entries == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    *table = (struct pya_ptrmap_table){
        .entries = entries,
        .n_slots = n_slots,
        .shift = 64U - (unsigned)__builtin_ctzll(n_slots),
    };
    return PYA_OK;
}

static void
table_fini(struct pya_ptrmap_table *table) {
    free(table->entries);
    *table = (struct pya_ptrmap_table){0};
}

static void
table_insert(struct pya_ptrmap_table *table, pya_dptr addr, struct pya_block *block) {
    size_t mask = table->n_slots - 1;
    size_t i = table_slot(table, addr);
    while (table->entries[i].addr != 0) {
        PYA_STEP();
        i = (i + 1) & mask;
    }
    table->entries[i] = (struct pya_ptrmap_entry){addr, block};
    table->n_used++;
}

/* The slot of addr, or SIZE_MAX. */
static inline size_t
table_find(const struct pya_ptrmap_table *table, pya_dptr addr) {
    if (table->n_used == 0) {
        return SIZE_MAX;
    }
    size_t mask = table->n_slots - 1;
    size_t i = table_slot(table, addr);
    while (table->entries[i].addr != addr) {
        PYA_STEP();
        if (table->entries[i].addr == 0) {
            return SIZE_MAX;
        }
        i = (i + 1) & mask;
    }
    return i;
}

/* Empties slot i, moving later entries of the same cluster up so that none is cut off from its start. */
static void
table_remove_at(struct pya_ptrmap_table *table, size_t i) {
    size_t mask = table->n_slots - 1;
    size_t j = i;
    for (;;) {
        PYA_STEP();
        j = (j + 1) & mask;
        if (table->entries[j].addr == 0) {
            break;
        }
        size_t start = table_slot(table, table->entries[j].addr);
        if (((j - start) & mask) >= ((j - i) & mask)) {
            table->entries[i] = table->entries[j];
            i = j;
        }
    }
    table->entries[i] = (struct pya_ptrmap_entry){0};
    table->n_used--;
}

void
pya_ptrmap_init(struct pya_ptrmap *map) {
    *map = (struct pya_ptrmap){0};
}

void
pya_ptrmap_fini(struct pya_ptrmap *map) {
    table_fini(&map->current);
    table_fini(&map->old);
}

/* From the top down: what is above is empty already, so that nothing has to move up into the gap. */
static void
ptrmap_migrate(struct pya_ptrmap *map, size_t n_steps) {
    while (n_steps-- > 0 && map->old.n_used > 0) {
        PYA_STEP();
        struct pya_ptrmap_entry *entry = &map->old.entries[map->cursor];
        if (entry->addr == 0) {
            map->cursor--;
            continue;
        }
        table_insert(&map->current, entry->addr, entry->block);
        table_remove_at(&map->old, map->cursor);
    }
    if (map->old.n_used == 0) {
        table_fini(&map->old);
    }
}

pya_status
pya_ptrmap_reserve_slow(struct pya_ptrmap *map) {
    if (map->old.n_used > 0) {
        ptrmap_migrate(map, PTRMAP_STEP);
    }
    if (pya_ptrmap_is_roomy(&map->current)) {
        return PYA_OK;
    }
    /* Only reached with entries left in the old table if somebody shrank PTRMAP_STEP. */
    ptrmap_migrate(map, SIZE_MAX);
    struct pya_ptrmap_table bigger;
    size_t n_slots = map->current.n_slots == 0 ? PTRMAP_FIRST_SLOTS : map->current.n_slots * 2;
    pya_status st = table_init(&bigger, n_slots);
    if (st != PYA_OK) {
        /* A fuller table is slower, not wrong. */
        return map->current.n_used + 1 < map->current.n_slots ? PYA_OK : st;
    }
    if (map->current.n_used == 0) {
        table_fini(&map->current);
    }
    map->old = map->current;
    map->cursor = map->old.n_slots - 1;
    map->current = bigger;
    return PYA_OK;
}

void
pya_ptrmap_insert(struct pya_ptrmap *map, struct pya_block *block) {
    PYA_ASSERT(map->current.n_used + 1 < map->current.n_slots);
    table_insert(&map->current, block->addr, block);
}

struct pya_block *
pya_ptrmap_find(struct pya_ptrmap *map, pya_dptr addr, struct pya_ptrmap_slot *slot) {
    slot->table = &map->current;
    slot->index = table_find(slot->table, addr);
    if (PYA_UNLIKELY(slot->index == SIZE_MAX)) {
        slot->table = &map->old;
        slot->index = table_find(slot->table, addr);
        if (slot->index == SIZE_MAX) {
            return NULL;
        }
    }
    return slot->table->entries[slot->index].block;
}

void
pya_ptrmap_remove_at(struct pya_ptrmap *map, struct pya_ptrmap_slot slot) {
    (void)map;
    table_remove_at(slot.table, slot.index);
}

size_t
pya_ptrmap_host_bytes(const struct pya_ptrmap *map) {
    return (map->current.n_slots + map->old.n_slots) * sizeof(struct pya_ptrmap_entry);
}

static void
table_each(
    const struct pya_ptrmap_table *table, void (*visit)(void *arg, struct pya_block *block),
    void *arg) {
    for (size_t i = 0; i < table->n_slots; i++) {
        if (table->entries[i].addr != 0) {
            visit(arg, table->entries[i].block);
        }
    }
}

void
pya_ptrmap_each(
    const struct pya_ptrmap *map, void (*visit)(void *arg, struct pya_block *block), void *arg) {
    table_each(&map->current, visit, arg);
    table_each(&map->old, visit, arg);
}
