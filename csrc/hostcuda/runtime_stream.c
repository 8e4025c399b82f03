/* libcudart: streams, events, capture, graphs. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#include "call.h"
#include "graph.h"

#include <stdio.h>

#define RT(expression) return pya_hc_runtime(expression)

int
cudaStreamCreate(void **out) {
    HC_RUNTIME();
    RT(pya_hc_stream_create(0, 0, out));
}

int
cudaStreamCreateWithFlags(void **out, unsigned flags) {
    HC_RUNTIME();
    RT(pya_hc_stream_create(flags, 0, out));
}

int
cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    HC_RUNTIME();
    RT(pya_hc_stream_create(flags, priority, out));
}

int
cudaStreamDestroy(void *stream) {
    HC_RUNTIME();
    RT(pya_hc_stream_destroy(stream));
}

int
cudaStreamSynchronize(void *stream) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_stream_sync(stream));
}

int
cudaStreamQuery(void *stream) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_stream_query(stream));
}

int
cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    HC_RUNTIME_TIMED();
    (void)flags;
    RT(pya_hc_stream_wait(stream, event));
}

static int
stream_describe(const void *handle, struct pya_hc_stream *out) {
    pya_hc_lock();
    const struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    if (stream != NULL) {
        *out = *stream;
    }
    pya_hc_unlock();
    return stream == NULL ? CU_INVALID_HANDLE : CU_OK;
}

int
cudaStreamGetPriority(void *handle, int *out) {
    HC_RUNTIME();
    struct pya_hc_stream stream;
    int error = stream_describe(handle, &stream);
    if (error == CU_OK) {
        *out = stream.priority;
    }
    RT(error);
}

int
cudaStreamGetFlags(void *handle, unsigned *out) {
    HC_RUNTIME();
    struct pya_hc_stream stream;
    int error = stream_describe(handle, &stream);
    if (error == CU_OK) {
        *out = stream.flags;
    }
    RT(error);
}

int
cudaStreamGetId(void *handle, unsigned long long *out) {
    HC_RUNTIME();
    struct pya_hc_stream stream;
    int error = stream_describe(handle, &stream);
    if (error == CU_OK) {
        *out = stream.id;
    }
    RT(error);
}

int
cudaStreamGetDevice(void *handle, int *out) {
    HC_RUNTIME();
    struct pya_hc_stream stream;
    int error = stream_describe(handle, &stream);
    if (error == CU_OK) {
        *out = stream.device;
    }
    RT(error);
}

struct stream_callback {
    pya_hc_stream_callback fn;
    void *stream, *data;
};

int
cudaStreamAddCallback(void *stream, pya_hc_stream_callback fn, void *data, unsigned flags) {
    HC_RUNTIME();
    (void)flags;
    if (fn == NULL) {
        RT(CU_INVALID_VALUE);
    }
    struct pya_hc_capture_info info;
    int error = pya_hc_capture_info(stream, &info);
    if (error == CU_OK && info.status != CAPTURE_NONE) {
        /* Unlike host functions, callbacks cannot be captured. */
        error = pya_hc_stream_sync(stream);
    }
    if (error == CU_OK) {
        fn(stream, CU_OK, data);
    }
    RT(error);
}

/* Events */

int
cudaEventCreate(void **out) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_create(0, out));
}

int
cudaEventCreateWithFlags(void **out, unsigned flags) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_create(flags, out));
}

int
cudaEventDestroy(void *event) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_destroy(event));
}

int
cudaEventRecord(void *event, void *stream) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_record(event, stream));
}

int
cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    HC_RUNTIME_TIMED();
    (void)flags;
    RT(pya_hc_event_record(event, stream));
}

int
cudaEventQuery(void *event) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_query(event));
}

int
cudaEventSynchronize(void *event) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_event_sync(event));
}

int
cudaEventElapsedTime(float *ms, void *start, void *end) {
    HC_RUNTIME();
    RT(pya_hc_event_elapsed(ms, start, end));
}

/* Capture */

int
cudaStreamBeginCapture(void *stream, int mode) {
    HC_RUNTIME();
    RT(pya_hc_capture_begin(stream, mode, NULL, NULL, 0));
}

int
cudaStreamBeginCaptureToGraph(
    void *stream, struct pya_hc_graph *graph, struct pya_hc_node *const *deps, const void *edges,
    size_t n_deps, int mode) {
    HC_RUNTIME();
    (void)edges;
    RT(graph == NULL ? CU_INVALID_VALUE : pya_hc_capture_begin(stream, mode, graph, deps, n_deps));
}

int
cudaStreamEndCapture(void *stream, struct pya_hc_graph **out) {
    HC_RUNTIME();
    RT(pya_hc_capture_end(stream, out));
}

int
cudaStreamIsCapturing(void *stream, int *status) {
    HC_RUNTIME();
    struct pya_hc_capture_info info;
    int error = pya_hc_capture_info(stream, &info);
    *status = info.status;
    RT(error);
}

int
cudaStreamGetCaptureInfo_v2(
    void *stream, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    size_t *n_deps) {
    HC_RUNTIME();
    RT(pya_hc_capture_tell(stream, status, id, graph, deps, n_deps));
}

int
cudaStreamGetCaptureInfo_v3(
    void *stream, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    const void **edges, size_t *n_deps) {
    HC_RUNTIME();
    if (edges != NULL) {
        *edges = NULL;
    }
    RT(pya_hc_capture_tell(stream, status, id, graph, deps, n_deps));
}

int
cudaThreadExchangeStreamCaptureMode(int *mode) {
    HC_RUNTIME_TIMED();
    RT(pya_hc_capture_exchange_mode(mode));
}

/* Graphs */

int
cudaGraphCreate(struct pya_hc_graph **out, unsigned flags) {
    HC_RUNTIME();
    (void)flags;
    RT(pya_hc_graph_create(out));
}

int
cudaGraphDestroy(struct pya_hc_graph *graph) {
    HC_RUNTIME();
    RT(pya_hc_graph_destroy(graph));
}

int
cudaGraphExecDestroy(struct pya_hc_graph *exec) {
    HC_RUNTIME();
    RT(pya_hc_graph_destroy(exec));
}

int
cudaGraphInstantiate(
    struct pya_hc_graph **out, struct pya_hc_graph *graph, unsigned long long flags) {
    HC_RUNTIME();
    (void)flags;
    RT(pya_hc_graph_instantiate(graph, out));
}

int
cudaGraphInstantiateWithFlags(
    struct pya_hc_graph **out, struct pya_hc_graph *graph, unsigned long long flags) {
    HC_RUNTIME();
    (void)flags;
    RT(pya_hc_graph_instantiate(graph, out));
}

int
cudaGraphUpload(struct pya_hc_graph *exec, void *stream) {
    HC_RUNTIME();
    (void)exec;
    (void)stream;
    return CU_OK;
}

int
cudaGraphLaunch(struct pya_hc_graph *exec, void *stream) {
    HC_RUNTIME();
    RT(pya_hc_graph_launch(exec, stream));
}

int
cudaGraphGetNodes(struct pya_hc_graph *graph, struct pya_hc_node **nodes, size_t *n) {
    HC_RUNTIME();
    RT(pya_hc_graph_nodes(graph, nodes, n));
}

int
cudaGraphNodeGetType(struct pya_hc_node *node, int *out) {
    HC_RUNTIME();
    RT(pya_hc_graph_node_type(node, out));
}

int
cudaGraphAddEmptyNode(
    struct pya_hc_node **out, struct pya_hc_graph *graph, struct pya_hc_node *const *deps,
    size_t n_deps) {
    HC_RUNTIME();
    struct pya_hc_action action = {.type = NODE_EMPTY};
    RT(pya_hc_graph_add(graph, &action, deps, n_deps, out));
}

static int
graph_add_node(
    struct pya_hc_node **out, struct pya_hc_graph *graph, struct pya_hc_node *const *deps,
    size_t n_deps, struct cuda_node_params *params) {
    if (params == NULL) {
        return CU_INVALID_VALUE;
    }
    struct pya_hc_action action = {.type = params->type};
    if (params->type == NODE_CONDITIONAL) {
        /* The bodies' graphs are returned through a pointer to an array that the node owns. */
        enum { WORD_SIZE = 1, WORD_GRAPHS = 2 };
        const size_t n = (uint64_t)params->words[WORD_SIZE] >> 32; /* below it: what kind */
        struct pya_hc_graph **bodies = NULL;
        int error = pya_hc_graph_add_conditional(graph, n, deps, n_deps, out, &bodies);
        if (error == CU_OK) {
            params->words[WORD_GRAPHS] = (long long)(uintptr_t)bodies;
        }
        return error;
    }
    if (params->type != NODE_EMPTY && params->type != NODE_KERNEL) {
        return CU_NOT_SUPPORTED;
    }
    return pya_hc_graph_add(graph, &action, deps, n_deps, out);
}

int
cudaGraphConditionalHandleCreate(
    unsigned long long *out, struct pya_hc_graph *graph, unsigned value, unsigned flags) {
    HC_RUNTIME();
    (void)graph;
    (void)value;
    (void)flags;
    static _Atomic unsigned long long last;
    *out = ++last;
    return CU_OK;
}

/* Writes an empty graph: it is for debugging only, and a picture without kernels would mislead. */
int
cudaGraphDebugDotPrint(struct pya_hc_graph *graph, const char *path, unsigned flags) {
    HC_RUNTIME();
    (void)flags;
    size_t n = 0;
    int error = pya_hc_graph_nodes(graph, NULL, &n);
    FILE *file = error == CU_OK ? fopen(path, "we") : NULL;
    if (file == NULL) {
        RT(error == CU_OK ? CU_UNKNOWN : error);
    }
    (void)fprintf(file, "digraph pyalloc_hostcuda { label=\"%zu nodes\"; }\n", n);
    (void)fclose(file);
    return CU_OK;
}

/* CUDA 13 added edge data to these signatures; CUDA 12 has that in separate names. */
#if PYA_CUDART_MAJOR >= 13
#define EDGES_NAME(name) name
int
cudaStreamGetCaptureInfo(
    void *stream, int *status, uint64_t *id, void **graph, struct pya_hc_node ***deps,
    const void **edges, size_t *n_deps) {
    HC_RUNTIME();
    if (edges != NULL) {
        *edges = NULL;
    }
    RT(pya_hc_capture_tell(stream, status, id, graph, deps, n_deps));
}
#else
#define EDGES_NAME(name) name##_v2
int
cudaStreamUpdateCaptureDependencies(
    void *stream, struct pya_hc_node *const *deps, size_t n_deps, unsigned flags) {
    HC_RUNTIME();
    RT(pya_hc_capture_set_deps(stream, deps, n_deps, flags));
}

int
cudaGraphAddNode(
    struct pya_hc_node **out, struct pya_hc_graph *graph, struct pya_hc_node *const *deps,
    size_t n_deps, struct cuda_node_params *params) {
    HC_RUNTIME();
    RT(graph_add_node(out, graph, deps, n_deps, params));
}

int
cudaGraphNodeGetDependencies(struct pya_hc_node *node, struct pya_hc_node **deps, size_t *n) {
    HC_RUNTIME();
    RT(pya_hc_graph_node_deps(node, deps, n));
}
#endif

int
EDGES_NAME(cudaStreamUpdateCaptureDependencies)(
    void *stream, struct pya_hc_node *const *deps, const void *edges, size_t n_deps,
    unsigned flags) {
    HC_RUNTIME();
    (void)edges;
    RT(pya_hc_capture_set_deps(stream, deps, n_deps, flags));
}

int
EDGES_NAME(cudaGraphAddNode)(
    struct pya_hc_node **out, struct pya_hc_graph *graph, struct pya_hc_node *const *deps,
    const void *edges, size_t n_deps, struct cuda_node_params *params) {
    HC_RUNTIME();
    (void)edges;
    RT(graph_add_node(out, graph, deps, n_deps, params));
}

int
EDGES_NAME(cudaGraphNodeGetDependencies)(
    struct pya_hc_node *node, struct pya_hc_node **deps, void *edges, size_t *n) {
    HC_RUNTIME();
    (void)edges;
    RT(pya_hc_graph_node_deps(node, deps, n));
}

/* User objects: a program's data kept alive by a graph. */

int
cudaUserObjectCreate(
    void **out, void *data, pya_hc_host_fn destroy, unsigned refs, unsigned flags) {
    HC_RUNTIME();
    (void)flags;
    RT(pya_hc_user_object_create(data, destroy, refs, out));
}

int
cudaUserObjectRelease(void *object, unsigned refs) {
    HC_RUNTIME();
    RT(pya_hc_user_object_release(object, refs));
}

int
cudaGraphRetainUserObject(struct pya_hc_graph *graph, void *object, unsigned refs, unsigned flags) {
    HC_RUNTIME();
    RT(pya_hc_graph_retain_object(graph, object, refs, flags == 1));
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
