/* Requests are followed like a compressor follows a text: a pointer runs along the earlier requests while the new
 * ones have the same sizes.  Where they differ, it looks for the last occurrence of the last few sizes.  Floor 8. */
#include "repeat.h"

#include <stdlib.h>

#include "debug.h"
#include "lay.h"
#include "repeat_internal.h"
#include "spans.h"
#include "stitch.h"

/* After 2 * REPEAT_ENOUGH requests without a streak of REPEAT_LEAST, this many requests are skipped. */
enum { REPEAT_PAUSE = 8 * REPEAT_ENOUGH };
/* Settling: a request whose old place is taken moves to a place that no other request will want during its life.
 * Otherwise it would take another request's place, that one the next one's, and so on for dozens of periods.
 *
 * Done for periods of at least SETTLE_PERIOD requests, from a streak of SETTLE_LEAST on (with less,
 * super_resolution's peak is 1.06 of live memory instead of 1.02) up to a streak of SETTLE_PERIODS periods: what has
 * not settled by then never will.  With a layout it is done from the first request until SETTLE_PERIODS times the
 * layout's requests were made.  SETTLE_RUNS free runs are tried, best fit first. */
#ifdef PYA_TEST_TINY
enum { SETTLE_LEAST = 24, SETTLE_PERIOD = 4 };
#else
enum { SETTLE_LEAST = 512, SETTLE_PERIOD = 32 };
#endif
enum { SETTLE_PERIODS = 16, SETTLE_RUNS = 64 };
/* Settling sorts the places that other requests will want.  Where it never helps (each step makes all tensors anew
 * from those of the last), a step of thousands of blocks would take seconds.  So each request earns the sorting of
 * SETTLE_SPANS places, and the debt is limited to SETTLE_SPANS_MOST. */
enum { SETTLE_SPANS = 64, SETTLE_SPANS_MOST = SETTLE_SPANS * REPEAT_ENOUGH };
/* A period may turn out to have up to LENGTHEN_PARTS parts if LENGTHEN_LEAST frees in a row indicate it.  One alone
 * may be chance where some blocks live for several steps (a replay buffer, a memory bank). */
enum { LENGTHEN_PARTS = 64, LENGTHEN_LEAST = 5 };
/* Limit of blocks passed on the way to a little request's place: a page may hold thousands, and best fit costs less.
 * A layout has such places side by side and relies on each. */
enum { LITTLE_STEPS = 128, LITTLE_STEPS_LAID = 4096 };

_Static_assert(PYA_REPEAT_FROM / PYA_ALIGN < 1 << LITTLE_SIZE_BITS, "a size fits in");

/* The earlier request that corresponds to the new one; n: none is known. */
static size_t
repeat_find(const struct pya_repeat *repeat, size_t bytes) {
    uint64_t mixed = repeat_mixed(bytes);
    if (repeat_is_like(repeat, repeat->follow, mixed)) {
        return repeat->follow;
    }
    uint32_t place = repeat->places[repeat_place(repeat_recent(repeat, mixed))];
    size_t i = repeat->n - (uint32_t)(repeat->n - place);
    return repeat_is_like(repeat, i, mixed) ? i : repeat->n;
}

/* Length of the streak including the new request. */
static size_t
repeat_streak(const struct pya_repeat *repeat) {
    return repeat->like < repeat->n && repeat->like == repeat->follow ? repeat->streak + 1 : 0;
}

/* The same, plus the streak before it if both count as one (REPEAT_RESUME). */
static size_t
repeat_stretch(const struct pya_repeat *repeat) {
    size_t streak = repeat_streak(repeat);
    bool goes_on =
        streak >= REPEAT_RESUME && repeat->n - repeat->n_broken <= streak + REPEAT_RESUME;
    return goes_on ? streak + repeat->broken : streak;
}

static bool
repeat_is_known(struct pya_repeat *repeat) {
    size_t streak = repeat_stretch(repeat);
    /* The layout was made for this program, so one matching request is enough. */
    if (streak < (repeat->is_laid ? 1 : REPEAT_LEAST)) {
        return false;
    }
    repeat->is_promising = true;
    size_t period = repeat->n - repeat->like;
    if (repeat->is_laid || streak >= repeat_n_made(repeat) / REPEAT_SHARE ||
        streak >= REPEAT_ENOUGH) {
        repeat->period = period;
        return true;
    }
    return period == repeat->period && streak >= period;
}

static struct pya_range *
arena_range_at(const struct pya_arena *arena, pya_dptr addr) {
    PYA_STEP();
    struct pya_range *range = arena->ranges;
    while (range != NULL && (addr < range->base || addr >= pya_range_addr(range, range->n_slots))) {
        range = range->next;
    }
    return range;
}

/* The range with pages at the address: usually the arena's own, or that of a stream whose memory it took. */
static struct pya_range *
repeat_range_at(const struct pya_arena *arena, pya_dptr addr) {
    struct pya_range *range = arena_range_at(arena, addr);
    const struct pya_arena *other = arena->card->common;
    for (; range == NULL && other != NULL; other = other->next_common) {
        range = arena_range_at(other, addr);
    }
    return range;
}

struct pya_block *
pya_repeat_run_at(const struct pya_arena *arena, pya_dptr addr, size_t bytes, size_t n_most) {
    struct pya_range *range = repeat_range_at(arena, addr);
    if (range == NULL) {
        return NULL;
    }
    struct pya_block *run = pya_range_block_at(range, addr, n_most);
    bool fits = run != NULL && pya_arena_has_run(arena, run) && addr + bytes <= pya_block_end(run);
    return fits ? run : NULL;
}

/* Makes room for one more request; NULL: there is no memory of requests at all. */
static struct pya_repeat *
repeat_of(struct pya_arena *arena) {
    struct pya_repeat *old = arena->repeat;
    if (old != NULL && (old->n < old->n_room || old->n_room == old->n_most)) {
        return old;
    }
    size_t n_room = (old == NULL ? 0 : old->n_room) + REPEAT_STEP;
    struct pya_repeat *repeat = realloc(old, sizeof *repeat + n_room * sizeof *repeat->kept);
    if (repeat == NULL) {
        if (old != NULL) {
            old->n_most = old->n_room; /* older requests are forgotten from now on */
        }
        return old;
    }
    if (old == NULL) {
        *repeat = (struct pya_repeat){.n_most = REPEAT_KEPT, .n_review = (size_t)2 * REPEAT_ENOUGH};
    }
    repeat->n_room = n_room;
    arena->repeat = repeat;
    return repeat;
}

/* If the program seems to repeat itself, starts to record what settling needs.  Not if streams share memory: they
 * take it from each other, and nothing settles. */
static void
repeat_watch(struct pya_arena *arena) {
    struct pya_repeat *repeat = arena->repeat;
    bool is_likely = repeat->streak >= REPEAT_LEAST && repeat->n - repeat->like >= SETTLE_PERIOD;
    if (arena->stays == NULL && is_likely && !pya_card_is_shared(arena->card)) {
        arena->stays = calloc(REPEAT_KEPT, sizeof *arena->stays);
        arena->littles = arena->stays == NULL ? NULL : calloc(1, sizeof *arena->littles);
        repeat->n_stays = repeat->n;
    }
}

/* Do blocks return to their places of one period ago, unless another block lies there? */
static bool
repeat_is_steady(const struct pya_arena *arena) {
    const struct pya_repeat *repeat = arena->repeat;
    bool is_known = arena->stays != NULL && repeat->like >= repeat->n_stays &&
                    repeat->like >= repeat->n_given && !pya_card_is_shared(arena->card);
    return is_known && repeat->n - repeat->like >= SETTLE_PERIOD &&
           repeat_stretch(repeat) >= SETTLE_LEAST;
}

/* Is it time to settle? */
static bool
repeat_is_settling(const struct pya_arena *arena) {
    const struct pya_repeat *repeat = arena->repeat;
    size_t period = repeat->n - repeat->like;
    size_t streak = repeat_stretch(repeat);
    size_t n_made = repeat_n_made(repeat);
    size_t n = n_made < REPEAT_ENOUGH ? n_made : REPEAT_ENOUGH;
    if (repeat->is_laid && repeat->n / SETTLE_PERIODS <= repeat->n_laid) {
        return repeat->n_sorted <= SETTLE_SPANS_MOST;
    }
    return repeat_is_steady(arena) && repeat->n_sorted <= SETTLE_SPANS_MOST &&
           streak >= n / REPEAT_SHARE && streak <= SETTLE_PERIODS * period;
}

/* Adds the home addresses of the pages that a stitched range lends. */
static void
spans_add_pages(
    struct pya_spans *spans, const struct pya_card *card, const struct pya_stitch *stitch) {
    for (size_t i = pya_stitch_first(stitch); i < pya_stitch_end(stitch); i++) {
        const struct pya_page *page = &card->pages.items[stitch->pages[i]];
        if (page->range != NULL) {
            pya_spans_add(spans, pya_range_addr(page->range, page->slot), PYA_PAGE);
        }
    }
}

/* The parts of `runs` that other requests will want during the new one's life, if everything continues as one period
 * ago. */
static struct pya_spans
spans_wanted(struct pya_arena *arena, const struct pya_spans *runs) {
    struct pya_repeat *repeat = arena->repeat;
    struct pya_spans spans = {.is_whole = true, .within = runs};
    size_t period = repeat->n - repeat->like;
    size_t life = arena->stays[repeat->like % repeat->n_room].life;
    life = life == 0 || life > period ? period : life;
    for (size_t i = repeat->like + 1; i < repeat->like + life; i++) {
        pya_dptr addr = repeat_addr(repeat, i);
        size_t bytes = (size_t)arena->stays[i % repeat->n_room].units * PYA_ALIGN;
        const struct pya_stitch *stitch = pya_stitch_of(arena, addr, bytes);
        if (stitch != NULL) {
            spans_add_pages(&spans, arena->card, stitch);
        } else {
            pya_spans_add(&spans, addr, bytes);
        }
    }
    repeat->n_sorted += spans.n_added;
    pya_spans_join(&spans);
    return spans;
}

/* The best fitting free memory that no other request will want.  The caller has reserved two records. */
static struct pya_block *
repeat_settle(struct pya_arena *arena, size_t bytes) {
    struct pya_block *best = pya_fit_find(&arena->fit, bytes);
    if (best == NULL) {
        return NULL;
    }
    /* Only places that meet these runs must be sorted; most lie elsewhere. */
    struct pya_spans runs = {.is_whole = true};
    struct pya_block *run = best;
    for (int i = 0; i < SETTLE_RUNS && run != NULL; i++) {
        pya_spans_add(&runs, run->addr, run->bytes);
        run = pya_fit_next(&arena->fit, run);
    }
    pya_spans_join(&runs);
    struct pya_spans spans = spans_wanted(arena, &runs);
    struct pya_block *block = NULL;
    bool is_whole = runs.is_whole && spans.is_whole;
    run = best;
    for (int i = 0; i < SETTLE_RUNS && run != NULL && block == NULL && is_whole; i++) {
        const struct pya_span all = {run->addr, pya_block_end(run)};
        struct pya_span left = pya_spans_leave(&spans, all, bytes);
        if (left.end > 0) {
            block = pya_arena_carve(arena, run, left.addr, bytes, PYA_BLOCK_USED);
        } else {
            run = pya_fit_next(&arena->fit, run);
        }
    }
    free(spans.items);
    free(runs.items);
    return block;
}

/* The stitched range that the corresponding request had.  Another one of that size may be free too, but belongs to
 * another request. */
static struct pya_block *
repeat_restitch(struct pya_arena *arena, pya_dptr addr, size_t bytes) {
    struct pya_block *block = NULL;
    pya_card_unpark(arena->card); /* its pages may be at home with other streams */
    struct pya_stitch *stitch = pya_stitch_again(arena, addr, bytes);
    if (stitch == NULL || pya_stitch_take(stitch, bytes, &block) != PYA_OK) {
        return NULL;
    }
    pya_card_note_reuse(arena->card);
    return block;
}

pya_dptr
pya_littles_place(const struct pya_arena *arena, size_t bytes) {
    const struct pya_littles *littles = arena->littles;
    const struct pya_repeat *repeat = arena->repeat;
    size_t next = repeat->follow; /* the expected counterpart of the next large request */
    if (!littles->is_followed || next <= repeat->n_stays || next >= repeat->n) {
        return 0;
    }
    uint32_t i = littles->first[(next - 1) % REPEAT_KEPT] + littles->n -
                 littles->first[(repeat->n - 1) % REPEAT_KEPT];
    uint32_t n_left = littles->first[next % REPEAT_KEPT] - i;
    bool is_kept = n_left - 1 < REPEAT_KEPT && littles->n - i < REPEAT_KEPT;
    uint64_t kept = littles->kept[i % REPEAT_KEPT];
    bool is_like = kept % (1 << LITTLE_SIZE_BITS) == bytes / PYA_ALIGN;
    return is_kept && is_like ? (kept >> LITTLE_SIZE_BITS) * PYA_ALIGN : 0;
}

static struct pya_block *
littles_take(struct pya_arena *arena, size_t bytes) {
    pya_dptr addr = pya_littles_place(arena, bytes);
    struct pya_block *parked = arena->parked;
    if (addr == 0) {
        return NULL;
    }
    if (parked != NULL && parked->addr == addr && parked->bytes == bytes) {
        arena->parked = NULL;
        pya_lay_count(arena);
        return parked;
    }
    if (pya_slab_reserve(&arena->card->blocks, 2) != PYA_OK) {
        return NULL;
    }
    pya_arena_unpark(arena);
    size_t n_most = arena->repeat->is_laid ? LITTLE_STEPS_LAID : LITTLE_STEPS;
    struct pya_block *run = pya_repeat_run_at(arena, addr, bytes, n_most);
    if (run == NULL) {
        (void)pya_lay_lacks(arena, addr, bytes);
        return NULL;
    }
    pya_lay_count(arena);
    return pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED);
}

static void
littles_note(struct pya_littles *littles, const struct pya_block *block) {
    littles->kept[littles->n++ % REPEAT_KEPT] =
        block->addr / PYA_ALIGN << LITTLE_SIZE_BITS | block->bytes / PYA_ALIGN;
}

struct pya_block *
pya_repeat_take(struct pya_arena *arena, size_t bytes) {
    if (bytes < PYA_REPEAT_FROM) {
        return littles_take(arena, bytes);
    }
    struct pya_repeat *repeat = repeat_of(arena);
    if (repeat == NULL) {
        return NULL;
    }
    if (PYA_UNLIKELY(repeat->follow + 1 == repeat->n_laid)) {
        /* The layout's end: from here on requests compare with one period ago.  The little requests before this one
         * still belonged to the layout. */
        repeat->follow = repeat->n - repeat->laid_period;
    }
    repeat->like = repeat_find(repeat, bytes);
    repeat_watch(arena);
    bool is_known = repeat_is_known(repeat);
    repeat->is_known = is_known;
    if (arena->littles != NULL) {
        size_t period = repeat->n - repeat->like;
        bool has_settled = repeat_is_steady(arena) && repeat_stretch(repeat) >= period;
        arena->littles->is_followed = is_known && (has_settled || repeat->is_laid);
    }
    if (!is_known) {
        return NULL;
    }
    if (pya_slab_reserve(&arena->card->blocks, 2) != PYA_OK) {
        return NULL;
    }
    pya_arena_unpark(arena);
    pya_dptr addr = repeat_addr(repeat, repeat->like);
    struct pya_block *run = pya_repeat_run_at(arena, addr, bytes, SIZE_MAX);
    if (run == NULL && pya_lay_lacks(arena, addr, bytes)) {
        return NULL; /* the caller must try pya_lay_fill() */
    }
    struct pya_block *block = run != NULL ? pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED)
                                          : repeat_restitch(arena, addr, bytes);
    if (block == NULL) {
        return repeat_is_settling(arena) ? repeat_settle(arena, bytes) : NULL;
    }
    arena->card->stats.scalar[PYA_STAT_pyalloc_repeats]++;
    pya_lay_count(arena);
    return block;
}

bool
pya_repeat_is_known(const struct pya_arena *arena) {
    return arena->repeat != NULL && arena->repeat->is_known;
}

/* Random sizes never repeat, and looking for repetition is then not worth its cost. */
static void
repeat_review(struct pya_arena *arena) {
    struct pya_repeat *repeat = arena->repeat;
    if (!repeat->is_promising) {
        arena->repeat_pause = REPEAT_PAUSE;
    }
    repeat->is_promising = false;
    repeat->n_review = repeat->n + (size_t)2 * REPEAT_ENOUGH;
}

/* Does the layout belong to another program?  Then a single matching request is chance, and the program is served as
 * without a layout until REPEAT_LEAST in a row match: it may have begun with something the layout lacks, such as
 * loading a state. */
static void
repeat_weigh_layout(struct pya_repeat *repeat) {
    const size_t n_made = repeat_n_made(repeat) + 1;
    const bool is_met = repeat->streak > 0 && repeat->like < repeat->n_laid;
    repeat->n_met += is_met;
    if (is_met && repeat->streak >= REPEAT_LEAST) {
        repeat->is_laid = true;
    } else if (n_made % REPEAT_LEAST == 0) {
        const size_t n_to_meet = n_made < repeat->n_laid ? n_made : repeat->n_laid;
        repeat->is_laid = repeat->is_laid && repeat->n_met >= n_to_meet / REPEAT_SHARE;
    }
}

/* Chooses the expected counterpart of the next request. */
static void
repeat_go_on(struct pya_repeat *repeat) {
    bool is_lost = repeat->like == repeat->n;
    if (is_lost && repeat->is_laid && repeat->n_unforeseen < REPEAT_RESUME) {
        repeat->n_unforeseen++; /* may be one request more than when the layout was made */
        return;
    }
    /* If none is known, `like` is the new request itself: the same size may come again at once. */
    repeat->follow = repeat->like + !is_lost;
    repeat->n_unforeseen = 0;
}

void
pya_repeat_note(struct pya_arena *arena, struct pya_block *block) {
    struct pya_repeat *repeat = arena->repeat;
    if (block->bytes < PYA_REPEAT_FROM) {
        littles_note(arena->littles, block);
        return;
    }
    if (repeat == NULL) {
        return;
    }
    uint64_t mixed = repeat_mixed(block->bytes);
    repeat->kept[repeat->n % repeat->n_room] = block->addr / PYA_ALIGN << REPEAT_SIZE_BITS | mixed;
    repeat->recent = repeat_recent(repeat, mixed);
    repeat->places[repeat_place(repeat->recent)] = (uint32_t)repeat->n;
    size_t streak = repeat_streak(repeat);
    if (streak == 0 && repeat->streak >= REPEAT_LEAST) {
        repeat->broken = repeat->streak;
        repeat->n_broken = repeat->n;
    }
    repeat->streak = streak;
    if (PYA_UNLIKELY(repeat->n_laid > 0)) {
        repeat_weigh_layout(repeat);
    }
    repeat_go_on(repeat);
    if (arena->littles != NULL) {
        arena->littles->first[repeat->n % REPEAT_KEPT] = arena->littles->n;
    }
    if (arena->stays != NULL) {
        size_t units = block->bytes / PYA_ALIGN;
        arena->stays[repeat->n % repeat->n_room] =
            (struct pya_stay){units < UINT32_MAX ? (uint32_t)units : UINT32_MAX, 0};
        block->n_request = (uint32_t)repeat->n + 1;
        repeat->n_sorted -= repeat->n_sorted < SETTLE_SPANS ? repeat->n_sorted : SETTLE_SPANS;
    }
    repeat->n++;
    if (repeat->n == repeat->n_review) {
        repeat_review(arena);
    }
}

/* What is remembered of request i; NULL: nothing, or not any more. */
static const struct pya_stay *
repeat_stay(const struct pya_arena *arena, size_t i) {
    const struct pya_repeat *repeat = arena->repeat;
    bool is_known = i < repeat->n && i >= repeat->n_stays && repeat->n - i < repeat->n_room;
    return is_known ? &arena->stays[i % repeat->n_room] : NULL;
}

/* A step may consist of equal parts (batches whose gradients are accumulated).  Then one part is taken for the
 * period, and a block that outlives its part blocks the place of the next one.  The life of such a block i, just
 * freed, tells the real period: the number of parts between it and the last block with the same size, position in its
 * part and life. */
static void
repeat_lengthen(const struct pya_arena *arena, size_t i) {
    struct pya_repeat *repeat = arena->repeat;
    const struct pya_stay *stay = &arena->stays[i % repeat->n_room];
    size_t part = repeat->n - repeat->follow;
    if (repeat->streak < REPEAT_LEAST || part < SETTLE_PERIOD || stay->life <= part) {
        return;
    }
    size_t period = part;
    const struct pya_stay *like = repeat_stay(arena, i - period);
    while (like != NULL && (like->life != stay->life || like->units != stay->units)) {
        PYA_STEP();
        period += part;
        like = period <= LENGTHEN_PARTS * part ? repeat_stay(arena, i - period) : NULL;
    }
    bool is_told = like != NULL && period == repeat->longer;
    repeat->n_longer = is_told ? repeat->n_longer + 1 : like != NULL;
    repeat->longer = period;
    uint16_t latest = (uint16_t)repeat->kept[(repeat->n - 1) % repeat->n_room];
    if (repeat->n_longer >= LENGTHEN_LEAST &&
        repeat_is_like(repeat, repeat->n - 1 - period, latest)) {
        repeat->follow = repeat->n - period;
    }
}

void
pya_repeat_note_free(const struct pya_block *block) {
    const struct pya_arena *arena = block->arena;
    const struct pya_repeat *repeat = arena->repeat;
    uint32_t life = (uint32_t)repeat->n - block->n_request + 1;
    if (life < repeat->n_room) {
        size_t i = repeat->n - life;
        arena->stays[i % repeat->n_room].life = life;
        repeat_lengthen(arena, i);
    }
}

void
pya_repeat_note_trim(struct pya_arena *arena) {
    if (arena->repeat != NULL) {
        arena->repeat->n_given = arena->repeat->n;
    }
}

size_t
pya_repeat_host_bytes(const struct pya_arena *arena) {
    const struct pya_repeat *repeat = arena->repeat;
    size_t bytes = repeat == NULL ? 0 : sizeof *repeat + repeat->n_room * sizeof *repeat->kept;
    bytes += arena->littles == NULL ? 0 : sizeof *arena->littles;
    return bytes + (arena->stays == NULL ? 0 : REPEAT_KEPT * sizeof *arena->stays);
}
