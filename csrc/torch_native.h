/* What torch's own allocator still does while pyalloc serves the memory: it holds no block, but keeps the ranges of
 * record_function, pinned host memory's history and its settings, and knows how to report them.  Floor 5. */
#pragma once

#include "core/pool_id.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/* Before torch's first use of CUDA on this many devices. */
void pya_torch_native_init(int n_devices);

/* The virtual methods; skip is read only where torch has it. */
void pya_torch_record_history(
    void *self, bool enabled, void *recorder, size_t max_entries, int when, bool clear,
    const std::vector<std::string> *skip);
void pya_torch_record_history_has_skip(bool has_skip);
/* Before torch 2.8. */
void pya_torch_record_history_oldest(
    void *self, bool enabled, void *recorder, size_t max_entries, int when);
void pya_torch_record_annotation(void *self, const void *pairs);
void pya_torch_push_compile_context(void *self, std::string &text);
void pya_torch_pop_compile_context(void *self);
/* torch's SnapshotInfo, made by torch itself where its caller wants it: it is neither looked at nor copied. */
struct pya_torch_snapshot_info {
    pya_torch_snapshot_info(const pya_torch_snapshot_info &) = delete;
    ~pya_torch_snapshot_info() {} // NOLINT(modernize-use-equals-default): not a trivial one
};
pya_torch_snapshot_info pya_torch_snapshot(void *self, pya_pool_id id, bool with_traces);
/* Before torch 2.8. */
pya_torch_snapshot_info pya_torch_snapshot_oldest(void *self);

using pya_torch_observer = std::function<void(int64_t, size_t, size_t, size_t)>;
void pya_torch_observe_oom(void *self, pya_torch_observer observer);
/* Never called: pyalloc rejects nothing before it has tried. */
void pya_torch_observe_rejections(void *self, pya_torch_observer observer);
void pya_torch_tell_observers(int device, size_t asked, size_t total, size_t free_bytes);

/* These describe torch's own structures, which pyalloc cannot fill: one clear error each.  NCCL's process groups, which
 * work without, see an empty snapshot and a tracker that is never called. */
void pya_torch_refuse_stats(void);
void pya_torch_drop_tracker(void);
