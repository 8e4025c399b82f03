/* Decides which calls of scaled attention torch's kernel serves faster.  Such a call takes microseconds, and reading three
 * shapes from Python takes one of them.  Here that costs a third by attributes, and next to nothing through DLPack's
 * table of C functions, if torch has it. */
#include <limits.h>
#include <stdlib.h>

#include "module.h"
#include "module_dlpack.h"

static const char rule_capsule[] = "pyalloc.attention_rule";

/* The limits, the attribute names to read from a tensor, and the only dtype accepted. */
struct rule {
    long long few_scores, few_queries, few_keys, largest_head;
    PyObject *shape, *stride, *dtype, *is_cpu, *wanted;
    PyObject *types[2]; /* views are taken only of exactly these classes, not of subclasses */
    const struct pya_dlpack_api *api; /* NULL: use attributes */
};

enum { RULE_DIMS = 4, RULE_TENSORS = 3 };

static void
rule_free(struct rule *r) {
    Py_XDECREF(r->shape);
    Py_XDECREF(r->stride);
    Py_XDECREF(r->dtype);
    Py_XDECREF(r->is_cpu);
    Py_XDECREF(r->wanted);
    Py_XDECREF(r->types[0]);
    Py_XDECREF(r->types[1]);
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
    if (!rule_numbers(PyObject_GetAttr(tensor, r->shape), INT_MAX, n)) {
        return false;
    }
    for (int i = 0; i < RULE_DIMS; i++) {
        if (n[i] == 0) {
            return false;
        }
    }
    long long step[RULE_DIMS];
    return rule_numbers(PyObject_CallMethodObjArgs(tensor, r->stride, NULL), LLONG_MAX, step) &&
           !rule_overlaps(step[2], step[3], n[2], n[3]);
}

static bool
rule_has(PyObject *tensor, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(tensor, name);
    const bool has = found == wanted;
    Py_XDECREF(found);
    return has;
}

/* Empty tensors do not count as few: no kernel has anything to compute. */
static bool
rule_is_few(const struct rule *r, const long long *q, const long long *k, const long long *v) {
    const bool is_few = q[2] < r->few_queries || k[2] < r->few_keys ||
                        (double)(q[0] * q[1]) * (double)q[2] * (double)k[2] < (double)r->few_scores;
    if (!is_few || q[0] != k[0] || q[1] != k[1] || q[3] != k[3] || q[3] > r->largest_head) {
        return false;
    }
    for (int i = 0; i < RULE_DIMS; i++) {
        if (v[i] != k[i]) {
            return false;
        }
    }
    return true;
}

static bool
rule_by_attributes(const struct rule *r, PyObject *const *qkv) {
    long long n[RULE_TENSORS][RULE_DIMS];
    for (int i = 0; i < RULE_TENSORS; i++) {
        if (!rule_shape(r, qkv[i], n[i])) {
            return false;
        }
    }
    return rule_is_few(r, n[0], n[1], n[2]) && rule_has(qkv[0], r->dtype, r->wanted) &&
           rule_has(qkv[0], r->is_cpu, Py_True);
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

/* False with *is_known unset: ask the attributes instead. */
static bool
rule_by_views(const struct rule *r, PyObject *const *qkv, bool *is_known) {
    long long n[RULE_TENSORS][RULE_DIMS];
    for (int i = 0; i < RULE_TENSORS; i++) {
        PyObject *type = (PyObject *)Py_TYPE(qkv[i]);
        struct pya_dlpack_view view = {0};
        if ((type != r->types[0] && type != r->types[1]) || r->api->view(qkv[i], &view) != 0) {
            return false;
        }
        if (!rule_view(&view, n[i])) {
            *is_known = true;
            return false;
        }
    }
    *is_known = true;
    return rule_is_few(r, n[0], n[1], n[2]);
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

static PyObject *
rule_call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const struct rule *r = (const struct rule *)PyCapsule_GetPointer(self, rule_capsule);
    if (r == NULL) {
        return NULL;
    }
    const bool applies = n == RULE_TENSORS && rule_applies(r, args);
    PyErr_Clear(); /* if an argument is no tensor, the code that needs one raises a better error */
    return PyBool_FromLong(applies);
}

static PyMethodDef rule_method = {
    "attention_rule", (PyCFunction)(void (*)(void))rule_call, METH_FASTCALL,
    "(q, k, v): whether torch's kernel serves the call faster"};

static PyObject *
core_attention_rule(PyObject *self, PyObject *args) {
    (void)self;
    struct rule *r = (struct rule *)calloc(1, sizeof *r);
    if (r == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *capsule = NULL;
    if (!PyArg_ParseTuple(
            args, "(OO)OLLLL", &r->types[0], &r->types[1], &r->wanted, &r->few_scores,
            &r->few_queries, &r->few_keys, &r->largest_head)) {
        r->types[0] = r->types[1] = r->wanted = NULL; /* borrowed so far */
        goto free_rule;
    }
    Py_INCREF(r->types[0]);
    Py_INCREF(r->types[1]);
    Py_INCREF(r->wanted);
    r->api = pya_module_dlpack(r->types[0]);
    r->shape = PyUnicode_InternFromString("shape");
    r->stride = PyUnicode_InternFromString("stride");
    r->dtype = PyUnicode_InternFromString("dtype");
    r->is_cpu = PyUnicode_InternFromString("is_cpu");
    if (r->shape == NULL || r->stride == NULL || r->dtype == NULL || r->is_cpu == NULL) {
        goto free_rule;
    }
    capsule = PyCapsule_New(r, rule_capsule, rule_destroy);
    if (capsule == NULL) {
        goto free_rule;
    }
    PyObject *function = PyCFunction_New(&rule_method, capsule);
    Py_DECREF(capsule); /* the function holds it; if there is none, this frees it */
    return function;

free_rule:
    rule_free(r);
    return NULL;
}

static PyMethodDef attention_methods[] = {
    {"attention_rule", core_attention_rule, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_attention_add(PyObject *module) {
    return PyModule_AddFunctions(module, attention_methods);
}
