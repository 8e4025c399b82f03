/* Python call stacks for the allocator's history.  Floor 5. */
#pragma once

#include <Python.h>
#include <stdbool.h>

/* A stack is counted; it may be shared, and released by a thread that does not hold the GIL. */

/* Hooks for struct pya_hooks; arg is not used.  Capture takes the GIL where the thread does not hold it, and gives
 * NULL when Python is shutting down or the thread has no Python frames. */
void *pya_stack_capture(void *arg);
void pya_stack_retain(void *arg, void *context);
void pya_stack_release(void *arg, void *context);

/* New reference: list of {"name", "filename", "line"}, innermost first.  The GIL is held. */
PyObject *pya_stack_frames(void *context);
