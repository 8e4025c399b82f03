/* The search for a placement: see placement.h for the method. */
#include "placement.h"

#include <stdlib.h>
#include <string.h>

/* Limit for blocks compared or moved in all rounds after the first: some seconds. */
#define PLACEMENT_WORK_MOST UINT64_C(3000000000)
/* How many of these between two calls of the watch: some ten milliseconds. */
#define PLACEMENT_TELLS_EVERY (UINT64_C(1) << 23)
/* Rounds without improvement before another order is tried, for the initial orders and for shaken ones: promoting the highest
 * blocks eventually cycles. */
#define PLACEMENT_PATIENCE 80
#define PLACEMENT_PATIENCE_SHAKEN 14
/* Once the initial orders are exhausted: at most this many random blocks go to the front of the best order. */
#define PLACEMENT_SHAKES_MOST 32

/* A placed block.  Everything the search compares is kept together here. */
struct spot {
    uint64_t offset, end;
    struct pya_life lives[2]; /* empty ones overlap none */
};

struct ranked {
    uint64_t bytes, life;
    size_t index;
};

struct search {
    struct pya_placed *blocks;
    size_t n;
    const struct pya_placement_watch *watch;
    size_t *order;         /* in which blocks are placed */
    struct ranked *ranked; /* scratch for sorting it */
    struct spot *spots;    /* blocks placed so far, lowest first */
    uint64_t *found;       /* offsets of the best placement */
    size_t *best_order;    /* the order that gave it */
    unsigned n_vain;       /* rounds without improvement, with this order */
    unsigned n_orders;     /* initial orders tried so far */
    uint64_t random;
    uint64_t n_steps; /* spots looked at or moved so far */
    uint64_t n_told;
};

static struct pya_life
life_to_compare(struct pya_life life) {
    return life.begin < life.end ? life : (struct pya_life){UINT64_MAX, 0};
}

/* Do their lives overlap?  Branch-free, because the outcome is unpredictable. */
static bool
spots_meet(const struct spot *a, const struct spot *b) {
    bool meets = false;
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 2; k++) {
            meets |= (a->lives[i].begin < b->lives[k].end) & (b->lives[k].begin < a->lives[i].end);
        }
    }
    return meets;
}

/* Sets spot to the lowest place that is free; returns its index in `spots`. */
static size_t
search_place(struct search *s, size_t n_placed, uint64_t bytes, struct spot *spot) {
    uint64_t low = 0;
    size_t i = 0;
    for (; i < n_placed; i++) {
        const struct spot *other = &s->spots[i];
        if (other->offset >= low + bytes) {
            break;
        }
        if (other->end > low && spots_meet(spot, other)) {
            low = other->end;
        }
    }
    s->n_steps += i;
    spot->offset = low;
    spot->end = low + bytes;
    /* Binary search; the order of equal offsets does not matter. */
    size_t from = 0;
    size_t to = n_placed;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (s->spots[middle].offset < low) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

/* False: the watch wants to stop. */
static bool
search_goes_on(struct search *s) {
    if (s->watch == NULL || s->n_steps - s->n_told < PLACEMENT_TELLS_EVERY) {
        return true;
    }
    s->n_told = s->n_steps;
    return s->watch->go_on(s->watch->arg, s->n_steps, PLACEMENT_WORK_MOST);
}

/* Places all blocks in order; returns the extent, or UINT64_MAX if the watch stopped it. */
static uint64_t
search_round(struct search *s) {
    uint64_t extent = 0;
    for (size_t k = 0; k < s->n; k++) {
        struct pya_placed *block = &s->blocks[s->order[k]];
        struct spot spot = {
            .lives = {life_to_compare(block->lives[0]), life_to_compare(block->lives[1])}};
        size_t at = search_place(s, k, block->bytes, &spot);
        memmove(&s->spots[at + 1], &s->spots[at], (k - at) * sizeof *s->spots);
        s->n_steps += k - at;
        s->spots[at] = spot;
        block->offset = spot.offset;
        extent = spot.end > extent ? spot.end : extent;
        if (!search_goes_on(s)) {
            return UINT64_MAX;
        }
    }
    return extent;
}

/* Moves the blocks that end above `above` to the front, keeping their order. */
static void
search_promote(struct search *s, uint64_t above) {
    size_t n_up = 0;
    for (size_t k = 0; k < s->n; k++) {
        size_t i = s->order[k];
        if (s->blocks[i].offset + s->blocks[i].bytes > above) {
            memmove(&s->order[n_up + 1], &s->order[n_up], (k - n_up) * sizeof *s->order);
            s->order[n_up++] = i;
        }
    }
}

/* xorshift64 with a fixed seed, so that a recording always gets the same plan. */
static uint64_t
next_random(struct search *s) {
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return s->random;
}

static uint64_t
life_of(const struct pya_placed *block) {
    uint64_t sum = 0;
    for (int i = 0; i < 2; i++) {
        const struct pya_life life = block->lives[i];
        sum += life.begin < life.end ? life.end - life.begin : 0;
    }
    return sum;
}

static int
larger_first(uint64_t a, uint64_t b) {
    return (a < b) - (a > b);
}

/* Ties are broken by index, the program's order. */
static int
by_bytes(const void *a, const void *b) {
    const struct ranked *x = a;
    const struct ranked *y = b;
    int order = larger_first(x->bytes, y->bytes);
    order = order != 0 ? order : larger_first(x->life, y->life);
    return order != 0 ? order : larger_first(y->index, x->index);
}

static int
by_life(const void *a, const void *b) {
    const int order =
        larger_first(((const struct ranked *)a)->life, ((const struct ranked *)b)->life);
    return order != 0 ? order : by_bytes(a, b);
}

/* bytes^2 * life: size counts more than life.  A double is precise enough for a rank. */
static double
area_of(const struct ranked *x) {
    return (double)x->bytes * (double)x->bytes * (double)x->life;
}

static int
by_area(const void *a, const void *b) {
    const double of_a = area_of(a);
    const double of_b = area_of(b);
    const int order = (of_a < of_b) - (of_a > of_b);
    return order != 0 ? order : by_bytes(a, b);
}

/* The initial orders, the best one first. */
static int (*const RANKS[])(const void *, const void *) = {by_bytes, by_life, by_area};
enum { N_RANKS = sizeof RANKS / sizeof RANKS[0] };

static void
search_rank(struct search *s) {
    for (size_t i = 0; i < s->n; i++) {
        s->ranked[i] = (struct ranked){s->blocks[i].bytes, life_of(&s->blocks[i]), i};
    }
    qsort(s->ranked, s->n, sizeof *s->ranked, RANKS[s->n_orders]);
    for (size_t i = 0; i < s->n; i++) {
        s->order[i] = s->ranked[i].index;
    }
    s->n_orders++;
}

/* The best order with some random blocks moved to its front. */
static void
search_shake(struct search *s) {
    memcpy(s->order, s->best_order, s->n * sizeof *s->order);
    for (uint64_t left = 1 + next_random(s) % PLACEMENT_SHAKES_MOST; left > 0; left--) {
        size_t from = (size_t)(next_random(s) % s->n);
        size_t i = s->order[from];
        memmove(&s->order[1], &s->order[0], from * sizeof *s->order);
        s->order[0] = i;
    }
}

/* Chooses the order of the next round. */
static void
search_reorder(struct search *s, uint64_t live) {
    const unsigned patience =
        s->n_orders < N_RANKS ? PLACEMENT_PATIENCE : PLACEMENT_PATIENCE_SHAKEN;
    if (s->n_vain < patience) {
        search_promote(s, live);
        return;
    }
    s->n_vain = 0;
    if (s->n_orders < N_RANKS) {
        search_rank(s);
    } else {
        search_shake(s);
    }
}

struct change {
    uint64_t at;
    uint64_t bytes;
    bool is_end;
};

static int
by_time(const void *a, const void *b) {
    const struct change *x = a;
    const struct change *y = b;
    if (x->at != y->at) {
        return x->at < y->at ? -1 : 1;
    }
    return (int)y->is_end - (int)x->is_end; /* ends first: intervals are half-open */
}

static pya_status
measure_live(const struct pya_placed *blocks, size_t n, uint64_t *out) {
    struct change *changes = malloc((4 * n + 1) * sizeof *changes);
    size_t n_changes = 0;
    if (changes == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            const struct pya_life life = blocks[i].lives[k];
            if (life.begin < life.end) {
                changes[n_changes++] = (struct change){life.begin, blocks[i].bytes, false};
                changes[n_changes++] = (struct change){life.end, blocks[i].bytes, true};
            }
        }
    }
    qsort(changes, n_changes, sizeof *changes, by_time);
    uint64_t live = 0;
    uint64_t most = 0;
    for (size_t i = 0; i < n_changes; i++) {
        live = changes[i].is_end ? live - changes[i].bytes : live + changes[i].bytes;
        most = live > most ? live : most;
    }
    free(changes);
    *out = most;
    return PYA_OK;
}

static pya_status
search_begin(struct search *s) {
    s->order = malloc((s->n + 1) * sizeof *s->order);
    s->ranked = malloc((s->n + 1) * sizeof *s->ranked);
    s->spots = malloc((s->n + 1) * sizeof *s->spots);
    s->found = calloc(s->n + 1, sizeof *s->found);
    s->best_order = malloc((s->n + 1) * sizeof *s->best_order);
    s->random = 1;
    return s->order != NULL && s->ranked != NULL && s->spots != NULL && s->found != NULL &&
                   s->best_order != NULL
               ? PYA_OK
               : PYA_E_HOST_NOMEM;
}

static void
search_end(struct search *s) {
    free(s->order);
    free(s->ranked);
    free(s->spots);
    free(s->found);
    free(s->best_order);
}

/* Runs rounds until one takes no more pages than the live peak, or the limits are reached; `found` has the best offsets.
 * UINT64_MAX: the watch stopped it. */
static uint64_t
search_run(struct search *s, unsigned n_rounds, uint64_t live) {
    uint64_t best = UINT64_MAX;
    const uint64_t enough = pya_round_up(live, PYA_PAGE);
    search_rank(s);
    for (unsigned round = 0; round < n_rounds && best > enough; round++) {
        if (round > 0 && s->n_steps > PLACEMENT_WORK_MOST) {
            break;
        }
        uint64_t extent = search_round(s);
        if (extent == UINT64_MAX) {
            return UINT64_MAX;
        }
        s->n_vain++;
        if (extent < best) {
            best = extent;
            s->n_vain = 0;
            memcpy(s->best_order, s->order, s->n * sizeof *s->order);
            for (size_t i = 0; i < s->n; i++) {
                s->found[i] = s->blocks[i].offset;
            }
        }
        search_reorder(s, live);
    }
    return best;
}

pya_status
pya_placement_find(
    struct pya_placed *blocks, size_t n, unsigned n_rounds, const struct pya_placement_watch *watch,
    struct pya_placement *out) {
    struct search s = {.blocks = blocks, .n = n, .watch = watch};
    uint64_t live = 0;
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        if (blocks[i].bytes > PYA_REQUEST_MAX || sum > PYA_REQUEST_MAX) {
            return PYA_E_TOO_LARGE;
        }
        sum += blocks[i].bytes;
    }
    pya_status st = measure_live(blocks, n, &live);
    st = st == PYA_OK ? search_begin(&s) : st;
    if (st == PYA_OK) {
        uint64_t best = search_run(&s, n_rounds > 0 ? n_rounds : 1, live);
        for (size_t i = 0; i < n; i++) {
            blocks[i].offset = s.found[i];
        }
        *out = (struct pya_placement){live, best};
        st = best == UINT64_MAX ? PYA_E_LIMIT : PYA_OK;
    }
    search_end(&s);
    return st;
}
