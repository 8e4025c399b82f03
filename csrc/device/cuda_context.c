/* Results of driver calls, and their context. */
#include "cuda_context.h"

#include <stdio.h>

static _Thread_local struct pya_device_error cuda_last;

/* ---- results ---- */

static pya_status
cuda_status(cuda_result result) {
    if (result == CUDA_OK) {
        return PYA_OK;
    }
    /* WSL2 reports with "not ready" that it could not make new memory resident; queries never pass that code to
     * here. */
    if (result == CUDA_NOMEM || result == CUDA_NOT_READY) {
        return PYA_E_NOMEM;
    }
    if (result == CUDA_NOT_SUPPORTED) {
        return PYA_E_NOTSUP;
    }
    return result >= CUDA_CAPTURE_FIRST && result <= CUDA_CAPTURE_LAST ? PYA_E_CAPTURE
                                                                       : PYA_E_DEVICE;
}

bool
cuda_is_sticky(cuda_result result) {
    static const cuda_result each[] = {
        CUDA_ECC_ERROR,          CUDA_NVLINK_ERROR,          CUDA_CONTAINED,
        CUDA_ILLEGAL_ADDRESS,    CUDA_LAUNCH_TIMEOUT,        CUDA_DEVICE_ASSERT,
        CUDA_TENSOR_MEMORY_LEAK, CUDA_MPS_CLIENT_TERMINATED,
    };
    bool is_one = result >= CUDA_BROKEN_FIRST && result <= CUDA_BROKEN_LAST;
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        is_one = is_one || result == each[i];
    }
    return is_one;
}

pya_status
cuda_report(const char *call, cuda_result result, uint64_t bytes) {
    if (result == CUDA_OK) {
        return PYA_OK;
    }
    const struct cuda_driver *driver = cuda_driver_get();
    const char *text = NULL;
    if (driver->cuGetErrorString == NULL || driver->cuGetErrorString(result, &text) != CUDA_OK) {
        text = NULL;
    }
    cuda_last = (struct pya_device_error){
        .code = result, .bytes = bytes, .is_sticky = cuda_is_sticky(result)};
    snprintf(cuda_last.call, sizeof cuda_last.call, "%s", call);
    snprintf(cuda_last.text, sizeof cuda_last.text, "%s", text != NULL ? text : "unknown error");
    return cuda_status(result);
}

pya_status
cuda_report_stream(const char *call, cuda_result result) {
    pya_status status = cuda_report(call, result, 0);
    bool is_gone = result == CUDA_INVALID_HANDLE || result == CUDA_CONTEXT_IS_DESTROYED;
    return is_gone ? PYA_E_STREAM : status;
}

void
cuda_note_peers(uint64_t peers) {
    cuda_last.peers = peers;
}

pya_status
cuda_missing(const char *call) {
    cuda_last = (struct pya_device_error){.code = 0};
    snprintf(cuda_last.call, sizeof cuda_last.call, "%s", call);
    snprintf(cuda_last.text, sizeof cuda_last.text, "libcuda.so.1 has no such function");
    return PYA_E_NOTSUP;
}

pya_status
cuda_report_no_driver(const struct cuda_driver *driver) {
    cuda_last = (struct pya_device_error){.call = "cuInit", .code = driver->init_result};
    snprintf(cuda_last.text, sizeof cuda_last.text, "%s", driver->why_not);
    return PYA_E_NOTSUP;
}

cuda_result
cuda_gently(cuda_result result) {
    return result == CUDA_DEINITIALIZED || result == CUDA_NOT_INITIALIZED ? CUDA_OK : result;
}

/* ---- entering: context and capture mode ---- */

/* Between cuda_begin() and cuda_end(): the first call enters, cuda_end() leaves. */
static _Thread_local struct {
    struct cuda *cuda; /* NULL: not between them */
    unsigned depth;
    bool is_entered;
    struct cuda_scope scope;
} cuda_visit;

pya_status
cuda_enter_scope(struct cuda *cuda, struct cuda_scope *scope) {
    const struct cuda_driver *driver = cuda->driver;
    *scope = (struct cuda_scope){.cuda = cuda, .mode = CUDA_CAPTURE_MODE_RELAXED};
    if (driver->is_forked) {
        return PYA_E_FORKED;
    }
    cuda_context current = NULL;
    cuda_result result = driver->cuCtxGetCurrent(&current);
    if (result != CUDA_OK) {
        return cuda_report("cuCtxGetCurrent", result, 0);
    }
    if (current != cuda->context) {
        result = driver->cuCtxPushCurrent(cuda->context);
        if (result != CUDA_OK) {
            return cuda_report("cuCtxPushCurrent", result, 0);
        }
        scope->n_pushed++;
    }
    scope->exchanged = driver->cuThreadExchangeStreamCaptureMode != NULL &&
                       driver->cuThreadExchangeStreamCaptureMode(&scope->mode) == CUDA_OK;
    return PYA_OK;
}

void
cuda_leave(struct cuda_scope *scope) {
    const struct cuda_driver *driver = scope->cuda->driver;
    if (scope->exchanged) {
        (void)driver->cuThreadExchangeStreamCaptureMode(&scope->mode);
    }
    for (; scope->n_pushed > 0; scope->n_pushed--) {
        cuda_context popped = NULL;
        (void)driver->cuCtxPopCurrent(&popped);
    }
}

pya_status
cuda_enter(struct pya_device *dev, struct cuda_scope *scope) {
    struct cuda *cuda = cuda_from(dev);
    if (cuda_visit.cuda != cuda) {
        return cuda_enter_scope(cuda, scope);
    }
    *scope = (struct cuda_scope){.cuda = cuda};
    if (!cuda_visit.is_entered) {
        pya_status status = cuda_enter_scope(cuda, &cuda_visit.scope);
        if (status != PYA_OK) {
            return status;
        }
        cuda_visit.is_entered = true;
    }
    return PYA_OK;
}

/* The context of another device.  torch uses it too, so retaining it until the process ends does no harm. */
static pya_status
cuda_context_of(const struct cuda_driver *driver, int device, cuda_context *out) {
    static cuda_context contexts[PYA_MAX_DEVICES]; /* atomic */
    *out = __atomic_load_n(&contexts[device], __ATOMIC_ACQUIRE);
    if (*out != NULL) {
        return PYA_OK;
    }
    cuda_device handle = 0;
    pya_status status = cuda_report("cuDeviceGet", driver->cuDeviceGet(&handle, device), 0);
    if (status != PYA_OK) {
        return status;
    }
    cuda_result result = driver->cuDevicePrimaryCtxRetain(out, handle);
    if (result == CUDA_OK) {
        __atomic_store_n(&contexts[device], *out, __ATOMIC_RELEASE);
    }
    return cuda_report("cuDevicePrimaryCtxRetain", result, 0);
}

pya_status
cuda_enter_for(struct pya_device *dev, pya_stream stream, struct cuda_scope *scope) {
    const struct cuda_driver *driver = cuda_from(dev)->driver;
    int other = pya_stream_device(stream);
    pya_status status = cuda_enter(dev, scope);
    if (status != PYA_OK || other < 0 || other >= PYA_MAX_DEVICES) {
        return status;
    }
    cuda_context context;
    status = cuda_context_of(driver, other, &context);
    if (status == PYA_OK) {
        status = cuda_report("cuCtxPushCurrent", driver->cuCtxPushCurrent(context), 0);
        scope->n_pushed += status == PYA_OK;
    }
    if (status != PYA_OK) {
        cuda_leave(scope);
    }
    return status;
}

void
cuda_begin(struct pya_device *dev) {
    struct cuda *cuda = cuda_from(dev);
    if (cuda_visit.cuda == NULL) {
        cuda_visit.cuda = cuda;
    }
    cuda_visit.depth += cuda_visit.cuda == cuda;
}

void
cuda_end(struct pya_device *dev) {
    if (cuda_visit.cuda != cuda_from(dev) || --cuda_visit.depth > 0) {
        return;
    }
    cuda_visit.cuda = NULL;
    if (cuda_visit.is_entered) {
        cuda_visit.is_entered = false;
        cuda_leave(&cuda_visit.scope);
    }
}

bool
cuda_enter_to_free(struct pya_device *dev, struct cuda_scope *scope, pya_status *status) {
    *status = cuda_enter(dev, scope);
    if (*status == PYA_E_DEVICE && cuda_gently(cuda_last.code) == CUDA_OK) {
        *status = PYA_OK;
        return false;
    }
    return *status == PYA_OK;
}

void
cuda_last_error(struct pya_device *dev, struct pya_device_error *out) {
    (void)dev;
    *out = cuda_last;
}
