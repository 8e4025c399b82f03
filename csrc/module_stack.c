/* A stack keeps code objects and places in them; names and lines are looked up only when somebody reads it.
 *
 * A stack may be released without the GIL, and taking the GIL there could wait for a thread that waits for us.  So released
 * stacks go on a list; the next capture, which holds the GIL, empties it, or else Python's main thread does. */
#include "module_stack.h"

#include "core/refcount.h"
#include "module_aside.h"
#include "module_native.h"
#include "thread_labels.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct frame {
    PyObject *code; /* owned */
    intptr_t
        at; /* instruction, or line if it cannot be found later; no padding: compared bytewise */
};

struct stack {
    struct pya_refcount count; /* first */
    struct pya_text *metadata; /* owned; NULL: none */
    char *compile_context;     /* owned; NULL is "N/A" */
    bool is_bare;              /* captured for its labels only */
    struct stack *lender;      /* a reference: shown instead of own frames; NULL: none */
    size_t n_native;
    void **native; /* owned return addresses, innermost first; NULL when none were captured */
    size_t n_frames;
    struct frame frames[];
};

enum {
    MOST_NATIVE = 128,
    USUAL_FRAMES = 128,    /* Python frames; more are collected on the heap */
    MOST_FRAMES = 1 << 16, /* innermost frames kept; deeper recursion is a bug of the program */
};

static atomic_bool wants_native;

static struct pya_refcount *dead_stacks; /* freed once the GIL is held */
static atomic_bool is_sweep_asked;       /* a sweep is pending on the main thread */

/* Functions outside the limited API. */
static struct {
    /* Exported by every CPython since 3.9.  Without it no stacks are recorded. */
    PyFrameObject *(*back)(PyFrameObject *);
    /* An instruction and its line.  Finding the line costs as much as the rest of a frame, and few stacks are ever read, so it
     * is put off.  Both are set, or both NULL. */
    int (*instruction)(PyFrameObject *);
    int (*line)(PyObject *code, int instruction);
} frames_api;
static pthread_once_t frames_api_once = PTHREAD_ONCE_INIT;

static void
frames_api_find(void) {
    void *back = dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    void *instruction = dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    void *line = dlsym(RTLD_DEFAULT, "PyCode_Addr2Line");
    memcpy(&frames_api.back, &back, sizeof back);
    if (instruction != NULL && line != NULL) {
        memcpy(&frames_api.instruction, &instruction, sizeof instruction);
        memcpy(&frames_api.line, &line, sizeof line);
    }
}

static void
stack_destroy(struct stack *stack) {
    for (size_t i = 0; i < stack->n_frames; i++) {
        Py_DECREF(stack->frames[i].code);
    }
    free(stack->native);
    free(stack->metadata);
    free(stack->compile_context);
    pya_stack_release(NULL, stack->lender);
    free(stack);
}

/* The stack whose frames are shown for this one: its lender, else itself.  Accepts NULL. */
static const struct stack *
stack_shown(const struct stack *stack) {
    return stack != NULL && stack->lender != NULL ? stack->lender : stack;
}

void
pya_stack_sweep(void) {
    struct pya_refcount *dead = pya_refcount_take_dead(&dead_stacks);
    while (dead != NULL) {
        struct pya_refcount *next = pya_refcount_next_dead(dead);
        stack_destroy((struct stack *)dead);
        dead = next;
    }
}

static int
sweep_as_asked(void *unused) {
    (void)unused;
    atomic_store(&is_sweep_asked, false);
    pya_stack_sweep();
    return 0;
}

void
pya_stack_sweep_soon(void) {
    if (__atomic_load_n(&dead_stacks, __ATOMIC_RELAXED) == NULL || !Py_IsInitialized() ||
        atomic_exchange(&is_sweep_asked, true)) {
        return;
    }
    if (Py_AddPendingCall(sweep_as_asked, NULL) != 0) {
        /* The queue of pending calls is full; the next release tries again. */
        atomic_store(&is_sweep_asked, false);
    }
}

static struct stack *
stack_create(const struct frame *frames, size_t n) {
    struct stack *stack = malloc(sizeof *stack + n * sizeof stack->frames[0]);
    if (stack == NULL) {
        return NULL;
    }
    stack->count = (struct pya_refcount){.n_owners = 1};
    stack->metadata = NULL;
    stack->compile_context = NULL;
    stack->is_bare = false;
    stack->lender = NULL;
    stack->n_native = 0;
    stack->native = NULL;
    stack->n_frames = n;
    if (n > 0) {
        memcpy(stack->frames, frames, n * sizeof stack->frames[0]);
    }
    return stack;
}

/* Doubles the room.  The frames move to the heap: *more (NULL before) is the caller's to free.  False at MOST_FRAMES or if
 * host memory is out: the stack ends there. */
static bool
frames_grow(struct frame **frames, size_t *room, struct frame **more) {
    struct frame *grown = *room >= MOST_FRAMES ? NULL : realloc(*more, 2 * *room * sizeof grown[0]);
    if (grown == NULL) {
        return false;
    }
    if (*more == NULL) {
        memcpy(grown, *frames, *room * sizeof grown[0]);
    }
    *frames = grown;
    *more = grown;
    *room *= 2;
    return true;
}

/* Leaves out the n_own innermost frames. */
static struct stack *
capture_with_gil(unsigned n_own) {
    (void)pthread_once(&frames_api_once, frames_api_find);
    PyFrameObject *frame = frames_api.back == NULL ? NULL : PyEval_GetFrame(); /* borrowed */
    struct frame few[USUAL_FRAMES];
    struct frame *frames = few;
    struct frame *more = NULL; /* owned; frames, once it is not few */
    size_t room = USUAL_FRAMES;
    size_t n = 0;
    Py_XINCREF(frame);
    for (; frame != NULL && n_own > 0; n_own--) {
        PyFrameObject *back = frames_api.back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    while (frame != NULL && (n < room || frames_grow(&frames, &room, &more))) {
        frames[n].code = (PyObject *)PyFrame_GetCode(frame);
        const int at =
            frames_api.line != NULL ? frames_api.instruction(frame) : PyFrame_GetLineNumber(frame);
        frames[n].at = at < 0 ? 0 : at; /* < 0: the frame has not started yet */
        n++;
        PyFrameObject *back = frames_api.back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    struct stack *stack = stack_create(frames, n);
    for (size_t i = 0; stack == NULL && i < n; i++) {
        Py_DECREF(frames[i].code);
    }
    free(more);
    return stack;
}

/* If host memory is out, the stack simply has no native frames. */
static void
add_native(struct stack *stack) {
    void *addresses[MOST_NATIVE];
    const int n = backtrace(addresses, MOST_NATIVE);
    if (n <= 0) {
        return;
    }
    stack->native = malloc((size_t)n * sizeof *stack->native);
    if (stack->native != NULL) {
        memcpy(stack->native, addresses, (size_t)n * sizeof *stack->native);
        stack->n_native = (size_t)n;
    }
}

/* If host memory is out, the stack simply lacks that label. */
static void
add_labels(struct stack *stack, const char *metadata, size_t n_bytes) {
    const char *compile_context = pya_thread_compile_context();
    stack->metadata = pya_text_copy(metadata, n_bytes);
    if (compile_context != NULL) {
        stack->compile_context = strdup(compile_context);
    }
}

void *
pya_stack_capture(void *arg, bool with_stack) {
    (void)arg;
    const struct pya_text *text = pya_thread_metadata();
    const char *metadata = text == NULL ? NULL : text->bytes;
    const size_t n_bytes = text == NULL ? 0 : text->n_bytes;
    const bool has_labels = text != NULL || pya_thread_compile_context() != NULL;
    if (!Py_IsInitialized() || (!with_stack && !has_labels)) {
        return NULL;
    }
    if (!with_stack) {
        struct stack *bare = stack_create(NULL, 0);
        if (bare != NULL) {
            bare->is_bare = true;
            add_labels(bare, metadata, n_bytes);
        }
        return bare;
    }
    struct pya_aside aside = pya_aside_begin();
    pya_stack_sweep();
    struct stack *stack = capture_with_gil(0);
    pya_aside_end(aside);
    if (stack != NULL) {
        add_labels(stack, metadata, n_bytes);
    }
    if (stack != NULL && atomic_load_explicit(&wants_native, memory_order_relaxed)) {
        add_native(stack);
    }
    return stack;
}

void
pya_stack_set_native(bool enabled) {
    atomic_store(&wants_native, enabled);
}

void *
pya_stack_capture_note(const char *bytes, size_t n_bytes, unsigned n_own) {
    pya_stack_sweep();
    struct stack *stack = capture_with_gil(n_own);
    if (stack != NULL) {
        add_labels(stack, bytes, n_bytes);
    }
    return stack;
}

void *
pya_stack_of_free(void *arg, void *here, void *allocation) {
    struct stack *now = here;
    struct stack *then = allocation;
    if (then == NULL || (now != NULL && !now->is_bare)) {
        return now;
    }
    if (now == NULL && (then->metadata != NULL || then->compile_context != NULL)) {
        now = stack_create(NULL, 0);
    }
    if (now == NULL) { /* no labels to hide, or no host memory to hide them */
        pya_stack_retain(arg, then);
        return then;
    }
    if (!then->is_bare) {
        pya_stack_retain(arg, then);
        now->lender = then;
    }
    now->is_bare = then->is_bare;
    return now;
}

void
pya_stack_retain(void *arg, void *context) {
    (void)arg;
    struct stack *stack = context;
    if (stack != NULL) {
        pya_refcount_retain(&stack->count);
    }
}

void
pya_stack_release(void *arg, void *context) {
    (void)arg;
    struct stack *stack = context;
    if (stack == NULL || !pya_refcount_drop(&stack->count)) {
        return;
    }
    /* Needs no GIL, as it has no frames.  If no stacks are recorded, no capture would sweep it up. */
    if (stack->n_frames == 0) {
        stack_destroy(stack);
    } else {
        pya_refcount_push_dead(&dead_stacks, &stack->count);
    }
}

uint64_t
pya_stack_key(void *arg, void *context) {
    (void)arg;
    const struct stack *stack = stack_shown(context);
    uint64_t key = 0;
    for (size_t i = 0; stack != NULL && i < stack->n_frames; i++) {
        key = (key ^ (uint64_t)(uintptr_t)stack->frames[i].code) * UINT64_C(0x9E3779B97F4A7C15);
        key = (key ^ (uint64_t)stack->frames[i].at) * UINT64_C(0x9E3779B97F4A7C15);
    }
    return key;
}

static int
frame_line(const struct frame *frame) { /* captured, so frames_api_find() was called */
    return frames_api.line != NULL ? frames_api.line(frame->code, (int)frame->at) : (int)frame->at;
}

/* Does the frame belong to a Python implementation of a kernel, as used in a dry run? */
static bool
is_of_dry_run(const char *path) {
    return strstr(path, "/pyalloc/_bootstrap/") != NULL || strstr(path, "/torch/_ops.py") != NULL;
}

/* Does it request memory for its caller, as torch does, and pyalloc for its ops and for other libraries? */
static bool
is_of_library(const char *path) {
    static const char *const parts[] = {
        "/torch/", "/pyalloc/ops/", "/pyalloc/distributions/", "/pyalloc/adapters.py"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (strstr(path, parts[i]) != NULL) {
            return true;
        }
    }
    return false;
}

/* Writes "file.py:12 in function".  False for frames of a dry run, for libraries' unless of_library_too, and on an
 * error, which is cleared. */
static bool
frame_describe(const struct frame *frame, bool of_library_too, char *text, size_t text_bytes) {
    PyObject *name = PyObject_GetAttrString(frame->code, "co_name");
    PyObject *file = PyObject_GetAttrString(frame->code, "co_filename");
    PyObject *name_bytes =
        name == NULL ? NULL : PyUnicode_AsEncodedString(name, "ascii", "backslashreplace");
    PyObject *file_bytes =
        file == NULL ? NULL : PyUnicode_AsEncodedString(file, "ascii", "backslashreplace");
    bool is_told = false;
    if (name_bytes != NULL && file_bytes != NULL) {
        const char *path = PyBytes_AsString(file_bytes);
        const char *slash = strrchr(path, '/');
        is_told = !is_of_dry_run(path) && (of_library_too || !is_of_library(path));
        if (is_told) {
            PyOS_snprintf(
                text, text_bytes, "%s:%d in %s", slash == NULL ? path : slash + 1,
                frame_line(frame), PyBytes_AsString(name_bytes));
        }
    }
    PyErr_Clear();
    Py_XDECREF(file_bytes);
    Py_XDECREF(name_bytes);
    Py_XDECREF(file);
    Py_XDECREF(name);
    return is_told;
}

bool
pya_stack_where(void *arg, void *context, char *text, size_t text_bytes) {
    (void)arg;
    const struct stack *stack = stack_shown(context);
    if (!Py_IsInitialized() || stack == NULL || stack->n_frames == 0) {
        return false;
    }
    struct pya_aside aside = pya_aside_begin();
    bool is_told = false;
    for (size_t i = 0; i < stack->n_frames && !is_told; i++) {
        is_told = frame_describe(&stack->frames[i], false, text, text_bytes);
    }
    for (size_t i = 0; i < stack->n_frames && !is_told; i++) {
        is_told = frame_describe(&stack->frames[i], true, text, text_bytes);
    }
    pya_aside_end(aside);
    return is_told;
}

/* {"name", "filename", "line"}; steals nothing. */
static PyObject *
frame_dict(const struct frame *frame) {
    return Py_BuildValue(
        "{s:N,s:N,s:i}", "name", PyObject_GetAttrString(frame->code, "co_name"), "filename",
        PyObject_GetAttrString(frame->code, "co_filename"), "line", frame_line(frame));
}

/* Lines of C and C++ code would need debug information; 0 is what torch writes if it has none. */
static PyObject *
native_dict(void *address) {
    struct pya_native_texts texts;
    if (!pya_native_texts_of(address, &texts)) {
        return PyErr_NoMemory();
    }
    PyObject *dict = Py_BuildValue(
        "{s:N,s:N,s:i}", "name",
        PyUnicode_DecodeUTF8(texts.name, (Py_ssize_t)strlen(texts.name), "replace"), "filename",
        PyUnicode_DecodeFSDefault(texts.file), "line", 0);
    free(texts.name);
    free(texts.file);
    return dict;
}

/* Steals key.  New reference to the cached value for it; if there is none, caches what make() returns. */
static PyObject *
cached(PyObject *cache, PyObject *key, PyObject *(*make)(const void *arg), const void *arg) {
    if (key == NULL) {
        return NULL;
    }
    PyObject *value = PyDict_GetItemWithError(cache, key); /* borrowed */
    if (value != NULL) {
        Py_INCREF(value);
    } else if (!PyErr_Occurred()) {
        value = make(arg);
        if (value != NULL && PyDict_SetItem(cache, key, value) != 0) {
            Py_CLEAR(value);
        }
    }
    Py_DECREF(key);
    return value;
}

static PyObject *
make_frame(const void *arg) {
    return frame_dict(arg);
}

static PyObject *
make_native(const void *arg) {
    return native_dict(*(void *const *)arg);
}

/* Steals value. */
static bool
append(PyObject *list, PyObject *value) {
    const bool done = value != NULL && PyList_Append(list, value) == 0;
    Py_XDECREF(value);
    return done;
}

/* The native frames to show: outside this library, up to the interpreter, from where the Python frames say more. */
struct span {
    size_t first;
    size_t end;
};

static struct span
native_span(const struct stack *stack) {
    struct span span = {0, 0};
    for (size_t i = 0; i < stack->n_native; i++) {
        const enum pya_native_owner owner = pya_native_owner_of(stack->native[i]);
        if (owner == PYA_NATIVE_INTERPRETER) {
            break;
        }
        span.end = i + 1;
        if (owner == PYA_NATIVE_OWN) {
            span.first = span.end;
        }
    }
    return span;
}

static PyObject *
make_list(PyObject *cache, const struct stack *stack) {
    const struct span native = native_span(stack);
    PyObject *list = PyList_New(0);
    bool done = list != NULL;
    for (size_t i = native.first; done && i < native.end; i++) {
        PyObject *key = Py_BuildValue("(N)", PyLong_FromVoidPtr(stack->native[i]));
        done = append(list, cached(cache, key, make_native, &stack->native[i]));
    }
    for (size_t i = 0; done && i < stack->n_frames; i++) {
        PyObject *key = Py_BuildValue(
            "(Nn)", PyLong_FromVoidPtr(stack->frames[i].code), (Py_ssize_t)stack->frames[i].at);
        done = append(list, cached(cache, key, make_frame, &stack->frames[i]));
    }
    if (!done) {
        Py_CLEAR(list);
    }
    return list;
}

/* A cache key for make_list(): equal stacks, which are captured again and again, have equal bytes.  NULL with exception set. */
static PyObject *
stack_bytes(const struct stack *stack) {
    const size_t native_bytes = stack->n_native * sizeof stack->native[0];
    const size_t frame_bytes = stack->n_frames * sizeof stack->frames[0];
    const size_t bytes = sizeof stack->n_native + native_bytes + frame_bytes;
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (key == NULL) {
        return NULL;
    }
    char *at = PyBytes_AsString(key);
    memcpy(at, &stack->n_native, sizeof stack->n_native);
    at += sizeof stack->n_native;
    if (native_bytes > 0) {
        memcpy(at, stack->native, native_bytes);
    }
    if (frame_bytes > 0) {
        memcpy(at + native_bytes, stack->frames, frame_bytes);
    }
    return key;
}

PyObject *
pya_stack_frames(PyObject *cache, void *context) {
    const struct stack *stack = stack_shown(context);
    if (stack == NULL) {
        return PyList_New(0);
    }
    PyObject *key = stack_bytes(stack);
    PyObject *list = key == NULL ? NULL : PyDict_GetItemWithError(cache, key); /* borrowed */
    if (list != NULL) {
        Py_INCREF(list);
    } else if (key != NULL && !PyErr_Occurred()) {
        list = make_list(cache, stack);
        if (list != NULL && PyDict_SetItem(cache, key, list) != 0) {
            Py_CLEAR(list);
        }
    }
    Py_XDECREF(key);
    return list;
}

size_t
pya_stack_read(void *context, struct pya_stack_frame *out, size_t room) {
    const struct stack *stack = stack_shown(context);
    size_t n = 0;
    if (stack == NULL) {
        return 0;
    }
    const struct span native = native_span(stack);
    for (size_t i = native.first; i < native.end && n < room; i++) {
        out[n++] = (struct pya_stack_frame){stack->native[i], PYA_STACK_NATIVE};
    }
    for (size_t i = 0; i < stack->n_frames && n < room; i++) {
        out[n++] = (struct pya_stack_frame){stack->frames[i].code, (int)stack->frames[i].at};
    }
    return n;
}

PyObject *
pya_stack_describe(const struct pya_stack_frame *frame) {
    if (frame->at == PYA_STACK_NATIVE) {
        return native_dict(frame->key);
    }
    const struct frame python = {frame->key, frame->at};
    return frame_dict(&python);
}

PyObject *
pya_stack_metadata(void *context) {
    const struct stack *stack = context;
    const struct pya_text *text = stack == NULL ? NULL : stack->metadata;
    /* The program's text need not be UTF-8, and torch would fail on the whole snapshot. */
    return text == NULL ? PyUnicode_FromString("")
                        : PyUnicode_DecodeUTF8(text->bytes, (Py_ssize_t)text->n_bytes, "replace");
}

PyObject *
pya_stack_compile_context(void *context) {
    const struct stack *stack = context;
    return PyUnicode_FromString(
        stack == NULL || stack->compile_context == NULL ? "N/A" : stack->compile_context);
}

const char *
pya_stack_label(void *context) {
    const struct stack *stack = context;
    return stack == NULL             ? NULL
           : stack->metadata != NULL ? stack->metadata->bytes
                                     : stack->compile_context;
}

bool
pya_stack_has_frames(void *context) {
    const struct stack *stack = context;
    return stack != NULL && !stack->is_bare;
}
