/* Numbers the stacks of the allocator's history for a trace file. */
#include "module_frames.h"

#include "module_stack.h"

#include <stdlib.h>

enum {
    KEPT_FRAMES = 64, /* innermost frames kept of a stack */
    FIRST_SLOTS = 1024,
};

struct pya_frame_slot {
    void *key;
    int place;
    uint32_t parent;
    uint32_t id; /* 0: empty */
};

static size_t
slot_of(const struct pya_frame_table *table, const struct pya_stack_frame *frame, uint32_t parent) {
    uint64_t hash = (uint64_t)(uintptr_t)frame->key * UINT64_C(0x9E3779B97F4A7C15);
    hash = (hash ^ ((uint64_t)(uint32_t)frame->at << 32 | parent)) * UINT64_C(0xD6E8FEB86659FD93);
    size_t at = (size_t)(hash >> 32) & (table->n_slots - 1);
    const struct pya_frame_slot *slots = table->slots;
    while (slots[at].id != 0 && (slots[at].key != frame->key || slots[at].place != frame->at ||
                                 slots[at].parent != parent)) {
        at = (at + 1) & (table->n_slots - 1);
    }
    return at;
}

static bool
slots_grow(struct pya_frame_table *table) {
    if (table->n_used < table->n_slots / 2) {
        return true;
    }
    const struct pya_frame_table old = *table;
    const size_t n = old.n_slots == 0 ? FIRST_SLOTS : old.n_slots * 2;
    struct pya_frame_slot *slots = calloc(n, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    table->slots = slots;
    table->n_slots = n;
    for (size_t i = 0; i < old.n_slots; i++) {
        const struct pya_frame_slot *slot = &old.slots[i];
        if (slot->id != 0) {
            const struct pya_stack_frame frame = {slot->key, slot->place};
            slots[slot_of(table, &frame, slot->parent)] = *slot;
        }
    }
    free(old.slots);
    return true;
}

bool
pya_frames_text(struct pya_trace_writer *trace, PyObject *text, uint32_t *out) {
    Py_ssize_t bytes = 0;
    const char *utf8 = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &bytes);
    PyObject *raw = NULL;
    if (utf8 == NULL) { /* surrogates, as file names may have: use the file system's encoding */
        PyErr_Clear();
        raw = text == NULL ? NULL : PyUnicode_EncodeFSDefault(text);
        utf8 = raw == NULL ? NULL : PyBytes_AsString(raw);
        bytes = raw == NULL ? 0 : PyBytes_Size(raw);
    }
    if (utf8 == NULL) {
        PyErr_Clear();
        utf8 = "?";
        bytes = 1;
    }
    const bool is_written = pya_trace_string(trace, utf8, (size_t)bytes, out) == PYA_OK;
    Py_XDECREF(raw);
    return is_written;
}

/* Defines a new frame and returns its number; 0 with an exception set or if the trace cannot be written. */
static uint32_t
frame_define(
    struct pya_frame_table *table, struct pya_trace_writer *trace,
    const struct pya_stack_frame *frame, uint32_t parent) {
    struct pya_trace_frame found = {.parent = parent};
    uint32_t id = 0;
    PyObject *description = pya_stack_describe(frame);
    if (description == NULL ||
        (frame->at != PYA_STACK_NATIVE && PyList_Append(table->codes, frame->key) != 0)) {
        Py_XDECREF(description);
        return 0;
    }
    PyObject *line = PyDict_GetItemString(description, "line"); /* borrowed */
    const long number = line == NULL ? 0 : PyLong_AsLong(line);
    found.line = number > 0 ? (uint32_t)number : 0;
    if (!pya_frames_text(trace, PyDict_GetItemString(description, "name"), &found.name) ||
        !pya_frames_text(trace, PyDict_GetItemString(description, "filename"), &found.file) ||
        pya_trace_stack(trace, &found, &id) != PYA_OK) {
        id = 0;
    }
    Py_DECREF(description);
    return id;
}

/* Returns 0 as frame_define() does. */
static uint32_t
frame_number(
    struct pya_frame_table *table, struct pya_trace_writer *trace,
    const struct pya_stack_frame *frame, uint32_t parent) {
    if (!slots_grow(table)) {
        PyErr_NoMemory();
        return 0;
    }
    size_t at = slot_of(table, frame, parent);
    if (table->slots[at].id == 0) {
        const uint32_t id = frame_define(table, trace, frame, parent);
        if (id == 0) {
            return 0;
        }
        table->slots[at] = (struct pya_frame_slot){frame->key, frame->at, parent, id};
        table->n_used++;
    }
    return table->slots[at].id;
}

bool
pya_frames_number(
    struct pya_frame_table *table, struct pya_trace_writer *trace, void *context, uint32_t *out) {
    struct pya_stack_frame frames[KEPT_FRAMES];
    size_t n = pya_stack_read(context, frames, KEPT_FRAMES);
    uint32_t number = 0;
    while (n > 0) {
        number = frame_number(table, trace, &frames[--n], number);
        if (number == 0) {
            return false;
        }
    }
    *out = number;
    return true;
}

bool
pya_frames_init(struct pya_frame_table *table) {
    *table = (struct pya_frame_table){.codes = PyList_New(0)};
    return table->codes != NULL;
}

void
pya_frames_fini(struct pya_frame_table *table) {
    Py_CLEAR(table->codes);
    free(table->slots);
    table->slots = NULL;
}
