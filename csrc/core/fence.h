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
    pya_event event;      /* 0: never made */
    int device;           /* foreign: the stream's own, which may be another than the card's */
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
/* May a graph be being captured on any of the card's streams?  Then nothing may wait or be unmapped.  True where
 * - the device says so of a stream, or a capture forbids asking it;
 * - a pool takes requests for a capture that began on a foreign stream, which is not asked;
 * - a foreign stream was capturing when it was last asked, not long ago;
 * - a capture was announced not long ago, and its first request has not come yet.
 * A destroyed stream is not being captured. */
bool pya_fences_are_capturing(struct pya_card *card);
/* Waits for all work of the device.  No lock is held meanwhile: the work may wait for another process, and that for what
 * pya_share_export() gives.  PYA_E_CAPTURE: not now. */
PYA_MUST_CHECK pya_status pya_fences_wait_unlocked(struct pya_card *card);
/* The same for a caller that holds the lock, which is given up meanwhile.  Other threads may have used the records that the
 * caller reserved (but the map of live blocks has room for one again), dropped a private pool, or begun a capture
 * (PYA_E_CAPTURE).  Where they freed memory the device is waited for again, a few times at most.  *is_idle: all that is
 * free now was free before the last wait. */
PYA_MUST_CHECK pya_status pya_fences_wait_meanwhile(struct pya_card *card, bool *is_idle);
/* Gives up the lock until no thread waits for the device without it: waiting would invalidate a capture that begins. */
void pya_fences_pass(struct pya_card *card);
/* Records an event on every stream but the foreign ones, for which the caller has to have the device waited for.  False:
 * not now (a stream is being captured, or the device refuses); no fence is open then.
 * *waited: in: wait for the device as well; out: it was waited for, as asked or because a stream was destroyed. */
bool pya_fences_record(struct pya_card *card, bool *waited);
/* A foreign stream is in use now: asks whether it captures, and remembers the answer.  After that only the two functions
 * below ask it.  origin: the stream on which the capture began whose pool the stream's requests go to, or the stream
 * itself; while the origin captures, it is asked in the stream's place.  False: the card does not know the stream. */
bool
pya_fences_note_foreign(struct pya_card *card, pya_stream stream, int device, pya_stream origin);
/* Would an event recorded on the stream now become part of a graph?  The answer of a foreign stream is remembered. */
bool pya_fence_is_captured(struct pya_card *card, struct pya_fence *fence);
/* Does what is remembered of a foreign stream's capture still hold?  Asks the stream. */
void pya_fence_ask_again(struct pya_card *card, struct pya_fence *fence);
/* Waits for the card's device, and for that of the stream where it is foreign and of another.  PYA_E_CAPTURE: not now, as a
 * capture has begun there (one that begins meanwhile is not noticed), or another thread has that card just now; who insists,
 * having no other way out, tries for a second before it believes that there is none. */
PYA_MUST_CHECK pya_status
pya_fence_sync(struct pya_card *card, const struct pya_fence *fence, bool insists);
/* Records an event on a stream; 0: it is made first.  One made for an earlier stream of the same handle may be another
 * device's: then *event is a new one.  On failure it may be one that was never recorded, or 0. */
PYA_MUST_CHECK pya_status
pya_event_mark(struct pya_device *dev, pya_stream stream, pya_event *event);
/* A foreign stream of the card; NULL: there is none. */
struct pya_fence *pya_fences_foreign(const struct pya_card *card);
/* Forgets a stream whose work was waited for. */
void pya_fence_bury(struct pya_card *card, struct pya_fence *fence);
/* How many of those recorded have not completed: 0, 1, or 2 for more.  Never waits.  last: one of them.  False: none is open any
 * more, and nothing is known; another thread began to capture a stream in the moment in which it was recorded. */
bool pya_fences_n_open(struct pya_card *card, size_t *n_open, struct pya_fence **last);
/* Is the nth try of something that goes on failing worth it?  Tries are spaced ever more widely: powers of two. */
static inline bool
pya_fence_is_due(uint64_t n) {
    return (n & (n - 1)) == 0;
}
void pya_fences_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
