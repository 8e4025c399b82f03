/* Texts of errors.  Floor 12. */
#define _GNU_SOURCE /* uselocale under -std=c11 */
#include <stdio.h>
#include <string.h>

#include "heap.h"
#include "numerals.h"

/* torch's format: the largest binary unit that gives at least 1, with two decimals; plain bytes without decimals. */
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
    struct pya_numerals numerals = pya_numerals_begin();
    (void)snprintf(buffer, buffer_bytes, "%.2f %s", value, units[unit]);
    pya_numerals_end(numerals);
}

/* The device's memory that is neither free nor ours. */
static size_t
oom_elsewhere(const struct pya_oom_info *info) {
    size_t known = info->free_bytes + info->reserved_bytes;
    return info->total_bytes > known ? info->total_bytes - known : 0;
}

/* What is free for the request, without the private pools' memory. */
static size_t
oom_idle(const struct pya_oom_info *info) {
    size_t others = info->allocated_bytes + info->private_bytes;
    return info->reserved_bytes > others ? info->reserved_bytes - others : 0;
}

/* The other devices that the call was to give access. */
static void
error_peers(const struct pya_device_error *error, char *text, size_t n) {
    const bool is_one = (error->peers & (error->peers - 1)) == 0;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < PYA_MAX_DEVICES && used < n; i++) {
        if ((error->peers >> i & 1) != 0) {
            const char *before = used > 0 ? ", "
                                 : is_one ? " with access for GPU "
                                          : " with access for GPUs ";
            int length = snprintf(text + used, n - used, "%s%d", before, i);
            used += length > 0 ? (size_t)length : 0;
        }
    }
}

/* The most useful advice: what stopped this request, and what would have let it succeed. */
static void
oom_advice(const struct pya_oom_info *info, char *text, size_t n) {
    char a[32], b[32], peers[160];
    if (info->pool_limit_bytes > 0 &&
        info->pool_bytes + info->requested_bytes > info->pool_limit_bytes) {
        oom_size(info->pool_limit_bytes, a, sizeof a);
        oom_size(info->pool_bytes, b, sizeof b);
        (void)snprintf(
            text, n,
            "the pool is limited to %s and holds %s: raise its limit (pyalloc.set_limit(..., pool=...)) or "
            "free some of its tensors.",
            a, b);
    } else if (info->limit_bytes < info->total_bytes && info->free_bytes >= info->requested_bytes) {
        oom_size(info->limit_bytes, a, sizeof a);
        (void)snprintf(
            text, n,
            "the device has room, but the limit is %s: raise it (pyalloc.set_limit(), "
            "torch.cuda.set_per_process_memory_fraction()).",
            a);
    } else if (info->lacks_addresses && info->free_bytes >= info->requested_bytes) {
        (void)snprintf(
            text, n, "%s",
            "the device has room, but this process has no address space left: use fewer streams and "
            "private pools, `ulimit -v unlimited`, or in a dry run a smaller --memory.");
    } else if (info->error.peers != 0 && info->free_bytes >= info->requested_bytes) {
        error_peers(&info->error, peers, sizeof peers);
        (void)snprintf(
            text, n,
            "the device has room, but none was found for mappings%s: free memory there, where the driver keeps tables "
            "of them too.",
            peers);
    } else if (
        oom_elsewhere(info) >= info->requested_bytes &&
        oom_elsewhere(info) > info->total_bytes / 16) {
        oom_size(oom_elsewhere(info), a, sizeof a);
        (void)snprintf(
            text, n,
            "%s of the device are held outside this allocator, by other programs (nvidia-smi lists "
            "them) or by libraries in this one: free some of that.",
            a);
    } else if (info->private_bytes >= info->requested_bytes) {
        oom_size(info->private_bytes, a, sizeof a);
        (void)snprintf(
            text, n,
            "%s lie idle in private pools: delete CUDA graphs that are no longer needed, or make the "
            "pool with use_on_oom=True.",
            a);
    } else if (oom_idle(info) >= info->requested_bytes) {
        (void)snprintf(
            text, n, "%s",
            info->has_vmm
                ? "the free memory is in pieces smaller than a page, or other streams still use it: "
                  "free the small tensors between large ones, or use a smaller batch."
                : "the free memory is in pieces that only virtual memory calls could join: use the "
                  "option vmm:True and a driver that has them, or a smaller batch.");
    } else {
        (void)snprintf(
            text, n,
            "use a smaller batch, or run `pyalloc report` on a recording to see what holds the memory.");
    }
}

static void
oom_holders(const struct pya_oom_info *info, char *text, size_t n) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < info->n_holders && used < n; i++) {
        const struct pya_oom_holder *holder = &info->holders[i];
        char amount[32];
        oom_size(holder->bytes, amount, sizeof amount);
        int length = snprintf(
            text + used, n - used, "%s%s in %zu block%s by %s", i == 0 ? "Held: " : "; ", amount,
            holder->n_blocks, holder->n_blocks == 1 ? "" : "s", holder->what);
        used += length > 0 ? (size_t)length : 0;
    }
    if (used > 0 && used < n) {
        (void)snprintf(text + used, n - used, ". ");
    }
}

int
pya_oom_text(const struct pya_oom_info *info, char *buffer, size_t buffer_bytes) {
    char wanted[32], total[32], free_now[32], limit[48] = "", allocated[32], idle[32], largest[32];
    char private_text[100] = "", held[600], advice[320];
    if (info->requested_bytes > PYA_REQUEST_MAX) {
        return snprintf(
            buffer, buffer_bytes, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    }
    oom_size(info->requested_bytes, wanted, sizeof wanted);
    oom_size(info->total_bytes, total, sizeof total);
    oom_size(info->free_bytes, free_now, sizeof free_now);
    /* As in torch: private memory counts as PyTorch's, and not as memory that could be joined. */
    oom_size(info->allocated_bytes + info->private_bytes, allocated, sizeof allocated);
    oom_size(oom_idle(info), idle, sizeof idle);
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
            private_text, sizeof private_text,
            "with %s allocated in private pools (e.g., CUDA Graphs), ", amount);
    }
    oom_holders(info, held, sizeof held);
    oom_advice(info, advice, sizeof advice);
    return snprintf(
        buffer, buffer_bytes,
        "CUDA out of memory. Tried to allocate %s. GPU %d has a total capacity of %s of which %s is "
        "free. %sOf the allocated memory %s is allocated by PyTorch, %sand %s is reserved by PyTorch "
        "but unallocated (largest free run %s; pyalloc). %sNext: %s",
        wanted, info->device, total, free_now, limit, allocated, private_text, idle, largest, held,
        advice);
}

/* ---- other failures ---- */

/* What the reader should know beside the call. */
static const char *
error_advice(const struct pya_device_error *error) {
    if (error->is_sticky) {
        return ". Earlier work, not this call, made the device unusable for the rest of this process: "
               "start a new one with CUDA_LAUNCH_BLOCKING=1 to see which kernel failed";
    }
    if (error->peers != 0) {
        return ". GPUs that copy from each other were given access to each other's memory. If the driver refuses that "
               "access, the option vmm:False may help";
    }
    return "";
}

/* The card whose device failed: the named one, otherwise the first one with an error. */
static struct pya_card *
error_card(const struct pya_heap *heap, int device, struct pya_device_error *error) {
    for (int i = 0; heap != NULL && i < PYA_MAX_DEVICES; i++) {
        struct pya_card *card = device < 0 || device == i ? pya_heap_open_card(heap, i) : NULL;
        if (card != NULL) {
            pya_device_error(card->dev, error);
            if (error->call[0] != '\0') {
                return card;
            }
        }
    }
    memset(error, 0, sizeof *error);
    return NULL;
}

/* Explains why the device could not be opened, if that is known. */
static bool
open_error(struct pya_heap *heap, pya_status status, int device, struct pya_device_error *error) {
    bool may_be = status == PYA_E_DEVICE || status == PYA_E_NOTSUP;
    if (!may_be || heap == NULL || heap->hooks.open_error == NULL) {
        return false;
    }
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        if ((device < 0 || device == i) && pya_heap_open_card(heap, i) != NULL) {
            return false;
        }
    }
    heap->hooks.open_error(heap->hooks.arg, error);
    return error->call[0] != '\0';
}

int
pya_heap_error_text(
    struct pya_heap *heap, pya_status status, const char *what, int device, char *buffer,
    size_t buffer_bytes) {
    struct pya_device_error error;
    struct pya_card *card = status == PYA_E_DEVICE ? error_card(heap, device, &error) : NULL;
    if (card == NULL && open_error(heap, status, device, &error)) {
        return snprintf(
            buffer, buffer_bytes,
            "%s: %s: GPU %d could not be opened: %s returned %d (%s). Check whether the driver (nvidia-smi) is new "
            "enough for this CUDA",
            what, pya_status_text(status), device < 0 ? 0 : device, error.call, error.code,
            error.text);
    }
    if (card == NULL) {
        return snprintf(buffer, buffer_bytes, "%s: %s", what, pya_status_text(status));
    }
    char size[48] = "";
    char peers[160];
    error_peers(&error, peers, sizeof peers);
    if (error.bytes > 0) {
        (void)snprintf(size, sizeof size, " of %llu bytes", (unsigned long long)error.bytes);
    }
    bool was_told =
        error.is_sticky && __atomic_exchange_n(&card->told_lost, true, __ATOMIC_RELAXED);
    if (was_told) {
        return snprintf(
            buffer, buffer_bytes,
            "%s: GPU %d failed earlier (%d, %s) and cannot be used by this process any more", what,
            card->index, error.code, error.text);
    }
    return snprintf(
        buffer, buffer_bytes, "%s: %s: %s%s on GPU %d%s returned %d (%s)%s", what,
        pya_status_text(status), error.call, size, card->index, peers, error.code, error.text,
        error_advice(&error));
}
