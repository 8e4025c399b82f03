/* Live and pending blocks.
 *
 * Blocks are in an array with a free list; a hash table with linear probing finds them by address.  A block that was copied
 * for a moment knows its copies, so that its end, category and label can be written to them.  A freed block stays in place
 * as pending until its memory may be reused. */
#include "scan_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_PENDING = 4096 }; /* with more, and no FREE_COMPLETED yet, the trace has none */
enum { MOST_PHASES = 64 }; /* phases by which blocks without a stack are split, "none" included */

static size_t
live_slot(const struct pya_scan *s, uint64_t addr, int device) {
    /* Use the high half: the low half of the product has the zeros of addr's alignment. */
    uint64_t key = (addr + (uint64_t)device) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(key >> 32) & (s->table_size - 1);
}

static size_t
live_find(const struct pya_scan *s, uint64_t addr, int device) {
    size_t at = live_slot(s, addr, device);
    while (s->table[at] != 0) {
        const struct pya_scan_block *row =
            &SCAN_ITEM(s->lives, struct scan_live, s->table[at] - 1)->row;
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
            const struct pya_scan_block *row =
                &SCAN_ITEM(s->lives, struct scan_live, old[i] - 1)->row;
            s->table[live_find(s, row->addr, row->device)] = old[i];
        }
    }
    free(old);
    return true;
}

static struct scan_live *
live_insert(struct pya_scan *s, uint64_t addr, int device) {
    if ((s->n_live + s->n_pending) * 2 >= s->table_size && !table_grow(s)) {
        return NULL;
    }
    uint32_t index = s->free_live;
    if (index != SCAN_NONE) {
        s->free_live = SCAN_ITEM(s->lives, struct scan_live, index)->next;
    } else {
        index = (uint32_t)s->lives.n;
        if (SCAN_ADD(s->lives, struct scan_live) == NULL) {
            return NULL;
        }
    }
    struct scan_live *live = SCAN_ITEM(s->lives, struct scan_live, index);
    *live = (struct scan_live){
        .row =
            {.addr = addr,
             .device = device,
             .free_event = PYA_SCAN_NEVER,
             .n_between = PYA_SCAN_NEVER},
        .copy = SCAN_NONE,
    };
    s->table[live_find(s, addr, device)] = index + 1;
    s->n_live++;
    if (s->n_live > s->totals.n_live_at_most) {
        s->totals.n_live_at_most = s->n_live;
    }
    return live;
}

/* Closes the gap, so that probing needs no tombstones. */
static void
live_remove(struct pya_scan *s, size_t at) {
    const uint32_t index = s->table[at] - 1;
    struct scan_live *live = SCAN_ITEM(s->lives, struct scan_live, index);
    live->next = s->free_live;
    s->free_live = index;
    *(live->row.is_pending ? &s->n_pending : &s->n_live) -= 1;
    const size_t mask = s->table_size - 1;
    s->table[at] = 0;
    for (size_t next = (at + 1) & mask; s->table[next] != 0; next = (next + 1) & mask) {
        const struct pya_scan_block *row =
            &SCAN_ITEM(s->lives, struct scan_live, s->table[next] - 1)->row;
        const size_t home = live_slot(s, row->addr, row->device);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            s->table[at] = s->table[next];
            s->table[next] = 0;
            at = next;
        }
    }
}

/* NULL: no host memory.  Checks *number, so that a damaged one cannot decide how much memory we take. */
static struct pya_scan_stack *
stack_of(struct pya_scan *s, uint32_t *number) {
    struct pya_trace_frame frame;
    if (*number >= s->stacks.n && !pya_trace_frame(s->reader, *number, &frame)) {
        *number = 0;
    }
    const uint32_t stack = *number;
    while (s->stacks.n <= stack) {
        if (SCAN_ADD(s->stacks, struct pya_scan_stack) == NULL) {
            return NULL;
        }
    }
    return SCAN_ITEM(s->stacks, struct pya_scan_stack, stack);
}

/* The entry for blocks without a stack allocated in this phase: its own, or the first one if the phase is beyond what is kept.
 * At least one such block must have been allocated. */
static struct pya_scan_stackless *
stackless_find(const struct pya_scan *s, uint32_t phase) {
    size_t i = s->stackless.n - 1;
    while (i > 0 && SCAN_ITEM(s->stackless, struct pya_scan_stackless, i)->phase != phase) {
        i--;
    }
    return SCAN_ITEM(s->stackless, struct pya_scan_stackless, i);
}

/* The same for a new block, adding an entry if needed.  A linear search will do: names are few.  NULL: no host memory. */
static struct pya_scan_stackless *
stackless_of(struct pya_scan *s, uint32_t phase) {
    if (s->stackless.n == 0 && SCAN_ADD(s->stackless, struct pya_scan_stackless) == NULL) {
        return NULL;
    }
    struct pya_scan_stackless *found = stackless_find(s, phase);
    if (found->phase == phase || s->stackless.n == MOST_PHASES) {
        return found;
    }
    found = SCAN_ADD(s->stackless, struct pya_scan_stackless);
    if (found != NULL) {
        found->phase = phase;
    }
    return found;
}

static void
stack_begin(struct pya_scan_stack *stack, uint64_t bytes) {
    stack->n_allocs++;
    stack->bytes += bytes;
    stack->n_live++;
    stack->live_bytes += bytes;
}

static void
size_note(struct pya_scan *s, uint64_t asked, uint64_t bytes) {
    struct pya_scan_size *size = &s->sizes[63 - __builtin_clzll(asked | 1)];
    size->n_allocs++;
    size->bytes += bytes;
}

static void
stack_end(struct pya_scan_stack *stack, uint64_t bytes, bool is_temporary) {
    stack->n_live--;
    stack->live_bytes -= bytes;
    stack->n_temporary += is_temporary;
    stack->temporary_bytes += is_temporary ? bytes : 0;
}

static bool
span_add(struct pya_scan *s, const struct pya_scan_block *row, uint64_t end, uint32_t phase) {
    const struct pya_scan_settings *settings = s->settings;
    if (end <= settings->window_begin || row->alloc_event >= settings->window_end) {
        return true;
    }
    if (s->spans.n == PYA_SCAN_SPANS) {
        scan_list_thin(
            &s->spans, sizeof(struct pya_scan_block), offsetof(struct pya_scan_block, bytes),
            &s->span_bytes);
    }
    if (row->bytes < s->span_bytes) {
        return true;
    }
    struct pya_scan_block *span = SCAN_ADD(s->spans, struct pya_scan_block);
    if (span == NULL) {
        return false;
    }
    *span = *row;
    span->free_event = end;
    span->free_phase = phase;
    return true;
}

bool
scan_spans_end(struct pya_scan *s) {
    for (size_t i = 0; i < s->table_size; i++) {
        const struct scan_live *live =
            s->table[i] == 0 ? NULL : SCAN_ITEM(s->lives, struct scan_live, s->table[i] - 1);
        if (live != NULL && !live->row.is_pending &&
            !(span_add(s, &live->row, PYA_SCAN_NEVER, 0) && scan_stay_add(s, live, 0))) {
            return false;
        }
    }
    return true;
}

/* The block is no longer alive, but stays in place as pending. */
static bool
block_end(struct pya_scan *s, size_t at) {
    struct scan_live *live = SCAN_ITEM(s->lives, struct scan_live, s->table[at] - 1);
    struct pya_scan_block *row = &live->row;
    const uint64_t bytes = pya_round_up(row->bytes, PYA_ALIGN);
    row->n_between = s->n_requests[row->device] - 1 - live->request;
    const bool is_temporary = row->n_between < s->settings->short_life;
    if (is_temporary) {
        scan_temporary_end(s, live, bytes);
    }
    s->allocated -= bytes;
    s->allocated_of[row->device] -= bytes;
    stack_end(SCAN_ITEM(s->stacks, struct pya_scan_stack, row->stack), bytes, is_temporary);
    if (row->stack == 0) {
        stack_end(&stackless_find(s, row->phase)->sums, bytes, is_temporary);
    }
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = scan_open_phase(s, i);
        if (phase != NULL && phase->begin <= row->alloc_event) {
            phase->n_left--;
            phase->left_bytes -= bytes;
        }
    }
    for (uint32_t i = live->copy; i != SCAN_NONE;
         i = SCAN_ITEM(s->copies, struct scan_copy, i)->next) {
        const struct scan_copy *copy = SCAN_ITEM(s->copies, struct scan_copy, i);
        struct pya_scan_block *kept =
            &SCAN_ITEM(s->moments, struct pya_scan_moment, copy->moment)->blocks[copy->index];
        kept->free_event = s->totals.n_events;
        kept->n_between = row->n_between;
        kept->free_phase = scan_current_phase(s);
    }
    const bool is_kept = span_add(s, row, s->totals.n_events, scan_current_phase(s)) &&
                         scan_stay_add(s, live, scan_current_phase(s)) && scan_heights_end(s, live);
    row->free_event = s->totals.n_events;
    row->free_phase = scan_current_phase(s);
    row->is_pending = true;
    s->n_live--;
    s->n_pending++;
    return is_kept;
}

static bool
is_pending_at(const struct pya_scan *s, size_t at) {
    return SCAN_ITEM(s->lives, struct scan_live, s->table[at] - 1)->row.is_pending;
}

const struct pya_scan_block *
scan_block_at(const struct pya_scan *s, const struct pya_trace_event *e) {
    const bool is_of_block = e->kind == PYA_TRACE_FREE || e->kind == PYA_TRACE_FREE_COMPLETED ||
                             e->kind == PYA_TRACE_RECORD_STREAM || e->kind == PYA_TRACE_CATEGORY ||
                             e->kind == PYA_TRACE_LABEL;
    if (!is_of_block || s->table_size == 0) {
        return NULL;
    }
    const size_t at = live_find(s, e->addr, e->device);
    return s->table[at] == 0 ? NULL : &SCAN_ITEM(s->lives, struct scan_live, s->table[at] - 1)->row;
}

bool
scan_block_begin(struct pya_scan *s, const struct pya_trace_event *e) {
    if (s->table_size != 0) {
        size_t at = live_find(s, e->addr, e->device);
        if (s->table[at] != 0 && !is_pending_at(s, at)) {
            s->totals.n_unknown_frees++; /* the trace lacks its free */
            if (!block_end(s, at)) {
                return false;
            }
        }
        if (s->table[at] != 0) {
            live_remove(s, at);
        }
    }
    uint32_t number = e->stack;
    struct pya_scan_stack *stack = stack_of(s, &number);
    struct pya_scan_stackless *stackless =
        number == 0 ? stackless_of(s, scan_current_phase(s)) : NULL;
    const bool is_told = stack != NULL && (number != 0 || stackless != NULL);
    struct scan_live *live = is_told ? live_insert(s, e->addr, e->device) : NULL;
    if (live == NULL) {
        return false;
    }
    const uint64_t bytes = pya_round_up(e->bytes, PYA_ALIGN);
    live->row.bytes = e->bytes;
    live->row.stream = e->stream;
    live->row.thread = e->thread;
    live->row.alloc_event = s->totals.n_events;
    live->row.stack = number;
    live->row.phase = scan_current_phase(s);
    live->row.module = s->n_modules == 0 ? 0 : s->modules[s->n_modules - 1];
    live->row.step = s->step;
    live->row.pool = s->routed[e->device];
    live->mark = (uint32_t)s->next_mark;
    live->request = s->n_requests[e->device]++;
    stack_begin(stack, bytes);
    size_note(s, e->bytes, bytes);
    if (number == 0) {
        stack_begin(&stackless->sums, bytes);
    }
    for (size_t i = 0; i < s->n_open; i++) {
        struct pya_scan_phase *phase = scan_open_phase(s, i);
        if (phase != NULL) {
            phase->n_made++;
            phase->n_left++;
            phase->left_bytes += bytes;
        }
    }
    s->totals.n_allocs++;
    s->allocated += bytes;
    s->allocated_of[e->device] += bytes;
    if (s->allocated_of[e->device] > s->totals.device_peak[e->device]) {
        s->totals.device_peak[e->device] = s->allocated_of[e->device];
    }
    return scan_segment_use(s, e) && scan_heights_live(s, live) &&
           (s->settings->short_life == 0 || scan_temporary_ask(s, e->device));
}

bool
scan_block_free(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t at = s->table_size == 0 ? 0 : live_find(s, e->addr, e->device);
    if (s->table_size == 0 || s->table[at] == 0 || is_pending_at(s, at)) {
        s->totals.n_unknown_frees++;
        return true;
    }
    s->totals.n_frees++;
    if (!block_end(s, at)) {
        return false;
    }
    if (s->n_completed == 0 &&
        s->n_pending > MOST_PENDING) { /* the trace has no FREE_COMPLETED events */
        live_remove(s, at);
    }
    return true;
}

void
scan_block_complete(struct pya_scan *s, const struct pya_trace_event *e) {
    s->n_completed++;
    size_t at = s->table_size == 0 ? 0 : live_find(s, e->addr, e->device);
    if (s->table_size != 0 && s->table[at] != 0 && is_pending_at(s, at)) {
        live_remove(s, at);
    }
}

static void
row_tell(struct pya_scan_block *row, const struct pya_trace_event *e) {
    *(e->kind == PYA_TRACE_LABEL ? &row->label : &row->category) = e->text;
}

void
scan_tell(struct pya_scan *s, const struct pya_trace_event *e) {
    size_t at = s->table_size == 0 ? 0 : live_find(s, e->addr, e->device);
    if (s->table_size == 0 || s->table[at] == 0 || is_pending_at(s, at)) {
        return;
    }
    struct scan_live *live = SCAN_ITEM(s->lives, struct scan_live, s->table[at] - 1);
    row_tell(&live->row, e);
    for (uint32_t i = live->copy; i != SCAN_NONE;
         i = SCAN_ITEM(s->copies, struct scan_copy, i)->next) {
        const struct scan_copy *copy = SCAN_ITEM(s->copies, struct scan_copy, i);
        row_tell(
            &SCAN_ITEM(s->moments, struct pya_scan_moment, copy->moment)->blocks[copy->index], e);
    }
}

/* ---- moments ---- */

static bool
moment_take(struct pya_scan *s) {
    const uint32_t number = (uint32_t)s->moments.n;
    struct pya_scan_moment *moment = SCAN_ADD(s->moments, struct pya_scan_moment);
    if (moment == NULL) {
        return false;
    }
    moment->event = s->totals.n_events;
    moment->allocated_bytes = s->allocated;
    moment->reserved_bytes = s->reserved;
    moment->blocks = malloc((s->n_live + s->n_pending + 1) * sizeof *moment->blocks);
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
        struct scan_live *live = SCAN_ITEM(s->lives, struct scan_live, s->table[i] - 1);
        if (live->row.is_pending && live->row.free_event + 1 >= s->totals.n_events) {
            continue; /* just freed: usually its FREE_COMPLETED is the next event */
        }
        const uint32_t index = (uint32_t)s->copies.n;
        struct scan_copy *copy = SCAN_ADD(s->copies, struct scan_copy);
        if (copy == NULL) {
            return false;
        }
        *copy = (struct scan_copy){number, (uint32_t)moment->n_blocks, live->copy};
        live->copy = index;
        moment->blocks[moment->n_blocks++] = live->row;
    }
    return true;
}

static int
compare_places(const void *a, const void *b) {
    const struct pya_scan_block *x = a;
    const struct pya_scan_block *y = b;
    if (x->device != y->device) {
        return x->device < y->device ? -1 : 1;
    }
    return x->addr < y->addr ? -1 : x->addr > y->addr;
}

/* Drops pending blocks whose completion must be missing: another block, or no device memory, is at their place. */
static void
pending_sift(const struct pya_scan *s, struct pya_scan_moment *moment) {
    const struct pya_scan_segment *g = moment->segments;
    const struct pya_scan_segment *const segments_end = g + moment->n_segments;
    size_t n = 0;
    uint64_t end = 0;
    int device = -1;
    for (size_t i = 0; i < moment->n_blocks; i++) {
        const struct pya_scan_block b = moment->blocks[i];
        const struct pya_scan_block *next =
            i + 1 < moment->n_blocks ? &moment->blocks[i + 1] : NULL;
        const uint64_t own_end = b.addr + pya_round_up(b.bytes, PYA_ALIGN);
        const bool is_covered = (b.device == device && b.addr < end) ||
                                (next != NULL && next->device == b.device && next->addr < own_end);
        while (g < segments_end &&
               (g->device < b.device || (g->device == b.device && g->addr + g->bytes <= b.addr))) {
            g++;
        }
        const bool is_reserved = s->totals.n_segment_events == 0 ||
                                 (g < segments_end && g->device == b.device && g->addr <= b.addr);
        if (b.is_pending && (is_covered || !is_reserved || s->n_completed == 0)) {
            continue;
        }
        moment->blocks[n++] = b;
        end = b.device == device && end > own_end ? end : own_end;
        device = b.device;
    }
    moment->n_blocks = n;
}

void
scan_moments_sort(struct pya_scan *s) {
    for (size_t i = 0; i < s->moments.n; i++) {
        struct pya_scan_moment *moment = SCAN_ITEM(s->moments, struct pya_scan_moment, i);
        qsort(moment->blocks, moment->n_blocks, sizeof *moment->blocks, compare_places);
        pending_sift(s, moment);
    }
}

bool
scan_moments_take(struct pya_scan *s) {
    const struct pya_scan_settings *settings = s->settings;
    while (s->next_mark < settings->n_marks &&
           settings->marks[s->next_mark] <= s->totals.n_events) {
        s->next_mark++;
    }
    while (s->next_moment < settings->n_moments &&
           settings->moments[s->next_moment] <= s->totals.n_events) {
        s->next_moment++;
        if (!moment_take(s)) {
            return false;
        }
    }
    return true;
}
