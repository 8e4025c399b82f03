/* The memory of earlier requests, shared by repeat.c and lay.c.  Floor 8, private. */
#pragma once

#include "layout.h"
#include "repeat.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A streak is a run of requests each of the same size as the one a period (a training step) before it.  Two streaks
 * with a gap of at most REPEAT_RESUME requests count as one once the second has that many requests too: the later
 * steps lack the requests of the first one that made the optimizer's state.
 *
 * The program is known to repeat itself when its streak has at least REPEAT_LEAST requests, and either REPEAT_ENOUGH
 * or one REPEAT_SHARE-th of all requests so far.  Programs whose steps differ have shorter streaks, and best fit
 * serves them better (ppo's peak would be 1.07 of live memory instead of 1.02).  After an interruption (an
 * evaluation) one more period of the same length is enough.
 *
 * REPEAT_KEPT requests are remembered: a period must fit, and two periods for repeat_lengthen() to compare.  Room
 * grows by REPEAT_STEP requests. */
#ifdef PYA_TEST_TINY
enum { REPEAT_STEP = 8, REPEAT_LEAST = 8, REPEAT_RESUME = 4 };
#else
enum { REPEAT_STEP = 256, REPEAT_LEAST = 64, REPEAT_RESUME = 8 };
#endif
enum { REPEAT_ENOUGH = 32 * REPEAT_STEP, REPEAT_KEPT = 2 * REPEAT_ENOUGH, REPEAT_SHARE = 4 };

/* Earlier requests are found by the last four sizes, because a single size recurs in every layer of a network. */
enum { REPEAT_SIZE_BITS = 16, REPEAT_PLACE_BITS = 10 };
/* 2^64 / golden ratio: spreads sizes over the hash. */
#define REPEAT_MIX UINT64_C(0x9E3779B97F4A7C15)

/* What is remembered of an earlier request once a period is to settle. */
struct pya_stay {
    uint32_t units; /* its size in units of PYA_ALIGN, at most UINT32_MAX */
    uint32_t life;  /* requests from it to its free; 0: not freed yet */
};

/* Requests below PYA_REPEAT_FROM ("little" ones), in order.  Each is found by the number of the large request before
 * it and its position after that.  Best fit places them slightly differently in each step, and one of a kilobyte is
 * enough to block 32 MiB.  Their sizes say little about where the program is, so streaks consist of large requests
 * only. */
struct pya_littles {
    uint32_t n;                  /* requests so far; the last REPEAT_KEPT are remembered */
    bool is_followed;            /* the latest large request belongs to a settled program */
    uint32_t first[REPEAT_KEPT]; /* by large request: n when it was served */
    uint64_t kept[REPEAT_KEPT];  /* address and size, in units of PYA_ALIGN */
};
enum { LITTLE_SIZE_BITS = 8 };

/* A failed request changes only `like`, is_known and whether littles are followed. */
struct pya_repeat {
    size_t n;        /* requests so far; the last n_room are remembered */
    size_t n_room;   /* grows to n_most */
    size_t n_most;   /* REPEAT_KEPT, or what host memory allowed */
    size_t follow;   /* the earlier request whose size is expected next; or the latest */
    size_t streak;   /* length of the streak, including the latest request */
    size_t broken;   /* length of the last streak of at least REPEAT_LEAST that ended */
    size_t n_broken; /* number of the request that ended it */
    size_t like;     /* the earlier request that corresponds to this one; n: none */
    size_t period;   /* the period when repetition was recognised; 0: never */
    size_t n_review; /* number of the request that decides on a pause */
    size_t n_stays;  /* number of the first request with a stay */
    size_t n_given;  /* number of the next request when pages of the arena were last given back */
    size_t n_sorted; /* debt of sorted places, see SETTLE_SPANS */
    uint64_t recent; /* the last four sizes, hashed */
    size_t longer;   /* the latest longer period that a free indicated */
    size_t n_longer; /* how many frees in a row indicated it */
    size_t n_laid;   /* requests of a layout, enclosed by two that match none; 0: no layout */
    size_t laid_period;  /* the layout's; 0: its program does not repeat itself */
    pya_dptr laid_from;  /* where the layout's places begin */
    pya_dptr laid_to;    /* and end */
    size_t n_unforeseen; /* requests in a row that the layout lacks */
    size_t n_met;        /* requests that matched the layout, in its order */
    bool is_laid;        /* as far as is known the layout belongs to this program */
    bool is_known;       /* this request belongs to a program that repeats itself */
    bool is_promising;   /* something has repeated since the last review */
    /* Indexed by recent sizes: low bits of the number of the request that came after them. */
    uint32_t places[1 << REPEAT_PLACE_BITS];
    uint64_t kept[]; /* address in units of PYA_ALIGN above the hash of the size */
};

static inline uint64_t
repeat_mixed(size_t bytes) {
    return ((uint64_t)bytes / PYA_ALIGN * REPEAT_MIX) >> (64 - REPEAT_SIZE_BITS);
}

/* The value of `recent` after one more request. */
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

/* Requests that were really made, without those of a layout. */
static inline size_t
repeat_n_made(const struct pya_repeat *repeat) {
    return repeat->n - repeat->n_laid;
}

/* The FREE run of the arena that contains [addr, addr + bytes), if it is found by passing no more than n_most
 * blocks. */
struct pya_block *
pya_repeat_run_at(const struct pya_arena *arena, pya_dptr addr, size_t bytes, size_t n_most);
/* The place of the earlier request that corresponds to a little request: same position after the corresponding large
 * one. 0: there was none. */
pya_dptr pya_littles_place(const struct pya_arena *arena, size_t bytes);

#ifdef __cplusplus
}
#endif
