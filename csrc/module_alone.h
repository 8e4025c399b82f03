/* Protects objects shared by Python threads: one thread at a time uses one.  Floor 4.
 *
 * With a GIL this holds for the whole module until a thread releases the GIL.  Free-threaded Python has a lock per object; a
 * thread loses it likewise when it lets others run (Py_BEGIN_ALLOW_THREADS) or waits for another Python lock. */
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

/* Declares that the module does not need the GIL.  -1 with an exception set. */
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

/* False in free-threaded Python, whose objects have another layout.  It loads stable-ABI files all the same (3.14): the module
 * must then do nothing but raise. */
static inline bool
pya_alone_fits(void) {
    return strstr(Py_GetVersion(), "free-threading") == NULL;
}

#endif

/* Holds the object until the end of the scope, however it is left. */
#define PYA_ALONE_WITH(object)                                                                     \
    struct pya_alone alone __attribute__((cleanup(pya_alone_end)));                                \
    pya_alone_begin(&alone, object)
