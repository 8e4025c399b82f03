/* Requests are followed as a compressor follows a text: a pointer runs along the earlier requests while the new ones have
 * the same sizes; where they differ it looks for where the last few sizes came before.  Floor 7. */
#include "repeat.h"

#include <stdlib.h>

#include "debug.h"

/* So many requests are remembered: a period (a training step) must fit in.  The program is known to repeat itself once
 * the last REPEAT_LEAST requests were as before and are this share of all, or all that is remembered: programs whose steps
 * differ have stretches that repeat too, and for them best fit is better (ppo's peak would be 1.07 of live memory instead
 * of 1.02).  Later, when something came between (an evaluation), one more period of the same length is enough. */
#ifdef PYA_TEST_TINY
enum { REPEAT_STEP = 8, REPEAT_LEAST = 8 };
#else
enum { REPEAT_STEP = 256, REPEAT_LEAST = 64 };
#endif
enum { REPEAT_KEPT = 32 * REPEAT_STEP, REPEAT_SHARE = 4 };
/* Where nothing repeated within two times what is remembered, nobody looks for so many requests. */
enum { REPEAT_PAUSE = 8 * REPEAT_KEPT };
/* Places are looked up by the last four sizes: one alone comes in every layer of a network. */
enum { REPEAT_SIZE_BITS = 16, REPEAT_PLACE_BITS = 10 };
#define REPEAT_MIX UINT64_C(0x9E3779B97F4A7C15)

/* A request that fails changes nothing but `like`. */
struct pya_repeat {
    size_t n;          /* requests so far; the latest n_room of them are remembered */
    size_t n_room;     /* grows to n_most */
    size_t n_most;     /* REPEAT_KEPT, or what there was host memory for */
    size_t follow;     /* the earlier request that the next one should be like, or the latest */
    size_t streak;     /* how many in a row were */
    size_t like;       /* the earlier request that this one is like; n: none is known */
    size_t period;     /* at which the program was known to repeat itself; 0: never */
    size_t n_review;   /* when to see whether looking is worth it */
    uint64_t recent;   /* the last four sizes, mixed */
    bool is_promising; /* something has repeated since the last review */
    /* by recent sizes: low bits of the number of the request that came then */
    uint32_t places[1 << REPEAT_PLACE_BITS];
    uint64_t kept[]; /* address, in units of PYA_ALIGN (0: not at home), and size, mixed */
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

static bool
repeat_is_like(const struct pya_repeat *repeat, size_t i, uint64_t mixed) {
    bool is_kept = i < repeat->n && repeat->n - i < repeat->n_room;
    return is_kept && (uint16_t)repeat->kept[i % repeat->n_room] == mixed;
}

/* The earlier request that the new one is like. */
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

/* With the new one. */
static size_t
repeat_streak(const struct pya_repeat *repeat) {
    return repeat->like < repeat->n && repeat->like == repeat->follow ? repeat->streak + 1 : 0;
}

static bool
repeat_is_known(struct pya_repeat *repeat) {
    size_t streak = repeat_streak(repeat);
    if (streak < REPEAT_LEAST) {
        return false;
    }
    repeat->is_promising = true;
    size_t period = repeat->n - repeat->like;
    if (streak >= repeat->n / REPEAT_SHARE || streak >= REPEAT_KEPT) {
        repeat->period = period;
        return true;
    }
    return period == repeat->period && streak >= period;
}

/* The range that has pages, of whatever stream, at the address. */
static const struct pya_range *
repeat_range_at(const struct pya_card *card, pya_dptr addr) {
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
            if (addr >= range->base && addr < pya_range_addr(range, range->n_slots)) {
                return range;
            }
        }
    }
    return NULL;
}

/* The FREE run of the arena in which [addr, addr + bytes) lies. */
static struct pya_block *
repeat_run_at(const struct pya_arena *arena, pya_dptr addr, size_t bytes) {
    const struct pya_range *range = repeat_range_at(arena->card, addr);
    if (range == NULL) {
        return NULL;
    }
    struct pya_block *run = pya_range_block_at(range, addr);
    bool fits = pya_arena_has_run(arena, run) && addr + bytes <= pya_block_end(run);
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
        *repeat = (struct pya_repeat){.n_most = REPEAT_KEPT, .n_review = (size_t)2 * REPEAT_KEPT};
    }
    repeat->n_room = n_room;
    arena->repeat = repeat;
    return repeat;
}

struct pya_block *
pya_repeat_take(struct pya_arena *arena, size_t bytes) {
    struct pya_repeat *repeat = repeat_of(arena);
    if (repeat == NULL) {
        return NULL;
    }
    repeat->like = repeat_find(repeat, bytes);
    if (!repeat_is_known(repeat)) {
        return NULL;
    }
    pya_dptr addr = (repeat->kept[repeat->like % repeat->n_room] >> REPEAT_SIZE_BITS) * PYA_ALIGN;
    if (pya_slab_reserve(&arena->card->blocks, 2) != PYA_OK) {
        return NULL;
    }
    pya_arena_unpark(arena);
    struct pya_block *run = repeat_run_at(arena, addr, bytes);
    if (run == NULL) {
        return NULL;
    }
    arena->card->stats.scalar[PYA_STAT_pyalloc_repeats]++;
    return pya_arena_carve(arena, run, addr, bytes, PYA_BLOCK_USED);
}

/* Random sizes never repeat: then it is not worth what it costs. */
static void
repeat_review(struct pya_arena *arena) {
    struct pya_repeat *repeat = arena->repeat;
    if (!repeat->is_promising) {
        arena->repeat_pause = REPEAT_PAUSE;
    }
    repeat->is_promising = false;
    repeat->n_review = repeat->n + (size_t)2 * REPEAT_KEPT;
}

void
pya_repeat_note(struct pya_arena *arena, const struct pya_block *block) {
    struct pya_repeat *repeat = arena->repeat;
    if (repeat == NULL) {
        return;
    }
    size_t i = repeat->n % repeat->n_room;
    bool is_home = block->state == PYA_BLOCK_USED;
    pya_dptr addr = is_home ? block->addr / PYA_ALIGN : 0;
    uint64_t mixed = repeat_mixed(block->bytes);
    repeat->kept[i] = addr << REPEAT_SIZE_BITS | mixed;
    repeat->recent = repeat_recent(repeat, mixed);
    repeat->places[repeat_place(repeat->recent)] = (uint32_t)repeat->n;
    repeat->streak = repeat_streak(repeat);
    repeat->follow =
        repeat->like + (repeat->like < repeat->n); /* the same size may come again at once */
    repeat->n++;
    if (repeat->n == repeat->n_review) {
        repeat_review(arena);
    }
}

size_t
pya_repeat_host_bytes(const struct pya_arena *arena) {
    const struct pya_repeat *repeat = arena->repeat;
    return repeat == NULL ? 0 : sizeof *repeat + repeat->n_room * sizeof *repeat->kept;
}
