/* The functions that torch calls.
 *
 * torch does not check for NULL: errors must be thrown (torch_error.h), from here, after the core has returned. */
#include "torch_bridge.h"

#include "torch_error.h"
#include "torch_fast.h"
#include "torch_native.h"
#include "torch_pools.h"
#include "torch_slots.h"
#include "torch_symbols.h"
#include "torch_uncached.h"

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#define PYA_EXPORT extern "C" PYA_TORCH_EXPORT

namespace {

std::atomic<pya_heap *> attached{nullptr};
std::atomic<int> n_devices_of_torch{0}; /* 0: torch does not use CUDA yet */
std::atomic<uint64_t> n_refused_frees{0};

/* c10::Device: two bytes, type then index; CUDA is type 1. */
struct c10_device {
    int8_t type;
    int8_t index;
};

struct profiler_symbols {
    bool (*enabled)();
    void (*report)(void *ptr, int64_t delta, size_t allocated, size_t reserved, c10_device device);
    void (*report_oom)(int64_t bytes, size_t allocated, size_t reserved, c10_device device);
};

profiler_symbols profiler = {};

/* Out of line: only needed while torch.profiler records memory. */
__attribute__((noinline, cold)) void
profiler_report(pya_heap *heap, void *ptr, int64_t delta, int device) {
    size_t allocated = 0;
    size_t reserved = 0;
    if (pya_stats_bytes(heap, device, &allocated, &reserved) != PYA_OK) {
        return;
    }
    const c10_device where = {1, static_cast<int8_t>(device)};
    profiler.report(ptr, delta, allocated, reserved, where);
}

/* torch's function checks by itself whether anybody records memory. */
void
profiler_report_oom(const pya_oom_info &info) {
    size_t bytes = 0;
    if (profiler.report_oom == nullptr ||
        !pya_size_round_up(info.requested_bytes, PYA_ALIGN, &bytes)) {
        return;
    }
    const c10_device where = {1, static_cast<int8_t>(info.device)};
    profiler.report_oom(
        static_cast<int64_t>(bytes), info.allocated_bytes, info.reserved_bytes, where);
}

[[noreturn]] void
throw_oom(pya_heap *heap) {
    pya_oom_info info;
    char text[PYA_OOM_TEXT_BYTES];
    pya_heap_oom_info(heap, &info);
    (void)pya_oom_text(&info, text, sizeof text);
    const size_t most = info.limit_bytes < info.total_bytes ? info.limit_bytes : info.total_bytes;
    /* torch rejects larger requests before it looks for memory. */
    if (info.requested_bytes <= PYA_REQUEST_MAX) {
        profiler_report_oom(info);
        pya_torch_tell_observers(info.device, info.requested_bytes, most, info.free_bytes);
    }
    pya_torch_throw_text(text, true);
}

[[noreturn]] void
throw_status(pya_heap *heap, pya_status status, const char *what, int device) {
    if (status == PYA_E_NOMEM || status == PYA_E_LIMIT || status == PYA_E_TOO_LARGE) {
        throw_oom(heap);
    }
    char text[512];
    (void)pya_heap_error_text(heap, status, what, device, text, sizeof text);
    throw std::runtime_error(std::string("pyalloc: ") + text);
}

void
check(pya_status status, const char *what, int device) {
    if (PYA_UNLIKELY(status != PYA_OK)) {
        throw_status(attached.load(std::memory_order_acquire), status, what, device);
    }
}

[[noreturn]] __attribute__((noinline, cold)) void
throw_not_installed() {
    throw std::runtime_error(
        "pyalloc: torch asked for memory, but pyalloc is not installed in this process");
}

inline pya_heap *
heap_or_throw() {
    pya_heap *heap = attached.load(std::memory_order_acquire);
    if (PYA_UNLIKELY(heap == nullptr)) {
        throw_not_installed();
    }
    return heap;
}

pya_stream
stream_of(void *stream) {
    return static_cast<pya_stream>(reinterpret_cast<uintptr_t>(stream));
}

pya_dptr
address_of(const void *ptr) {
    return static_cast<pya_dptr>(reinterpret_cast<uintptr_t>(ptr));
}

void *
pointer_of(pya_dptr address) {
    return reinterpret_cast<void *>(static_cast<uintptr_t>(address));
}

bool
is_profiling() {
    return profiler.enabled != nullptr && PYA_UNLIKELY(profiler.enabled());
}

/* libc10's flag, which torch.cuda._sanitizer sets for good: native reports to Python, torch's wrapper does not. */
const bool is_never = false;
std::atomic<const bool *> gpu_trace{&is_never};
std::atomic<pya_torch_tracer> gpu_tracer{nullptr};

bool
is_traced() {
    return PYA_UNLIKELY(
        __atomic_load_n(gpu_trace.load(std::memory_order_relaxed), __ATOMIC_RELAXED));
}

__attribute__((noinline, cold)) void
trace_memory(bool is_allocation, pya_dptr address) {
    const pya_torch_tracer tell = gpu_tracer.load(std::memory_order_relaxed);
    if (tell != nullptr && address != 0) {
        tell(is_allocation, address);
    }
}

int64_t
block_bytes(pya_heap *heap, pya_dptr address, int *device) {
    pya_dptr base = 0;
    size_t bytes = 0;
    return pya_block_info(heap, address, &base, &bytes, device) == PYA_OK
               ? static_cast<int64_t>(bytes)
               : 0;
}

/* Called before the free, so no other block can have the address yet. */
void
trace_uncached_free(const void *ptr) {
    if (is_traced()) {
        trace_memory(false, address_of(ptr));
    }
}

/* An exception thrown by a filter of torch's.  The heap that called the filter is C and holds a lock, so the exception waits
 * here until the heap has returned.  has_filter_failed says whether there ever was one: cheaper to read than a thread-local. */
thread_local std::exception_ptr filter_error;
std::atomic<bool> has_filter_failed{false};

bool
filter_match(void *arg, pya_stream stream) {
    try {
        return (*static_cast<std::function<bool(void *)> *>(arg))(pointer_of(stream));
    } catch (...) {
        filter_error = std::current_exception();
        has_filter_failed.store(true, std::memory_order_relaxed);
        return false;
    }
}

/* A filter failed, so this memory may come from the wrong pool: frees it and throws the filter's error. */
__attribute__((noinline, cold)) void
throw_filter_error(pya_heap *heap, pya_dptr address) {
    const std::exception_ptr error = std::exchange(filter_error, nullptr);
    if (error != nullptr) {
        (void)!pya_free(heap, address);
        std::rethrow_exception(error);
    }
}

/* Tells the profiler and torch's callbacks of a new block. */
inline __attribute__((always_inline)) void
tell_of(pya_heap *heap, pya_dptr address, int device) {
    if (is_profiling() && address != 0) {
        int owner = device;
        const int64_t delta = block_bytes(heap, address, &owner);
        profiler_report(heap, pointer_of(address), delta, owner);
    }
    if (is_traced()) {
        trace_memory(true, address);
    }
}

void
filter_drop(void *arg) {
    delete static_cast<std::function<bool(void *)> *>(arg);
}

} // namespace

void
pya_torch_forget_filter_error() {
    if (PYA_UNLIKELY(has_filter_failed.load(std::memory_order_relaxed))) {
        filter_error = nullptr;
    }
}

PYA_EXPORT void *
pya_torch_alloc(size_t bytes, int device, void *stream) {
    pya_heap *heap = heap_or_throw();
    if (PYA_UNLIKELY(!pya_torch_is_cached.load(std::memory_order_relaxed))) {
        void *ptr = pya_torch_uncached_alloc(bytes);
        if (is_traced()) {
            trace_memory(true, address_of(ptr));
        }
        return ptr;
    }
    pya_dptr address = 0;
    const pya_status status = pya_alloc(heap, device, bytes, stream_of(stream), &address);
    if (PYA_UNLIKELY(has_filter_failed.load(std::memory_order_relaxed))) {
        throw_filter_error(heap, address);
    }
    if (PYA_UNLIKELY(status != PYA_OK)) {
        throw_status(heap, status, "allocation failed", device);
    }
    tell_of(heap, address, device);
    return pointer_of(address);
}

void *
pya_torch_alloc_at(size_t bytes, int device, void *stream, void *ptr) {
    pya_heap *heap = heap_or_throw();
    const pya_dptr address = address_of(ptr);
    const pya_status status = pya_alloc_at(heap, device, bytes, stream_of(stream), address);
    if (has_filter_failed.load(std::memory_order_relaxed)) {
        throw_filter_error(heap, status == PYA_OK ? address : 0);
    }
    if (status == PYA_E_INVAL) {
        char text[160];
        (void)snprintf(
            text, sizeof text,
            "pyalloc: Could not allocate CUDA storage at exact address %p: it is not free memory "
            "of this stream and pool, at a multiple of 512 bytes",
            ptr);
        throw std::runtime_error(text);
    }
    check(status, "allocating at an address failed", device);
    tell_of(heap, address, device);
    return ptr;
}

pya_status
pya_torch_give_back(void *ptr) {
    pya_heap *heap = attached.load(std::memory_order_acquire);
    if (heap == nullptr || ptr == nullptr) {
        return PYA_OK;
    }
    if (PYA_UNLIKELY(pya_torch_n_uncached.load(std::memory_order_acquire) > 0) &&
        pya_torch_uncached_free(ptr, trace_uncached_free)) {
        return PYA_OK;
    }
    int device = 0;
    const bool report = is_profiling();
    const int64_t delta = report ? block_bytes(heap, address_of(ptr), &device) : 0;
    if (is_traced() && block_bytes(heap, address_of(ptr), &device) > 0) {
        trace_memory(false, address_of(ptr)); /* before the free: nobody else has the address yet */
    }
    const pya_status status = pya_free(heap, address_of(ptr));
    if (PYA_UNLIKELY(status != PYA_OK)) {
        n_refused_frees.fetch_add(1, std::memory_order_relaxed);
    } else if (report) {
        profiler_report(heap, ptr, -delta, device);
    }
    return status;
}

PYA_EXPORT void
pya_torch_free(void *ptr, size_t bytes, int device, void *stream) {
    (void)bytes;
    (void)device;
    (void)stream;
    const pya_status status = pya_torch_give_back(ptr);
    /* Deleters must not throw.  A forked child frees what it does not own: silently, as native does. */
    if (PYA_UNLIKELY(status != PYA_OK && status != PYA_E_FORKED)) {
        (void)fprintf(
            stderr, "pyalloc: freeing %p was refused: %s\n", ptr, pya_status_text(status));
    }
}

void
pya_torch_record(void *ptr, pya_stream stream) {
    check(
        pya_record_stream(heap_or_throw(), address_of(ptr), stream),
        "recording the use of a stream failed", -1);
}

namespace {

void
hook_init(int n_devices) {
    pya_torch_native_init(n_devices);
    n_devices_of_torch.store(n_devices, std::memory_order_release);
}

void
hook_reset() {
    (void)heap_or_throw();
    pya_torch_empty_cache(nullptr, pya_torch_pool_in_use());
}

void
hook_memory_fraction(double fraction, int device) {
    /* The heap would accept any index for a device that it has not opened yet. */
    const int n_devices = n_devices_of_torch.load(std::memory_order_acquire);
    if (device < 0 || device >= n_devices) {
        throw std::runtime_error(
            "there is no CUDA device " + std::to_string(device) + ": this process sees " +
            std::to_string(n_devices) + ", numbered from 0");
    }
    if (!(fraction >= 0 && fraction <= 1)) { /* NaN; torch's Python rejects the other values */
        throw std::runtime_error(
            "invalid fraction:" + std::to_string(fraction) + ". Please set within [0, 1].");
    }
    check(
        pya_set_fraction(heap_or_throw(), device, fraction), "setting the memory fraction failed",
        device);
}

void *
hook_base_alloc(void *ptr, size_t *bytes) {
    struct pya_segment_info segment = {};
    check(
        pya_segment_info(heap_or_throw(), address_of(ptr), &segment),
        "finding a base allocation failed", -1);
    if (bytes != nullptr) {
        *bytes = segment.bytes;
    }
    return pointer_of(segment.base);
}

void
hook_record_stream(void *ptr, void *stream) {
    pya_torch_record(ptr, stream_of(stream));
}

void
hook_begin_pool(int device, pya_pool_id pool, std::function<bool(void *)> filter) {
    pya_heap *heap = heap_or_throw();
    pya_torch_pool_check_allocator();
    auto own = std::make_unique<std::function<bool(void *)>>(std::move(filter));
    const pya_stream current = stream_of(pya_torch_fast_stream(static_cast<int8_t>(device)));
    const pya_status status =
        pya_pool_begin(heap, device, pool, {filter_match, filter_drop, own.get(), current});
    pya_torch_forget_filter_error();
    if (status == PYA_E_INVAL) {
        throw std::runtime_error(
            "pyalloc: pool (" + std::to_string(pool.first) + ", " + std::to_string(pool.second) +
            ") of GPU " + std::to_string(device) +
            " is already in use: a capture or a use_mem_pool block that uses it has not ended. Only one "
            "at a time can; use another pool, or end that one first");
    }
    check(status, "beginning to allocate to a pool failed", device);
    (void)own.release(); /* the heap drops it when the pool ends */
    // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks)
    pya_torch_fast_note_stream(static_cast<int8_t>(device));
    pya_torch_pool_note_begun(static_cast<int8_t>(device), pool);
}

void
hook_end_pool(int device, pya_pool_id pool) {
    const pya_status status = pya_pool_end(heap_or_throw(), device, pool);
    /* A child forked in between leaves the block too, perhaps on its way to exit: do not throw. */
    if (status != PYA_E_FORKED) {
        check(status, "ending the allocation to a pool failed", device);
        pya_torch_fast_note_stream(static_cast<int8_t>(device)); /* the capture is over */
    }
}

void
hook_release_pool(int device, pya_pool_id pool) {
    pya_heap *heap = attached.load(std::memory_order_acquire);
    /* Graphs are also destroyed at interpreter exit, where nobody can catch an exception. */
    if (heap != nullptr && pya_pool_release(heap, device, pool) != PYA_OK) {
        n_refused_frees.fetch_add(1, std::memory_order_relaxed);
    }
}

struct hook {
    const char *setter;
    uintptr_t address;
};

template <typename F>
uintptr_t
at(F *function) {
    return reinterpret_cast<uintptr_t>(function);
}

const hook *
hooks(size_t *n) {
    static const hook table[] = {
        {"set_init_fn", at(hook_init)},
        {"set_reset_fn", at(hook_reset)},
        {"set_memory_fraction_fn", at(hook_memory_fraction)},
        {"set_base_alloc_fn", at(hook_base_alloc)},
        {"set_record_stream_fn", at(hook_record_stream)},
        {"set_begin_allocate_to_pool", at(hook_begin_pool)},
        {"set_end_allocate_to_pool_fn", at(hook_end_pool)},
        {"set_release_pool", at(hook_release_pool)},
    };
    *n = sizeof table / sizeof table[0];
    return table;
}

} // namespace

extern "C" void
pya_torch_attach(struct pya_heap *heap) {
    attached.store(heap, std::memory_order_release);
}

extern "C" struct pya_heap *
pya_torch_heap(void) {
    return attached.load(std::memory_order_acquire);
}

extern "C" const char *
pya_torch_hook_setter(size_t index) {
    size_t n = 0;
    const hook *table = hooks(&n);
    return index < n ? table[index].setter : nullptr;
}

extern "C" uintptr_t
pya_torch_hook_address(size_t index) {
    size_t n = 0;
    const hook *table = hooks(&n);
    return index < n ? table[index].address : 0;
}

extern "C" void
pya_torch_find_symbols(void) {
    pya_torch_remember_allocator();
    pya_torch_oom_prepare();
    /* In a dry run the preloaded library receives these reports, and wants all of them. */
    if (!pya_torch_find(profiler.report, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE") ||
        !pya_torch_find(profiler.enabled, "pya_hostcuda_wants_reports")) {
        profiler.enabled = profiler.report == nullptr
                               ? nullptr
                               : reinterpret_cast<bool (*)()>(
                                     pya_torch_symbol("_ZN3c1022memoryProfilingEnabledEv"));
    }
    (void)pya_torch_find(
        profiler.report_oom, "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");
    const void *flag = pya_torch_symbol("_ZN3c104impl8GPUTrace9haveStateE");
    gpu_trace.store(flag == nullptr ? &is_never : static_cast<const bool *>(flag));
}

extern "C" void
pya_torch_set_tracer(pya_torch_tracer tracer) {
    gpu_tracer.store(tracer);
}

extern "C" bool
pya_torch_feature(size_t index, const char **name, bool *works, const char **detail) {
    switch (index) {
    case 0:
        *name = "out of memory is raised as";
        *works = pya_torch_oom_is_known(detail);
        return true;
    case 1:
        *name = "memory columns of torch.profiler";
        *works = profiler.enabled != nullptr;
        *detail = *works ? "reported through c10" : "libc10 does not export the profiler's hooks";
        return true;
    case 2:
        *name = "MemPool(allocator)";
        *works = pya_torch_pool_takes_allocator(detail);
        return true;
    default:
        return pya_torch_slot_feature(index - 3, name, works, detail);
    }
}

extern "C" uint64_t
pya_torch_refused_frees(void) {
    return n_refused_frees.load(std::memory_order_relaxed);
}

extern "C" bool
pya_torch_is_initialized(void) {
    return n_devices_of_torch.load(std::memory_order_acquire) > 0;
}
