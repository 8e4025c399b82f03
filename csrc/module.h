/* What the files of the Python module share.  Floor 6. */
#pragma once

#include <Python.h>

#include "core/pyalloc.h"
#include "replay/trace.h"

/* The headers of 3.12 and 3.13 return None without counting it; Python before 3.12, which may load what they built,
 * then loses its None. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

/* The process's heap, or NULL with pyalloc.errors.AllocatorError set. */
struct pya_heap *pya_module_heap(void);
/* Room for a text that begins with a path: Linux has none longer than 4096. */
enum { PYA_MODULE_PATH_TEXT = 4096 + 512 };
/* Raises the named class of pyalloc.errors; always returns NULL. */
PyObject *pya_module_raise(const char *class_name, const char *text);
/* None, or NULL with AllocatorError set: what failed, the status and what the device said. */
PyObject *pya_module_result(pya_status status, const char *what, int device);

/* Each file of the module adds its own functions; 0, or -1 with an exception set. */
int pya_module_stats_add(PyObject *module);
int pya_module_snapshot_add(PyObject *module);
int pya_module_torch_add(PyObject *module);
int pya_module_trace_add(PyObject *module);
int pya_module_replay_add(PyObject *module);
int pya_module_scan_add(PyObject *module);
int pya_module_csv_add(PyObject *module);
int pya_module_record_add(PyObject *module);
/* Is it an open _core.TraceWriter?  False with an exception set where it is closed or something else. */
bool pya_module_trace_check(PyObject *object);
/* Of a _core.TraceWriter, which cannot be closed until it is let go, once for each hold; NULL with an exception set where it is
 * closed. */
struct pya_trace_writer *pya_module_trace_hold(PyObject *object);
void pya_module_trace_let_go(PyObject *object);
/* Sets the exception of what failed to be written; PYA_E_IO: whatever it was.  Gives NULL. */
PyObject *pya_module_trace_raise(PyObject *object, pya_status status);
int pya_module_limits_add(PyObject *module);
int pya_module_attention_add(PyObject *module);
int pya_module_ops_add(PyObject *module);
/* Calls arg, a Python function, with what is done and how much there is; false: it raised, or what a signal began did.  For
 * work done without Python's lock. */
bool pya_module_progress(void *arg, uint64_t n_done, uint64_t n_all);
int pya_module_layout_add(PyObject *module);
/* The layouts of a bytes object, which must outlive them, in one array for free(); NULL with an exception set. */
struct pya_layout *pya_module_layouts(PyObject *packed);
/* Makes the type and puts it into the module under that name; 0, or -1 with an exception set. */
int pya_module_add_type(PyObject *module, const char *name, PyType_Spec *spec);
/* Appends row, which it steals, to *list; where either is NULL or it cannot be done, *list becomes NULL. */
void pya_module_list_add(PyObject **list, PyObject *row);
/* {index: number} of those that are not 0; NULL with an exception set. */
PyObject *pya_module_by_index(const uint64_t *numbers, size_t n);
/* An event from a kind and keyword arguments; false with an exception set. */
bool pya_module_parse_event(PyObject *args, PyObject *kwargs, struct pya_trace_event *out);
