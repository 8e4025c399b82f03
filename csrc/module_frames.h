/* The frames that a trace file has so far.  Floor 6. */
#pragma once

#include <Python.h>

#include "replay/trace.h"

/* Frames are numbered once: a table maps (caller's stack, code object or address, place in it) to the number the trace has
 * for it.  Code objects in the table are kept alive, so that their addresses stay theirs. */
struct pya_frame_table {
    PyObject *codes; /* list: keeps them alive */
    struct pya_frame_slot *slots;
    size_t n_slots; /* power of two, or 0 */
    size_t n_used;  /* <= n_slots / 2 */
};

/* False with an exception set. */
bool pya_frames_init(struct pya_frame_table *table);
void pya_frames_fini(struct pya_frame_table *table);
/* The number of a Python text, "?" for one that UTF-8 cannot hold; false when the trace cannot be written. */
bool pya_frames_text(struct pya_trace_writer *trace, PyObject *text, uint32_t *out);
/* The number of a context's stack, whose innermost frames are kept; 0: it has none.  False with an exception set, or when
 * the trace cannot be written. */
bool pya_frames_number(
    struct pya_frame_table *table, struct pya_trace_writer *trace, void *context, uint32_t *out);
