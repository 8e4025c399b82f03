/* cuDNN's recurrent networks: the layout of their weights, and the size of their scratch memory.
 *
 * Weights are laid out as torch expects: per layer and direction all matrices, input ones first, then all
 * biases.  That is exact.  cuDNN does not publish how much it reserves for the backward pass; we take the gates, the
 * state and the output of each step, and say so once when it is used. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter): CUDA's signatures. */

#include "stubs.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIMS 8

enum { MODE_LSTM = 2, MODE_GRU = 3 };
enum { CUDNN_OK = 0, CUDNN_ALLOC_FAILED = 4, CUDNN_BAD_PARAM = 2000 };
enum { FORWARD_TRAINING = 1 };

struct tensor_descriptor {
    int type, n_dims;
    int dims[MAX_DIMS], strides[MAX_DIMS];
};

struct rnn_descriptor {
    int mode, n_bias, is_bidirectional, type;
    size_t input, hidden, projected, n_layers;
};

struct rnn_data_descriptor {
    size_t steps, batch;
};

static int
descriptor_new(void **out, size_t size) {
    *out = calloc(1, size);
    return *out == NULL ? CUDNN_ALLOC_FAILED : CUDNN_OK;
}

int
cudnnCreateTensorDescriptor(void **out) {
    COUNT();
    return descriptor_new(out, sizeof(struct tensor_descriptor));
}

int
cudnnDestroyTensorDescriptor(void *descriptor) {
    COUNT();
    free(descriptor);
    return CUDNN_OK;
}

int
cudnnCreateRNNDescriptor(void **out) {
    COUNT();
    return descriptor_new(out, sizeof(struct rnn_descriptor));
}

int
cudnnDestroyRNNDescriptor(void *descriptor) {
    COUNT();
    free(descriptor);
    return CUDNN_OK;
}

int
cudnnCreateRNNDataDescriptor(void **out) {
    COUNT();
    return descriptor_new(out, sizeof(struct rnn_data_descriptor));
}

int
cudnnDestroyRNNDataDescriptor(void *descriptor) {
    COUNT();
    free(descriptor);
    return CUDNN_OK;
}

int
cudnnSetTensorNdDescriptor(
    struct tensor_descriptor *tensor, int type, int n_dims, const int *dims, const int *strides) {
    COUNT();
    if (n_dims < 0 || n_dims > MAX_DIMS) {
        return CUDNN_BAD_PARAM;
    }
    tensor->type = type;
    tensor->n_dims = n_dims;
    memcpy(tensor->dims, dims, (size_t)n_dims * sizeof *dims);
    memcpy(tensor->strides, strides, (size_t)n_dims * sizeof *strides);
    return CUDNN_OK;
}

int
cudnnGetTensorNdDescriptor(
    const struct tensor_descriptor *tensor, int n_wanted, int *type, int *n_dims, int *dims,
    int *strides) {
    COUNT();
    *type = tensor->type;
    *n_dims = tensor->n_dims;
    size_t n = (size_t)(n_wanted < tensor->n_dims ? n_wanted : tensor->n_dims);
    memcpy(dims, tensor->dims, n * sizeof *dims);
    memcpy(strides, tensor->strides, n * sizeof *strides);
    return CUDNN_OK;
}

int
cudnnSetRNNDescriptor_v8(
    struct rnn_descriptor *rnn, int algorithm, int mode, int bias, int direction, int input_mode,
    int type, int math_type, int math_mode, int32_t input, int32_t hidden, int32_t projected,
    int32_t n_layers, void *dropout, uint32_t flags) {
    COUNT();
    (void)algorithm, (void)input_mode, (void)math_type, (void)math_mode, (void)dropout;
    (void)flags;
    if (input < 0 || hidden <= 0 || projected < 0 || n_layers <= 0) {
        return CUDNN_BAD_PARAM;
    }
    *rnn = (struct rnn_descriptor){
        .mode = mode,
        .n_bias = bias == 0   ? 0
                  : bias == 2 ? 2
                              : 1,
        .is_bidirectional = direction == 1,
        .type = type,
        .input = (size_t)input,
        .hidden = (size_t)hidden,
        .projected = (size_t)projected,
        .n_layers = (size_t)n_layers,
    };
    return CUDNN_OK;
}

int
cudnnSetRNNDataDescriptor(
    struct rnn_data_descriptor *data, int type, int layout, int steps, int batch, int vector,
    const int *lengths, void *padding) {
    COUNT();
    (void)type, (void)layout, (void)vector, (void)lengths, (void)padding;
    data->steps = (size_t)steps;
    data->batch = (size_t)batch;
    return CUDNN_OK;
}

static size_t
rnn_gates(const struct rnn_descriptor *rnn) {
    return rnn->mode == MODE_LSTM ? 4 : rnn->mode == MODE_GRU ? 3 : 1;
}

static size_t
rnn_element(const struct rnn_descriptor *rnn) {
    enum { TYPE_DOUBLE = 1, TYPE_HALF = 2, TYPE_BFLOAT16 = 9 };
    return rnn->type == TYPE_DOUBLE                               ? 8
           : rnn->type == TYPE_HALF || rnn->type == TYPE_BFLOAT16 ? 2
                                                                  : 4;
}

/* Output size of one direction of a layer: that of the projection if it has one. */
static size_t
rnn_output(const struct rnn_descriptor *rnn) {
    return rnn->projected > 0 && rnn->projected < rnn->hidden ? rnn->projected : rnn->hidden;
}

static size_t
rnn_directions(const struct rnn_descriptor *rnn) {
    return rnn->is_bidirectional ? 2 : 1;
}

/* Columns of the input matrices of a pseudo-layer (one direction of one layer). */
static size_t
rnn_columns(const struct rnn_descriptor *rnn, size_t pseudo) {
    bool is_first = pseudo < rnn_directions(rnn);
    return is_first ? rnn->input : rnn_output(rnn) * rnn_directions(rnn);
}

/* Elements of all matrices of a pseudo-layer. */
static size_t
rnn_matrices(const struct rnn_descriptor *rnn, size_t pseudo) {
    size_t rows = rnn_gates(rnn) * rnn->hidden;
    size_t output = rnn_output(rnn);
    size_t projection = output < rnn->hidden ? output * rnn->hidden : 0;
    return rows * (rnn_columns(rnn, pseudo) + output) + projection;
}

static size_t
rnn_biases(const struct rnn_descriptor *rnn) {
    return rnn_gates(rnn) * rnn->hidden * (size_t)rnn->n_bias;
}

/* Elements before a pseudo-layer. */
static size_t
rnn_start(const struct rnn_descriptor *rnn, size_t pseudo) {
    size_t n = 0;
    for (size_t i = 0; i < pseudo; i++) {
        n += rnn_matrices(rnn, i) + rnn_biases(rnn);
    }
    return n;
}

int
cudnnGetRNNWeightSpaceSize(void *handle, const struct rnn_descriptor *rnn, size_t *out) {
    COUNT();
    (void)handle;
    *out = rnn_start(rnn, rnn->n_layers * rnn_directions(rnn)) * rnn_element(rnn);
    return CUDNN_OK;
}

/* The caller may pass NULL for either part. */
static void
tensor_set(struct tensor_descriptor *tensor, int type, size_t rows, size_t columns) {
    if (tensor == NULL) {
        return;
    }
    *tensor = (struct tensor_descriptor){
        .type = type,
        .n_dims = 3,
        .dims = {1, (int)rows, (int)columns},
        .strides = {(int)(rows * columns), (int)columns, 1},
    };
}

int
cudnnGetRNNWeightParams(
    void *handle, const struct rnn_descriptor *rnn, int32_t pseudo_layer, size_t space_bytes,
    const char *space, int32_t linear, struct tensor_descriptor *matrix, void **matrix_out,
    struct tensor_descriptor *bias, void **bias_out) {
    COUNT();
    (void)handle;
    (void)space_bytes;
    size_t pseudo = (size_t)pseudo_layer;
    size_t gates = rnn_gates(rnn);
    size_t id = (size_t)linear;
    size_t output = rnn_output(rnn);
    if (pseudo_layer < 0 || pseudo >= rnn->n_layers * rnn_directions(rnn) || linear < 0 ||
        id > 2 * gates || (id == 2 * gates && output == rnn->hidden)) {
        return CUDNN_BAD_PARAM;
    }
    bool is_input = id < gates;
    bool is_projection = id == 2 * gates;
    size_t columns = is_input ? rnn_columns(rnn, pseudo) : output;
    size_t at = rnn_start(rnn, pseudo);
    at += (is_input ? id : gates) * rnn->hidden * rnn_columns(rnn, pseudo);
    at += is_input ? 0 : (id - gates) * rnn->hidden * output;
    tensor_set(
        matrix, rnn->type, is_projection ? output : rnn->hidden,
        is_projection ? rnn->hidden : columns);
    if (matrix_out != NULL) {
        *matrix_out = (void *)(uintptr_t)(space + at * rnn_element(rnn));
    }
    /* If there is a single bias, it belongs to the input matrices. */
    bool has_bias = !is_projection && rnn->n_bias > (is_input ? 0 : 1);
    tensor_set(bias, rnn->type, has_bias ? rnn->hidden : 0, 1);
    size_t bias_at = rnn_start(rnn, pseudo) + rnn_matrices(rnn, pseudo) + id * rnn->hidden;
    if (bias_out != NULL) {
        *bias_out = has_bias ? (void *)(uintptr_t)(space + bias_at * rnn_element(rnn)) : NULL;
    }
    return CUDNN_OK;
}

int
cudnnGetRNNTempSpaceSizes(
    void *handle, const struct rnn_descriptor *rnn, int mode,
    const struct rnn_data_descriptor *data, size_t *work_bytes, size_t *reserve_bytes) {
    COUNT();
    (void)handle;
    static atomic_bool told;
    if (!atomic_exchange(&told, true)) {
        (void)fprintf(
            stderr, "pyalloc hostcuda: cuDNN's scratch memory for recurrent layers is an estimate; "
                    "torch.backends.cudnn.enabled = False uses torch's own, which is exact\n");
    }
    size_t step = data->batch * rnn_directions(rnn) * rnn_element(rnn);
    size_t per_state = rnn_gates(rnn) * rnn->hidden;
    *work_bytes = data->steps * step * per_state;
    size_t kept = per_state + rnn->hidden + rnn_output(rnn);
    size_t reserve = data->steps * step * kept * rnn->n_layers;
    if (reserve_bytes != NULL) {
        *reserve_bytes = mode == FORWARD_TRAINING ? reserve : 0;
    }
    return CUDNN_OK;
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
