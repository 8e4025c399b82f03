/* Fences: how far has each stream of a card come?  Floor 5.
 *
 * Memory may move from one stream to another only after every known stream, except the taker, has finished the work
 * it had when the memory was freed.  The owner's work alone is not enough: a program may free memory that a second
 * stream still uses if it knows that the owner will wait for that stream, and torch's allocator would reuse such
 * memory for the owner only.
 *
 * A stream becomes known when it requests memory, is recorded on a block, or starts to fill a pool.  After it was
 * destroyed and waited for, it is forgotten.  If its handle appears again, that is another stream.
 *
 * A stream made by another library (a foreign stream) may be destroyed at any time, and a driver may crash when asked
 * about a destroyed stream.  So foreign streams are not asked for progress: whoever needs to know waits for the
 * device instead, ever more rarely.  After such a wait the stream is forgotten too, unless it holds blocks. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lives as long as the card: arenas and queues point to it. */
struct pya_fence {
    struct pya_fence *next;
    pya_stream stream;
    pya_event event;      /* 0: not created yet */
    int device;           /* foreign: the stream's device, which may not be the card's */
    bool is_open;         /* recorded, completion not yet seen */
    bool is_leaving;      /* during a round: the device does not know the stream */
    bool is_gone;         /* destroyed and waited for: not asked any more */
    bool is_recorded;     /* was recorded on a block, so it may be a stream of another device */
    bool is_foreign;      /* another library's: asked only while known to be in use */
    bool holds_blocks;    /* during a round: live blocks were requested on it */
    bool was_capturing;   /* foreign: was capturing when last asked, and only it tells until when */
    uint64_t n_failed;    /* failed recordings since the last success */
    uint64_t captured_at; /* when was_capturing was seen, by the device's clock */
};

/* Makes the stream known to the card; does nothing if it is known. */
PYA_MUST_CHECK pya_status
pya_fences_add(struct pya_card *card, pya_stream stream, struct pya_fence **out);
/* Notes that a known stream was heard of again. */
static inline void
pya_fence_hear(struct pya_card *card, struct pya_fence *fence) {
    card->n_fences += fence->is_gone;
    fence->is_foreign = fence->is_foreign && !fence->is_gone; /* else whoever knows says so again */
    fence->is_gone = false;
}
/* May a graph capture be in progress on any of the card's streams?  If so, nothing may wait or unmap.  True if
 * - the device says so for a stream, or a capture forbids asking;
 * - a pool serves a capture that began on a foreign stream, which is not asked;
 * - a foreign stream was capturing when it was last asked, not long ago;
 * - a capture was announced not long ago, and its first request has not come yet.
 * A destroyed stream is not capturing. */
bool pya_fences_are_capturing(struct pya_card *card);
/* Waits for all work that may use the card's memory, that of its device and of known streams of other devices.
 * PYA_E_CAPTURE: a capture forbids waiting now.  insists: as for pya_fence_sync(). */
PYA_MUST_CHECK pya_status pya_fences_sync(struct pya_card *card, bool insists);
/* The same without holding a lock: the work may wait for another process, which may need pya_share_export() to
 * proceed. */
PYA_MUST_CHECK pya_status pya_fences_wait_unlocked(struct pya_card *card);
/* The same for a caller that holds the lock.  It is released during the wait, so other threads may have used up
 * the caller's reserved records (except that the map of live blocks again has room for one), dropped a private pool
 * or begun a capture (PYA_E_CAPTURE).  If they freed memory, the work is waited for again, a few times at most.
 * *is_idle: all memory that is free now was free before the last wait. */
PYA_MUST_CHECK pya_status pya_fences_wait_meanwhile(struct pya_card *card, bool *is_idle);
/* Releases the lock until no thread waits for the device without it.  Call this before a capture begins, because a
 * wait would invalidate the capture. */
void pya_fences_pass(struct pya_card *card);
/* Records an event on every stream except foreign ones; for those the caller must have the device waited for.  False:
 * not possible now (a stream is capturing, or the device refused), and no fence is open.
 * *waited: in: wait for the device as well; out: the device was waited for, as asked or because a stream was
 * destroyed. */
bool pya_fences_record(struct pya_card *card, bool *waited);
/* A foreign stream is in use now: asks whether it is capturing and remembers the answer.  After this only the two
 * functions below ask it.  origin: the stream on which the capture of the requests' pool began, or the stream itself.
 * While origin is capturing, it is asked instead of the stream.  False: the card does not know the stream. */
bool
pya_fences_note_foreign(struct pya_card *card, pya_stream stream, int device, pya_stream origin);
/* Would an event recorded on the stream now become part of a graph?  For a foreign stream the answer is remembered. */
bool pya_fence_is_captured(struct pya_card *card, struct pya_fence *fence);
/* Asks a foreign stream whether the capture remembered for it is still in progress. */
void pya_fence_ask_again(struct pya_card *card, struct pya_fence *fence);
/* Waits for the card's device, and for the device of a foreign stream if that is another one.  PYA_E_CAPTURE: waiting
 * is not possible now, because a capture is in progress there (one that begins during the wait is not noticed) or
 * another thread holds that card's lock.  insists: the caller has no other way out: the lock is tried for a second;
 * if it is still held, no capture is assumed. */
PYA_MUST_CHECK pya_status
pya_fence_sync(struct pya_card *card, const struct pya_fence *fence, bool insists);
/* Records an event on a stream, and creates the event first if *event is 0.  An event made for an earlier stream with
 * the same handle may belong to another device; it is then replaced by a new one.  On failure *event is 0 or may
 * never have been recorded. */
PYA_MUST_CHECK pya_status
pya_event_mark(struct pya_device *dev, pya_stream stream, pya_event *event);
/* One of the card's foreign streams; NULL: there is none. */
struct pya_fence *pya_fences_foreign(const struct pya_card *card);
/* Forgets a stream whose work was waited for. */
void pya_fence_bury(struct pya_card *card, struct pya_fence *fence);
/* Counts recorded fences that have not completed: 0, 1, or 2 for more; *last is one of them.  Never waits.  False:
 * nothing is known and no fence is open any more, because another thread began a capture while they were recorded. */
bool pya_fences_n_open(struct pya_card *card, size_t *n_open, struct pya_fence **last);
/* Should the nth attempt of something that keeps failing be made?  Only if n is a power of two, so attempts become
 * ever rarer. */
static inline bool
pya_fence_is_due(uint64_t n) {
    return (n & (n - 1)) == 0;
}
void pya_fences_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
