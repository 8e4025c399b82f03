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
    pya_event event;           /* 0: could not be recorded; only a wait for the stream clears it */
};

/* One per stream that was ever recorded.  Completed in order, so only the head is asked. */
struct pya_pending {
    struct pya_pending *next;
    pya_stream stream;
    struct pya_use *head, *tail;
};

/* The bytes of a USED or STITCHED block return to their arena, its record goes. */
void pya_block_release(struct pya_block *block);

/* Recording the block's own stream, or one twice, changes nothing. */
PYA_MUST_CHECK pya_status
pya_pending_record(struct pya_card *card, struct pya_block *block, pya_stream stream);
/* The block's user is done with it: it waits for its uses, or is released at once when it has none.
 * While a capture is under way events may not be recorded: its uses wait without one. */
void pya_pending_free(struct pya_card *card, struct pya_block *block);
/* Records the events that a capture put off. */
void pya_pending_resume(struct pya_card *card);
/* Releases what has finished.  Never waits. */
void pya_pending_poll(struct pya_card *card);
/* Waits for all of it.  On failure what could not be waited for stays parked. */
PYA_MUST_CHECK pya_status pya_pending_sync(struct pya_card *card);
void pya_pending_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
