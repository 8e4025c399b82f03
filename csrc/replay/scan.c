/* Long because one pass owns one state: what an event does to it reads best in one place.
 *
 * Live blocks lie in an array with a free list; a hash table with linear probing finds them by address.  A block that
 * was copied for a moment remembers the copies, so that its end can be written into them. */
#include "scan.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PHASES = 65536, MAX_STEPS = 65536, MAX_NOTES = 4096, MAX_OOMS = 256, MAX_DEPTH = 64 };
#define NONE UINT32_MAX
#define PROGRESS_EVENTS (UINT64_C(1) << 18)

/* A growing array of items of one type. */
struct list {
    void *items;
    size_t n, room;
};

struct live {
    struct pya_scan_block row;
    uint32_t copy; /* the last one, in scan.copies; NONE: not copied */
    uint32_t next; /* free list */
};

struct copy {
    uint32_t moment, index, next;
};

struct pya_scan {
    struct pya_trace_reader *reader;
    const struct pya_scan_settings *settings;
    struct pya_scan_totals totals;
    struct list bins, phases, steps, stacks, ooms, notes, moments, copies, lives, segments;
    uint64_t events_per_bin;
    uint32_t *table; /* index into lives + 1; 0: empty */
    size_t table_size, n_live;
    uint32_t free_live;
    uint64_t allocated, reserved, allocated_of[PYA_MAX_DEVICES];
    uint32_t open[MAX_DEPTH]; /* indices into phases */
    size_t n_open;
    uint32_t modules[MAX_DEPTH];
    size_t n_modules;
    uint32_t step;
    size_t next_moment;
    const char *error;
};

static void *
list_add(struct list *list, size_t item_bytes) {
    if (list->n == list->room) {
        size_t room = list->room * 2 + 64;
        void *items = realloc(list->items, room * item_bytes);
        if (items == NULL) {
            return NULL;
        }
        list->items = items;
        list->room = room;
    }
    void *item = (char *)list->items + list->n++ * item_bytes;
    memset(item, 0, item_bytes);
    return item;
}

#define ADD(list, type) ((type *)list_add(&(list), sizeof(type)))
#define ITEM(list, type, i) (&((type *)(list).items)[i])

/* ---- live blocks ---- */

static size_t
live_slot(const struct pya_scan *s, uint64_t addr, int device) {
    uint64_t key = (addr ^ ((uint64_t)device << 56)) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(key >> 20) & (s->table_size - 1);
}

static size_t
live_find(const struct pya_scan *s, uint64_t addr, int device) {
    size_t at = live_slot(s, addr, device);
    while (s->table[at] != 0) {
        const struct pya_scan_block *row = &ITEM(s->lives, struct live, s->table[at] - 1)->row;
        if (row->addr == addr && row->device == device) {
            break;
        }
        at = (at + 1) & (s->table_size - 1);
    }
    return at;
}

static bool
table_grow(struct pya_scan *s) {
    size_t old_size = s->table_size;
    uint32_t *old = s->table;
    size_t size = old_size == 0 ? 4096 : old_size * 2;
    uint32_t *table = calloc(size, sizeof *table);
    if (table == NULL) {
        return false;
    }
    s->table = table;
    s->table_size = size;
    for (size_t i = 0; i < old_size; i++) {
        if (old[i] != 0) {
            const struct pya_scan_block *row = &ITEM(s->lives, struct live, old[i] - 1)->row;
            s->table[live_find(s, row->addr, row->device)] = old[i];
        }
    }
    free(old);
    return true;
}

static struct live *
live_insert(struct pya_scan *s, uint64_t addr, int device) {
    if (s->n_live * 2 >= s->table_size && !table_grow(s)) {
        return NULL;
    }
    uint32_t index = s->free_live;
    if (index != NONE) {
        s->free_live = ITEM(s->lives, struct live, index)->next;
    } else {
        index = (uint32_t)s->lives.n;
        if (ADD(s->lives, struct live) == NULL) {
            return NULL;
        }
    }
    struct live *live = ITEM(s->lives, struct live, index);
    *live = (struct live){
        .row = {.addr = addr, .device = device, .free_event = PYA_SCAN_NEVER},
        .copy = NONE,
    };
    s->table[live_find(s, addr, device)] = index + 1;
    s->n_live++;
    return live;
}

/* Closes the gap so that probing needs no marks of deleted entries. */
static void
live_remove(struct pya_scan *s, size_t at) {
    const uint32_t index = s->table[at] - 1;
    ITEM(s->lives, struct live, index)->next = s->free_live;
    s->free_live = index;
    s->n_live--;
    const size_t mask = s->table_size - 1;
    s->table[at] = 0;
    for (size_t next = (at + 1) & mask; s->table[next] != 0; next = (next + 1) & mask) {
        const struct pya_scan_block *row = &ITEM(s->lives, struct live, s->table[next] - 1)->row;
        const size_t home = live_slot(s, row->addr, row->device);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            s->table[at] = s->table[next];
            s->table[next] = 0;
            at = next;
        }
    }
}

static uint32_t
current_phase(const struct pya_scan *s) {
    return s->n_open == 0 ? 0
                          : ITEM(s->phases, struct pya_scan_phase, s->open[s->n_open - 1])->text;
}

/* NULL: no host memory.  A damaged number must not decide how much memory is taken. */
static struct pya_scan_stack *
stack_of(struct pya_scan *s, uint32_t *number) {
    struct pya_trace_frame frame;
    if (*number >= s->stacks.n && !pya_trace_frame(s->reader, *number, &frame)) {
        *number = 0;
    }
    const uint32_t stack = *number;
    while (s->stacks.n <= stack) {
        if (ADD(s->stacks, struct pya_scan_stack) == NULL) {
            return NULL;
        }
    }
    return ITEM(s->stacks, struct pya_scan_stack, stack);
}

static void
block_end(struct pya_scan *s, size_t at) {
    const struct live *live = ITEM(s->lives, struct live, s->table[at] - 1);
    const struct pya_scan_block *row = &live->row;
    const uint64_t bytes = pya_round_up(row->bytes, PYA_ALIGN);
    s->allocated -= bytes;
    s->allocated_of[row->device] -= bytes;
    struct pya_scan_stack *stack = ITEM(s->stacks, struct pya_scan_stack, row->stack);
    stack->n_live--;
    stack->live_bytes -= bytes;
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = ITEM(s->phases, struct pya_scan_phase, s->open[i]);
        if (phase->begin <= row->alloc_event) {
            phase->n_left--;
            phase->left_bytes -= bytes;
        }
    }
    for (uint32_t i = live->copy; i != NONE; i = ITEM(s->copies, struct copy, i)->next) {
        const struct copy *copy = ITEM(s->copies, struct copy, i);
        struct pya_scan_block *kept =
            &ITEM(s->moments, struct pya_scan_moment, copy->moment)->blocks[copy->index];
        kept->free_event = s->totals.n_events;
        kept->free_phase = current_phase(s);
    }
    live_remove(s, at);
}

static bool
block_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->table_size != 0) {
        size_t at = live_find(s, e->addr, e->device);
        if (s->table[at] != 0) {
            s->totals.n_unknown_frees++; /* its free is missing */
            block_end(s, at);
        }
    }
    uint32_t number = e->stack;
    struct pya_scan_stack *stack = stack_of(s, &number);
    struct live *live = stack == NULL ? NULL : live_insert(s, e->addr, e->device);
    if (live == NULL) {
        return false;
    }
    const uint64_t bytes = pya_round_up(e->bytes, PYA_ALIGN);
    live->row.bytes = e->bytes;
    live->row.stream = e->stream;
    live->row.alloc_event = s->totals.n_events;
    live->row.alloc_ns = e->time_ns;
    live->row.stack = number;
    live->row.phase = current_phase(s);
    live->row.module = s->n_modules == 0 ? 0 : s->modules[s->n_modules - 1];
    live->row.step = s->step;
    stack->n_allocs++;
    stack->bytes += bytes;
    stack->n_live++;
    stack->live_bytes += bytes;
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = ITEM(s->phases, struct pya_scan_phase, s->open[i]);
        phase->n_made++;
        phase->n_left++;
        phase->left_bytes += bytes;
    }
    s->totals.n_allocs++;
    s->allocated += bytes;
    s->allocated_of[e->device] += bytes;
    if (s->allocated_of[e->device] > s->totals.device_peak[e->device]) {
        s->totals.device_peak[e->device] = s->allocated_of[e->device];
    }
    return true;
}

static void
block_free(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t at = s->table_size == 0 ? 0 : live_find(s, e->addr, e->device);
    if (s->table_size == 0 || s->table[at] == 0) {
        s->totals.n_unknown_frees++;
        return;
    }
    s->totals.n_frees++;
    block_end(s, at);
}

/* ---- device memory ---- */

/* First segment that ends after addr. */
static size_t
segment_search(const struct pya_scan *s, uint64_t addr, int device) {
    size_t low = 0;
    size_t high = s->segments.n;
    while (low < high) {
        size_t mid = (low + high) / 2;
        const struct pya_scan_segment *g = ITEM(s->segments, struct pya_scan_segment, mid);
        if (g->device < device || (g->device == device && g->addr + g->bytes <= addr)) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

static bool
segment_insert(struct pya_scan *s, size_t at, struct pya_scan_segment segment) {
    if (ADD(s->segments, struct pya_scan_segment) == NULL) {
        return false;
    }
    struct pya_scan_segment *item = ITEM(s->segments, struct pya_scan_segment, at);
    memmove(item + 1, item, (s->segments.n - 1 - at) * sizeof *item);
    *item = segment;
    return true;
}

/* Is the segment at `at` mapped and does it begin where the range ends? */
static bool
segment_follows(const struct pya_scan *s, size_t at, uint64_t end, int device) {
    if (at >= s->segments.n) {
        return false;
    }
    const struct pya_scan_segment *g = ITEM(s->segments, struct pya_scan_segment, at);
    return g->is_mapped && g->device == device && g->addr == end;
}

/* Mapped neighbours become one. */
static bool
segment_add(struct pya_scan *s, const struct pya_trace_event *e) {
    s->reserved += e->bytes;
    const size_t at = segment_search(s, e->addr, e->device);
    struct pya_scan_segment segment = {
        .addr = e->addr,
        .bytes = e->bytes,
        .stream = e->stream,
        .device = e->device,
        .is_mapped = e->kind == PYA_TRACE_SEGMENT_MAP,
    };
    if (!segment.is_mapped) {
        return segment_insert(s, at, segment);
    }
    if (s->segments.n == 0) {
        return segment_insert(s, at, segment);
    }
    struct pya_scan_segment *next = ITEM(s->segments, struct pya_scan_segment, at);
    const bool joins_next = segment_follows(s, at, e->addr + e->bytes, e->device);
    if (joins_next) {
        next->addr = e->addr;
        next->bytes += e->bytes;
        segment = *next;
    }
    struct pya_scan_segment *before = at > 0 ? next - 1 : NULL;
    if (before != NULL && before->is_mapped && before->device == e->device &&
        before->addr + before->bytes == e->addr) {
        before->bytes += segment.bytes;
        if (joins_next) {
            memmove(next, next + 1, (s->segments.n - at - 1) * sizeof *next);
            s->segments.n--;
        }
        return true;
    }
    return joins_next || segment_insert(s, at, segment);
}

/* What of the range is known is taken out; what is not was there before the trace began. */
static bool
segment_remove(struct pya_scan *s, const struct pya_trace_event *e) {
    const uint64_t end = e->addr + e->bytes;
    size_t at = segment_search(s, e->addr, e->device);
    while (at < s->segments.n) {
        struct pya_scan_segment *g = ITEM(s->segments, struct pya_scan_segment, at);
        if (g->device != e->device || g->addr >= end) {
            break;
        }
        const struct pya_scan_segment old = *g;
        const uint64_t from = old.addr > e->addr ? old.addr : e->addr;
        const uint64_t to = old.addr + old.bytes < end ? old.addr + old.bytes : end;
        s->reserved -= to - from;
        if (from > old.addr) {
            g->bytes = from - old.addr;
            at++;
            if (to < old.addr + old.bytes) {
                struct pya_scan_segment rest = old;
                rest.addr = to;
                rest.bytes = old.addr + old.bytes - to;
                return segment_insert(s, at, rest);
            }
        } else if (to < old.addr + old.bytes) {
            g->addr = to;
            g->bytes = old.addr + old.bytes - to;
            break;
        } else {
            memmove(g, g + 1, (s->segments.n - at - 1) * sizeof *g);
            s->segments.n--;
        }
    }
    return true;
}

/* ---- marks ---- */

static bool
is_module(const struct pya_scan *s, uint32_t text) {
    const char *name = pya_trace_text(s->reader, text);
    return name != NULL && strncmp(name, PYA_SCAN_MODULE, sizeof PYA_SCAN_MODULE - 1) == 0;
}

static bool
phase_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    if (is_module(s, e->text)) {
        if (s->n_modules < MAX_DEPTH) {
            s->modules[s->n_modules++] = e->text;
        }
        return true;
    }
    if (s->n_open == MAX_DEPTH || s->phases.n == MAX_PHASES) {
        s->totals.n_lost++;
        return true;
    }
    s->open[s->n_open] = (uint32_t)s->phases.n;
    struct pya_scan_phase *phase = ADD(s->phases, struct pya_scan_phase);
    if (phase == NULL) {
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
        .peak_bytes = s->allocated,
        .peak_reserved_bytes = s->reserved,
    };
    return true;
}

static void
phase_close(struct pya_scan *s, uint64_t time_ns) {
    struct pya_scan_phase *phase = ITEM(s->phases, struct pya_scan_phase, s->open[--s->n_open]);
    phase->end = s->totals.n_events;
    phase->end_ns = time_ns;
    phase->end_bytes = s->allocated;
}

/* Phases inside the one that ends end with it: an exception may have left them open. */
static void
phase_end(struct pya_scan *s, const struct pya_trace_event *e) {
    if (is_module(s, e->text)) {
        size_t i = s->n_modules;
        while (i > 0 && s->modules[i - 1] != e->text) {
            i--;
        }
        s->n_modules = i > 0 ? i - 1 : s->n_modules;
        return;
    }
    size_t i = s->n_open;
    while (i > 0 && ITEM(s->phases, struct pya_scan_phase, s->open[i - 1])->text != e->text) {
        i--;
    }
    while (i > 0 && s->n_open >= i) {
        phase_close(s, e->time_ns);
    }
}

static bool
step_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    s->step = (uint32_t)e->arg + 1;
    if (s->steps.n == MAX_STEPS) {
        s->totals.n_lost++;
        return true;
    }
    struct pya_scan_step *step = ADD(s->steps, struct pya_scan_step);
    if (step == NULL) {
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
    struct pya_scan_oom *oom = ADD(s->ooms, struct pya_scan_oom);
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
    if (s->notes.n == MAX_NOTES) {
        s->totals.n_lost++;
        return true;
    }
    uint32_t *note = ADD(s->notes, uint32_t);
    if (note == NULL) {
        return false;
    }
    *note = e->text;
    return true;
}

static void
categorise(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t at = s->table_size == 0 ? 0 : live_find(s, e->addr, e->device);
    if (s->table_size == 0 || s->table[at] == 0) {
        return;
    }
    struct live *live = ITEM(s->lives, struct live, s->table[at] - 1);
    live->row.category = e->text;
    for (uint32_t i = live->copy; i != NONE; i = ITEM(s->copies, struct copy, i)->next) {
        const struct copy *copy = ITEM(s->copies, struct copy, i);
        ITEM(s->moments, struct pya_scan_moment, copy->moment)->blocks[copy->index].category =
            e->text;
    }
}

/* ---- moments ---- */

static bool
moment_take(struct pya_scan *s) {
    const uint32_t number = (uint32_t)s->moments.n;
    struct pya_scan_moment *moment = ADD(s->moments, struct pya_scan_moment);
    if (moment == NULL) {
        return false;
    }
    moment->event = s->totals.n_events;
    moment->allocated_bytes = s->allocated;
    moment->reserved_bytes = s->reserved;
    moment->blocks = malloc((s->n_live + 1) * sizeof *moment->blocks);
    moment->segments = malloc((s->segments.n + 1) * sizeof *moment->segments);
    if (moment->blocks == NULL || moment->segments == NULL) {
        return false;
    }
    if (s->segments.n > 0) {
        memcpy(moment->segments, s->segments.items, s->segments.n * sizeof *moment->segments);
    }
    moment->n_segments = s->segments.n;
    for (size_t i = 0; i < s->table_size; i++) {
        if (s->table[i] == 0) {
            continue;
        }
        struct live *live = ITEM(s->lives, struct live, s->table[i] - 1);
        const uint32_t index = (uint32_t)s->copies.n;
        struct copy *copy = ADD(s->copies, struct copy);
        if (copy == NULL) {
            return false;
        }
        *copy = (struct copy){number, (uint32_t)moment->n_blocks, live->copy};
        live->copy = index;
        moment->blocks[moment->n_blocks++] = live->row;
    }
    return true;
}

static bool
moments_take(struct pya_scan *s) {
    const struct pya_scan_settings *settings = s->settings;
    while (s->next_moment < settings->n_moments &&
           settings->moments[s->next_moment] <= s->totals.n_events) {
        s->next_moment++;
        if (!moment_take(s)) {
            return false;
        }
    }
    return true;
}

/* ---- the timeline ---- */

static void
bins_halve(struct pya_scan *s) {
    struct pya_scan_bin *bins = s->bins.items;
    size_t n = s->bins.n / 2;
    for (size_t i = 0; i < n; i++) {
        struct pya_scan_bin a = bins[2 * i];
        const struct pya_scan_bin *b = &bins[2 * i + 1];
        a.max_bytes = a.max_bytes > b->max_bytes ? a.max_bytes : b->max_bytes;
        a.min_bytes = a.min_bytes < b->min_bytes ? a.min_bytes : b->min_bytes;
        a.reserved_bytes =
            a.reserved_bytes > b->reserved_bytes ? a.reserved_bytes : b->reserved_bytes;
        a.last_bytes = b->last_bytes;
        bins[i] = a;
    }
    s->bins.n = n;
    s->events_per_bin *= 2;
}

static bool
timeline_add(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->totals.n_events % s->events_per_bin == 0) {
        if (s->bins.n == 2 * s->settings->n_bins) {
            bins_halve(s);
        }
        if (s->totals.n_events % s->events_per_bin == 0) {
            struct pya_scan_bin *bin = ADD(s->bins, struct pya_scan_bin);
            if (bin == NULL) {
                return false;
            }
            *bin = (struct pya_scan_bin){
                .event = s->totals.n_events,
                .time_ns = e->time_ns,
                .min_bytes = s->allocated,
                .phase = current_phase(s),
                .step = s->step,
            };
        }
    }
    struct pya_scan_bin *bin = ITEM(s->bins, struct pya_scan_bin, s->bins.n - 1);
    bin->max_bytes = bin->max_bytes > s->allocated ? bin->max_bytes : s->allocated;
    bin->min_bytes = bin->min_bytes < s->allocated ? bin->min_bytes : s->allocated;
    bin->reserved_bytes = bin->reserved_bytes > s->reserved ? bin->reserved_bytes : s->reserved;
    bin->last_bytes = s->allocated;
    return true;
}

static void
peaks_update(struct pya_scan *s) {
    if (s->allocated > s->totals.peak_bytes) {
        s->totals.peak_bytes = s->allocated;
        s->totals.peak_event = s->totals.n_events + 1;
        s->totals.reserved_at_peak = s->reserved;
    }
    if (s->reserved > s->totals.peak_reserved_bytes) {
        s->totals.peak_reserved_bytes = s->reserved;
    }
    if (s->steps.n > 0) {
        struct pya_scan_step *step = ITEM(s->steps, struct pya_scan_step, s->steps.n - 1);
        step->peak_bytes = step->peak_bytes > s->allocated ? step->peak_bytes : s->allocated;
    }
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = ITEM(s->phases, struct pya_scan_phase, s->open[i]);
        phase->peak_bytes = phase->peak_bytes > s->allocated ? phase->peak_bytes : s->allocated;
        phase->peak_reserved_bytes =
            phase->peak_reserved_bytes > s->reserved ? phase->peak_reserved_bytes : s->reserved;
    }
}

/* ---- the pass ---- */

static bool
scan_apply(struct pya_scan *s, const struct pya_trace_event *e) {
    switch (e->kind) {
    case PYA_TRACE_ALLOC:
        return block_begin(s, e);
    case PYA_TRACE_FREE:
        block_free(s, e);
        return true;
    case PYA_TRACE_SEGMENT_ALLOC:
    case PYA_TRACE_SEGMENT_MAP:
        s->totals.n_segment_events++;
        return segment_add(s, e);
    case PYA_TRACE_SEGMENT_FREE:
    case PYA_TRACE_SEGMENT_UNMAP:
        s->totals.n_segment_events++;
        return segment_remove(s, e);
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
        phase_end(s, e);
        return true;
    case PYA_TRACE_CATEGORY:
        categorise(s, e);
        return true;
    case PYA_TRACE_USER:
        return note_add(s, e);
    default:
        return true;
    }
}

static bool
is_mark(int kind) {
    return kind == PYA_TRACE_STEP || kind == PYA_TRACE_PHASE_BEGIN || kind == PYA_TRACE_PHASE_END ||
           kind == PYA_TRACE_USER;
}

static pya_status
scan_event(struct pya_scan *s, const struct pya_trace_event *e) {
    const struct pya_scan_settings *settings = s->settings;
    if (e->device < 0 || e->device >= PYA_MAX_DEVICES) {
        s->error = "an event of a device beyond 63";
        return PYA_E_CORRUPT;
    }
    const bool is_wanted =
        settings->device < 0 || settings->device == e->device || is_mark(e->kind);
    if (!moments_take(s) || (is_wanted && !scan_apply(s, e)) || !timeline_add(s, e)) {
        return PYA_E_HOST_NOMEM;
    }
    peaks_update(s);
    s->totals.first_ns = s->totals.n_events == 0 ? e->time_ns : s->totals.first_ns;
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
    return moments_take(s) ? PYA_OK : PYA_E_HOST_NOMEM;
}

pya_status
pya_scan_run(const char *path, const struct pya_scan_settings *settings, struct pya_scan **out) {
    *out = NULL;
    if (settings->n_bins < 2) {
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
    s->free_live = NONE;
    status = scan_all(s);
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
GETTER(ooms, struct pya_scan_oom)
GETTER(notes, uint32_t)
GETTER(moments, struct pya_scan_moment)

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
        struct pya_scan_moment *moment = ITEM(scan->moments, struct pya_scan_moment, i);
        free(moment->blocks);
        free(moment->segments);
    }
    const struct list *lists[] = {&scan->bins,  &scan->phases,  &scan->steps,   &scan->stacks,
                                  &scan->ooms,  &scan->notes,   &scan->moments, &scan->copies,
                                  &scan->lives, &scan->segments};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        free(lists[i]->items);
    }
    free(scan->table);
    pya_trace_reader_destroy(scan->reader);
    free(scan);
}
