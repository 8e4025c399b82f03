/* Formats the columns of a TraceReader as CSV lines: a hundred million rows are too many to format in Python. */
#include "module.h"

#include <string.h>

/* CSV_LINE has room for the numbers, the kind's name and the separators. */
enum { CSV_LINE = 256, CSV_COLUMNS = 10, CSV_WIDE = 6 };

struct csv_columns {
    size_t n;
    const uint8_t *kind;
    const uint8_t *device;
    const char *wide[CSV_WIDE];
    const char *stack;
    const char *text;
};

struct csv_buffer {
    char *bytes;
    size_t used;
    size_t room;
};

static bool
csv_reserve(struct csv_buffer *buffer, size_t n) {
    if (buffer->room - buffer->used >= n) {
        return true;
    }
    size_t room = 2 * buffer->room + n;
    char *bytes = PyMem_Realloc(buffer->bytes, room);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return false;
    }
    buffer->bytes = bytes;
    buffer->room = room;
    return true;
}

static char *
csv_number(char *at, uint64_t value) {
    char digits[20];
    size_t n = 0;
    do {
        digits[sizeof digits - ++n] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    memcpy(at, digits + sizeof digits - n, n);
    return at + n;
}

static char *
csv_kind(char *at, int kind) {
    const char *name = pya_trace_kind_name(kind);
    if (name == NULL) {
        return csv_number(at, (uint64_t)kind);
    }
    while (*name != '\0') {
        *at++ = *name++;
    }
    return at;
}

/* Appends the cell of that number, then `end`.  False with an exception set. */
static bool
csv_cell(struct csv_buffer *buffer, PyObject *cells, uint32_t number, const char *end) {
    char *cell = NULL;
    Py_ssize_t bytes = 0;
    if (number != 0) { /* most events have no text */
        PyObject *key = PyLong_FromUnsignedLong(number);
        PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(cells, key);
        Py_XDECREF(key);
        if (found == NULL || PyBytes_AsStringAndSize(found, &cell, &bytes) != 0) {
            if (PyErr_Occurred() == NULL) {
                PyErr_SetString(PyExc_KeyError, "a cell is missing");
            }
            return false;
        }
    }
    const size_t n_end = strlen(end);
    if (!csv_reserve(buffer, (size_t)bytes + n_end)) {
        return false;
    }
    if (bytes > 0) {
        memcpy(buffer->bytes + buffer->used, cell, (size_t)bytes);
    }
    memcpy(buffer->bytes + buffer->used + bytes, end, n_end);
    buffer->used += (size_t)bytes + n_end;
    return true;
}

static bool
csv_line(struct csv_buffer *buffer, const struct csv_columns *columns, size_t i, uint64_t event) {
    if (!csv_reserve(buffer, CSV_LINE)) {
        return false;
    }
    char *at = csv_number(buffer->bytes + buffer->used, event);
    *at++ = ',';
    at = csv_kind(at, columns->kind[i]);
    *at++ = ',';
    at = csv_number(at, columns->device[i]);
    for (int field = 0; field < CSV_WIDE; field++) {
        uint64_t value;
        memcpy(&value, columns->wide[field] + i * sizeof value, sizeof value);
        *at++ = ',';
        at = csv_number(at, value);
    }
    *at++ = ',';
    buffer->used = (size_t)(at - buffer->bytes);
    return true;
}

/* False with an exception set unless the columns have the form that TraceReader.read() returns. */
static bool
csv_columns_from(PyObject *tuple, struct csv_columns *out) {
    static const size_t each[CSV_COLUMNS] = {1, 1, 8, 8, 8, 8, 8, 8, 4, 4};
    const char *column[CSV_COLUMNS];
    out->n = 0;
    for (Py_ssize_t i = 0; i < CSV_COLUMNS; i++) {
        char *bytes = NULL;
        Py_ssize_t n = 0;
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (item == NULL || PyBytes_AsStringAndSize(item, &bytes, &n) != 0) {
            return false;
        }
        out->n = i == 0 ? (size_t)n : out->n;
        if ((size_t)n != out->n * each[i]) {
            PyErr_SetString(PyExc_ValueError, "columns of different lengths");
            return false;
        }
        column[i] = bytes;
    }
    out->kind = (const uint8_t *)column[0];
    out->device = (const uint8_t *)column[1];
    memcpy(out->wide, column + 2, sizeof out->wide);
    out->stack = column[8];
    out->text = column[9];
    return true;
}

static PyObject *
csv_lines(PyObject *module, PyObject *args) {
    unsigned long long first = 0;
    PyObject *tuple = NULL;
    PyObject *stacks = NULL;
    PyObject *texts = NULL;
    struct csv_columns columns;
    struct csv_buffer buffer = {0};
    (void)module;
    if (!PyArg_ParseTuple(
            args, "KO!O!O!", &first, &PyTuple_Type, &tuple, &PyDict_Type, &stacks, &PyDict_Type,
            &texts) ||
        !csv_columns_from(tuple, &columns)) {
        return NULL;
    }
    PyObject *result = NULL;
    for (size_t i = 0; i < columns.n; i++) {
        uint32_t stack;
        uint32_t text;
        memcpy(&stack, columns.stack + i * sizeof stack, sizeof stack);
        memcpy(&text, columns.text + i * sizeof text, sizeof text);
        if (!csv_line(&buffer, &columns, i, first + i) || !csv_cell(&buffer, stacks, stack, ",") ||
            !csv_cell(&buffer, texts, text, "\r\n")) {
            goto free_buffer;
        }
    }
    result = PyBytes_FromStringAndSize(buffer.bytes, (Py_ssize_t)buffer.used);

free_buffer:
    PyMem_Free(buffer.bytes);
    return result;
}

static PyMethodDef csv_functions[] = {
    {"csv_lines", csv_lines, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
pya_module_csv_add(PyObject *module) {
    return PyModule_AddFunctions(module, csv_functions);
}
