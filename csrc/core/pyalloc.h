/* The allocator's public interface, usable from C alone.  Floor 3; floors 11 and 12 implement it.
 * Long because it is the whole interface.
 *
 * One heap serves up to PYA_MAX_DEVICES devices.  Each device has its own lock, so devices do not wait for one
 * another.  All functions may be called from any thread.  Out-parameters are written only on PYA_OK. */
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

/* What the embedding program provides.  Every member except open_device may be NULL. */
struct pya_hooks {
    void *arg;
    /* Required.  Opens device `index` at its first use, under the heap's lock.  The heap closes it. */
    pya_status (*open_device)(void *arg, int index, struct pya_device **out);
    /* Why open_device last failed in the calling thread.  out->call is "" when that is not known. */
    void (*open_error)(void *arg, struct pya_device_error *out);
    /* Captures the context of the current request: an opaque, reference-counted object, or NULL for none.  Called
     * without a lock, and only while history is recorded.  with_stack false: leave the call stack out. */
    void *(*capture_context)(void *arg, bool with_stack);
    /* Both may be called under a card's lock: they must not wait for Python or call the heap. */
    void (*retain_context)(void *arg, void *context);
    void (*release_context)(void *arg, void *context);
    /* Returns the context to trace a free with: `here`, or, if `here` has no call stack, the stack of the
     * `allocation` (not NULL) together with everything else from `here` (may be NULL).  Consumes the caller's
     * reference to `here` and returns a new one.  Called under a card's lock. */
    void *(*context_of_free)(void *arg, void *here, void *allocation);
    /* Returns equal numbers for equal call stacks, 0 for no stack.  Called under a card's lock. */
    uint64_t (*context_key)(void *arg, void *context);
    /* Writes one line that names the place in the program.  False: the place is not known.  Called without a lock. */
    bool (*describe_context)(void *arg, void *context, char *text, size_t text_bytes);
    /* Memory is short: free what you can.  Called without a lock before a request that the card could hold fails with
     * out of memory.  It may allocate and free; it is not called again from within itself on the same thread.  True:
     * try again. */
    bool (*on_pressure)(void *arg, int device, size_t bytes);
    /* Called without the lock before PYA_E_NOMEM is returned. */
    void (*on_oom)(void *arg, int device, size_t bytes);
};

/* Who holds live memory: a place in the program if stacks are recorded, otherwise a stream of a pool. */
struct pya_oom_holder {
    size_t bytes;
    size_t n_blocks;
    char what[96];
};

enum { PYA_OOM_HOLDERS = 3, PYA_OOM_TEXT_BYTES = 2048 };

/* What an out-of-memory message reports. */
struct pya_oom_info {
    int device;
    size_t requested_bytes;
    size_t free_bytes;  /* of the device, now */
    size_t total_bytes; /* of the device */
    size_t limit_bytes; /* the limit from the fraction or the option; SIZE_MAX when none is set */
    size_t allocated_bytes;
    size_t reserved_bytes;
    size_t private_bytes;      /* free in private pools, except the pool that the request went to */
    size_t largest_free_bytes; /* largest free run outside private pools */
    size_t pool_limit_bytes;   /* of the private pool that the request went to; 0: none */
    size_t pool_bytes;         /* reserved by that pool */
    size_t keep_bytes;         /* kept by pya_reserve() */
    bool has_vmm;
    bool lacks_addresses; /* reserving a range of addresses failed */
    int n_holders;        /* largest first */
    struct pya_oom_holder holders[PYA_OOM_HOLDERS];
    struct pya_device_error error;
};

PYA_MUST_CHECK pya_status pya_heap_create(
    const struct pya_options *options, const struct pya_hooks *hooks, struct pya_heap **out);
/* Gives all memory back to the devices, including live blocks.  In a forked child it frees host memory only. */
void pya_heap_destroy(struct pya_heap *heap);

/* bytes 0 gives *out = 0.  The block may be used on `stream` at once.  After PYA_E_NOMEM, pya_heap_oom_info()
 * describes the moment of the calling thread's failure. */
PYA_MUST_CHECK pya_status
pya_alloc(struct pya_heap *heap, int device, size_t bytes, pya_stream stream, pya_dptr *out);
/* Allocates at this address and nowhere else.  PYA_E_INVAL: the bytes are not free there, are of another pool or
 * stream than a request on `stream` would be, or have no memory any more. */
PYA_MUST_CHECK pya_status
pya_alloc_at(struct pya_heap *heap, int device, size_t bytes, pya_stream stream, pya_dptr addr);
/* ptr 0 is accepted.  PYA_E_FOREIGN and PYA_E_DOUBLE_FREE change nothing. */
PYA_MUST_CHECK pya_status pya_free(struct pya_heap *heap, pya_dptr ptr);
/* Declares that `stream` uses the block too: after its free the block waits for the work queued on `stream` by then.
 * NULL and foreign pointers are ignored, as torch's callers expect. */
PYA_MUST_CHECK pya_status pya_record_stream(struct pya_heap *heap, pya_dptr ptr, pya_stream stream);
/* Call this with each request on, or record of, a stream that another library made and may destroy at any time.
 * `device` is the stream's device.  The driver is asked now whether the stream is capturing, and is not asked about
 * it again until the next such call, or until a block recorded on it is freed.  False: the heap does not know the
 * stream yet; call again after the request. */
bool pya_note_foreign_stream(struct pya_heap *heap, pya_stream stream, int device);

/* How much memory a caller can still get. */
struct pya_memory_info {
    size_t free_bytes;         /* of the device, now */
    size_t total_bytes;        /* of the device */
    size_t limit_bytes;        /* limit of all reserved bytes; SIZE_MAX when none is set */
    size_t cached_bytes;       /* reserved and free */
    size_t largest_free_bytes; /* largest request served without new memory (one stream's view) */
};

PYA_MUST_CHECK pya_status
pya_memory_info(struct pya_heap *heap, int device, struct pya_memory_info *out);

/* Requests served and blocks given back so far, on all devices; nothing resets them. */
void pya_heap_counts(struct pya_heap *heap, uint64_t *allocs, uint64_t *frees);

void pya_heap_oom_info(struct pya_heap *heap, struct pya_oom_info *out);
/* Torch's wording with our numbers, the holders of memory and what to try.  Returns the length as snprintf does. */
int pya_oom_text(const struct pya_oom_info *info, char *buffer, size_t buffer_bytes);
/* Writes "what: why", with the call, size, device and code if a device failed.  device -1: not known.  An error that
 * makes the device unusable is explained once; later messages refer to that explanation.  Returns the length as
 * snprintf does. */
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
    /* True: one driver allocation, which other processes can open.  False: pages; base and bytes are the block's
     * own. */
    bool is_plain;
};

PYA_MUST_CHECK pya_status
pya_segment_info(struct pya_heap *heap, pya_dptr ptr, struct pya_segment_info *out);

/* The pages under a live block, to be shared with another process, along with all other pages behind the same
 * handles.  They do not change while the block lives. */
struct pya_shared {
    pya_dptr ptr;
    size_t offset; /* of the block within the first page */
    size_t n_pages;
    uint64_t key; /* identifies the pages */
};

/* PYA_E_FOREIGN: ptr is not a live block.  PYA_E_NOTSUP: a plain segment, or the device cannot share pages. */
PYA_MUST_CHECK pya_status pya_share(struct pya_heap *heap, pya_dptr ptr, struct pya_shared *out);
/* Exports up to n handles (n > 0), starting with the one whose first page is number `first`.  Writes a descriptor,
 * which the caller must close, and a page count for each.  Exports all of them or none, and holds the device's lock
 * meanwhile.  PYA_E_FOREIGN: the block was freed and its address is unused or has other pages, or no handle begins at
 * page `first`. */
PYA_MUST_CHECK pya_status pya_share_export(
    struct pya_heap *heap, const struct pya_shared *shared, size_t first, size_t n, int *fds,
    uint32_t *n_pages, size_t *n_out);

/* Supplies an import's handles in order: for each a descriptor, which the callee must close, and its page count. */
struct pya_import_source {
    void *arg;
    pya_status (*next)(void *arg, int *fd, uint32_t *n_pages);
};

/* Maps another process's pages side by side, for the device and its peers.  They do not count as reserved.  No lock
 * is held while the source is called. */
PYA_MUST_CHECK pya_status pya_import_open(
    struct pya_heap *heap, int device, size_t n_pages, const struct pya_import_source *source,
    pya_dptr *out);
/* Waits for all devices, then unmaps the import.  If a stream is capturing or the unmapping fails, a later call of
 * this function or of pya_import_open() unmaps it.  PYA_E_FOREIGN: there is no such import. */
PYA_MUST_CHECK pya_status pya_import_close(struct pya_heap *heap, pya_dptr base);

/* Waits for pending blocks, then gives back every wholly free page.  device -1: all devices. */
PYA_MUST_CHECK pya_status pya_empty_cache(struct pya_heap *heap, int device);
/* Gives back free pages until reserved_bytes <= bytes or no more can be given back. */
PYA_MUST_CHECK pya_status pya_trim(struct pya_heap *heap, int device, size_t bytes);
/* Reserves memory until at least `bytes` are reserved, new pages for `stream`.  From then on nothing is given back
 * below that level; 0 ends this.  PYA_E_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status
pya_reserve(struct pya_heap *heap, int device, size_t bytes, pya_stream stream);

enum pya_limit_kind {
    PYA_LIMIT_HARD, /* reserved bytes never exceed it; cached memory above it is given back at once */
    PYA_LIMIT_SOFT, /* above it memory is reused and given back before growing; no request fails because of it */
};

/* bytes 0: no limit.  Overrides the options `limit` and `soft_limit` for one device. */
PYA_MUST_CHECK pya_status
pya_set_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind, size_t bytes);
/* 0: none. */
size_t pya_get_limit(struct pya_heap *heap, int device, enum pya_limit_kind kind);
/* The most bytes a private pool may reserve while it is in use; 0: no limit.  PYA_E_INVAL: there is no such pool. */
PYA_MUST_CHECK pya_status
pya_pool_set_limit(struct pya_heap *heap, int device, struct pya_pool_id id, size_t bytes);

/* fraction: share of the device's total memory, in [0, 1].  From now on reserved bytes stay below it. */
PYA_MUST_CHECK pya_status pya_set_fraction(struct pya_heap *heap, int device, double fraction);
double pya_get_fraction(struct pya_heap *heap, int device);

/* values: PYA_N_STATS numbers in the order of pya_stat_key(). */
PYA_MUST_CHECK pya_status pya_stats_get(struct pya_heap *heap, int device, int64_t *values);
/* Like pya_stats_get(), but pyalloc_host_bytes is 0: computing it visits every range and every stitched range. */
PYA_MUST_CHECK pya_status pya_stats_get_quickly(struct pya_heap *heap, int device, int64_t *values);
/* allocated_bytes.all.current and reserved_bytes.all.current. */
PYA_MUST_CHECK pya_status
pya_stats_bytes(struct pya_heap *heap, int device, size_t *allocated, size_t *reserved);
PYA_MUST_CHECK pya_status pya_stats_reset_peak(struct pya_heap *heap, int device);
PYA_MUST_CHECK pya_status pya_stats_reset_accumulated(struct pya_heap *heap, int device);

/* Starts recording.  level and max_entries (0 means 1) as in history.h; skip_mask: bit (1 << action) leaves that
 * action out. trace false: record only the contexts of live blocks.  Applies to all devices, including those opened
 * later. */
PYA_MUST_CHECK pya_status pya_history_start(
    struct pya_heap *heap, enum pya_record_level level, bool trace, size_t max_entries,
    uint32_t skip_mask);
/* Stops recording and drops the traces.  Live blocks keep their contexts, as in torch. */
void pya_history_stop(struct pya_heap *heap);
/* Is history being recorded? */
bool pya_history_is_on(const struct pya_heap *heap);
/* Drops the traces recorded so far. */
void pya_history_forget(struct pya_heap *heap);
/* Moves one device's entries out and reads its clock; live blocks keep their contexts.  The caller frees items and
 * releases each context through the hooks.  False: the device is not open, or nothing is recorded. */
bool
pya_history_take(struct pya_heap *heap, int device, struct pya_history_part *out, uint64_t *now_ns);
/* The context of the live block at ptr, with a reference for the caller.  NULL: it has none, or there is no such
 * block. */
void *pya_history_context(struct pya_heap *heap, pya_dptr ptr);
/* Adds a note on the live block at ptr to the trace.  The context holds the note's text. */
PYA_MUST_CHECK pya_status pya_history_annotate(struct pya_heap *heap, pya_dptr ptr, void *context);

/* Checks every invariant of a device's structures, prints each violation to stderr and returns their number. */
size_t pya_heap_check(struct pya_heap *heap, int device);

#ifdef __cplusplus
}
#endif
