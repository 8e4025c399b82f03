#define _GNU_SOURCE
#include "graph.h"

#include "bytes.h"
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct pya_hc_node {
    struct pya_hc_action action;
    struct pya_hc_graph *graph;
    struct pya_hc_node **deps;
    size_t n_deps;
    bool is_marked; /* scratch of one walk, under the lock */
};

struct user_object {
    void *data;
    pya_hc_host_fn destroy;
    unsigned n_refs;
};

/* n_refs: the program's handle, the executable graphs made of it, and the capture that builds it.
 * Executable graphs share the nodes that existed when they were made. */
struct pya_hc_graph {
    struct pya_hc_graph *source; /* of an executable graph; NULL otherwise */
    unsigned n_refs;
    struct pya_hc_node **nodes;
    size_t n_nodes, capacity;
    struct user_object **objects; /* one entry per reference */
    size_t n_objects;
};

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

static struct pya_hc_objects graphs = {.object_bytes = sizeof(struct pya_hc_graph)};
static struct pya_hc_objects nodes = {.object_bytes = sizeof(struct pya_hc_node)};
static struct pya_hc_objects user_objects = {.object_bytes = sizeof(struct user_object)};
static struct pya_hc_capture *captures;
static uint64_t last_capture_id;
static _Thread_local int thread_mode = CAPTURE_GLOBAL;

/* Small growing arrays of pointers, copied and merged. */

static bool
deps_copy(struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from) {
    struct pya_hc_node **copy = NULL;
    if (n_from > 0) {
        copy = malloc(n_from * sizeof(struct pya_hc_node *));
        if (copy == NULL) {
            return false;
        }
        memcpy(copy, from, n_from * sizeof(struct pya_hc_node *));
    }
    free(*to);
    *to = copy;
    *n_to = n_from;
    return true;
}

static bool
deps_merge(struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from) {
    struct pya_hc_node **merged =
        malloc((*n_to + n_from + 1) * sizeof(struct pya_hc_node *));
    if (merged == NULL) {
        return false;
    }
    size_t n = *n_to;
    if (n > 0) {
        memcpy(merged, *to, n * sizeof(struct pya_hc_node *));
    }
    for (size_t i = 0; i < n_from; i++) {
        bool is_new = true;
        for (size_t k = 0; k < n && is_new; k++) {
            is_new = merged[k] != from[i];
        }
        if (is_new) {
            merged[n++] = from[i];
        }
    }
    free(*to);
    *to = merged;
    *n_to = n;
    return true;
}

/* Captures */

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
    return capture_unsafe_locked();
}

static int
graph_add_locked(
    struct pya_hc_graph *graph, const struct pya_hc_action *action,
    struct pya_hc_node *const *deps, size_t n_deps, struct pya_hc_node **out) {
    if (graph->n_nodes == graph->capacity) {
        size_t capacity = graph->capacity == 0 ? 64 : 2 * graph->capacity;
        struct pya_hc_node **grown = realloc(graph->nodes, capacity * sizeof(*grown));
        if (grown == NULL) {
            return CU_OUT_OF_MEMORY;
        }
        graph->nodes = grown;
        graph->capacity = capacity;
    }
    struct pya_hc_node *node = pya_hc_objects_get(&nodes);
    if (node == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    if (!deps_copy(&node->deps, &node->n_deps, deps, n_deps)) {
        pya_hc_objects_put(&nodes, node);
        return CU_OUT_OF_MEMORY;
    }
    node->action = *action;
    node->graph = graph;
    graph->nodes[graph->n_nodes++] = node;
    *out = node;
    return CU_OK;
}

/* Work on the legacy stream would have to wait for every blocking stream, captured or not. */
static int
capture_implicit_locked(const struct pya_hc_stream *stream) {
    int error = CU_OK;
    if (!stream->is_legacy) {
        return CU_OK;
    }
    for (struct pya_hc_capture *c = captures; c != NULL; c = c->next) {
        for (size_t i = 0; i < c->n_streams; i++) {
            if (c->status == CAPTURE_ACTIVE && c->streams[i]->device == stream->device &&
                (c->streams[i]->flags & STREAM_NON_BLOCKING) == 0) {
                c->status = CAPTURE_INVALID;
                error = CU_CAPTURE_IMPLICIT;
            }
        }
    }
    return error;
}

int
pya_hc_submit_locked(
    struct pya_hc_stream *stream, const struct pya_hc_action *action, bool *captured) {
    *captured = stream->capture != NULL;
    if (stream->capture == NULL) {
        int error = capture_implicit_locked(stream);
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
    int error = graph_add_locked(capture->graph, action, stream->deps, stream->n_deps, &node);
    if (error == CU_OK && !deps_copy(&stream->deps, &stream->n_deps, &node, 1)) {
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
        realloc(capture->streams, (capture->n_streams + 1) * sizeof(*grown));
    if (grown == NULL) {
        return false;
    }
    capture->streams = grown;
    grown[capture->n_streams++] = stream;
    stream->capture = capture;
    return true;
}

static struct pya_hc_graph *
graph_new_locked(void) {
    struct pya_hc_graph *graph = pya_hc_objects_get(&graphs);
    if (graph != NULL) {
        graph->n_refs = 1;
    }
    return graph;
}

int
pya_hc_capture_begin(const void *handle, int mode, struct pya_hc_graph *into) {
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) {
        return CU_INVALID_VALUE;
    }
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    struct pya_hc_capture *capture = NULL;
    if (stream == NULL || (into != NULL && !pya_hc_objects_has(&graphs, into))) {
        error = CU_INVALID_HANDLE;
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
    capture->graph = into == NULL ? graph_new_locked() : into;
    if (capture->graph == NULL) {
        goto done;
    }
    capture->is_own_graph = into == NULL;
    if (!capture_join(capture, stream)) {
        goto done;
    }
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
            pya_hc_objects_put(&graphs, capture->graph);
        }
        free(capture);
    }
    pya_hc_unlock();
    return error;
}

static void
graph_mark(struct pya_hc_node *const *deps, size_t n_deps, bool mark) {
    /* Dependencies always come earlier in the graph, so one backward pass over it reaches all. */
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
    for (size_t s = 1; s < capture->n_streams; s++) {
        for (size_t i = 0; i < capture->streams[s]->n_deps; i++) {
            if (!capture->streams[s]->deps[i]->is_marked) {
                return false;
            }
        }
    }
    return true;
}

static void graph_drop_locked(struct pya_hc_graph *graph);

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
pya_hc_capture_end(const void *handle, struct pya_hc_graph **out) {
    int error = CU_OK;
    if (out != NULL) {
        *out = NULL;
    }
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
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
        capture_destroy_locked(capture);
        if (error != CU_OK && is_own) {
            graph_drop_locked(graph);
        } else if (error == CU_OK && out != NULL) {
            *out = graph;
        }
    }
    pya_hc_unlock();
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
pya_hc_capture_info(const void *handle, struct pya_hc_capture_info *out) {
    int error = CU_OK;
    *out = (struct pya_hc_capture_info){.status = CAPTURE_NONE};
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (stream->capture != NULL) {
        out->status = stream->capture->status;
        out->id = stream->capture->id;
        out->graph = stream->capture->graph;
        out->deps = stream->deps;
        out->n_deps = stream->n_deps;
    } else {
        error = capture_implicit_locked(stream);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_capture_set_deps(
    const void *handle, struct pya_hc_node *const *deps, size_t n_deps, unsigned flags) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    if (stream == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (stream->capture == NULL) {
        error = CU_NOT_PERMITTED;
    } else {
        bool ok = flags == 1 ? deps_copy(&stream->deps, &stream->n_deps, deps, n_deps)
                             : deps_merge(&stream->deps, &stream->n_deps, deps, n_deps);
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
    if (!deps_copy(&event->deps, &event->n_deps, stream->deps, stream->n_deps)) {
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
    return deps_merge(&stream->deps, &stream->n_deps, event->deps, event->n_deps)
               ? CU_OK
               : CU_OUT_OF_MEMORY;
}

/* Graphs */

int
pya_hc_graph_create(struct pya_hc_graph **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct pya_hc_graph *graph = graph_new_locked();
    pya_hc_unlock();
    if (graph == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    *out = graph;
    return CU_OK;
}

/* Destructors of user objects are the program's: they run after the lock is given back. */
static struct user_object *dead_objects[64];
static size_t n_dead_objects;

static void
user_object_drop_locked(struct user_object *object) {
    object->n_refs--;
    if (object->n_refs == 0 && n_dead_objects < sizeof dead_objects / sizeof dead_objects[0]) {
        dead_objects[n_dead_objects++] = object;
    }
}

static void
user_objects_bury_and_unlock(void) {
    while (n_dead_objects > 0) {
        struct user_object dead = *dead_objects[--n_dead_objects];
        pya_hc_objects_put(&user_objects, dead_objects[n_dead_objects]);
        pya_hc_unlock();
        dead.destroy(dead.data);
        pya_hc_lock();
    }
    pya_hc_unlock();
}

static void
graph_drop_locked(struct pya_hc_graph *graph) {
    graph->n_refs--;
    if (graph->n_refs > 0) {
        return;
    }
    for (size_t i = 0; i < graph->n_nodes; i++) {
        struct pya_hc_node *node = graph->nodes[i];
        if (node->action.type == NODE_FREE) {
            /* Memory freed inside the graph stayed the graph's until now. */
            pya_hc_pool_release_locked((uintptr_t)node->action.dst);
        }
        if (node->action.child != NULL) {
            graph_drop_locked(node->action.child);
        }
        free(node->deps);
        pya_hc_objects_put(&nodes, node);
    }
    for (size_t i = 0; i < graph->n_objects; i++) {
        user_object_drop_locked(graph->objects[i]);
    }
    free(graph->nodes);
    free(graph->objects);
    pya_hc_objects_put(&graphs, graph);
}

int
pya_hc_graph_destroy(struct pya_hc_graph *graph) {
    int error = CU_OK;
    pya_hc_lock();
    if (!pya_hc_objects_has(&graphs, graph)) {
        error = CU_INVALID_VALUE;
    } else {
        struct pya_hc_graph *source = graph->source;
        graph_drop_locked(graph);
        if (source != NULL) {
            graph_drop_locked(source);
        }
    }
    user_objects_bury_and_unlock();
    return error;
}

int
pya_hc_graph_add(
    struct pya_hc_graph *graph, const struct pya_hc_action *action,
    struct pya_hc_node *const *deps, size_t n_deps, struct pya_hc_node **out) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (pya_hc_objects_has(&graphs, graph) && (deps != NULL || n_deps == 0) && out != NULL) {
        error = graph_add_locked(graph, action, deps, n_deps, out);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_graph_nodes(struct pya_hc_graph *graph, struct pya_hc_node **out, size_t *n) {
    if (n == NULL) {
        return CU_INVALID_VALUE;
    }
    int error = CU_OK;
    pya_hc_lock();
    if (!pya_hc_objects_has(&graphs, graph)) {
        error = CU_INVALID_VALUE;
    } else if (out == NULL) {
        *n = graph->n_nodes;
    } else {
        *n = *n < graph->n_nodes ? *n : graph->n_nodes;
        if (*n > 0) {
            memcpy(out, graph->nodes, *n * sizeof(*out));
        }
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_graph_node_deps(const struct pya_hc_node *node, struct pya_hc_node **deps, size_t *n) {
    if (n == NULL) {
        return CU_INVALID_VALUE;
    }
    int error = CU_OK;
    pya_hc_lock();
    if (!pya_hc_objects_has(&nodes, node)) {
        error = CU_INVALID_VALUE;
    } else if (deps == NULL) {
        *n = node->n_deps;
    } else {
        *n = *n < node->n_deps ? *n : node->n_deps;
        if (*n > 0) {
            memcpy(deps, node->deps, *n * sizeof(*deps));
        }
    }
    pya_hc_unlock();
    return error;
}

struct pya_hc_graph **
pya_hc_graph_node_child(struct pya_hc_node *node) {
    return &node->action.child;
}

int
pya_hc_graph_node_type(const struct pya_hc_node *node, int *type) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (pya_hc_objects_has(&nodes, node) && type != NULL) {
        *type = node->action.type;
        error = CU_OK;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_graph_instantiate(struct pya_hc_graph *graph, struct pya_hc_graph **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (pya_hc_objects_has(&graphs, graph) && graph->source == NULL) {
        struct pya_hc_graph *exec = graph_new_locked();
        error = exec == NULL ? CU_OUT_OF_MEMORY : CU_OK;
        if (exec != NULL) {
            exec->source = graph;
            exec->capacity = graph->n_nodes; /* how many of the source's nodes are its own */
            graph->n_refs++;
            *out = exec;
        }
    }
    pya_hc_unlock();
    return error;
}

static int
action_run(const struct pya_hc_action *action) {
    switch (action->type) {
    case NODE_MEMCPY:
        if (action->value == COPY_D2H) {
            pya_hc_bytes_note_dtoh(action->size);
        }
        return pya_hc_bytes_copy(action->dst, action->src, action->size);
    case NODE_MEMSET:
        return pya_hc_bytes_set(action->dst, action->value, (unsigned)action->size & 7,
                                action->size >> 3);
    case NODE_HOST:
        action->fn(action->data);
        return CU_OK;
    default:
        return CU_OK;
    }
}

int
pya_hc_graph_launch(struct pya_hc_graph *exec, const void *handle) {
    int error = CU_OK;
    struct pya_hc_action *actions = NULL;
    size_t n_actions = 0;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    if (stream == NULL || !pya_hc_objects_has(&graphs, exec) || exec->source == NULL) {
        error = CU_INVALID_VALUE;
        goto unlock;
    }
    if (stream->capture != NULL) {
        struct pya_hc_action child = {.type = NODE_GRAPH};
        bool captured = false;
        error = pya_hc_submit_locked(stream, &child, &captured);
        goto unlock;
    }
    actions = malloc((exec->capacity + 1) * sizeof *actions);
    if (actions == NULL) {
        error = CU_OUT_OF_MEMORY;
        goto unlock;
    }
    for (; n_actions < exec->capacity; n_actions++) {
        actions[n_actions] = exec->source->nodes[n_actions]->action;
        pya_hc_stream_work_locked(stream, actions[n_actions].type == NODE_KERNEL);
    }

unlock:
    pya_hc_unlock();
    for (size_t i = 0; i < n_actions && error == CU_OK; i++) {
        error = action_run(&actions[i]);
    }
    free(actions);
    return error;
}

/* User objects */

int
pya_hc_user_object_create(void *data, pya_hc_host_fn destroy, unsigned refs, void **out) {
    if (destroy == NULL || refs == 0 || out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct user_object *object = pya_hc_objects_get(&user_objects);
    if (object != NULL) {
        *object = (struct user_object){data, destroy, refs};
        *out = object;
    }
    pya_hc_unlock();
    return object == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

int
pya_hc_user_object_release(void *handle, unsigned refs) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct user_object *object = handle;
    if (pya_hc_objects_has(&user_objects, handle) && refs > 0 && object->n_refs >= refs) {
        object->n_refs -= refs - 1;
        user_object_drop_locked(object);
        error = CU_OK;
    }
    user_objects_bury_and_unlock();
    return error;
}

int
pya_hc_graph_retain_object(
    struct pya_hc_graph *graph, void *handle, unsigned refs, bool moves) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct user_object *object = handle;
    if (pya_hc_objects_has(&graphs, graph) && pya_hc_objects_has(&user_objects, handle)) {
        struct user_object **grown =
            realloc(graph->objects, (graph->n_objects + refs + 1) * sizeof(*grown));
        error = grown == NULL ? CU_OUT_OF_MEMORY : CU_OK;
        if (grown != NULL) {
            graph->objects = grown;
            for (unsigned i = 0; i < refs; i++) {
                grown[graph->n_objects++] = object;
            }
            object->n_refs += moves ? 0 : refs;
        }
    }
    pya_hc_unlock();
    return error;
}

uint64_t
pya_hc_graph_count_locked(void) {
    return graphs.n_live;
}
