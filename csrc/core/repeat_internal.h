/* What is remembered of earlier requests: the body of repeat.c and lay.c.  Floor 8, private. */
#pragma once

#include "layout.h"
#include "repeat.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* A request that fails changes nothing but `like`, is_known and whether littles are followed. */
struct pya_repeat {
    size_t n;        /* requests so far; the latest n_room of them are remembered */
    size_t n_room;   /* grows to n_most */
    size_t n_most;   /* REPEAT_KEPT, or what there was host memory for */
    size_t follow;   /* the earlier request whose size the next one should have, or the latest */
    size_t streak;   /* length of the streak, the latest request included */
    size_t broken;   /* length of the last streak of at least REPEAT_LEAST that ended */
    size_t n_broken; /* number of the request that ended it */
    size_t like;     /* the earlier request that corresponds to this one; n: none is known */
    size_t period;   /* at which the program was known to repeat itself; 0: never */
    size_t n_review; /* number of the request at which to decide on a pause */
    size_t n_stays;  /* number of the first request whose stay is kept */
    size_t n_given;  /* number of the next request when pages of the arena were last given back */
    size_t n_sorted; /* debt of sorted places, see SETTLE_SPANS */
    uint64_t recent; /* the last four sizes, hashed */
    size_t longer;   /* the latest longer period that a free told */
    size_t n_longer; /* how many in a row told it */
    size_t
        n_laid; /* earlier requests that never were: those of a layout, between two that are like none; 0: none */
    size_t laid_period;  /* of the layout; 0: its program does not repeat itself */
    pya_dptr laid_from;  /* where the layout's places begin, */
    pya_dptr laid_to;    /* and end */
    size_t n_unforeseen; /* requests in a row that the layout does not have */
    size_t n_met;        /* requests that the layout does have, in its order */
    bool is_laid;        /* the layout is of this program, as far as is known */
    bool is_known;       /* this request is one of a program that repeats itself */
    bool is_promising;   /* something has repeated since the last review */
    /* by recent sizes: low bits of the number of the request that came then */
    uint32_t places[1 << REPEAT_PLACE_BITS];
    uint64_t kept[]; /* address in units of PYA_ALIGN, and below it the hash of the size */
};

static inline uint64_t
repeat_mixed(size_t bytes) {
    return ((uint64_t)bytes / PYA_ALIGN * REPEAT_MIX) >> (64 - REPEAT_SIZE_BITS);
}

/* What `recent` becomes with one request more. */
static inline uint64_t
repeat_recent(const struct pya_repeat *repeat, uint64_t mixed) {
    return repeat->recent << REPEAT_SIZE_BITS | mixed;
}

static inline size_t
repeat_place(uint64_t recent) {
    return (size_t)((recent * REPEAT_MIX) >> (64 - REPEAT_PLACE_BITS));
}

static inline pya_dptr
repeat_addr(const struct pya_repeat *repeat, size_t i) {
    return (repeat->kept[i % repeat->n_room] >> REPEAT_SIZE_BITS) * PYA_ALIGN;
}

static inline bool
repeat_is_like(const struct pya_repeat *repeat, size_t i, uint64_t mixed) {
    bool is_kept = i < repeat->n && repeat->n - i < repeat->n_room;
    return is_kept && (uint16_t)repeat->kept[i % repeat->n_room] == mixed;
}

/* Requests that were made, those of a layout not counted. */
static inline size_t
repeat_n_made(const struct pya_repeat *repeat) {
    return repeat->n - repeat->n_laid;
}

/* The FREE run of the arena in which [addr, addr + bytes) lies, if no more than n_most blocks are passed on the way. */
struct pya_block *
pya_repeat_run_at(const struct pya_arena *arena, pya_dptr addr, size_t bytes, size_t n_most);
/* Where the request lay that corresponds to a little one: the one as many behind the large request before it.  0: there
 * was none. */
pya_dptr pya_littles_place(const struct pya_arena *arena, size_t bytes);

#ifdef __cplusplus
}
#endif
