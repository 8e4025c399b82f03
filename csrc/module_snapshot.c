/* Snapshots and history for Python: builds torch's dictionaries from the core's flat arrays.
 *
 * A recording repeats the same stacks and frames thousands of times.  Each becomes a single Python object, which also
 * keeps the pickled file small. */
#include "module.h"

#include "core/history.h"
#include "core/snapshot.h"
#include "module_stack.h"
#include "thread_labels.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Steals value.  False with an exception set if it could not be stored. */
static bool
put(PyObject *dict, const char *key, PyObject *value) {
    const bool done = value != NULL && PyDict_SetItemString(dict, key, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *
integer(uint64_t value) {
    return PyLong_FromUnsignedLongLong((unsigned long long)value);
}

static PyObject *
pool_tuple(struct pya_pool_id pool) {
    return Py_BuildValue("(KK)", (unsigned long long)pool.first, (unsigned long long)pool.second);
}

/* New reference to the frames of a context; the same context gives the same object. */
static PyObject *
frames_of(PyObject *cache, void *context) {
    PyObject *key = PyLong_FromVoidPtr(context);
    PyObject *known = key == NULL ? NULL : PyDict_GetItemWithError(cache, key); /* borrowed */
    if (known != NULL) {
        Py_INCREF(known);
    } else if (key != NULL && !PyErr_Occurred()) {
        known = pya_stack_frames(cache, context);
        if (known != NULL && PyDict_SetItem(cache, key, known) != 0) {
            Py_CLEAR(known);
        }
    }
    Py_XDECREF(key);
    return known;
}

static PyObject *
block_dict(const struct pya_snap_block *block, PyObject *cache) {
    PyObject *dict = PyDict_New();
    if (dict != NULL && put(dict, "address", integer(block->addr)) &&
        put(dict, "size", integer(block->bytes)) &&
        put(dict, "requested_size", integer(block->requested)) &&
        put(dict, "state", PyUnicode_InternFromString(pya_snap_state_text(block->state))) &&
        put(dict, "frames", frames_of(cache, block->context))) {
        return dict;
    }
    Py_XDECREF(dict);
    return NULL;
}

static PyObject *
block_list(
    const struct pya_snapshot *snapshot, const struct pya_snap_segment *segment, PyObject *cache) {
    PyObject *list = PyList_New((Py_ssize_t)segment->n_blocks);
    for (size_t i = 0; list != NULL && i < segment->n_blocks; i++) {
        PyObject *dict = block_dict(&snapshot->blocks[segment->first_block + i], cache);
        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)i, dict) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
segment_dict(
    const struct pya_snapshot *snapshot, const struct pya_snap_segment *segment, PyObject *cache) {
    PyObject *dict = PyDict_New();
    if (dict != NULL && put(dict, "device", PyLong_FromLong(segment->device)) &&
        put(dict, "address", integer(segment->addr)) &&
        put(dict, "total_size", integer(segment->total_bytes)) &&
        put(dict, "allocated_size", integer(segment->allocated_bytes)) &&
        put(dict, "active_size", integer(segment->active_bytes)) &&
        put(dict, "requested_size", integer(segment->requested_bytes)) &&
        put(dict, "stream", integer(segment->stream)) &&
        put(dict, "segment_type",
            PyUnicode_InternFromString(segment->is_small ? "small" : "large")) &&
        put(dict, "segment_pool_id", pool_tuple(segment->pool)) &&
        put(dict, "is_expandable", PyBool_FromLong(segment->is_expandable)) &&
        put(dict, "frames", PyList_New(0)) &&
        put(dict, "blocks", block_list(snapshot, segment, cache))) {
        return dict;
    }
    Py_XDECREF(dict);
    return NULL;
}

static PyObject *
segment_list(const struct pya_snapshot *snapshot, PyObject *cache) {
    PyObject *list = PyList_New((Py_ssize_t)snapshot->n_segments);
    for (size_t i = 0; list != NULL && i < snapshot->n_segments; i++) {
        PyObject *dict = segment_dict(snapshot, &snapshot->segments[i], cache);
        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)i, dict) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* Offset from the device's clock (CLOCK_MONOTONIC) to nanoseconds since 1970.  Read it once per trace: otherwise later entries
 * would drift by the time it takes to convert the earlier ones. */
static int64_t
wall_offset_ns(void) {
    struct timespec wall;
    struct timespec steady;
    (void)clock_gettime(CLOCK_MONOTONIC, &steady);
    (void)clock_gettime(CLOCK_REALTIME, &wall);
    return ((int64_t)wall.tv_sec - (int64_t)steady.tv_sec) * 1000000000 + wall.tv_nsec -
           steady.tv_nsec;
}

static PyObject *
entry_dict(const struct pya_entry *entry, int64_t offset_ns, PyObject *cache) {
    PyObject *dict = PyDict_New();
    const char *place = entry->action == PYA_ACTION_OOM ? "device_free" : "addr";
    const char *action = pya_action_name((enum pya_action)entry->action);
    bool done =
        dict != NULL && put(dict, "action", PyUnicode_InternFromString(action)) &&
        put(dict, place, integer(entry->addr)) && put(dict, "size", integer(entry->bytes)) &&
        put(dict, "stream", integer(entry->place.stream)) &&
        put(dict, "time_us", PyLong_FromLongLong(((int64_t)entry->time_ns + offset_ns) / 1000)) &&
        put(dict, "compile_context", pya_stack_compile_context(entry->context)) &&
        put(dict, "user_metadata", pya_stack_metadata(entry->context)) &&
        put(dict, "pool_id", pool_tuple(entry->place.pool));
    if (done && entry->has_stack && pya_stack_has_frames(entry->context)) {
        done = put(dict, "frames", frames_of(cache, entry->context));
    }
    if (!done) {
        Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *
trace_list(const struct pya_snapshot *snapshot, size_t device, PyObject *cache) {
    const size_t first = device == 0 ? 0 : snapshot->entries_end[device - 1];
    const size_t end = snapshot->entries_end[device];
    const int64_t offset_ns = wall_offset_ns();
    PyObject *list = PyList_New((Py_ssize_t)(end - first));
    for (size_t i = first; list != NULL && i < end; i++) {
        PyObject *dict = entry_dict(&snapshot->entries[i], offset_ns, cache);
        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)(i - first), dict) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* A list with one list per device. */
static PyObject *
all_traces(const struct pya_snapshot *snapshot, int n_devices, PyObject *cache) {
    PyObject *list = PyList_New(0);
    for (int device = 0; list != NULL && device < n_devices; device++) {
        pya_module_list_add(&list, trace_list(snapshot, (size_t)device, cache));
    }
    return list;
}

static PyObject *
snapshot_tuple(const struct pya_snapshot *snapshot, int n_devices) {
    PyObject *cache = PyDict_New();
    PyObject *segments = cache == NULL ? NULL : segment_list(snapshot, cache);
    PyObject *traces = segments == NULL ? NULL : all_traces(snapshot, n_devices, cache);
    PyObject *result = traces == NULL ? NULL : PyTuple_Pack(2, segments, traces);
    Py_XDECREF(cache);
    Py_XDECREF(segments);
    Py_XDECREF(traces);
    return result;
}

/* (n_devices, with_trace, pool or None) -> (segments, device_traces) */
static PyObject *
core_snapshot(PyObject *self, PyObject *args) {
    (void)self;
    int n_devices = 0;
    int with_trace = 0;
    PyObject *wanted = NULL;
    unsigned long long first = 0;
    unsigned long long second = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "ipO", &n_devices, &with_trace, &wanted)) {
        return NULL;
    }
    if (wanted != Py_None && !PyArg_ParseTuple(wanted, "KK", &first, &second)) {
        return NULL;
    }
    if (n_devices < 0 || n_devices > PYA_MAX_DEVICES) {
        return pya_module_raise("AllocatorError", "there are at most 64 devices");
    }
    const struct pya_pool_id pool = {first, second};
    struct pya_snapshot snapshot;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_snapshot_take(heap, wanted == Py_None ? NULL : &pool, with_trace != 0, &snapshot);
    Py_END_ALLOW_THREADS
    if (status != PYA_OK) {
        return pya_module_result(status, "taking a snapshot failed", -1);
    }
    PyObject *result = snapshot_tuple(&snapshot, n_devices);
    pya_snapshot_fini(&snapshot);
    return result;
}

/* (level, trace, max_entries, skip_mask, native_frames) */
static PyObject *
core_history_start(PyObject *self, PyObject *args) {
    (void)self;
    int level = 0;
    int trace = 0;
    unsigned long long max_entries = 0;
    unsigned int skip_mask = 0;
    int native_frames = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL ||
        !PyArg_ParseTuple(
            args, "ipKIp", &level, &trace, &max_entries, &skip_mask, &native_frames)) {
        return NULL;
    }
    if (level < PYA_RECORD_NEVER || level > PYA_RECORD_ALL) {
        return pya_module_raise("AllocatorError", "no such level of contexts");
    }
    pya_stack_set_native(native_frames != 0);
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_history_start(
        heap, (enum pya_record_level)level, trace != 0, (size_t)max_entries, skip_mask);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "starting to record history failed", -1);
}

static PyObject *
history_call(void (*function)(struct pya_heap *heap)) {
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    function(heap);
    Py_END_ALLOW_THREADS
    pya_stack_sweep(); /* there may be no further capture to do it */
    Py_RETURN_NONE;
}

static PyObject *
core_history_stop(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return history_call(pya_history_stop);
}

static PyObject *
core_history_forget(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return history_call(pya_history_forget);
}

/* Names of the trace actions and whether torch has them; a name's index is its bit in a skip mask. */
static PyObject *
core_actions(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < PYA_N_ACTIONS; i++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(sO)", pya_action_name((enum pya_action)i),
                       pya_action_is_torchs(i) ? Py_True : Py_False));
    }
    return list;
}

/* (address) -> the frames that allocated the live block there; an empty list if unknown or not live. */
static PyObject *
core_traceback(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address = 0;
    void *context = NULL;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "K", &address)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    context = pya_history_context(heap, address);
    Py_END_ALLOW_THREADS
    PyObject *cache = PyDict_New();
    PyObject *frames = cache == NULL ? NULL : pya_stack_frames(cache, context);
    Py_XDECREF(cache);
    pya_stack_release(NULL, context);
    return frames;
}

/* (address, bytes, n_own) -> whether a live block is at address.  If so, adds an entry to the trace with this text and the
 * current stack without its n_own innermost frames. */
static PyObject *
core_annotate(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address = 0;
    PyObject *text = NULL;
    unsigned n_own = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "KSI", &address, &text, &n_own)) {
        return NULL;
    }
    void *context =
        pya_stack_capture_note(PyBytes_AsString(text), (size_t)PyBytes_Size(text), n_own);
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_history_annotate(heap, address, context);
    Py_END_ALLOW_THREADS
    pya_stack_release(NULL, context);
    return PyBool_FromLong(status == PYA_OK);
}

static PyObject *
core_set_metadata(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *text = NULL;
    if (!PyArg_ParseTuple(args, "S", &text)) {
        return NULL;
    }
    if (!pya_thread_set_metadata(PyBytes_AsString(text), (size_t)PyBytes_Size(text))) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *
core_get_metadata(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    const struct pya_text *text = pya_thread_metadata();
    return text == NULL ? PyUnicode_FromString("")
                        : PyUnicode_DecodeUTF8(text->bytes, (Py_ssize_t)text->n_bytes, "replace");
}

/* {"current", "peak", "allocated", "freed"} */
static PyObject *
stat_dict(const struct pya_stat *stat) {
    return Py_BuildValue(
        "{sLsLsLsL}", "current", (long long)stat->current, "peak", (long long)stat->peak,
        "allocated", (long long)stat->allocated, "freed", (long long)stat->freed);
}

/* [(pool id, users, is active, {"all", "small_pool", "large_pool": reserved bytes})] of a device */
static PyObject *
core_pools(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    struct pya_pool_info *infos = NULL;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "i", &device)) {
        return NULL;
    }
    size_t n_room = 0;
    size_t n = 0;
    Py_BEGIN_ALLOW_THREADS
    n_room = pya_pool_list(heap, device, NULL, 0);
    infos = calloc(n_room + 1, sizeof *infos);
    n = infos == NULL ? 0 : pya_pool_list(heap, device, infos, n_room);
    Py_END_ALLOW_THREADS
    if (infos == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n && i < n_room; i++) {
        const struct pya_stat *bytes = infos[i].reserved_bytes;
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(NnN{sNsNsN})", pool_tuple(infos[i].id), (Py_ssize_t)infos[i].n_users,
                       PyBool_FromLong(infos[i].is_active), "all", stat_dict(&bytes[PYA_STAT_ALL]),
                       "small_pool", stat_dict(&bytes[PYA_STAT_SMALL]), "large_pool",
                       stat_dict(&bytes[PYA_STAT_LARGE])));
    }
    free(infos);
    return list;
}

static PyMethodDef snapshot_methods[] = {
    {"snapshot", core_snapshot, METH_VARARGS, NULL},
    {"history_start", core_history_start, METH_VARARGS, NULL},
    {"history_stop", core_history_stop, METH_NOARGS, NULL},
    {"history_forget", core_history_forget, METH_NOARGS, NULL},
    {"actions", core_actions, METH_NOARGS, NULL},
    {"traceback", core_traceback, METH_VARARGS, NULL},
    {"annotate", core_annotate, METH_VARARGS, NULL},
    {"set_metadata", core_set_metadata, METH_VARARGS, NULL},
    {"get_metadata", core_get_metadata, METH_NOARGS, NULL},
    {"pools", core_pools, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_snapshot_add(PyObject *module) {
    return PyModule_AddFunctions(module, snapshot_methods);
}
