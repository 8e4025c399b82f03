/* Taking a snapshot.  Floor 12. */
#include "snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "heap.h"

const char *
pya_snap_state_text(int state) {
    static const char *const texts[] = {
#define X(name, text) text,
        PYA_BLOCK_TEXT_TABLE(X)
#undef X
    };
    return state >= 0 && state <= PYA_SNAP_INACTIVE ? texts[state] : "unknown";
}

struct painter {
    struct pya_snapshot *snap;
    size_t segment_room;
    size_t block_room;
    struct pya_snap_segment *open; /* NULL: the next block starts a segment */
    bool has_large;
    bool failed;
};

/* Doubles an array.  If host memory is short: false, and failed is set. */
static bool
painter_room(struct painter *painter, void **items, size_t n, size_t *room, size_t item_bytes) {
    if (n < *room) {
        return true;
    }
    size_t n_room = *room * 2 + 64;
    void *more = realloc(*items, n_room * item_bytes);
    if (more == NULL) {
        painter->failed = true;
        return false;
    }
    *items = more;
    *room = n_room;
    return true;
}

static void
painter_open(struct painter *painter, const struct pya_arena *arena, pya_dptr addr) {
    struct pya_snapshot *snap = painter->snap;
    painter->open = NULL;
    painter->has_large = false;
    if (!painter_room(
            painter, (void **)&snap->segments, snap->n_segments, &painter->segment_room,
            sizeof *snap->segments)) {
        return;
    }
    painter->open = &snap->segments[snap->n_segments++];
    *painter->open = (struct pya_snap_segment){
        .device = arena->card->index,
        .addr = addr,
        .stream = arena->stream,
        .first_block = snap->n_blocks,
        .is_expandable = arena->small_fit == NULL,
    };
    if (arena->pool != NULL) {
        painter->open->pool = arena->pool->id;
    }
}

static void
painter_close(struct painter *painter) {
    if (painter->open != NULL && painter->open->is_expandable) {
        /* torch sorts segments by the requests that they serve.  Ours serve all requests, so the blocks decide. */
        painter->open->is_small = !painter->has_large && painter->open->active_bytes > 0;
    }
    painter->open = NULL;
}

static void
painter_add(struct painter *painter, struct pya_snap_block block, bool is_small) {
    struct pya_snapshot *snap = painter->snap;
    struct pya_snap_segment *segment = painter->open;
    if (segment == NULL || !painter_room(
                               painter, (void **)&snap->blocks, snap->n_blocks,
                               &painter->block_room, sizeof *snap->blocks)) {
        return;
    }
    if (block.context != NULL) {
        snap->owner.retain(snap->owner.arg, block.context);
    }
    snap->blocks[snap->n_blocks++] = block;
    segment->n_blocks++;
    segment->total_bytes += block.bytes;
    if (block.state != PYA_SNAP_INACTIVE) {
        segment->active_bytes += block.bytes;
        segment->requested_bytes += block.requested;
        painter->has_large = painter->has_large || !is_small;
    }
    if (block.state == PYA_SNAP_ACTIVE) {
        segment->allocated_bytes += block.bytes;
    }
}

static struct pya_snap_block
snap_of(const struct pya_block *block) {
    struct pya_snap_block snap = {.addr = block->addr, .bytes = block->bytes};
    if (block->state == PYA_BLOCK_FREE) {
        snap.state = PYA_SNAP_INACTIVE;
        return snap;
    }
    snap.requested = block->requested;
    snap.context = block->context;
    snap.state = block->is_pending ? PYA_SNAP_PENDING : PYA_SNAP_ACTIVE;
    return snap;
}

static void
painter_range(struct painter *painter, const struct pya_range *range) {
    for (const struct pya_block *b = range->first; b != NULL; b = b->next) {
        if (b->state != PYA_BLOCK_FREE && b->state != PYA_BLOCK_USED) {
            painter_close(painter);
            continue;
        }
        if (b->prev != NULL && b->prev->arena != b->arena) {
            painter_close(painter);
        }
        if (painter->open == NULL) {
            painter_open(painter, b->arena, b->addr);
            if (painter->open != NULL && range->slots == NULL) {
                painter->open->is_small = range->is_small;
            }
        }
        painter_add(painter, snap_of(b), b->state == PYA_BLOCK_USED && b->is_small);
    }
    painter_close(painter);
}

static void
painter_stitch(struct painter *painter, const struct pya_stitch *stitch) {
    const struct pya_block *block = stitch->block;
    painter_open(painter, stitch->arena, block->addr);
    painter_add(painter, snap_of(block), block->is_small);
    if (block->bytes < stitch->bytes) {
        struct pya_snap_block rest = {
            .addr = pya_block_end(block),
            .bytes = stitch->bytes - block->bytes,
            .state = PYA_SNAP_INACTIVE,
        };
        painter_add(painter, rest, false);
    }
    painter_close(painter);
}

static void
painter_card(struct painter *painter, const struct pya_card *card, const struct pya_pool_id *pool) {
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        struct pya_pool_id none = {0, 0};
        struct pya_pool_id id = arena->pool == NULL ? none : arena->pool->id;
        if (pool != NULL && (pool->first != id.first || pool->second != id.second)) {
            continue;
        }
        for (const struct pya_range *r = arena->ranges; r != NULL; r = r->next) {
            painter_range(painter, r);
        }
        const struct pya_stitch *s = arena->stitches == NULL ? NULL : arena->stitches->newest;
        for (; s != NULL; s = s->older) {
            if (s->block != NULL) {
                painter_stitch(painter, s);
            }
        }
    }
}

static void
painter_trace(struct painter *painter, const struct pya_history *history) {
    struct pya_snapshot *snap = painter->snap;
    if (history == NULL || history->n_items == 0) {
        return;
    }
    size_t n = snap->n_entries + history->n_items;
    struct pya_entry *entries = realloc(snap->entries, n * sizeof *entries);
    if (entries == NULL) {
        painter->failed = true;
        return;
    }
    snap->entries = entries;
    for (size_t i = 0; i < history->n_items; i++) {
        struct pya_entry entry = history->items[(history->first + i) % history->n_items];
        if (!pya_action_is_torchs(entry.action)) {
            continue;
        }
        if (entry.context != NULL) {
            snap->owner.retain(snap->owner.arg, entry.context);
        }
        snap->entries[snap->n_entries++] = entry;
    }
}

static int
segment_compare(const void *a, const void *b) {
    const struct pya_snap_segment *left = a;
    const struct pya_snap_segment *right = b;
    if (left->device != right->device) {
        return left->device < right->device ? -1 : 1;
    }
    return (left->addr > right->addr) - (left->addr < right->addr);
}

/* As in torch, the entry tells the pool that was asked for, its bytes in use and the thread's labels, but has no
 * stack. */
static void
note_snapshot(
    struct pya_card *card, const struct pya_snapshot *snap, size_t first_segment,
    const struct pya_pool_id *pool, void *here) {
    const struct pya_place place = {.pool = pool == NULL ? (struct pya_pool_id){0} : *pool};
    size_t active_bytes = 0;
    if (card->history == NULL) {
        return;
    }
    for (size_t i = first_segment; i < snap->n_segments; i++) {
        active_bytes += snap->segments[i].active_bytes;
    }
    pya_history_add(card->history, PYA_ACTION_SNAPSHOT, 0, active_bytes, place, here);
}

pya_status
pya_snapshot_take(
    struct pya_heap *heap, const struct pya_pool_id *pool, bool with_trace,
    struct pya_snapshot *out) {
    struct pya_snapshot snap = {
        .owner = {
            .arg = heap->hooks.arg,
            .retain = heap->hooks.retain_context,
            .release = heap->hooks.release_context}};
    struct painter painter = {.snap = &snap};
    if (heap->torn_cards != 0) {
        return PYA_E_FORKED;
    }
    void *here = with_trace ? pya_heap_capture_labels(heap) : NULL;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = pya_heap_open_card(heap, i);
        if (card != NULL) {
            pya_lock_acquire(&card->lock);
            pya_card_unpark(card);
            pya_nest_open(card);
            const size_t first_segment = snap.n_segments;
            painter_card(&painter, card, pool);
            if (with_trace) {
                painter_trace(&painter, card->history);
            }
            if (with_trace && !painter.failed) {
                note_snapshot(card, &snap, first_segment, pool, here);
            }
            snap.now_ns[i] = pya_device_clock_ns(card->dev);
            pya_lock_release(&card->lock);
        }
        snap.entries_end[i] = snap.n_entries;
    }
    pya_heap_drop_context(heap, here);
    if (painter.failed) {
        pya_snapshot_fini(&snap);
        return PYA_E_HOST_NOMEM;
    }
    if (snap.n_segments > 0) {
        qsort(snap.segments, snap.n_segments, sizeof *snap.segments, segment_compare);
    }
    *out = snap;
    return PYA_OK;
}

void
pya_snapshot_fini(struct pya_snapshot *snapshot) {
    for (size_t i = 0; i < snapshot->n_blocks; i++) {
        if (snapshot->blocks[i].context != NULL) {
            snapshot->owner.release(snapshot->owner.arg, snapshot->blocks[i].context);
        }
    }
    for (size_t i = 0; i < snapshot->n_entries; i++) {
        if (snapshot->entries[i].context != NULL) {
            snapshot->owner.release(snapshot->owner.arg, snapshot->entries[i].context);
        }
    }
    free(snapshot->segments);
    free(snapshot->blocks);
    free(snapshot->entries);
    memset(snapshot, 0, sizeof *snapshot);
}
