/* Who held memory from one mark to another: all that a flame graph needs of many moments, in one table.
 *
 * A hash table with linear probing finds the row for a block that ends; nothing is removed.  The number of rows grows with the
 * number of places that hold memory at a mark, not with the number of blocks. */
#include "scan_internal.h"

#include <stdlib.h>

static uint64_t
mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

static size_t
stay_slot(const struct pya_scan *s, const struct pya_scan_stay *stay) {
    uint64_t hash = mixed(stay->stream, stay->thread);
    hash = mixed(hash, (uint64_t)stay->stack << 32 | (uint32_t)stay->device);
    hash = mixed(hash, (uint64_t)stay->phase << 32 | stay->free_phase);
    hash = mixed(hash, (uint64_t)stay->first << 32 | stay->last);
    return (size_t)mixed(hash, stay->category) & (s->stay_size - 1);
}

static bool
are_alike(const struct pya_scan_stay *a, const struct pya_scan_stay *b) {
    return a->stack == b->stack && a->first == b->first && a->last == b->last &&
           a->phase == b->phase && a->free_phase == b->free_phase && a->category == b->category &&
           a->thread == b->thread && a->stream == b->stream && a->device == b->device &&
           a->is_freed_later == b->is_freed_later;
}

/* Its index in the hash table, or that of the empty slot for it. */
static size_t
stay_find(const struct pya_scan *s, const struct pya_scan_stay *stay) {
    size_t at = stay_slot(s, stay);
    while (s->stay_table[at] != 0 &&
           !are_alike(SCAN_ITEM(s->stays, struct pya_scan_stay, s->stay_table[at] - 1), stay)) {
        at = (at + 1) & (s->stay_size - 1);
    }
    return at;
}

static bool
table_grow(struct pya_scan *s) {
    const size_t size = s->stay_size == 0 ? 1024 : s->stay_size * 2;
    uint32_t *table = calloc(size, sizeof *table);
    if (table == NULL) {
        return false;
    }
    free(s->stay_table);
    s->stay_table = table;
    s->stay_size = size;
    for (size_t i = 0; i < s->stays.n; i++) {
        table[stay_find(s, SCAN_ITEM(s->stays, struct pya_scan_stay, i))] = (uint32_t)i + 1;
    }
    return true;
}

/* Did the outermost open phase of this name begin after the block was allocated? */
static bool
is_freed_later(const struct pya_scan *s, const struct pya_scan_block *row, uint32_t free_phase) {
    if (free_phase == 0 || free_phase != row->phase) {
        return false;
    }
    for (size_t i = 0; i < s->n_open; i++) {
        if (s->open[i].text == free_phase) {
            const struct pya_scan_phase *phase = scan_open_phase(s, i);
            return phase != NULL && phase->begin > row->alloc_event;
        }
    }
    return false;
}

bool
scan_stay_add(struct pya_scan *s, const struct scan_live *live, uint32_t free_phase) {
    const struct pya_scan_block *row = &live->row;
    if (live->mark >= s->next_mark) {
        return true; /* it was not alive at any mark */
    }
    const struct pya_scan_stay stay = {
        .stream = row->stream,
        .thread = row->thread,
        .stack = row->stack,
        .phase = row->phase,
        .free_phase = free_phase,
        .category = row->category,
        .first = live->mark,
        .last = (uint32_t)s->next_mark - 1,
        .device = row->device,
        .is_freed_later = is_freed_later(s, row, free_phase),
    };
    if (s->stays.n * 2 >= s->stay_size && !table_grow(s)) {
        return false;
    }
    const size_t at = stay_find(s, &stay);
    if (s->stay_table[at] == 0) {
        struct pya_scan_stay *added = SCAN_ADD(s->stays, struct pya_scan_stay);
        if (added == NULL) {
            return false;
        }
        *added = stay;
        s->stay_table[at] = (uint32_t)s->stays.n;
    }
    struct pya_scan_stay *found = SCAN_ITEM(s->stays, struct pya_scan_stay, s->stay_table[at] - 1);
    found->bytes += pya_round_up(row->bytes, PYA_ALIGN);
    found->n_blocks++;
    return true;
}
