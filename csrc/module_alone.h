/* What Python threads share: one thread at a time is at it.  Floor 4.
 *
 * With a GIL that is so for all of the module, until a thread gives the GIL up.  Free-threaded Python has a lock in each object,
 * which a thread loses likewise: while it lets others on (Py_BEGIN_ALLOW_THREADS), or waits for another lock of Python's. */
#pragma once

#include <Python.h>
#include <stdbool.h>
#include <string.h>

#ifdef Py_GIL_DISABLED

struct pya_alone {
    PyCriticalSection section;
};

static inline void
pya_alone_begin(struct pya_alone *alone, PyObject *object) {
    PyCriticalSection_Begin(&alone->section, object);
}

static inline void
pya_alone_end(struct pya_alone *alone) {
    PyCriticalSection_End(&alone->section);
}

/* Importing the module does not bring the GIL back.  -1 with an exception set. */
static inline int
pya_alone_declare(PyObject *module) {
    return PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
}

static inline bool
pya_alone_fits(void) {
    return true;
}

#else

struct pya_alone {
    PyObject *object; /* borrowed; the GIL guards it */
};

static inline void
pya_alone_begin(struct pya_alone *alone, PyObject *object) {
    alone->object = object;
}

static inline void
pya_alone_end(struct pya_alone *alone) {
    (void)alone;
}

static inline int
pya_alone_declare(PyObject *module) {
    (void)module;
    return 0;
}

/* Objects are laid out otherwise in free-threaded Python, which loads files of the stable ABI all the same (3.14): then nothing
 * may be done but raise. */
static inline bool
pya_alone_fits(void) {
    return strstr(Py_GetVersion(), "free-threading") == NULL;
}

#endif

/* To the end of the function, however it ends. */
#define PYA_ALONE_WITH(object)                                                                     \
    struct pya_alone alone __attribute__((cleanup(pya_alone_end)));                                \
    pya_alone_begin(&alone, object)
