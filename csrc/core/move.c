/* Pages.  Floor 7. */
#include "move.h"

#include <stdlib.h>

#include "debug.h"

/* Minimal number of pages before grains of a size are created.  What a program loads before it frees much mostly
 * stays, so its grains are not half idle later. */
#ifdef PYA_TEST_GRAINS
static const size_t GRAIN_FROM[PYA_N_GRAINS] = {0, 8, 32};
static const size_t GRAIN_FROM_FAST[PYA_N_GRAINS] = {0, 4, 16};
static const size_t GRAIN_FROM_LOADING[PYA_N_GRAINS] = {0, 2, 8};
enum { BROKEN_SHARE = 4 };
#else
static const size_t GRAIN_FROM[PYA_N_GRAINS] = {0, 768, 1536};
static const size_t GRAIN_FROM_FAST[PYA_N_GRAINS] = {0, 256, 1024};
static const size_t GRAIN_FROM_LOADING[PYA_N_GRAINS] = {0, 128, 512};
enum { BROKEN_SHARE = 32 };
#endif
/* A program is loading until it has freed one byte in LOADING_SHARE of its memory. */
enum { LOADING_SHARE = 32 };

/* Sifts runs[i] down in a binary heap with the lowest address on top.  A heap sorts only as many runs as are needed. */
static void
runs_sift(struct pya_block **runs, size_t n, size_t i) {
    struct pya_block *run = runs[i];
    for (size_t child = 2 * i + 1; child < n; child = 2 * i + 1) {
        PYA_STEP();
        child += child + 1 < n && runs[child + 1]->addr < runs[child]->addr;
        if (run->addr < runs[child]->addr) {
            break;
        }
        runs[i] = runs[child];
        i = child;
    }
    runs[i] = run;
}

/* The next grain at or above *slot that lies wholly in the run and has no page marked as leaving.  Moves *slot behind
 * it.  Returns its number of pages; 0: there is none. */
static size_t
run_next(const struct pya_block *run, bool only_left, size_t *slot, pya_page_id *id) {
    const struct pya_pages *pages = &run->arena->card->pages;
    const struct pya_range *range = run->range;
    const size_t end = pya_block_end_slot(run);
    while (*slot < end) {
        *id = range->slots[*slot].page;
        const struct pya_page *page = &pages->items[*id];
        const size_t n = pya_page_n(pages, *id);
        const size_t n_behind = n - page->place;
        bool is_good = page->place == 0 && n <= end - *slot && !page->is_leaving;
        for (size_t i = 0; is_good && only_left && i < n; i++) {
            is_good = page[i].is_left;
        }
        *slot += n_behind;
        if (is_good) {
            return n;
        }
    }
    return 0;
}

static void
run_count(const struct pya_block *run, bool only_left, struct pya_grains *grains) {
    size_t slot = pya_block_first_slot(run);
    pya_page_id id;
    while (run_next(run, only_left, &slot, &id) > 0) {
        PYA_STEP();
        grains->n[run->arena->card->pages.items[id].grain]++;
    }
}

static void
grains_add(void *arg, struct pya_block *run) {
    run_count(run, false, arg);
}

struct pya_grains
pya_grains_count(const struct pya_arena *arena, bool some_leave) {
    struct pya_grains grains = {{0}};
    if (arena->card->pages.n_grained == 0 && !some_leave) {
        grains.n[0] = arena->free_pages;
    } else if (arena->free_pages > 0) {
        pya_fit_visit_pages(&arena->fit, grains_add, &grains);
    }
    return grains;
}

/* Each size divides the next, so the largest comes first. */
size_t
pya_grains_choose(struct pya_grains *grains, size_t n_most) {
    size_t n = 0;
    for (unsigned grain = PYA_N_GRAINS; grain-- > 0;) {
        const size_t n_fit = (n_most - n) / pya_grain_pages(grain);
        grains->n[grain] = grains->n[grain] < n_fit ? grains->n[grain] : n_fit;
        n += grains->n[grain] * pya_grain_pages(grain);
    }
    return n;
}

/* Lowest addresses first, as many as are wanted. */
static size_t
run_pick(const struct pya_block *run, bool only_left, struct pya_grains *wanted, pya_page_id *ids) {
    const struct pya_page *items = run->arena->card->pages.items;
    size_t slot = pya_block_first_slot(run);
    size_t n = 0;
    pya_page_id id;
    for (size_t n_here = run_next(run, only_left, &slot, &id); n_here > 0;
         n_here = run_next(run, only_left, &slot, &id)) {
        if (wanted->n[items[id].grain] == 0) {
            continue;
        }
        wanted->n[items[id].grain]--;
        for (size_t i = 0; i < n_here; i++) {
            ids[n++] = id + (pya_page_id)i;
        }
    }
    return n;
}

size_t
pya_pages_to_pick(const struct pya_arena *arena, size_t n_most, bool some_leave) {
    if (n_most == 0) {
        return 0;
    }
    struct pya_grains grains = pya_grains_count(arena, some_leave);
    return pya_grains_choose(&grains, n_most);
}

/* The runs to pick from, and the grains in them. */
struct choice {
    struct pya_block **runs;
    size_t n;
    struct pya_grains grains;
    uint64_t idle_seq;
    const struct pya_block *except;
    bool only_left;
};

static void
choice_add(void *arg, struct pya_block *run) {
    struct choice *choice = arg;
    if (run->seq <= choice->idle_seq && run != choice->except &&
        pya_run_pages(run->addr, run->bytes) > 0) {
        choice->runs[choice->n++] = run;
        run_count(run, choice->only_left, &choice->grains);
    }
}

/* Lists the arena's runs; the caller frees choice->runs. */
static pya_status
choice_make(struct choice *choice, const struct pya_arena *arena) {
    choice->runs = malloc(arena->fit.n_runs * sizeof(struct pya_block *));
    if (choice->runs == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_fit_visit_pages(&arena->fit, choice_add, choice);
    return PYA_OK;
}

/* Picks the wanted grains, lowest addresses first. */
static size_t
choice_pick(struct choice *choice, struct pya_grains *wanted, pya_page_id *ids) {
    struct pya_block **runs = choice->runs;
    size_t n_runs = choice->n;
    for (size_t i = n_runs / 2; i-- > 0;) {
        runs_sift(runs, n_runs, i);
    }
    const size_t n_wanted = pya_grains_pages(wanted);
    size_t n = 0;
    while (n < n_wanted) {
        PYA_ASSERT(n_runs > 0);
        n += run_pick(runs[0], choice->only_left, wanted, ids + n);
        runs[0] = runs[--n_runs];
        runs_sift(runs, n_runs, 0);
    }
    return n;
}

pya_status
pya_pages_pick(
    struct pya_arena *arena, size_t n_most, const struct pya_arena *taker,
    const struct pya_block *except, pya_page_id *ids, size_t *n_out) {
    *n_out = 0;
    bool only_left = taker != NULL && arena->pool != NULL && !arena->pool->is_settled;
    if (arena->free_pages == 0 || n_most == 0 || (only_left && !arena->has_left)) {
        return PYA_OK;
    }
    bool is_any = taker == NULL || only_left;
    struct choice choice = {
        .idle_seq = is_any ? UINT64_MAX : pya_arena_idle_for(arena, taker),
        .except = except,
        .only_left = only_left,
    };
    pya_status st = choice_make(&choice, arena);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_grains wanted = choice.grains;
    if (only_left && pya_grains_pages(&wanted) == 0) {
        arena->has_left = false; /* no need to look again */
    }
    (void)pya_grains_choose(&wanted, n_most);
    *n_out = choice_pick(&choice, &wanted, ids);
    free(choice.runs);
    return PYA_OK;
}

pya_status
pya_grains_pick(struct pya_arena *arena, const struct pya_grains *grains, pya_page_id *ids) {
    if (pya_grains_pages(grains) == 0) {
        return PYA_OK;
    }
    struct choice choice = {.idle_seq = UINT64_MAX};
    pya_status st = choice_make(&choice, arena);
    if (st != PYA_OK) {
        return st;
    }
    struct pya_grains wanted = *grains;
    (void)choice_pick(&choice, &wanted, ids);
    free(choice.runs);
    return PYA_OK;
}

/* A page's home before it moved. */
struct old_home {
    struct pya_range *range;
    size_t slot;
};

static void
pages_leave(const struct old_home *old, size_t n_pages) {
    for (size_t i = 0; i < n_pages;) {
        struct pya_range *range = old[i].range;
        struct pya_block *run = pya_range_free_run(range, old[i].slot);
        PYA_ASSERT(run != NULL);
        struct pya_arena *arena = run->arena;
        size_t end = pya_block_end_slot(run);
        size_t k = 1;
        while (i + k < n_pages && old[i + k].range == range && old[i + k].slot == old[i].slot + k &&
               old[i + k].slot < end) {
            k++;
        }
        struct pya_block *left = pya_arena_carve(
            arena, run, pya_range_addr(range, old[i].slot), k * PYA_PAGE, PYA_BLOCK_USED);
        pya_range_kill(range, left);
        pya_dptr addr = pya_range_addr(range, old[i].slot);
        size_t n_small = pya_arena_small_pages(arena, range, addr, k);
        pya_arena_note_unmapped(arena, range, addr, k, n_small);
        i += k;
    }
}

pya_status
pya_pages_move(
    struct pya_arena *arena, struct pya_block *hole, const pya_page_id *ids, size_t n_pages) {
    struct pya_card *card = arena->card;
    /* One cut of the hole; and in the worst case for each page a piece and the rest above it. */
    pya_status st = pya_slab_reserve(&card->blocks, 2 * n_pages + 2);
    if (st != PYA_OK) {
        return st;
    }
    struct old_home *old = malloc(n_pages * sizeof *old);
    if (old == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    for (size_t i = 0; i < n_pages; i++) {
        const struct pya_page *page = &card->pages.items[ids[i]];
        old[i] = (struct old_home){page->range, page->slot};
    }
    struct pya_range *range = hole->range;
    pya_dptr addr = hole->addr;
    st = pya_arena_settle(arena, hole, ids, n_pages);
    if (st == PYA_OK) {
        pages_leave(old, n_pages);
        /* Only now: counting them at both homes would show a peak that never was. */
        pya_arena_note_mapped(arena, range, addr, n_pages);
        card->stats.scalar[PYA_STAT_pyalloc_page_moves] += (int64_t)n_pages;
    }
    free(old);
    return st;
}

/* Is little left of the card, or of the limit? */
static bool
card_is_almost_full(const struct pya_card *card, size_t n_pages) {
    const size_t total = card->caps.total_bytes;
    const size_t most = card->limit_bytes < total ? card->limit_bytes : total;
    return card->reserved_bytes / PYA_PAGE + n_pages > most / PYA_PAGE / 4 * 3;
}

static bool
card_is_loading(const struct pya_card *card, size_t n_all) {
    const int64_t freed = card->stats.live.out[PYA_LIVE_BYTES][PYA_LIVE_LARGE];
    return (size_t)freed / PYA_PAGE < n_all / LOADING_SHARE;
}

/* Do more than n_most pages, of the arena and of those that may give it theirs, lie idle in grains that are partly in
 * use?  Usually hardly anything is free when memory grows, and then no search is needed. */
static bool
grains_are_broken(const struct pya_arena *arena, size_t n_most) {
    const struct pya_arena *givers = pya_givers(arena->card);
    size_t n_free = arena->free_pages;
    for (const struct pya_arena *a = givers; a != NULL && n_free <= n_most;
         a = pya_givers_next(a)) {
        PYA_STEP();
        n_free += a == arena ? 0 : a->free_pages;
    }
    if (n_free <= n_most) {
        return false;
    }
    size_t n_broken = arena->free_pages - pya_pages_to_pick(arena, SIZE_MAX, false);
    for (const struct pya_arena *a = givers; a != NULL && n_broken <= n_most;
         a = pya_givers_next(a)) {
        PYA_STEP();
        n_broken += a == arena ? 0 : a->free_pages - pya_pages_to_pick(a, SIZE_MAX, false);
    }
    return n_broken > n_most;
}

/* Free pages whose grains are partly in use can hardly be stitched and cannot be given back.  Once they are more than
 * a small share, in the streams' arenas together, or memory may soon be short, no larger grains are created. */
static unsigned
grain_for(const struct pya_arena *arena, size_t n_pages, size_t n_foreseen) {
    const struct pya_card *card = arena->card;
    const int memory = (int)card->options.memory;
    const size_t n_now = card->pages.n_live + n_pages;
    const size_t n_all = n_now > n_foreseen ? n_now : n_foreseen;
    const size_t *from = card_is_loading(card, n_now) ? GRAIN_FROM_LOADING
                         : memory == PYA_MEMORY_FAST  ? GRAIN_FROM_FAST
                                                      : GRAIN_FROM;
    if (memory == PYA_MEMORY_TIGHT || n_all < from[1] || card->is_short ||
        card_is_almost_full(card, n_pages)) {
        return 0;
    }
    bool is_broken = n_foreseen == 0 && grains_are_broken(arena, n_all / BROKEN_SHARE);
    unsigned grain = PYA_N_GRAINS - 1;
    while (is_broken ? grain > 0 : n_all < from[grain]) {
        grain--;
    }
    return grain;
}

pya_status
pya_pages_grow_foreseen(
    struct pya_arena *arena, struct pya_block *hole, size_t n_pages, size_t n_most,
    size_t n_foreseen, bool is_small) {
    const unsigned grain = grain_for(arena, n_pages, n_foreseen);
    const size_t n_padded = pya_round_up(n_pages, pya_grain_pages(grain));
    const size_t n = n_padded < n_most ? n_padded : n_most;
    return pya_arena_grow(arena, hole, n, grain, is_small);
}

pya_status
pya_pages_grow(struct pya_arena *arena, struct pya_block *hole, size_t n_pages, bool is_small) {
    return pya_pages_grow_foreseen(arena, hole, n_pages, n_pages, 0, is_small);
}
