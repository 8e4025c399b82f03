/* libnvidia-ml.so.1: enough for torch's messages and device counts.  NVML has error numbers of its own. */

#include "props.h"

#include <stdio.h>
#include <string.h>

enum { NVML_OK = 0, NVML_INVALID = 2, NVML_NO_SPACE = 7 };

struct nvml_memory {
    unsigned long long total, free, used;
};

/* Handles are pointers to the devices, including those that CUDA_VISIBLE_DEVICES hides.  NULL: not a handle. */
static const struct pya_hc_device *
nvml_device(const void *handle) {
    for (int i = 0; i < pya_hc_n_physical(); i++) {
        if (handle == pya_hc_physical(i)) {
            return handle;
        }
    }
    return NULL;
}

static int
nvml_handle(void **out, struct pya_hc_device *dev) {
    if (out == NULL || dev == NULL) {
        return NVML_INVALID;
    }
    *out = dev;
    return NVML_OK;
}

int
nvmlInit(void) {
    return NVML_OK;
}

int
nvmlInit_v2(void) {
    return NVML_OK;
}

int
nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return NVML_OK;
}

int
nvmlShutdown(void) {
    return NVML_OK;
}

const char *
nvmlErrorString(int error) {
    return error == NVML_OK        ? "Success"
           : error == NVML_INVALID ? "Invalid Argument"
                                   : "Not Supported";
}

int
nvmlSystemGetDriverVersion(char *out, unsigned length) {
    return snprintf(out, length, "hostcuda") < (int)length ? NVML_OK : NVML_NO_SPACE;
}

int
nvmlSystemGetCudaDriverVersion_v2(int *out) {
    *out = 13020;
    return NVML_OK;
}

int
nvmlDeviceGetCount_v2(unsigned *out) {
    *out = (unsigned)pya_hc_n_physical();
    return NVML_OK;
}

int
nvmlDeviceGetCount(unsigned *out) {
    return nvmlDeviceGetCount_v2(out);
}

int
nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    return nvml_handle(out, pya_hc_physical((int)index));
}

int
nvmlDeviceGetHandleByIndex(unsigned index, void **out) {
    return nvml_handle(out, pya_hc_physical((int)index));
}

int
nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out) {
    return nvml_handle(out, pya_hc_device_by_pci_bus_id(text));
}

int
nvmlDeviceGetHandleByPciBusId(const char *text, void **out) {
    return nvml_handle(out, pya_hc_device_by_pci_bus_id(text));
}

int
nvmlDeviceGetIndex(void *handle, unsigned *out) {
    const struct pya_hc_device *dev = nvml_device(handle);
    *out = dev == NULL ? 0 : (unsigned)dev->physical;
    return dev == NULL ? NVML_INVALID : NVML_OK;
}

int
nvmlDeviceGetName(void *handle, char *out, unsigned length) {
    if (nvml_device(handle) == NULL) {
        return NVML_INVALID;
    }
    return snprintf(out, length, "%s", pya_hc_device_name()) < (int)length ? NVML_OK
                                                                           : NVML_NO_SPACE;
}

int
nvmlDeviceGetUUID(void *handle, char *out, unsigned length) {
    const struct pya_hc_device *dev = nvml_device(handle);
    if (dev == NULL) {
        return NVML_INVALID;
    }
    struct cuda_uuid uuid;
    pya_hc_device_uuid(dev, &uuid);
    static const char groups[] = {4, 6, 8, 10, 0};
    char text[48] = "GPU-";
    size_t at = 4;
    for (size_t i = 0; i < sizeof uuid.bytes; i++) {
        if (memchr(groups, (int)i, sizeof groups - 1) != NULL) {
            text[at++] = '-';
        }
        at += (size_t)snprintf(text + at, 3, "%02x", (unsigned char)uuid.bytes[i]);
    }
    return snprintf(out, length, "%s", text) < (int)length ? NVML_OK : NVML_NO_SPACE;
}

int
nvmlDeviceGetMemoryInfo(void *handle, struct nvml_memory *out) {
    const struct pya_hc_device *dev = nvml_device(handle);
    if (dev == NULL) {
        return NVML_INVALID;
    }
    pya_hc_lock();
    *out = (struct nvml_memory){dev->capacity, pya_hc_free_locked(dev), dev->used};
    pya_hc_unlock();
    return NVML_OK;
}

struct nvml_memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int
nvmlDeviceGetMemoryInfo_v2(void *handle, struct nvml_memory_v2 *inout) {
    struct nvml_memory memory = {0};
    const int status = nvmlDeviceGetMemoryInfo(handle, &memory);
    if (status == NVML_OK) {
        *inout = (struct nvml_memory_v2){inout->version, memory.total, 0, memory.free, memory.used};
    }
    return status;
}

int
nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *infos) {
    (void)infos;
    *count = 0;
    return nvml_device(handle) == NULL ? NVML_INVALID : NVML_OK;
}

int
nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *infos) {
    return nvmlDeviceGetComputeRunningProcesses(handle, count, infos);
}

/* Readings that programs log; this card is idle.  Without an answer, a program that would run on a card ends with its own
 * error. */
static int
nvml_idle(const void *handle, unsigned *out, size_t n) {
    if (nvml_device(handle) == NULL || out == NULL) {
        return NVML_INVALID;
    }
    memset(out, 0, n * sizeof *out);
    return NVML_OK;
}

/* out: utilization of the card, then of its memory. */
int
nvmlDeviceGetUtilizationRates(void *handle, unsigned out[2]) {
    return nvml_idle(handle, out, 2);
}

int
nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *out) {
    (void)sensor;
    return nvml_idle(handle, out, 1);
}

/* {version, sensor, degrees} */
int
nvmlDeviceGetTemperatureV(void *handle, unsigned inout[3]) {
    return nvml_idle(handle, inout == NULL ? NULL : &inout[2], 1);
}

int
nvmlDeviceGetPowerUsage(void *handle, unsigned *out) {
    return nvml_idle(handle, out, 1);
}

int
nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned out[2]) {
    return nvml_idle(handle, out, 2);
}

int
nvmlDeviceGetClockInfo(void *handle, int type, unsigned *out) {
    (void)type;
    return nvml_idle(handle, out, 1);
}

/* No fabric, which is what the caller's zeroed struct says. */
int
nvmlDeviceGetGpuFabricInfoV(void *handle, void *info) {
    return nvml_device(handle) == NULL || info == NULL ? NVML_INVALID : NVML_OK;
}
