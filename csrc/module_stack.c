/* A stack keeps code objects and line numbers; names are looked up when somebody reads them.
 *
 * Releasing may happen without the GIL, and taking it there could wait for a thread that waits for us: such stacks go
 * on a list that the next capture, which holds the GIL, empties. */
#include "module_stack.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FRAMES 128

struct frame {
    PyObject *code; /* owned */
    int line;
};

struct stack {
    size_t n_owners; /* atomic */
    struct stack *next_dead;
    size_t n_frames;
    struct frame frames[];
};

static struct stack *dead_stacks; /* atomic head of a list that only grows, or is taken whole */

/* Outside the limited API, but exported by every CPython since 3.9; without it no stacks are recorded. */
typedef PyFrameObject *(*get_back_function)(PyFrameObject *);

static get_back_function
find_get_back(void) {
    static get_back_function found;
    static bool tried;
    if (!tried) { /* under the GIL */
        void *symbol = dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
        memcpy(&found, &symbol, sizeof found);
        tried = true;
    }
    return found;
}

static void
stack_destroy(struct stack *stack) {
    for (size_t i = 0; i < stack->n_frames; i++) {
        Py_DECREF(stack->frames[i].code);
    }
    free(stack);
}

static void
drain_dead(void) {
    struct stack *stack = __atomic_exchange_n(&dead_stacks, NULL, __ATOMIC_ACQUIRE);
    while (stack != NULL) {
        struct stack *next = stack->next_dead;
        stack_destroy(stack);
        stack = next;
    }
}

static struct stack *
stack_create(const struct frame *frames, size_t n) {
    struct stack *stack = malloc(sizeof *stack + n * sizeof stack->frames[0]);
    if (stack == NULL) {
        return NULL;
    }
    stack->n_owners = 1;
    stack->next_dead = NULL;
    stack->n_frames = n;
    memcpy(stack->frames, frames, n * sizeof stack->frames[0]);
    return stack;
}

static struct stack *
capture_with_gil(void) {
    get_back_function get_back = find_get_back();
    PyFrameObject *frame = get_back == NULL ? NULL : PyEval_GetFrame(); /* borrowed */
    if (frame == NULL) {
        return NULL;
    }
    struct frame frames[MAX_FRAMES];
    size_t n = 0;
    Py_INCREF(frame);
    while (frame != NULL && n < MAX_FRAMES) {
        frames[n].code = (PyObject *)PyFrame_GetCode(frame);
        frames[n].line = PyFrame_GetLineNumber(frame);
        n++;
        PyFrameObject *back = get_back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    struct stack *stack = stack_create(frames, n);
    for (size_t i = 0; stack == NULL && i < n; i++) {
        Py_DECREF(frames[i].code);
    }
    return stack;
}

void *
pya_stack_capture(void *arg) {
    (void)arg;
    if (!Py_IsInitialized()) {
        return NULL;
    }
    PyGILState_STATE held = PyGILState_Ensure();
    drain_dead();
    /* An exception may be in flight in this thread; looking at frames must not disturb it. */
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    struct stack *stack = capture_with_gil();
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(held);
    return stack;
}

void
pya_stack_retain(void *arg, void *context) {
    (void)arg;
    struct stack *stack = context;
    if (stack != NULL) {
        __atomic_fetch_add(&stack->n_owners, 1, __ATOMIC_RELAXED);
    }
}

void
pya_stack_release(void *arg, void *context) {
    (void)arg;
    struct stack *stack = context;
    if (stack == NULL || __atomic_sub_fetch(&stack->n_owners, 1, __ATOMIC_ACQ_REL) != 0) {
        return;
    }
    struct stack *head = __atomic_load_n(&dead_stacks, __ATOMIC_RELAXED);
    do {
        stack->next_dead = head;
    } while (!__atomic_compare_exchange_n(
        &dead_stacks, &head, stack, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
}

static PyObject *
frame_dict(const struct frame *frame) {
    PyObject *name = PyObject_GetAttrString(frame->code, "co_name");
    PyObject *file = PyObject_GetAttrString(frame->code, "co_filename");
    PyObject *dict = NULL;
    if (name != NULL && file != NULL) {
        dict = Py_BuildValue("{s:O,s:O,s:i}", "name", name, "filename", file, "line", frame->line);
    }
    Py_XDECREF(name);
    Py_XDECREF(file);
    return dict;
}

PyObject *
pya_stack_frames(void *context) {
    const struct stack *stack = context;
    const size_t n = stack == NULL ? 0 : stack->n_frames;
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *dict = frame_dict(&stack->frames[i]);
        if (dict == NULL || PyList_SetItem(list, (Py_ssize_t)i, dict) != 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}
