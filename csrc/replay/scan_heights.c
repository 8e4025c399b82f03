/* How much was allocated around the blocks alive at one moment (settings.around): a list of pieces in time, within which
 * none of those blocks begins or ends.
 *
 * We do not know in advance which blocks will be alive then.  So each block starts a piece when it begins, which is merged
 * into the previous piece if the block ends too early.  After the moment, each end of one of the blocks starts a piece. */
#include "scan_internal.h"

struct piece {
    struct pya_scan_height row;
    uint32_t before, after; /* in time; in a free piece `after` links the free list */
};

static struct piece *
piece_at(const struct pya_scan *s, uint32_t i) {
    return SCAN_ITEM(s->pieces, struct piece, i);
}

bool
scan_heights_begin(struct pya_scan *s) {
    if (s->settings->around == 0) {
        return true;
    }
    uint32_t index = s->free_piece;
    if (index == SCAN_NONE) {
        index = (uint32_t)s->pieces.n;
        if (SCAN_ADD(s->pieces, struct piece) == NULL) {
            return false;
        }
    } else {
        s->free_piece = piece_at(s, index)->after;
    }
    *piece_at(s, index) = (struct piece){
        .row = {.event = s->last_piece == SCAN_NONE ? 0 : s->totals.n_events + 1},
        .before = s->last_piece,
        .after = SCAN_NONE,
    };
    if (s->last_piece != SCAN_NONE) {
        piece_at(s, s->last_piece)->after = index;
    }
    s->last_piece = index;
    return true;
}

bool
scan_heights_live(struct pya_scan *s, struct scan_live *live) {
    if (s->totals.n_events >= s->settings->around) {
        return true;
    }
    const bool is_begun = scan_heights_begin(s);
    live->piece = s->last_piece;
    return is_begun;
}

/* Merges a piece into the previous one.  There always is one: the first piece starts with the trace and has no block. */
static void
piece_join(struct pya_scan *s, uint32_t index) {
    struct piece *piece = piece_at(s, index);
    struct piece *before = piece_at(s, piece->before);
    if (piece->row.max_bytes > before->row.max_bytes) {
        before->row.max_bytes = piece->row.max_bytes;
    }
    before->after = piece->after;
    if (piece->after == SCAN_NONE) {
        s->last_piece = piece->before;
    } else {
        piece_at(s, piece->after)->before = piece->before;
    }
    piece->after = s->free_piece;
    s->free_piece = index;
}

bool
scan_heights_end(struct pya_scan *s, const struct scan_live *live) {
    if (live->row.alloc_event >= s->settings->around) {
        return true;
    }
    if (s->totals.n_events >= s->settings->around) {
        return scan_heights_begin(s);
    }
    piece_join(s, live->piece);
    return true;
}

void
scan_heights_add(struct pya_scan *s) {
    if (s->last_piece != SCAN_NONE) {
        struct pya_scan_height *row = &piece_at(s, s->last_piece)->row;
        row->max_bytes = row->max_bytes > s->allocated ? row->max_bytes : s->allocated;
    }
}

bool
scan_heights_settle(struct pya_scan *s) {
    for (uint32_t i = s->settings->around == 0 ? SCAN_NONE : 0; i != SCAN_NONE;
         i = piece_at(s, i)->after) {
        struct pya_scan_height *row = SCAN_ADD(s->heights, struct pya_scan_height);
        if (row == NULL) {
            return false;
        }
        *row = piece_at(s, i)->row;
    }
    return true;
}
