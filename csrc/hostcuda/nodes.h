#pragma once
/* Graph nodes, and arrays of pointers to them.  Floor 4; for capture.c and graph.c only. */

#include "graph.h"

struct pya_hc_node {
    struct pya_hc_action action;
    struct pya_hc_graph *graph;
    struct pya_hc_node **deps;
    size_t n_deps;
    struct pya_hc_graph **bodies; /* of a conditional node */
    size_t n_bodies;
    bool is_marked; /* scratch of one graph walk, under the lock */
};

struct pya_hc_user_object;

/* n_refs counts the program's handle, the executable graphs instantiated from it, the captures into it, and the node
 * whose body or child it is.
 * An executable graph shares the nodes that existed when it was instantiated. */
struct pya_hc_graph {
    struct pya_hc_graph *source; /* of an executable graph; NULL otherwise */
    unsigned n_refs;
    bool is_held;        /* the program has not destroyed it */
    unsigned n_captures; /* under way into it */
    struct pya_hc_node **nodes;
    size_t n_nodes, capacity;
    struct pya_hc_user_object **objects; /* one entry per reference */
    size_t n_objects;
};

/* Replaces an array by a copy; adds what it does not contain yet.  False if host memory is out. */
bool pya_hc_deps_copy(
    struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from);
bool pya_hc_deps_merge(
    struct pya_hc_node ***to, size_t *n_to, struct pya_hc_node *const *from, size_t n_from);

/* NULL if host memory is out. */
struct pya_hc_graph *pya_hc_graph_new_locked(void);
/* Can nodes be added to this graph, and does it contain all of these? */
bool pya_hc_graph_has_locked(
    const struct pya_hc_graph *graph, struct pya_hc_node *const *found, size_t n);
void pya_hc_graph_drop_locked(struct pya_hc_graph *graph);
/* Releases the lock after graphs were dropped: the program's destructors run. */
void pya_hc_graph_unlock(void);
int pya_hc_graph_add_locked(
    struct pya_hc_graph *graph, const struct pya_hc_action *action, struct pya_hc_node *const *deps,
    size_t n_deps, struct pya_hc_node **out);
