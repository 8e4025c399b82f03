/* Statistics for Python, flat or nested as in torch.
 *
 * Programs ask in every step, often for a single number (torch.cuda.memory_allocated()), and torch's Python then builds a flat
 * sorted dictionary from the nested one.  So the keys are made once, up front. */
#include "module.h"

#include "core/stats.h"

#include <stdlib.h>
#include <string.h>

/* "a.b.c" is a dictionary in "a" with a dictionary in "b". */
enum { DEPTH_MOST = 3 };

/* The key of the number with the same index.  Names are shared: one object per text, kept for the life of the process. */
struct key {
    PyObject *whole;
    PyObject *names[DEPTH_MOST]; /* the rest is NULL */
    size_t depth;
};

/* Created with the module. */
static struct key keys[PYA_N_STATS];

/* torch's numbers in its order: scalars, then the numbers by pool, then the oversize ones. */
enum { N_OVERSIZE = PYA_N_SINGLE * 4, N_POOLED = PYA_N_POOLED_NUMBERS };
static const enum pya_scalar_stat scalars_in_order[] = {
    PYA_STAT_num_alloc_retries,    PYA_STAT_num_ooms,         PYA_STAT_max_split_size,
    PYA_STAT_num_sync_all_streams, PYA_STAT_num_device_alloc, PYA_STAT_num_device_free,
    PYA_STAT_num_oom_rejections,
};
enum { N_SCALARS = sizeof scalars_in_order / sizeof scalars_in_order[0] };
static size_t in_order[N_SCALARS + N_POOLED + N_OVERSIZE];

static void
order_make(void) {
    static const enum pya_stat_pool pools[] = {PYA_STAT_ALL, PYA_STAT_SMALL, PYA_STAT_LARGE};
    size_t n = 0;
    for (size_t i = 0; i < N_SCALARS; i++) {
        in_order[n++] = N_POOLED + N_OVERSIZE + scalars_in_order[i];
    }
    for (size_t i = 0; i < N_POOLED; i++) {
        const size_t which = i / 4 / PYA_N_STAT_POOLS;
        const size_t pool = pools[i / 4 % PYA_N_STAT_POOLS];
        in_order[n++] = (pool * PYA_N_POOLED + which) * 4 + i % 4;
    }
    for (size_t i = 0; i < N_OVERSIZE; i++) {
        in_order[n++] = N_POOLED + i;
    }
}

static PyObject *
interned(const char *text, size_t bytes) {
    PyObject *name = PyUnicode_FromStringAndSize(text, (Py_ssize_t)bytes);
    if (name != NULL) {
        PyUnicode_InternInPlace(&name);
    }
    return name;
}

static bool
key_name(struct key *key, const char *text) {
    key->depth = 0;
    key->whole = interned(text, strlen(text));
    for (bool is_last = key->whole == NULL; !is_last; key->depth++) {
        const char *dot = key->depth + 1 < DEPTH_MOST ? strchr(text, '.') : NULL;
        const size_t bytes = dot == NULL ? strlen(text) : (size_t)(dot - text);
        key->names[key->depth] = interned(text, bytes);
        is_last = dot == NULL || key->names[key->depth] == NULL;
        text += bytes + 1;
    }
    return key->whole != NULL && key->names[key->depth - 1] != NULL;
}

static bool
keys_make(void) {
    for (size_t i = 0; i < PYA_N_STATS; i++) {
        if (!key_name(&keys[i], pya_stat_key(i))) {
            return false;
        }
    }
    order_make();
    return true;
}

typedef pya_status (*stats_function)(struct pya_heap *heap, int device, int64_t *values);

/* False with an exception set. */
static bool
stats_read(stats_function get, int device, int64_t values[PYA_N_STATS]) {
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL) {
        return false;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = get(heap, device, values);
    Py_END_ALLOW_THREADS
    if (status != PYA_OK) {
        (void)pya_module_result(status, "reading statistics failed", device);
    }
    return status == PYA_OK;
}

/* Steals value, which may be NULL. */
static bool
put(PyObject *dict, PyObject *name, PyObject *value) {
    const bool done = value != NULL && PyDict_SetItem(dict, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

/* {"allocated_bytes.all.current": 512, ...} */
static PyObject *
core_stats(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    int64_t values[PYA_N_STATS];
    if (!PyArg_ParseTuple(args, "i", &device) || !stats_read(pya_stats_get, device, values)) {
        return NULL;
    }
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < PYA_N_STATS; i++) {
        if (!put(dict, keys[i].whole, PyLong_FromLongLong(values[i]))) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* Adds one number.  open[d] is the dictionary at depth d for the key `before`; open[0] is the root. */
static bool
nest(PyObject *open[DEPTH_MOST], const struct key *before, const struct key *key, int64_t value) {
    size_t depth = 0;
    while (depth + 1 < key->depth && before != NULL && before->names[depth] == key->names[depth]) {
        depth++;
    }
    for (; depth + 1 < key->depth; depth++) {
        open[depth + 1] = PyDict_New();
        if (!put(open[depth], key->names[depth], open[depth + 1])) {
            return false;
        }
    }
    return put(open[depth], key->names[depth], PyLong_FromLongLong(value));
}

/* (device, without) -> {"allocated_bytes": {"all": {"current": 512, ...}, ...}, ...}, torch's numbers except `without` */
static PyObject *
core_nested_stats(PyObject *self, PyObject *args) {
    (void)self;
    int device = 0;
    PyObject *without = NULL;
    int64_t values[PYA_N_STATS];
    if (!PyArg_ParseTuple(args, "iO", &device, &without) ||
        !stats_read(pya_stats_get_quickly, device, values)) {
        return NULL;
    }
    PyObject *open[DEPTH_MOST] = {PyDict_New()};
    const struct key *before = NULL;
    for (size_t i = 0; open[0] != NULL && i < sizeof in_order / sizeof in_order[0]; i++) {
        const struct key *key = &keys[in_order[i]];
        const int is_without = key->depth > 1 ? 0 : PySequence_Contains(without, key->whole);
        if (is_without < 0 || (is_without == 0 && !nest(open, before, key, values[in_order[i]]))) {
            Py_CLEAR(open[0]);
        }
        before = is_without == 0 ? key : before;
    }
    return open[0];
}

typedef pya_status (*device_function)(struct pya_heap *heap, int device);

static PyObject *
device_call(PyObject *args, device_function function, const char *what) {
    int device = 0;
    struct pya_heap *heap = pya_module_heap();
    if (heap == NULL || !PyArg_ParseTuple(args, "i", &device)) {
        return NULL;
    }
    pya_status status = PYA_OK;
    Py_BEGIN_ALLOW_THREADS
    status = function(heap, device);
    Py_END_ALLOW_THREADS
    return pya_module_result(status, what, device);
}

static PyObject *
core_reset_peak(PyObject *self, PyObject *args) {
    (void)self;
    return device_call(args, pya_stats_reset_peak, "resetting peaks failed");
}

static PyObject *
core_reset_accumulated(PyObject *self, PyObject *args) {
    (void)self;
    return device_call(args, pya_stats_reset_accumulated, "resetting totals failed");
}

static PyMethodDef stats_methods[] = {
    {"stats", core_stats, METH_VARARGS, NULL},
    {"nested_stats", core_nested_stats, METH_VARARGS, NULL},
    {"reset_peak", core_reset_peak, METH_VARARGS, NULL},
    {"reset_accumulated", core_reset_accumulated, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_stats_add(PyObject *module) {
    return keys_make() ? PyModule_AddFunctions(module, stats_methods) : -1;
}
