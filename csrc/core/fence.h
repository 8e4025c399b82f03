/* Fences: how far have all streams of a card come?  Floor 5.
 *
 * Memory goes from one stream to another only when every stream the card has heard of, but for the one that takes it,
 * has finished what it had to do when the memory was freed.  The owner's own work is not enough: programs free what a
 * second stream still uses when they know that the owner will wait for it, and torch's allocator hands such memory to
 * the owner alone.
 *
 * A stream is heard of when it asks for memory, is recorded on some, or begins to fill a pool.  Once it was destroyed
 * and waited for it is forgotten, until it is heard of again: then another stream has its handle.
 *
 * A stream that another library made may be destroyed at any time, and a driver may crash when asked about a destroyed
 * stream.  Such a foreign stream is not asked how far it is: who has to know waits for the device, ever more rarely.
 * After that it is forgotten too, unless it holds blocks. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As long as the card: arenas and queues point to it. */
struct pya_fence {
    struct pya_fence *next;
    pya_stream stream;
    /* Foreign: the stream's own device, which may be another than the card's; NULL: could not be opened. */
    struct pya_device *dev;
    pya_event event;      /* 0: never made */
    bool is_open;         /* recorded, not yet seen complete */
    bool is_leaving;      /* within a round: the device knows no such stream */
    bool is_gone;         /* the same, and it was waited for: not asked any more */
    bool is_foreign;      /* another library's: asked only while it is known to be in use */
    bool holds_blocks;    /* within a round: live blocks were asked for on it */
    bool was_capturing;   /* foreign: when it was last asked, and no other stream tells how long */
    uint64_t n_failed;    /* recordings that failed since the last good one */
    uint64_t captured_at; /* when it was capturing then, by the device's clock */
};

/* The card hears of a stream; knowing it changes nothing. */
PYA_MUST_CHECK pya_status
pya_fences_add(struct pya_card *card, pya_stream stream, struct pya_fence **out);
/* The same of a stream that was heard of before. */
static inline void
pya_fence_hear(struct pya_card *card, struct pya_fence *fence) {
    card->n_fences += fence->is_gone;
    fence->is_foreign = fence->is_foreign && !fence->is_gone; /* else whoever knows says so again */
    fence->is_gone = false;
}
/* Is a graph being captured on any of them?  Then nothing may wait or be unmapped.  Of a destroyed stream the device knows
 * nothing, and nobody captures it.  True also where a capture forbids asking, while requests go to a pool since something
 * began on a foreign stream, and for a while after a foreign stream was seen capturing in a request or a free, or a
 * capture was announced (one second, if nothing goes to its pool before). */
bool pya_fences_are_capturing(struct pya_card *card);
/* Waits for all work of the device.  No lock is held meanwhile: the work may wait for another process, and that for what
 * pya_share_export() gives.  PYA_E_CAPTURE: not now. */
PYA_MUST_CHECK pya_status pya_fences_wait_unlocked(struct pya_card *card);
/* The same for a caller that has the lock, which is given up meanwhile.  Requests of other threads may have used up what was
 * reserved, but the map of live blocks has room for one again; a private pool may be gone, a capture may have begun
 * (PYA_E_CAPTURE).  While others free memory it is waited once more, a few times at most.  *is_idle: what is free now was free
 * before. */
PYA_MUST_CHECK pya_status pya_fences_wait_meanwhile(struct pya_card *card, bool *is_idle);
/* Gives up the lock until nobody waits without it: a capture that begins while the device is waited for would end. */
void pya_fences_pass(struct pya_card *card);
/* Records all but the foreign ones, for which the caller has the device waited for.  False: not now (a stream is being
 * captured, or the device refuses); none is open then.
 * *waited: in: the device shall be waited for as well; out: it was, because of that or of a destroyed stream. */
bool pya_fences_record(struct pya_card *card, bool *waited);
/* The stream is in use now: asks whether it captures.  From then on nothing is asked of it but by the two below.  origin: where
 * that began which its requests go to a pool for, or the stream itself: while that one captures too, it tells for both.
 * False: the card has not heard of the stream. */
bool pya_fences_note_foreign(
    struct pya_card *card, pya_stream stream, struct pya_device *dev, pya_stream origin);
/* Would an event recorded on the stream now become part of a graph?  Of a foreign one it is remembered as after
 * pya_fences_note_foreign(). */
bool pya_fence_is_captured(struct pya_card *card, struct pya_fence *fence);
/* Does what is remembered of a foreign stream's capture still hold?  Asks the stream. */
void pya_fence_ask_again(struct pya_card *card, struct pya_fence *fence);
/* Waits for the card's device, and for that of the stream where it is foreign and of another. */
PYA_MUST_CHECK pya_status pya_fence_sync(struct pya_card *card, const struct pya_fence *fence);
/* Records an event on a stream; 0: it is made first.  One made for an earlier stream of the same handle may be another
 * device's: then *event is a new one.  On failure it may be one that was never recorded, or 0. */
PYA_MUST_CHECK pya_status
pya_event_mark(struct pya_device *dev, pya_stream stream, pya_event *event);
/* One of those; NULL: none. */
struct pya_fence *pya_fences_foreign(const struct pya_card *card);
/* Forgets a stream whose work was waited for. */
void pya_fence_bury(struct pya_card *card, struct pya_fence *fence);
/* How many of those recorded have not completed: 0, 1, or 2 for more.  Never waits.  last: one of them. */
size_t pya_fences_n_open(struct pya_card *card, struct pya_fence **last);
/* The nth try of something that goes on failing: is it worth it?  Ever more rarely. */
static inline bool
pya_fence_is_due(uint64_t n) {
    return (n & (n - 1)) == 0;
}
void pya_fences_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
