/* pyalloc._core: the allocator for Python.  Knows nothing of torch; the bridge's functions are only passed on.
 *
 * A process has one heap, as torch has one current allocator.  Every call into the heap is made without the GIL, because
 * another thread may hold the heap's lock while it waits for the GIL to read its own frames. */
#include "module.h"

#include "device/cuda.h"
#include "module_alone.h"
#include "module_aside.h"
#include "module_stack.h"
#include "torch_bridge.h"
#include "torch_callbacks.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static struct pya_heap *_Atomic process_heap;
/* The layouts given to the heap, and the object whose bytes they point into.  They live as long as the heap.  No lock:
 * only create() and destroy() use them, which the module serializes. */
static struct pya_layout *process_layouts; /* in process_plan's bytes */
static PyObject *process_plan;
/* List of callables (device, bytes) -> bool; owned by the module. */
static PyObject *pressure_callbacks;

PyObject *
pya_module_raise(const char *class_name, const char *text) {
    PyObject *errors = PyImport_ImportModule("pyalloc.errors");
    PyObject *class = errors == NULL ? NULL : PyObject_GetAttrString(errors, class_name);
    /* The text may contain file names, which need not be UTF-8. */
    PyObject *decoded =
        class == NULL ? NULL : PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (decoded != NULL) {
        PyErr_SetObject(class, decoded);
    }
    Py_XDECREF(decoded);
    Py_XDECREF(class);
    Py_XDECREF(errors);
    return NULL;
}

struct pya_heap *
pya_module_heap(void) {
    struct pya_heap *heap = process_heap;
    if (heap == NULL) {
        pya_module_raise(
            "AllocatorError", "pyalloc is not installed: call pyalloc.install() first; if you did, "
                              "pyalloc.status() says why it had no effect");
    }
    return heap;
}

PyObject *
pya_module_result(pya_status status, const char *what, int device) {
    if (status == PYA_OK) {
        Py_RETURN_NONE;
    }
    char text[512];
    (void)pya_heap_error_text(process_heap, status, what, device, text, sizeof text);
    return pya_module_raise("AllocatorError", text);
}

/* ---- hooks the heap calls ---- */

static pya_status
open_device(void *arg, int index, struct pya_device **out) {
    (void)arg;
    return pya_cuda_open(index, out);
}

static void
open_error(void *arg, struct pya_device_error *out) {
    (void)arg;
    pya_cuda_error(out);
}

/* Calls each callable with (device, bytes) on behalf of an allocation, so exceptions are printed, not raised.  Iterates over
 * a copy, since callables may change the list. */
static bool
call_each(PyObject *callbacks, int device, size_t bytes) {
    bool any = false;
    if (!Py_IsInitialized() || callbacks == NULL) {
        return false;
    }
    struct pya_aside aside = pya_aside_begin();
    PyObject *copy = PyList_GetSlice(callbacks, 0, PyList_Size(callbacks));
    for (Py_ssize_t i = 0; copy != NULL && i < PyList_Size(copy); i++) {
        PyObject *callback = PyList_GetItem(copy, i); /* borrowed */
        PyObject *result = PyObject_CallFunction(callback, "in", device, (Py_ssize_t)bytes);
        if (result == NULL) {
            PyErr_WriteUnraisable(callback);
            continue;
        }
        any = PyObject_IsTrue(result) == 1 || any;
        Py_DECREF(result);
    }
    Py_XDECREF(copy);
    pya_aside_end(aside);
    return any;
}

static bool
on_pressure(void *arg, int device, size_t bytes) {
    (void)arg;
    bool has_freed = pya_torch_callbacks_run();
    return call_each(pressure_callbacks, device, bytes) || has_freed;
}

/* While a history is recorded, the next capture frees what was released. */
static void
release_context(void *arg, void *context) {
    pya_stack_release(arg, context);
    struct pya_heap *heap = process_heap;
    if (heap != NULL && !pya_history_is_on(heap)) {
        pya_stack_sweep_soon();
    }
}

/* ---- life of the heap ---- */

static PyObject *
core_create(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    const char *text = NULL;
    PyObject *plan = Py_None;
    if (!PyArg_ParseTuple(args, "s|O", &text, &plan)) {
        return NULL;
    }
    if (process_heap != NULL) {
        return pya_module_raise(
            "AllocatorError", "the allocator of this process was already created");
    }
    struct pya_options options;
    char message[512] = "";
    pya_options_init(&options);
    if (pya_options_parse(&options, text, message, sizeof message) != PYA_OK) {
        return pya_module_raise("ConfigError", message);
    }
    struct pya_layout *layouts = NULL;
    if (plan != Py_None && (layouts = pya_module_layouts(plan)) == NULL) {
        return NULL;
    }
    options.layouts = layouts;
    const struct pya_hooks hooks = {
        .open_device = open_device,
        .open_error = open_error,
        .capture_context = pya_stack_capture,
        .release_context = release_context,
        .retain_context = pya_stack_retain,
        .context_of_free = pya_stack_of_free,
        .context_key = pya_stack_key,
        .describe_context = pya_stack_where,
        .on_pressure = on_pressure,
    };
    struct pya_heap *heap = NULL;
    pya_status status = pya_heap_create(&options, &hooks, &heap);
    if (status == PYA_OK) {
        process_plan = Py_NewRef(plan);
        process_layouts = layouts;
        process_heap = heap;
    } else {
        free(layouts);
    }
    return pya_module_result(status, "creating the allocator failed", -1);
}

static PyObject *
core_destroy(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    (void)args;
    struct pya_heap *heap = atomic_exchange(&process_heap, NULL);
    pya_torch_attach(NULL);
    if (heap != NULL) {
        Py_BEGIN_ALLOW_THREADS
        pya_heap_destroy(heap);
        Py_END_ALLOW_THREADS
        free(process_layouts);
        process_layouts = NULL;
        Py_CLEAR(process_plan);
    }
    Py_RETURN_NONE;
}

/* The options that `text` would result in, as [(name, value, help)]; ConfigError if it cannot be parsed. */
static PyObject *
core_options(PyObject *self, PyObject *args) {
    (void)self;
    const char *text = NULL;
    if (!PyArg_ParseTuple(args, "s", &text)) {
        return NULL;
    }
    struct pya_options options;
    char message[512] = "";
    pya_options_init(&options);
    if (pya_options_parse(&options, text, message, sizeof message) != PYA_OK) {
        return pya_module_raise("ConfigError", message);
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && pya_option_name(i) != NULL; i++) {
        char value[128];
        (void)pya_option_format(&options, i, value, sizeof value);
        pya_module_list_add(
            &list, Py_BuildValue("(sss)", pya_option_name(i), value, pya_option_help(i)));
    }
    return list;
}

/* ---- memory ---- */

static PyObject *
core_alloc(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    unsigned long long bytes = 0;
    unsigned long long stream = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "iKK", &device, &bytes, &stream)) {
        return NULL;
    }
    pya_dptr address = 0;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_alloc(heap, device, (size_t)bytes, stream, &address);
    Py_END_ALLOW_THREADS
    if (status != PYA_OK) {
        return pya_module_result(status, "allocation failed", device);
    }
    return PyLong_FromUnsignedLongLong(address);
}

static PyObject *
core_free(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "K", &address)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_free(heap, address);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "freeing memory was refused", -1);
}

static PyObject *
core_record_stream(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address = 0;
    unsigned long long stream = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "KK", &address, &stream)) {
        return NULL;
    }
    pya_dptr base = 0;
    size_t bytes = 0;
    int device = 0;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_record_stream(heap, address, stream);
    if (pya_block_info(heap, address, &base, &bytes, &device) == PYA_OK) {
        pya_torch_note_handle(stream, device);
    }
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "recording the use of a stream failed", -1);
}

/* (base, bytes, device) */
static PyObject *
core_block_info(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "K", &address)) {
        return NULL;
    }
    pya_dptr base = 0;
    size_t bytes = 0;
    int device = 0;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_block_info(heap, address, &base, &bytes, &device);
    Py_END_ALLOW_THREADS
    if (status != PYA_OK) {
        return pya_module_result(status, "looking up a pointer failed", -1);
    }
    return Py_BuildValue("KKi", (unsigned long long)base, (unsigned long long)bytes, device);
}

static PyObject *
core_empty_cache(PyObject *self, PyObject *args) {
    (void)self;
    int device = -1;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "|i", &device)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_empty_cache(heap, device);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "emptying the cache failed", device);
}

static PyObject *
core_trim(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    unsigned long long bytes = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "iK", &device, &bytes)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_trim(heap, device, (size_t)bytes);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "trimming failed", device);
}

static PyObject *
core_get_fraction(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "i", &device)) {
        return NULL;
    }
    double fraction = 1.0;
    Py_BEGIN_ALLOW_THREADS
    fraction = pya_get_fraction(heap, device);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(fraction);
}

/* ---- statistics ---- */

/* (allocations, frees, refused frees) so far, on all devices */
static PyObject *
core_counts(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    uint64_t allocs = 0;
    uint64_t frees = 0;
    struct pya_heap *heap = process_heap;
    if (heap != NULL) {
        Py_BEGIN_ALLOW_THREADS
        pya_heap_counts(heap, &allocs, &frees);
        Py_END_ALLOW_THREADS
    }
    return Py_BuildValue(
        "KKK", (unsigned long long)allocs, (unsigned long long)frees,
        (unsigned long long)pya_torch_refused_frees());
}

/* Number of violated invariants; each is printed to stderr. */
static PyObject *
core_check(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "i", &device)) {
        return NULL;
    }
    size_t violations = 0;
    Py_BEGIN_ALLOW_THREADS
    violations = pya_heap_check(heap, device);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(violations);
}

/* False in a subinterpreter: a process has one allocator, and its hooks call the first interpreter. */
static PyObject *
core_is_main_interpreter(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyBool_FromLong(PyInterpreterState_GetID(PyInterpreterState_Get()) == 0);
}

static PyObject *
core_is_created(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyBool_FromLong(process_heap != NULL);
}

static PyMethodDef core_methods[] = {
    {"create", core_create, METH_VARARGS, NULL},
    {"destroy", core_destroy, METH_NOARGS, NULL},
    {"is_created", core_is_created, METH_NOARGS, NULL},
    {"is_main_interpreter", core_is_main_interpreter, METH_NOARGS, NULL},
    {"options", core_options, METH_VARARGS, NULL},
    {"alloc", core_alloc, METH_VARARGS, NULL},
    {"free", core_free, METH_VARARGS, NULL},
    {"record_stream", core_record_stream, METH_VARARGS, NULL},
    {"block_info", core_block_info, METH_VARARGS, NULL},
    {"empty_cache", core_empty_cache, METH_VARARGS, NULL},
    {"trim", core_trim, METH_VARARGS, NULL},
    {"get_fraction", core_get_fraction, METH_VARARGS, NULL},
    {"counts", core_counts, METH_NOARGS, NULL},
    {"check", core_check, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "pyalloc._core",
    .m_doc = "The allocator in C; see _core.pyi.",
    .m_size = -1, /* one heap per process: sub-interpreters share it */
    .m_methods = core_methods,
};

PyMODINIT_FUNC
PyInit__core(void) {
    if (!pya_alone_fits()) {
        PyErr_SetString(
            PyExc_ImportError,
            "this build of pyalloc is for Python with the GIL: build it with the free-threaded Python "
            "that is to use it (pip install /path/to/pyalloc)");
        return NULL;
    }
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(
            PyExc_ImportError,
            "pyalloc serves the main interpreter of a process only: import it there");
        return NULL;
    }
    PyObject *module = PyModule_Create(&core_module);
    if (module == NULL) {
        return NULL;
    }
    pressure_callbacks = PyList_New(0);
    if (pressure_callbacks == NULL) {
        goto drop_module;
    }
    if (PyModule_AddObjectRef(module, "pressure_callbacks", pressure_callbacks) != 0 ||
        PyModule_AddIntConstant(module, "ALIGN", PYA_ALIGN) != 0 ||
        PyModule_AddIntConstant(module, "PAGE", PYA_PAGE) != 0 ||
        PyModule_AddIntConstant(module, "MAX_DEVICES", PYA_MAX_DEVICES) != 0) {
        goto drop_module;
    }
    if (pya_module_stats_add(module) != 0 || pya_module_snapshot_add(module) != 0 ||
        pya_module_torch_add(module) != 0 || pya_module_trace_add(module) != 0 ||
        pya_module_replay_add(module) != 0 || pya_module_scan_add(module) != 0 ||
        pya_module_csv_add(module) != 0 || pya_module_record_add(module) != 0 ||
        pya_module_limits_add(module) != 0 || pya_module_attention_add(module) != 0 ||
        pya_module_ops_add(module) != 0 || pya_module_layout_add(module) != 0 ||
        pya_alone_declare(module) != 0) {
        goto drop_module;
    }
    return module;

drop_module:
    Py_DECREF(module);
    return NULL;
}
