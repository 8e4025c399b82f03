/* Requests are followed as a compressor follows a text: a pointer runs along the earlier requests while the new ones
 * have the same sizes; where they differ it looks for where the last few sizes came before.  Floor 8. */
#include "repeat.h"

#include <stdlib.h>

#include "debug.h"
#include "spans.h"
#include "stitch.h"

/* A streak is a run of requests each of the same size as the one a period (a training step) before it.  Streaks with a
 * gap of at most REPEAT_RESUME requests between them count together once the second has as many: a step is shorter
 * than the first, which made the optimizer's state.
 *
 * The program is known to repeat itself when its streak has at least REPEAT_LEAST requests, and either one in
 * REPEAT_SHARE of all so far or REPEAT_ENOUGH.  Programs whose steps differ have shorter streaks too, and for them
 * best fit is better (ppo's peak would be 1.07 of live memory instead of 1.02).  After an interruption (an evaluation)
 * one more period of the same length is enough.
 *
 * REPEAT_KEPT requests are remembered: a period must fit in, and two where repeat_lengthen() is to compare them.
 * Room grows by REPEAT_STEP requests. */
#ifdef PYA_TEST_TINY
enum { REPEAT_STEP = 8, REPEAT_LEAST = 8, REPEAT_RESUME = 4 };
#else
enum { REPEAT_STEP = 256, REPEAT_LEAST = 64, REPEAT_RESUME = 8 };
#endif
enum { REPEAT_ENOUGH = 32 * REPEAT_STEP, REPEAT_KEPT = 2 * REPEAT_ENOUGH, REPEAT_SHARE = 4 };
/* After 2 * REPEAT_ENOUGH requests without a streak of REPEAT_LEAST, so many are not looked at. */
enum { REPEAT_PAUSE = 8 * REPEAT_ENOUGH };
/* Settling: a request whose old place is taken moves to one that no other request will want while it lives.  Otherwise
 * it would take another's place, that one the next's, and so on for dozens of periods.
 *
 * Done for periods of at least SETTLE_PERIOD requests, from a streak of SETTLE_LEAST on (with less,
 * super_resolution's peak is 1.06 of live memory instead of 1.02) until one of SETTLE_PERIODS periods: what has not
 * settled by then never will.  SETTLE_RUNS free runs are tried, the best fitting first. */
#ifdef PYA_TEST_TINY
enum { SETTLE_LEAST = 24, SETTLE_PERIOD = 4 };
#else
enum { SETTLE_LEAST = 512, SETTLE_PERIOD = 32 };
#endif
enum { SETTLE_PERIODS = 16, SETTLE_RUNS = 64 };
/* Settling sorts the places that other requests will want.  Where it never helps (each step makes all tensors anew
 * from those of the last), a step of thousands of blocks would take seconds.  So each request earns SETTLE_SPANS
 * places to be sorted, and the debt may reach SETTLE_SPANS_MOST. */
enum { SETTLE_SPANS = 64, SETTLE_SPANS_MOST = SETTLE_SPANS * REPEAT_ENOUGH };
/* A period may turn out to have up to LENGTHEN_PARTS parts, where LENGTHEN_LEAST frees in a row say so: one alone is
 * chance where some blocks live for some steps (a replay buffer, a memory bank). */
enum { LENGTHEN_PARTS = 64, LENGTHEN_LEAST = 5 };
/* Earlier requests are looked up by the last four sizes: one alone comes in every layer of a network. */
enum { REPEAT_SIZE_BITS = 16, REPEAT_PLACE_BITS = 10 };
/* 2^64 / golden ratio: spreads sizes over the hash. */
#define REPEAT_MIX UINT64_C(0x9E3779B97F4A7C15)

/* What is kept of an earlier request, once there is a period to settle. */
struct pya_stay {
    uint32_t units; /* its size in units of PYA_ALIGN, at most UINT32_MAX */
    uint32_t life;  /* requests until it was freed; 0: it was not yet */
};

/* Requests below PYA_REPEAT_FROM ("little" ones), in the order they came; each is found by the number of the large
 * request before it and how many little ones came between.  Best fit puts them a little differently in each step, and
 * one of a kilobyte is enough to be in the way of 32 MiB.  Their sizes say little about where the program is, so
 * streaks are of large requests alone. */
struct pya_littles {
    uint32_t n;       /* requests so far; the latest REPEAT_KEPT are remembered */
    bool is_followed; /* the latest large request was one of a program that has settled */
    uint32_t first[REPEAT_KEPT]; /* by large request: n when it was served */
    uint64_t kept[REPEAT_KEPT];  /* address and size, in units of PYA_ALIGN */
};
enum { LITTLE_SIZE_BITS = 8 };
/* Blocks passed at most on the way to a little one's place: a page may hold thousands, and best fit costs less. */
enum { LITTLE_STEPS = 128 };
_Static_assert(PYA_REPEAT_FROM / PYA_ALIGN < 1 << LITTLE_SIZE_BITS, "a size fits in");

/* A request that fails changes nothing but `like`, is_known and whether littles are followed. */
struct pya_repeat {
    size_t n;          /* requests so far; the latest n_room of them are remembered */
    size_t n_room;     /* grows to n_most */
    size_t n_most;     /* REPEAT_KEPT, or what there was host memory for */
    size_t follow;     /* the earlier request whose size the next one should have, or the latest */
    size_t streak;     /* length of the streak, the latest request included */
    size_t broken;     /* length of the last streak of at least REPEAT_LEAST that ended */
    size_t n_broken;   /* number of the request that ended it */
    size_t like;       /* the earlier request that corresponds to this one; n: none is known */
    size_t period;     /* at which the program was known to repeat itself; 0: never */
    size_t n_review;   /* number of the request at which to decide on a pause */
    size_t n_stays;    /* number of the first request whose stay is kept */
    size_t n_given;    /* number of the next request when pages of the arena were last given back */
    size_t n_sorted;   /* debt of sorted places, see SETTLE_SPANS */
    uint64_t recent;   /* the last four sizes, hashed */
    size_t longer;     /* the latest longer period that a free told */
    size_t n_longer;   /* how many in a row told it */
    bool is_known;     /* this request is one of a program that repeats itself */
    bool is_promising; /* something has repeated since the last review */
    /* by recent sizes: low bits of the number of the request that came then */
    uint32_t places[1 << REPEAT_PLACE_BITS];
    uint64_t kept[]; /* address in units of PYA_ALIGN, and below it the hash of the size */
};

static uint64_t
repeat_mixed(size_t bytes) {
    return ((uint64_t)bytes / PYA_ALIGN * REPEAT_MIX) >> (64 - REPEAT_SIZE_BITS);
}

/* What `recent` becomes with one request more. */
static uint64_t
repeat_recent(const struct pya_repeat *repeat, uint64_t mixed) {
    return repeat->recent << REPEAT_SIZE_BITS | mixed;
}

static size_t
repeat_place(uint64_t recent) {
    return (size_t)((recent * REPEAT_MIX) >> (64 - REPEAT_PLACE_BITS));
}

static pya_dptr
repeat_addr(const struct pya_repeat *repeat, size_t i) {
    return (repeat->kept[i % repeat->n_room] >> REPEAT_SIZE_BITS) * PYA_ALIGN;
}

static bool
repeat_is_like(const struct pya_repeat *repeat, size_t i, uint64_t mixed) {
    bool is_kept = i < repeat->n && repeat->n - i < repeat->n_room;
    return is_kept && (uint16_t)repeat->kept[i % repeat->n_room] == mixed;
}

/* The earlier request that the new one corresponds to; n: none is known. */
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

/* Length of the streak with the new request. */
static size_t
repeat_streak(const struct pya_repeat *repeat) {
    return repeat->like < repeat->n && repeat->like == repeat->follow ? repeat->streak + 1 : 0;
}

/* The same, with the streak before it where that counts together (REPEAT_RESUME). */
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
    if (streak < REPEAT_LEAST) {
        return false;
    }
    repeat->is_promising = true;
    size_t period = repeat->n - repeat->like;
    if (streak >= repeat->n / REPEAT_SHARE || streak >= REPEAT_ENOUGH) {
        repeat->period = period;
        return true;
    }
    return period == repeat->period && streak >= period;
}

static const struct pya_range *
arena_range_at(const struct pya_arena *arena, pya_dptr addr) {
    PYA_STEP();
    const struct pya_range *range = arena->ranges;
    while (range != NULL && (addr < range->base || addr >= pya_range_addr(range, range->n_slots))) {
        range = range->next;
    }
    return range;
}

/* The range that has pages at the address: the arena's own as a rule, or that of a stream it took memory of. */
static const struct pya_range *
repeat_range_at(const struct pya_arena *arena, pya_dptr addr) {
    const struct pya_range *range = arena_range_at(arena, addr);
    const struct pya_arena *other = arena->card->common;
    for (; range == NULL && other != NULL; other = other->next_common) {
        range = arena_range_at(other, addr);
    }
    return range;
}

/* The FREE run of the arena in which [addr, addr + bytes) lies, if no more than n_most blocks are passed on the way. */
static struct pya_block *
repeat_run_at(const struct pya_arena *arena, pya_dptr addr, size_t bytes, size_t n_most) {
    const struct pya_range *range = repeat_range_at(arena, addr);
    if (range == NULL) {
        return NULL;
    }
    struct pya_block *run = pya_range_block_at(range, addr, n_most);
    bool fits = run != NULL && pya_arena_has_run(arena, run) && addr + bytes <= pya_block_end(run);
    return fits ? run : NULL;
}

/* Room for one request more; NULL: none at all. */
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
            old->n_most = old->n_room; /* older ones are forgotten from now on */
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

/* Where the program seems to repeat itself, keeps from now on what settling needs.  Not where streams share memory:
 * they take it from one another, and nothing settles. */
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

/* Do blocks come to lie where they lay a period ago, unless another lies there? */
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
    size_t n = repeat->n < REPEAT_ENOUGH ? repeat->n : REPEAT_ENOUGH;
    return repeat_is_steady(arena) && repeat->n_sorted <= SETTLE_SPANS_MOST &&
           streak >= n / REPEAT_SHARE && streak <= SETTLE_PERIODS * period;
}

/* Adds the home addresses of a stitched range's pages. */
static void
spans_add_pages(
    struct pya_spans *spans, const struct pya_card *card, const struct pya_stitch *stitch) {
    for (size_t i = 0; i < stitch->n_pages; i++) {
        const struct pya_page *page = &card->pages.items[stitch->pages[i]];
        if (page->range != NULL) {
            pya_spans_add(spans, pya_range_addr(page->range, page->slot), PYA_PAGE);
        }
    }
}

/* What other requests will want of `runs` while the new one lives, if all goes on as one period ago. */
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

/* The best fitting free memory that no other request will want; two records were reserved. */
static struct pya_block *
repeat_settle(struct pya_arena *arena, size_t bytes) {
    struct pya_block *best = pya_fit_find(&arena->fit, bytes);
    if (best == NULL) {
        return NULL;
    }
    /* Only what meets these runs need be sorted: most of what is wanted lies elsewhere. */
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

/* The stitched range that the corresponding request had: another of that size may be free too, but is another's. */
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

/* Where the request lay that corresponds to a little one: the one as many behind the large request before it.  0: there
 * was none. */
static pya_dptr
littles_place(const struct pya_arena *arena, size_t bytes) {
    const struct pya_littles *littles = arena->littles;
    const struct pya_repeat *repeat = arena->repeat;
    size_t next = repeat->follow; /* what the next large request should be like */
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
    pya_dptr addr = littles_place(arena, bytes);
    struct pya_block *parked = arena->parked;
    if (addr == 0) {
        return NULL;
    }
    if (parked != NULL && parked->addr == addr && parked->bytes == bytes) {
        arena->parked = NULL;
        return parked;
    }
    if (pya_slab_reserve(&arena->card->blocks, 2) != PYA_OK) {
        return NULL;
    }
    pya_arena_unpark(arena);
    struct pya_block *run = repeat_run_at(arena, addr, bytes, LITTLE_STEPS);
    return run == NULL ? NULL : pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED);
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
    repeat->like = repeat_find(repeat, bytes);
    repeat_watch(arena);
    bool is_known = repeat_is_known(repeat);
    repeat->is_known = is_known;
    if (arena->littles != NULL) {
        size_t period = repeat->n - repeat->like;
        arena->littles->is_followed =
            is_known && repeat_is_steady(arena) && repeat_stretch(repeat) >= period;
    }
    if (!is_known) {
        return NULL;
    }
    if (pya_slab_reserve(&arena->card->blocks, 2) != PYA_OK) {
        return NULL;
    }
    pya_arena_unpark(arena);
    pya_dptr addr = repeat_addr(repeat, repeat->like);
    struct pya_block *run = repeat_run_at(arena, addr, bytes, SIZE_MAX);
    struct pya_block *block = run != NULL ? pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED)
                                          : repeat_restitch(arena, addr, bytes);
    if (block == NULL) {
        return repeat_is_settling(arena) ? repeat_settle(arena, bytes) : NULL;
    }
    arena->card->stats.scalar[PYA_STAT_pyalloc_repeats]++;
    return block;
}

bool
pya_repeat_is_known(const struct pya_arena *arena) {
    return arena->repeat != NULL && arena->repeat->is_known;
}

/* Random sizes never repeat: looking for it is not worth what it costs then. */
static void
repeat_review(struct pya_arena *arena) {
    struct pya_repeat *repeat = arena->repeat;
    if (!repeat->is_promising) {
        arena->repeat_pause = REPEAT_PAUSE;
    }
    repeat->is_promising = false;
    repeat->n_review = repeat->n + (size_t)2 * REPEAT_ENOUGH;
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
    /* `like` is the new request itself where none is known: the same size may come again at once. */
    repeat->follow = repeat->like + (repeat->like < repeat->n);
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

/* What is kept of request i; NULL: nothing, or no more. */
static const struct pya_stay *
repeat_stay(const struct pya_arena *arena, size_t i) {
    const struct pya_repeat *repeat = arena->repeat;
    bool is_known = i < repeat->n && i >= repeat->n_stays && repeat->n - i < repeat->n_room;
    return is_known ? &arena->stays[i % repeat->n_room] : NULL;
}

/* A step may consist of equal parts (batches whose gradients are added up).  Then one part is taken for the period,
 * and a block that outlives its part is in the way of the next one's.  The life of such a block i, just freed, tells
 * the real period: as many parts as lie between it and the last block of its size at that place in a part that lived
 * as long. */
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
