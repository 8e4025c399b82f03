/* What the files of the Python module share.  Floor 6. */
#pragma once

#include <Python.h>

#include "core/pyalloc.h"

/* The process's heap, or NULL with pyalloc.errors.AllocatorError set. */
struct pya_heap *pya_module_heap(void);
/* Raises the named class of pyalloc.errors; always returns NULL. */
PyObject *pya_module_raise(const char *class_name, const char *text);
/* None, or NULL with AllocatorError set: what failed, the status and what the device said. */
PyObject *pya_module_result(pya_status status, const char *what, int device);

/* Each file of the module adds its own functions; 0, or -1 with an exception set. */
int pya_module_snapshot_add(PyObject *module);
