/* Graphs are lists of actions in the order of creation, which respects every dependency. */

#define _GNU_SOURCE
#include "graph.h"

#include "bytes.h"
#include "nodes.h"
#include "pool.h"

#include <stdlib.h>
#include <string.h>

struct pya_hc_user_object {
    void *data;
    pya_hc_host_fn destroy;
    unsigned n_refs;
    struct pya_hc_user_object *next_dead;
};
static struct pya_hc_objects graphs = {.object_bytes = sizeof(struct pya_hc_graph)};
static struct pya_hc_objects nodes = {.object_bytes = sizeof(struct pya_hc_node)};
static struct pya_hc_objects user_objects = {.object_bytes = sizeof(struct pya_hc_user_object)};

/* Small growing arrays of pointers, copied and merged. */

bool
pya_hc_deps_copy(
    struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from) {
    struct pya_hc_node **copy = NULL;
    if (n_from > 0) {
        copy = malloc(n_from * sizeof(void *));
        if (copy == NULL) {
            return false;
        }
        memcpy(copy, from, n_from * sizeof(void *));
    }
    free(*to);
    *to = copy;
    *n_to = n_from;
    return true;
}

bool
pya_hc_deps_merge(
    struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from) {
    struct pya_hc_node **merged = malloc((*n_to + n_from + 1) * sizeof(void *));
    if (merged == NULL) {
        return false;
    }
    size_t n = *n_to;
    if (n > 0) {
        memcpy(merged, *to, n * sizeof(void *));
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
int
pya_hc_graph_add_locked(
    struct pya_hc_graph *graph, const struct pya_hc_action *action, struct pya_hc_node *const *deps,
    size_t n_deps, struct pya_hc_node **out) {
    if (graph->n_nodes == graph->capacity) {
        size_t capacity = graph->capacity == 0 ? 64 : 2 * graph->capacity;
        struct pya_hc_node **grown = realloc(graph->nodes, capacity * sizeof(void *));
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
    if (!pya_hc_deps_copy(&node->deps, &node->n_deps, deps, n_deps)) {
        pya_hc_objects_put(&nodes, node);
        return CU_OUT_OF_MEMORY;
    }
    node->action = *action;
    node->graph = graph;
    graph->nodes[graph->n_nodes++] = node;
    *out = node;
    return CU_OK;
}
struct pya_hc_graph *
pya_hc_graph_new_locked(void) {
    struct pya_hc_graph *graph = pya_hc_objects_get(&graphs);
    if (graph != NULL) {
        graph->n_refs = 1;
        graph->is_held = true;
    }
    return graph;
}

int
pya_hc_graph_create(struct pya_hc_graph **out) {
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct pya_hc_graph *graph = pya_hc_graph_new_locked();
    pya_hc_unlock();
    if (graph == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    *out = graph;
    return CU_OK;
}

/* Destructors of user objects belong to the program, so they run after the lock is released. */
static struct pya_hc_user_object *dead_objects;

static void
user_object_drop_locked(struct pya_hc_user_object *object) {
    object->n_refs--;
    if (object->n_refs == 0) {
        object->next_dead = dead_objects;
        dead_objects = object;
    }
}

void
pya_hc_graph_unlock(void) {
    while (dead_objects != NULL) {
        struct pya_hc_user_object dead = *dead_objects;
        pya_hc_objects_put(&user_objects, dead_objects);
        dead_objects = dead.next_dead;
        pya_hc_unlock();
        dead.destroy(dead.data);
        pya_hc_lock();
    }
    pya_hc_unlock();
}

static void
bodies_drop_locked(struct pya_hc_graph **bodies, size_t n) {
    for (size_t i = 0; i < n; i++) {
        pya_hc_graph_drop_locked(bodies[i]);
    }
    free(bodies);
}

void
pya_hc_graph_drop_locked(struct pya_hc_graph *graph) {
    graph->n_refs--;
    if (graph->n_refs > 0) {
        return;
    }
    for (size_t i = 0; i < graph->n_nodes; i++) {
        struct pya_hc_node *node = graph->nodes[i];
        if (node->action.type == NODE_FREE) {
            /* Memory freed inside the graph belonged to the graph until now. */
            pya_hc_pool_release_locked((uintptr_t)node->action.dst);
        }
        if (node->action.child != NULL) {
            pya_hc_graph_drop_locked(node->action.child);
        }
        bodies_drop_locked(node->bodies, node->n_bodies);
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
    if (!pya_hc_objects_has(&graphs, graph) || !graph->is_held || graph->n_captures > 0) {
        error = CU_INVALID_VALUE;
    } else {
        graph->is_held = false;
        struct pya_hc_graph *source = graph->source;
        pya_hc_graph_drop_locked(graph);
        if (source != NULL) {
            pya_hc_graph_drop_locked(source);
        }
    }
    pya_hc_graph_unlock();
    return error;
}

/* Nodes can be added to graphs and queried, but not in executable graphs. */
static bool
has_own_nodes_locked(const struct pya_hc_graph *graph) {
    return pya_hc_objects_has(&graphs, graph) && graph->source == NULL;
}

bool
pya_hc_graph_has_locked(
    const struct pya_hc_graph *graph, struct pya_hc_node *const *found, size_t n) {
    bool are_of = has_own_nodes_locked(graph) && (found != NULL || n == 0);
    for (size_t i = 0; i < n && are_of; i++) {
        are_of = pya_hc_objects_has(&nodes, found[i]) && found[i]->graph == graph;
    }
    return are_of;
}

int
pya_hc_graph_add(
    struct pya_hc_graph *graph, const struct pya_hc_action *action, struct pya_hc_node *const *deps,
    size_t n_deps, struct pya_hc_node **out) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (pya_hc_graph_has_locked(graph, deps, n_deps) && out != NULL) {
        error = pya_hc_graph_add_locked(graph, action, deps, n_deps, out);
    }
    pya_hc_unlock();
    return error;
}

static struct pya_hc_graph **
bodies_new_locked(size_t n) {
    struct pya_hc_graph **bodies = calloc(n, sizeof(void *));
    for (size_t i = 0; i < n && bodies != NULL; i++) {
        bodies[i] = pya_hc_graph_new_locked();
        if (bodies[i] == NULL) {
            bodies_drop_locked(bodies, i);
            bodies = NULL;
        }
    }
    return bodies;
}

int
pya_hc_graph_add_conditional(
    struct pya_hc_graph *graph, size_t n, struct pya_hc_node *const *deps, size_t n_deps,
    struct pya_hc_node **out, struct pya_hc_graph ***bodies) {
    const struct pya_hc_action action = {.type = NODE_CONDITIONAL};
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    if (n > 0 && out != NULL && pya_hc_graph_has_locked(graph, deps, n_deps)) {
        struct pya_hc_graph **made = bodies_new_locked(n);
        error = made == NULL ? CU_OUT_OF_MEMORY
                             : pya_hc_graph_add_locked(graph, &action, deps, n_deps, out);
        if (error == CU_OK) {
            (*out)->bodies = made;
            (*out)->n_bodies = n;
            *bodies = made;
        } else if (made != NULL) {
            bodies_drop_locked(made, n);
        }
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
    if (!has_own_nodes_locked(graph)) {
        error = CU_INVALID_VALUE;
    } else if (out == NULL) {
        *n = graph->n_nodes;
    } else {
        *n = *n < graph->n_nodes ? *n : graph->n_nodes;
        if (*n > 0) {
            memcpy(out, graph->nodes, *n * sizeof(void *));
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
            memcpy(deps, node->deps, *n * sizeof(void *));
        }
    }
    pya_hc_unlock();
    return error;
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
    if (has_own_nodes_locked(graph)) {
        struct pya_hc_graph *exec = pya_hc_graph_new_locked();
        error = exec == NULL ? CU_OUT_OF_MEMORY : CU_OK;
        if (exec != NULL) {
            exec->source = graph;
            exec->capacity = graph->n_nodes; /* number of the source's nodes that it uses */
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
        return pya_hc_bytes_set(
            action->dst, action->value, (unsigned)action->size & 7, action->size >> 3);
    case NODE_HOST:
        action->fn(action->data);
        return CU_OK;
    default:
        return CU_OK;
    }
}

/* Number of actions in a launch of the first n nodes, including those of child graphs.  Bodies of conditional nodes do not
 * count: a kernel would have decided whether they run. */
static size_t
actions_count(const struct pya_hc_graph *graph, size_t n_nodes) {
    size_t n = 0;
    for (size_t i = 0; i < n_nodes; i++) {
        const struct pya_hc_action *action = &graph->nodes[i]->action;
        n += action->type == NODE_GRAPH ? actions_count(action->child, action->size) : 1;
    }
    return n;
}

static struct pya_hc_action *
actions_copy(const struct pya_hc_graph *graph, size_t n_nodes, struct pya_hc_action *to) {
    for (size_t i = 0; i < n_nodes; i++) {
        const struct pya_hc_action *action = &graph->nodes[i]->action;
        if (action->type == NODE_GRAPH) {
            to = actions_copy(action->child, action->size, to);
        } else {
            *to++ = *action;
        }
    }
    return to;
}

static int
graph_capture_locked(struct pya_hc_graph *exec, struct pya_hc_stream *stream) {
    struct pya_hc_graph *source = exec->source;
    struct pya_hc_action child = {.type = NODE_GRAPH, .child = source, .size = exec->capacity};
    bool captured = false;
    int error = pya_hc_submit_locked(stream, &child, &captured);
    /* A reference for the new node, which exists even if adding its edges failed. */
    source->n_refs += error != CU_CAPTURE_INVALIDATED;
    return error;
}

int
pya_hc_graph_launch(struct pya_hc_graph *exec, const void *stream_handle) {
    int error = CU_OK;
    struct pya_hc_action *actions = NULL;
    size_t n_actions = 0;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    if (stream == NULL || !pya_hc_objects_has(&graphs, exec) || exec->source == NULL) {
        error = CU_INVALID_VALUE;
        goto unlock;
    }
    if (stream->capture != NULL) {
        error = graph_capture_locked(exec, stream);
        goto unlock;
    }
    error = pya_hc_capture_implicit_locked(stream);
    if (error != CU_OK) {
        goto unlock;
    }
    n_actions = actions_count(exec->source, exec->capacity);
    actions = malloc((n_actions + 1) * sizeof *actions);
    if (actions == NULL) {
        error = CU_OUT_OF_MEMORY;
        goto unlock;
    }
    (void)actions_copy(exec->source, exec->capacity, actions);
    for (size_t i = 0; i < n_actions; i++) {
        pya_hc_stream_work_locked(stream, actions[i].type == NODE_KERNEL);
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
    struct pya_hc_user_object *object = pya_hc_objects_get(&user_objects);
    if (object != NULL) {
        *object = (struct pya_hc_user_object){data, destroy, refs, NULL};
        *out = object;
    }
    pya_hc_unlock();
    return object == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

int
pya_hc_user_object_release(void *handle, unsigned refs) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_user_object *object = handle;
    if (pya_hc_objects_has(&user_objects, handle) && refs > 0 && object->n_refs >= refs) {
        object->n_refs -= refs - 1;
        user_object_drop_locked(object);
        error = CU_OK;
    }
    pya_hc_graph_unlock();
    return error;
}

int
pya_hc_graph_retain_object(struct pya_hc_graph *graph, void *handle, unsigned refs, bool moves) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_user_object *object = handle;
    if (!pya_hc_objects_has(&graphs, graph) || !pya_hc_objects_has(&user_objects, handle)) {
        goto unlock;
    }
    error = CU_OUT_OF_MEMORY;
    struct pya_hc_user_object **grown =
        realloc(graph->objects, (graph->n_objects + refs + 1) * sizeof(void *));
    if (grown == NULL) {
        goto unlock;
    }
    graph->objects = grown;
    for (unsigned i = 0; i < refs; i++) {
        grown[graph->n_objects++] = object;
    }
    object->n_refs += moves ? 0 : refs;
    error = CU_OK;

unlock:
    pya_hc_unlock();
    return error;
}

uint64_t
pya_hc_graph_count_locked(void) {
    return graphs.n_live;
}
