/* Names and texts of CUDA's errors: one table for the runtime and the driver. */

#include "call.h"

struct error_text {
    int code;
    const char *name;        /* the runtime's */
    const char *driver_name; /* NULL if only the runtime has the error */
    const char *text;
};

static const struct error_text error_texts[] = {
    {CU_OK, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {CU_INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_NOT_INITIALIZED, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {CU_INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", NULL,
     "invalid configuration argument"},
    {CU_INVALID_SYMBOL, "cudaErrorInvalidSymbol", NULL, "invalid device symbol"},
    {CU_INVALID_MEMCPY_DIRECTION, "cudaErrorInvalidMemcpyDirection", NULL,
     "invalid copy direction for memcpy"},
    {CU_NO_DEVICE, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE",
     "no CUDA-capable device is detected"},
    {CU_INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE",
     "invalid device ordinal"},
    {CU_INVALID_CONTEXT, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {CU_ECC, "cudaErrorECCUncorrectable", "CUDA_ERROR_ECC_UNCORRECTABLE",
     "uncorrectable ECC error encountered"},
    {CU_INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {CU_ILLEGAL_STATE, "cudaErrorIllegalState", "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CU_NOT_FOUND, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CU_NOT_READY, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {CU_ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CU_LAUNCH_OUT_OF_RESOURCES, "cudaErrorLaunchOutOfResources",
     "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {CU_PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled",
     "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CU_PEER_NOT_ENABLED, "cudaErrorPeerAccessNotEnabled", "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
     "peer access has not been enabled"},
    {CU_ASSERT, "cudaErrorAssert", "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {CU_HOST_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CU_HOST_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered",
     "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CU_LAUNCH_FAILURE, "cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED",
     "unspecified launch failure"},
    {CU_NOT_PERMITTED, "cudaErrorNotPermitted", "CUDA_ERROR_NOT_PERMITTED",
     "operation not permitted"},
    {CU_NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported"},
    {CU_CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CU_CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CU_CAPTURE_MERGE, "cudaErrorStreamCaptureMerge", "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {CU_CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {CU_CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {CU_CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CU_CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CU_CAPTURED_EVENT, "cudaErrorCapturedEvent", "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CU_CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CU_UNKNOWN, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const struct error_text *
error_find(int error) {
    for (size_t i = 0; i < sizeof error_texts / sizeof error_texts[0]; i++) {
        if (error_texts[i].code == error) {
            return &error_texts[i];
        }
    }
    return NULL;
}

static const char error_unknown[] = "unrecognized error code";

const char *
pya_hc_error_name(int error) {
    const struct error_text *found = error_find(error);
    return found == NULL ? error_unknown : found->name;
}

const char *
pya_hc_error_text(int error) {
    const struct error_text *found = error_find(error);
    return found == NULL ? error_unknown : found->text;
}

bool
pya_hc_driver_error(int error, const char **name, const char **text) {
    const struct error_text *found = error_find(error);
    bool is_known = found != NULL && found->driver_name != NULL;
    *name = is_known ? found->driver_name : NULL;
    *text = is_known ? found->text : NULL;
    return is_known;
}
