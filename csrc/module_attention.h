/* How C serves plain calls of scaled attention: what its parts share.  Floor 8. */
#pragma once

#include <Python.h>
#include <stdbool.h>

#include "module_views.h"

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
    RULE_IS_NEG,
    RULE_LEVEL,
    RULE_NAMES,
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
    RULE_BY_TORCH,    /* what is said of a call that torch's kernel serves: a dict */
    RULE_BY_US,       /* and of one that pyalloc's serves */
    RULE_LOG,         /* (): logs the latter */
    RULE_DUAL,    /* the names of torch.autograd.forward_ad, where a level is -1 without tangents */
    RULE_QUIET,   /* pairs of a function and what it returns if nothing sees or changes calls */
    RULE_EMPTY,   /* (sizes, strides, dtype): a new tensor; None: pyalloc's kernel is not used */
    RULE_THREADS, /* (multiply-adds): how many threads to use */
    RULE_FORWARD, /* (): the address of pyalloc's kernel */
    RULE_BACKWARD,
    /* (q, k, v, bias, mask, (result, statistics, causal, scale)): the result, recorded by autograd */
    RULE_RECORD,
    RULE_PARTS,
};

typedef int rule_kernel(const struct pya_ops_attention *);

struct rule {
    long long one_key_queries, one_key_head; /* see rule_has_one_key */
    /* Less work goes to torch's kernel if pyalloc's is not called from here; what a head and a score take, besides products. */
    long long little_work, work_of_head, work_of_score;
    long long largest_head;
    long long many_products; /* from so many on, RULE_THREADS is asked */
    PyObject *names[RULE_NAMES];
    PyObject *parts; /* the tuple, which owns what `part` borrows */
    PyObject *part[RULE_PARTS];
    const struct pya_dlpack_api *api; /* NULL: use attributes */
    rule_kernel *forward, *backward;  /* NULL: not yet asked for */
};

enum { RULE_DIMS = VIEW_DIMS, RULE_TENSORS = 3, RULE_BIAS = RULE_TENSORS, RULE_MASK, RULE_ALL };

/* The arguments of a call. */
struct rule_args {
    PyObject *const *tensors; /* queries, keys, values, bias and mask; the last two may be None */
    PyObject *causal, *scale; /* a bool, None or a float */
    struct pya_dlpack_view views[RULE_ALL];
    long long n[RULE_TENSORS][RULE_DIMS]; /* of the views */
};

static inline bool
rule_has(PyObject *tensor, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(tensor, name);
    const bool has = found == wanted;
    Py_XDECREF(found);
    return has;
}

static inline bool
rule_says(PyObject *function, PyObject *wanted) {
    PyObject *found = PyObject_CallNoArgs(function);
    const bool says = found == wanted;
    Py_XDECREF(found);
    return says;
}

static inline bool
rule_records(const struct rule *r) {
    return rule_says(r->part[RULE_GRAD_MODE], Py_True);
}

/* The sizes of the queries, keys and values, of which there are views.  False: they are not for C. */
static inline bool
rule_sizes(struct rule_args *c) {
    for (int i = 0; i < RULE_TENSORS; i++) {
        if (!view_sizes(&c->views[i], c->n[i])) {
            return false;
        }
    }
    return true;
}

static inline bool
rule_is_compiled(const struct rule *r) {
    return PyDict_GetItem(r->part[RULE_COMPILER], r->names[RULE_FLAG]) != Py_False;
}

/* A view of a tensor of one of the two classes.  False without an exception: C is shown none, as of what a transform wraps. */
bool pya_rule_view(const struct rule *r, PyObject *x, struct pya_dlpack_view *view);
/* Views of all arguments.  False: C is not shown all of them. */
bool pya_rule_views(const struct rule *r, struct rule_args *c);
/* By pyalloc's kernel.  NULL, with or without an exception: this is not for it, or it failed. */
PyObject *pya_rule_by_us(struct rule *r, const struct rule_args *c);
/* (gradient, (result, statistics, q, k, v, bias, mask), causal, scale, whether the bias's gradient is wanted): the gradients of
 * q, k, v and the bias, or None: they are for Python. */
PyObject *pya_rule_backward(struct rule *r, PyObject *const *args, Py_ssize_t n);

/* ---- what forward and backward share ---- */

/* Does nothing but autograd, if it records, see the call: no tangent, transform, trace, mode or cast? */
bool pya_rule_is_quiet(const struct rule *r);
/* Does the kernel read the tensor as it lies: rows without gaps, and no negation that torch has put off? */
bool pya_rule_is_dense(const struct rule *r, PyObject *x, const struct pya_dlpack_view *view);
/* Sets all that the kernels read of the arguments.  False: they are not for C. */
bool pya_rule_fill(const struct rule *r, const struct rule_args *c, struct pya_ops_attention *a);
/* A new tensor without gaps, and its view; NULL with an exception. */
PyObject *
pya_rule_empty(const struct rule *r, const long long n[RULE_DIMS], struct pya_dlpack_view *view);
/* Loads the kernel, if need be, and runs it.  False, with or without an exception. */
bool pya_rule_run(struct rule *r, bool is_backward, struct pya_ops_attention *a);
