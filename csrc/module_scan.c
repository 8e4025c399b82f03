/* One pass over a trace for Python: _core.Scan.  Rows come back as tuples, in the order of the structs of scan.h. */
#include "module_scan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_FRAMES = 256 }; /* per stack: recordings keep no more */

typedef unsigned long long ull;

struct scan_object {
    PyObject ob_base;
    struct pya_scan *scan;
};

const struct pya_scan *
pya_module_scan_from(PyObject *self) {
    return ((struct scan_object *)self)->scan;
}

static PyObject *
scan_raise(pya_status status, const char *path, const struct pya_scan *scan) {
    if (PyErr_Occurred()) {
        return NULL; /* raised by the progress function */
    }
    if (status == PYA_E_HOST_NOMEM) {
        return PyErr_NoMemory();
    }
    char text[PYA_MODULE_PATH_TEXT];
    const char *why = scan != NULL && pya_scan_error(scan)[0] != '\0' ? pya_scan_error(scan)
                      : status == PYA_E_IO                            ? strerror(errno)
                      : status == PYA_E_CORRUPT                       ? PYA_TRACE_REFUSED
                                                                      : pya_status_text(status);
    PyOS_snprintf(text, sizeof text, "%s: %s", path, why);
    return pya_module_raise("TraceError", text);
}

/* Copies a sequence of ascending numbers, for free(); NULL with an exception set, or if it is empty. */
static uint64_t *
scan_moment_list(PyObject *sequence, size_t *n) {
    *n = 0;
    Py_ssize_t length = sequence == NULL ? 0 : PySequence_Size(sequence);
    if (length <= 0) {
        return NULL;
    }
    uint64_t *moments = calloc((size_t)length, sizeof *moments);
    if (moments == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        moments[i] = item == NULL ? 0 : PyLong_AsUnsignedLongLong(item);
        Py_XDECREF(item);
        if (!PyErr_Occurred() && i > 0 && moments[i] < moments[i - 1]) {
            PyErr_SetString(PyExc_ValueError, "moments must be in ascending order");
        }
        if (PyErr_Occurred()) {
            free(moments);
            return NULL;
        }
    }
    *n = (size_t)length;
    return moments;
}

/* The same for a sequence of begin, end, begin, end, ... */
static struct pya_scan_range *
scan_range_list(PyObject *sequence, size_t *n) {
    size_t n_numbers = 0;
    uint64_t *numbers = scan_moment_list(sequence, &n_numbers);
    struct pya_scan_range *ranges = numbers == NULL ? NULL : calloc(n_numbers, sizeof *ranges);
    *n = n_numbers / 2;
    if (numbers != NULL && ranges == NULL) {
        PyErr_NoMemory();
    }
    for (size_t i = 0; ranges != NULL && i < *n; i++) {
        ranges[i] = (struct pya_scan_range){numbers[2 * i], numbers[2 * i + 1]};
    }
    free(numbers);
    return ranges;
}

static PyObject *
scan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path",   "device",     "n_bins", "moments", "progress", "window",
                            "ranges", "short_life", "marks",  "around",  NULL};
    PyObject *path = NULL;
    PyObject *moments = NULL;
    PyObject *told = NULL;
    PyObject *marked = NULL;
    PyObject *progress = Py_None;
    struct pya_scan_settings settings = {.device = -1};
    unsigned n_bins = 2000;
    unsigned long long begin = 0;
    unsigned long long end = 0;
    unsigned short_life = 0;
    unsigned long long around = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&|$iIOO(KK)OIOK", names, PyUnicode_FSConverter, &path, &settings.device,
            &n_bins, &moments, &progress, &begin, &end, &told, &short_life, &marked, &around)) {
        return NULL;
    }
    uint64_t *numbers = scan_moment_list(moments, &settings.n_moments);
    uint64_t *marks = PyErr_Occurred() ? NULL : scan_moment_list(marked, &settings.n_marks);
    struct pya_scan_range *ranges =
        PyErr_Occurred() ? NULL : scan_range_list(told, &settings.n_ranges);
    if (PyErr_Occurred()) {
        free(ranges);
        free(marks);
        free(numbers);
        Py_DECREF(path);
        return NULL;
    }
    settings.n_bins = n_bins;
    settings.short_life = short_life;
    settings.around = around;
    settings.window_begin = begin;
    settings.window_end = end;
    settings.moments = numbers;
    settings.marks = marks;
    settings.ranges = ranges;
    settings.progress = progress == Py_None ? NULL : pya_module_progress;
    settings.progress_arg = progress;
    const char *name = PyBytes_AsString(path);
    struct pya_scan *scan = NULL;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_scan_run(name, &settings, &scan);
    Py_END_ALLOW_THREADS
    free(numbers);
    free(marks);
    free(ranges);
    PyObject *self = NULL;
    if (status != PYA_OK) {
        scan_raise(status, name, scan);
    } else {
        self = PyType_GenericAlloc(type, 0);
    }
    Py_DECREF(path);
    if (self == NULL) {
        pya_scan_destroy(scan);
        return NULL;
    }
    ((struct scan_object *)self)->scan = scan;
    return self;
}

static void
scan_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    pya_scan_destroy(((struct scan_object *)self)->scan);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ---- rows ---- */

PyObject *
pya_module_scan_event(uint64_t event) {
    if (event == PYA_SCAN_NEVER) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(event);
}

PyObject *
pya_module_scan_text(const struct pya_scan *scan, uint32_t text) {
    const char *value = text == 0 ? "" : pya_trace_text(pya_scan_reader(scan), text);
    value = value == NULL ? "" : value;
    return PyUnicode_DecodeUTF8(value, (Py_ssize_t)strlen(value), "replace");
}

static PyObject *
scan_totals(PyObject *self, PyObject *unused) {
    (void)unused;
    const struct pya_scan_totals *t = pya_scan_totals(pya_module_scan_from(self));
    return Py_BuildValue(
        "{sKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsNsNsNsOsNsNsNsN}", "n_events", (ull)t->n_events,
        "n_allocs", (ull)t->n_allocs, "n_frees", (ull)t->n_frees, "n_unknown_frees",
        (ull)t->n_unknown_frees, "first_ns", (ull)t->first_ns, "last_ns", (ull)t->last_ns,
        "peak_event", (ull)t->peak_event, "peak_bytes", (ull)t->peak_bytes, "peak_reserved_bytes",
        (ull)t->peak_reserved_bytes, "peak_reserved_event", (ull)t->peak_reserved_event,
        "reserved_at_peak", (ull)t->reserved_at_peak, "end_bytes", (ull)t->end_bytes,
        "end_reserved_bytes", (ull)t->end_reserved_bytes, "n_live", (ull)t->n_live,
        "n_live_at_most", (ull)t->n_live_at_most, "n_segment_events", (ull)t->n_segment_events,
        "n_lost", (ull)t->n_lost, "n_streams", (ull)t->n_streams, "n_record_streams",
        (ull)t->n_record_streams, "peak_phase",
        pya_module_scan_text(pya_module_scan_from(self), t->peak_phase), "peak_step",
        pya_module_scan_event(t->peak_step == 0 ? PYA_SCAN_NEVER : t->peak_step - 1),
        "peak_reserved_alloc", pya_module_scan_event(t->peak_reserved_alloc), "is_complete",
        t->is_complete ? Py_True : Py_False, "capacity",
        pya_module_by_index(t->capacity, PYA_MAX_DEVICES), "device_peak",
        pya_module_by_index(t->device_peak, PYA_MAX_DEVICES), "device_peak_reserved",
        pya_module_by_index(t->device_peak_reserved, PYA_MAX_DEVICES), "device_peak_lasting",
        pya_module_by_index(t->device_peak_lasting, PYA_MAX_DEVICES));
}

static PyObject *
scan_bins(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_bin *b = pya_scan_bins(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, b++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKKKKIKK)", (ull)b->event, (ull)b->time_ns, (ull)b->max_bytes,
                       (ull)b->min_bytes, (ull)b->last_bytes, (ull)b->reserved_bytes, b->phase,
                       (ull)b->step, (ull)b->max_event));
    }
    return list;
}

static PyObject *
scan_phases(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_phase *p = pya_scan_phases(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list,
            Py_BuildValue(
                "(IKIKKKKKKKKKKKKK)", p->text, (ull)p->step, p->depth, (ull)p->begin, (ull)p->end,
                (ull)p->begin_ns, (ull)p->end_ns, (ull)p->begin_bytes, (ull)p->end_bytes,
                (ull)p->peak_bytes, (ull)p->peak_reserved_bytes, (ull)p->n_made, (ull)p->n_left,
                (ull)p->left_bytes, (ull)p->n_live_begin, (ull)p->n_live_end));
    }
    return list;
}

static PyObject *
scan_steps(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_step *p = pya_scan_steps(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKKK)", (ull)p->number, (ull)p->event, (ull)p->time_ns,
                       (ull)p->allocated_bytes, (ull)p->peak_bytes));
    }
    return list;
}

static PyObject *
scan_stacks(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_stack *p = pya_scan_stacks(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKKKK)", (ull)p->n_allocs, (ull)p->bytes, (ull)p->n_live,
                       (ull)p->live_bytes, (ull)p->n_temporary, (ull)p->temporary_bytes));
    }
    return list;
}

static PyObject *
scan_stackless(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan *scan = pya_module_scan_from(self);
    const struct pya_scan_stackless *p = pya_scan_stackless(scan, &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(NKKKKKK)", pya_module_scan_text(scan, p->phase), (ull)p->sums.n_allocs,
                       (ull)p->sums.bytes, (ull)p->sums.n_live, (ull)p->sums.live_bytes,
                       (ull)p->sums.n_temporary, (ull)p->sums.temporary_bytes));
    }
    return list;
}

/* [(event, max_bytes)] */
static PyObject *
scan_heights(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_height *p = pya_scan_heights(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(&list, Py_BuildValue("(KK)", (ull)p->event, (ull)p->max_bytes));
    }
    return list;
}

/* [(requests, bytes)], by the highest bit of the requested size */
static PyObject *
scan_sizes(PyObject *self, PyObject *unused) {
    (void)unused;
    const struct pya_scan_size *p = pya_scan_sizes(pya_module_scan_from(self));
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < PYA_SCAN_SIZES; i++, p++) {
        pya_module_list_add(&list, Py_BuildValue("(KK)", (ull)p->n_allocs, (ull)p->bytes));
    }
    return list;
}

static PyObject *
scan_ooms(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_oom *p = pya_scan_ooms(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKKKIi)", (ull)p->event, (ull)p->bytes, (ull)p->free_bytes,
                       (ull)p->allocated_bytes, (ull)p->reserved_bytes, p->stack, p->device));
    }
    return list;
}

static PyObject *
scan_notes(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const uint32_t *notes = pya_scan_notes(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++) {
        pya_module_list_add(&list, pya_module_scan_text(pya_module_scan_from(self), notes[i]));
    }
    return list;
}

static PyObject *
scan_pools(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_pool *p = pya_scan_pools(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(&list, Py_BuildValue("(KK)", (ull)p->first, (ull)p->second));
    }
    return list;
}

/* {thread: name} */
static PyObject *
scan_threads(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_thread *t = pya_scan_threads(pya_module_scan_from(self), &n);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < n; i++, t++) {
        PyObject *number = PyLong_FromUnsignedLongLong(t->thread);
        PyObject *name = pya_module_scan_text(pya_module_scan_from(self), t->text);
        if (number == NULL || name == NULL || PyDict_SetItem(dict, number, name) != 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(number);
        Py_XDECREF(name);
    }
    return dict;
}

static PyObject *
scan_text(PyObject *self, PyObject *args) {
    unsigned text = 0;
    if (!PyArg_ParseTuple(args, "I", &text)) {
        return NULL;
    }
    return pya_module_scan_text(pya_module_scan_from(self), text);
}

/* [(name, file, line)], innermost first; only the innermost ones if a damaged file has an endless stack */
static PyObject *
scan_frames(PyObject *self, PyObject *args) {
    unsigned stack = 0;
    if (!PyArg_ParseTuple(args, "I", &stack)) {
        return NULL;
    }
    const struct pya_scan *scan = pya_module_scan_from(self);
    struct pya_trace_frame frame;
    PyObject *list = PyList_New(0);
    int n_left = MOST_FRAMES;
    while (list != NULL && stack != 0 && n_left-- > 0 &&
           pya_trace_frame(pya_scan_reader(scan), stack, &frame)) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(NNI)", pya_module_scan_text(scan, frame.name),
                       pya_module_scan_text(scan, frame.file), frame.line));
        if (frame.parent >= stack) {
            break; /* callers are always defined first: this file is damaged */
        }
        stack = frame.parent;
    }
    return list;
}

static PyMethodDef scan_methods[] = {
    {"totals", scan_totals, METH_NOARGS, NULL},
    {"bins", scan_bins, METH_NOARGS, NULL},
    {"phases", scan_phases, METH_NOARGS, NULL},
    {"steps", scan_steps, METH_NOARGS, NULL},
    {"stacks", scan_stacks, METH_NOARGS, NULL},
    {"stackless", scan_stackless, METH_NOARGS, NULL},
    {"sizes", scan_sizes, METH_NOARGS, NULL},
    {"heights", scan_heights, METH_NOARGS, NULL},
    {"ooms", scan_ooms, METH_NOARGS, NULL},
    {"notes", scan_notes, METH_NOARGS, NULL},
    {"moments", pya_module_scan_moments, METH_NOARGS, NULL},
    {"blocks", pya_module_scan_blocks, METH_VARARGS, NULL},
    {"pending", pya_module_scan_pending, METH_VARARGS, NULL},
    {"pieces", pya_module_scan_pieces, METH_VARARGS, NULL},
    {"stack_sums", pya_module_scan_stack_sums, METH_VARARGS, NULL},
    {"spans", pya_module_scan_spans, METH_NOARGS, NULL},
    {"stays", pya_module_scan_stays, METH_NOARGS, NULL},
    {"told", pya_module_scan_told, METH_NOARGS, NULL},
    {"growths", pya_module_scan_growths, METH_NOARGS, NULL},
    {"pools", scan_pools, METH_NOARGS, NULL},
    {"threads", scan_threads, METH_NOARGS, NULL},
    {"segment_pools", pya_module_scan_segment_pools, METH_VARARGS, NULL},
    {"segment_requests", pya_module_scan_segment_requests, METH_VARARGS, NULL},
    {"text", scan_text, METH_VARARGS, NULL},
    {"frames", scan_frames, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scan_slots[] = {
    {Py_tp_new, scan_new},
    {Py_tp_dealloc, scan_dealloc},
    {Py_tp_methods, scan_methods},
    {0, NULL},
};

static PyType_Spec scan_spec = {
    .name = "pyalloc._core.Scan",
    .basicsize = sizeof(struct scan_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = scan_slots,
};

int
pya_module_scan_add(PyObject *module) {
    return pya_module_add_type(module, "Scan", &scan_spec);
}
