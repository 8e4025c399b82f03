/* Virtual memory is tested before it is trusted.  Floor 2.
 *
 * Drivers claim abilities that they then refuse: on WSL2 before R615, memory readable by network cards could be
 * created and mapped, but not made accessible.  So one page is tried in full: mapped twice, made accessible, exported
 * and unmapped, as the allocator will do. */
#include <unistd.h>

#include "cuda_context.h"

enum { PROBE_MAPPINGS = 2 };

/* pya_cuda_error() tells which call was refused. */
static cuda_result
probe_told(const char *call, cuda_result result) {
    (void)!cuda_report(call, result, PYA_PAGE);
    return result;
}

cuda_result
cuda_probe_pages(const struct cuda_driver *driver, const struct cuda_allocation_prop *prop) {
    const struct cuda_access_desc desc = {
        .location = prop->location, .flags = CUDA_ACCESS_READ_WRITE};
    uint64_t page = 0;
    pya_dptr base = 0;
    size_t n_mapped = 0;
    cuda_result result = probe_told("cuMemCreate", driver->cuMemCreate(&page, PYA_PAGE, prop, 0));
    if (result != CUDA_OK) {
        return result;
    }
    result = driver->cuMemAddressReserve(&base, PROBE_MAPPINGS * PYA_PAGE, PYA_PAGE, 0, 0);
    result = probe_told("cuMemAddressReserve", result);
    if (result != CUDA_OK) {
        goto release;
    }
    while (n_mapped < PROBE_MAPPINGS && result == CUDA_OK) {
        result = driver->cuMemMap(base + n_mapped * PYA_PAGE, PYA_PAGE, 0, page, 0);
        result = probe_told("cuMemMap", result);
        n_mapped += result == CUDA_OK;
    }
    if (result == CUDA_OK) {
        result = driver->cuMemSetAccess(base, n_mapped * PYA_PAGE, &desc, 1);
        result = probe_told("cuMemSetAccess", result);
    }
    if (result == CUDA_OK && prop->requested_handle_types != 0) {
        int fd = -1;
        result = driver->cuMemExportToShareableHandle(&fd, page, CUDA_HANDLE_POSIX_FD, 0);
        result = probe_told("cuMemExportToShareableHandle", result);
        if (result == CUDA_OK) {
            (void)close(fd);
        }
    }
    if (n_mapped > 0) {
        cuda_result undone = driver->cuMemUnmap(base, n_mapped * PYA_PAGE);
        undone = probe_told("cuMemUnmap", undone);
        result = result == CUDA_OK ? undone : result;
    }
    (void)driver->cuMemAddressFree(base, PROBE_MAPPINGS * PYA_PAGE);
release:
    (void)driver->cuMemRelease(page);
    return result;
}
