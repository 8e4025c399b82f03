/* pyalloc._core: limits of a device or a pool, and memory reserved up front.  Sizes are checked by pyalloc/limits.py. */
#include "module.h"

#include "torch_bridge.h"

static size_t
in_mib(size_t bytes) {
    return bytes >> 20;
}

/* Raises an error with what was requested and, if the device tells, what is free. */
static PyObject *
reserve_refused(struct pya_heap *heap, int device, unsigned long long bytes) {
    struct pya_memory_info info;
    char text[512] = "";
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_memory_info(heap, device, &info);
    Py_END_ALLOW_THREADS
    int n = PyOS_snprintf(
        text, sizeof text, "cannot reserve %zu MiB on device %d; nothing was changed",
        in_mib((size_t)bytes), device);
    if (status == PYA_OK) {
        n += PyOS_snprintf(
            text + n, sizeof text - (size_t)n,
            ". Of its %zu MiB, %zu are free and %zu are cached here", in_mib(info.total_bytes),
            in_mib(info.free_bytes), in_mib(info.cached_bytes));
    }
    if (status == PYA_OK && info.limit_bytes < info.total_bytes) {
        n += PyOS_snprintf(
            text + n, sizeof text - (size_t)n, "; the limit is %zu", in_mib(info.limit_bytes));
    }
    PyOS_snprintf(
        text + n, sizeof text - (size_t)n,
        ". Reserve less, or raise the limit (pyalloc.set_limit())");
    return pya_module_raise("AllocatorError", text);
}

static PyObject *
limits_reserve(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    unsigned long long bytes = 0;
    unsigned long long stream = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "iKK", &device, &bytes, &stream)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_reserve(heap, device, (size_t)bytes, stream);
    pya_torch_note_handle(stream, device);
    Py_END_ALLOW_THREADS
    if (status == PYA_E_NOMEM || status == PYA_E_TOO_LARGE) {
        return reserve_refused(heap, device, bytes);
    }
    return pya_module_result(status, "reserving memory failed", device);
}

static PyObject *
limits_set(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    int soft = 0;
    unsigned long long bytes = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "ipK", &device, &soft, &bytes)) {
        return NULL;
    }
    const enum pya_limit_kind kind = soft ? PYA_LIMIT_SOFT : PYA_LIMIT_HARD;
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_set_limit(heap, device, kind, (size_t)bytes);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, "setting a limit failed", device);
}

static PyObject *
limits_get(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    int soft = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "ip", &device, &soft)) {
        return NULL;
    }
    const enum pya_limit_kind kind = soft ? PYA_LIMIT_SOFT : PYA_LIMIT_HARD;
    size_t bytes = 0;
    Py_BEGIN_ALLOW_THREADS
    bytes = pya_get_limit(heap, device, kind);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(bytes);
}

static PyObject *
limits_set_pool(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    unsigned long long first = 0;
    unsigned long long second = 0;
    unsigned long long bytes = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "i(KK)K", &device, &first, &second, &bytes)) {
        return NULL;
    }
    const struct pya_pool_id id = {first, second};
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = pya_pool_set_limit(heap, device, id, (size_t)bytes);
    Py_END_ALLOW_THREADS
    if (status == PYA_E_INVAL) {
        return pya_module_raise(
            "AllocatorError",
            "this pool is not in use on this device: allocate from it (torch.cuda.use_mem_pool) before "
            "setting its limit");
    }
    return pya_module_result(status, "setting the limit of a pool failed", device);
}

static PyMethodDef limits_methods[] = {
    {"reserve", limits_reserve, METH_VARARGS, NULL},
    {"set_limit", limits_set, METH_VARARGS, NULL},
    {"get_limit", limits_get, METH_VARARGS, NULL},
    {"pool_set_limit", limits_set_pool, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_limits_add(PyObject *module) {
    return PyModule_AddFunctions(module, limits_methods);
}
