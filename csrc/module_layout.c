/* Layouts for Python: where requests are to lie, and working that out (pyalloc/planning.py).
 *
 * Numbers cross over as bytes objects of 64-bit ones, as array("Q").tobytes() makes them. */
#include "module.h"

#include "replay/placement.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct pya_layout_place) == 3 * sizeof(uint64_t), "as Python packs it");

bool
pya_module_layout(PyObject *packed, struct pya_layout *out) {
    char *bytes;
    Py_ssize_t n;
    if (PyBytes_AsStringAndSize(packed, &bytes, &n) != 0) {
        return false;
    }
    const size_t one = sizeof(struct pya_layout_place);
    uint64_t n_period = 0;
    size_t extent;
    if ((size_t)n < sizeof n_period || ((size_t)n - sizeof n_period) % one != 0) {
        pya_module_raise("PlanError", "a plan was cut off");
        return false;
    }
    memcpy(&n_period, bytes, sizeof n_period);
    /* The bytes of such an object are aligned as it is; its first ones are n_period. */
    out->places = (const void *)(bytes + sizeof n_period);
    out->n = ((size_t)n - sizeof n_period) / one;
    out->n_period = (size_t)n_period;
    if (!pya_layout_measure(out, &extent)) {
        char text[160];
        (void)snprintf(
            text, sizeof text,
            "a plan has at most %d requests below 64 KiB and as many larger ones, of sizes and places that can be",
            PYA_LAYOUT_MOST);
        pya_module_raise("PlanError", text);
        return false;
    }
    return true;
}

/* ---- working one out ---- */

enum { PLACED_NUMBERS = 5 }; /* bytes, begin, end, begin, end */

static struct pya_placed *
placed_from(const char *bytes, size_t n) {
    struct pya_placed *blocks = malloc((n + 1) * sizeof *blocks);
    for (size_t i = 0; blocks != NULL && i < n; i++) {
        uint64_t numbers[PLACED_NUMBERS];
        memcpy(numbers, bytes + i * sizeof numbers, sizeof numbers);
        blocks[i] = (struct pya_placed){
            .bytes = numbers[0],
            .lives = {{numbers[1], numbers[2]}, {numbers[3], numbers[4]}},
        };
    }
    return blocks;
}

static PyObject *
layout_place(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *packed;
    char *bytes;
    Py_ssize_t n_bytes;
    unsigned int n_rounds;
    if (!PyArg_ParseTuple(args, "OI", &packed, &n_rounds) ||
        PyBytes_AsStringAndSize(packed, &bytes, &n_bytes) != 0) {
        return NULL;
    }
    const size_t n = (size_t)n_bytes / (PLACED_NUMBERS * sizeof(uint64_t));
    struct pya_placement found = {0};
    struct pya_placed *blocks = placed_from(bytes, n);
    uint64_t *offsets = malloc((n + 1) * sizeof *offsets);
    pya_status st = blocks == NULL || offsets == NULL ? PYA_E_HOST_NOMEM : PYA_OK;
    if (st == PYA_OK) {
        Py_BEGIN_ALLOW_THREADS
        st = pya_placement_find(blocks, n, n_rounds, &found);
        Py_END_ALLOW_THREADS
    }
    PyObject *result = NULL;
    if (st == PYA_OK) {
        for (size_t i = 0; i < n; i++) {
            offsets[i] = blocks[i].offset;
        }
        result = Py_BuildValue(
            "NKK",
            PyBytes_FromStringAndSize((const char *)offsets, (Py_ssize_t)(n * sizeof *offsets)),
            (unsigned long long)found.live_bytes, (unsigned long long)found.extent_bytes);
    } else if (st == PYA_E_HOST_NOMEM) {
        PyErr_NoMemory();
    } else {
        pya_module_raise("PlanError", pya_status_text(st));
    }
    free(blocks);
    free(offsets);
    return result;
}

static PyObject *
layout_check(PyObject *self, PyObject *packed) {
    (void)self;
    struct pya_layout layout;
    size_t extent = 0;
    if (!pya_module_layout(packed, &layout)) {
        return NULL;
    }
    (void)pya_layout_measure(&layout, &extent);
    return PyLong_FromSize_t(extent);
}

static PyMethodDef methods[] = {
    {"place_blocks", layout_place, METH_VARARGS, NULL},
    {"check_plan", layout_check, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_layout_add(PyObject *module) {
    const bool is_added = PyModule_AddFunctions(module, methods) == 0 &&
                          PyModule_AddIntConstant(module, "PLAN_MOST", PYA_LAYOUT_MOST) == 0 &&
                          PyModule_AddIntConstant(module, "PLAN_FROM", PYA_REPEAT_FROM) == 0;
    return is_added ? 0 : -1;
}
