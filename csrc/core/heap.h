/* The heap's own structure, for the files of the top floors.  Floor 11. */
#pragma once

#include "ladder.h"
#include "pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap {
    struct pya_lock lock;  /* guards the opening of cards; taken before a card's lock */
    struct pya_heap *next; /* next heap of the process */
    /* One bit per device.  Set in a forked child if another thread of the parent was changing the card during the
     * fork; the child has forgotten that card (forks.c). */
    uint64_t torn_cards;
    struct pya_options options;
    double fractions[PYA_MAX_DEVICES]; /* for cards not open yet; guarded by lock */
    struct pya_hooks hooks;
    int record_level; /* enum pya_record_level, -1: no history; atomic */
    struct pya_cards cards;
    uint64_t pool_order;
    uint64_t import_round; /* numbers the waits before imports are unmapped (sharing.c); atomic */
    bool record_trace;
    size_t record_entries;
    uint32_t record_skip;
};

/* NULL if the device was never used. */
struct pya_card *pya_heap_open_card(const struct pya_heap *heap, int device);
/* How many forks led to this process.  Changes only while it has a single thread. */
extern __attribute__((visibility("hidden"))) uint32_t pya_n_forks;
/* Is this process a fork of the process that made the heap? */
static inline bool
pya_heap_is_forked(const struct pya_heap *heap) {
    return pya_cards_are_forked(&heap->cards, pya_n_forks);
}
/* Opens the card at its first use. */
PYA_MUST_CHECK pya_status
pya_heap_first_use(struct pya_heap *heap, int device, struct pya_card **out);
/* Returns the card unlocked; opens it if needed. */
PYA_MUST_CHECK static inline pya_status
pya_heap_card(struct pya_heap *heap, int device, struct pya_card **out) {
    if (PYA_UNLIKELY(device < 0 || device >= PYA_MAX_DEVICES)) {
        return PYA_E_INVAL;
    }
    if (PYA_UNLIKELY(pya_heap_is_forked(heap))) {
        return PYA_E_FORKED;
    }
    struct pya_card *card = pya_cards_get(&heap->cards, device);
    if (PYA_UNLIKELY(card == NULL)) {
        return pya_heap_first_use(heap, device, out);
    }
    *out = card;
    return PYA_OK;
}
/* Call at creation and destruction, so that a process forked in between notices it (forks.c). */
void pya_heap_watch_forks(struct pya_heap *heap);
void pya_heap_unwatch_forks(struct pya_heap *heap);
/* Was another thread working on the device's card when this process was forked? */
static inline bool
pya_heap_is_torn(const struct pya_heap *heap, int device) {
    return (heap->torn_cards >> device & 1) != 0;
}
/* Like pya_heap_card(); on success the card is locked. */
PYA_MUST_CHECK static inline pya_status
pya_heap_lock_card(struct pya_heap *heap, int device, struct pya_card **out) {
    pya_status st = pya_heap_card(heap, device, out);
    if (st == PYA_OK) {
        pya_lock_acquire(&(*out)->lock);
    }
    return st;
}

/* Also finds the pool; on success the card is locked.  PYA_E_INVAL: the device has no such pool. */
PYA_MUST_CHECK pya_status pya_heap_lock_pool(
    struct pya_heap *heap, int device, struct pya_pool_id id, struct pya_card **card,
    struct pya_pool **pool);

/* Finds the live block at ptr.  Returns its card LOCKED, or NULL and takes no lock if there is no such block. */
struct pya_card *pya_heap_find(struct pya_heap *heap, pya_dptr ptr, struct pya_block **out);

/* Makes a block that was just cut live: sets its user fields and enters it into the map (which has room for one
 * more), statistics and trace.  is_small is already set.  Consumes the caller's reference to context. */
void
pya_card_hand_out(struct pya_card *card, struct pya_block *block, size_t requested, void *context);
/* The size that a request takes, rounded. */
size_t pya_card_round(const struct pya_card *card, size_t bytes);
/* Serves one request on a locked card.  On success the block owns the reference to context. */
PYA_MUST_CHECK pya_status
pya_heap_try(struct pya_card *card, size_t bytes, pya_stream stream, void *context, pya_dptr *out);
/* An unlocked card has no memory for a request: asks the program to free some and tries again.  On failure notes the
 * reason. */
PYA_MUST_CHECK pya_status pya_heap_run_short(
    struct pya_heap *heap, struct pya_card *card, size_t bytes, pya_stream stream, pya_dptr *out);
void pya_heap_note_too_large(int device, size_t bytes);

/* Unmaps the closed imports, and those that could not be unmapped earlier.  Leaves those that another thread is
 * waiting for to that thread. */
void pya_heap_unmap_imports(struct pya_heap *heap);

/* Captures the context for the block in hand.  Called without a lock; the caller owns the reference.  It includes the
 * call stack if the record level is at least stack_from. */
static inline void *
pya_heap_capture_from(struct pya_heap *heap, int stack_from) {
    int level = __atomic_load_n(&heap->record_level, __ATOMIC_RELAXED);
    if (PYA_LIKELY(level < 0) || heap->hooks.capture_context == NULL) {
        return NULL;
    }
    return heap->hooks.capture_context(heap->hooks.arg, level >= stack_from);
}

static inline void *
pya_heap_capture(struct pya_heap *heap, enum pya_record_level stack_from) {
    return pya_heap_capture_from(heap, (int)stack_from);
}

/* The same without a call stack. */
static inline void *
pya_heap_capture_labels(struct pya_heap *heap) {
    return pya_heap_capture_from(heap, (int)PYA_RECORD_ALL + 1);
}

static inline void
pya_heap_drop_context(struct pya_heap *heap, void *context) {
    if (PYA_UNLIKELY(context != NULL)) {
        heap->hooks.release_context(heap->hooks.arg, context);
    }
}

/* Applies the heap's history settings to a card that was just opened, or whose recording changes. */
PYA_MUST_CHECK pya_status pya_heap_apply_history(struct pya_heap *heap, struct pya_card *card);

#ifdef __cplusplus
}
#endif
