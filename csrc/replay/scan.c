/* The pass itself: marks, peaks, totals.  scan_live.c and scan_segments.c track blocks and device memory. */
#include "scan_internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_PHASES = 65536,
    MAX_STEPS = 65536,
    MAX_OOMS = 256,
    MAX_POOLS = 4096,
    MAX_THREADS = 65536,
};
#define PROGRESS_EVENTS (UINT64_C(1) << 18)

void *
scan_list_insert(struct scan_list *list, size_t item_bytes, size_t at) {
    if (list->n == list->room) {
        size_t room = list->room * 2 + 64;
        void *items = realloc(list->items, room * item_bytes);
        if (items == NULL) {
            return NULL;
        }
        list->items = items;
        list->room = room;
    }
    char *item = (char *)list->items + at * item_bytes;
    memmove(item + item_bytes, item, (list->n++ - at) * item_bytes);
    return memset(item, 0, item_bytes);
}

void
scan_list_drop(struct scan_list *list, size_t item_bytes, size_t at) {
    char *item = (char *)list->items + at * item_bytes;
    memmove(item, item + item_bytes, (--list->n - at) * item_bytes);
}

static uint64_t
item_size(const char *item, size_t size_at) {
    uint64_t size;
    memcpy(&size, item + size_at, sizeof size);
    return size;
}

static size_t
list_count(const struct scan_list *list, size_t item_bytes, size_t size_at, uint64_t least) {
    const char *items = list->items;
    size_t n = 0;
    for (size_t i = 0; i < list->n; i++) {
        n += item_size(items + i * item_bytes, size_at) >= least;
    }
    return n;
}

/* Raises the threshold by quarters until at most half the items are above it.  Of the sizes at the threshold only the first
 * items stay: a program may have many blocks of one size, and a forged trace more than fit in any memory. */
void
scan_list_thin(struct scan_list *list, size_t item_bytes, size_t size_at, uint64_t *least) {
    const size_t half = list->n / 2;
    char *items = list->items;
    uint64_t next = *least;
    size_t n_larger = list->n;
    while (n_larger > half && next < PYA_REQUEST_MAX) {
        *least = next;
        next = next == 0 ? PYA_ALIGN : next + next / 4;
        n_larger = list_count(list, item_bytes, size_at, next);
    }
    size_t n_between = n_larger < half ? half - n_larger : 0;
    size_t n = 0;
    *least = n_between == 0 ? next : *least;
    for (size_t i = 0; i < list->n && n < half; i++) {
        const uint64_t size = item_size(items + i * item_bytes, size_at);
        const bool is_between = size >= *least && size < next && n_between > 0;
        if (size >= next || is_between) {
            memmove(items + n++ * item_bytes, items + i * item_bytes, item_bytes);
            n_between -= is_between;
        }
    }
    list->n = n;
}

/* ---- marks ---- */

bool
scan_is_module(const struct pya_scan *s, const struct pya_trace_event *e) {
    if (e->kind != PYA_TRACE_PHASE_BEGIN && e->kind != PYA_TRACE_PHASE_END) {
        return false;
    }
    const char *name = pya_trace_text(s->reader, e->text);
    return name != NULL && strncmp(name, PYA_SCAN_MODULE, sizeof PYA_SCAN_MODULE - 1) == 0;
}

static bool
phase_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    if (scan_is_module(s, e)) {
        if (s->n_modules < SCAN_DEPTH) {
            s->modules[s->n_modules++] = e->text;
        }
        return true;
    }
    if (s->n_open == SCAN_DEPTH) {
        s->totals.n_lost++;
        return true;
    }
    s->open[s->n_open] = (struct scan_open){e->text, SCAN_NONE};
    if (s->phases.n == MAX_PHASES) { /* blocks still get this phase's name */
        s->totals.n_lost++;
        s->n_open++;
        return true;
    }
    s->open[s->n_open].kept = (uint32_t)s->phases.n;
    struct pya_scan_phase *phase = SCAN_ADD(s->phases, struct pya_scan_phase);
    if (phase == NULL || !scan_heights_begin(s)) {
        return false;
    }
    *phase = (struct pya_scan_phase){
        .text = e->text,
        .step = s->step,
        .depth = (uint32_t)s->n_open++,
        .begin = s->totals.n_events,
        .end = PYA_SCAN_NEVER,
        .begin_ns = e->time_ns,
        .begin_bytes = s->allocated,
        .n_live_begin = s->n_live,
        .peak_bytes = s->allocated,
        .peak_reserved_bytes = s->reserved,
    };
    return true;
}

static void
phase_close(struct pya_scan *s, uint64_t time_ns) {
    struct pya_scan_phase *phase = scan_open_phase(s, --s->n_open);
    if (phase != NULL) {
        phase->end = s->totals.n_events;
        phase->end_ns = time_ns;
        phase->end_bytes = s->allocated;
        phase->n_live_end = s->n_live;
    }
}

/* Phases nested in the one that ends are closed too: an exception may have left them open. */
static bool
phase_end(struct pya_scan *s, const struct pya_trace_event *e) {
    if (scan_is_module(s, e)) {
        size_t i = s->n_modules;
        while (i > 0 && s->modules[i - 1] != e->text) {
            i--;
        }
        s->n_modules = i > 0 ? i - 1 : s->n_modules;
        return true;
    }
    size_t i = s->n_open;
    while (i > 0 && s->open[i - 1].text != e->text) {
        i--;
    }
    const bool is_kept = i > 0 && scan_open_phase(s, i - 1) != NULL;
    while (i > 0 && s->n_open >= i) {
        phase_close(s, e->time_ns);
    }
    return !is_kept || scan_heights_begin(s);
}

static bool
step_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    s->step = e->arg == UINT64_MAX ? e->arg : e->arg + 1;
    s->is_step_kept = s->steps.n < MAX_STEPS;
    if (!s->is_step_kept) {
        s->totals.n_lost++;
        return true;
    }
    struct pya_scan_step *step = SCAN_ADD(s->steps, struct pya_scan_step);
    if (step == NULL || !scan_heights_begin(s)) {
        return false;
    }
    *step = (struct pya_scan_step){
        .number = e->arg,
        .event = s->totals.n_events,
        .time_ns = e->time_ns,
        .allocated_bytes = s->allocated,
        .peak_bytes = s->allocated,
    };
    return true;
}

static bool
oom_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->ooms.n == MAX_OOMS) {
        s->totals.n_lost++;
        return true;
    }
    struct pya_scan_oom *oom = SCAN_ADD(s->ooms, struct pya_scan_oom);
    if (oom == NULL) {
        return false;
    }
    *oom = (struct pya_scan_oom){
        .event = s->totals.n_events,
        .bytes = e->bytes,
        .free_bytes = e->arg,
        .allocated_bytes = s->allocated,
        .reserved_bytes = s->reserved,
        .stack = e->stack,
        .device = e->device,
    };
    return true;
}

static bool
note_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->notes.n == PYA_TRACE_NOTES) {
        s->totals.n_lost++;
        return true;
    }
    uint32_t *note = SCAN_ADD(s->notes, uint32_t);
    if (note == NULL) {
        return false;
    }
    *note = e->text;
    return true;
}

static bool
thread_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->threads.n == MAX_THREADS) {
        s->totals.n_lost++;
        return true;
    }
    struct pya_scan_thread *thread = SCAN_ADD(s->threads, struct pya_scan_thread);
    if (thread != NULL) {
        *thread = (struct pya_scan_thread){e->arg, e->text};
    }
    return thread != NULL;
}

/* Numbers private pools in order of appearance, from 1. */
static bool
pool_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t i = s->pools.n; /* search from the end: the latest ones are used most */
    while (i > 0 && (SCAN_ITEM(s->pools, struct pya_scan_pool, i - 1)->first != e->addr ||
                     SCAN_ITEM(s->pools, struct pya_scan_pool, i - 1)->second != e->arg)) {
        i--;
    }
    if (i == 0 && s->pools.n == MAX_POOLS) {
        s->totals.n_lost++;
    } else if (i == 0) {
        struct pya_scan_pool *pool = SCAN_ADD(s->pools, struct pya_scan_pool);
        if (pool == NULL) {
            return false;
        }
        *pool = (struct pya_scan_pool){e->addr, e->arg};
        i = s->pools.n;
    }
    s->routed[e->device] = (uint32_t)i;
    return true;
}

/* ---- peaks ---- */

/* A trace starts with the state at that time: all segments, then all blocks, with the first event's time.  That counts as one
 * growth, for no request.  If the whole trace has one time, the state cannot be told from what follows. */
static void
state_end(struct pya_scan *s, const struct pya_trace_event *e) {
    if (!s->is_state || e->time_ns == s->totals.first_ns) {
        return;
    }
    s->is_state = false;
    if (s->totals.n_allocs > 0) {
        scan_growth_forget(s);
        scan_segments_forget(s);
    }
    if (s->totals.n_allocs > 0 && s->reserved == s->totals.peak_reserved_bytes) {
        s->totals.peak_reserved_event = s->totals.n_events;
        s->totals.peak_reserved_alloc = PYA_SCAN_NEVER;
        s->growing = -1;
    }
}

/* The device's next request is the one it grew for, unless some memory was returned in between. */
static void
growth_follow(struct pya_scan *s, const struct pya_trace_event *e) {
    if (e->device != s->growing || (e->kind != PYA_TRACE_ALLOC && e->kind != PYA_TRACE_OOM)) {
        return;
    }
    if (e->kind == PYA_TRACE_ALLOC && s->reserved == s->totals.peak_reserved_bytes) {
        s->totals.peak_reserved_event = s->totals.n_events + 1;
        s->totals.peak_reserved_alloc = s->totals.n_events;
    }
    s->growing = -1;
}

static void
peaks_update(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->allocated > s->totals.peak_bytes) {
        s->totals.peak_bytes = s->allocated;
        s->totals.peak_event = s->totals.n_events + 1;
        s->totals.reserved_at_peak = s->reserved;
        s->totals.peak_phase = scan_current_phase(s);
        s->totals.peak_step = s->step;
    }
    if (s->reserved > s->totals.peak_reserved_bytes) {
        s->totals.peak_reserved_bytes = s->reserved;
        s->growing = e->device;
        s->totals.peak_reserved_event = s->totals.n_events + 1;
        s->totals.peak_reserved_alloc = PYA_SCAN_NEVER;
    }
    growth_follow(s, e);
    if (s->is_step_kept) {
        struct pya_scan_step *step = SCAN_ITEM(s->steps, struct pya_scan_step, s->steps.n - 1);
        step->peak_bytes = step->peak_bytes > s->allocated ? step->peak_bytes : s->allocated;
    }
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = scan_open_phase(s, i);
        if (phase == NULL) {
            continue;
        }
        phase->peak_bytes = phase->peak_bytes > s->allocated ? phase->peak_bytes : s->allocated;
        phase->peak_reserved_bytes =
            phase->peak_reserved_bytes > s->reserved ? phase->peak_reserved_bytes : s->reserved;
    }
}

/* ---- the pass ---- */

static void
stream_note(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t i = 0;
    while (i < s->totals.n_streams &&
           (s->streams[i].stream != e->stream || s->streams[i].device != e->device)) {
        i++;
    }
    if (i == s->totals.n_streams && i < SCAN_STREAMS) {
        s->streams[i] = (struct scan_stream){e->stream, e->device};
        s->totals.n_streams++;
    }
}

static bool
scan_apply(struct pya_scan *s, const struct pya_trace_event *e) {
    switch (e->kind) {
    case PYA_TRACE_ALLOC:
        stream_note(s, e);
        scan_growth_ask(s, e);
        return scan_block_begin(s, e);
    case PYA_TRACE_RECORD_STREAM:
        s->totals.n_record_streams++;
        return true;
    case PYA_TRACE_FREE:
        return scan_block_free(s, e);
    case PYA_TRACE_FREE_COMPLETED:
        scan_block_complete(s, e);
        return true;
    case PYA_TRACE_SEGMENT_ALLOC:
    case PYA_TRACE_SEGMENT_MAP:
        s->totals.n_segment_events++;
        return scan_segment_add(s, e) && scan_growth_add(s, e);
    case PYA_TRACE_SEGMENT_FREE:
    case PYA_TRACE_SEGMENT_UNMAP:
        s->totals.n_segment_events++;
        return scan_segment_remove(s, e) && scan_growth_remove(s, e);
    case PYA_TRACE_SEGMENT_POOL:
        return scan_segment_use(s, e);
    case PYA_TRACE_OOM:
        return oom_add(s, e);
    case PYA_TRACE_DEVICE:
        s->totals.capacity[e->device] = e->bytes;
        return true;
    case PYA_TRACE_STEP:
        return step_begin(s, e);
    case PYA_TRACE_PHASE_BEGIN:
        return phase_begin(s, e);
    case PYA_TRACE_PHASE_END:
        return phase_end(s, e);
    case PYA_TRACE_CATEGORY:
    case PYA_TRACE_LABEL:
        scan_tell(s, e);
        return true;
    case PYA_TRACE_USER:
        return note_add(s, e);
    case PYA_TRACE_THREAD:
        return thread_add(s, e);
    case PYA_TRACE_POOL_BEGIN:
        return pool_begin(s, e);
    case PYA_TRACE_POOL_END:
        s->routed[e->device] = 0;
        return true;
    default:
        return true;
    }
}

/* Is this kind of event about all devices? */
static bool
is_common(int kind) {
    return kind == PYA_TRACE_STEP || kind == PYA_TRACE_PHASE_BEGIN || kind == PYA_TRACE_PHASE_END ||
           kind == PYA_TRACE_USER || kind == PYA_TRACE_THREAD;
}

static pya_status
scan_event(struct pya_scan *s, const struct pya_trace_event *e) {
    const struct pya_scan_settings *settings = s->settings;
    s->totals.first_ns = s->totals.n_events == 0 ? e->time_ns : s->totals.first_ns;
    state_end(s, e);
    const bool is_wanted =
        settings->device < 0 || settings->device == e->device || is_common(e->kind);
    if (!scan_moments_take(s) || (is_wanted && !(scan_told_add(s, e) && scan_apply(s, e))) ||
        !scan_timeline_add(s, e)) {
        return PYA_E_HOST_NOMEM;
    }
    scan_heights_add(s);
    peaks_update(s, e);
    s->totals.last_ns = e->time_ns;
    s->totals.n_events++;
    if (settings->progress != NULL && s->totals.n_events % PROGRESS_EVENTS == 0) {
        uint64_t at = 0;
        uint64_t total = 0;
        pya_trace_position(s->reader, &at, &total);
        if (!settings->progress(settings->progress_arg, at, total)) {
            return PYA_E_BUSY;
        }
    }
    return PYA_OK;
}

static pya_status
scan_all(struct pya_scan *s) {
    bool more = true;
    if (!scan_heights_begin(s)) {
        return PYA_E_HOST_NOMEM;
    }
    for (;;) {
        struct pya_trace_event e;
        pya_status status = pya_trace_next(s->reader, &e, &more);
        if (status != PYA_OK) {
            s->error = pya_trace_error(s->reader);
            return status;
        }
        if (!more) {
            break;
        }
        status = scan_event(s, &e);
        if (status != PYA_OK) {
            return status;
        }
    }
    while (s->n_open > 0) {
        phase_close(s, s->totals.last_ns);
    }
    s->totals.end_bytes = s->allocated;
    s->totals.end_reserved_bytes = s->reserved;
    s->totals.n_live = s->n_live;
    s->totals.is_complete = pya_trace_is_complete(s->reader);
    scan_temporary_settle(s);
    const bool is_kept =
        scan_moments_take(s) && scan_spans_end(s) && scan_growths_end(s) && scan_heights_settle(s);
    return is_kept ? PYA_OK : PYA_E_HOST_NOMEM;
}

pya_status
pya_scan_run(const char *path, const struct pya_scan_settings *settings, struct pya_scan **out) {
    *out = NULL;
    if (settings->n_bins < 2 || settings->short_life > PYA_SCAN_SHORTEST) {
        return PYA_E_INVAL;
    }
    struct pya_scan *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_status status = pya_trace_open(path, &s->reader);
    if (status != PYA_OK) {
        free(s);
        return status;
    }
    s->settings = settings;
    s->events_per_bin = 1;
    s->free_live = s->free_piece = s->last_piece = SCAN_NONE;
    s->totals.peak_reserved_alloc = PYA_SCAN_NEVER;
    s->growing = -1;
    s->is_state = true;
    status = scan_all(s);
    if (status == PYA_OK) {
        scan_moments_sort(s);
    }
    s->settings = NULL;
    *out = s;
    return status;
}

const struct pya_scan_totals *
pya_scan_totals(const struct pya_scan *scan) {
    return &scan->totals;
}

#define GETTER(name, type)                                                                         \
    const type *pya_scan_##name(const struct pya_scan *scan, size_t *n) {                          \
        *n = scan->name.n;                                                                         \
        return scan->name.items;                                                                   \
    }
GETTER(bins, struct pya_scan_bin)
GETTER(phases, struct pya_scan_phase)
GETTER(steps, struct pya_scan_step)
GETTER(stacks, struct pya_scan_stack)
GETTER(stackless, struct pya_scan_stackless)
GETTER(ooms, struct pya_scan_oom)
GETTER(notes, uint32_t)
GETTER(moments, struct pya_scan_moment)
GETTER(spans, struct pya_scan_block)
GETTER(told, struct pya_scan_told)
GETTER(growths, struct pya_scan_growth)
GETTER(pools, struct pya_scan_pool)
GETTER(threads, struct pya_scan_thread)
GETTER(stays, struct pya_scan_stay)
GETTER(heights, struct pya_scan_height)

const struct pya_scan_size *
pya_scan_sizes(const struct pya_scan *scan) {
    return scan->sizes;
}

const struct pya_trace_reader *
pya_scan_reader(const struct pya_scan *scan) {
    return scan->reader;
}

const char *
pya_scan_error(const struct pya_scan *scan) {
    return scan->error == NULL ? "" : scan->error;
}

void
pya_scan_destroy(struct pya_scan *scan) {
    if (scan == NULL) {
        return;
    }
    for (size_t i = 0; i < scan->moments.n; i++) {
        struct pya_scan_moment *moment = SCAN_ITEM(scan->moments, struct pya_scan_moment, i);
        free(moment->blocks);
        free(moment->segments);
    }
    const struct scan_list *lists[] = {
        &scan->bins,    &scan->phases,  &scan->steps,     &scan->stacks, &scan->ooms,
        &scan->notes,   &scan->moments, &scan->copies,    &scan->lives,  &scan->segments,
        &scan->spans,   &scan->pools,   &scan->stackless, &scan->told,   &scan->held,
        &scan->growths, &scan->threads, &scan->stays,     &scan->pieces, &scan->heights};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        free(lists[i]->items);
    }
    for (size_t i = 0; i < PYA_MAX_DEVICES; i++) {
        free(scan->points[i]);
    }
    free(scan->table);
    free(scan->stay_table);
    pya_trace_reader_destroy(scan->reader);
    free(scan);
}
