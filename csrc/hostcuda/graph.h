#pragma once
/* Graphs and the objects they keep alive.  Floor 4 (uses capture.h). */

#include "capture.h"

int pya_hc_graph_create(struct pya_hc_graph **out);
int pya_hc_graph_destroy(struct pya_hc_graph *graph);
int pya_hc_graph_add(
    struct pya_hc_graph *graph, const struct pya_hc_action *action, struct pya_hc_node *const *deps,
    size_t n_deps, struct pya_hc_node **out);
/* Writes up to *n nodes if out is not NULL; sets *n to the number of nodes there are, or were written. */
int pya_hc_graph_nodes(struct pya_hc_graph *graph, struct pya_hc_node **out, size_t *n);
int pya_hc_graph_node_deps(const struct pya_hc_node *node, struct pya_hc_node **deps, size_t *n);
/* Adds a conditional node with n new bodies.  *bodies: their graphs, which are the node's, as the array is. */
int pya_hc_graph_add_conditional(
    struct pya_hc_graph *graph, size_t n, struct pya_hc_node *const *deps, size_t n_deps,
    struct pya_hc_node **out, struct pya_hc_graph ***bodies);
int pya_hc_graph_node_type(const struct pya_hc_node *node, int *type);
int pya_hc_graph_instantiate(struct pya_hc_graph *graph, struct pya_hc_graph **out);
int pya_hc_graph_launch(struct pya_hc_graph *exec, const void *stream_handle);

int pya_hc_user_object_create(void *data, pya_hc_host_fn destroy, unsigned refs, void **out);
int pya_hc_user_object_release(void *handle, unsigned refs);
int pya_hc_graph_retain_object(struct pya_hc_graph *graph, void *handle, unsigned refs, bool moves);

uint64_t pya_hc_graph_count_locked(void);
