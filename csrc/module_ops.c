/* The per-call work of the ops in C: through ctypes and tensor attributes it would take microseconds. */
#include <stdlib.h>
#include <string.h>

#include "module.h"
#include "module_dlpack.h"

/* ---- a key that describes a tensor, for caches of what was made for such tensors ---- */

static const char key_capsule[] = "pyalloc.tensor_key";

struct key_maker {
    PyObject *types[2]; /* only tensors of exactly these classes have keys, not of subclasses */
    PyObject *is_neg;   /* the method's name */
    const struct pya_dlpack_api *api; /* NULL: no tensor has a key */
};

enum { KEY_TENSORS = 10, KEY_DIMS = 8, KEY_HEAD = 4, KEY_NUMBERS = KEY_HEAD + 2 * KEY_DIMS };

static void
key_free(struct key_maker *maker) {
    Py_XDECREF(maker->types[0]);
    Py_XDECREF(maker->types[1]);
    Py_XDECREF(maker->is_neg);
    free(maker);
}

static void
key_destroy(PyObject *capsule) {
    key_free((struct key_maker *)PyCapsule_GetPointer(capsule, key_capsule));
}

/* Writes dtype, device, sizes and strides; returns how many numbers.  0, with or without an exception set: no key.  Tensors
 * without elements, or with a lazy negation, have none. */
static size_t
key_write(const struct key_maker *maker, PyObject *tensor, int64_t *out) {
    struct pya_dlpack_view view = {0};
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if ((type != maker->types[0] && type != maker->types[1]) ||
        maker->api->view(tensor, &view) != 0 || view.data == NULL || view.strides == NULL ||
        view.n_dims > KEY_DIMS) {
        return 0;
    }
    PyObject *is_neg = PyObject_CallMethodObjArgs(tensor, maker->is_neg, NULL);
    Py_XDECREF(is_neg);
    if (is_neg != Py_False) {
        return 0;
    }
    const size_t n = (size_t)view.n_dims;
    out[0] = view.n_dims;
    out[1] = view.dtype_kind * 256 + view.dtype_bits;
    out[2] = view.device_kind;
    out[3] = view.device_index;
    memcpy(out + KEY_HEAD, view.shape, n * sizeof *out);
    memcpy(out + KEY_HEAD + n, view.strides, n * sizeof *out);
    return KEY_HEAD + 2 * n;
}

static PyObject *
key_call(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    const struct key_maker *maker =
        (const struct key_maker *)PyCapsule_GetPointer(self, key_capsule);
    int64_t numbers[KEY_TENSORS * KEY_NUMBERS];
    size_t n = 0;
    if (maker == NULL) {
        return NULL;
    }
    bool is_known = maker->api != NULL && n_args <= KEY_TENSORS;
    for (Py_ssize_t i = 0; is_known && i < n_args; i++) {
        if (args[i] == Py_None) {
            numbers[n++] = -1;
            continue;
        }
        const size_t more = key_write(maker, args[i], numbers + n);
        is_known = more > 0;
        n += more;
    }
    if (!is_known) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)numbers, (Py_ssize_t)(n * sizeof numbers[0]));
}

static PyMethodDef key_method = {
    "tensor_key", (PyCFunction)(void (*)(void))key_call, METH_FASTCALL,
    "(*tensors or None): bytes that are equal for tensors alike in all but their numbers, or None"};

static PyObject *
core_tensor_key(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *types[2] = {NULL, NULL};
    if (!PyArg_ParseTuple(args, "OO", &types[0], &types[1])) {
        return NULL;
    }
    struct key_maker *maker = (struct key_maker *)calloc(1, sizeof *maker);
    if (maker == NULL) {
        return PyErr_NoMemory();
    }
    maker->types[0] = Py_NewRef(types[0]);
    maker->types[1] = Py_NewRef(types[1]);
    maker->is_neg = PyUnicode_InternFromString("is_neg");
    maker->api = pya_module_dlpack(types[0]);
    PyObject *capsule =
        maker->is_neg == NULL ? NULL : PyCapsule_New(maker, key_capsule, key_destroy);
    if (capsule == NULL) {
        key_free(maker);
        return NULL;
    }
    PyObject *function = PyCFunction_New(&key_method, capsule);
    Py_DECREF(capsule); /* the function holds it; if there is none, this frees it */
    return function;
}

/* ---- a call of the ops' library ---- */

enum { CALL_BYTES = 1024, CALL_ARGS = 4 };

static PyObject *data_ptr; /* the method's name; made with the module */

typedef int (*call_function)(const void *args);
typedef int (*call_launcher)(const void *args, const void *target);

/* Writes the tensors' data pointers, and arguments that are numbers; false with an exception set. */
static bool
call_fill(
    unsigned char *structure, size_t size, const uint16_t *places, PyObject *const *tensors,
    size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (tensors[i] == Py_None) {
            continue;
        }
        PyObject *number = PyLong_Check(tensors[i])
                               ? Py_NewRef(tensors[i])
                               : PyObject_CallMethodObjArgs(tensors[i], data_ptr, NULL);
        void *pointer = number == NULL ? NULL : PyLong_AsVoidPtr(number);
        Py_XDECREF(number);
        if (pointer == NULL && PyErr_Occurred() != NULL) {
            return false;
        }
        if (places[i] + sizeof pointer > size) {
            PyErr_SetString(PyExc_ValueError, "a place beyond the structure");
            return false;
        }
        memcpy(structure + places[i], &pointer, sizeof pointer);
    }
    return true;
}

/* (function's address, structure, offsets of the pointers in it, target or None, *tensors, numbers or None) -> what the
 * function returns */
static PyObject *
core_op_call(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    _Alignas(16) unsigned char structure[CALL_BYTES];
    char *given = NULL;
    char *places = NULL;
    char *target = NULL;
    Py_ssize_t size = 0;
    Py_ssize_t places_size = 0;
    if (n_args < CALL_ARGS) {
        PyErr_SetString(PyExc_TypeError, "function, structure, places, target and tensors");
        return NULL;
    }
    const size_t n = (size_t)(n_args - CALL_ARGS);
    void *function = PyLong_AsVoidPtr(args[0]);
    if (function == NULL || PyBytes_AsStringAndSize(args[1], &given, &size) != 0 ||
        PyBytes_AsStringAndSize(args[2], &places, &places_size) != 0 ||
        (args[3] != Py_None && (target = PyBytes_AsString(args[3])) == NULL)) {
        return NULL;
    }
    if ((size_t)size > sizeof structure || (size_t)places_size != n * sizeof(uint16_t)) {
        PyErr_SetString(PyExc_ValueError, "the structure is too large, or a tensor has no place");
        return NULL;
    }
    memcpy(structure, given, (size_t)size);
    if (!call_fill(
            structure, (size_t)size, (const uint16_t *)(const void *)places, args + CALL_ARGS, n)) {
        return NULL;
    }
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    if (target == NULL) {
        call_function call;
        memcpy(&call, &function, sizeof call); /* ISO C has no cast from an object pointer */
        status = call(structure);
    } else {
        call_launcher launch;
        memcpy(&launch, &function, sizeof launch);
        status = launch(structure, target);
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyMethodDef ops_methods[] = {
    {"tensor_key", core_tensor_key, METH_VARARGS, NULL},
    {"op_call", (PyCFunction)(void (*)(void))core_op_call, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_ops_add(PyObject *module) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    return data_ptr == NULL ? -1 : PyModule_AddFunctions(module, ops_methods);
}
