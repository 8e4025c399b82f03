/* State of one pass over a trace, shared by the files of the scan.  Floor 2, private.
 * Long because all that the files of the scan share is in one place. */
#pragma once

#include "scan.h"

enum {
    SCAN_DEPTH = 64, /* phases in each other */
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
    uint64_t request; /* its number among those of its device */
    uint32_t copy;    /* the last one, in scan.copies; SCAN_NONE: not copied */
    uint32_t next;    /* free list */
    uint32_t mark;    /* the first that comes after its begin */
    uint32_t piece;   /* of heights, that begins with it */
};

/* After a request: what was allocated, and what of it has turned out to be temporary. */
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
    uint64_t span_bytes, growth_bytes; /* smaller ones are no longer kept */
    uint64_t events_per_bin;
    uint32_t *table; /* index into lives + 1; 0: empty */
    size_t table_size, n_live, n_pending;
    uint32_t *stay_table; /* the same of stays */
    size_t stay_size;
    uint64_t n_completed; /* frees */
    uint32_t free_live;
    uint32_t free_piece, last_piece;
    uint64_t allocated, reserved;
    uint32_t routed[PYA_MAX_DEVICES]; /* where requests go now: a block's pool */
    size_t last_used;                 /* index into segments: where the next block may lie too */
    uint64_t allocated_of[PYA_MAX_DEVICES], reserved_of[PYA_MAX_DEVICES];
    uint64_t n_requests[PYA_MAX_DEVICES];
    /* The latest short_life requests, number r at r % short_life; NULL: none yet. */
    struct scan_point *points[PYA_MAX_DEVICES];
    struct pya_scan_size sizes[PYA_SCAN_SIZES];
    struct scan_open {
        uint32_t text;
        uint32_t kept; /* index into phases; SCAN_NONE: one too many to be kept */
    } open[SCAN_DEPTH];
    size_t n_open;
    uint32_t modules[SCAN_DEPTH];
    size_t n_modules;
    uint64_t step; /* as a bin's */
    bool is_step_kept;
    bool is_asking[PYA_MAX_DEVICES]; /* it grew since the last request */
    int growing;   /* device that most is reserved on, for a request that comes; -1: none */
    bool is_state; /* all so far is of the first event's time */
    struct scan_stream {
        uint64_t stream;
        int device;
    } streams[SCAN_STREAMS]; /* totals.n_streams of them */
    size_t next_moment, next_range, next_mark;
    const char *error;
};

/* One more item, zeroed, before the one at `at`; NULL: no host memory. */
void *scan_list_insert(struct scan_list *list, size_t item_bytes, size_t at);
void scan_list_drop(struct scan_list *list, size_t item_bytes, size_t at);
/* Of items with a size, so far behind their begin, half stay: the larger ones.  From now on none below *least is to be added. */
void scan_list_thin(struct scan_list *list, size_t item_bytes, size_t size_at, uint64_t *least);

#define SCAN_INSERT(list, type, at) ((type *)scan_list_insert(&(list), sizeof(type), at))
#define SCAN_ADD(list, type) SCAN_INSERT(list, type, (list).n)
#define SCAN_ITEM(list, type, i) (&((type *)(list).items)[i])

static inline uint32_t
scan_current_phase(const struct pya_scan *s) {
    return s->n_open == 0 ? 0 : s->open[s->n_open - 1].text;
}

/* The i-th open phase; NULL: it is not kept. */
static inline struct pya_scan_phase *
scan_open_phase(const struct pya_scan *s, size_t i) {
    const uint32_t kept = s->open[i].kept;
    return kept == SCAN_NONE ? NULL : SCAN_ITEM(s->phases, struct pya_scan_phase, kept);
}

/* Does it mark the begin or the end of a module? */
bool scan_is_module(const struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_told.c: before an event is applied; false: no host memory ---- */

bool scan_told_add(struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_live.c: blocks, their stacks, and copies of what is alive.  False: no host memory. ---- */

bool scan_block_begin(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_block_free(struct pya_scan *s, const struct pya_trace_event *e);
/* What was freed may be handed out again. */
void scan_block_complete(struct pya_scan *s, const struct pya_trace_event *e);
/* Category or label of a block. */
void scan_tell(struct pya_scan *s, const struct pya_trace_event *e);
/* The block that the event is about, live or pending; NULL: none is known, or it is about none. */
const struct pya_scan_block *
scan_block_at(const struct pya_scan *s, const struct pya_trace_event *e);
/* Those that are due. */
bool scan_moments_take(struct pya_scan *s);
/* At the end: the copies of what was alive no longer find their blocks.  Of what was pending only that stays whose place
 * nothing else had. */
void scan_moments_sort(struct pya_scan *s);
/* What is still alive at the end becomes spans and stays too. */
bool scan_spans_end(struct pya_scan *s);

/* ---- scan_stays.c: who held memory from one mark to another ---- */

/* It ends, or the trace does.  False: no host memory. */
bool scan_stay_add(struct pya_scan *s, const struct scan_live *live, uint32_t free_phase);

/* ---- scan_heights.c: how high memory stood beside what is alive at settings.around.  False: no host memory. ---- */

/* With the event that is applied a piece begins, from now on the last one. */
bool scan_heights_begin(struct pya_scan *s);
/* A block begins, or ends. */
bool scan_heights_live(struct pya_scan *s, struct scan_live *live);
bool scan_heights_end(struct pya_scan *s, const struct scan_live *live);
/* An event was applied. */
void scan_heights_add(struct pya_scan *s);
/* At the end of the trace. */
bool scan_heights_settle(struct pya_scan *s);

/* ---- scan_timeline.c: bins, after an event was applied.  False: no host memory. ---- */

bool scan_timeline_add(struct pya_scan *s, const struct pya_trace_event *e);

/* ---- scan_temporary.c: what is freed soon ---- */

/* The device's latest request was served, where temporary blocks are looked for.  False: no host memory. */
bool scan_temporary_ask(struct pya_scan *s, int device);
/* A block of so many bytes ends, which is temporary. */
void scan_temporary_end(struct pya_scan *s, const struct scan_live *live, uint64_t bytes);
/* At the end of the trace. */
void scan_temporary_settle(struct pya_scan *s);

/* ---- scan_growth.c: what device memory was taken for ---- */

bool scan_growth_add(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_growth_remove(struct pya_scan *s, const struct pya_trace_event *e);
/* A request: what its device grew by since the last one was for it. */
void scan_growth_ask(struct pya_scan *s, const struct pya_trace_event *e);
/* All so far was there when the trace began. */
void scan_growth_forget(struct pya_scan *s);
/* What is still reserved at the end becomes growths too. */
bool scan_growths_end(struct pya_scan *s);

/* ---- scan_segments.c: device memory ---- */

bool scan_segment_add(struct pya_scan *s, const struct pya_trace_event *e);
bool scan_segment_remove(struct pya_scan *s, const struct pya_trace_event *e);
/* Memory of e was asked for where e->addr lies, of the pool that requests go to: its segment, or what it covers of
 * one of pages, is of that pool from now on. */
bool scan_segment_use(struct pya_scan *s, const struct pya_trace_event *e);
/* All so far was there when the trace began: what is asked for in it later is not what it is for. */
void scan_segments_forget(struct pya_scan *s);
