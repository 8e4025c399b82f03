/* Runs Python code in the middle of something else: takes the GIL, which the thread may already hold, and sets aside a pending
 * exception.  Floor 4. */
#pragma once

#include <Python.h>

struct pya_aside {
    PyGILState_STATE held;
    PyObject *type, *value, *traceback;
};

static inline struct pya_aside
pya_aside_begin(void) {
    struct pya_aside aside = {.held = PyGILState_Ensure()};
    PyErr_Fetch(&aside.type, &aside.value, &aside.traceback);
    return aside;
}

/* Drops an exception that the code in between left behind. */
static inline void
pya_aside_end(struct pya_aside aside) {
    PyErr_Restore(aside.type, aside.value, aside.traceback);
    PyGILState_Release(aside.held);
}
