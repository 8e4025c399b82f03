/* The entry points of cuBLAS, cuDNN, CUPTI, NCCL and the like that must do more than return "success".  All others are
 * generated from names/; together they make the preloaded libpya_cudalibs.so. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter):
 * the signatures are CUDA's. */

#define _GNU_SOURCE
#include "stubs.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* cuBLAS */

/* Each caller gets a handle of its own.  torch keeps a workspace for each handle: every thread that multiplies on a
 * device has one, and so has autograd's thread for that device. */
int
cublasCreate_v2(void **out) {
    COUNT();
    *out = malloc(1);
    return *out == NULL ? 3 : 0; /* CUBLAS_STATUS_ALLOC_FAILED */
}

int
cublasDestroy_v2(void *handle) {
    COUNT();
    free(handle);
    return 0;
}

int
cublasGetVersion_v2(void *handle, int *out) {
    COUNT();
    (void)handle;
    *out = 130000;
    return 0;
}

size_t
cublasLtGetVersion(void) {
    COUNT();
    return 130000;
}

static int
blas_get_zero(int *out) {
    *out = 0; /* the default of every mode: host pointers, default math */
    return 0;
}

int
cublasGetPointerMode_v2(void *handle, int *out) {
    COUNT();
    (void)handle;
    return blas_get_zero(out);
}

int
cublasGetMathMode(void *handle, int *out) {
    COUNT();
    (void)handle;
    return blas_get_zero(out);
}

int
cublasGetStream_v2(void *handle, void **out) {
    COUNT();
    (void)handle;
    *out = NULL;
    return 0;
}

const char *
cublasGetStatusString(int status) {
    COUNT();
    return status == 0 ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_UNKNOWN";
}

const char *
cublasGetStatusName(int status) {
    return cublasGetStatusString(status);
}

/* cuSPARSE: on a card, kernels count the elements of sums and products; here they are estimated. */
struct sparse {
    int64_t rows, columns, n_elements;
};

static int
sparse_create(struct sparse **out, int64_t rows, int64_t columns, int64_t n_elements) {
    enum { ALLOC_FAILED = 2 };
    *out = malloc(sizeof **out);
    if (*out == NULL) {
        return ALLOC_FAILED;
    }
    **out = (struct sparse){rows, columns, n_elements};
    return 0;
}

/* We ignore the parameters after n_elements (arrays and their types), so they are left out. */
int
cusparseCreateCsr(struct sparse **out, int64_t rows, int64_t columns, int64_t n_elements) {
    COUNT();
    return sparse_create(out, rows, columns, n_elements);
}

int
cusparseCreateCoo(struct sparse **out, int64_t rows, int64_t columns, int64_t n_elements) {
    COUNT();
    return sparse_create(out, rows, columns, n_elements);
}

int
cusparseDestroySpMat(struct sparse *matrix) {
    COUNT();
    free(matrix);
    return 0;
}

int
cusparseSpMatGetSize(
    const struct sparse *matrix, int64_t *rows, int64_t *columns, int64_t *n_elements) {
    COUNT();
    *rows = matrix->rows;
    *columns = matrix->columns;
    *n_elements = matrix->n_elements;
    return 0;
}

/* Assumes evenly spread elements, and that no two products fall on the same position. */
int
cusparseSpGEMM_compute(
    void *handle, int a_operation, int b_operation, const void *alpha, const struct sparse *a,
    const struct sparse *b, const void *beta, struct sparse *c, int type, int algorithm,
    void *description, size_t *workspace) {
    COUNT();
    (void)handle, (void)a_operation, (void)b_operation, (void)alpha, (void)beta;
    (void)type, (void)algorithm, (void)description;
    *workspace = 0;
    double inner = a->columns > 0 ? (double)a->columns : 1.0;
    double most = (double)c->rows * (double)c->columns;
    double n_products = (double)a->n_elements * (double)b->n_elements / inner;
    double n = n_products < most ? n_products : most;
    c->n_elements = n < (double)(INT64_MAX / 2) ? (int64_t)n : INT64_MAX / 2;
    return 0;
}

/* Assumes that no two elements fall on the same position. */
int
cusparseXcsrgeam2Nnz(
    void *handle, int rows, int columns, const void *a, int n_a, const void *a_rows,
    const void *a_columns, const void *b, int n_b, const void *b_rows, const void *b_columns,
    const void *c, void *c_rows, int *out) {
    COUNT();
    (void)handle, (void)a, (void)a_rows, (void)a_columns, (void)b, (void)b_rows, (void)b_columns;
    (void)c, (void)c_rows;
    int64_t n = (int64_t)n_a + n_b;
    int64_t most = (int64_t)rows * columns;
    n = n < most ? n : most;
    *out = n < INT_MAX ? (int)n : INT_MAX;
    return 0;
}

/* cuSPARSELt: a matrix of which half the elements are dropped; stored at the start of the caller's 512-byte struct. */
struct lt_sparse {
    int64_t n_elements;
    size_t item_bytes;
};

static size_t
lt_item_bytes(int type) {
    enum { R_32F = 0, R_8I = 3, R_8F_E4M3 = 28, R_8F_E5M2 = 29 }; /* cudaDataType */
    return type == R_32F ? 4 : type == R_8I || type == R_8F_E4M3 || type == R_8F_E5M2 ? 1 : 2;
}

int
cusparseLtStructuredDescriptorInit(
    void *handle, struct lt_sparse *out, int64_t rows, int64_t columns, int64_t row_stride,
    uint32_t alignment, int type, int order, int sparsity) {
    COUNT();
    (void)handle;
    (void)row_stride;
    (void)alignment;
    (void)order;
    (void)sparsity;
    *out = (struct lt_sparse){rows * columns, lt_item_bytes(type)};
    return 0;
}

/* Half the elements, plus a bit each for their positions. */
int
cusparseLtSpMMACompressedSize2(
    void *handle, const struct lt_sparse *matrix, size_t *out, size_t *workspace) {
    COUNT();
    (void)handle;
    *out = (size_t)matrix->n_elements * matrix->item_bytes / 2 + (size_t)matrix->n_elements / 8;
    *workspace = 0;
    return 0;
}

/* cublasLtMatmulHeuristicResult_t */
struct lt_heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

int
cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
    int n_wanted, struct lt_heuristic *results, int *n_found) {
    COUNT();
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    *n_found = n_wanted > 0;
    if (n_wanted > 0) {
        *results = (struct lt_heuristic){.waves = 1.0F};
    }
    return 0;
}

/* cuDNN */

/* torch's own cuDNN is loaded after this library, and torch compares its version with ours. */
size_t
cudnnGetVersion(void) {
    COUNT();
    size_t (*real)(void) = NULL;
    void *found = dlsym(RTLD_NEXT, "cudnnGetVersion");
    memcpy(&real, &found, sizeof real);
    return real == NULL ? 92600 : real();
}

/* libraryPropertyType: 0 major, 1 minor, 2 patch */
int
cudnnGetProperty(int which, int *out) {
    size_t version = cudnnGetVersion();
    size_t parts[] = {version / 10000, version / 100 % 100, version % 100};
    *out = which >= 0 && which < 3 ? (int)parts[which] : 0;
    return 0;
}

size_t
cudnnGetCudartVersion(void) {
    COUNT();
    return 13000;
}

const char *
cudnnGetErrorString(int status) {
    COUNT();
    return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_NOT_SUPPORTED";
}

void
cudnnGetLastErrorString(char *out, size_t size) {
    COUNT();
    if (size > 0) {
        out[0] = '\0';
    }
}

int
cudnnBackendCreateDescriptor(int type, void **out) {
    COUNT();
    (void)type;
    pya_hc_stub_write_h((uintptr_t)out);
    return 0;
}

/* cudnnBackendAttributeType_t: the types we answer. */
enum { CUDNN_INT64 = 3, CUDNN_DESCRIPTOR = 15, CUDNN_INT32 = 23 };

int
cudnnBackendGetAttribute(
    void *descriptor, int attribute, int type, int64_t n_wanted, int64_t *n_found, void *out) {
    COUNT();
    (void)descriptor;
    (void)attribute;
    bool is_known = type == CUDNN_INT64 || type == CUDNN_INT32 || type == CUDNN_DESCRIPTOR;
    if (n_found != NULL) {
        *n_found = is_known;
    }
    /* Descriptors are the caller's and stay as they are; sizes are 0: no workspace. */
    if (type == CUDNN_INT64 && n_wanted > 0 && out != NULL) {
        *(int64_t *)out = 0;
    } else if (type == CUDNN_INT32 && n_wanted > 0 && out != NULL) {
        *(int32_t *)out = 0;
    }
    return 0;
}

/* CUPTI: a profiler that sees nothing. */

enum { CUPTI_MAX_LIMIT_REACHED = 12 };

int
cuptiActivityGetNextRecord(void *buffer, size_t bytes, void **record) {
    COUNT();
    (void)buffer;
    (void)bytes;
    *record = NULL;
    return CUPTI_MAX_LIMIT_REACHED;
}

int
cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *out) {
    COUNT();
    (void)context;
    (void)stream;
    *out = 0;
    return 0;
}

int
cuptiGetVersion(uint32_t *out) {
    COUNT();
    *out = 130000;
    return 0;
}

int
cuptiSubscribe(void **out) {
    COUNT();
    pya_hc_stub_write_h((uintptr_t)out);
    return 0;
}

int
cuptiGetResultString(int result, const char **out) {
    COUNT();
    *out = result == 0 ? "CUPTI_SUCCESS" : "CUPTI_ERROR_UNKNOWN";
    return 0;
}

int
cuptiGetCallbackName(int domain, uint32_t id, const char **out) {
    COUNT();
    (void)domain;
    (void)id;
    *out = "unknown";
    return 0;
}

/* NCCL: collectives that move nothing. */

int
ncclGetVersion(int *out) {
    COUNT();
    *out = 22800;
    return 0;
}

const char *
ncclGetErrorString(int result) {
    COUNT();
    return result == 0 ? "no error" : "unknown NCCL error";
}

const char *
ncclGetLastError(void *comm) {
    COUNT();
    (void)comm;
    return "";
}

int
ncclCommGetAsyncError(void *comm, int *out) {
    COUNT();
    (void)comm;
    *out = 0;
    return 0;
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
