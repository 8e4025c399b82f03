/* Call stacks and the user's metadata for the allocator's history.  Floor 5. */
#pragma once

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A context is a stack plus the thread's labels at one moment.  It is reference-counted and may be shared; a thread may
 * release it without holding the GIL.  Functions that take a context accept NULL. */

/* Hooks for struct pya_hooks; arg is not used.  Capture takes the GIL if the thread does not hold it.  It returns NULL when
 * Python is shutting down, and also if no stack is wanted and the thread has no labels. */
void *pya_stack_capture(void *arg, bool with_stack);
void pya_stack_retain(void *arg, void *context);
void pya_stack_release(void *arg, void *context);
void *pya_stack_of_free(void *arg, void *here, void *allocation);

/* Equal stacks have equal keys; 0: no stack.  Needs no GIL. */
uint64_t pya_stack_key(void *arg, void *context);
/* "file.py:12 in function" of the innermost frame outside torch and pyalloc, else of any; takes the GIL.  False if there
 * is no frame. */
bool pya_stack_where(void *arg, void *context, char *text, size_t text_bytes);

/* Should C and C++ frames be captured too? */
void pya_stack_set_native(bool enabled);
/* A context of this moment without its n_own innermost frames, with this text as its metadata; the GIL is held. */
void *pya_stack_capture_note(const char *bytes, size_t n_bytes, unsigned n_own);

/* One frame of a stack.  key: its code object (borrowed from the stack) or, for a native one, its return address. */
struct pya_stack_frame {
    void *key;
    int at; /* place in the code object, opaque; PYA_STACK_NATIVE: a C or C++ frame */
};
#define PYA_STACK_NATIVE (-1)
/* Writes at most `room` of the innermost frames, native ones first; returns how many.  The GIL is held. */
size_t pya_stack_read(void *context, struct pya_stack_frame *out, size_t room);
/* {"name", "filename", "line"}, a new reference, or NULL with an exception set; the GIL is held. */
PyObject *pya_stack_describe(const struct pya_stack_frame *frame);
/* Frees what was released without the GIL; the GIL is held. */
void pya_stack_sweep(void);
/* If there is something to sweep, schedules that on Python's main thread; the GIL need not be held. */
void pya_stack_sweep_soon(void);

/* New references; the GIL is held.  Frames: list of {"name", "filename", "line"}, innermost first; equal stacks
 * share the list, equal frames the dict, through cache (a dict). */
PyObject *pya_stack_frames(PyObject *cache, void *context);
PyObject *pya_stack_metadata(void *context);
PyObject *pya_stack_compile_context(void *context);
/* The program's name for an allocation: its metadata, else the region of torch.compile it is in; NULL: neither. */
const char *pya_stack_label(void *context);
bool pya_stack_has_frames(void *context);
