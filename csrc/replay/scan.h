/* One pass over a trace file in bounded memory: totals, a timeline in bins, phases, steps, stacks, what was alive at chosen
 * moments, and who held memory from one mark to another.  Floor 2.
 *
 * allocated = requests rounded to 512 that were not yet freed; reserved = device memory taken and not yet returned, as far as
 * the trace tells.  A moment is a number of applied events.
 * Long because all rows that a pass returns are described in one place. */
#pragma once

#include "trace.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_SCAN_NEVER UINT64_MAX
#define PYA_SCAN_SPANS 8192
#define PYA_SCAN_SIZES 64
#define PYA_SCAN_SHORTEST 4097 /* upper limit of short_life */
/* Phases with this prefix are modules and are kept apart from the others. */
#define PYA_SCAN_MODULE "module:"

struct pya_scan_range {
    uint64_t begin, end;
};

struct pya_scan_settings {
    int device;              /* -1: all of them, summed */
    size_t n_bins;           /* at least 2; the result has between this many and twice as many */
    const uint64_t *moments; /* ascending */
    size_t n_moments;
    /* Unless (0, 0): bins cover only these events, and the largest blocks alive in them are returned as spans. */
    uint64_t window_begin, window_end;
    /* Ascending moments of which only sums are kept (stays), so there may be more of them. */
    const uint64_t *marks;
    size_t n_marks;
    uint64_t around;                     /* a moment for which heights are kept; 0: none */
    const struct pya_scan_range *ranges; /* ascending; events to return one by one */
    size_t n_ranges;
    /* A block is temporary if it is freed within this many further requests on its device; 0: no block is. */
    size_t short_life;
    /* Called now and then; false stops (PYA_E_BUSY).  May be NULL. */
    bool (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all);
    void *progress_arg;
};

/* max, min, last: of allocated within the bin; max_event: the moment of the maximum. */
struct pya_scan_bin {
    uint64_t event, time_ns; /* of its first event */
    uint64_t max_bytes, min_bytes, last_bytes, reserved_bytes, max_event;
    uint32_t phase; /* text; 0: none */
    uint64_t step;  /* number + 1; 0: before the first */
};

/* A phase that is not a module.  made: blocks allocated in it; left: those of them alive at its end; live: all live blocks. */
struct pya_scan_phase {
    uint32_t text, depth;
    uint64_t step, begin, end, begin_ns, end_ns;
    uint64_t begin_bytes, end_bytes, peak_bytes, peak_reserved_bytes;
    uint64_t n_made, n_left, left_bytes, n_live_begin, n_live_end;
};

struct pya_scan_step {
    uint64_t number, event, time_ns, allocated_bytes, peak_bytes;
};

struct pya_scan_stack {
    uint64_t n_allocs, bytes, n_live, live_bytes; /* in total; alive at the end */
    uint64_t n_temporary, temporary_bytes;
};

/* sizes[i] counts requests of 2^i <= bytes < 2^(i+1); 0 bytes count as 1. */
struct pya_scan_size {
    uint64_t n_allocs, bytes;
};

/* Sums of the blocks without a stack, by phase. */
struct pya_scan_stackless {
    uint32_t phase; /* text; 0: no phase, or one beyond what is kept */
    struct pya_scan_stack sums;
};

struct pya_scan_oom {
    uint64_t event, bytes, free_bytes, allocated_bytes, reserved_bytes;
    uint32_t stack;
    int device;
};

/* phase and module: the innermost ones at allocation.  free_event: PYA_SCAN_NEVER if alive at the end. */
struct pya_scan_block {
    uint64_t addr, bytes, stream, alloc_event, free_event;
    uint64_t thread; /* that allocated it; 0: not recorded */
    uint64_t step;   /* number + 1; 0: before the first */
    uint32_t stack, category, phase, module, free_phase;
    int device;
    uint32_t label;     /* text; 0: the program gave it none */
    uint32_t pool;      /* private pool, from 1; 0: none */
    uint64_t n_between; /* requests on its device from alloc to free; PYA_SCAN_NEVER: alive */
    /* The program freed it at free_event, but it cannot be reused yet: other streams have work on it. */
    bool is_pending;
};

/* One event of the trace; marks of modules are left out.  If it is about a known block, it has the block's bytes, pool and, if
 * the event has no stack, the block's stack; otherwise alloc_event is PYA_SCAN_NEVER. */
struct pya_scan_told {
    uint64_t event, time_ns, addr, bytes, arg, stream, alloc_event;
    uint32_t stack, text, pool;
    int kind, device;
};

struct pya_scan_segment {
    uint64_t addr, bytes, stream;
    int device;
    bool is_mapped; /* pages mapped in a larger range */
    bool is_used;   /* a block was allocated in it */
    uint32_t pool;  /* of the latest such block */
    uint32_t stack; /* of the request it was reserved for; 0: unknown, or pages mapped for many */
    uint32_t phase; /* of that request */
    bool is_known;  /* that request is in the trace, with or without a stack */
};

/* Device memory and the request that it was reserved for.  end: PYA_SCAN_NEVER if it stayed reserved to the end. */
struct pya_scan_growth {
    uint64_t addr, bytes, begin, end;
    uint64_t n_allocs; /* number of earlier requests */
    uint32_t stack;    /* its own, or that of the next request on its device */
    uint32_t phase;    /* of that request */
    int device;
    bool is_mapped; /* as in a segment */
    bool is_asked;  /* that request is in the trace */
    bool is_known;  /* the stack or that request is known */
};

/* At most max_bytes were allocated between this moment and the next row's.  In between, no phase or step begins or ends, and
 * neither does a block that is alive at settings.around. */
struct pya_scan_height {
    uint64_t event, max_bytes;
};

/* Blocks that are alive exactly at the marks first..last and agree in all fields below.  phase, free_phase and category: as in
 * a block; is_freed_later: freed in another occurrence of their phase than the one that allocated them. */
struct pya_scan_stay {
    uint64_t bytes, n_blocks, stream, thread;
    uint32_t stack, phase, free_phase, category, first, last;
    int device;
    bool is_freed_later;
};

/* The id that torch gives the pool. */
struct pya_scan_pool {
    uint64_t first, second;
};

/* A thread's name; if it was named several times, the last one. */
struct pya_scan_thread {
    uint64_t thread;
    uint32_t text;
};

struct pya_scan_moment {
    uint64_t event, allocated_bytes, reserved_bytes;
    struct pya_scan_block *blocks; /* by device and address; includes pending ones */
    size_t n_blocks;
    struct pya_scan_segment *segments; /* by address */
    size_t n_segments;
};

struct pya_scan;

struct pya_scan_totals {
    uint64_t n_events, n_allocs, n_frees, n_unknown_frees;
    uint64_t first_ns, last_ns;
    uint64_t peak_event, peak_bytes, peak_reserved_bytes, reserved_at_peak;
    uint64_t peak_reserved_event; /* reserved at its peak, and the request for it served */
    uint64_t peak_reserved_alloc; /* that request; PYA_SCAN_NEVER: unknown */
    uint64_t end_bytes, end_reserved_bytes, n_live, n_live_at_most;
    uint64_t n_segment_events, n_lost; /* phases, steps and so on beyond what is kept */
    uint32_t peak_phase;               /* as a bin's */
    uint64_t peak_step;
    uint64_t n_record_streams; /* record_stream calls */
    uint64_t n_streams;        /* that allocated; counted up to 64 */
    uint64_t capacity[PYA_MAX_DEVICES];
    uint64_t device_peak[PYA_MAX_DEVICES], device_peak_reserved[PYA_MAX_DEVICES];
    uint64_t device_peak_lasting[PYA_MAX_DEVICES]; /* peak of allocated without temporary blocks */
    bool is_complete;
};

/* If the file could be opened, *out is set on failure too: pya_scan_error() gives the reason.  Destroy it in any case. */
PYA_MUST_CHECK pya_status
pya_scan_run(const char *path, const struct pya_scan_settings *settings, struct pya_scan **out);
const struct pya_scan_totals *pya_scan_totals(const struct pya_scan *scan);
const struct pya_scan_bin *pya_scan_bins(const struct pya_scan *scan, size_t *n);
const struct pya_scan_phase *pya_scan_phases(const struct pya_scan *scan, size_t *n);
const struct pya_scan_step *pya_scan_steps(const struct pya_scan *scan, size_t *n);
/* Indexed by the stack's number. */
const struct pya_scan_stack *pya_scan_stacks(const struct pya_scan *scan, size_t *n);
/* Stack 0 split by phase; the parts add up to it.  The first part is "no phase" and may be empty. */
const struct pya_scan_stackless *pya_scan_stackless(const struct pya_scan *scan, size_t *n);
/* PYA_SCAN_SIZES of them. */
const struct pya_scan_size *pya_scan_sizes(const struct pya_scan *scan);
const struct pya_scan_oom *pya_scan_ooms(const struct pya_scan *scan, size_t *n);
/* Private pools; pool number p is at p - 1. */
const struct pya_scan_pool *pya_scan_pools(const struct pya_scan *scan, size_t *n);
const struct pya_scan_thread *pya_scan_threads(const struct pya_scan *scan, size_t *n);
/* Texts of the notes (USER events). */
const uint32_t *pya_scan_notes(const struct pya_scan *scan, size_t *n);
const struct pya_scan_moment *pya_scan_moments(const struct pya_scan *scan, size_t *n);
/* Blocks alive in the window, ordered by their ends; only the PYA_SCAN_SPANS largest. */
const struct pya_scan_block *pya_scan_spans(const struct pya_scan *scan, size_t *n);
/* Growths of the whole trace, ordered by their ends; only the PYA_SCAN_SPANS largest. */
const struct pya_scan_growth *pya_scan_growths(const struct pya_scan *scan, size_t *n);
/* In no particular order.  Blocks that live only between two marks are in none of them. */
const struct pya_scan_stay *pya_scan_stays(const struct pya_scan *scan, size_t *n);
const struct pya_scan_height *pya_scan_heights(const struct pya_scan *scan, size_t *n);
/* The events of the ranges. */
const struct pya_scan_told *pya_scan_told(const struct pya_scan *scan, size_t *n);
/* The reader, at the end of the file: for looking up texts and frames. */
const struct pya_trace_reader *pya_scan_reader(const struct pya_scan *scan);
const char *pya_scan_error(const struct pya_scan *scan);
void pya_scan_destroy(struct pya_scan *scan);

#ifdef __cplusplus
}
#endif
