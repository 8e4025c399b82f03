/* Captures: which streams they contain and which calls they forbid. */

#define _GNU_SOURCE
#include "capture.h"

#include "nodes.h"

#include <pthread.h>
#include <stdlib.h>

struct pya_hc_capture {
    uint64_t id;
    int mode, status;
    pthread_t thread;
    struct pya_hc_graph *graph;
    bool is_own_graph; /* made by the capture, not handed in */
    struct pya_hc_stream **streams;
    size_t n_streams; /* [0] is the origin */
    struct pya_hc_capture *next;
};

static struct pya_hc_capture *captures;
static uint64_t last_capture_id;
static _Thread_local int thread_mode = CAPTURE_GLOBAL;

static bool
capture_binds(const struct pya_hc_capture *capture) {
    if (capture->status != CAPTURE_ACTIVE || thread_mode == CAPTURE_RELAXED) {
        return false;
    }
    bool is_mine = pthread_equal(capture->thread, pthread_self()) != 0;
    return is_mine ? capture->mode != CAPTURE_RELAXED
                   : capture->mode == CAPTURE_GLOBAL && thread_mode == CAPTURE_GLOBAL;
}

static int
capture_unsafe_locked(void) {
    int error = CU_OK;
    for (struct pya_hc_capture *c = captures; c != NULL; c = c->next) {
        if (capture_binds(c)) {
            c->status = CAPTURE_INVALID;
            error = CU_CAPTURE_UNSUPPORTED;
        }
    }
    return error;
}

int
pya_hc_capture_unsafe(void) {
    pya_hc_lock();
    int error = capture_unsafe_locked();
    pya_hc_unlock();
    return error;
}

int
pya_hc_capture_unsafe_stream_locked(struct pya_hc_stream *stream) {
    if (stream->capture != NULL) {
        int error = stream->capture->status == CAPTURE_INVALID ? CU_CAPTURE_INVALIDATED
                                                               : CU_CAPTURE_UNSUPPORTED;
        stream->capture->status = CAPTURE_INVALID;
        return error;
    }
    int error = capture_unsafe_locked();
    return error == CU_OK ? pya_hc_capture_implicit_locked(stream) : error;
}

void
pya_hc_capture_spoil_locked(uint64_t id) {
    for (struct pya_hc_capture *c = captures; c != NULL; c = c->next) {
        c->status = c->id == id ? CAPTURE_INVALID : c->status;
    }
}

static bool
capture_is_on(const struct pya_hc_capture *capture, int device) {
    size_t i = 0;
    while (i < capture->n_streams && capture->streams[i]->device != device) {
        i++;
    }
    return i < capture->n_streams;
}

int
pya_hc_capture_unsafe_device_locked(int device) {
    int error = CU_OK;
    for (struct pya_hc_capture *c = captures; c != NULL; c = c->next) {
        if (c->status == CAPTURE_ACTIVE && capture_is_on(c, device)) {
            c->status = CAPTURE_INVALID;
            error = CU_CAPTURE_UNSUPPORTED;
        }
    }
    return error;
}

static bool
capture_has_blocking_stream(const struct pya_hc_capture *capture, int device) {
    for (size_t i = 0; i < capture->n_streams; i++) {
        const struct pya_hc_stream *stream = capture->streams[i];
        if (stream->device == device && (stream->flags & STREAM_NON_BLOCKING) == 0) {
            return true;
        }
    }
    return false;
}

/* Work on the legacy stream would have to wait for every blocking stream, including captured ones.  A mere query returns the
 * error, but does not invalidate the capture. */
static int
capture_implicit_locked(const struct pya_hc_stream *stream, bool is_work) {
    if (!stream->is_legacy) {
        return CU_OK;
    }
    int error = CU_OK;
    for (struct pya_hc_capture *c = captures; c != NULL; c = c->next) {
        if (c->status == CAPTURE_ACTIVE && capture_has_blocking_stream(c, stream->device)) {
            c->status = is_work ? CAPTURE_INVALID : c->status;
            error = CU_CAPTURE_IMPLICIT;
        }
    }
    return error;
}

int
pya_hc_capture_implicit_locked(const struct pya_hc_stream *stream) {
    return capture_implicit_locked(stream, true);
}

int
pya_hc_submit_locked(
    struct pya_hc_stream *stream, const struct pya_hc_action *action, bool *captured) {
    *captured = stream->capture != NULL;
    if (stream->capture == NULL) {
        int error = capture_implicit_locked(stream, true);
        if (error == CU_OK) {
            pya_hc_stream_work_locked(stream, action->type == NODE_KERNEL);
        }
        return error;
    }
    struct pya_hc_capture *capture = stream->capture;
    if (capture->status != CAPTURE_ACTIVE) {
        return CU_CAPTURE_INVALIDATED;
    }
    struct pya_hc_node *node = NULL;
    int error =
        pya_hc_graph_add_locked(capture->graph, action, stream->deps, stream->n_deps, &node);
    if (error == CU_OK && !pya_hc_deps_copy(&stream->deps, &stream->n_deps, &node, 1)) {
        error = CU_OUT_OF_MEMORY;
    }
    if (error != CU_OK) {
        capture->status = CAPTURE_INVALID;
    }
    return error;
}

static bool
capture_join(struct pya_hc_capture *capture, struct pya_hc_stream *stream) {
    struct pya_hc_stream **grown =
        realloc(capture->streams, (capture->n_streams + 1) * sizeof(void *));
    if (grown == NULL) {
        return false;
    }
    capture->streams = grown;
    grown[capture->n_streams++] = stream;
    stream->capture = capture;
    return true;
}

int
pya_hc_capture_begin(
    const void *stream_handle, int mode, struct pya_hc_graph *into, struct pya_hc_node *const *deps,
    size_t n_deps) {
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) {
        return CU_INVALID_VALUE;
    }
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    struct pya_hc_capture *capture = NULL;
    if (stream == NULL || (into != NULL && !pya_hc_graph_has_locked(into, deps, n_deps))) {
        error = stream == NULL ? CU_INVALID_HANDLE : CU_INVALID_VALUE;
        goto done;
    }
    if (stream->is_legacy || stream->capture != NULL) {
        error = stream->is_legacy ? CU_CAPTURE_UNSUPPORTED : CU_INVALID_VALUE;
        goto done;
    }
    error = CU_OUT_OF_MEMORY;
    capture = calloc(1, sizeof *capture);
    if (capture == NULL) {
        goto done;
    }
    capture->graph = into == NULL ? pya_hc_graph_new_locked() : into;
    if (capture->graph == NULL) {
        goto done;
    }
    capture->is_own_graph = into == NULL;
    if (!pya_hc_deps_copy(&stream->deps, &stream->n_deps, deps, n_deps) ||
        !capture_join(capture, stream)) {
        goto done;
    }
    capture->graph->n_refs++; /* a body of a conditional node dies with the node's graph */
    capture->graph->n_captures++;
    capture->id = ++last_capture_id;
    capture->mode = mode;
    capture->status = CAPTURE_ACTIVE;
    capture->thread = pthread_self();
    capture->next = captures;
    captures = capture;
    capture = NULL;
    error = CU_OK;

done:
    if (capture != NULL) {
        if (capture->is_own_graph) {
            pya_hc_graph_drop_locked(capture->graph);
        }
        free(capture);
    }
    pya_hc_unlock();
    return error;
}

static void
graph_mark(struct pya_hc_node *const *deps, size_t n_deps, bool mark) {
    /* Dependencies always come earlier in the graph, so one backward pass reaches all of them. */
    for (size_t i = 0; i < n_deps; i++) {
        deps[i]->is_marked = mark;
    }
}

static bool
capture_is_joined(const struct pya_hc_capture *capture) {
    const struct pya_hc_graph *graph = capture->graph;
    graph_mark(graph->nodes, graph->n_nodes, false);
    graph_mark(capture->streams[0]->deps, capture->streams[0]->n_deps, true);
    for (size_t i = graph->n_nodes; i-- > 0;) {
        if (graph->nodes[i]->is_marked) {
            graph_mark(graph->nodes[i]->deps, graph->nodes[i]->n_deps, true);
        }
    }
    size_t n_loose = 0;
    for (size_t s = 1; s < capture->n_streams; s++) {
        for (size_t i = 0; i < capture->streams[s]->n_deps; i++) {
            n_loose += !capture->streams[s]->deps[i]->is_marked;
        }
    }
    return n_loose == 0;
}
static void
capture_destroy_locked(struct pya_hc_capture *capture) {
    for (size_t i = 0; i < capture->n_streams; i++) {
        free(capture->streams[i]->deps);
        capture->streams[i]->deps = NULL;
        capture->streams[i]->n_deps = 0;
        capture->streams[i]->capture = NULL;
    }
    for (struct pya_hc_capture **at = &captures; *at != NULL; at = &(*at)->next) {
        if (*at == capture) {
            *at = capture->next;
            break;
        }
    }
    free(capture->streams);
    free(capture);
}

int
pya_hc_capture_end(const void *stream_handle, struct pya_hc_graph **out) {
    int error = CU_OK;
    if (out != NULL) {
        *out = NULL;
    }
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    struct pya_hc_capture *capture = stream == NULL ? NULL : stream->capture;
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (capture == NULL) {
        error = CU_INVALID_VALUE;
    } else if (capture->streams[0] != stream) {
        error = CU_CAPTURE_UNMATCHED;
        capture->status = CAPTURE_INVALID;
    } else if (
        capture->mode != CAPTURE_RELAXED && !pthread_equal(capture->thread, pthread_self())) {
        error = CU_CAPTURE_WRONG_THREAD;
    } else {
        if (capture->status != CAPTURE_ACTIVE) {
            error = CU_CAPTURE_INVALIDATED;
        } else if (!capture_is_joined(capture)) {
            error = CU_CAPTURE_UNJOINED;
        }
        struct pya_hc_graph *graph = capture->graph;
        bool is_own = capture->is_own_graph;
        graph->n_captures--;
        capture_destroy_locked(capture);
        if (error != CU_OK && is_own) {
            pya_hc_graph_drop_locked(graph);
        } else if (error == CU_OK && out != NULL) {
            *out = graph;
        }
        pya_hc_graph_drop_locked(graph);
    }
    pya_hc_graph_unlock();
    return error;
}

int
pya_hc_capture_exchange_mode(int *mode) {
    if (mode == NULL || *mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) {
        return CU_INVALID_VALUE;
    }
    int old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return CU_OK;
}

int
pya_hc_capture_info(const void *stream_handle, struct pya_hc_capture_info *out) {
    int error = CU_OK;
    *out = (struct pya_hc_capture_info){.status = CAPTURE_NONE};
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (stream->capture != NULL) {
        out->status = stream->capture->status;
        out->id = stream->capture->id;
        out->graph = stream->capture->graph;
        out->deps = stream->deps;
        out->n_deps = stream->n_deps;
    } else {
        error = capture_implicit_locked(stream, false);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_capture_tell(
    const void *stream_handle, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    size_t *n_deps) {
    struct pya_hc_capture_info info;
    int error = pya_hc_capture_info(stream_handle, &info);
    *status = info.status;
    if (id != NULL) {
        *id = info.id;
    }
    if (graph != NULL) {
        *graph = info.graph;
    }
    if (deps != NULL) {
        *deps = info.deps;
    }
    if (n_deps != NULL) {
        *n_deps = info.n_deps;
    }
    return error;
}

int
pya_hc_capture_set_deps(
    const void *stream_handle, struct pya_hc_node *const *deps, size_t n_deps, unsigned flags) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (stream->capture == NULL) {
        error = CU_ILLEGAL_STATE;
    } else if (flags > 1 || !pya_hc_graph_has_locked(stream->capture->graph, deps, n_deps)) {
        error = CU_INVALID_VALUE;
    } else {
        bool ok = flags == 1 ? pya_hc_deps_copy(&stream->deps, &stream->n_deps, deps, n_deps)
                             : pya_hc_deps_merge(&stream->deps, &stream->n_deps, deps, n_deps);
        error = ok ? CU_OK : CU_OUT_OF_MEMORY;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_capture_record_locked(struct pya_hc_stream *stream, struct pya_hc_event *event) {
    if (stream->capture->status != CAPTURE_ACTIVE) {
        return CU_CAPTURE_INVALIDATED;
    }
    if (!pya_hc_deps_copy(&event->deps, &event->n_deps, stream->deps, stream->n_deps)) {
        return CU_OUT_OF_MEMORY;
    }
    event->is_recorded = true;
    event->capture_id = stream->capture->id;
    return CU_OK;
}

int
pya_hc_capture_wait_locked(struct pya_hc_stream *stream, struct pya_hc_event *event) {
    if (event->capture_id == 0) {
        if (!event->is_recorded) {
            return CU_OK;
        }
        stream->capture->status = CAPTURE_INVALID;
        return CU_CAPTURE_ISOLATION;
    }
    struct pya_hc_capture *capture = captures;
    while (capture != NULL && capture->id != event->capture_id) {
        capture = capture->next;
    }
    if (capture == NULL) {
        return CU_CAPTURED_EVENT;
    }
    if (capture->status != CAPTURE_ACTIVE) {
        return CU_CAPTURE_INVALIDATED;
    }
    if (stream->capture == NULL) {
        if (stream->is_legacy) {
            capture->status = CAPTURE_INVALID;
            return CU_CAPTURE_IMPLICIT;
        }
        if (!capture_join(capture, stream)) {
            return CU_OUT_OF_MEMORY;
        }
    }
    if (stream->capture != capture) {
        capture->status = CAPTURE_INVALID;
        stream->capture->status = CAPTURE_INVALID;
        return CU_CAPTURE_MERGE;
    }
    return pya_hc_deps_merge(&stream->deps, &stream->n_deps, event->deps, event->n_deps)
               ? CU_OK
               : CU_OUT_OF_MEMORY;
}
