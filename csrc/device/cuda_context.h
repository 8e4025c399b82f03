/* The surroundings of a driver call: its context, the thread's capture mode, and the meaning of its error.  Floor 2,
 * private. */
#pragma once

#include "cuda_driver.h"
#include "device.h"

struct cuda {
    struct pya_device device; /* first */
    const struct cuda_driver *driver;
    cuda_device handle;
    cuda_context context; /* the primary one, retained */
    struct pya_device_caps caps;
    struct cuda_allocation_prop prop;
    uint64_t peers; /* atomic; bit i: device i may access our pages */
};

static inline struct cuda *
cuda_from(struct pya_device *dev) {
    return (struct cuda *)dev;
}

/* ---- results ---- */

/* After such an error the context answers every call with the same error. */
bool cuda_is_sticky(cuda_result result);
/* Turns the error of giving memory back while the process ends into success: the driver has already released
 * everything. */
cuda_result cuda_gently(cuda_result result);

/* The status of a call, and where it failed what pya_cuda_error() tells. */
PYA_MUST_CHECK pya_status cuda_report(const char *call, cuda_result result, uint64_t bytes);
/* The same for calls whose only handle is the stream. */
PYA_MUST_CHECK pya_status cuda_report_stream(const char *call, cuda_result result);
/* Adds to the error just reported which other devices the call was to give access. */
void cuda_note_peers(uint64_t peers);
/* Reports that the driver lacks the function. */
PYA_MUST_CHECK pya_status cuda_missing(const char *call);
/* Reports that there is no driver at all. */
PYA_MUST_CHECK pya_status cuda_report_no_driver(const struct cuda_driver *driver);
/* The thread's last failed call, on any device. */
void cuda_last_error(struct pya_device *dev, struct pya_device_error *out);

/* ---- entering: context and capture mode ---- */

struct cuda_scope {
    struct cuda *cuda;
    unsigned n_pushed;
    bool exchanged;
    int mode; /* the thread's own capture mode, if exchanged */
};

/* Enters, whether or not cuda_begin() was called. */
PYA_MUST_CHECK pya_status cuda_enter_scope(struct cuda *cuda, struct cuda_scope *scope);
PYA_MUST_CHECK pya_status cuda_enter(struct pya_device *dev, struct cuda_scope *scope);
/* Like cuda_enter(), but enters the context of another device if the stream is that device's default stream: a
 * default stream handle means the current context's stream. */
PYA_MUST_CHECK pya_status
cuda_enter_for(struct pya_device *dev, pya_stream stream, struct cuda_scope *scope);
/* Like cuda_enter(), for calls that give something back: a driver that is shutting down cannot be entered.  False:
 * return *status. */
bool cuda_enter_to_free(struct pya_device *dev, struct cuda_scope *scope, pya_status *status);
/* Within a begin/end pair this undoes only what cuda_enter_for() added. */
void cuda_leave(struct cuda_scope *scope);

/* Between cuda_begin() and cuda_end() only the first call enters, and cuda_end() leaves.  If two devices alternate,
 * only the first one benefits. */
void cuda_begin(struct pya_device *dev);
void cuda_end(struct pya_device *dev);
