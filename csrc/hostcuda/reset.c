#include "reset.h"

#include "capture.h"
#include "memory.h"
#include "pool.h"

int
pya_hc_device_reset(int device) {
    struct pya_hc_device *dev = pya_hc_device(device);
    if (dev == NULL) {
        return CU_INVALID_DEVICE;
    }
    pya_hc_lock();
    int error = pya_hc_capture_unsafe_device_locked(device);
    if (error == CU_OK) {
        dev->n_syncs++; /* for other devices' pools: marks of this device are now complete */
        pya_hc_pool_reset_locked(device);
        pya_hc_memory_reset_locked(device);
        pya_hc_stream_reset_locked(device);
        dev->peers = 0;
        dev->active = false;
    }
    pya_hc_unlock();
    return error;
}
