/* The torch bridge for Python: what pyalloc.install() calls. */
#include "module.h"

#include "module_aside.h"
#include "torch_bridge.h"

/* The callbacks are kept in Python.  Memory may be freed while an exception is set. */
static void
trace_memory(bool is_allocation, uint64_t address) {
    if (!Py_IsInitialized()) {
        return;
    }
    const char *name = is_allocation ? "MemoryAllocationCallbacks" : "MemoryDeallocationCallbacks";
    struct pya_aside aside = pya_aside_begin();
    PyObject *module = PyImport_ImportModule("torch.cuda._gpu_trace");
    PyObject *registry = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    PyObject *done =
        registry == NULL
            ? NULL
            : PyObject_CallMethod(registry, "fire_callbacks", "K", (unsigned long long)address);
    if (done == NULL) {
        PyErr_WriteUnraisable(NULL);
    }
    Py_XDECREF(done);
    Py_XDECREF(registry);
    Py_XDECREF(module);
    pya_aside_end(aside);
}

/* Directs torch's calls to the heap; returns {setter of CUDAPluggableAllocator: address}. */
static PyObject *
core_torch_attach(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL) {
        return NULL;
    }
    pya_torch_attach(heap);
    pya_torch_find_symbols();
    pya_torch_set_tracer(trace_memory);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && pya_torch_hook_setter(i) != NULL; i++) {
        PyObject *address = PyLong_FromSize_t(pya_torch_hook_address(i));
        if (address == NULL || PyDict_SetItemString(dict, pya_torch_hook_setter(i), address) != 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(address);
    }
    return dict;
}

static PyObject *
core_torch_detach(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyBool_FromLong(pya_torch_restore_allocator());
}

static PyObject *
core_torch_take_slots(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pya_torch_take_slots();
    Py_RETURN_NONE;
}

static PyObject *
core_torch_has_slots(PyObject *self, PyObject *args) {
    (void)self;
    const char *feature = NULL;
    if (!PyArg_ParseTuple(args, "s", &feature)) {
        return NULL;
    }
    return PyBool_FromLong(pya_torch_has_slots(feature));
}

static PyObject *
flag_call(PyObject *args, void (*function)(bool flag)) {
    int flag = 0;
    if (!PyArg_ParseTuple(args, "p", &flag)) {
        return NULL;
    }
    function(flag != 0);
    Py_RETURN_NONE;
}

static PyObject *
core_torch_ask(PyObject *self, PyObject *args) {
    (void)self;
    return flag_call(args, pya_torch_ask);
}

static PyObject *
core_torch_hold_history(PyObject *self, PyObject *args) {
    (void)self;
    return flag_call(args, pya_torch_hold_history);
}

static PyObject *
core_torch_set_cached(PyObject *self, PyObject *args) {
    (void)self;
    return flag_call(args, pya_torch_set_cached);
}

/* [(feature, works, detail)] */
static PyObject *
core_torch_features(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyObject *list = PyList_New(0);
    const char *name = NULL;
    const char *detail = NULL;
    bool works = false;
    for (size_t i = 0; list != NULL && pya_torch_feature(i, &name, &works, &detail); i++) {
        pya_module_list_add(
            &list, Py_BuildValue("(sOs)", name, works ? Py_True : Py_False, detail));
    }
    return list;
}

static PyObject *
core_torch_initialized(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyBool_FromLong(pya_torch_is_initialized());
}

static PyMethodDef torch_methods[] = {
    {"torch_attach", core_torch_attach, METH_NOARGS, NULL},
    {"torch_detach", core_torch_detach, METH_NOARGS, NULL},
    {"torch_take_slots", core_torch_take_slots, METH_NOARGS, NULL},
    {"torch_has_slots", core_torch_has_slots, METH_VARARGS, NULL},
    {"torch_ask", core_torch_ask, METH_VARARGS, NULL},
    {"torch_hold_history", core_torch_hold_history, METH_VARARGS, NULL},
    {"torch_set_cached", core_torch_set_cached, METH_VARARGS, NULL},
    {"torch_features", core_torch_features, METH_NOARGS, NULL},
    {"torch_initialized", core_torch_initialized, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_torch_add(PyObject *module) {
    return PyModule_AddFunctions(module, torch_methods);
}
