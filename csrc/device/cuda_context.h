/* What surrounds a call of the driver: the context it works in, the thread's capture mode, and what its error means.
 * Floor 2, private. */
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
    uint64_t peers; /* atomic; bit per device that may access our pages */
};

static inline struct cuda *
cuda_from(struct pya_device *dev) {
    return (struct cuda *)dev;
}

/* ---- results ---- */

/* After these the context answers every call with the same error. */
bool cuda_is_sticky(cuda_result result);
/* Giving memory back while the process ends: the driver has already given all of it back. */
cuda_result cuda_gently(cuda_result result);

/* The status of a call, and where it failed what pya_cuda_error() tells. */
PYA_MUST_CHECK pya_status cuda_report(const char *call, cuda_result result, uint64_t bytes);
/* For calls whose only handle is the stream. */
PYA_MUST_CHECK pya_status cuda_report_stream(const char *call, cuda_result result);
/* The driver lacks the function. */
PYA_MUST_CHECK pya_status cuda_missing(const char *call);
/* There is no driver at all. */
PYA_MUST_CHECK pya_status cuda_report_no_driver(const struct cuda_driver *driver);
/* The thread's last failed call, whatever device. */
void cuda_last_error(struct pya_device *dev, struct pya_device_error *out);

/* ---- entering: context and capture mode ---- */

struct cuda_scope {
    struct cuda *cuda;
    unsigned n_pushed;
    bool exchanged;
    int mode; /* the thread's own capture mode while exchanged */
};

/* Whether or not between begin and end. */
PYA_MUST_CHECK pya_status cuda_enter_scope(struct cuda *cuda, struct cuda_scope *scope);
PYA_MUST_CHECK pya_status cuda_enter(struct pya_device *dev, struct cuda_scope *scope);
/* As cuda_enter, into the context of another device where the stream is the default stream of that: it is of whatever
 * context is current. */
PYA_MUST_CHECK pya_status
cuda_enter_for(struct pya_device *dev, pya_stream stream, struct cuda_scope *scope);
/* As cuda_enter, for calls that give something back: a driver that is shutting down has nothing to enter.  False: return
 * *status. */
bool cuda_enter_to_free(struct pya_device *dev, struct cuda_scope *scope, pya_status *status);
/* For a scope within a visit only what cuda_enter_for() added. */
void cuda_leave(struct cuda_scope *scope);

/* Between the two the first call enters, and the end leaves.  Of two devices in turns only the first gains. */
void cuda_begin(struct pya_device *dev);
void cuda_end(struct pya_device *dev);
