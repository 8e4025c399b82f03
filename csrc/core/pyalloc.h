/* The allocator's public interface, usable from C alone.  Floor 3; floors 11 and 12 implement it.
 * Long because it is all of it.
 *
 * One heap serves up to PYA_MAX_DEVICES devices, each with a lock of its own, so devices do not wait for one another.
 * All functions may be called from any thread.  Out-parameters are written only on PYA_OK.  */
#pragma once

#include "../device/device.h"
#include "base.h"
#include "history.h"
#include "options.h"
#include "pool_id.h"
#include "private_pools.h"
#include "stats.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap;

/* How the embedding program tells the heap about its world.  Every member may be NULL. */
struct pya_hooks {
    void *arg;
    /* Opens device `index` at its first use, under the heap's lock; the heap closes it.  Required. */
    pya_status (*open_device)(void *arg, int index, struct pya_device **out);
    /* Why the calling thread's last open_device failed; out->call is "" where that is not known. */
    void (*open_error)(void *arg, struct pya_device_error *out);
    /* What surrounds the request being made (opaque, counted references; NULL: nothing): called without a
     * lock and only while history is recorded.  with_stack false: everything but the call stack. */
    void *(*capture_context)(void *arg, bool with_stack);
    /* Both may be called under a card's lock: they must not wait for Python or call the heap. */
    void (*retain_context)(void *arg, void *context);
    void (*release_context)(void *arg, void *context);
    /* What a free is traced with: `here` or, where that came without a call stack, the stack of its allocation (not NULL) with
     * what `here` says besides, which may be NULL.  It takes over the reference to `here` and gives one.  Called under a
     * card's lock. */
    void *(*context_of_free)(void *arg, void *here, void *allocation);
    /* A number that is the same for equal call stacks, 0: no stack.  Called under a card's lock. */
    uint64_t (*context_key)(void *arg, void *context);
    /* One line that says where in the program that is; false: not known.  Called without a lock. */
    bool (*describe_context)(void *arg, void *context, char *text, size_t text_bytes);
    /* Memory is short: free what you can.  Called without the lock, before out of memory of what the card can hold,
     * never from within itself on one thread; it may allocate and free.  true: try again. */
    bool (*on_pressure)(void *arg, int device, size_t bytes);
    /* Called without the lock before PYA_E_NOMEM is returned. */
    void (*on_oom)(void *arg, int device, size_t bytes);
};

/* Who holds live memory: a place in the program where stacks are recorded, else a stream of a pool. */
struct pya_oom_holder {
    size_t bytes;
    size_t n_blocks;
    char what[96];
};

enum { PYA_OOM_HOLDERS = 3, PYA_OOM_TEXT_BYTES = 2048 };

/* What an out-of-memory message says.  All in bytes. */
struct pya_oom_info {
    int device;
    size_t requested_bytes;
    size_t free_bytes;  /* of the device, now */
    size_t total_bytes; /* of the device */
    size_t limit_bytes; /* what the fraction or limit allows; SIZE_MAX when none is set */
    size_t allocated_bytes;
    size_t reserved_bytes;
    size_t private_bytes;      /* idle in private pools, but for the one the request went to */
    size_t largest_free_bytes; /* largest free run outside of those */
    size_t pool_limit_bytes;   /* of the private pool the request went to; 0: none */
    size_t pool_bytes;         /* what that pool holds */
    size_t keep_bytes;         /* pya_reserve() */
    bool has_vmm;
    bool lacks_addresses; /* a range of addresses could not be had */
    int n_holders;        /* largest first */
    struct pya_oom_holder holders[PYA_OOM_HOLDERS];
    struct pya_device_error error;
};

PYA_MUST_CHECK pya_status pya_heap_create(
    const struct pya_options *options, const struct pya_hooks *hooks, struct pya_heap **out);
/* Gives everything back to the devices, live blocks too.  In a forked child it frees host memory only. */
void pya_heap_destroy(struct pya_heap *heap);

/* bytes 0 gives *out = 0.  The block may be used on `stream` at once.  On PYA_E_NOMEM the numbers of
 * pya_heap_oom_info() describe the moment of failure for the calling thread. */
PYA_MUST_CHECK pya_status
pya_alloc(struct pya_heap *heap, int device, size_t bytes, pya_stream stream, pya_dptr *out);
/* ptr 0 is accepted.  PYA_E_FOREIGN and PYA_E_DOUBLE_FREE change nothing. */
PYA_MUST_CHECK pya_status pya_free(struct pya_heap *heap, pya_dptr ptr);
/* The block is in use on `stream` too: after its free it waits for the work queued there by then.
 * NULL and foreign pointers are ignored, as torch's callers expect. */
PYA_MUST_CHECK pya_status pya_record_stream(struct pya_heap *heap, pya_dptr ptr, pya_stream stream);
/* To be called with each request on, or record of, a stream that another library made and may destroy at any time;
 * `device` is the stream's.  The driver is asked now whether the stream captures.  It is not asked about the stream again
 * before the next such call, or the free of a block recorded on it.  False: the heap does not know the stream yet; call
 * again after the request. */
bool pya_note_foreign_stream(struct pya_heap *heap, pya_stream stream, int device);

/* What a caller may still get. */
struct pya_memory_info {
    size_t free_bytes;         /* of the device, now */
    size_t total_bytes;        /* of the device */
    size_t limit_bytes;        /* what may be reserved in all; SIZE_MAX when no limit is set */
    size_t cached_bytes;       /* reserved and free */
    size_t largest_free_bytes; /* largest request served without new memory (one stream's view) */
};

PYA_MUST_CHECK pya_status
pya_memory_info(struct pya_heap *heap, int device, struct pya_memory_info *out);

/* Requests served and blocks given back so far, on all devices; nothing resets them. */
void pya_heap_counts(struct pya_heap *heap, uint64_t *allocs, uint64_t *frees);

void pya_heap_oom_info(struct pya_heap *heap, struct pya_oom_info *out);
/* torch's wording with our numbers, who holds memory and what to try; returns the length as snprintf does. */
int pya_oom_text(const struct pya_oom_info *info, char *buffer, size_t buffer_bytes);
/* What the device said last (call, code, text), for PYA_E_DEVICE. */
void pya_heap_device_error(struct pya_heap *heap, int device, struct pya_device_error *out);
/* "what: why", with call, size, device and code where a device failed; device -1: not known.  An error after which the
 * device is of no use any more is explained once, later ones refer to it.  Returns the length as snprintf does. */
int pya_heap_error_text(
    struct pya_heap *heap, pya_status status, const char *what, int device, char *buffer,
    size_t buffer_bytes);

/* Where the block holding ptr starts and how large it is. */
PYA_MUST_CHECK pya_status
pya_block_info(struct pya_heap *heap, pya_dptr ptr, pya_dptr *base, size_t *bytes, int *device);

/* What torch's getBaseAllocation asks for. */
struct pya_segment_info {
    pya_dptr base;
    size_t bytes;
    /* One allocation of the driver, which other processes can open; else pages: base and bytes are the block's own. */
    bool is_plain;
};

PYA_MUST_CHECK pya_status
pya_segment_info(struct pya_heap *heap, pya_dptr ptr, struct pya_segment_info *out);

/* The pages under a live block, for another process, and those behind the same handles.  They are the same for as long as
 * the block lives. */
struct pya_shared {
    pya_dptr ptr;
    size_t offset; /* of the block in the first of them */
    size_t n_pages;
    uint64_t key; /* of the pages */
};

/* PYA_E_FOREIGN: ptr is no live block.  PYA_E_NOTSUP: a plain segment, or a device that does not share pages. */
PYA_MUST_CHECK pya_status pya_share(struct pya_heap *heap, pya_dptr ptr, struct pya_shared *out);
/* The next at most n handles, n > 0, from page `first` on: their descriptors, the caller's to close, all or none, and how
 * many pages each has.  The device's lock is held meanwhile.  PYA_E_FOREIGN: the block is gone, and what lies there now, if
 * anything, has other pages; or no handle begins with that page. */
PYA_MUST_CHECK pya_status pya_share_export(
    struct pya_heap *heap, const struct pya_shared *shared, size_t first, size_t n, int *fds,
    uint32_t *n_pages, size_t *n_out);

/* Where an import's pages come from, first to last: a descriptor, the callee's to close, and how many pages it is of. */
struct pya_import_source {
    void *arg;
    pya_status (*next)(void *arg, int *fd, uint32_t *n_pages);
};

/* Maps another process's pages side by side, for the device and its peers.  They are not counted as reserved.  No lock is
 * held while the source is asked. */
PYA_MUST_CHECK pya_status pya_import_open(
    struct pya_heap *heap, int device, size_t n_pages, const struct pya_import_source *source,
    pya_dptr *out);
/* Waits for all devices and unmaps them; while a stream captures, or where it fails, with one of the next calls of this or
 * pya_import_open().  PYA_E_FOREIGN: no such import. */
PYA_MUST_CHECK pya_status pya_import_close(struct pya_heap *heap, pya_dptr base);

/* Waits for pending blocks, then gives back every page that is wholly free.  device -1: all. */
PYA_MUST_CHECK pya_status pya_empty_cache(struct pya_heap *heap, int device);
/* Gives back free pages until reserved_bytes <= bytes or nothing is left to give. */
PYA_MUST_CHECK pya_status pya_trim(struct pya_heap *heap, int device, size_t bytes);
/* Makes sure that at least `bytes` are reserved, new ones for `stream`, and gives nothing back below that from now on;
 * 0 ends it.  On PYA_E_NOMEM nothing changed. */
PYA_MUST_CHECK pya_status
pya_reserve(struct pya_heap *heap, int device, size_t bytes, pya_stream stream);

enum pya_limit_kind {
    PYA_LIMIT_HARD, /* reserved bytes never pass it, and what is cached above it goes back at once */
    PYA_LIMIT_SOFT, /* above it memory is reused and given back first; no request fails for it */
};

/* bytes 0: no limit.  Overrides the options `limit` and `soft_limit` for one device. */
PYA_MUST_CHECK pya_status
pya_set_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind, size_t bytes);
/* 0: none. */
size_t pya_get_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind);
/* Most bytes a private pool may hold while it is in use; 0: no limit.  PYA_E_INVAL: no such pool. */
PYA_MUST_CHECK pya_status
pya_pool_set_limit(struct pya_heap *heap, int device, struct pya_pool_id id, size_t bytes);

/* fraction of the device's total memory in [0, 1]; reserved bytes stay below it from now on. */
PYA_MUST_CHECK pya_status pya_set_fraction(struct pya_heap *heap, int device, double fraction);
double pya_get_fraction(struct pya_heap *heap, int device);

/* values: PYA_N_STATS numbers in the order of pya_stat_key(). */
PYA_MUST_CHECK pya_status pya_stats_get(struct pya_heap *heap, int device, int64_t *values);
/* The same but for pyalloc_host_bytes, which is 0: for it every range and every stitched one is looked at. */
PYA_MUST_CHECK pya_status pya_stats_get_quickly(struct pya_heap *heap, int device, int64_t *values);
/* allocated_bytes.all.current and reserved_bytes.all.current. */
PYA_MUST_CHECK pya_status
pya_stats_bytes(struct pya_heap *heap, int device, size_t *allocated, size_t *reserved);
PYA_MUST_CHECK pya_status pya_stats_reset_peak(struct pya_heap *heap, int device);
PYA_MUST_CHECK pya_status pya_stats_reset_accumulated(struct pya_heap *heap, int device);

/* History: level and max_entries (0: 1) as in history.h; skip_mask: bit (1 << action) for actions to leave out.
 * Applies to all devices, also to those opened later.  trace false: contexts of live blocks only. */
PYA_MUST_CHECK pya_status pya_history_start(
    struct pya_heap *heap, enum pya_record_level level, bool trace, size_t max_entries,
    uint32_t skip_mask);
/* Stops, and forgets the traces; live blocks keep their contexts, as torch's do. */
void pya_history_stop(struct pya_heap *heap);
/* Is any recorded? */
bool pya_history_is_on(const struct pya_heap *heap);
/* Forgets the traces so far. */
void pya_history_forget(struct pya_heap *heap);
/* Moves one device's entries out, with the time of its clock; contexts of live blocks stay.  The caller frees items and
 * gives each context back through the hooks.  False: the device is not open, or nothing is recorded. */
bool
pya_history_take(struct pya_heap *heap, int device, struct pya_history_part *out, uint64_t *now_ns);
/* What the live block at ptr is remembered by, a reference for the caller; NULL: nothing, or no such block. */
void *pya_history_context(struct pya_heap *heap, pya_dptr ptr);
/* Traces a note on the live block at ptr; what the note says is the context's affair. */
PYA_MUST_CHECK pya_status pya_history_annotate(struct pya_heap *heap, pya_dptr ptr, void *context);

/* Checks every invariant of a device's structures; prints each violation to stderr; returns their number. */
size_t pya_heap_check(struct pya_heap *heap, int device);

#ifdef __cplusplus
}
#endif
