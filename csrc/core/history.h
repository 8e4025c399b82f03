/* The trace ring: what happened to a card's memory, newest max_entries of it.  Floor 2.
 *
 * Entries carry a context (a call stack and the like, opaque here) whose owner counts references. */
#pragma once

#include "../device/device.h"
#include "base.h"
#include "pool_id.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Names as torch writes them in device_traces. */
#define PYA_ACTION_TABLE(X)                                                                        \
    X(ALLOC, "alloc")                                                                              \
    X(FREE_REQUESTED, "free_requested")                                                            \
    X(FREE_COMPLETED, "free_completed")                                                            \
    X(SEGMENT_ALLOC, "segment_alloc")                                                              \
    X(SEGMENT_FREE, "segment_free")                                                                \
    X(SEGMENT_MAP, "segment_map")                                                                  \
    X(SEGMENT_UNMAP, "segment_unmap")                                                              \
    X(SNAPSHOT, "snapshot")                                                                        \
    X(OOM, "oom")                                                                                  \
    X(ANNOTATE, "annotate")                                                                        \
    /* torch's traces have none of these: snapshots leave them out */                              \
    X(RECORD_STREAM, "record_stream")                                                              \
    X(POOL_RELEASE, "pool_release") /* its last user has gone */

enum pya_action {
#define X(name, text) PYA_ACTION_##name,
    PYA_ACTION_TABLE(X)
#undef X
        PYA_N_ACTIONS
};

/* How much is remembered of who asked: torch's context levels. */
enum pya_record_level {
    PYA_RECORD_NEVER, /* no contexts */
    PYA_RECORD_STATE, /* of live blocks */
    PYA_RECORD_ALLOC, /* and of alloc entries in the trace */
    PYA_RECORD_ALL,   /* and of every other entry */
};

static inline bool
pya_action_is_torchs(int action) {
    return action < PYA_ACTION_RECORD_STREAM;
}

struct pya_entry {
    pya_dptr addr; /* OOM: bytes free on the device */
    size_t bytes;
    struct pya_place place; /* RECORD_STREAM: its stream is the one that uses the block too */
    uint64_t time_ns;       /* the device's clock */
    void *context;          /* owned by the entry; NULL: none */
    uint32_t thread;        /* that made it, as the system numbers it */
    uint8_t action;         /* enum pya_action */
    bool has_stack;         /* the level was one at which the context's call stack is shown */
};

/* Entries moved out of a ring, with their references: entry i is items[(first + i) % n]. */
struct pya_history_part {
    struct pya_entry *items;
    size_t n;
    size_t first;
    uint64_t n_lost; /* older ones that were overwritten, and those there was no host memory for */
};

/* The hooks of pyalloc.h that may be called under a card's lock. */
struct pya_context_owner {
    void *arg;
    void (*retain)(void *arg, void *context);
    void (*release)(void *arg, void *context);
    void *(*of_free)(void *arg, void *here, void *allocation);
};

/* Ring: entry i of the oldest first is items[(first + i) % n_room] once n_items == max_entries. */
struct pya_history {
    struct pya_entry *items;
    size_t n_items;
    size_t n_room;
    size_t first;
    size_t max_entries; /* at least 1 */
    void *current; /* borrowed; context of the request in progress, for entries without their own */
    /* Entries overwritten, or without host memory, since the last were moved out. */
    uint64_t n_lost;
    uint32_t skip_mask; /* actions that are not recorded */
    int level;          /* enum pya_record_level */
    struct pya_context_owner owner;
    struct pya_device *dev; /* for its clock */
};

const char *pya_action_name(enum pya_action action);
/* Adds a reference of its own to context. */
void pya_history_add(
    struct pya_history *history, enum pya_action action, pya_dptr addr, size_t bytes,
    struct pya_place place, void *context);
/* What a free is traced with, which is asked for `here`: see context_of_free in pyalloc.h.  Both may be NULL. */
void *pya_context_of_free(const struct pya_context_owner *owner, void *here, void *allocation);
/* Moves all entries out; the ring goes on empty. */
void pya_history_move(struct pya_history *history, struct pya_history_part *out);
/* The newest max_entries stay; none, where host memory is short. */
void pya_history_resize(struct pya_history *history, size_t max_entries);
/* Drops all entries and their references; nothing that was lost by then is missed. */
void pya_history_clear(struct pya_history *history);
void pya_history_fini(struct pya_history *history);

/* Entries that follow, those of memory given back too, are traced with this; NULL: with nothing any more. */
static inline void
pya_history_set_current(struct pya_history *history, void *context) {
    if (history != NULL) {
        history->current = context;
    }
}

/* The call that is on every path: nothing when nobody records. */
static inline void
pya_history_note(
    struct pya_history *history, enum pya_action action, pya_dptr addr, size_t bytes,
    struct pya_place place) {
    if (PYA_UNLIKELY(history != NULL)) {
        pya_history_add(history, action, addr, bytes, place, NULL);
    }
}

#ifdef __cplusplus
}
#endif
