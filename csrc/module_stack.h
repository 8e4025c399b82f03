/* Call stacks and the user's metadata for the allocator's history.  Floor 5. */
#pragma once

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A context is a stack and the thread's labels at one moment.  It is counted; it may be shared, and released by a
 * thread that does not hold the GIL.  Functions that take a context accept NULL. */

/* Hooks for struct pya_hooks; arg is not used.  Capture takes the GIL where the thread does not hold it, and gives
 * NULL when Python is shutting down, and without a stack where the thread has no labels either. */
void *pya_stack_capture(void *arg, bool with_stack);
void pya_stack_retain(void *arg, void *context);
void pya_stack_release(void *arg, void *context);
void *pya_stack_of_free(void *arg, void *here, void *allocation);

/* Equal for equal stacks, 0 for none; needs no GIL. */
uint64_t pya_stack_key(void *arg, void *context);
/* "file.py:12 in function" of the innermost frame outside torch, with the GIL taken; false where there is none. */
bool pya_stack_where(void *arg, void *context, char *text, size_t text_bytes);

/* Should C and C++ frames be captured too? */
void pya_stack_set_native(bool enabled);
/* A context of this moment, with a text of its own for metadata, but for the n_own innermost frames; the GIL is held. */
void *pya_stack_capture_note(const char *bytes, size_t n_bytes, unsigned n_own);

/* One frame of a stack.  key: its code object (borrowed from the stack) or, for a native one, its return address. */
struct pya_stack_frame {
    void *key;
    int at; /* place in the code object, opaque; PYA_STACK_NATIVE: a frame of C or C++ */
};
#define PYA_STACK_NATIVE (-1)
/* The innermost frames, native ones first, at most `room`; returns how many.  The GIL is held. */
size_t pya_stack_read(void *context, struct pya_stack_frame *out, size_t room);
/* {"name", "filename", "line"}, a new reference, or NULL with an exception set; the GIL is held. */
PyObject *pya_stack_describe(const struct pya_stack_frame *frame);
/* Frees what was released without the GIL; the GIL is held. */
void pya_stack_sweep(void);
/* Has Python's main thread do so between two of its steps, if there is anything; the GIL need not be held. */
void pya_stack_sweep_soon(void);

/* New references; the GIL is held.  Frames: list of {"name", "filename", "line"}, innermost first; equal stacks
 * share the list, equal frames the dict, through cache (a dict). */
PyObject *pya_stack_frames(PyObject *cache, void *context);
PyObject *pya_stack_metadata(void *context);
PyObject *pya_stack_compile_context(void *context);
/* What the program calls what was asked for: its metadata, else the region torch.compile made; NULL: neither. */
const char *pya_stack_label(void *context);
bool pya_stack_has_frames(void *context);
