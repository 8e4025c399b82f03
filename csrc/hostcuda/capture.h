#pragma once
/* Stream capture.  Floor 4 (uses stream.h).
 *
 * Calls that a capture forbids return CUDA's error and invalidate the capture, as on a real device. */

#include "stream.h"

struct pya_hc_graph;

/* What a graph node does when the graph is launched. */
struct pya_hc_action {
    int type; /* NODE_* */
    void *dst;
    const void *src;
    size_t size; /* bytes; for NODE_GRAPH: number of the child's nodes */
    int value;
    pya_hc_host_fn fn;
    void *data;
    struct pya_hc_graph *child;
};

/* For calls that may synchronise, or that no graph can hold.  CU_OK unless a capture that binds this thread is under way;
 * otherwise CU_CAPTURE_UNSUPPORTED, and the capture becomes invalid.  Takes the lock. */
int pya_hc_capture_unsafe(void);
/* For work on the legacy stream: CU_CAPTURE_IMPLICIT if a blocking stream of its device is being captured; that capture becomes
 * invalid. */
int pya_hc_capture_implicit_locked(const struct pya_hc_stream *stream);
/* Both checks, for a call on a given stream, which must not be capturing itself. */
int pya_hc_capture_unsafe_stream_locked(struct pya_hc_stream *stream);
/* Waiting for a whole device ends every capture on it, in any mode and thread; captures on other devices go on. */
int pya_hc_capture_unsafe_device_locked(int device);

/* Querying or waiting for a captured event invalidates the capture `id`, if it is still under way. */
void pya_hc_capture_spoil_locked(uint64_t id);

/* Submits work to a stream.  *captured: it became a graph node and must not be done now.  Takes no lock. */
int pya_hc_submit_locked(
    struct pya_hc_stream *stream, const struct pya_hc_action *action, bool *captured);

/* into: the program's own graph, in which the first new node depends on `deps`; NULL: a new graph. */
int pya_hc_capture_begin(
    const void *stream_handle, int mode, struct pya_hc_graph *into, struct pya_hc_node *const *deps,
    size_t n_deps);
int pya_hc_capture_end(const void *stream_handle, struct pya_hc_graph **out);
int pya_hc_capture_exchange_mode(int *mode);

struct pya_hc_capture_info {
    int status;
    uint64_t id;
    struct pya_hc_graph *graph;
    struct pya_hc_node **deps;
    size_t n_deps;
};
int pya_hc_capture_info(const void *stream_handle, struct pya_hc_capture_info *out);
/* The same with the parameters of CUDA's own calls; the caller may pass NULL for all but status. */
int pya_hc_capture_tell(
    const void *stream_handle, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    size_t *n_deps);
/* flags 0 adds dependencies, 1 replaces them. */
int pya_hc_capture_set_deps(
    const void *stream_handle, struct pya_hc_node *const *deps, size_t n_deps, unsigned flags);

/* The two sides of a cross-stream dependency, called by stream.c. */
int pya_hc_capture_record_locked(struct pya_hc_stream *stream, struct pya_hc_event *event);
int pya_hc_capture_wait_locked(struct pya_hc_stream *stream, struct pya_hc_event *event);
