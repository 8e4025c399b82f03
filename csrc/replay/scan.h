/* One pass over a trace file in bounded memory: totals, a timeline in bins, phases, steps, stacks, and what was alive at
 * chosen moments, or by whom memory was held from one mark to another.  Floor 2.
 *
 * allocated = requests rounded to 512 and not yet given back; reserved = device memory taken and not yet returned, as
 * far as the trace tells.  A moment is the number of events applied.
 * Long because all rows that a pass gives are described in one place. */
#pragma once

#include "trace.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_SCAN_NEVER UINT64_MAX
#define PYA_SCAN_SPANS 8192
#define PYA_SCAN_SIZES 64
#define PYA_SCAN_SHORTEST 4097 /* short_life at most */
/* Phases of this prefix are modules: kept apart from the others. */
#define PYA_SCAN_MODULE "module:"

struct pya_scan_range {
    uint64_t begin, end;
};

struct pya_scan_settings {
    int device;              /* -1: all of them, summed */
    size_t n_bins;           /* at least 2; between this many and twice as many come back */
    const uint64_t *moments; /* ascending */
    size_t n_moments;
    /* Not (0, 0): bins only of these events, and the largest blocks alive among them as spans. */
    uint64_t window_begin, window_end;
    /* Ascending; moments of which only sums are kept (stays), so there may be more of them. */
    const uint64_t *marks;
    size_t n_marks;
    uint64_t around;                     /* a moment, of which heights are kept; 0: of none */
    const struct pya_scan_range *ranges; /* ascending: of events to be told one by one */
    size_t n_ranges;
    /* A block is temporary that is freed before so many further requests of its device are made; 0: none is. */
    size_t short_life;
    /* Called now and then; false stops (PYA_E_BUSY).  May be NULL. */
    bool (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all);
    void *progress_arg;
};

/* max, min, last: of allocated within the bin; max_event: the moment of most. */
struct pya_scan_bin {
    uint64_t event, time_ns; /* of its first event */
    uint64_t max_bytes, min_bytes, last_bytes, reserved_bytes, max_event;
    uint32_t phase; /* text; 0: none */
    uint64_t step;  /* number + 1; 0: before the first */
};

/* Of a phase that is no module.  made and left: blocks asked for within it, and alive at its end; live: of all. */
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
    uint64_t n_allocs, bytes, n_live, live_bytes; /* in all; alive at the end */
    uint64_t n_temporary, temporary_bytes;
};

/* Requests of so many bytes: of sizes[i] at least 2^i, and less than twice as many; 0 bytes count as 1. */
struct pya_scan_size {
    uint64_t n_allocs, bytes;
};

/* Of what has no stack: by phase. */
struct pya_scan_stackless {
    uint32_t phase; /* text; 0: none, or one of those that are too many */
    struct pya_scan_stack sums;
};

struct pya_scan_oom {
    uint64_t event, bytes, free_bytes, allocated_bytes, reserved_bytes;
    uint32_t stack;
    int device;
};

/* phase and module: innermost ones when it was asked for.  free_event: PYA_SCAN_NEVER if alive at the end. */
struct pya_scan_block {
    uint64_t addr, bytes, stream, alloc_event, alloc_ns, free_event;
    uint64_t thread; /* that asked for it; 0: not recorded */
    uint64_t step;   /* as a bin's */
    uint32_t stack, category, phase, module, free_phase;
    int device;
    uint32_t label; /* text; 0: the program gave it none */
    uint32_t pool;  /* private pool, from 1; 0: none */
    uint64_t
        n_between; /* requests of its device between its own and its free; PYA_SCAN_NEVER as there */
    /* Freed by the program, at free_event, and not to be handed out yet: other streams have work on it. */
    bool is_pending;
};

/* One event of the trace, but for the marks of modules.  Of a block: with its bytes, its pool and, where the event has
 * none of its own, its stack; alloc_event is PYA_SCAN_NEVER for all others and where the block is not known. */
struct pya_scan_told {
    uint64_t event, time_ns, addr, bytes, arg, stream, alloc_event;
    uint32_t stack, text, pool;
    int kind, device;
};

struct pya_scan_segment {
    uint64_t addr, bytes, stream;
    int device;
    bool is_mapped; /* by pages, of a larger range */
    bool is_used;   /* a block was asked for in it */
    uint32_t pool;  /* of the last one that was; as a block's */
    uint32_t stack; /* whose request it was taken for; 0: not known, or mapped by pages for many */
    uint32_t phase; /* of that request */
    bool is_known;  /* that request came: without a stack too */
};

/* Device memory and the request that it was taken for.  end: PYA_SCAN_NEVER if it was reserved to the end. */
struct pya_scan_growth {
    uint64_t addr, bytes, begin, end;
    uint64_t n_allocs; /* that came before */
    uint32_t stack;    /* its own, or the next request's on its device */
    uint32_t phase;    /* of that request */
    int device;
    bool is_mapped; /* as a segment's */
    bool is_asked;  /* that request came */
    bool is_known;  /* its stack or that request is */
};

/* From this moment to the next one's so much was allocated at most.  No phase or step begins or ends between the two, nor
 * does a block that is alive at the moment which is asked about. */
struct pya_scan_height {
    uint64_t event, max_bytes;
};

/* Blocks that are alive at marks first to last and at no other, and have all this in common.  phase, free_phase and
 * category: as a block's; is_freed_later: in another occurrence of their phase than the one they were made in. */
struct pya_scan_stay {
    uint64_t bytes, n_blocks, stream, thread;
    uint32_t stack, phase, free_phase, category, first, last;
    int device;
    bool is_freed_later;
};

/* As torch numbers it. */
struct pya_scan_pool {
    uint64_t first, second;
};

/* A thread's name; of several the last one counts. */
struct pya_scan_thread {
    uint64_t thread;
    uint32_t text;
};

struct pya_scan_moment {
    uint64_t event, allocated_bytes, reserved_bytes;
    struct pya_scan_block *blocks; /* by device and address; those pending too */
    size_t n_blocks;
    struct pya_scan_segment *segments; /* by address */
    size_t n_segments;
};

struct pya_scan;

struct pya_scan_totals {
    uint64_t n_events, n_allocs, n_frees, n_unknown_frees;
    uint64_t first_ns, last_ns;
    uint64_t peak_event, peak_bytes, peak_reserved_bytes, reserved_at_peak;
    uint64_t peak_reserved_event; /* most was reserved, and the request served that it was for */
    uint64_t peak_reserved_alloc; /* that request; PYA_SCAN_NEVER: not known */
    uint64_t end_bytes, end_reserved_bytes, n_live, n_live_at_most;
    uint64_t n_segment_events, n_lost; /* phases, steps and so on beyond what is kept */
    uint32_t peak_phase;               /* as a bin's */
    uint64_t peak_step;
    uint64_t n_record_streams; /* blocks said to be used on another stream */
    uint64_t n_streams;        /* that were asked for memory; counted up to 64 */
    uint64_t capacity[PYA_MAX_DEVICES];
    uint64_t device_peak[PYA_MAX_DEVICES], device_peak_reserved[PYA_MAX_DEVICES];
    uint64_t device_peak_lasting[PYA_MAX_DEVICES]; /* allocated without what is temporary */
    bool is_complete;
};

/* *out is set on failure too when the file could be opened: pya_scan_error() says why; destroy it. */
PYA_MUST_CHECK pya_status
pya_scan_run(const char *path, const struct pya_scan_settings *settings, struct pya_scan **out);
const struct pya_scan_totals *pya_scan_totals(const struct pya_scan *scan);
const struct pya_scan_bin *pya_scan_bins(const struct pya_scan *scan, size_t *n);
const struct pya_scan_phase *pya_scan_phases(const struct pya_scan *scan, size_t *n);
const struct pya_scan_step *pya_scan_steps(const struct pya_scan *scan, size_t *n);
/* By number of the stack. */
const struct pya_scan_stack *pya_scan_stacks(const struct pya_scan *scan, size_t *n);
/* The same of number 0, in parts that add up to it; the first is that of no phase, and may have no blocks. */
const struct pya_scan_stackless *pya_scan_stackless(const struct pya_scan *scan, size_t *n);
/* PYA_SCAN_SIZES of them. */
const struct pya_scan_size *pya_scan_sizes(const struct pya_scan *scan);
const struct pya_scan_oom *pya_scan_ooms(const struct pya_scan *scan, size_t *n);
/* Private pools by number - 1. */
const struct pya_scan_pool *pya_scan_pools(const struct pya_scan *scan, size_t *n);
const struct pya_scan_thread *pya_scan_threads(const struct pya_scan *scan, size_t *n);
/* Texts of the notes (USER events). */
const uint32_t *pya_scan_notes(const struct pya_scan *scan, size_t *n);
const struct pya_scan_moment *pya_scan_moments(const struct pya_scan *scan, size_t *n);
/* Blocks alive in the window, in the order of their ends; at most PYA_SCAN_SPANS, the smallest are left out. */
const struct pya_scan_block *pya_scan_spans(const struct pya_scan *scan, size_t *n);
/* Of the whole trace, in the order of their ends; at most PYA_SCAN_SPANS, the smallest are left out. */
const struct pya_scan_growth *pya_scan_growths(const struct pya_scan *scan, size_t *n);
/* In no order; what lives between two marks is in none of them. */
const struct pya_scan_stay *pya_scan_stays(const struct pya_scan *scan, size_t *n);
const struct pya_scan_height *pya_scan_heights(const struct pya_scan *scan, size_t *n);
/* The events of the ranges. */
const struct pya_scan_told *pya_scan_told(const struct pya_scan *scan, size_t *n);
/* At the end of the file: for texts and frames. */
const struct pya_trace_reader *pya_scan_reader(const struct pya_scan *scan);
const char *pya_scan_error(const struct pya_scan *scan);
void pya_scan_destroy(struct pya_scan *scan);

#ifdef __cplusplus
}
#endif
