/* The CUDA driver as a device.  Floor 2.
 *
 * libcuda.so.1 is opened at run time; nothing of CUDA is linked or needed to build.  Memory belongs to the device's
 * primary context, which torch's runtime uses too.  A thread with another context or none is switched for the
 * duration of a call.  Calls that a stream capture in the same thread would forbid are made in relaxed capture mode. */
#pragma once

#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* PYA_E_NOTSUP: there is no usable driver.  PYA_E_INVAL: there is no such device.  pya_cuda_error() then says why. */
PYA_MUST_CHECK pya_status pya_cuda_open(int index, struct pya_device **out);
/* Number of devices; 0 without a driver. */
int pya_cuda_count(void);
/* Describes the calling thread's last failed driver call. */
void pya_cuda_error(struct pya_device_error *out);
/* Why there is no driver; "" if there is one.  Static text. */
const char *pya_cuda_why_not(void);

#ifdef __cplusplus
}
#endif
