/* The moments of a pass over a trace, for Python: rows of live blocks, and the condensed forms that plots need of millions. */
#include "module_scan.h"

#include <stdlib.h>
#include <string.h>

typedef unsigned long long ull;

/* ---- blocks: there may be millions, so a row holds exactly the fields of pyalloc.traces.moments.Block ---- */

enum { BLOCK_FIELDS = 16 };

/* Texts already used by rows, one shared object each; NULL: not yet made. */
struct block_texts {
    const struct pya_scan *scan;
    PyObject **plain;
    PyObject **modules; /* names without the "module:" prefix */
    size_t n;
};

static size_t
highest_text(const struct pya_scan_block *b, size_t n) {
    uint32_t highest = 0;
    for (size_t i = 0; i < n; i++, b++) {
        const uint32_t texts[] = {b->category, b->phase, b->module, b->free_phase, b->label};
        for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
            highest = texts[k] > highest ? texts[k] : highest;
        }
    }
    return highest;
}

/* A new reference; NULL with an exception set. */
static PyObject *
block_text(struct block_texts *texts, uint32_t text) {
    if (texts->plain[text] == NULL) {
        texts->plain[text] = pya_module_scan_text(texts->scan, text);
    }
    return Py_XNewRef(texts->plain[text]);
}

static PyObject *
block_module(struct block_texts *texts, uint32_t text) {
    const size_t prefix = sizeof PYA_SCAN_MODULE - 1;
    if (texts->modules[text] == NULL) {
        const char *name = pya_trace_text(pya_scan_reader(texts->scan), text);
        const bool is_module = name != NULL && strncmp(name, PYA_SCAN_MODULE, prefix) == 0;
        texts->modules[text] =
            is_module
                ? PyUnicode_DecodeUTF8(name + prefix, (Py_ssize_t)strlen(name + prefix), "replace")
                : block_text(texts, text);
    }
    return Py_XNewRef(texts->modules[text]);
}

static PyObject *
block_row(struct block_texts *texts, const struct pya_scan_block *b, uint64_t bytes) {
    PyObject *fields[BLOCK_FIELDS] = {
        PyLong_FromUnsignedLongLong(b->addr),
        PyLong_FromUnsignedLongLong(bytes),
        PyLong_FromUnsignedLongLong(b->stream),
        PyLong_FromUnsignedLongLong(b->alloc_event),
        pya_module_scan_event(b->free_event),
        PyLong_FromUnsignedLong(b->stack),
        block_text(texts, b->category),
        block_text(texts, b->phase),
        block_module(texts, b->module),
        b->step == 0 ? PyLong_FromLong(-1) : PyLong_FromUnsignedLongLong(b->step - 1),
        block_text(texts, b->free_phase),
        PyLong_FromLong(b->device),
        block_text(texts, b->label),
        PyLong_FromUnsignedLong(b->pool),
        pya_module_scan_event(b->n_between),
        PyLong_FromUnsignedLongLong(b->thread),
    };
    PyObject *row = PyTuple_New(BLOCK_FIELDS);
    for (Py_ssize_t i = 0; i < BLOCK_FIELDS; i++) {
        if (row == NULL || fields[i] == NULL) {
            Py_XDECREF(fields[i]);
            Py_CLEAR(row);
        } else if (PyTuple_SetItem(row, i, fields[i]) != 0) { /* steals the field even on failure */
            Py_CLEAR(row);
        }
    }
    return row;
}

static void
texts_fini(struct block_texts *texts) {
    for (size_t i = 0; texts->plain != NULL && texts->modules != NULL && i < texts->n; i++) {
        Py_XDECREF(texts->plain[i]);
        Py_XDECREF(texts->modules[i]);
    }
    free(texts->plain);
    free(texts->modules);
}

/* Prepares the texts for rows of these blocks.  False with an exception set; then do not call fini. */
static bool
texts_init(
    struct block_texts *texts, const struct pya_scan *scan, const struct pya_scan_block *b,
    size_t n) {
    *texts = (struct block_texts){.scan = scan, .n = highest_text(b, n) + 1};
    texts->plain = calloc(texts->n, sizeof(PyObject *));
    texts->modules = calloc(texts->n, sizeof(PyObject *));
    if (texts->plain == NULL || texts->modules == NULL) {
        texts_fini(texts);
        PyErr_NoMemory();
        return false;
    }
    return true;
}

/* Rows of the live blocks, or of the pending ones. */
static PyObject *
block_rows(
    const struct pya_scan *scan, const struct pya_scan_block *b, size_t n, bool as_requested,
    bool pending) {
    struct block_texts texts;
    if (!texts_init(&texts, scan, b, n)) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, b++) {
        const uint64_t bytes = as_requested ? b->bytes : pya_round_up(b->bytes, PYA_ALIGN);
        if (b->is_pending == pending) {
            pya_module_list_add(&list, block_row(&texts, b, bytes));
        }
    }
    texts_fini(&texts);
    return list;
}

/* NULL with an exception set if there are not that many moments. */
static const struct pya_scan_moment *
moment_of(PyObject *self, unsigned number) {
    size_t n = 0;
    const struct pya_scan_moment *moments = pya_scan_moments(pya_module_scan_from(self), &n);
    if (number >= n) {
        PyErr_SetString(PyExc_IndexError, "no such moment");
        return NULL;
    }
    return &moments[number];
}

PyObject *
pya_module_scan_blocks(PyObject *self, PyObject *args) {
    unsigned number = 0;
    int as_requested = 0;
    if (!PyArg_ParseTuple(args, "I|p", &number, &as_requested)) {
        return NULL;
    }
    const struct pya_scan_moment *moment = moment_of(self, number);
    return moment == NULL ? NULL
                          : block_rows(
                                pya_module_scan_from(self), moment->blocks, moment->n_blocks,
                                as_requested != 0, false);
}

PyObject *
pya_module_scan_pending(PyObject *self, PyObject *args) {
    unsigned number = 0;
    if (!PyArg_ParseTuple(args, "I", &number)) {
        return NULL;
    }
    const struct pya_scan_moment *moment = moment_of(self, number);
    return moment == NULL
               ? NULL
               : block_rows(
                     pya_module_scan_from(self), moment->blocks, moment->n_blocks, false, true);
}

static PyObject *
moment_segments(const struct pya_scan_moment *moment) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < moment->n_segments; i++) {
        const struct pya_scan_segment *g = &moment->segments[i];
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKiO)", (ull)g->addr, (ull)g->bytes, (ull)g->stream, g->device,
                       g->is_mapped ? Py_True : Py_False));
    }
    return list;
}

/* [(event, allocated, reserved, segments)] */
PyObject *
pya_module_scan_moments(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_moment *m = pya_scan_moments(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, m++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKKN)", (ull)m->event, (ull)m->allocated_bytes, (ull)m->reserved_bytes,
                       moment_segments(m)));
    }
    return list;
}

/* Steals value.  False if value is NULL, or the item could not be set. */
static bool
segment_put(PyObject *dict, const struct pya_scan_segment *g, PyObject *value) {
    PyObject *key = Py_BuildValue("(iK)", g->device, (ull)g->addr);
    const bool done = key != NULL && value != NULL && PyDict_SetItem(dict, key, value) == 0;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return done;
}

/* {(device, address): pool number} of the segments of private pools. */
PyObject *
pya_module_scan_segment_pools(PyObject *self, PyObject *args) {
    unsigned moment_number = 0;
    if (!PyArg_ParseTuple(args, "I", &moment_number)) {
        return NULL;
    }
    const struct pya_scan_moment *moment = moment_of(self, moment_number);
    PyObject *dict = moment == NULL ? NULL : PyDict_New();
    for (size_t i = 0; dict != NULL && i < moment->n_segments; i++) {
        const struct pya_scan_segment *g = &moment->segments[i];
        if (g->pool != 0 && !segment_put(dict, g, PyLong_FromUnsignedLong(g->pool))) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* {(device, address): (stack, phase)} of the segments whose request is known; stack 0: no stack. */
PyObject *
pya_module_scan_segment_requests(PyObject *self, PyObject *args) {
    unsigned moment_number = 0;
    if (!PyArg_ParseTuple(args, "I", &moment_number)) {
        return NULL;
    }
    const struct pya_scan *scan = pya_module_scan_from(self);
    const struct pya_scan_moment *moment = moment_of(self, moment_number);
    PyObject *dict = moment == NULL ? NULL : PyDict_New();
    for (size_t i = 0; dict != NULL && i < moment->n_segments; i++) {
        const struct pya_scan_segment *g = &moment->segments[i];
        if (g->stack == 0 && !g->is_known) {
            continue;
        }
        PyObject *value =
            Py_BuildValue("(IN)", (unsigned)g->stack, pya_module_scan_text(scan, g->phase));
        if (!segment_put(dict, g, value)) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

PyObject *
pya_module_scan_spans(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_block *b = pya_scan_spans(pya_module_scan_from(self), &n);
    return block_rows(pya_module_scan_from(self), b, n, false, false);
}

/* [(begin, end, bytes, stack, phase, is_known)] */
PyObject *
pya_module_scan_growths(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan *scan = pya_module_scan_from(self);
    const struct pya_scan_growth *g = pya_scan_growths(scan, &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, g++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KNKINN)", (ull)g->begin, pya_module_scan_event(g->end), (ull)g->bytes,
                       (unsigned)g->stack, pya_module_scan_text(scan, g->phase),
                       PyBool_FromLong(g->is_known)));
    }
    return list;
}

/* [(first, last, bytes, blocks, stack, phase, free_phase, category, is_freed_later, thread, stream, device)]; texts are
 * given by number */
PyObject *
pya_module_scan_stays(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan_stay *p = pya_scan_stays(pya_module_scan_from(self), &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, p++) {
        pya_module_list_add(
            &list,
            Py_BuildValue(
                "(IIKKIIIINKKi)", (unsigned)p->first, (unsigned)p->last, (ull)p->bytes,
                (ull)p->n_blocks, (unsigned)p->stack, (unsigned)p->phase, (unsigned)p->free_phase,
                (unsigned)p->category, PyBool_FromLong(p->is_freed_later), (ull)p->thread,
                (ull)p->stream, p->device));
    }
    return list;
}

/* [(event, time_ns, kind, device, bytes, addr, stream, pool, arg, alloc_event, stack, text)] */
PyObject *
pya_module_scan_told(PyObject *self, PyObject *unused) {
    (void)unused;
    size_t n = 0;
    const struct pya_scan *scan = pya_module_scan_from(self);
    const struct pya_scan_told *e = pya_scan_told(scan, &n);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++, e++) {
        pya_module_list_add(
            &list, Py_BuildValue(
                       "(KKiiKKKIKNIN)", (ull)e->event, (ull)e->time_ns, e->kind, e->device,
                       (ull)e->bytes, (ull)e->addr, (ull)e->stream, (unsigned)e->pool, (ull)e->arg,
                       pya_module_scan_event(e->alloc_event), (unsigned)e->stack,
                       pya_module_scan_text(scan, e->text)));
    }
    return list;
}

/* ---- a moment condensed: a plot shows a thousand pieces, however many blocks there are ---- */

/* [(stack, phase, bytes, blocks)]; phase is only used for blocks without a stack. */
PyObject *
pya_module_scan_stack_sums(PyObject *self, PyObject *args) {
    unsigned number = 0;
    size_t n_stacks = 0;
    if (!PyArg_ParseTuple(args, "I", &number)) {
        return NULL;
    }
    const struct pya_scan_moment *moment = moment_of(self, number);
    if (moment == NULL) {
        return NULL;
    }
    const struct pya_scan *scan = pya_module_scan_from(self);
    (void)pya_scan_stacks(scan, &n_stacks);
    /* Indexed by stack, then from n_stacks on by phase. */
    const size_t n = n_stacks + highest_text(moment->blocks, moment->n_blocks) + 1;
    struct {
        uint64_t bytes;
        uint64_t n_blocks;
    } *sums = calloc(n, sizeof *sums);
    if (sums == NULL) {
        return PyErr_NoMemory();
    }
    for (size_t i = 0; i < moment->n_blocks; i++) {
        const struct pya_scan_block *b = &moment->blocks[i];
        const size_t at = b->stack != 0 ? b->stack : n_stacks + b->phase;
        sums[at].bytes += b->is_pending ? 0 : pya_round_up(b->bytes, PYA_ALIGN);
        sums[at].n_blocks += !b->is_pending;
    }
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++) {
        if (sums[i].n_blocks > 0) {
            const size_t stack = i < n_stacks ? i : 0;
            const size_t phase = i < n_stacks ? 0 : i - n_stacks;
            pya_module_list_add(
                &list, Py_BuildValue(
                           "(KNKK)", (ull)stack, pya_module_scan_text(scan, (uint32_t)phase),
                           (ull)sums[i].bytes, (ull)sums[i].n_blocks));
        }
    }
    free(sums);
    return list;
}

/* The pieces of a segment.  What is smaller than `smallest` is added to the piece before it. */
struct pieces {
    uint64_t smallest;
    uint64_t largest_gap;
    uint64_t bytes;    /* of the current piece */
    Py_ssize_t which;  /* what it is: a block (index into rows), idle (-1) or pending (-2) */
    bool is_open;      /* the current piece is not in numbers yet */
    PyObject *numbers; /* bytes, which, bytes, which, ...; here and in rows NULL: exception set */
    PyObject *rows;
    struct block_texts texts;
};

static void
piece_close(struct pieces *p) {
    if (p->is_open) {
        pya_module_list_add(&p->numbers, PyLong_FromUnsignedLongLong(p->bytes));
        pya_module_list_add(&p->numbers, PyLong_FromSsize_t(p->which));
        p->is_open = false;
    }
}

/* Do these bytes start a new piece? */
static bool
piece_begins(struct pieces *p, uint64_t bytes) {
    if (bytes == 0) {
        return false;
    }
    if (p->is_open && bytes < p->smallest) {
        p->bytes += bytes;
        return false;
    }
    piece_close(p);
    p->bytes = bytes;
    p->is_open = true;
    return true;
}

static void
piece_idle(struct pieces *p, uint64_t begin, uint64_t end) {
    const uint64_t bytes = end > begin ? end - begin : 0;
    p->largest_gap = bytes > p->largest_gap ? bytes : p->largest_gap;
    if (piece_begins(p, bytes)) {
        p->which = -1;
    }
}

/* Adds the pieces of segment g.  b points at the remaining blocks; returns how many of them start in g. */
static size_t
segment_pieces(
    struct pieces *p, const struct pya_scan_segment *g, const struct pya_scan_block *b,
    size_t n_left) {
    const uint64_t end = g->addr + g->bytes;
    uint64_t at = g->addr;
    size_t i = 0;
    for (; i < n_left && b[i].device == g->device && b[i].addr < end; i++) {
        const uint64_t bytes = pya_round_up(b[i].bytes, PYA_ALIGN);
        piece_idle(p, at, b[i].addr);
        if (piece_begins(p, bytes < end - b[i].addr ? bytes : end - b[i].addr) && p->rows != NULL) {
            p->which = b[i].is_pending ? -2 : PyList_Size(p->rows);
            if (!b[i].is_pending) {
                pya_module_list_add(&p->rows, block_row(&p->texts, &b[i], bytes));
            }
        }
        at = b[i].addr + bytes > at ? b[i].addr + bytes : at;
    }
    piece_idle(p, at, end);
    piece_close(p);
    return i;
}

static bool
is_before(const struct pya_scan_block *b, const struct pya_scan_segment *g) {
    return b->device < g->device || (b->device == g->device && b->addr < g->addr);
}

/* (rows of blocks, [bytes, which, ...] per segment, size of the largest gap) */
PyObject *
pya_module_scan_pieces(PyObject *self, PyObject *args) {
    unsigned number = 0;
    ull smallest = 0;
    if (!PyArg_ParseTuple(args, "IK", &number, &smallest)) {
        return NULL;
    }
    const struct pya_scan_moment *moment = moment_of(self, number);
    struct pieces p = {.smallest = smallest};
    if (moment == NULL ||
        !texts_init(&p.texts, pya_module_scan_from(self), moment->blocks, moment->n_blocks)) {
        return NULL;
    }
    p.rows = PyList_New(0);
    PyObject *segments = PyList_New(0);
    size_t at = 0;
    for (size_t i = 0; segments != NULL && i < moment->n_segments; i++) {
        const struct pya_scan_segment *g = &moment->segments[i];
        while (at < moment->n_blocks && is_before(&moment->blocks[at], g)) {
            at++;
        }
        p.numbers = PyList_New(0);
        at += segment_pieces(&p, g, &moment->blocks[at], moment->n_blocks - at);
        pya_module_list_add(&segments, p.numbers);
    }
    texts_fini(&p.texts);
    if (segments == NULL || p.rows == NULL) {
        Py_XDECREF(segments);
        Py_XDECREF(p.rows);
        return NULL;
    }
    return Py_BuildValue("(NNK)", p.rows, segments, (ull)p.largest_gap);
}
