/* libcuda.so.1: streams, events, capture, graphs. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#include "call.h"
#include "copy.h"

int
cuStreamCreate(void **out, unsigned flags) {
    HC_CONTEXT();
    return pya_hc_stream_create(flags, 0, out);
}

int
cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    HC_CONTEXT();
    return pya_hc_stream_create(flags, priority, out);
}

int
cuStreamDestroy_v2(void *stream) {
    HC_DRIVER();
    return pya_hc_stream_destroy(stream);
}

int
cuStreamSynchronize(void *stream) {
    HC_STREAM_TIMED(stream);
    return pya_hc_stream_sync(stream);
}

int
cuStreamQuery(void *stream) {
    HC_STREAM_TIMED(stream);
    return pya_hc_stream_query(stream);
}

int
cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    HC_STREAM_TIMED(stream);
    (void)flags;
    return pya_hc_stream_wait(stream, event);
}

static int
stream_device(const void *handle, struct pya_hc_device **out) {
    pya_hc_lock();
    const struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    *out = stream == NULL ? NULL : pya_hc_device(stream->device);
    pya_hc_unlock();
    return *out == NULL ? CU_INVALID_HANDLE : CU_OK;
}

int
cuStreamGetCtx(void *stream, void **out) {
    HC_STREAM(stream);
    struct pya_hc_device *dev = NULL;
    int error = stream_device(stream, &dev);
    *out = dev;
    return error;
}

int
cuStreamGetDevice(void *stream, int *out) {
    HC_STREAM(stream);
    struct pya_hc_device *dev = NULL;
    int error = stream_device(stream, &dev);
    *out = dev == NULL ? 0 : dev->ordinal;
    return error;
}

int
cuStreamIsCapturing(void *stream, int *status) {
    HC_STREAM_TIMED(stream);
    struct pya_hc_capture_info info;
    int error = pya_hc_capture_info(stream, &info);
    *status = info.status;
    return error;
}

int
cuStreamBeginCapture_v2(void *stream, int mode) {
    HC_STREAM(stream);
    return pya_hc_capture_begin(stream, mode, NULL, NULL, 0);
}

int
cuStreamEndCapture(void *stream, struct pya_hc_graph **out) {
    HC_DRIVER();
    return pya_hc_capture_end(stream, out);
}

int
cuStreamGetCaptureInfo_v2(
    void *stream, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    size_t *n_deps) {
    HC_STREAM(stream);
    return pya_hc_capture_tell(stream, status, id, graph, deps, n_deps);
}

int
cuStreamGetCaptureInfo_v3(
    void *stream, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    const void **edges, size_t *n_deps) {
    HC_STREAM(stream);
    if (edges != NULL) {
        *edges = NULL;
    }
    return pya_hc_capture_tell(stream, status, id, graph, deps, n_deps);
}

int
cuThreadExchangeStreamCaptureMode(int *mode) {
    HC_DRIVER_TIMED();
    return pya_hc_capture_exchange_mode(mode);
}

int
cuStreamWriteValue32_v2(void *stream, uintptr_t address, uint32_t value, unsigned flags) {
    HC_STREAM(stream);
    (void)flags;
    return pya_hc_fill((void *)address, (int)value, sizeof value, 1, stream, false);
}

/* As two fills, which a capture can hold. */
int
cuStreamWriteValue64_v2(void *stream, uintptr_t address, uint64_t value, unsigned flags) {
    HC_STREAM(stream);
    (void)flags;
    int error = pya_hc_fill((void *)address, (int)(uint32_t)value, 4, 1, stream, false);
    return error == CU_OK
               ? pya_hc_fill((void *)(address + 4), (int)(value >> 32), 4, 1, stream, false)
               : error;
}

int
cuEventCreate(void **out, unsigned flags) {
    HC_CONTEXT_TIMED();
    return pya_hc_event_create(flags, out);
}

int
cuEventDestroy_v2(void *event) {
    HC_DRIVER_TIMED();
    return pya_hc_event_destroy(event);
}

int
cuEventRecord(void *event, void *stream) {
    HC_STREAM_TIMED(stream);
    return pya_hc_event_record(event, stream);
}

int
cuEventQuery(void *event) {
    HC_DRIVER_TIMED();
    return pya_hc_event_query(event);
}

int
cuEventSynchronize(void *event) {
    HC_DRIVER_TIMED();
    return pya_hc_event_sync(event);
}

int
cuEventElapsedTime(float *ms, void *start, void *end) {
    HC_DRIVER();
    return pya_hc_event_elapsed(ms, start, end);
}

int
cuEventElapsedTime_v2(float *ms, void *start, void *end) {
    HC_DRIVER();
    return pya_hc_event_elapsed(ms, start, end);
}

int
cuGraphCreate(struct pya_hc_graph **out, unsigned flags) {
    HC_DRIVER();
    (void)flags;
    return pya_hc_graph_create(out);
}

int
cuGraphDestroy(struct pya_hc_graph *graph) {
    HC_DRIVER();
    return pya_hc_graph_destroy(graph);
}

int
cuGraphInstantiateWithFlags(
    struct pya_hc_graph **out, struct pya_hc_graph *graph, unsigned long long flags) {
    HC_DRIVER();
    (void)flags;
    return pya_hc_graph_instantiate(graph, out);
}

int
cuGraphExecDestroy(struct pya_hc_graph *exec) {
    HC_DRIVER();
    return pya_hc_graph_destroy(exec);
}

int
cuGraphLaunch(struct pya_hc_graph *exec, void *stream) {
    HC_STREAM(stream);
    return pya_hc_graph_launch(exec, stream);
}

int
cuGraphGetNodes(struct pya_hc_graph *graph, struct pya_hc_node **nodes, size_t *n) {
    HC_DRIVER();
    return pya_hc_graph_nodes(graph, nodes, n);
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
