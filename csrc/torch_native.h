/* What torch's own allocator still does while pyalloc serves memory.  It holds no block, but it keeps the ranges of
 * record_function, the history of pinned host memory and its settings, and can report them.  Floor 5. */
#pragma once

#include "core/pool_id.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/* Call it before torch first uses CUDA on this many devices. */
void pya_torch_native_init(int n_devices);

/* Implement the virtual methods; skip is read only if this torch passes it. */
void pya_torch_record_history(
    void *self, bool enabled, void *recorder, size_t max_entries, int when, bool clear,
    const std::vector<std::string> *skip);
void pya_torch_record_history_has_skip(bool has_skip);
/* The signature before torch 2.8. */
void pya_torch_record_history_oldest(
    void *self, bool enabled, void *recorder, size_t max_entries, int when);
void pya_torch_record_annotation(void *self, const void *pairs);
void pya_torch_push_compile_context(void *self, std::string &text);
void pya_torch_pop_compile_context(void *self);
/* torch's SnapshotInfo.  torch itself constructs it in the caller's return slot; we neither read nor copy it. */
struct pya_torch_snapshot_info {
    pya_torch_snapshot_info(const pya_torch_snapshot_info &) = delete;
    ~pya_torch_snapshot_info() {} // NOLINT(modernize-use-equals-default): not a trivial one
};
pya_torch_snapshot_info pya_torch_snapshot(void *self, pya_pool_id id, bool with_traces);
/* The signature before torch 2.8. */
pya_torch_snapshot_info pya_torch_snapshot_oldest(void *self);

using pya_torch_observer = std::function<void(int64_t, size_t, size_t, size_t)>;
void pya_torch_observe_oom(void *self, pya_torch_observer observer);
/* The observer is never called: pyalloc rejects no request before trying it. */
void pya_torch_observe_rejections(void *self, pya_torch_observer observer);
void pya_torch_tell_observers(int device, size_t asked, size_t total, size_t free_bytes);

/* These methods return torch's own structures, which pyalloc cannot fill: each raises a clear error.  NCCL's process groups
 * do not need them; they see an empty snapshot and a tracker that is never called. */
void pya_torch_refuse_stats(void);
void pya_torch_drop_tracker(void);
