/* Serves the calls of scaled attention that torch's kernel computes faster.  Such a call takes microseconds, and each step in
 * Python, as reading three shapes, a good part of one.  Here shapes are read through DLPack's table of C functions, if torch
 * has it, else by attributes. */
#include <limits.h>
#include <stdlib.h>

#include "module.h"
#include "module_dlpack.h"

static const char rule_capsule[] = "pyalloc.attention_few";

/* Names of attributes and methods of a tensor and its node. */
enum rule_name {
    RULE_SHAPE,
    RULE_STRIDE,
    RULE_DTYPE,
    RULE_IS_CPU,
    RULE_REQUIRES_GRAD,
    RULE_GRAD_FN,
    RULE_HOOKS,
    RULE_REGISTER,
    RULE_SCALE,
    RULE_FLAG,
    RULE_NAMES,
};
static const char *const rule_names[RULE_NAMES] = {
    "shape",           "stride",
    "dtype",           "is_cpu",
    "requires_grad",   "grad_fn",
    "_backward_hooks", "_register_hook_dict",
    "scale",           "_is_compiling_flag",
};

/* What the caller hands over, in the order of the tuple. */
enum rule_part {
    RULE_TENSOR, /* views are taken only of exactly these two classes, not of subclasses */
    RULE_PARAMETER,
    RULE_FLOAT,    /* the only dtype served */
    RULE_COMPILER, /* the names of torch.compiler, where a flag says whether something is compiled */
    RULE_TRANSFORMS,  /* (): does a transform of torch.func look at the calls now made? */
    RULE_GRAD_MODE,   /* (): does autograd record? */
    RULE_SAVED_HOOKS, /* (True): None unless something wants to see what is saved for backward */
    RULE_SDPA,        /* torch's kernel */
    RULE_OFFER,       /* (out, q, k, v): has second derivatives offered for out */
    RULE_FIRST_HOOKS, /* what RULE_OFFER registers where nothing looks at what is saved */
    RULE_PARTS,
};

struct rule {
    /* Fewer queries or keys, or scores than least_scores, go to torch's kernel.  So do fewer than few_scores of which autograd
     * is to know, because a node in Python costs more than one in C++, or with fewer queries than fill a vector. */
    long long few_queries, few_keys, least_scores, few_scores, full_queries, largest_head;
    PyObject *names[RULE_NAMES];
    PyObject *parts; /* the tuple, which owns what `part` borrows */
    PyObject *part[RULE_PARTS];
    const struct pya_dlpack_api *api; /* NULL: use attributes */
};

enum { RULE_DIMS = 4, RULE_TENSORS = 3 };

static void
rule_free(struct rule *r) {
    for (int i = 0; i < RULE_NAMES; i++) {
        Py_XDECREF(r->names[i]);
    }
    Py_XDECREF(r->parts);
    free(r);
}

static void
rule_destroy(PyObject *capsule) {
    rule_free((struct rule *)PyCapsule_GetPointer(capsule, rule_capsule));
}

/* Overlapping windows of a sequence, as from unfold(): torch's kernel returns garbage for such queries. */
static bool
rule_overlaps(long long row, long long lane, long long n_rows, long long dim) {
    return lane == 1 && row > 0 && row < dim && n_rows > 1;
}

/* Steals the tuple.  False, with or without an exception set, unless it holds four ints below limit (a compiler's may not). */
static bool
rule_numbers(PyObject *tuple, long long limit, long long n[RULE_DIMS]) {
    bool is_known = tuple != NULL && PyTuple_Check(tuple) && PyTuple_Size(tuple) == RULE_DIMS;
    for (Py_ssize_t i = 0; is_known && i < RULE_DIMS; i++) {
        n[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        is_known = n[i] >= 0 && n[i] < limit; /* -1: an exception */
    }
    Py_XDECREF(tuple);
    return is_known;
}

static bool
rule_shape(const struct rule *r, PyObject *tensor, long long n[RULE_DIMS]) {
    if (!rule_numbers(PyObject_GetAttr(tensor, r->names[RULE_SHAPE]), INT_MAX, n)) {
        return false;
    }
    for (int i = 0; i < RULE_DIMS; i++) {
        if (n[i] == 0) {
            return false;
        }
    }
    long long step[RULE_DIMS];
    PyObject *stride = PyObject_CallMethodObjArgs(tensor, r->names[RULE_STRIDE], NULL);
    return rule_numbers(stride, LLONG_MAX, step) && !rule_overlaps(step[2], step[3], n[2], n[3]);
}

static bool
rule_has(PyObject *tensor, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(tensor, name);
    const bool has = found == wanted;
    Py_XDECREF(found);
    return has;
}

static bool
rule_says(PyObject *function, PyObject *wanted) {
    PyObject *found = PyObject_CallNoArgs(function);
    const bool says = found == wanted;
    Py_XDECREF(found);
    return says;
}

static bool
rule_asks_gradient(const struct rule *r, PyObject *const *qkv) {
    if (!rule_says(r->part[RULE_GRAD_MODE], Py_True)) {
        return false;
    }
    for (int i = 0; i < RULE_TENSORS; i++) {
        if (rule_has(qkv[i], r->names[RULE_REQUIRES_GRAD], Py_True)) {
            return true;
        }
    }
    return false;
}

/* Empty tensors do not count as few: no kernel has anything to compute. */
static bool
rule_is_few(
    const struct rule *r, PyObject *const *qkv, const long long n[RULE_TENSORS][RULE_DIMS]) {
    const long long *q = n[0];
    const long long *k = n[1];
    const long long *v = n[2];
    if (q[0] != k[0] || q[1] != k[1] || q[3] != k[3] || q[3] > r->largest_head) {
        return false;
    }
    for (int i = 0; i < RULE_DIMS; i++) {
        if (v[i] != k[i]) {
            return false;
        }
    }
    const double scores = (double)(q[0] * q[1]) * (double)q[2] * (double)k[2];
    return q[2] < r->few_queries || k[2] < r->few_keys || scores < (double)r->least_scores ||
           (scores < (double)r->few_scores &&
            (q[2] < r->full_queries || rule_asks_gradient(r, qkv)));
}

static bool
rule_by_attributes(const struct rule *r, PyObject *const *qkv) {
    long long n[RULE_TENSORS][RULE_DIMS];
    if (!rule_says(r->part[RULE_TRANSFORMS], Py_False)) {
        return false;
    }
    for (int i = 0; i < RULE_TENSORS; i++) {
        if (!rule_shape(r, qkv[i], n[i])) {
            return false;
        }
    }
    return rule_has(qkv[0], r->names[RULE_DTYPE], r->part[RULE_FLOAT]) &&
           rule_has(qkv[0], r->names[RULE_IS_CPU], Py_True) && rule_is_few(r, qkv, n);
}

/* False: the rule does not apply, whatever the other tensors are. */
static bool
rule_view(const struct pya_dlpack_view *view, long long n[RULE_DIMS]) {
    if (view->n_dims != RULE_DIMS || view->device_kind != PYA_DLPACK_CPU ||
        view->dtype_kind != PYA_DLPACK_FLOAT || view->dtype_bits != 32) {
        return false;
    }
    for (int i = 0; i < RULE_DIMS; i++) {
        n[i] = view->shape[i];
        if (n[i] <= 0 || n[i] >= INT_MAX) {
            return false;
        }
    }
    return view->strides == NULL || !rule_overlaps(view->strides[2], view->strides[3], n[2], n[3]);
}

/* False with *is_known unset: ask the attributes instead.  What a transform of torch.func wraps has no view. */
static bool
rule_by_views(const struct rule *r, PyObject *const *qkv, bool *is_known) {
    long long n[RULE_TENSORS][RULE_DIMS];
    for (int i = 0; i < RULE_TENSORS; i++) {
        PyObject *type = (PyObject *)Py_TYPE(qkv[i]);
        struct pya_dlpack_view view = {0};
        const bool is_plain = type == r->part[RULE_TENSOR] || type == r->part[RULE_PARAMETER];
        if (!is_plain || r->api->view(qkv[i], &view) != 0) {
            return false;
        }
        if (!rule_view(&view, n[i])) {
            *is_known = true;
            return false;
        }
    }
    *is_known = true;
    return rule_is_few(r, qkv, n);
}

static bool
rule_applies(const struct rule *r, PyObject *const *qkv) {
    bool is_known = false;
    const bool applies = r->api != NULL && rule_by_views(r, qkv, &is_known);
    if (is_known) {
        return applies;
    }
    PyErr_Clear();
    return rule_by_attributes(r, qkv);
}

/* Without options that torch's kernel cannot do, or does wrongly: see scaled_attention(). */
static bool
rule_is_bare(PyObject *const *options) {
    PyObject *bias = options[0];
    PyObject *mask = options[1];
    PyObject *causal = options[2];
    PyObject *scale = options[3];
    PyObject *dropout = options[4];
    PyObject *path = options[5];
    if (bias != Py_None || mask != Py_None || (causal != Py_False && causal != Py_True)) {
        return false;
    }
    if (scale != Py_None &&
        (!PyFloat_Check(scale) || (causal == Py_True && !(PyFloat_AsDouble(scale) > 0)))) {
        return false;
    }
    const bool is_number = PyFloat_Check(dropout) || PyLong_Check(dropout);
    return is_number && PyFloat_AsDouble(dropout) == 0 && PyUnicode_Check(path) &&
           PyUnicode_CompareWithASCIIString(path, "auto") == 0;
}

static bool
rule_is_compiled(const struct rule *r) {
    return PyDict_GetItem(r->part[RULE_COMPILER], r->names[RULE_FLAG]) != Py_False;
}

static PyObject *
rule_compute(const struct rule *r, PyObject *const *qkv, PyObject *causal, PyObject *scale) {
    PyObject *sdpa = r->part[RULE_SDPA];
    if (scale == Py_None && causal == Py_False) {
        return PyObject_CallFunctionObjArgs(sdpa, qkv[0], qkv[1], qkv[2], NULL);
    }
    PyObject *args = Py_BuildValue("OOOOdO", qkv[0], qkv[1], qkv[2], Py_None, 0.0, causal);
    PyObject *named = PyDict_New();
    PyObject *out = NULL;
    if (args != NULL && named != NULL && PyDict_SetItem(named, r->names[RULE_SCALE], scale) == 0) {
        out = PyObject_Call(sdpa, args, named);
    }
    Py_XDECREF(args);
    Py_XDECREF(named);
    return out;
}

/* _second.offer() for a result on the CPU.  Where something looks at what is saved, the function itself is called.  False with an
 * exception set. */
static bool
rule_offer(const struct rule *r, PyObject *out, PyObject *const *qkv) {
    PyObject *saved = PyObject_CallFunctionObjArgs(r->part[RULE_SAVED_HOOKS], Py_True, NULL);
    if (saved == NULL) {
        return false;
    }
    const bool is_watched = saved != Py_None;
    Py_DECREF(saved);
    PyObject *node = NULL;
    PyObject *done = NULL;
    if (is_watched) {
        done = PyObject_CallFunctionObjArgs(r->part[RULE_OFFER], out, qkv[0], qkv[1], qkv[2], NULL);
    } else if (
        (node = PyObject_GetAttr(out, r->names[RULE_GRAD_FN])) != NULL &&
        PyObject_SetAttr(out, r->names[RULE_HOOKS], r->part[RULE_FIRST_HOOKS]) == 0) {
        done = PyObject_CallMethodObjArgs(node, r->names[RULE_REGISTER], out, NULL);
        if (done != NULL && PyObject_SetAttr(out, r->names[RULE_HOOKS], Py_None) != 0) {
            Py_CLEAR(done);
        }
    }
    Py_XDECREF(node);
    Py_XDECREF(done);
    return done != NULL;
}

enum { RULE_OPTIONS = 6 };

/* The result, or None where the rule does not apply or torch's kernel refuses: the caller goes on then, and raises a better
 * error if an argument does not fit. */
static PyObject *
rule_call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const struct rule *r = (const struct rule *)PyCapsule_GetPointer(self, rule_capsule);
    if (r == NULL) {
        return NULL;
    }
    PyObject *const *options = args + RULE_TENSORS;
    const bool applies = n == RULE_TENSORS + RULE_OPTIONS && rule_is_bare(options) &&
                         !rule_is_compiled(r) && rule_applies(r, args);
    PyErr_Clear();
    if (!applies) {
        Py_RETURN_NONE;
    }
    PyObject *out = rule_compute(r, args, options[2], options[3]);
    PyObject *asks = out == NULL ? NULL : PyObject_GetAttr(out, r->names[RULE_REQUIRES_GRAD]);
    if (out != NULL && (asks == NULL || (asks == Py_True && !rule_offer(r, out, args)))) {
        Py_CLEAR(out);
    }
    Py_XDECREF(asks);
    if (out == NULL && (PyErr_ExceptionMatches(PyExc_RuntimeError) ||
                        PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return out;
}

static PyMethodDef rule_method = {
    "attention_few", (PyCFunction)(void (*)(void))rule_call, METH_FASTCALL,
    "(q, k, v, bias, mask, causal, scale, dropout, path): what torch's kernel computes, or None"};

static bool
rule_fill(struct rule *r, PyObject *parts) {
    if (PyTuple_Size(parts) != RULE_PARTS) { /* -1: no tuple */
        PyErr_SetString(PyExc_TypeError, "a tuple of the parts that the rule calls");
        return false;
    }
    r->parts = Py_NewRef(parts);
    for (int i = 0; i < RULE_PARTS; i++) {
        r->part[i] = PyTuple_GetItem(parts, i);
    }
    if (!PyDict_Check(r->part[RULE_COMPILER])) {
        PyErr_SetString(PyExc_TypeError, "torch.compiler's names are no dict");
        return false;
    }
    for (int i = 0; i < RULE_NAMES; i++) {
        r->names[i] = PyUnicode_InternFromString(rule_names[i]);
        if (r->names[i] == NULL) {
            return false;
        }
    }
    r->api = pya_module_dlpack(r->part[RULE_TENSOR]);
    return true;
}

static PyObject *
core_attention_few(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *parts = NULL;
    PyObject *capsule = NULL;
    struct rule *r = (struct rule *)calloc(1, sizeof *r);
    if (r == NULL) {
        return PyErr_NoMemory();
    }
    if (PyArg_ParseTuple(
            args, "O(LLLLLL)", &parts, &r->few_queries, &r->few_keys, &r->least_scores,
            &r->few_scores, &r->full_queries, &r->largest_head) &&
        rule_fill(r, parts)) {
        capsule = PyCapsule_New(r, rule_capsule, rule_destroy);
    }
    if (capsule == NULL) {
        rule_free(r);
        return NULL;
    }
    PyObject *function = PyCFunction_New(&rule_method, capsule);
    Py_DECREF(capsule); /* the function holds it; if there is none, this frees it */
    return function;
}

static PyMethodDef attention_methods[] = {
    {"attention_few", core_attention_few, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_attention_add(PyObject *module) {
    return PyModule_AddFunctions(module, attention_methods);
}
