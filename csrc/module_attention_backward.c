/* The gradients of plain calls of scaled attention that autograd recorded, by pyalloc's kernel. */
#include <string.h>

#include "module_attention.h"

/* The tensors saved for backward, in order. */
enum { SAVED_OUT, SAVED_STATS, SAVED_INPUTS, SAVED_ALL = SAVED_INPUTS + RULE_ALL };
enum { ARG_GRAD, ARG_SAVED, ARG_CAUSAL, ARG_SCALE, ARG_NEEDS_BIAS, ARGS };
enum { GRADIENTS = RULE_TENSORS + 1 };

/* Has a tensor these sizes, and does the kernel read it as it lies? */
static bool
backward_reads(
    const struct rule *r, PyObject *x, const long long n[RULE_DIMS], struct pya_dlpack_view *view) {
    long long own[RULE_DIMS];
    return pya_rule_view(r, x, view) && view_sizes(view, own) && memcmp(own, n, sizeof own) == 0 &&
           pya_rule_is_dense(r, x, view);
}

/* Sets what the kernel reads besides the inputs: the result, its statistics and its gradient. */
static bool
backward_reads_results(
    const struct rule *r, PyObject *grad, PyObject *const *saved, struct pya_ops_attention *a) {
    const long long of_out[RULE_DIMS] = {a->n_b, a->n_h, a->n_q, a->dim_v};
    const long long of_stats[RULE_DIMS] = {a->n_b, a->n_h, 2, a->n_q};
    struct pya_dlpack_view view = {0};
    if (!backward_reads(r, grad, of_out, &view)) {
        return false;
    }
    a->grad = view_heads(&view);
    if (!backward_reads(r, saved[SAVED_OUT], of_out, &view)) {
        return false;
    }
    a->out = view_heads(&view);
    if (!backward_reads(r, saved[SAVED_STATS], of_stats, &view)) {
        return false;
    }
    a->stats = view_data(&view);
    const int64_t *step = view.strides;
    return step[2] == a->n_q && step[1] == 2 * a->n_q && step[0] == 2 * a->n_q * a->n_h;
}

/* The gradient of the bias: of its own size.  The kernel adds to what scores share, and skips what causal hides. */
static PyObject *
backward_bias(
    const struct rule *r, const struct pya_dlpack_view *bias, struct pya_ops_attention *a) {
    const long long scores[RULE_DIMS] = {a->n_b, a->n_h, a->n_q, a->n_k};
    long long n[RULE_DIMS];
    long long all = 1;
    a->d_bias_add = a->causal;
    for (int i = 0; i < RULE_DIMS; i++) {
        n[i] = bias->shape[i];
        all *= n[i];
        a->d_bias_add |= n[i] == 1; /* looks shared, even if there is only one score */
    }
    struct pya_dlpack_view view = {0};
    PyObject *x = pya_rule_empty(r, n, &view);
    if (x != NULL && a->d_bias_add) {
        memset(view_data(&view), 0, (size_t)all * sizeof(float));
    }
    if (x != NULL && !view_scores(&view, scores, &a->d_bias)) {
        Py_CLEAR(x);
    }
    return x;
}

/* NULL, with or without an exception. */
static PyObject *
backward_compute(
    struct rule *r, const struct rule_args *c, struct pya_ops_attention *a, bool needs_bias) {
    struct pya_ops_heads *const heads[RULE_TENSORS] = {&a->d_q, &a->d_k, &a->d_v};
    PyObject *x[GRADIENTS] = {NULL};
    PyObject *found = NULL;
    bool is_made = true;
    for (int i = 0; is_made && i < RULE_TENSORS; i++) {
        struct pya_dlpack_view view = {0};
        x[i] = pya_rule_empty(r, c->n[i], &view);
        is_made = x[i] != NULL;
        *heads[i] = is_made ? view_heads(&view) : *heads[i];
    }
    if (is_made && needs_bias) {
        x[RULE_BIAS] = backward_bias(r, &c->views[RULE_BIAS], a);
        is_made = x[RULE_BIAS] != NULL;
    }
    if (is_made && pya_rule_run(r, true, a)) {
        found = PyTuple_Pack(
            GRADIENTS, x[0], x[1], x[2], x[RULE_BIAS] != NULL ? x[RULE_BIAS] : Py_None);
    }
    for (int i = 0; i < GRADIENTS; i++) {
        Py_XDECREF(x[i]);
    }
    return found;
}

/* NULL, with or without an exception: the gradients are for Python. */
static PyObject *
backward_serve(struct rule *r, PyObject *const *args, PyObject *const *saved) {
    struct rule_args c = {
        .tensors = saved + SAVED_INPUTS, .causal = args[ARG_CAUSAL], .scale = args[ARG_SCALE]};
    const bool needs_bias = args[ARG_NEEDS_BIAS] == Py_True;
    struct pya_ops_attention a;
    if (rule_is_compiled(r) || rule_records(r) || !pya_rule_views(r, &c) || !rule_sizes(&c) ||
        !pya_rule_fill(r, &c, &a) || !backward_reads_results(r, args[ARG_GRAD], saved, &a)) {
        return NULL;
    }
    if (needs_bias && c.views[RULE_BIAS].n_dims != RULE_DIMS) {
        return NULL; /* there is none, or a hook gave another */
    }
    return backward_compute(r, &c, &a, needs_bias);
}

PyObject *
pya_rule_backward(struct rule *r, PyObject *const *args, Py_ssize_t n) {
    PyObject *found = NULL;
    if (n == ARGS && PyTuple_Check(args[ARG_SAVED]) && PyTuple_Size(args[ARG_SAVED]) == SAVED_ALL &&
        PyFloat_Check(args[ARG_SCALE])) {
        PyObject *saved[SAVED_ALL];
        for (int i = 0; i < SAVED_ALL; i++) {
            saved[i] = PyTuple_GetItem(args[ARG_SAVED], i);
        }
        found = backward_serve(r, args, saved);
    }
    if (found == NULL && PyErr_Occurred() == NULL) {
        Py_RETURN_NONE;
    }
    return found;
}
