/* Shared ranges.  Floor 8. */
#include "share.h"

#include <stdlib.h>

#include "debug.h"
#include "move.h"

/* A page of a grain cannot be mapped without the others. */
static bool
is_alone(const struct pya_block *run, pya_dptr addr) {
    return run->arena->card->pages.items[pya_range_page(run->range, addr)].grain == 0;
}

/* One free run's parts of pages it does not cover: from `addr` to the end of its page, and the other way. */
static size_t
begin_of(const struct pya_block *run) {
    pya_dptr end = pya_round_up(run->addr, PYA_PAGE);
    bool is_there = end > run->addr && end <= pya_block_end(run);
    return is_there && is_alone(run, run->addr) ? (size_t)(end - run->addr) : 0;
}

static size_t
end_of(const struct pya_block *run) {
    pya_dptr first = pya_round_down(pya_block_end(run), PYA_PAGE);
    size_t bytes = first >= run->addr ? (size_t)(pya_block_end(run) - first) : 0;
    return bytes > 0 && is_alone(run, first) ? bytes : 0;
}

struct extremes {
    size_t begin_bytes;
    size_t end_bytes;
};

static struct extremes
share_largest(const struct pya_arena *arena) {
    struct extremes most = {0, 0};
    const struct pya_block *run = pya_fit_find(&arena->fit, PYA_ALIGN);
    for (; run != NULL; run = pya_fit_next(&arena->fit, run)) {
        size_t begin = begin_of(run);
        size_t end = end_of(run);
        most.begin_bytes = begin > most.begin_bytes ? begin : most.begin_bytes;
        most.end_bytes = end > most.end_bytes ? end : most.end_bytes;
    }
    return most;
}

/* The smallest begin of at least `least` bytes (0: none is needed). */
static void
share_pick_begin(const struct pya_arena *arena, size_t least, struct pya_share *share) {
    const struct pya_block *run = pya_fit_find(&arena->fit, PYA_ALIGN);
    for (; least > 0 && run != NULL; run = pya_fit_next(&arena->fit, run)) {
        size_t begin = begin_of(run);
        if (begin >= least && (share->begin_bytes == 0 || begin < share->begin_bytes)) {
            share->begin = pya_range_page(run->range, run->addr);
            share->begin_bytes = begin;
        }
    }
}

static void
share_pick_end(const struct pya_arena *arena, size_t least, struct pya_share *share) {
    size_t best = SIZE_MAX;
    const struct pya_block *run = pya_fit_find(&arena->fit, PYA_ALIGN);
    for (; least > 0 && run != NULL; run = pya_fit_next(&arena->fit, run)) {
        size_t end = end_of(run);
        if (end >= least && end < best) {
            share->end = pya_range_page(run->range, pya_block_end(run) - 1);
            best = end;
        }
    }
}

static size_t
less(size_t bytes, size_t part) {
    return bytes > part ? bytes - part : 0;
}

struct pya_share
pya_share_plan(const struct pya_arena *arena, size_t bytes) {
    struct extremes most = share_largest(arena);
    size_t whole = pya_round_up(less(bytes, most.begin_bytes + most.end_bytes), PYA_PAGE);
    struct pya_share share = {
        .begin = PYA_NO_PAGE, .n_whole = whole >> PYA_PAGE_SHIFT, .end = PYA_NO_PAGE};
    share_pick_begin(arena, less(bytes, whole + most.end_bytes), &share);
    share_pick_end(arena, less(bytes, whole + share.begin_bytes), &share);
    return share;
}

pya_status
pya_share_take(
    struct pya_arena *arena, size_t bytes, const struct pya_share *plan, struct pya_block **out) {
    pya_page_id *ids = malloc((plan->n_whole + 2) * sizeof *ids);
    if (ids == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    size_t n = 0;
    if (plan->begin != PYA_NO_PAGE) {
        ids[n++] = plan->begin;
    }
    size_t n_whole;
    struct pya_stitch *stitch = NULL;
    pya_status st = pya_pages_pick(arena, plan->n_whole, NULL, NULL, ids + n, &n_whole);
    if (st != PYA_OK) {
        goto done;
    }
    PYA_ASSERT(n_whole == plan->n_whole);
    n += n_whole;
    if (plan->end != PYA_NO_PAGE) {
        ids[n++] = plan->end;
    }
    st = pya_stitch_make(
        arena,
        &(struct pya_stitch_plan){
            .ids = ids,
            .n_pages = n,
            .offset = plan->begin == PYA_NO_PAGE ? 0 : PYA_PAGE - plan->begin_bytes,
            .bytes = bytes,
        },
        &stitch);
    if (st == PYA_OK) {
        st = pya_stitch_take(stitch, bytes, out);
    }
done:
    free(ids);
    return st;
}
