/* Fences: how far have all streams of a card come?  Floor 5.
 *
 * Memory goes from one stream to another only when every stream the card has heard of, but for the one that takes it,
 * has finished what it had to do when the memory was freed.  The owner's own work is not enough: programs free what a
 * second stream still uses when they know that the owner will wait for it, and torch's allocator hands such memory to
 * the owner alone. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_fence {
    struct pya_fence *next;
    pya_stream stream;
    pya_event event; /* 0: never made */
    bool is_open;    /* recorded, not yet seen complete */
    uint64_t
        n_failed; /* recordings that failed since the last good one: most likely it was destroyed */
};

/* The card hears of a stream; knowing it changes nothing. */
PYA_MUST_CHECK pya_status pya_fences_add(struct pya_card *card, pya_stream stream);
/* Is a graph being captured on any of them?  Then nothing may wait or be unmapped.  Of a destroyed stream the device knows
 * nothing, and nobody captures it.  True also where a capture forbids asking. */
bool pya_fences_are_capturing(struct pya_card *card);
/* Records all.  False: not now (a stream is being captured, or the device refuses); none is open then. */
bool pya_fences_record(struct pya_card *card);
/* How many of those recorded have not completed?  Never waits.  last: one of them. */
size_t pya_fences_n_open(struct pya_card *card, struct pya_fence **last);
void pya_fences_fini(struct pya_card *card);

#ifdef __cplusplus
}
#endif
