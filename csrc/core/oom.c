/* What an out-of-memory error says.  Floor 11. */
#include <stdio.h>

#include "pyalloc.h"

/* torch's format: the largest binary unit that gives at least 1, two decimals; bytes as they are. */
static void
oom_size(size_t bytes, char *buffer, size_t buffer_bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB"};
    double value = (double)bytes / 1024;
    size_t unit = 0;
    if (bytes <= 1024) {
        (void)snprintf(buffer, buffer_bytes, "%zu bytes", bytes);
        return;
    }
    for (; unit + 1 < sizeof units / sizeof units[0] && value > 1024; unit++) {
        value /= 1024;
    }
    (void)snprintf(buffer, buffer_bytes, "%.2f %s", value, units[unit]);
}

int
pya_oom_text(const struct pya_oom_info *info, char *buffer, size_t buffer_bytes) {
    char wanted[32], total[32], free_now[32], limit[48] = "", allocated[32], idle[32], largest[32];
    char private_text[80] = "";
    if (info->requested_bytes > PYA_REQUEST_MAX) {
        return snprintf(
            buffer, buffer_bytes, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    }
    oom_size(info->requested_bytes, wanted, sizeof wanted);
    oom_size(info->total_bytes, total, sizeof total);
    oom_size(info->free_bytes, free_now, sizeof free_now);
    oom_size(info->allocated_bytes, allocated, sizeof allocated);
    oom_size(info->reserved_bytes - info->allocated_bytes, idle, sizeof idle);
    oom_size(info->largest_free_bytes, largest, sizeof largest);
    if (info->limit_bytes < info->total_bytes) {
        char allowed[32];
        oom_size(info->limit_bytes, allowed, sizeof allowed);
        (void)snprintf(limit, sizeof limit, "%s allowed; ", allowed);
    }
    if (info->private_bytes > 0) {
        char amount[32];
        oom_size(info->private_bytes, amount, sizeof amount);
        (void)snprintf(
            private_text, sizeof private_text, "with %s allocated in private pools, ", amount);
    }
    return snprintf(
        buffer, buffer_bytes,
        "CUDA out of memory. Tried to allocate %s. GPU %d has a total capacity of %s of which %s is "
        "free. %sOf the allocated memory %s is allocated by PyTorch, %sand %s is reserved by PyTorch "
        "but unallocated (largest free run %s; pyalloc). Next: a smaller batch, or `pyalloc report` "
        "on a recording to see what holds the memory.",
        wanted, info->device, total, free_now, limit, allocated, private_text, idle, largest);
}
