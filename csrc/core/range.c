/* Ranges.  Floor 5. */
#include "range.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "debug.h"

#ifdef PYA_TEST_TINY
enum { RANGE_FIRST_ROOM = 2 };
#else
enum { RANGE_FIRST_ROOM = 256 };
#endif

static size_t
range_start_words(size_t n_slots) {
    return (n_slots + 63) / 64;
}

pya_status
pya_range_reserve_slots(struct pya_range *range, size_t n) {
    if (range->recent == NULL) {
        range->recent = calloc(PYA_RANGE_RECENT, sizeof(struct pya_block *));
    }
    if (range->recent == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    if (n > range->n_room) {
        size_t n_more = range->n_room + range->n_room / 4;
        size_t n_room = n_more > n ? n_more : n;
        n_room = n_room > RANGE_FIRST_ROOM ? n_room : RANGE_FIRST_ROOM;
        struct pya_slot *slots = realloc(range->slots, n_room * sizeof *slots);
        if (slots == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        range->slots = slots;
        uint64_t *starts = realloc(range->starts, range_start_words(n_room) * sizeof *starts);
        if (starts == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        size_t n_words = range_start_words(range->n_room);
        memset(starts + n_words, 0, (range_start_words(n_room) - n_words) * sizeof *starts);
        range->starts = starts;
        range->n_room = n_room;
    }
    for (; range->n_slots < n; range->n_slots++) {
        range->slots[range->n_slots] = (struct pya_slot){.page = PYA_NO_PAGE};
    }
    return PYA_OK;
}

void
pya_range_fini(struct pya_range *range) {
    free(range->slots);
    free(range->starts);
    free((void *)range->recent);
    range->slots = NULL;
    range->starts = NULL;
    range->recent = NULL;
    range->n_slots = 0;
    range->n_room = 0;
}

void
pya_range_link_below(struct pya_range *range, struct pya_block *above, struct pya_block *block) {
    block->range = range;
    block->recent = 0;
    block->arena = above == NULL ? range->arena : above->arena;
    block->next = above;
    block->prev = above == NULL ? NULL : above->prev;
    if (block->prev != NULL) {
        block->prev->next = block;
    } else {
        range->first = block;
    }
    if (above != NULL) {
        above->prev = block;
    }
    pya_range_add_start(range, block);
}

void
pya_range_link_above(struct pya_range *range, struct pya_block *below, struct pya_block *block) {
    block->range = range;
    block->recent = 0;
    block->arena = below->arena;
    block->prev = below;
    block->next = below->next;
    below->next = block;
    if (block->next != NULL) {
        block->next->prev = block;
    }
    pya_range_add_start(range, block);
}

static void
range_forget_recent(const struct pya_range *range, struct pya_block *block) {
    struct pya_block *heir = block->prev != NULL ? block->prev : block->next;
    bool has_heir = heir != NULL && heir->recent == 0;
    range->recent[block->recent - 1] = has_heir ? heir : NULL;
    if (has_heir) {
        heir->recent = block->recent;
    }
    block->recent = 0;
}

static size_t
range_part(pya_dptr addr) {
    return (addr >> PYA_RANGE_PART_SHIFT) % PYA_RANGE_RECENT;
}

static void
range_note_recent(const struct pya_range *range, pya_dptr addr, struct pya_block *block) {
    size_t part = range_part(addr);
    if (block->recent == part + 1) {
        return;
    }
    if (block->recent != 0) {
        range->recent[block->recent - 1] = NULL;
    }
    if (range->recent[part] != NULL) {
        range->recent[part]->recent = 0;
    }
    range->recent[part] = block;
    block->recent = (uint8_t)(part + 1);
}

void
pya_range_unlink(struct pya_range *range, struct pya_block *block) {
    pya_range_drop_start(range, block);
    if (PYA_UNLIKELY(block->recent != 0)) {
        range_forget_recent(range, block);
    }
    if (block->prev != NULL) {
        block->prev->next = block->next;
    } else {
        range->first = block->next;
    }
    if (block->next != NULL) {
        block->next->prev = block->prev;
    }
}

/* The last block that starts in the slot or, if none does, the earlier one that covers it. */
static struct pya_block *
range_last_start(const struct pya_range *range, size_t slot) {
    struct pya_block *block = range->slots[slot].last_start;
    if (block != NULL) {
        return block;
    }
    size_t word = slot / 64;
    uint64_t bits = range->starts[word] & (((uint64_t)1 << (slot % 64)) - 1);
    while (bits == 0) {
        PYA_ASSERT(word > 0);
        bits = range->starts[--word];
    }
    return range->slots[word * 64 + 63U - (size_t)__builtin_clzll(bits)].last_start;
}

/* The nearest among the slot's last block and the recent blocks of this part and of the adjacent parts. */
static struct pya_block *
range_near(const struct pya_range *range, pya_dptr addr) {
    struct pya_block *near = range_last_start(range, pya_range_slot(range, addr));
    if (near->addr <= addr) {
        return near;
    }
    pya_dptr least = near->addr - addr;
    for (size_t i = 0; i < 3; i++) {
        struct pya_block *recent = range->recent[(range_part(addr) + i - 1) % PYA_RANGE_RECENT];
        pya_dptr at = recent == NULL ? 0 : recent->addr;
        pya_dptr distance = at < addr ? addr - at : at - addr;
        if (distance < least) {
            near = recent;
            least = distance;
        }
    }
    return near;
}

struct pya_block *
pya_range_block_at(struct pya_range *range, pya_dptr addr, size_t n_most) {
    struct pya_block *block = range_near(range, addr);
    for (; block->addr > addr && n_most > 0; n_most--) {
        PYA_STEP();
        block = block->prev;
    }
    for (; pya_block_end(block) <= addr && n_most > 0; n_most--) {
        PYA_STEP();
        block = block->next;
    }
    range_note_recent(range, addr, block);
    return block->addr <= addr && addr < pya_block_end(block) ? block : NULL;
}

struct pya_block *
pya_range_free_run(const struct pya_range *range, size_t slot) {
    pya_dptr addr = pya_range_addr(range, slot);
    struct pya_block *block = range_last_start(range, slot);
    bool covers = block->addr <= addr && pya_block_end(block) >= addr + PYA_PAGE;
    return covers && block->state == PYA_BLOCK_FREE ? block : NULL;
}

static size_t
range_violation(const struct pya_range *range, const struct pya_block *block, const char *what) {
    (void)fprintf(
        stderr, "range %#llx: block %#llx of %zu bytes: %s\n", (unsigned long long)range->base,
        (unsigned long long)block->addr, block->bytes, what);
    return 1;
}

static size_t
range_check_block(const struct pya_range *range, const struct pya_block *block) {
    size_t n_wrong = 0;
    if (block->range != range || block->arena == NULL) {
        n_wrong += range_violation(range, block, "belongs elsewhere");
    }
    if (block->bytes == 0 || block->bytes % PYA_ALIGN != 0 || block->addr % PYA_ALIGN != 0) {
        n_wrong += range_violation(range, block, "is not a whole number of steps");
    }
    if (block->next != NULL && block->next->prev != block) {
        n_wrong += range_violation(range, block, "links disagree");
    }
    const struct pya_block *next = block->next;
    bool is_alone = next == NULL || next->arena != block->arena;
    if (block->state == PYA_BLOCK_FREE && pya_block_is(next, PYA_BLOCK_FREE) && !is_alone) {
        n_wrong += range_violation(range, block, "two free runs touch");
    }
    if (next != NULL && is_alone && next->addr % PYA_PAGE != 0) {
        n_wrong += range_violation(range, next, "two arenas have parts of one page");
    }
    if (range->slots == NULL) {
        return n_wrong;
    }
    size_t slot = pya_range_slot(range, block->addr);
    bool is_last = block->next == NULL || pya_range_slot(range, block->next->addr) != slot;
    if (slot >= range->n_slots || (is_last && range->slots[slot].last_start != block)) {
        n_wrong += range_violation(range, block, "the slot does not know it");
    }
    return n_wrong;
}

size_t
pya_range_check(const struct pya_range *range) {
    size_t n_wrong = 0;
    size_t n_dead = 0;
    size_t n_recent = 0;
    pya_dptr addr = range->base;
    for (const struct pya_block *block = range->first; block != NULL; block = block->next) {
        if (block->addr != addr) {
            n_wrong += range_violation(range, block, "leaves a gap or overlaps");
        }
        n_wrong += range_check_block(range, block);
        n_dead += block->state == PYA_BLOCK_DEAD;
        n_recent += block->recent != 0 && range->recent[block->recent - 1] == block;
        n_wrong += block->recent != 0 && range->recent[block->recent - 1] != block;
        addr = pya_block_end(block);
    }
    for (size_t i = 0; range->recent != NULL && i < PYA_RANGE_RECENT; i++) {
        n_recent -= range->recent[i] != NULL;
    }
    if (n_recent != 0) {
        (void)fprintf(stderr, "range: a recent block is none of its blocks\n");
        n_wrong++;
    }
    if (addr != range->base + range->bytes) {
        (void)fprintf(stderr, "range %#llx: not tiled\n", (unsigned long long)range->base);
        n_wrong++;
    }
    if (n_dead != range->n_dead) {
        (void)fprintf(stderr, "range: %zu dead blocks, %zu counted\n", n_dead, range->n_dead);
        n_wrong++;
    }
    for (size_t s = 0; s < range->n_slots; s++) {
        bool is_set = (range->starts[s / 64] >> (s % 64)) & 1;
        const struct pya_block *last = range->slots[s].last_start;
        if (is_set != (last != NULL) || (last != NULL && pya_range_slot(range, last->addr) != s)) {
            (void)fprintf(stderr, "range: slot %zu names a block elsewhere\n", s);
            n_wrong++;
        }
    }
    return n_wrong;
}
