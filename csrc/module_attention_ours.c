/* Serves plain calls of scaled attention by pyalloc's kernel: called from here, or as an op that autograd records. */
#include <math.h>
#include <string.h>

#include "module_attention.h"
#include "module_dlpack.h"

/* Does nothing but autograd, if it records, see the result: no tangent, transform, trace, mode or cast? */
static bool
rule_is_quiet(const struct rule *r) {
    PyObject *quiet = r->part[RULE_QUIET];
    PyObject *level = PyDict_GetItem(r->part[RULE_DUAL], r->names[RULE_LEVEL]);
    bool is_quiet = level != NULL && PyLong_AsLong(level) == -1;
    for (Py_ssize_t i = 0; is_quiet && i < PyTuple_Size(quiet); i++) {
        PyObject *pair = PyTuple_GetItem(quiet, i);
        is_quiet = rule_says(PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
    }
    return is_quiet;
}

/* Are its numbers those in memory? */
static bool
rule_is_resolved(const struct rule *r, PyObject *tensor) {
    PyObject *is_neg = PyObject_CallMethodObjArgs(tensor, r->names[RULE_IS_NEG], NULL);
    Py_XDECREF(is_neg);
    return is_neg == Py_False;
}

/* The rest, as whether the heads are a multiple of those of k, the kernel checks. */
static bool
rule_fits(const struct rule *r, const long long n[RULE_TENSORS][RULE_DIMS]) {
    const long long *q = n[0];
    const long long *k = n[1];
    const long long *v = n[2];
    return q[0] == k[0] && q[3] == k[3] && q[3] <= r->largest_head && v[0] == k[0] &&
           v[1] == k[1] && v[2] == k[2] && v[3] <= r->largest_head;
}

/* Do the kernels read all tensors as they lie?  Sets what they read. */
static bool
rule_reads(const struct rule *r, const struct rule_args *c, struct pya_ops_attention *a) {
    struct pya_ops_heads *const heads[RULE_TENSORS] = {&a->q, &a->k, &a->v};
    for (int i = 0; i < RULE_TENSORS; i++) {
        const struct pya_dlpack_view *view = &c->views[i];
        const bool is_dense = view->strides[3] == 1 || view->shape[3] == 1;
        if (!is_dense || !rule_is_resolved(r, c->tensors[i])) {
            return false;
        }
        *heads[i] = view_heads(view);
    }
    const long long scores[RULE_DIMS] = {a->n_b, a->n_h, a->n_q, a->n_k};
    PyObject *bias = c->tensors[RULE_BIAS];
    if (bias != Py_None &&
        !(view_is_on_cpu(&c->views[RULE_BIAS], PYA_DLPACK_FLOAT, 32) &&
          view_scores(&c->views[RULE_BIAS], scores, &a->bias) && rule_is_resolved(r, bias))) {
        return false;
    }
    return c->tensors[RULE_MASK] == Py_None ||
           (view_is_on_cpu(&c->views[RULE_MASK], PYA_DLPACK_BOOL, 8) &&
            view_scores(&c->views[RULE_MASK], scores, &a->mask));
}

/* False with an exception set. */
static bool
rule_threads(const struct rule *r, struct pya_ops_attention *a) {
    const double products = (double)(a->n_b * a->n_h * a->n_q) * (double)a->n_k * (double)a->dim;
    a->n_threads = 1;
    if (products >= (double)r->many_products) {
        const long long n = products < 1e18 ? (long long)products : LLONG_MAX;
        PyObject *many = PyObject_CallFunction(r->part[RULE_THREADS], "L", n);
        a->n_threads = many == NULL ? -1 : (int32_t)PyLong_AsLong(many);
        Py_XDECREF(many);
    }
    return a->n_threads > 0;
}

/* False with an exception set. */
static bool
rule_load(struct rule *r) {
    if (r->kernel == NULL) {
        PyObject *address = PyObject_CallNoArgs(r->part[RULE_KERNEL]);
        void *function = address == NULL ? NULL : PyLong_AsVoidPtr(address);
        Py_XDECREF(address);
        /* ISO C has no cast from an object pointer */
        memcpy(&r->kernel, &function, sizeof function);
    }
    return r->kernel != NULL;
}

static PyObject *
rule_empty(const struct rule *r, const struct pya_ops_attention *a) {
    const long long b = a->n_b;
    const long long h = a->n_h;
    const long long q = a->n_q;
    const long long v = a->dim_v;
    return PyObject_CallFunction(
        r->part[RULE_EMPTY], "(LLLL)(LLLL)O", b, h, q, v, h * q * v, q * v, v, 1LL,
        r->part[RULE_FLOAT]);
}

/* NULL, with or without an exception set: out of memory, or arguments that do not fit. */
static PyObject *
rule_compute(struct rule *r, struct pya_ops_attention *a) {
    struct pya_dlpack_view view = {0};
    PyObject *out = rule_load(r) && rule_threads(r, a) ? rule_empty(r, a) : NULL;
    if (out == NULL || r->api->view(out, &view) != 0) {
        Py_XDECREF(out);
        return NULL;
    }
    a->out = view_heads(&view);
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = r->kernel(a);
    Py_END_ALLOW_THREADS
    if (status != 0) {
        Py_CLEAR(out);
    }
    return out;
}

/* The op takes no others; what gives them four dimensions must be recorded as well. */
static bool
rule_is_of_four(const struct rule_args *c, int i) {
    return c->tensors[i] == Py_None || c->views[i].n_dims == VIEW_DIMS;
}

static PyObject *
rule_record(const struct rule *r, const struct rule_args *c, const struct pya_ops_attention *a) {
    if (a->n_h % a->n_kv != 0 || !rule_is_of_four(c, RULE_BIAS) || !rule_is_of_four(c, RULE_MASK)) {
        return NULL;
    }
    PyObject *const *x = c->tensors;
    PyObject *scale = PyFloat_FromDouble(a->scale);
    PyObject *dropout = PyFloat_FromDouble(0);
    PyObject *out = NULL;
    if (scale != NULL && dropout != NULL) {
        out = PyObject_CallFunctionObjArgs(
            r->part[RULE_RECORD], x[0], x[1], x[2], x[RULE_BIAS], x[RULE_MASK], c->causal, scale,
            dropout, Py_None, NULL);
    }
    Py_XDECREF(scale);
    Py_XDECREF(dropout);
    return out;
}

PyObject *
pya_rule_by_us(struct rule *r, const struct rule_args *c) {
    const long long *q = c->n[0];
    const long long *k = c->n[1];
    struct pya_ops_attention a = {
        .n_b = q[0],
        .n_h = q[1],
        .n_kv = k[1],
        .n_q = q[2],
        .n_k = k[2],
        .dim = q[3],
        .dim_v = c->n[2][3],
        .scale = c->scale == Py_None ? 1 / sqrt((double)q[3]) : PyFloat_AsDouble(c->scale),
        .causal = c->causal == Py_True,
        .dtype = PYA_OPS_F32,
    };
    if (r->part[RULE_EMPTY] == Py_None || !rule_fits(r, c->n) || !rule_is_quiet(r) ||
        !rule_reads(r, c, &a)) {
        return NULL;
    }
    PyObject *out = rule_asks_gradient(r, c) ? rule_record(r, c, &a) : rule_compute(r, &a);
    PyObject *logged = out != NULL ? PyObject_CallNoArgs(r->part[RULE_LOG]) : NULL;
    if (logged == NULL) {
        Py_CLEAR(out);
    }
    Py_XDECREF(logged);
    return out;
}
