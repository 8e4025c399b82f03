/* Trace files for Python: _core.TraceWriter and _core.TraceReader.
 *
 * A reader returns events in columns, one bytes object per field: a hundred million events as Python objects would
 * need more memory than the traced program. */
#include "module.h"

#include "module_alone.h"
#include "replay/trace.h"

#include <errno.h>
#include <string.h>

#define READ_MAX 65536 /* events in one piece */

/* ---- shared ---- */

static PyObject *
trace_raise(pya_status status, const char *path, const char *why) {
    char text[PYA_MODULE_PATH_TEXT];
    if (status == PYA_E_HOST_NOMEM) {
        return PyErr_NoMemory();
    }
    const bool is_usage = status == PYA_E_INVAL || status == PYA_E_BUSY;
    PyOS_snprintf(
        text, sizeof text, "%s: %s", path,
        status == PYA_E_BUSY
            ? "another recording is writing to it; give each recording a name of its own"
        : status == PYA_E_IO ? strerror(errno)
        : why[0] != '\0'     ? why
                             : pya_status_text(status));
    return pya_module_raise(is_usage ? "UsageError" : "TraceError", text);
}

/* A path in the file system's encoding, new reference, or NULL with an exception set. */
static PyObject *
trace_path(PyObject *path) {
    PyObject *bytes = NULL;
    return PyUnicode_FSConverter(path, &bytes) != 0 ? bytes : NULL;
}

/* ---- the writer ---- */

struct trace_writer_object {
    PyObject ob_base;
    struct pya_trace_writer *writer; /* NULL once closed */
    PyObject *path;                  /* bytes */
    unsigned n_holders;              /* threads that use `writer`, perhaps without the GIL */
};

static struct trace_writer_object *
writer_from(PyObject *self) {
    return (struct trace_writer_object *)self;
}

/* NULL with an exception set if it is closed. */
static struct pya_trace_writer *
writer_open(PyObject *self) {
    struct pya_trace_writer *writer = writer_from(self)->writer;
    if (writer == NULL) {
        PyErr_SetString(PyExc_ValueError, "the trace is closed");
    }
    return writer;
}

static PyObject *
writer_result(PyObject *self, pya_status status) {
    if (status == PYA_OK) {
        Py_RETURN_NONE;
    }
    if (status == PYA_E_INVAL) {
        PyErr_SetString(
            PyExc_ValueError,
            "an unknown kind, a string or stack not defined yet, or no such device");
        return NULL;
    }
    return trace_raise(status, PyBytes_AsString(writer_from(self)->path), "");
}

static PyObject *
writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "overwrite", NULL};
    PyObject *path = NULL;
    int overwrite = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", names, &path, &overwrite)) {
        return NULL;
    }
    PyObject *bytes = trace_path(path);
    if (bytes == NULL) {
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(bytes);
        return NULL;
    }
    writer_from(self)->path = bytes;
    pya_status status =
        pya_trace_create(PyBytes_AsString(bytes), overwrite != 0, &writer_from(self)->writer);
    if (status != PYA_OK) {
        const char *why = "";
        if (status == PYA_E_INVAL) {
            why =
                overwrite != 0
                    ? "it, or the same name with .part, is not a regular file; choose another name"
                    : "the file already exists; choose another name or allow overwriting it";
        }
        trace_raise(status, PyBytes_AsString(bytes), why);
        Py_DECREF(self);
        return NULL;
    }
    return self;
}

static PyObject *
writer_close(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    struct pya_trace_writer *writer = writer_from(self)->writer;
    if (writer_from(self)->n_holders > 0) {
        PyErr_SetString(PyExc_RuntimeError, "a HistoryWriter is writing to this trace");
        return NULL;
    }
    writer_from(self)->writer = NULL;
    pya_status status = PYA_OK;
    if (writer != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = pya_trace_close(writer);
        Py_END_ALLOW_THREADS
    }
    return writer_result(self, status);
}

static void
writer_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (writer_from(self)->writer != NULL) {
        (void)pya_trace_close(writer_from(self)->writer);
    }
    Py_XDECREF(writer_from(self)->path);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
writer_string(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    PyObject *given = NULL;
    Py_ssize_t bytes = 0;
    uint32_t id = 0;
    struct pya_trace_writer *writer = writer_open(self);
    if (writer == NULL || !PyArg_ParseTuple(args, "U", &given)) {
        return NULL;
    }
    const char *text = PyUnicode_AsUTF8AndSize(given, &bytes);
    if (text == NULL) {
        return NULL;
    }
    pya_status status = pya_trace_string(writer, text, (size_t)bytes, &id);
    return status == PYA_OK ? PyLong_FromUnsignedLong(id) : writer_result(self, status);
}

static PyObject *
writer_stack(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    struct pya_trace_frame frame;
    unsigned parent = 0;
    unsigned name = 0;
    unsigned file = 0;
    unsigned line = 0;
    uint32_t id = 0;
    /* Parse the arguments first: their __index__ may close the writer. */
    if (!PyArg_ParseTuple(args, "IIII", &parent, &name, &file, &line)) {
        return NULL;
    }
    struct pya_trace_writer *writer = writer_open(self);
    if (writer == NULL) {
        return NULL;
    }
    frame = (struct pya_trace_frame){parent, name, file, line};
    pya_status status = pya_trace_stack(writer, &frame, &id);
    return status == PYA_OK ? PyLong_FromUnsignedLong(id) : writer_result(self, status);
}

/* Parses the fields of an event from keyword arguments.  False with an exception set. */
bool
pya_module_parse_event(PyObject *args, PyObject *kwargs, struct pya_trace_event *out) {
    static char *names[] = {"kind", "addr",  "bytes",  "stream",  "device", "arg",
                            "text", "stack", "thread", "time_ns", NULL};
    int kind = 0;
    int device = 0;
    unsigned text = 0;
    unsigned stack = 0;
    unsigned long long addr = 0;
    unsigned long long bytes = 0;
    unsigned long long stream = 0;
    unsigned long long arg = 0;
    unsigned long long thread = 0;
    unsigned long long time_ns = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "i|$KKKiKIIKK", names, &kind, &addr, &bytes, &stream, &device, &arg,
            &text, &stack, &thread, &time_ns)) {
        return false;
    }
    *out = (struct pya_trace_event){
        .kind = kind,
        .device = device,
        .time_ns = time_ns,
        .thread = thread,
        .stream = stream,
        .addr = addr,
        .bytes = bytes,
        .arg = arg,
        .stack = stack,
        .text = text,
    };
    return true;
}

static PyObject *
writer_event(PyObject *self, PyObject *args, PyObject *kwargs) {
    PYA_ALONE_WITH(self);
    struct pya_trace_event event;
    if (!pya_module_parse_event(args, kwargs, &event)) {
        return NULL;
    }
    struct pya_trace_writer *writer = writer_open(self);
    return writer == NULL ? NULL : writer_result(self, pya_trace_write(writer, &event));
}

static PyObject *
writer_flush(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    struct pya_trace_writer *writer = writer_open(self);
    return writer == NULL ? NULL : writer_result(self, pya_trace_flush(writer));
}

static PyMethodDef writer_methods[] = {
    {"string", writer_string, METH_VARARGS, NULL},
    {"stack", writer_stack, METH_VARARGS, NULL},
    {"event", (PyCFunction)(void (*)(void))writer_event, METH_VARARGS | METH_KEYWORDS, NULL},
    {"flush", writer_flush, METH_NOARGS, NULL},
    {"close", writer_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "pyalloc._core.TraceWriter",
    .basicsize = sizeof(struct trace_writer_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = writer_slots,
};

static PyTypeObject *writer_class; /* kept for ever, like the module */

bool
pya_module_trace_check(PyObject *object) {
    if (Py_TYPE(object) != writer_class) {
        PyErr_SetString(PyExc_TypeError, "not a TraceWriter");
        return false;
    }
    PYA_ALONE_WITH(object);
    return writer_open(object) != NULL;
}

struct pya_trace_writer *
pya_module_trace_hold(PyObject *object) {
    PYA_ALONE_WITH(object);
    struct pya_trace_writer *writer = writer_open(object);
    if (writer != NULL) {
        writer_from(object)->n_holders++;
    }
    return writer;
}

void
pya_module_trace_let_go(PyObject *object) {
    PYA_ALONE_WITH(object);
    writer_from(object)->n_holders--;
}

PyObject *
pya_module_trace_raise(PyObject *object, pya_status status) {
    if (status == PYA_E_IO) {
        /* A failed writer keeps returning its first error; if flush succeeds, host memory was out. */
        status = pya_trace_flush(writer_from(object)->writer);
        status = status == PYA_OK ? PYA_E_HOST_NOMEM : status;
    }
    return writer_result(object, status);
}

/* ---- the reader ---- */

struct trace_reader_object {
    PyObject ob_base;
    struct pya_trace_reader *reader;
    PyObject *path; /* bytes */
    bool is_busy;   /* a thread reads without the GIL */
    /* When no thread was reading last: others may ask meanwhile. */
    uint64_t at, total;
    bool is_complete;
};

static struct trace_reader_object *
reader_from(PyObject *self) {
    return (struct trace_reader_object *)self;
}

static void
reader_note(struct trace_reader_object *object) {
    pya_trace_position(object->reader, &object->at, &object->total);
    object->is_complete = pya_trace_is_complete(object->reader);
}

/* NULL with an exception set while another thread reads. */
static struct pya_trace_reader *
reader_idle(PyObject *self) {
    if (reader_from(self)->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is reading from this trace");
        return NULL;
    }
    return reader_from(self)->reader;
}

static PyObject *
reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", NULL};
    PyObject *path = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &path)) {
        return NULL;
    }
    PyObject *bytes = trace_path(path);
    if (bytes == NULL) {
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(bytes);
        return NULL;
    }
    reader_from(self)->path = bytes;
    pya_status status = pya_trace_open(PyBytes_AsString(bytes), &reader_from(self)->reader);
    if (status != PYA_OK) {
        const char *why = status == PYA_E_CORRUPT ? PYA_TRACE_REFUSED : "";
        trace_raise(status, PyBytes_AsString(bytes), why);
        Py_DECREF(self);
        return NULL;
    }
    reader_note(reader_from(self));
    return self;
}

static void
reader_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    pya_trace_reader_destroy(reader_from(self)->reader);
    Py_XDECREF(reader_from(self)->path);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* One array for each field, in the order of reader_columns(). */
struct trace_columns {
    uint8_t kind[READ_MAX];
    uint8_t device[READ_MAX];
    uint64_t wide[6][READ_MAX];   /* time_ns, thread, stream, addr, bytes, arg */
    uint32_t narrow[2][READ_MAX]; /* stack, text */
};

static pya_status
reader_fill(struct pya_trace_reader *reader, struct trace_columns *columns, size_t n, size_t *got) {
    bool more = true;
    size_t i = 0;
    pya_status status = PYA_OK;
    for (; i < n; i++) {
        struct pya_trace_event e;
        status = pya_trace_next(reader, &e, &more);
        if (status != PYA_OK || !more) {
            break;
        }
        columns->kind[i] = (uint8_t)e.kind;
        columns->device[i] = (uint8_t)e.device;
        columns->wide[0][i] = e.time_ns;
        columns->wide[1][i] = e.thread;
        columns->wide[2][i] = e.stream;
        columns->wide[3][i] = e.addr;
        columns->wide[4][i] = e.bytes;
        columns->wide[5][i] = e.arg;
        columns->narrow[0][i] = e.stack;
        columns->narrow[1][i] = e.text;
    }
    *got = i;
    return status;
}

/* A tuple of bytes.  (Py_BuildValue("y#") built with 3.13's headers fails on older Pythons.) */
static PyObject *
reader_columns(const struct trace_columns *c, size_t n) {
    const struct {
        const void *first;
        size_t each;
    } column[] = {{c->kind, 1},      {c->device, 1},   {c->wide[0], 8}, {c->wide[1], 8},
                  {c->wide[2], 8},   {c->wide[3], 8},  {c->wide[4], 8}, {c->wide[5], 8},
                  {c->narrow[0], 4}, {c->narrow[1], 4}};
    const Py_ssize_t n_columns = (Py_ssize_t)(sizeof column / sizeof *column);
    PyObject *tuple = PyTuple_New(n_columns);
    for (Py_ssize_t i = 0; tuple != NULL && i < n_columns; i++) {
        PyObject *bytes = PyBytes_FromStringAndSize(
            (const char *)column[i].first, (Py_ssize_t)(n * column[i].each));
        if (bytes == NULL || PyTuple_SetItem(tuple, i, bytes) != 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

static PyObject *
reader_read(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    Py_ssize_t n = READ_MAX;
    if (!PyArg_ParseTuple(args, "|n", &n)) {
        return NULL;
    }
    if (n < 1) {
        PyErr_SetString(PyExc_ValueError, "read at least one event");
        return NULL;
    }
    struct pya_trace_reader *reader = reader_idle(self);
    struct trace_columns *columns = reader == NULL ? NULL : PyMem_Malloc(sizeof *columns);
    if (columns == NULL) {
        return reader == NULL ? NULL : PyErr_NoMemory();
    }
    size_t got = 0;
    pya_status status = PYA_OK;
    const size_t wanted = n < READ_MAX ? (size_t)n : READ_MAX;
    reader_from(self)->is_busy = true;
    Py_BEGIN_ALLOW_THREADS
    status = reader_fill(reader, columns, wanted, &got);
    Py_END_ALLOW_THREADS
    reader_from(self)->is_busy = false;
    reader_note(reader_from(self));
    /* Report damage only after everything before it was returned. */
    PyObject *result = NULL;
    if (status != PYA_OK && got == 0) {
        trace_raise(status, PyBytes_AsString(reader_from(self)->path), pya_trace_error(reader));
    } else {
        result = reader_columns(columns, got);
    }
    PyMem_Free(columns);
    return result;
}

static PyObject *
reader_text(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    unsigned id = 0;
    if (!PyArg_ParseTuple(args, "I", &id)) {
        return NULL;
    }
    struct pya_trace_reader *reader = reader_idle(self);
    if (reader == NULL) {
        return NULL;
    }
    const char *text = pya_trace_text(reader, id);
    if (text == NULL) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *
reader_frame(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    unsigned id = 0;
    struct pya_trace_frame frame;
    if (!PyArg_ParseTuple(args, "I", &id)) {
        return NULL;
    }
    struct pya_trace_reader *reader = reader_idle(self);
    if (reader == NULL) {
        return NULL;
    }
    if (!pya_trace_frame(reader, id, &frame)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(IIII)", frame.parent, frame.name, frame.file, frame.line);
}

static PyObject *
reader_position(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    const struct trace_reader_object *object = reader_from(self);
    return Py_BuildValue("(KK)", (unsigned long long)object->at, (unsigned long long)object->total);
}

static PyObject *
reader_is_complete(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    return PyBool_FromLong(reader_from(self)->is_complete);
}

static PyMethodDef reader_methods[] = {
    {"read", reader_read, METH_VARARGS, NULL},
    {"text", reader_text, METH_VARARGS, NULL},
    {"frame", reader_frame, METH_VARARGS, NULL},
    {"position", reader_position, METH_NOARGS, NULL},
    {"is_complete", reader_is_complete, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "pyalloc._core.TraceReader",
    .basicsize = sizeof(struct trace_reader_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reader_slots,
};

static PyObject *
trace_kinds(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    PyObject *list = PyList_New(0);
#define X(kind, number, name, fields, meaning)                                                     \
    pya_module_list_add(&list, Py_BuildValue("(siis)", name, number, (int)(fields), meaning));
    PYA_TRACE_TABLE(X)
#undef X
    return list;
}

static PyMethodDef trace_functions[] = {
    {"trace_kinds", trace_kinds, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

void
pya_module_list_add(PyObject **list, PyObject *row) {
    const bool added = row != NULL && *list != NULL && PyList_Append(*list, row) == 0;
    Py_XDECREF(row);
    if (!added) {
        Py_XDECREF(*list);
        *list = NULL;
    }
}

int
pya_module_add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) {
        return -1;
    }
    if (spec == &writer_spec) {
        Py_INCREF(type);
        writer_class = (PyTypeObject *)type;
    }
    int result = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return result;
}

int
pya_module_trace_add(PyObject *module) {
    if (PyModule_AddFunctions(module, trace_functions) != 0 ||
        pya_module_add_type(module, "TraceWriter", &writer_spec) != 0) {
        return -1;
    }
    return pya_module_add_type(module, "TraceReader", &reader_spec);
}
