/* The frames that were already written to a trace file.  Floor 6. */
#pragma once

#include <Python.h>

#include "replay/trace.h"

/* Each frame is numbered once: the table maps (caller's stack, code object or address, place in it) to its number in the
 * trace.  Code objects in the table are kept alive, so that no other object can get their addresses. */
struct pya_frame_table {
    PyObject *codes; /* list: keeps them alive */
    struct pya_frame_slot *slots;
    size_t n_slots; /* power of two, or 0 */
    size_t n_used;  /* <= n_slots / 2 */
};

/* False with an exception set. */
bool pya_frames_init(struct pya_frame_table *table);
void pya_frames_fini(struct pya_frame_table *table);
/* The trace's number for a Python string; "?" for one that UTF-8 cannot encode.  False if the trace cannot be written. */
bool pya_frames_text(struct pya_trace_writer *trace, PyObject *text, uint32_t *out);
/* The trace's number for a context's stack, cut to its innermost frames; 0: no stack.  False with an exception set, or if
 * the trace cannot be written. */
bool pya_frames_number(
    struct pya_frame_table *table, struct pya_trace_writer *trace, void *context, uint32_t *out);
