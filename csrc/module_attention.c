/* Serves the plain calls of scaled attention: by pyalloc's kernel if nothing but the call itself and autograd see the result,
 * or by torch's where that is the faster one.  Such a call may take microseconds, and each step in Python, as reading three shapes, a
 * good part of one.  Here shapes are read through DLPack's table of C functions, if torch has it, else by attributes. */
#include <stdlib.h>

#include "module.h"
#include "module_attention.h"

static const char rule_capsule[] = "pyalloc.attention_plain";

static const char *const rule_names[RULE_NAMES] = {
    "shape",           "stride",
    "dtype",           "is_cpu",
    "requires_grad",   "grad_fn",
    "_backward_hooks", "_register_hook_dict",
    "scale",           "_is_compiling_flag",
    "is_neg",          "_current_level",
};

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

/* Some queries of a single key and wide heads are faster in torch's. */
static bool
rule_has_one_key(const struct rule *r, const long long n[RULE_TENSORS][RULE_DIMS]) {
    return n[1][2] == 1 && n[0][2] >= r->one_key_queries && n[0][3] >= r->one_key_head;
}

/* Is torch's kernel the faster one if ours is not called from here?  Not of empty tensors: no kernel has anything to compute. */
static bool
rule_is_little(const struct rule *r, const long long n[RULE_TENSORS][RULE_DIMS]) {
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
    const double score = (double)(q[3] + r->work_of_score);
    const double head = (double)r->work_of_head + (double)q[2] * (double)k[2] * score;
    return rule_has_one_key(r, n) || (double)(q[0] * q[1]) * head < (double)r->little_work;
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
           rule_has(qkv[0], r->names[RULE_IS_CPU], Py_True) && rule_is_little(r, n);
}

bool
pya_rule_view(const struct rule *r, PyObject *x, struct pya_dlpack_view *view) {
    PyObject *type = (PyObject *)Py_TYPE(x);
    if (type != r->part[RULE_TENSOR] && type != r->part[RULE_PARAMETER]) {
        return false;
    }
    if (r->api->view(x, view) != 0) {
        PyErr_Clear();
        return false;
    }
    return true;
}

bool
pya_rule_views(const struct rule *r, struct rule_args *c) {
    for (int i = 0; r->api != NULL && i < RULE_ALL; i++) {
        PyObject *x = c->tensors[i];
        const bool is_none = i >= RULE_TENSORS && x == Py_None;
        if (!is_none && !pya_rule_view(r, x, &c->views[i])) {
            return false;
        }
    }
    return r->api != NULL;
}

/* ---- torch's kernel ---- */

static bool
rule_is_little_of_views(const struct rule *r, const struct rule_args *c) {
    for (int i = 0; i < RULE_TENSORS; i++) {
        const int64_t *step = c->views[i].strides;
        if (rule_overlaps(step[2], step[3], c->n[i][2], c->n[i][3])) {
            return false;
        }
    }
    return rule_is_little(r, c->n);
}

/* Is it no call for torch's kernel, which is not given biases and masks, and scales what causal hides by -inf? */
static bool
rule_is_refused(const struct rule_args *c) {
    const bool is_turned =
        c->causal == Py_True && c->scale != Py_None && !(PyFloat_AsDouble(c->scale) > 0);
    return c->tensors[RULE_BIAS] != Py_None || c->tensors[RULE_MASK] != Py_None || is_turned;
}

static PyObject *
rule_compute(const struct rule *r, const struct rule_args *c) {
    PyObject *sdpa = r->part[RULE_SDPA];
    PyObject *const *qkv = c->tensors;
    if (c->scale == Py_None && c->causal == Py_False) {
        return PyObject_CallFunctionObjArgs(sdpa, qkv[0], qkv[1], qkv[2], NULL);
    }
    PyObject *args = Py_BuildValue("OOOOdO", qkv[0], qkv[1], qkv[2], Py_None, 0.0, c->causal);
    PyObject *named = PyDict_New();
    PyObject *out = NULL;
    if (args != NULL && named != NULL &&
        PyDict_SetItem(named, r->names[RULE_SCALE], c->scale) == 0) {
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

static PyObject *
rule_by_torch(const struct rule *r, const struct rule_args *c) {
    PyObject *out = rule_compute(r, c);
    PyObject *asks = out == NULL ? NULL : PyObject_GetAttr(out, r->names[RULE_REQUIRES_GRAD]);
    if (out != NULL && (asks == NULL || (asks == Py_True && !rule_offer(r, out, c->tensors)))) {
        Py_CLEAR(out);
    }
    Py_XDECREF(asks);
    return out;
}

/* ---- the call ---- */

/* Is it without options that only the general way has?  See scaled_attention(). */
static bool
rule_is_plain(const struct rule_args *c, PyObject *dropout, PyObject *path) {
    if ((c->causal != Py_False && c->causal != Py_True) ||
        (c->scale != Py_None && !PyFloat_Check(c->scale))) {
        return false;
    }
    const bool is_number = PyFloat_Check(dropout) || PyLong_Check(dropout);
    return is_number && PyFloat_AsDouble(dropout) == 0 && PyUnicode_Check(path) &&
           PyUnicode_CompareWithASCIIString(path, "auto") == 0;
}

/* NULL, with or without an exception: neither kernel serves the call.  *info is what is said of the one that does. */
static PyObject *
rule_serve(struct rule *r, struct rule_args *c, PyObject **info) {
    const bool has_views = pya_rule_views(r, c);
    if (has_views && !rule_sizes(c)) {
        return NULL;
    }
    const bool is_refused = rule_is_refused(c);
    *info = r->part[RULE_BY_US];
    PyObject *out = NULL;
    if (has_views && (is_refused || !rule_has_one_key(r, c->n))) {
        out = pya_rule_by_us(r, c);
    }
    if (out != NULL || PyErr_Occurred() != NULL || is_refused) {
        return out;
    }
    *info = r->part[RULE_BY_TORCH];
    const bool is_torchs =
        has_views ? rule_is_little_of_views(r, c) : rule_by_attributes(r, c->tensors);
    PyErr_Clear();
    return is_torchs ? rule_by_torch(r, c) : NULL;
}

/* Steals out. */
static PyObject *
rule_with_info(PyObject *out, PyObject *info) {
    PyObject *own = PyDict_Copy(info);
    PyObject *pair = own == NULL ? NULL : PyTuple_Pack(2, out, own);
    Py_DECREF(out);
    Py_XDECREF(own);
    return pair;
}

enum { RULE_OPTIONS = 5 };

/* The result, with what is said of it if that is asked for, or None where the rule does not apply or a kernel refuses: the
 * caller goes on then, and raises a better error if an argument does not fit. */
static PyObject *
rule_call(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct rule *r = (struct rule *)PyCapsule_GetPointer(self, rule_capsule);
    if (r == NULL) {
        return NULL;
    }
    if (n != RULE_ALL + RULE_OPTIONS) {
        Py_RETURN_NONE;
    }
    PyObject *const *options = args + RULE_ALL;
    struct rule_args c = {.tensors = args, .causal = options[0], .scale = options[1]};
    PyObject *info = NULL;
    PyObject *out = NULL;
    if (rule_is_plain(&c, options[2], options[3]) && !rule_is_compiled(r)) {
        out = rule_serve(r, &c, &info);
    }
    if (out != NULL) {
        return options[4] == Py_True ? rule_with_info(out, info) : out;
    }
    if (PyErr_Occurred() == NULL || PyErr_ExceptionMatches(PyExc_RuntimeError) ||
        PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return NULL;
}

static PyObject *
rule_backward(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct rule *r = (struct rule *)PyCapsule_GetPointer(self, rule_capsule);
    return r == NULL ? NULL : pya_rule_backward(r, args, n);
}

static PyMethodDef rule_methods[] = {
    {"attention_plain", (PyCFunction)(void (*)(void))rule_call, METH_FASTCALL,
     "(q, k, v, bias, mask, causal, scale, dropout, path, return_info): the result, or None"},
    {"attention_plain_backward", (PyCFunction)(void (*)(void))rule_backward, METH_FASTCALL,
     "(gradient, saved tensors, causal, scale, needs_bias): four gradients, or None"},
};

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
    if (!PyDict_Check(r->part[RULE_COMPILER]) || !PyDict_Check(r->part[RULE_DUAL])) {
        PyErr_SetString(PyExc_TypeError, "a module's names are no dict");
        return false;
    }
    PyObject *quiet = r->part[RULE_QUIET];
    bool is_quiet = PyTuple_Check(quiet);
    for (Py_ssize_t i = 0; is_quiet && i < PyTuple_Size(quiet); i++) {
        is_quiet = PyTuple_Size(PyTuple_GetItem(quiet, i)) == 2;
    }
    if (!is_quiet) {
        PyErr_SetString(PyExc_TypeError, "pairs of a function and what it returns");
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
core_attention_plain(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *parts = NULL;
    PyObject *capsule = NULL;
    struct rule *r = (struct rule *)calloc(1, sizeof *r);
    if (r == NULL) {
        return PyErr_NoMemory();
    }
    if (PyArg_ParseTuple(
            args, "O(LLLLLLL)", &parts, &r->one_key_queries, &r->one_key_head, &r->little_work,
            &r->work_of_head, &r->work_of_score, &r->largest_head, &r->many_products) &&
        rule_fill(r, parts)) {
        capsule = PyCapsule_New(r, rule_capsule, rule_destroy);
    }
    if (capsule == NULL) {
        rule_free(r);
        return NULL;
    }
    PyObject *serve = PyCFunction_New(&rule_methods[0], capsule);
    PyObject *backward = PyCFunction_New(&rule_methods[1], capsule);
    PyObject *both = serve == NULL || backward == NULL ? NULL : PyTuple_Pack(2, serve, backward);
    Py_XDECREF(serve);
    Py_XDECREF(backward);
    Py_DECREF(capsule); /* the functions hold it; if there are none, this frees it */
    return both;
}

static PyMethodDef attention_methods[] = {
    {"attention_plain", core_attention_plain, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_attention_add(PyObject *module) {
    return PyModule_AddFunctions(module, attention_methods);
}
