/* Serves plain calls of scaled attention by pyalloc's kernel, and their gradients if autograd recorded the call. */
#include <math.h>
#include <string.h>

#include "module_attention.h"
#include "module_dlpack.h"

bool
pya_rule_is_quiet(const struct rule *r) {
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

bool
pya_rule_is_dense(const struct rule *r, PyObject *x, const struct pya_dlpack_view *view) {
    const bool is_dense = view->strides[3] == 1 || view->shape[3] == 1;
    return is_dense && rule_is_resolved(r, x);
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
        if (!pya_rule_is_dense(r, c->tensors[i], &c->views[i])) {
            return false;
        }
        *heads[i] = view_heads(&c->views[i]);
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

bool
pya_rule_fill(const struct rule *r, const struct rule_args *c, struct pya_ops_attention *a) {
    const long long *q = c->n[0];
    const long long *k = c->n[1];
    *a = (struct pya_ops_attention){
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
    return r->part[RULE_EMPTY] != Py_None && rule_fits(r, c->n) && pya_rule_is_quiet(r) &&
           rule_reads(r, c, a);
}

PyObject *
pya_rule_empty(const struct rule *r, const long long n[RULE_DIMS], struct pya_dlpack_view *view) {
    PyObject *x = PyObject_CallFunction(
        r->part[RULE_EMPTY], "(LLLL)(LLLL)O", n[0], n[1], n[2], n[3], n[1] * n[2] * n[3],
        n[2] * n[3], n[3], 1LL, r->part[RULE_FLOAT]);
    if (x != NULL && r->api->view(x, view) != 0) {
        Py_CLEAR(x);
    }
    return x;
}

/* False with an exception set. */
static bool
rule_load(const struct rule *r, enum rule_part part, rule_kernel **kernel) {
    if (*kernel == NULL) {
        PyObject *address = PyObject_CallNoArgs(r->part[part]);
        void *function = address == NULL ? NULL : PyLong_AsVoidPtr(address);
        Py_XDECREF(address);
        /* ISO C has no cast from an object pointer */
        memcpy(kernel, &function, sizeof function);
    }
    return *kernel != NULL;
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

bool
pya_rule_run(struct rule *r, bool is_backward, struct pya_ops_attention *a) {
    const enum rule_part part = is_backward ? RULE_BACKWARD : RULE_FORWARD;
    rule_kernel **kernel = is_backward ? &r->backward : &r->forward;
    if (!rule_load(r, part, kernel) || !rule_threads(r, a)) {
        return false;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = (*kernel)(a);
    Py_END_ALLOW_THREADS
    return status == 0; /* else out of memory, or arguments that do not fit */
}

/* NULL, with or without an exception.  stats NULL: none are wanted; else *stats is a new reference, if the result is. */
static PyObject *
rule_compute(struct rule *r, struct pya_ops_attention *a, PyObject **stats) {
    const long long of_out[RULE_DIMS] = {a->n_b, a->n_h, a->n_q, a->dim_v};
    const long long of_stats[RULE_DIMS] = {a->n_b, a->n_h, 2, a->n_q};
    struct pya_dlpack_view view = {0};
    PyObject *out = pya_rule_empty(r, of_out, &view);
    if (out == NULL) {
        return NULL;
    }
    a->out = view_heads(&view);
    PyObject *own = NULL;
    bool is_done = true;
    if (stats != NULL) {
        own = pya_rule_empty(r, of_stats, &view);
        is_done = own != NULL;
        a->stats = own != NULL ? view_data(&view) : NULL;
    }
    if (!is_done || !pya_rule_run(r, false, a)) {
        Py_CLEAR(out);
        Py_CLEAR(own);
    }
    if (stats != NULL) {
        *stats = own;
    }
    return out;
}

/* The op takes no others; what gives them four dimensions must be recorded as well. */
static bool
rule_is_of_four(const struct rule_args *c, int i) {
    return c->tensors[i] == Py_None || c->views[i].n_dims == VIEW_DIMS;
}

static PyObject *
rule_record(struct rule *r, const struct rule_args *c, struct pya_ops_attention *a) {
    if (a->n_h % a->n_kv != 0 || !rule_is_of_four(c, RULE_BIAS) || !rule_is_of_four(c, RULE_MASK)) {
        return NULL;
    }
    PyObject *stats = NULL;
    PyObject *out = rule_compute(r, a, &stats);
    if (out == NULL) {
        return NULL;
    }
    PyObject *const *x = c->tensors;
    PyObject *scale = PyFloat_FromDouble(a->scale);
    PyObject *rest = scale == NULL ? NULL : PyTuple_Pack(4, out, stats, c->causal, scale);
    PyObject *recorded = NULL;
    if (rest != NULL) {
        recorded = PyObject_CallFunctionObjArgs(
            r->part[RULE_RECORD], x[0], x[1], x[2], x[RULE_BIAS], x[RULE_MASK], rest, NULL);
    }
    Py_XDECREF(scale);
    Py_XDECREF(rest);
    Py_DECREF(out);
    Py_DECREF(stats);
    return recorded;
}

static bool
rule_asks_gradient(const struct rule *r, const struct rule_args *c) {
    if (!rule_records(r)) {
        return false;
    }
    for (int i = 0; i < RULE_MASK; i++) {
        PyObject *x = c->tensors[i];
        if (x != Py_None && rule_has(x, r->names[RULE_REQUIRES_GRAD], Py_True)) {
            return true;
        }
    }
    return false;
}

PyObject *
pya_rule_by_us(struct rule *r, const struct rule_args *c) {
    struct pya_ops_attention a;
    if (!pya_rule_fill(r, c, &a)) {
        return NULL;
    }
    PyObject *out = rule_asks_gradient(r, c) ? rule_record(r, c, &a) : rule_compute(r, &a, NULL);
    PyObject *logged = out != NULL ? PyObject_CallNoArgs(r->part[RULE_LOG]) : NULL;
    if (logged == NULL) {
        Py_CLEAR(out);
    }
    Py_XDECREF(logged);
    return out;
}
