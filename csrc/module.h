/* Shared declarations of the Python module's files.  Floor 6. */
#pragma once

#include <Python.h>

#include "core/pyalloc.h"
#include "replay/trace.h"

/* In the headers of 3.12 and 3.13 this macro returns None without taking a reference.  A build with them may be loaded by an
 * older Python, where None is not immortal and would be freed. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

/* The process's heap, or NULL with pyalloc.errors.AllocatorError set. */
struct pya_heap *pya_module_heap(void);
/* Room for a message that starts with a path; Linux limits paths to 4096 bytes. */
enum { PYA_MODULE_PATH_TEXT = 4096 + 512 };
/* Raises the named class of pyalloc.errors; always returns NULL. */
PyObject *pya_module_raise(const char *class_name, const char *text);
/* None, or NULL with AllocatorError set: its text has `what`, the status and the device's own error. */
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
/* Is it an open _core.TraceWriter?  If not, false with an exception set. */
bool pya_module_trace_check(PyObject *object);
/* The writer in a _core.TraceWriter, which cannot be closed until every hold is let go again.  NULL with an exception set if
 * it is closed. */
struct pya_trace_writer *pya_module_trace_hold(PyObject *object);
void pya_module_trace_let_go(PyObject *object);
/* Sets the exception for a failed write; PYA_E_IO stands for whatever the writer's first error was.  Returns NULL. */
PyObject *pya_module_trace_raise(PyObject *object, pya_status status);
int pya_module_limits_add(PyObject *module);
int pya_module_attention_add(PyObject *module);
int pya_module_ops_add(PyObject *module);
/* Calls arg, a Python function, with n_done and n_all; false if it, or a signal handler, raised.  Call it without holding the
 * GIL. */
bool pya_module_progress(void *arg, uint64_t n_done, uint64_t n_all);
int pya_module_layout_add(PyObject *module);
/* The layouts stored in a bytes object, as one array for free(); they point into the bytes.  NULL with an exception set. */
struct pya_layout *pya_module_layouts(PyObject *packed);
/* Creates the type and adds it to the module under that name; 0, or -1 with an exception set. */
int pya_module_add_type(PyObject *module, const char *name, PyType_Spec *spec);
/* Appends row to *list and steals it.  If either is NULL, or appending fails, *list becomes NULL. */
void pya_module_list_add(PyObject **list, PyObject *row);
/* {index: number} of the numbers that are not 0; NULL with an exception set. */
PyObject *pya_module_by_index(const uint64_t *numbers, size_t n);
/* Parses an event from a kind and keyword arguments; false with an exception set. */
bool pya_module_parse_event(PyObject *args, PyObject *kwargs, struct pya_trace_event *out);
