#define _GNU_SOURCE
#include "ipc.h"

#include "physical.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Stored at the start of a handle's 64 bytes.  The device has its number in the machine, because CUDA_VISIBLE_DEVICES may
 * differ between the processes. */
struct ipc_name {
    char magic[8];
    int32_t pid, fd, physical, unused;
    uint64_t offset, size;
};

static const char ipc_magic[8] = {'p', 'y', 'a', 'h', 'c', 'i', 'p', 'c'};

_Static_assert(sizeof(struct ipc_name) <= sizeof(struct cuda_ipc_handle), "the name fits a handle");

static struct pya_hc_region *
ipc_exportable_locked(const void *ptr) {
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    return region != NULL && region->kind == REGION_PLAIN ? region : NULL;
}

bool
pya_hc_ipc_can_export(const void *ptr) {
    pya_hc_lock();
    bool can = ipc_exportable_locked(ptr) != NULL;
    pya_hc_unlock();
    return can;
}

int
pya_hc_ipc_export(const void *ptr, struct cuda_ipc_handle *out) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    const struct pya_hc_region *region = ipc_exportable_locked(ptr);
    if (region != NULL && out != NULL) {
        struct ipc_name name = {
            .pid = (int32_t)getpid(),
            .fd = pya_hc_physical_fd(region->device),
            .physical = pya_hc_device(region->device)->physical,
            .offset = region->offset,
            .size = region->mapped,
        };
        memcpy(name.magic, ipc_magic, sizeof ipc_magic);
        memset(out, 0, sizeof *out);
        memcpy(out, &name, sizeof name);
        error = CU_OK;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_ipc_open(const struct cuda_ipc_handle *handle, void **out) {
    struct ipc_name name;
    memcpy(&name, handle, sizeof name);
    if (out == NULL || memcmp(name.magic, ipc_magic, sizeof ipc_magic) != 0) {
        return CU_INVALID_VALUE;
    }
    if (name.pid == (int32_t)getpid()) {
        return CU_INVALID_CONTEXT; /* as in CUDA: not for the process that made the handle */
    }
    const struct pya_hc_device *dev = pya_hc_physical(name.physical);
    if (pya_hc_n_devices() == 0 || dev == NULL || dev->ordinal < 0) {
        return CU_INVALID_DEVICE;
    }
    pya_hc_lock();
    struct pya_hc_region *known = pya_hc_region_import_locked(name.pid, dev->ordinal, name.offset);
    if (known != NULL) { /* as in CUDA, one address until it is closed as often as opened */
        known->n_opens++;
        *out = (void *)known->start;
        pya_hc_unlock();
        return CU_OK;
    }
    pya_hc_unlock();
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
    struct pya_hc_region region = {
        .size = name.size,
        .mapped = name.size,
        .kind = REGION_IMPORT,
        .device = dev->ordinal,
        .offset = name.offset,
        .pid = name.pid,
        .n_opens = 1,
        .fd = open(path, O_RDWR | O_CLOEXEC),
    };
    if (region.fd < 0) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    int error = pya_hc_address_take_locked(region.mapped, PYA_HC_PAGE, 0, &region.start);
    if (error != CU_OK) {
        goto close_file;
    }
    error = pya_hc_physical_map(
        region.fd, region.offset, region.start, region.mapped, PROT_READ | PROT_WRITE);
    if (error == CU_OK) {
        error = pya_hc_region_insert_locked(&region, NULL);
    }
    if (error != CU_OK) {
        goto give_address;
    }
    pya_hc_unlock();
    *out = (void *)region.start;
    return CU_OK;

give_address:
    pya_hc_address_give_locked(region.start, region.mapped);
close_file:
    pya_hc_unlock();
    (void)close(region.fd);
    return error;
}

int
pya_hc_ipc_close(void *ptr) {
    int error = CU_INVALID_VALUE;
    pya_hc_lock();
    struct pya_hc_region *region = pya_hc_region_at_locked((uintptr_t)ptr);
    if (region != NULL && region->kind == REGION_IMPORT && region->start == (uintptr_t)ptr) {
        error = CU_OK;
        if (--region->n_opens == 0) {
            (void)close(region->fd);
            pya_hc_address_give_locked(region->start, region->mapped);
            pya_hc_region_remove_locked(region);
        }
    }
    pya_hc_unlock();
    return error;
}
