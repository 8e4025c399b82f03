/* State of one pass over a trace, shared by the scan_*.c files.  Floor 2, private.
 * Long because everything that the scan_*.c files share is in one place. */
#pragma once

#include "scan.h"

enum {
    SCAN_DEPTH = 64, /* nesting depth of phases */
    SCAN_STREAMS = 64,
};
#define SCAN_NONE UINT32_MAX

/* A growing array of items of one type. */
struct scan_list {
    void *items;
    size_t n, room;
};

struct scan_live {
    struct pya_scan_block row;
    uint64_t request; /* its number among the requests on its device */
    uint32_t copy;    /* head of its list in scan.copies; SCAN_NONE: not copied */
    uint32_t next;    /* free list */
    uint32_t mark;    /* the first mark after its allocation */
    uint32_t piece;   /* the piece (of heights) that starts with it */
};

/* After a request: the allocated bytes, and how many of them turned out to be temporary. */
struct scan_point {
    uint64_t bytes, temporary;
};

struct scan_copy {
    uint32_t moment, index, next;
};

struct pya_scan {
    struct pya_trace_reader *reader;
    const struct pya_scan_settings *settings;
    struct pya_scan_totals totals;
    struct scan_list bins, phases, steps, stacks, ooms, notes, moments, copies, lives, segments,
        spans, pools, stackless, told, held, growths, threads, stays, pieces, heights;
    uint64_t span_bytes, growth_bytes; /* smaller ones are no longer added */
    uint64_t events_per_bin;
    uint32_t *table; /* hash table: index into lives + 1; 0: empty */
    size_t table_size, n_live, n_pending;
    uint32_t *stay_table; /* the same for stays */
    size_t stay_size;
    uint64_t n_completed; /* frees */
    uint32_t free_live;
    uint32_t free_piece, last_piece;
    uint64_t allocated, reserved;
    uint32_t routed[PYA_MAX_DEVICES]; /* the pool that requests go to now */
    size_t last_used;                 /* index into segments: a guess for the next block */
    uint64_t allocated_of[PYA_MAX_DEVICES], reserved_of[PYA_MAX_DEVICES];
    uint64_t n_requests[PYA_MAX_DEVICES];
    /* Points of the last short_life requests; number r is at r % short_life.  NULL: none yet. */
    struct scan_point *points[PYA_MAX_DEVICES];
    struct pya_scan_size sizes[PYA_SCAN_SIZES];
    struct scan_open {
        uint32_t text;
        uint32_t kept; /* index into phases; SCAN_NONE: beyond what is kept */
    } open[SCAN_DEPTH];
    size_t n_open;
    uint32_t modules[SCAN_DEPTH];
    size_t n_modules;
    uint64_t step; /* number + 1; 0: before the first */
    bool is_step_kept;
    bool is_asking[PYA_MAX_DEVICES]; /* reserved grew since the last request */
    int growing;   /* device at its reserved peak, for a request yet to come; -1: none */
    bool is_state; /* all events so far have the first event's time */
    struct scan_stream {
        uint64_t stream;
        int device;
    } streams[SCAN_STREAMS]; /* totals.n_streams of them */
    size_t next_moment, next_range, next_mark;
    const char *error;
};

/* Inserts a zeroed item at index `at`; NULL: no host memory. */
void *scan_list_insert(struct scan_list *list, size_t item_bytes, size_t at);
void scan_list_drop(struct scan_list *list, size_t item_bytes, size_t at);
/* Drops the smaller half of the items, by the size stored at offset size_at.  Sets *least: add no smaller ones from now on. */
void scan_list_thin(struct scan_list *list, size_t item_bytes, size_t size_at, uint64_t *least);

#define SCAN_INSERT(list, type, at) ((type *)scan_list_insert(&(list), sizeof(type), at))
#define SCAN_ADD(list, type) SCAN_INSERT(list, type, (list).n)
#define SCAN_ITEM(list, type, i) (&((type *)(list).items)[i])

static inline uint32_t
scan_current_phase(const struct pya_scan *s) {
    return s->n_open == 0 ? 0 : s->open[s->n_open - 1].text;
}

/* The i-th open phase; NULL if it is beyond what is kept. */
static inline struct pya_scan_phase *
scan_open_phase(const struct pya_scan *s, size_t i) {
    const uint32_t kept = s->open[i].kept;
    return kept == SCAN_NONE ? NULL : SCAN_ITEM(s->phases, struct pya_scan_phase, kept);
}

/* Does the event mark the begin or the end of a module? */
bool scan_is_module(const struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_told.c: call before the event is applied; false: no host memory ---- */

bool scan_told_add(struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_live.c: blocks, their stacks, and copies of what is alive.  False: no host memory. ---- */

bool scan_block_begin(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_block_free(struct pya_scan *s, const struct pya_trace_event *e);
/* The freed block may be reused from now on. */
void scan_block_complete(struct pya_scan *s, const struct pya_trace_event *e);
/* Sets the category or the label of a block. */
void scan_tell(struct pya_scan *s, const struct pya_trace_event *e);
/* The block that the event is about, live or pending; NULL: unknown, or the event is not about a block. */
const struct pya_scan_block *
scan_block_at(const struct pya_scan *s, const struct pya_trace_event *e);
/* Copies what is alive for the moments that are due. */
bool scan_moments_take(struct pya_scan *s);
/* At the end: sorts the copies, which are then no longer linked to their blocks.  Drops the pending ones whose place another
 * block had. */
void scan_moments_sort(struct pya_scan *s);
/* Adds what is still alive at the end to spans and stays. */
bool scan_spans_end(struct pya_scan *s);

/* ---- scan_stays.c: who held memory from one mark to another ---- */

/* The block ends, or the trace does.  False: no host memory. */
bool scan_stay_add(struct pya_scan *s, const struct scan_live *live, uint32_t free_phase);

/* ---- scan_heights.c: how much was allocated around the blocks alive at settings.around.  False: no host memory. ---- */

/* Starts a new piece, from now on the last one, with the event that is being applied. */
bool scan_heights_begin(struct pya_scan *s);
/* A block begins; a block ends. */
bool scan_heights_live(struct pya_scan *s, struct scan_live *live);
bool scan_heights_end(struct pya_scan *s, const struct scan_live *live);
/* Call it after each applied event. */
void scan_heights_add(struct pya_scan *s);
/* At the end of the trace. */
bool scan_heights_settle(struct pya_scan *s);

/* ---- scan_timeline.c: bins; call after the event was applied.  False: no host memory. ---- */

bool scan_timeline_add(struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_temporary.c: blocks that are freed soon ---- */

/* The device's latest request was served.  Only with short_life.  False: no host memory. */
bool scan_temporary_ask(struct pya_scan *s, int device);
/* A temporary block of this many bytes ends. */
void scan_temporary_end(struct pya_scan *s, const struct scan_live *live, uint64_t bytes);
/* At the end of the trace. */
void scan_temporary_settle(struct pya_scan *s);

/* ---- scan_growth.c: which request device memory was reserved for ---- */

bool scan_growth_add(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_growth_remove(struct pya_scan *s, const struct pya_trace_event *e);
/* A request: what its device reserved since the previous one was for it. */
void scan_growth_ask(struct pya_scan *s, const struct pya_trace_event *e);
/* Everything so far was there when the trace began. */
void scan_growth_forget(struct pya_scan *s);
/* Adds what is still reserved at the end to growths. */
bool scan_growths_end(struct pya_scan *s);

/* ---- scan_segments.c: device memory ---- */

bool scan_segment_add(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_segment_remove(struct pya_scan *s, const struct pya_trace_event *e);
/* A request was served at e->addr: its segment, or the pages it covers of a mapped one, belong from now on to the pool that
 * requests go to. */
bool scan_segment_use(struct pya_scan *s, const struct pya_trace_event *e);
/* Everything so far was there when the trace began: it was not reserved for a later request in it. */
void scan_segments_forget(struct pya_scan *s);
