#pragma once
/* Stream capture.  Floor 4 (uses stream.h).
 *
 * Calls that a capture forbids return CUDA's error and invalidate the capture, as on a device. */

#include "stream.h"

struct pya_hc_graph;

/* What a node does when the graph is launched. */
struct pya_hc_action {
    int type; /* NODE_* */
    void *dst;
    const void *src;
    size_t size; /* bytes; of NODE_GRAPH: how many of the child's nodes */
    int value;
    pya_hc_host_fn fn;
    void *data;
    struct pya_hc_graph *child;
};

/* Calls that may synchronise or that no graph can hold: CU_OK unless a capture that binds this thread
 * is under way; then CU_CAPTURE_UNSUPPORTED, and the capture is invalid from now on.  Takes the lock. */
int pya_hc_capture_unsafe(void);
/* CU_CAPTURE_IMPLICIT for work on the legacy stream while a blocking stream of its device is captured, whose capture is invalid
 * from now on. */
int pya_hc_capture_implicit_locked(const struct pya_hc_stream *stream);
/* Both for a call on a given stream, which must not itself be capturing. */
int pya_hc_capture_unsafe_stream_locked(struct pya_hc_stream *stream);
/* Waiting for a whole device ends every capture on it, whatever its mode and the thread's; those on others go on. */
int pya_hc_capture_unsafe_device_locked(int device);

/* What asks about a captured event, or waits for one, ends its capture, if that is still under way. */
void pya_hc_capture_spoil_locked(uint64_t id);

/* Work on a stream: *captured tells that it became a node and must not be done now.  Takes no lock. */
int pya_hc_submit_locked(
    struct pya_hc_stream *stream, const struct pya_hc_action *action, bool *captured);

/* into: a graph of the program's, whose nodes `deps` the first one depends on; NULL: a new one. */
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
/* The same in the parameters of CUDA's own calls, of which the caller may leave all but status NULL. */
int pya_hc_capture_tell(
    const void *stream_handle, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    size_t *n_deps);
/* flags 0 adds dependencies, 1 replaces them. */
int pya_hc_capture_set_deps(
    const void *stream_handle, struct pya_hc_node *const *deps, size_t n_deps, unsigned flags);

/* Both sides of a cross-stream dependency, called by stream.c. */
int pya_hc_capture_record_locked(struct pya_hc_stream *stream, struct pya_hc_event *event);
int pya_hc_capture_wait_locked(struct pya_hc_stream *stream, struct pya_hc_event *event);
