/* Replay for Python: _core.Program, a trace that can be replayed on native, expandable or pyalloc itself. */
#include "module.h"

#include "module_alone.h"
#include "replay/replay.h"

#include <stdlib.h>
#include <string.h>

struct program_object {
    PyObject ob_base;
    struct pya_program *program;
    unsigned n_running; /* replays running without the GIL: the program must not change */
};

static const char *const cost_names[PYA_SIM_N_COSTS] = {
    [PYA_SIM_TYPICAL] = "typical", [PYA_SIM_LOW] = "low", [PYA_SIM_HIGH] = "high"};

static struct pya_program *
program_from(PyObject *self) {
    return ((struct program_object *)self)->program;
}

static PyObject *
replay_raise(pya_status status) {
    if (PyErr_Occurred()) {
        return NULL; /* raised by the progress function */
    }
    if (status == PYA_E_LIMIT) {
        return pya_module_raise("TraceError", pya_program_limits());
    }
    return status == PYA_E_HOST_NOMEM ? PyErr_NoMemory()
                                      : pya_module_raise("TraceError", pya_status_text(status));
}

/* ---- creating one ---- */

bool
pya_module_progress(void *arg, uint64_t n_done, uint64_t n_all) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *answer =
        PyObject_CallFunction(arg, "KK", (unsigned long long)n_done, (unsigned long long)n_all);
    const bool going = answer != NULL && PyErr_CheckSignals() == 0;
    Py_XDECREF(answer);
    PyGILState_Release(state);
    return going;
}

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "progress", NULL};
    PyObject *path = Py_None;
    PyObject *progress = Py_None;
    PyObject *bytes = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$O", names, &path, &progress) ||
        (path != Py_None && PyUnicode_FSConverter(path, &bytes) == 0)) {
        return NULL;
    }
    struct pya_program *program = NULL;
    char message[PYA_MODULE_PATH_TEXT] = "";
    pya_status status = PYA_OK;
    const char *name = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    const struct pya_program_watch watch = {pya_module_progress, progress};
    const struct pya_program_watch *watched = progress == Py_None ? NULL : &watch;
    Py_BEGIN_ALLOW_THREADS
    status = name == NULL ? pya_program_create(&program)
                          : pya_program_load(name, watched, &program, message, sizeof message);
    Py_END_ALLOW_THREADS
    Py_XDECREF(bytes);
    if (PyErr_Occurred()) {
        return NULL; /* raised by the progress function */
    }
    if (status != PYA_OK) {
        return status == PYA_E_HOST_NOMEM ? PyErr_NoMemory()
                                          : pya_module_raise("TraceError", message);
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        pya_program_destroy(program);
        return NULL;
    }
    ((struct program_object *)self)->program = program;
    return self;
}

static void
program_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    pya_program_destroy(program_from(self));
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *
program_add(PyObject *self, PyObject *args, PyObject *kwargs) {
    PYA_ALONE_WITH(self);
    struct pya_trace_event event;
    if (!pya_module_parse_event(args, kwargs, &event)) {
        return NULL;
    }
    if (((struct program_object *)self)->n_running > 0) {
        PyErr_SetString(PyExc_RuntimeError, "the program is being replayed by another thread");
        return NULL;
    }
    pya_status status = pya_program_add(program_from(self), &event);
    if (status != PYA_OK) {
        return replay_raise(status);
    }
    Py_RETURN_NONE;
}

static PyObject *
program_info(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    struct pya_program_info info;
    pya_program_query(program_from(self), &info);
    return Py_BuildValue(
        "{sKsKsKsKsKsKsKsKsIsIsKsKsKsNsO}", "n_ops", (unsigned long long)info.n_ops, "n_allocs",
        (unsigned long long)info.n_allocs, "n_events", (unsigned long long)info.n_events,
        "n_ignored_frees", (unsigned long long)info.n_ignored_frees, "n_missing_frees",
        (unsigned long long)info.n_missing_frees, "n_ooms", (unsigned long long)info.n_ooms,
        "n_streams", (unsigned long long)info.n_asked_streams, "n_record_streams",
        (unsigned long long)info.n_record_streams, "n_devices", info.n_devices, "n_pools",
        info.n_pools, "n_blocks", (unsigned long long)info.n_blocks, "peak_live_bytes",
        (unsigned long long)info.peak_live_bytes, "device_live_bytes",
        (unsigned long long)info.device_live_bytes, "device_peak",
        pya_module_by_index(info.device_peak, PYA_MAX_DEVICES), "is_complete",
        info.is_complete ? Py_True : Py_False);
}

static PyObject *
program_notes(PyObject *self, PyObject *unused) {
    (void)unused;
    PYA_ALONE_WITH(self);
    size_t n = 0;
    char *const *notes = pya_program_notes(program_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++) {
        pya_module_list_add(
            &list, PyUnicode_DecodeUTF8(notes[i], (Py_ssize_t)strlen(notes[i]), "replace"));
    }
    return list;
}

/* ---- replaying ---- */

static bool
replay_choose_policy(const char *name, struct pya_replay_settings *out) {
    for (int i = 0; i < PYA_REPLAY_N_POLICIES; i++) {
        if (strcmp(name, pya_replay_policy_name((enum pya_replay_policy)i)) == 0) {
            out->policy = (enum pya_replay_policy)i;
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "no policy named %s; policies() lists them", name);
    return false;
}

static bool
replay_choose_cost(const char *name, struct pya_replay_settings *out) {
    for (int i = 0; i < PYA_SIM_N_COSTS; i++) {
        if (strcmp(name, cost_names[i]) == 0) {
            out->cost = (enum pya_sim_cost)i;
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "cost is typical, low or high, not %s", name);
    return false;
}

/* False with an exception set.  Otherwise the caller frees *layouts, which is NULL without a plan. */
static bool
replay_settings(
    PyObject *args, PyObject *kwargs, struct pya_replay_settings *out,
    struct pya_layout **layouts) {
    static char *names[] = {"policy",   "capacity", "cost", "options", "check",
                            "progress", "passes",   "plan", NULL};
    const char *policy = NULL;
    const char *cost = "typical";
    const char *options = "";
    unsigned long long capacity = 0;
    int check = 0;
    PyObject *progress = Py_None;
    PyObject *plan = Py_None;
    unsigned int passes = 1;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "s|$KsspOIO", names, &policy, &capacity, &cost, &options, &check,
            &progress, &passes, &plan)) {
        return false;
    }
    *out = (struct pya_replay_settings){
        .capacity_bytes = (size_t)capacity,
        .check = check != 0,
        .n_passes = passes,
        .progress = progress == Py_None ? NULL : pya_module_progress,
        .progress_arg = progress, /* borrowed: the caller's arguments outlive the call */
    };
    pya_options_init(&out->options);
    char message[256];
    if (pya_options_parse(&out->options, options, message, sizeof message) != PYA_OK) {
        pya_module_raise("ConfigError", message);
        return false;
    }
    if (!replay_choose_policy(policy, out) || !replay_choose_cost(cost, out)) {
        return false;
    }
    *layouts =
        plan == Py_None ? NULL : pya_module_layouts(plan); /* points into plan, borrowed too */
    out->options.layouts = *layouts;
    return plan == Py_None || *layouts != NULL;
}

static PyObject *
replay_calls_by_kind(const struct pya_replay_result *result) {
    PyObject *calls = PyDict_New();
    for (int i = 0; calls != NULL && i < PYA_SIM_N_CALLS; i++) {
        if (!pya_sim_calls[i].is_memory || result->n_calls_by_kind[i] == 0) {
            continue;
        }
        PyObject *n = PyLong_FromUnsignedLongLong(result->n_calls_by_kind[i]);
        const bool put = n != NULL && PyDict_SetItemString(calls, pya_sim_calls[i].name, n) == 0;
        Py_XDECREF(n);
        if (!put) {
            Py_DECREF(calls);
            return NULL;
        }
    }
    return calls;
}

static PyObject *
program_replay(PyObject *self, PyObject *args, PyObject *kwargs) {
    PYA_ALONE_WITH(self);
    struct pya_replay_settings settings;
    struct pya_layout *layouts;
    struct pya_replay_result result;
    if (!replay_settings(args, kwargs, &settings, &layouts)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    struct program_object *program = (struct program_object *)self;
    program->n_running++;
    Py_BEGIN_ALLOW_THREADS
    status = pya_replay_run(program_from(self), &settings, &result);
    Py_END_ALLOW_THREADS
    free(layouts);
    program->n_running--;
    if (status != PYA_OK) {
        return replay_raise(status);
    }
    PyObject *calls = replay_calls_by_kind(&result);
    if (calls == NULL) {
        return NULL;
    }
    return Py_BuildValue(
        "{sOsKsKsKsKsKsKsKsKsKsKsNsK}", "completed", result.completed ? Py_True : Py_False,
        "failed_op", (unsigned long long)result.failed_op, "failed_bytes",
        (unsigned long long)result.failed_bytes, "peak_bytes",
        (unsigned long long)result.peak_bytes, "end_bytes", (unsigned long long)result.end_bytes,
        "n_calls", (unsigned long long)result.n_calls, "n_calls_second_half",
        (unsigned long long)result.n_calls_second_half, "device_ns",
        (unsigned long long)result.device_ns, "device_ns_second_half",
        (unsigned long long)result.device_ns_second_half, "n_calls_last_pass",
        (unsigned long long)result.n_calls_last_pass, "device_ns_last_pass",
        (unsigned long long)result.device_ns_last_pass, "n_calls_by_kind", calls, "n_violations",
        (unsigned long long)result.n_violations);
}

static PyObject *
program_find_min(PyObject *self, PyObject *args, PyObject *kwargs) {
    PYA_ALONE_WITH(self);
    struct pya_replay_settings settings;
    struct pya_layout *layouts;
    struct pya_replay_min min;
    if (!replay_settings(args, kwargs, &settings, &layouts)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    struct program_object *program = (struct program_object *)self;
    program->n_running++;
    Py_BEGIN_ALLOW_THREADS
    status = pya_replay_find_min(program_from(self), &settings, &min);
    Py_END_ALLOW_THREADS
    free(layouts);
    program->n_running--;
    if (status == PYA_E_NOMEM) {
        Py_RETURN_NONE;
    }
    if (status != PYA_OK) {
        return replay_raise(status);
    }
    PyObject *holes = PyList_New(0);
    for (unsigned i = 0; holes != NULL && i < min.n_holes; i++) {
        pya_module_list_add(&holes, PyLong_FromUnsignedLongLong(min.holes[i]));
    }
    if (holes == NULL) {
        return NULL;
    }
    return Py_BuildValue(
        "{sKsKsNsI}", "bytes", (unsigned long long)min.bytes, "safe_bytes",
        (unsigned long long)min.safe_bytes, "holes", holes, "n_replays", min.n_replays);
}

static PyMethodDef program_methods[] = {
    {"add", (PyCFunction)(void (*)(void))program_add, METH_VARARGS | METH_KEYWORDS, NULL},
    {"info", program_info, METH_NOARGS, NULL},
    {"notes", program_notes, METH_NOARGS, NULL},
    {"replay", (PyCFunction)(void (*)(void))program_replay, METH_VARARGS | METH_KEYWORDS, NULL},
    {"find_min", (PyCFunction)(void (*)(void))program_find_min, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot program_slots[] = {
    {Py_tp_new, program_new},
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_methods, program_methods},
    {0, NULL},
};

static PyType_Spec program_spec = {
    .name = "pyalloc._core.Program",
    .basicsize = sizeof(struct program_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = program_slots,
};

/* ---- tables ---- */

PyObject *
pya_module_by_index(const uint64_t *numbers, size_t n) {
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < n; i++) {
        PyObject *key = numbers[i] == 0 ? NULL : PyLong_FromSize_t(i);
        PyObject *value = numbers[i] == 0 ? NULL : PyLong_FromUnsignedLongLong(numbers[i]);
        if (numbers[i] != 0 &&
            (key == NULL || value == NULL || PyDict_SetItem(dict, key, value) != 0)) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
replay_policies(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    PyObject *list = PyList_New(0);
#define X(name, text, help) pya_module_list_add(&list, Py_BuildValue("(ss)", text, help));
    PYA_REPLAY_POLICY_TABLE(X)
#undef X
    return list;
}

static PyMethodDef replay_functions[] = {
    {"replay_policies", replay_policies, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_replay_add(PyObject *module) {
    return PyModule_AddFunctions(module, replay_functions) != 0
               ? -1
               : pya_module_add_type(module, "Program", &program_spec);
}
