/* Which memory of an arena other streams have finished with.  Floor 6. */
#include "arena.h"

#include "debug.h"

/* Up to this number of streams, all are queried whenever there is something to learn. */
#ifdef PYA_TEST_TINY
enum { IDLE_FENCES_PER_REQUEST = 4 };
#else
enum { IDLE_FENCES_PER_REQUEST = 16 };
#endif

void
pya_arena_offer(struct pya_arena *arena) {
    struct pya_card *card = arena->card;
    if (!arena->is_giving && pya_arena_gives(arena)) {
        arena->is_giving = true;
        arena->next_giving = card->giving;
        card->giving = arena;
    }
}

void
pya_givers_review(struct pya_card *card) {
    struct pya_arena **link = &card->giving;
    while (*link != NULL) {
        struct pya_arena *arena = *link;
        PYA_STEP();
        if (pya_arena_gives(arena)) {
            link = &arena->next_giving;
        } else {
            arena->is_giving = false;
            *link = arena->next_giving;
        }
    }
}

/* Returns the stream that still has to pass if it is the only one. */
static const struct pya_fence *
card_pass_fences(struct pya_card *card) {
    struct pya_fence *last = NULL;
    size_t n_open;
    bool is_known = pya_fences_n_open(card, &n_open, &last);
    card->are_fences_open = is_known && n_open > 0;
    if (!is_known || n_open > 1) {
        return NULL;
    }
    for (struct pya_arena *arena = pya_givers(card); arena != NULL;
         arena = pya_givers_next(arena)) {
        PYA_STEP();
        if (n_open == 0) { /* a wait for the device may have told more since */
            arena->idle_seq =
                arena->fence_seq > arena->idle_seq ? arena->fence_seq : arena->idle_seq;
        } else {
            arena->almost_seq = arena->fence_seq;
        }
    }
    card->late_fence = n_open == 0 ? card->late_fence : last;
    return last;
}

static bool
arena_has_news(const struct pya_arena *arena) {
    if (arena->pool != NULL && arena->pool->n_users > 0) {
        return false; /* what others may take of it has been waited for */
    }
    return (arena->card->are_fences_open ? arena->fence_seq : arena->idle_seq) != arena->seq;
}

/* Is a round of records worthwhile?  *waits: memory was freed after its stream was destroyed.  A stream with the same
 * handle, unknown to the card, may use it, and no event covers that; so all work is waited for, ever more rarely. */
static bool
card_has_news(struct pya_card *card, bool *waits) {
    bool has_news = false;
    bool has_late_news = false;
    for (const struct pya_arena *a = pya_givers(card); a != NULL; a = pya_givers_next(a)) {
        PYA_STEP();
        has_news = has_news || (!a->fence->is_gone && arena_has_news(a));
        has_late_news = has_late_news || (a->fence->is_gone && arena_has_news(a));
    }
    *waits = has_late_news && pya_fence_is_due(++card->n_late_polls);
    return has_news || *waits;
}

/* Querying takes calls for each stream, so many streams are not queried at every request. */
static bool
card_may_ask(const struct pya_card *card) {
    return pya_card_requests(card) - card->fenced_at >= card->n_fences / IDLE_FENCES_PER_REQUEST;
}

static void
live_mark(void *arg, struct pya_block *block) {
    (void)arg;
    struct pya_arena *arena = block->arena;
    arena->fence->holds_blocks = arena->fence->holds_blocks || arena->pool == NULL;
}

/* All work was waited for: forgets foreign streams without live blocks, whose memory others may now have.  Streams of
 * a pool are kept until everything is waited for. */
static void
card_bury_foreign(struct pya_card *card) {
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        fence->holds_blocks = false;
    }
    pya_ptrmap_each(&card->live, live_mark, NULL);
    for (struct pya_fence *fence = card->fences; fence != NULL; fence = fence->next) {
        if (fence->is_foreign && !fence->is_gone && !fence->holds_blocks) {
            pya_fence_bury(card, fence);
        }
    }
}

void
pya_card_poll(struct pya_card *card, const struct pya_arena *taker) {
    bool waits;
    if (card->n_active > 0) {
        return; /* a capture may be in progress, which forbids queries */
    }
    const struct pya_fence *last = card->are_fences_open ? card_pass_fences(card) : NULL;
    /* All streams except the taker have passed: include what was freed since. */
    bool is_round_over =
        !card->are_fences_open || (last != NULL && taker != NULL && last->stream == taker->stream);
    if (!is_round_over || !card_may_ask(card) || !card_has_news(card, &waits)) {
        return;
    }
    struct pya_fence *foreign = pya_fences_foreign(card);
    if (foreign != NULL && !pya_fence_is_due(++foreign->n_failed)) {
        return;
    }
    waits = waits || foreign != NULL;
    card->fenced_at = pya_card_requests(card);
    bool is_recorded = pya_fences_record(card, &waits);
    card->are_fences_open = is_recorded && (foreign == NULL || waits);
    if (!card->are_fences_open) {
        return;
    }
    if (foreign != NULL) {
        card_bury_foreign(card);
    }
    for (struct pya_arena *arena = pya_givers(card); arena != NULL;
         arena = pya_givers_next(arena)) {
        PYA_STEP();
        arena->fence_seq = arena->fence->is_gone && !waits ? arena->fence_seq : arena->seq;
    }
    (void)card_pass_fences(card);
}

void
pya_card_note_wait(struct pya_card *card) {
    struct pya_arena *arena = card->common;
    if (pya_fences_foreign(card) != NULL) {
        card_bury_foreign(card);
    }
    pya_card_unpark(card);
    for (; arena != NULL; arena = arena->next_common) {
        arena->idle_seq = arena->seq;
    }
}

/* Marks are not kept up to date while the arena has no left pages, so they are cleared. */
static void
arena_unmark(struct pya_arena *arena) {
    struct pya_page *items = arena->card->pages.items;
    for (const struct pya_range *range = arena->ranges; range != NULL; range = range->next) {
        for (size_t s = 0; s < range->n_slots; s++) {
            pya_page_id id = range->slots[s].page;
            if (id != PYA_NO_PAGE && items[id].range == range) {
                items[id].is_left = false;
            }
        }
    }
}

void
pya_arena_leave(struct pya_arena *arena) {
    if (!arena->has_left) {
        arena_unmark(arena);
    }
    struct pya_block *run = pya_fit_find(&arena->fit, PYA_PAGE);
    for (; run != NULL; run = pya_fit_next(&arena->fit, run)) {
        const struct pya_slot *slots = run->range->slots;
        size_t first = pya_block_first_slot(run);
        bool is_idle = slots != NULL && run->seq <= arena->idle_seq;
        size_t n = is_idle ? pya_run_pages(run->addr, run->bytes) : 0;
        for (size_t i = 0; i < n; i++) {
            arena->card->pages.items[slots[first + i].page].is_left = true;
        }
    }
    arena->has_left = true;
}
