/* Blocks that were freed while other streams may still use them.  Floor 8.
 *
 * A use is created when a stream is recorded on a block.  When the block is freed, the use gets an event on that
 * stream and waits in the stream's queue.  Nothing is allocated during a free, because a free must not fail. */
#pragma once

#include "nest.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_use {
    struct pya_use *next;
    struct pya_block *block;
    struct pya_pending *queue; /* the stream's */
    pya_event event;           /* 0: not recorded yet, because a capture forbids it or it failed */
};

/* One for each stream that was ever recorded on a block.  Uses complete in order, so only the head is polled. */
struct pya_pending {
    struct pya_pending *next;
    pya_stream stream;
    struct pya_fence *fence; /* the stream's */
    struct pya_use *head, *tail;
    struct pya_use *unmarked; /* the first use that may lack an event; NULL: none lacks one */
    uint64_t n_failed;        /* polls that found the head without an event */
    struct pya_use *spare;    /* completed uses, whose events are reused */
    size_t n_spare;
};

/* Not inline, so that code without a trace does not load what only a trace needs. */
void pya_block_trace_release(const struct pya_block *block);
/* Returns the bytes of a USED or STITCHED block to its arena; its record goes too. */
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
        pya_nest_give(block);
    } else {
        pya_arena_park(arena, block);
    }
}

/* Records a stream on a block.  Recording the block's own stream, or a stream twice, changes nothing. */
PYA_MUST_CHECK pya_status
pya_pending_record(struct pya_card *card, struct pya_block *block, pya_stream stream);
/* The user freed a block that has uses: it waits for them.  While a capture may be in progress no events are
 * recorded, and the uses wait without one. */
void pya_pending_free(struct pya_card *card, struct pya_block *block);
/* Records the events that were deferred. */
void pya_pending_resume(struct pya_card *card);
/* Releases the blocks whose uses have completed.  Never waits.  Does nothing during a capture. */
void pya_pending_poll(struct pya_card *card);
/* Does a capture forbid waiting?  Foreign streams that freed blocks wait for are asked again, instead of trusting
 * that they still capture.  Only for a caller without another way out, because such a stream may have been
 * destroyed. */
bool pya_pending_must_not_wait(struct pya_card *card);
/* Waits for the uses of all freed blocks and releases the blocks.  A capture forbids this.  After a failure, blocks
 * whose uses could not be waited for stay parked. */
PYA_MUST_CHECK pya_status pya_pending_sync(struct pya_card *card);
void pya_pending_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
