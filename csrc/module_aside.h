/* Python that runs in the middle of something else: with the GIL, which the thread may hold already, and with an exception
 * that is in flight set aside.  Floor 4. */
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

/* An exception of its own is dropped. */
static inline void
pya_aside_end(struct pya_aside aside) {
    PyErr_Restore(aside.type, aside.value, aside.traceback);
    PyGILState_Release(aside.held);
}
