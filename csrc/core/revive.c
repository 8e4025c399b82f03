/* Reviving dead addresses.  Floor 7. */
#include "revive.h"

#include "debug.h"

/* Slots looked at per request: what keeps a miss bounded. */
enum { REVIVE_MOST_SLOTS = 512, REVIVE_PAGES = 128 };

/* A stretch being collected: [start, end) in one range.  Its pages are marked is_leaving, so that none is
 * counted twice. */
struct stretch {
    struct pya_arena *arena;
    struct pya_range *range;
    pya_dptr start;
    pya_dptr end;
    size_t bytes; /* wanted */
    size_t most;  /* collected before it is enough */
    size_t n_slots_left;
    pya_dptr
        limit; /* no further: what follows is neither free nor dead, or will not be looked at */
    size_t n_left_at_limit; /* of n_slots_left, when all up to there was looked at */
};

static struct pya_page *
stretch_page(const struct stretch *s, size_t slot) {
    return &s->arena->card->pages.items[s->range->slots[slot].page];
}

/* Forgets what was collected; the next one may start at addr. */
static void
stretch_reset(struct stretch *s, pya_dptr addr) {
    for (pya_dptr a = pya_round_up(s->start, PYA_PAGE); a < s->end; a += PYA_PAGE) {
        stretch_page(s, pya_range_slot(s->range, a))->is_leaving = false;
    }
    s->start = addr;
    s->end = addr;
}

/* May this page come home to the arena, whatever the stretch has already? */
static bool
page_may_come(const struct stretch *s, const struct pya_page *page) {
    const struct pya_range *home = page->range;
    if (home == NULL) {
        return false;
    }
    const struct pya_block *run = pya_range_free_run(home, page->slot);
    if (run == NULL) {
        return false;
    }
    const struct pya_arena *from = run->arena;
    return from == s->arena ||
           (from->pool == NULL && run->seq <= pya_arena_idle_for(from, s->arena));
}

/* Is it part of the stretch already, or will it be? */
static bool
page_is_counted(const struct stretch *s, const struct pya_page *page) {
    pya_dptr addr = pya_range_addr(page->range, page->slot);
    return page->is_leaving ||
           (page->range == s->range && addr >= s->start && addr < s->start + s->most + PYA_PAGE);
}

/* Would it stay too short even if all the rest came home?  Then the rest counts as looked at: most slots are passed over
 * in this way, which matters because to look at one takes several reads from anywhere in memory. */
static bool
stretch_is_hopeless(struct stretch *s) {
    if (s->limit >= s->start && s->limit - s->start >= s->bytes) {
        return false;
    }
    s->n_slots_left = s->n_left_at_limit;
    return true;
}

/* [from, end): the slots of this dead block that a stretch which ends at `from` cannot do without.  Returns the last of
 * them whose page will not come, which rules out all before it, or the address below `from`. */
static pya_dptr
stretch_last_bad(
    const struct stretch *s, const struct pya_block *block, pya_dptr from, pya_dptr end) {
    pya_dptr a = end - PYA_PAGE;
    while (a >= from && !block->is_broken &&
           page_may_come(s, stretch_page(s, pya_range_slot(s->range, a)))) {
        PYA_STEP();
        a -= PYA_PAGE;
    }
    return a;
}

/* Nothing up to here will do.  True: nor will what follows. */
static bool
stretch_skip(struct stretch *s, pya_dptr end, size_t n_slots) {
    s->n_slots_left -= n_slots < s->n_slots_left ? n_slots : s->n_slots_left;
    stretch_reset(s, end);
    return stretch_is_hopeless(s);
}

static bool
stretch_add_dead(struct stretch *s, const struct pya_block *block) {
    pya_dptr known = block->addr; /* the pages of all slots before may come */
    for (pya_dptr a = block->addr; a < pya_block_end(block); a += PYA_PAGE) {
        pya_dptr needed = pya_round_up(s->start + s->bytes, PYA_PAGE);
        if (a >= known && a < needed) {
            known = needed < pya_block_end(block) ? needed : pya_block_end(block);
            pya_dptr bad = stretch_last_bad(s, block, a, known);
            if (bad >= a) {
                if (stretch_skip(s, bad + PYA_PAGE, ((bad - a) >> PYA_PAGE_SHIFT) + 1)) {
                    return true;
                }
                a = bad;
                continue;
            }
        }
        struct pya_page *page = stretch_page(s, pya_range_slot(s->range, a));
        bool may_come = a < known || (!block->is_broken && page_may_come(s, page));
        if (!may_come || page_is_counted(s, page)) {
            if (a >= needed) {
                s->n_slots_left -= s->n_slots_left > 0;
                return true;
            }
            if (stretch_skip(s, a + PYA_PAGE, 1)) {
                return true;
            }
            continue;
        }
        s->n_slots_left -= s->n_slots_left > 0;
        page->is_leaving = true;
        s->end = a + PYA_PAGE;
        if (s->end - s->start >= s->most) {
            return true;
        }
    }
    return false;
}

/* A free run: the pages that begin in it are marked, so that no dead slot further on counts them again. */
static bool
stretch_add_free(struct stretch *s, const struct pya_block *run) {
    pya_dptr end = pya_block_end(run);
    for (pya_dptr a = pya_round_up(run->addr, PYA_PAGE); a < end; a += PYA_PAGE) {
        struct pya_page *page = stretch_page(s, pya_range_slot(s->range, a));
        if (page->is_leaving) { /* an earlier dead slot wants it: start over here */
            if (s->end - s->start >= s->bytes) {
                /* Enough without this run; the marks it made so far go. */
                for (pya_dptr m = pya_round_up(run->addr, PYA_PAGE); m < a; m += PYA_PAGE) {
                    stretch_page(s, pya_range_slot(s->range, m))->is_leaving = false;
                }
                return true;
            }
            stretch_reset(s, run->addr);
        }
        page->is_leaving = true;
    }
    s->end = end;
    return s->end - s->start >= s->most;
}

/* Where the stretch that begins with this block must end. */
static void
stretch_bound(struct stretch *s, const struct pya_block *block) {
    size_t n_left = s->n_slots_left;
    s->limit = block->addr;
    for (; block != NULL && block->arena == s->arena && n_left > 0; block = block->next) {
        PYA_STEP();
        if (block->state == PYA_BLOCK_DEAD) {
            size_t n = block->bytes >> PYA_PAGE_SHIFT;
            n_left -= n < n_left ? n : n_left;
        } else if (block->state != PYA_BLOCK_FREE) {
            break;
        }
        s->limit = pya_block_end(block);
    }
    s->n_left_at_limit = n_left;
}

static bool
stretch_collect(struct stretch *s, struct pya_block *dead) {
    struct pya_block *block = pya_arena_has_run(s->arena, dead->prev) ? dead->prev : dead;
    s->range = dead->range;
    s->start = block->addr;
    s->end = block->addr;
    stretch_bound(s, block);
    if (stretch_is_hopeless(s)) {
        return false;
    }
    for (; block != NULL && block->arena == s->arena; block = block->next) {
        bool is_done = false;
        if (block->state == PYA_BLOCK_FREE) {
            is_done = stretch_add_free(s, block);
        } else if (block->state == PYA_BLOCK_DEAD) {
            is_done = stretch_add_dead(s, block);
        } else {
            break;
        }
        if (is_done || s->n_slots_left == 0) {
            break;
        }
    }
    return s->end - s->start >= s->bytes;
}

/* Brings the page of one dead slot home; the slot is already a block of its own in state USED. */
static void
page_come_home(struct pya_arena *arena, struct pya_range *range, size_t slot) {
    struct pya_page *page = &arena->card->pages.items[range->slots[slot].page];
    struct pya_range *old = page->range;
    size_t old_slot = page->slot;
    struct pya_block *run = pya_range_free_run(old, old_slot);
    PYA_ASSERT(run != NULL);
    struct pya_arena *from = run->arena;
    struct pya_block *left =
        pya_arena_carve(from, run, pya_range_addr(old, old_slot), PYA_PAGE, PYA_BLOCK_USED);
    pya_block_make_dead(left);
    pya_arena_note_unmapped(from, old, pya_range_addr(old, old_slot), 1, page->is_small);
    page->range = range;
    page->slot = (uint32_t)slot;
}

/* Cuts the slots [first, end) out of a dead block as a USED block. */
static struct pya_block *
dead_cut(struct pya_arena *arena, struct pya_block *dead, pya_dptr addr, size_t bytes) {
    struct pya_range *range = dead->range;
    size_t above = (size_t)(pya_block_end(dead) - (addr + bytes));
    pya_block_drop_dead(dead);
    if (addr > dead->addr) {
        struct pya_block *below = pya_slab_take(&arena->card->blocks);
        below->addr = dead->addr;
        below->bytes = (size_t)(addr - dead->addr);
        below->state = PYA_BLOCK_USED;
        pya_range_drop_start(range, dead);
        dead->addr = addr;
        pya_range_add_start(range, dead);
        pya_range_link_below(range, dead, below);
        pya_block_make_dead(below);
    }
    dead->bytes = bytes;
    if (above > 0) {
        struct pya_block *rest = pya_slab_take(&arena->card->blocks);
        rest->addr = addr + bytes;
        rest->bytes = above;
        rest->state = PYA_BLOCK_USED;
        pya_range_link_above(range, dead, rest);
        pya_block_make_dead(rest);
    }
    return dead;
}

static void
stretch_revive(const struct stretch *s, struct pya_block *block) {
    struct pya_arena *arena = s->arena;
    while (block != NULL && block->addr < s->end) {
        struct pya_block *next = block->next;
        if (block->state == PYA_BLOCK_DEAD) {
            pya_dptr first = block->addr > s->start ? block->addr : s->start;
            pya_dptr end = pya_block_end(block) < s->end ? pya_block_end(block) : s->end;
            size_t n = (size_t)((end - first) >> PYA_PAGE_SHIFT);
            struct pya_block *piece = dead_cut(arena, block, first, (size_t)(end - first));
            for (size_t i = 0; i < n; i++) {
                page_come_home(arena, s->range, pya_range_slot(s->range, first) + i);
            }
            pya_arena_note_mapped(arena, s->range, first, n);
            next = pya_arena_give(arena, piece)->next;
        }
        block = next;
    }
}

static pya_status
stretch_commit(struct stretch *s, bool *found) {
    struct pya_arena *arena = s->arena;
    pya_dptr start = s->start;
    pya_dptr end = s->end;
    size_t n_slots = (size_t)((end - start) >> PYA_PAGE_SHIFT) + 2;
    /* Unmarks the pages but keeps the bounds. */
    stretch_reset(s, start);
    s->end = end;
    /* Per page a carve in two, per dead block a cut in three. */
    pya_status st = pya_slab_reserve(&arena->card->blocks, 4 * n_slots + 4);
    if (st != PYA_OK) {
        return st;
    }
    size_t slot = pya_range_slot(s->range, start);
    struct pya_block *block = s->range->slots[slot].last_start;
    while (block == NULL && slot > 0) {
        block = s->range->slots[--slot].last_start;
    }
    while (block != NULL && block->addr > start) {
        block = block->prev;
    }
    stretch_revive(s, block);
    arena->card->stats.scalar[PYA_STAT_pyalloc_revivals]++;
    arena->card->n_reused++;
    *found = true;
    return PYA_OK;
}

pya_status
pya_arena_revive(struct pya_arena *arena, size_t bytes, bool *found) {
    struct stretch s = {
        .arena = arena,
        .bytes = bytes,
        .most = bytes > REVIVE_PAGES * PYA_PAGE ? bytes : REVIVE_PAGES * PYA_PAGE,
        .n_slots_left = REVIVE_MOST_SLOTS};
    *found = false;
    for (struct pya_block *dead = arena->dead; dead != NULL && s.n_slots_left > 0;
         dead = dead->next_gap) {
        /* Each stretch is tried from its first dead block on. */
        const struct pya_block *below =
            pya_arena_has_run(arena, dead->prev) ? dead->prev->prev : dead->prev;
        bool is_first = !pya_block_is(below, PYA_BLOCK_DEAD) || below->arena != arena;
        if (is_first && stretch_collect(&s, dead)) {
            return stretch_commit(&s, found);
        }
        if (is_first) {
            stretch_reset(&s, s.start);
        }
    }
    return PYA_OK;
}
