/* Steps of the ladder: memory of other streams and pools.  Floor 11. */
#include "ladder_internal.h"

#include <stdlib.h>

#include "annex.h"
#include "move.h"
#include "policy.h"

void
pya_ladder_poll(const struct pya_arena *arena) {
    const struct pya_arena *from = arena->card->common;
    for (; from != NULL; from = from->next_common) {
        if (from != arena && from->free_pages > 0) {
            pya_card_poll(arena->card, arena);
            return;
        }
    }
}

pya_status
pya_ladder_annex(struct pya_arena *arena, size_t bytes, bool is_small, struct pya_block **out) {
    bool found = false;
    if (arena->pool != NULL) {
        return PYA_OK;
    }
    pya_status st = pya_arena_annex(arena, bytes, &found);
    return st == PYA_OK && found ? pya_ladder_refit(arena, bytes, is_small, out) : st;
}

static bool
transfer_allowed(const struct pya_arena *from, enum pya_transfer kind) {
    if (kind == PYA_TRANSFER_LEFT) {
        return from->pool != NULL;
    }
    return pya_pool_is_open(from) || (kind == PYA_TRANSFER_LAST && from->pool->on_oom);
}

pya_status
pya_ladder_transfer(struct pya_arena *arena, size_t n_want, enum pya_transfer kind) {
    struct pya_card *card = arena->card;
    size_t n = 0;
    pya_page_id *ids = NULL;
    pya_status st = PYA_OK;
    size_t n_room = pya_arena_pool_room(arena) / PYA_PAGE;
    n_want = n_want < n_room ? n_want : n_room;
    bool is_all = kind == PYA_TRANSFER_LAST;
    for (struct pya_arena *from = is_all ? card->arenas : pya_givers(card);
         from != NULL && n < n_want; from = is_all ? from->next : pya_givers_next(from)) {
        PYA_STEP();
        if (from == arena || from->free_pages == 0 || !transfer_allowed(from, kind)) {
            continue;
        }
        if (ids == NULL) {
            ids = malloc(n_want * sizeof *ids);
            if (ids == NULL) {
                return PYA_E_HOST_NOMEM;
            }
        }
        size_t n_here;
        const struct pya_arena *taker = kind <= PYA_TRANSFER_IDLE ? arena : NULL;
        st = pya_pages_pick(from, n_want - n, taker, NULL, ids + n, &n_here);
        if (st != PYA_OK) {
            goto done;
        }
        n += n_here;
    }
    if (n > 0) {
        struct pya_block *hole;
        st = pya_arena_last_hole(arena, n, &hole);
        if (st == PYA_OK) {
            st = pya_pages_move(arena, hole, ids, n);
        }
        if (st == PYA_OK) {
            card->stats.scalar[PYA_STAT_pyalloc_page_transfers] += (int64_t)n;
        }
        if (st == PYA_OK && kind != PYA_TRANSFER_LEFT) {
            pya_policy_pay_transfer(arena, pya_pages_handles(&card->pages, ids, n));
        }
    }
done:
    free(ids);
    return st;
}

pya_status
pya_ladder_borrow(
    struct pya_arena *arena, size_t bytes, bool is_small, enum pya_transfer kind,
    struct pya_block **out) {
    pya_status st = pya_ladder_transfer(arena, pya_pages_for(bytes), kind);
    if (pya_is_shortage(st)) {
        return PYA_OK; /* addresses are short: there are other ways */
    }
    return st == PYA_OK ? pya_ladder_refit(arena, bytes, is_small, out) : st;
}
