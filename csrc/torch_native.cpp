/* Calls are forwarded by vtable slot: torch's allocator has its methods in the same slots as the wrapper. */
#include "torch_native.h"

#include "core/pyalloc.h"
#include "thread_labels.h"
#include "torch_bridge.h"
#include "torch_guarded.h"
#include "torch_pools.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <stdexcept>

namespace {

thread_local bool is_ours = false;
std::atomic<bool> torch_has_skip{false};
std::atomic<bool> is_history_held{false};

using observer_list = std::vector<pya_torch_observer>;
pya_torch_guarded<observer_list> observers;

using method_name = const char *(*)();

/* Finds a method of torch's own allocator, of which there is one.  Finding it takes longer than the rest of a call, so `known`
 * caches it. */
template <typename F>
bool
native_method(std::atomic<void *> &known, F *&function, method_name name, size_t after = 0) {
    void *found = known.load(std::memory_order_relaxed);
    void *native = pya_torch_native_allocator();
    if (found == nullptr && native != nullptr) {
        found = pya_torch_virtual(native, name(), after);
        known.store(found, std::memory_order_relaxed);
    }
    memcpy(&function, &found, sizeof function);
    return found != nullptr;
}

uint32_t
skip_mask(const std::vector<std::string> *skip) {
    uint32_t mask = 0;
    for (int i = 0; skip != nullptr && i < PYA_N_ACTIONS; i++) {
        for (const std::string &name : *skip) {
            if (name == pya_action_name(static_cast<pya_action>(i))) {
                mask |= 1U << i;
            }
        }
    }
    return mask;
}

/* Is it a vector of pairs of strings?  If not, the slot belongs to another method than we took it for. */
bool
looks_like_pairs(const void *pairs) {
    uintptr_t words[3];
    constexpr size_t PAIR_BYTES = 2 * sizeof(std::string);
    constexpr size_t MOST = 64 * PAIR_BYTES;
    memcpy(words, pairs, sizeof words);
    return words[0] <= words[1] && words[1] <= words[2] && words[1] - words[0] <= MOST &&
           (words[1] - words[0]) % PAIR_BYTES == 0;
}

/* Does the code at this address belong to torch's NCCL process group?  Process groups register torch's segments with NCCL to
 * save copies, and do without if memory is virtual (expandable segments).  Their watcher is a hidden symbol, so it has no
 * name. */
bool
is_of_nccl(const void *code) {
    Dl_info found = {};
    return dladdr(code, &found) != 0 && strstr(found.dli_fname, "/libtorch_cuda") != nullptr &&
           (found.dli_sname == nullptr || strstr(found.dli_sname, "ProcessGroupNCCL") != nullptr);
}

/* The oldest native method takes no arguments; it ignores the ones we pass. */
pya_torch_snapshot_info
snapshot_for(const void *caller, pya_pool_id id, bool with_traces) {
    static std::atomic<void *> known{nullptr};
    pya_torch_snapshot_info (*native)(void *, pya_pool_id, bool) = nullptr;
    const bool is_every_pool = id.first == 0 && id.second == 0;
    if (!is_ours && !(is_every_pool && is_of_nccl(caller))) {
        throw std::runtime_error(
            is_every_pool
                ? "pyalloc: snapshots cannot be taken through C++; call torch.cuda.memory._snapshot() or "
                  "torch.cuda.memory.memory_snapshot() from Python"
                : "pyalloc: a pool's contents are not available to C++, so it cannot be registered with NCCL "
                  "(register_mem_pool); leave that out, and NCCL copies through buffers of its own");
    }
    if (!native_method(known, native, pya_torch_snapshot_name)) {
        throw std::runtime_error("pyalloc: torch's own snapshot was not found");
    }
    return native(pya_torch_native_allocator(), id, with_traces);
}

constexpr size_t LONGEST_CONTEXT = 1 << 16;
constexpr int8_t CUDA_DEVICE = 1; /* c10::DeviceType */

} // namespace

void
pya_torch_native_init(int n_devices) {
    static std::atomic<void *> known{nullptr};
    void (*init)(void *self, int n) = nullptr;
    if (native_method(known, init, [] { return PYA_TORCH_METHOD("4initEi"); })) {
        init(pya_torch_native_allocator(), n_devices);
    }
    /* Otherwise C++ code that asks for "the CUDA allocator" (at::accelerator, c10::GetAllocator) would still get torch's
     * own, which holds no block, and would allocate device memory behind our back. */
    void (*set_allocator)(int8_t device_type, void *allocator, uint8_t priority) = nullptr;
    void *symbol = pya_torch_symbol("_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh");
    memcpy(&set_allocator, &symbol, sizeof symbol);
    if (set_allocator != nullptr && pya_torch_current_allocator() != nullptr) {
        set_allocator(CUDA_DEVICE, pya_torch_current_allocator(), UINT8_MAX);
    }
}

extern "C" void
pya_torch_ask(bool is_asking) {
    is_ours = is_asking;
}

extern "C" void
pya_torch_hold_history(bool is_held) {
    is_history_held = is_held;
}

void
pya_torch_record_history_has_skip(bool has_skip) {
    torch_has_skip = has_skip;
}

void
pya_torch_record_history(
    void *self, bool enabled, void *recorder, size_t max_entries, int when, bool clear,
    const std::vector<std::string> *skip) {
    (void)self;
    if (is_history_held && !is_ours) {
        return;
    }
    static std::atomic<void *> known{nullptr};
    void (*native)(void *, bool, void *, size_t, int, bool, const std::vector<std::string> *) =
        nullptr;
    if (native_method(known, native, pya_torch_record_history_name)) {
        native(pya_torch_native_allocator(), enabled, recorder, max_entries, when, clear, skip);
    }
    pya_heap *heap = pya_torch_heap();
    if (is_ours || heap == nullptr) {
        return;
    }
    if (!enabled) {
        pya_history_stop(heap);
        return;
    }
    if (clear) {
        pya_history_forget(heap);
    }
    const int level = recorder == nullptr ? static_cast<int>(PYA_RECORD_NEVER) : when;
    const uint32_t mask =
        skip_mask(torch_has_skip ? skip : nullptr) | 1U << PYA_ACTION_RECORD_STREAM;
    const pya_status status =
        pya_history_start(heap, static_cast<pya_record_level>(level), true, max_entries, mask);
    if (status != PYA_OK) {
        throw std::runtime_error(
            std::string("pyalloc: starting to record history failed: ") + pya_status_text(status));
    }
}

void
pya_torch_record_history_oldest(
    void *self, bool enabled, void *recorder, size_t max_entries, int when) {
    pya_torch_record_history(self, enabled, recorder, max_entries, when, false, nullptr);
}

void
pya_torch_record_annotation(void *self, const void *pairs) {
    (void)self;
    static std::atomic<void *> known{nullptr};
    void (*native)(void *, const void *) = nullptr;
    if (looks_like_pairs(pairs) && native_method(known, native, pya_torch_record_history_name, 1)) {
        native(pya_torch_native_allocator(), pairs);
    }
}

void
pya_torch_push_compile_context(void *self, std::string &text) {
    (void)self;
    pya_thread_push_compile_context(text.size() < LONGEST_CONTEXT ? text.c_str() : "");
}

void
pya_torch_pop_compile_context(void *self) {
    (void)self;
    pya_thread_pop_compile_context();
}

pya_torch_snapshot_info
pya_torch_snapshot(void *self, pya_pool_id id, bool with_traces) {
    (void)self;
    return snapshot_for(__builtin_return_address(0), id, with_traces);
}

pya_torch_snapshot_info
pya_torch_snapshot_oldest(void *self) {
    (void)self;
    return snapshot_for(__builtin_return_address(0), pya_torch_pool_in_use(), true);
}

void
pya_torch_observe_oom(void *self, pya_torch_observer observer) {
    (void)self;
    observers.with([&observer](observer_list &all) { all.push_back(std::move(observer)); });
}

void
pya_torch_observe_rejections(void *self, pya_torch_observer observer) {
    (void)self;
    (void)observer;
}

/* Call it without locks: an observer may allocate, or take the GIL. */
void
pya_torch_tell_observers(int device, size_t asked, size_t total, size_t free_bytes) {
    const observer_list all = observers.with([](const observer_list &known) { return known; });
    for (const pya_torch_observer &observer : all) {
        observer(device, asked, total, free_bytes);
    }
}

void
pya_torch_refuse_stats(void) {
    throw std::runtime_error(
        "pyalloc: statistics cannot be read through C++; call torch.cuda.memory_stats() or "
        "torch.accelerator.memory_stats() from Python");
}

void
pya_torch_drop_tracker(void) {
    if (!is_of_nccl(__builtin_return_address(0))) {
        throw std::runtime_error("pyalloc: allocator trace trackers are not called");
    }
}
