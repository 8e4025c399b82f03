/* Names and texts of CUDA's errors: one table for the runtime and the driver. */

#include "call.h"

struct error_text {
    int code;
    const char *name;
    const char *text;
};

static const struct error_text error_texts[] = {
    {CU_OK, "cudaSuccess", "no error"},
    {CU_INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {CU_OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {CU_NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {CU_INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {CU_INVALID_SYMBOL, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {CU_INVALID_MEMCPY_DIRECTION, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {CU_NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {CU_INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {CU_INVALID_CONTEXT, "cudaErrorDeviceUninitialized", "invalid device context"},
    {CU_ECC, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {CU_INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {CU_NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {CU_NOT_READY, "cudaErrorNotReady", "device not ready"},
    {CU_ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {CU_LAUNCH_OUT_OF_RESOURCES, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {CU_PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {CU_PEER_NOT_ENABLED, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {CU_ASSERT, "cudaErrorAssert", "device-side assert triggered"},
    {CU_HOST_ALREADY_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {CU_HOST_NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {CU_LAUNCH_FAILURE, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {CU_NOT_PERMITTED, "cudaErrorNotPermitted", "operation not permitted"},
    {CU_NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CU_CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {CU_CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {CU_CAPTURE_MERGE, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {CU_CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {CU_CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {CU_CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {CU_CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CU_CAPTURED_EVENT, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CU_CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CU_UNKNOWN, "cudaErrorUnknown", "unknown error"},
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

const char *
pya_hc_error_name(int error) {
    const struct error_text *found = error_find(error);
    return found == NULL ? "unrecognized error code" : found->name;
}

const char *
pya_hc_error_text(int error) {
    const struct error_text *found = error_find(error);
    return found == NULL ? "unrecognized error code" : found->text;
}
