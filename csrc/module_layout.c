/* Layouts for Python: where requests are to be placed, and computing that (pyalloc/planning.py).
 *
 * Numbers are passed as bytes objects of 64-bit integers, as from array("Q").tobytes(). */
#include "module.h"

#include "replay/placement.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct pya_layout_place) == 3 * sizeof(uint64_t), "as Python packs it");

/* Each layout starts with its device, the number of places in its period, and the number of places. */
enum { LAYOUT_NUMBERS = 3 };

/* Reads the next layout in [*at, end) and advances *at; false if it is truncated. */
static bool
layout_next(const char **at, const char *end, struct pya_layout *out) {
    uint64_t numbers[LAYOUT_NUMBERS];
    if ((size_t)(end - *at) < sizeof numbers) {
        return false;
    }
    memcpy(numbers, *at, sizeof numbers);
    *at += sizeof numbers;
    if (numbers[2] > (size_t)(end - *at) / sizeof *out->places ||
        (numbers[0] != UINT64_MAX && numbers[0] >= PYA_MAX_DEVICES)) {
        return false;
    }
    *out = (struct pya_layout){
        /* A bytes object's contents are aligned, and all numbers before the places have 64 bits. */
        .places = (const void *)*at,
        .n = (size_t)numbers[2],
        .n_period = (size_t)numbers[1],
        .device = numbers[0] == UINT64_MAX ? PYA_LAYOUT_EVERY_DEVICE : (int)numbers[0],
    };
    *at += out->n * sizeof *out->places;
    return true;
}

struct pya_layout *
pya_module_layouts(PyObject *packed) {
    char *bytes;
    Py_ssize_t n_bytes;
    if (PyBytes_AsStringAndSize(packed, &bytes, &n_bytes) != 0) {
        return NULL;
    }
    struct pya_layout *layouts = calloc(PYA_MAX_DEVICES, sizeof *layouts);
    if (layouts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    const char *at = bytes;
    const char *end = bytes + n_bytes;
    size_t n = 0;
    while (n < PYA_MAX_DEVICES && layout_next(&at, end, &layouts[n])) {
        if (n > 0) {
            layouts[n - 1].next = &layouts[n];
        }
        n++;
    }
    if (n == 0 || at != end) {
        pya_module_raise("PlanError", "the plan is cut off");
    } else if (!pya_layouts_are_sound(layouts)) {
        char text[160];
        (void)snprintf(
            text, sizeof text,
            "a plan has at most %d requests below %d KiB and as many larger ones, of sizes and places that can be",
            PYA_LAYOUT_MOST, PYA_REPEAT_FROM >> 10);
        pya_module_raise("PlanError", text);
    } else {
        return layouts;
    }
    free(layouts);
    return NULL;
}

/* ---- computing one ---- */

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
    PyObject *progress;
    char *bytes;
    Py_ssize_t n_bytes;
    unsigned int n_rounds;
    if (!PyArg_ParseTuple(args, "OIO", &packed, &n_rounds, &progress) ||
        PyBytes_AsStringAndSize(packed, &bytes, &n_bytes) != 0) {
        return NULL;
    }
    const size_t n = (size_t)n_bytes / (PLACED_NUMBERS * sizeof(uint64_t));
    struct pya_placement found = {0};
    struct pya_placed *blocks = placed_from(bytes, n);
    uint64_t *offsets = malloc((n + 1) * sizeof *offsets);
    pya_status st = blocks == NULL || offsets == NULL ? PYA_E_HOST_NOMEM : PYA_OK;
    const struct pya_placement_watch watch = {pya_module_progress, progress};
    if (st == PYA_OK) {
        Py_BEGIN_ALLOW_THREADS
        st = pya_placement_find(blocks, n, n_rounds, &watch, &found);
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
    } else if (PyErr_Occurred()) {
        /* raised by the progress function */
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
    struct pya_layout *layouts = pya_module_layouts(packed);
    if (layouts == NULL) {
        return NULL;
    }
    free(layouts);
    Py_RETURN_NONE;
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
