/* Writes the allocator's history to a trace file, without a Python object per event: _core.HistoryWriter.
 *
 * Works in pieces: the GIL is held while a piece's stacks are looked up, and released while the piece is written. */
#include "module.h"

#include "core/history.h"
#include "module_alone.h"
#include "module_frames.h"
#include "module_stack.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 2048,     /* events in a piece */
    MOST_AT_ONCE = 6, /* most events from one entry */
};

struct history_writer {
    PyObject ob_base;
    PyObject *trace;       /* _core.TraceWriter */
    PyObject *used;        /* set of (device, pool): private pools that have a user in the trace */
    PyObject *thread_name; /* callable: a thread's name, "" if unknown */
    PyObject *threads;     /* set of the threads whose names were asked for */
    uint32_t last_thread;  /* the latest of them */
    /* By device, the pool that requests go to in the trace; (0, 0): none. */
    struct pya_pool_id routed[PYA_MAX_DEVICES];
    struct pya_frame_table frames;
    bool is_busy; /* a thread writes, perhaps without the GIL */
};

static struct history_writer *
history_from(PyObject *self) {
    return (struct history_writer *)self;
}

/* ---- entries ---- */

/* Trace kind by history action; 0: not written. */
static const uint8_t kind_of[PYA_N_ACTIONS] = {
    [PYA_ACTION_ALLOC] = PYA_TRACE_ALLOC,
    [PYA_ACTION_FREE_REQUESTED] = PYA_TRACE_FREE,
    [PYA_ACTION_FREE_COMPLETED] = PYA_TRACE_FREE_COMPLETED,
    [PYA_ACTION_SEGMENT_ALLOC] = PYA_TRACE_SEGMENT_ALLOC,
    [PYA_ACTION_SEGMENT_FREE] = PYA_TRACE_SEGMENT_FREE,
    [PYA_ACTION_SEGMENT_MAP] = PYA_TRACE_SEGMENT_MAP,
    [PYA_ACTION_SEGMENT_UNMAP] = PYA_TRACE_SEGMENT_UNMAP,
    [PYA_ACTION_OOM] = PYA_TRACE_OOM,
    [PYA_ACTION_RECORD_STREAM] = PYA_TRACE_RECORD_STREAM,
    [PYA_ACTION_ANNOTATE] = PYA_TRACE_LABEL,
};

/* What is being written: the entries of all devices and the marks, merged by time. */
struct drain {
    struct pya_trace_writer *trace;
    struct pya_context_owner owner;
    struct pya_history_part parts[PYA_MAX_DEVICES];
    size_t at[PYA_MAX_DEVICES]; /* next entry of each part */
    int n_devices;              /* number of parts */
    uint64_t now_ns;            /* everything up to this time has been taken */
    int64_t offset_ns;
    PyObject *marks; /* list */
    Py_ssize_t next_mark;
    struct pya_trace_event piece[PIECE];
    size_t n_piece;
    uint64_t n_written;
};

static void
drain_take(struct drain *d, struct pya_heap *heap) {
    d->now_ns = UINT64_MAX;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        uint64_t now_ns = 0;
        if (pya_history_take(heap, i, &d->parts[i], &now_ns)) {
            d->now_ns = now_ns < d->now_ns ? now_ns : d->now_ns;
            d->n_devices = i + 1;
        }
    }
}

static const struct pya_entry *
part_entry(const struct pya_history_part *part, size_t i) {
    return &part->items[(part->first + i) % part->n];
}

/* The device whose next entry is the oldest; -1 if none is left. */
static int
drain_oldest(const struct drain *d, uint64_t *time_ns) {
    int device = -1;
    for (int i = 0; i < d->n_devices; i++) {
        if (d->at[i] < d->parts[i].n) {
            const uint64_t at_ns = part_entry(&d->parts[i], d->at[i])->time_ns;
            if (device < 0 || at_ns < *time_ns) {
                device = i;
                *time_ns = at_ns;
            }
        }
    }
    return device;
}

/* Writes the piece with the GIL released. */
static pya_status
drain_flush(struct drain *d) {
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < d->n_piece && status == PYA_OK; i++) {
        status = pya_trace_write(d->trace, &d->piece[i]);
    }
    Py_END_ALLOW_THREADS
    d->n_written += d->n_piece;
    d->n_piece = 0;
    return status;
}

/* ---- private pools: the history names one in each request, a trace only records changes ---- */

static bool
is_pool(struct pya_pool_id a, struct pya_pool_id b) {
    return a.first == b.first && a.second == b.second;
}

static void
pool_event(struct drain *d, int kind, int device, struct pya_pool_id pool, uint64_t time_ns) {
    d->piece[d->n_piece++] = (struct pya_trace_event){
        .kind = kind, .device = device, .time_ns = time_ns, .addr = pool.first, .arg = pool.second};
}

/* Adds the pool to `used` or removes it; returns whether it was in it before, -1 with an exception set. */
static int
pool_use(const struct history_writer *h, int device, struct pya_pool_id pool, bool comes) {
    PyObject *key = Py_BuildValue(
        "(i(KK))", device, (unsigned long long)pool.first, (unsigned long long)pool.second);
    int was = key == NULL ? -1 : PySet_Contains(h->used, key);
    if (was >= 0 && (comes ? PySet_Add(h->used, key) : PySet_Discard(h->used, key)) < 0) {
        was = -1;
    }
    Py_XDECREF(key);
    return was;
}

/* From now on requests of the device go to this pool.  False with an exception set. */
static bool
pool_route(
    struct history_writer *h, struct drain *d, int device, struct pya_pool_id pool,
    uint64_t time_ns) {
    const struct pya_pool_id none = {0, 0};
    const struct pya_pool_id before = h->routed[device];
    if (is_pool(pool, before)) {
        return true;
    }
    h->routed[device] = pool;
    if (!is_pool(before, none)) {
        pool_event(d, PYA_TRACE_POOL_END, device, before, time_ns);
    }
    if (is_pool(pool, none)) {
        return true;
    }
    const int was_used = pool_use(h, device, pool, true);
    pool_event(d, PYA_TRACE_POOL_BEGIN, device, pool, time_ns);
    if (was_used == 1) { /* each BEGIN adds a user; keep it at one */
        pool_event(d, PYA_TRACE_POOL_RELEASE, device, pool, time_ns);
    }
    return was_used >= 0;
}

/* The pool's last user has gone.  False with an exception set. */
static bool
pool_release(
    struct history_writer *h, struct drain *d, int device, struct pya_pool_id pool,
    uint64_t time_ns) {
    const int was_used = pool_use(h, device, pool, false);
    if (was_used != 1) {
        return was_used == 0; /* the trace has no request to it */
    }
    const bool is_routed = !is_pool(h->routed[device], pool) ||
                           pool_route(h, d, device, (struct pya_pool_id){0, 0}, time_ns);
    pool_event(d, PYA_TRACE_POOL_RELEASE, device, pool, time_ns);
    return is_routed;
}

/* Adds the program's label of the block.  False if the trace cannot be written. */
static bool
drain_label(struct drain *d, int device, const struct pya_entry *entry, uint64_t time_ns) {
    struct pya_trace_event label = {
        .kind = PYA_TRACE_LABEL, .device = device, .time_ns = time_ns, .addr = entry->addr};
    const char *text = pya_stack_label(entry->context);
    if (text != NULL) {
        if (pya_trace_string(d->trace, text, strlen(text), &label.text) != PYA_OK) {
            return false;
        }
        d->piece[d->n_piece++] = label;
    }
    return true;
}

/* Adds a thread's name when it is first seen.  False with an exception set, or if the trace cannot be written. */
static bool
thread_tell(struct history_writer *h, struct drain *d, uint32_t thread, uint64_t time_ns) {
    if (thread == h->last_thread) {
        return true;
    }
    h->last_thread = thread;
    PyObject *number = PyLong_FromUnsignedLong(thread);
    const int is_known = number == NULL ? -1 : PySet_Contains(h->threads, number);
    if (is_known != 0 || PySet_Add(h->threads, number) != 0) {
        Py_XDECREF(number);
        return is_known == 1;
    }
    PyObject *name = PyObject_CallFunctionObjArgs(h->thread_name, number, NULL);
    Py_DECREF(number);
    struct pya_trace_event event = {.kind = PYA_TRACE_THREAD, .time_ns = time_ns, .arg = thread};
    const bool is_named = name != NULL && PyObject_IsTrue(name) == 1;
    const bool is_told =
        name != NULL && (!is_named || pya_frames_text(d->trace, name, &event.text));
    Py_XDECREF(name);
    if (is_told && is_named) {
        d->piece[d->n_piece++] = event;
    }
    return is_told;
}

static bool
drain_entry(struct history_writer *h, struct drain *d, int device) {
    const struct pya_entry *entry = part_entry(&d->parts[device], d->at[device]);
    const int kind = kind_of[entry->action];
    const uint64_t time_ns = (uint64_t)((int64_t)entry->time_ns + d->offset_ns);
    uint32_t stack = 0;
    if (kind != 0 && !thread_tell(h, d, entry->thread, time_ns)) {
        return false;
    }
    if (kind == PYA_TRACE_ALLOC && !pool_route(h, d, device, entry->place.pool, time_ns)) {
        return false;
    }
    if (entry->action == PYA_ACTION_POOL_RELEASE &&
        !pool_release(h, d, device, entry->place.pool, time_ns)) {
        return false;
    }
    /* If a free has no stack of its own, the history gives it that of its allocation: no need to repeat it. */
    const bool has_stack = kind != 0 && kind != PYA_TRACE_FREE && kind != PYA_TRACE_FREE_COMPLETED;
    if (has_stack && entry->has_stack && entry->context != NULL &&
        !pya_frames_number(&h->frames, d->trace, entry->context, &stack)) {
        return false;
    }
    const bool is_oom = kind == PYA_TRACE_OOM;
    const bool is_use = kind == PYA_TRACE_RECORD_STREAM;
    if (kind != 0 && kind != PYA_TRACE_LABEL) {
        d->piece[d->n_piece++] = (struct pya_trace_event){
            .kind = kind,
            .device = device,
            .time_ns = time_ns,
            .thread = entry->thread,
            .stream = entry->place.stream,
            .addr = is_oom ? 0 : entry->addr,
            .bytes = entry->bytes,
            .arg = is_oom   ? entry->addr
                   : is_use ? entry->place.stream
                            : 0,
            .stack = stack,
        };
    }
    d->at[device]++;
    return (kind != PYA_TRACE_ALLOC && kind != PYA_TRACE_LABEL) ||
           drain_label(d, device, entry, time_ns);
}

/* Marks are tuples (time_ns, kind, text, arg, addr, bytes, device). */
static bool
mark_read(PyObject *mark, struct pya_trace_event *out) {
    unsigned long long time_ns = 0;
    unsigned long long arg = 0;
    unsigned long long addr = 0;
    unsigned long long bytes = 0;
    unsigned text = 0;
    int kind = 0;
    int device = 0;
    if (!PyArg_ParseTuple(mark, "KiIKKKi", &time_ns, &kind, &text, &arg, &addr, &bytes, &device)) {
        return false;
    }
    *out = (struct pya_trace_event){
        .kind = kind,
        .device = device,
        .time_ns = time_ns,
        .addr = addr,
        .bytes = bytes,
        .arg = arg,
        .text = text,
    };
    return true;
}

/* The next mark; *is_there: it is there and not later than now_ns.  False with an exception set. */
static bool
drain_mark(const struct drain *d, struct pya_trace_event *out, bool *is_there) {
    *is_there = false;
    if (d->next_mark >= PyList_Size(d->marks)) {
        return true;
    }
    PyObject *mark = PyList_GetItem(d->marks, d->next_mark); /* borrowed */
    if (mark == NULL || !mark_read(mark, out)) {
        return false;
    }
    *is_there =
        d->now_ns == UINT64_MAX || out->time_ns <= (uint64_t)((int64_t)d->now_ns + d->offset_ns);
    return true;
}

/* PYA_E_INVAL: an exception is set. */
static pya_status
drain_all(struct history_writer *h, struct drain *d) {
    pya_status status = PYA_OK;
    for (;;) {
        if (d->n_piece + MOST_AT_ONCE > PIECE) {
            status = drain_flush(d);
            if (status != PYA_OK) {
                return status;
            }
        }
        uint64_t time_ns = 0;
        const int device = drain_oldest(d, &time_ns);
        struct pya_trace_event mark;
        bool is_marked = false;
        if (!drain_mark(d, &mark, &is_marked)) {
            return PYA_E_INVAL;
        }
        const uint64_t entry_ns = (uint64_t)((int64_t)time_ns + d->offset_ns);
        if (is_marked && (device < 0 || mark.time_ns <= entry_ns)) {
            d->piece[d->n_piece++] = mark;
            d->next_mark++;
        } else if (device < 0) {
            return drain_flush(d);
        } else if (!drain_entry(h, d, device)) {
            return PyErr_Occurred() ? PYA_E_INVAL : PYA_E_IO;
        }
    }
}

/* Releases the contexts of all entries, written or not. */
static void
drain_fini(struct drain *d) {
    for (int i = 0; i < d->n_devices; i++) {
        for (size_t k = 0; k < d->parts[i].n; k++) {
            if (d->parts[i].items[k].context != NULL) {
                d->owner.release(d->owner.arg, d->parts[i].items[k].context);
            }
        }
        free(d->parts[i].items);
    }
}

static PyObject *
drain_result(PyObject *trace, const struct drain *d, pya_status status) {
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (status != PYA_OK) {
        return pya_module_trace_raise(trace, status);
    }
    unsigned long long lost = 0;
    for (int i = 0; i < d->n_devices; i++) {
        lost += d->parts[i].n_lost;
    }
    return Py_BuildValue("(KK)", (unsigned long long)d->n_written, lost);
}

/* (offset_ns, marks) -> (events written, events lost); removes the marks that it wrote from the list. */
static PyObject *
history_drain(PyObject *self, PyObject *args) {
    PYA_ALONE_WITH(self);
    struct history_writer *h = history_from(self);
    long long offset_ns = 0;
    PyObject *marks = NULL;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "LO", &offset_ns, &marks)) {
        return NULL;
    }
    if (!PyList_Check(marks) || h->is_busy) {
        PyErr_SetString(
            PyExc_RuntimeError, "marks must be a list, and one thread drains at a time");
        return NULL;
    }
    struct drain *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return PyErr_NoMemory();
    }
    h->is_busy = true;
    PyObject *result = NULL;
    d->trace = pya_module_trace_hold(h->trace);
    if (d->trace == NULL) {
        goto free_drain;
    }
    d->owner = (struct pya_context_owner){.retain = pya_stack_retain, .release = pya_stack_release};
    d->offset_ns = offset_ns;
    d->marks = marks;
    Py_BEGIN_ALLOW_THREADS
    drain_take(d, heap);
    Py_END_ALLOW_THREADS
    const pya_status status = drain_all(h, d);
    drain_fini(d);
    pya_stack_sweep();
    result = drain_result(h->trace, d, status);
    pya_module_trace_let_go(h->trace);
    if (result != NULL && PyList_SetSlice(marks, 0, d->next_mark, NULL) != 0) {
        Py_CLEAR(result);
    }

free_drain:
    h->is_busy = false;
    free(d);
    return result;
}

/* ---- the type ---- */

static PyObject *
history_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"trace", "used", "thread_name", NULL};
    PyObject *trace = NULL;
    PyObject *used = NULL;
    PyObject *thread_name = NULL;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!O", names, &trace, &PySet_Type, &used, &thread_name) ||
        !pya_module_trace_check(trace)) {
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    history_from(self)->threads = PySet_New(NULL);
    if (history_from(self)->threads == NULL || !pya_frames_init(&history_from(self)->frames)) {
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(trace);
    history_from(self)->trace = trace;
    Py_INCREF(used);
    history_from(self)->used = used;
    Py_INCREF(thread_name);
    history_from(self)->thread_name = thread_name;
    return self;
}

static void
history_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(history_from(self)->trace);
    Py_XDECREF(history_from(self)->used);
    Py_XDECREF(history_from(self)->thread_name);
    Py_XDECREF(history_from(self)->threads);
    pya_frames_fini(&history_from(self)->frames);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef history_methods[] = {
    {"drain", history_drain, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot history_slots[] = {
    {Py_tp_new, history_new},
    {Py_tp_dealloc, history_dealloc},
    {Py_tp_methods, history_methods},
    {0, NULL},
};

static PyType_Spec history_spec = {
    .name = "pyalloc._core.HistoryWriter",
    .basicsize = sizeof(struct history_writer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = history_slots,
};

int
pya_module_record_add(PyObject *module) {
    return pya_module_add_type(module, "HistoryWriter", &history_spec);
}
