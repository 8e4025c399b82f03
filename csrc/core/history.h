/* The trace ring: the newest max_entries events of a card's memory.  Floor 2.
 *
 * Entries carry a context (for example a call stack; opaque here).  Its owner counts the references. */
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
    /* torch's traces do not have these, so snapshots leave them out */                            \
    X(RECORD_STREAM, "record_stream")                                                              \
    X(POOL_RELEASE, "pool_release") /* its last user left */

enum pya_action {
#define X(name, text) PYA_ACTION_##name,
    PYA_ACTION_TABLE(X)
#undef X
        PYA_N_ACTIONS
};

/* How much is recorded about who made a request: torch's context levels. */
enum pya_record_level {
    PYA_RECORD_NEVER, /* no contexts */
    PYA_RECORD_STATE, /* contexts of live blocks */
    PYA_RECORD_ALLOC, /* also of alloc entries in the trace */
    PYA_RECORD_ALL,   /* also of all other entries */
};

static inline bool
pya_action_is_torchs(int action) {
    return action < PYA_ACTION_RECORD_STREAM;
}

struct pya_entry {
    pya_dptr addr; /* OOM: free bytes of the device */
    size_t bytes;
    struct pya_place place; /* RECORD_STREAM: has the stream that uses the block too */
    uint64_t time_ns;       /* the device's clock */
    void *context;          /* owned by the entry; NULL: none */
    uint32_t thread;        /* thread that made it, by the system's number */
    uint8_t action;         /* enum pya_action */
    bool has_stack;         /* the record level was one that shows the context's call stack */
};

/* Entries moved out of a ring, with their references: entry i is items[(first + i) % n]. */
struct pya_history_part {
    struct pya_entry *items;
    size_t n;
    size_t first;
    uint64_t n_lost; /* older entries that were overwritten or had no host memory */
};

/* Those hooks of pyalloc.h that may be called under a card's lock. */
struct pya_context_owner {
    void *arg;
    void (*retain)(void *arg, void *context);
    void (*release)(void *arg, void *context);
    void *(*of_free)(void *arg, void *here, void *allocation);
};

/* A ring.  Once n_items == max_entries, the ith oldest entry is items[(first + i) % n_room]. */
struct pya_history {
    struct pya_entry *items;
    size_t n_items;
    size_t n_room;
    size_t first;
    size_t max_entries; /* at least 1 */
    void *current;      /* borrowed: the current request's context, for entries without their own */
    /* Entries overwritten, or not stored for lack of host memory, since entries were last moved out. */
    uint64_t n_lost;
    uint32_t skip_mask; /* actions that are not recorded */
    int level;          /* enum pya_record_level */
    struct pya_context_owner owner;
    struct pya_device *dev; /* for its clock */
};

const char *pya_action_name(enum pya_action action);
/* Takes its own reference to context. */
void pya_history_add(
    struct pya_history *history, enum pya_action action, pya_dptr addr, size_t bytes,
    struct pya_place place, void *context);
/* The context to trace a free with.  Consumes the reference to `here` and returns one: see context_of_free in
 * pyalloc.h.  Both arguments may be NULL. */
void *pya_context_of_free(const struct pya_context_owner *owner, void *here, void *allocation);
/* Moves all entries out.  The ring continues empty. */
void pya_history_move(struct pya_history *history, struct pya_history_part *out);
/* Keeps the newest max_entries, or none if host memory is short. */
void pya_history_resize(struct pya_history *history, size_t max_entries);
/* Drops all entries and their references, and resets the count of lost entries. */
void pya_history_clear(struct pya_history *history);
void pya_history_fini(struct pya_history *history);

/* Sets the context for the entries that follow, including those for memory given back; NULL: none. */
static inline void
pya_history_set_current(struct pya_history *history, void *context) {
    if (history != NULL) {
        history->current = context;
    }
}

/* For every request's path: does nothing if history is not recorded. */
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
