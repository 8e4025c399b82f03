/* Blocks that were freed while other streams may still use them.  Floor 8.
 *
 * A use is made when a stream is recorded on a block; at the free it gets an event on that stream and waits
 * in the stream's queue.  Nothing is allocated at the free: a free must not fail. */
#pragma once

#include "stitch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_use {
    struct pya_use *next;
    struct pya_block *block;
    struct pya_pending *queue; /* of the stream */
    pya_event event;           /* 0: not recorded yet, a capture forbids it or it failed */
};

/* One per stream that was ever recorded.  Completed in order, so only the head is asked. */
struct pya_pending {
    struct pya_pending *next;
    pya_stream stream;
    struct pya_fence *fence; /* the stream's */
    struct pya_use *head, *tail;
    struct pya_use *unmarked; /* none before it lacks an event; NULL: none does */
    uint64_t n_failed;        /* polls at which the head had no event */
    struct pya_use *spare;    /* done: their events are recorded again for the next */
    size_t n_spare;
};

/* Apart, so that what a trace needs is not looked up where there is none. */
void pya_block_trace_release(const struct pya_block *block);
/* The bytes of a USED or STITCHED block return to their arena, its record goes. */
static inline void
pya_block_release(struct pya_block *block) {
    struct pya_arena *arena = block->arena;
    struct pya_card *card = arena->card;
    if (PYA_UNLIKELY(block->is_pending)) {
        pya_stats_park(&card->stats, block->is_small, block->bytes, block->requested, -1);
    }
    card->live_bytes -= block->bytes;
    if (PYA_UNLIKELY(card->history != NULL)) {
        pya_block_trace_release(block);
    }
    if (PYA_UNLIKELY(block->state == PYA_BLOCK_STITCHED)) {
        pya_stitch_give(block);
    } else {
        pya_arena_park(arena, block);
    }
}

/* Recording the block's own stream, or one twice, changes nothing. */
PYA_MUST_CHECK pya_status
pya_pending_record(struct pya_card *card, struct pya_block *block, pya_stream stream);
/* The block's user is done with it: it waits for its uses, of which there are some.
 * While a capture may be under way events are not recorded: its uses wait without one. */
void pya_pending_free(struct pya_card *card, struct pya_block *block);
/* Records the events that were put off. */
void pya_pending_resume(struct pya_card *card);
/* Releases what has finished.  Never waits; not while a capture is under way. */
void pya_pending_poll(struct pya_card *card);
/* Does a capture forbid waiting?  Asks foreign streams that freed blocks wait for again, instead of believing that they
 * still capture.  Only for a caller that has no other way out: such a stream may have been destroyed. */
bool pya_pending_must_not_wait(struct pya_card *card);
/* Waits for all freed blocks' uses, which a capture forbids, and releases the blocks.  On failure those whose uses
 * could not be waited for stay parked. */
PYA_MUST_CHECK pya_status pya_pending_sync(struct pya_card *card);
void pya_pending_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
