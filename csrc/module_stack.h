/* Call stacks and the user's metadata for the allocator's history.  Floor 5. */
#pragma once

#include <Python.h>
#include <stdbool.h>

/* A context is a stack and the thread's metadata at one moment.  It is counted; it may be shared, and released by a
 * thread that does not hold the GIL.  Functions that take a context accept NULL. */

/* Hooks for struct pya_hooks; arg is not used.  Capture takes the GIL where the thread does not hold it, and gives
 * NULL when Python is shutting down, and without a stack where the thread has no metadata either. */
void *pya_stack_capture(void *arg, bool with_stack);
void pya_stack_retain(void *arg, void *context);
void pya_stack_release(void *arg, void *context);

/* Should C and C++ frames be captured too? */
void pya_stack_set_native(bool enabled);
/* Text for contexts this thread captures from now on; false when there is no host memory for it. */
bool pya_stack_set_metadata(const char *text);
/* Never NULL; valid until the thread sets another. */
const char *pya_stack_thread_metadata(void);

/* New references; the GIL is held.  Frames: list of {"name", "filename", "line"}, innermost first, each frame's dict
 * taken from and added to cache (a dict). */
PyObject *pya_stack_frames(PyObject *cache, void *context);
PyObject *pya_stack_metadata(void *context);
bool pya_stack_has_frames(void *context);
