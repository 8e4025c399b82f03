/* One cudaMalloc or cudaFree per call, for memory checkers that want to see every allocation.  As in torch's own allocator,
 * these blocks appear in no statistics and no snapshot. */
#include "torch_uncached.h"

#include "torch_bridge.h"
#include "torch_guarded.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <atomic>
#include <string>
#include <unordered_set>

namespace {

constexpr int OUT_OF_MEMORY = 2; /* cudaErrorMemoryAllocation */

struct runtime_functions {
    int (*alloc)(void **out, size_t bytes);
    int (*release)(void *ptr);
    int (*last_error)();
};

pya_torch_guarded<std::unordered_set<void *>> uncached;

const runtime_functions &
functions() {
    static const runtime_functions found = [] {
        runtime_functions each = {};
        (void)pya_torch_find(each.alloc, "cudaMalloc");
        (void)pya_torch_find(each.release, "cudaFree");
        (void)pya_torch_find(each.last_error, "cudaGetLastError");
        return each;
    }();
    return found;
}

} // namespace

std::atomic<bool> pya_torch_is_cached{true};
std::atomic<size_t> pya_torch_n_uncached{0};

extern "C" void
pya_torch_set_cached(bool is_cached) {
    pya_torch_is_cached.store(is_cached);
}

void *
pya_torch_uncached_alloc(size_t bytes) {
    const runtime_functions &cuda = functions();
    void *ptr = nullptr;
    if (bytes == 0) {
        return nullptr;
    }
    if (cuda.alloc == nullptr || cuda.release == nullptr || cuda.last_error == nullptr) {
        pya_torch_throw_text(
            "pyalloc: cudaMalloc was not found, so the cache cannot be switched off", false);
    }
    const int error = cuda.alloc(&ptr, bytes);
    if (error != 0) {
        (void)cuda.last_error(); /* clear our error, so that no later caller finds it */
        const std::string text = error == OUT_OF_MEMORY
                                     ? "CUDA error: out of memory. Tried to allocate " +
                                           std::to_string(bytes) +
                                           " bytes with the caching allocator switched off"
                                     : "pyalloc: cudaMalloc returned " + std::to_string(error);
        pya_torch_throw_text(text.c_str(), error == OUT_OF_MEMORY);
    }
    uncached.with([ptr](std::unordered_set<void *> &blocks) {
        blocks.insert(ptr);
        pya_torch_n_uncached.store(blocks.size(), std::memory_order_release);
    });
    return ptr;
}

bool
pya_torch_uncached_free(void *ptr, void (*before)(const void *ptr)) {
    const bool is_ours = uncached.with([ptr](std::unordered_set<void *> &blocks) {
        const bool is_there = blocks.erase(ptr) != 0;
        if (is_there) {
            pya_torch_n_uncached.store(blocks.size(), std::memory_order_release);
        }
        return is_there;
    });
    if (is_ours) {
        before(ptr);
        /* An error here comes from an earlier kernel; whoever launched that will see it. */
        (void)functions().release(ptr);
    }
    return is_ours || uncached.is_lost(); /* in such a child every block is its parent's */
}

void
pya_torch_slot_enable(void *self, bool is_cached) {
    (void)self;
    pya_torch_set_cached(is_cached);
}

bool
pya_torch_slot_is_enabled(const void *self) {
    (void)self;
    return pya_torch_is_cached.load(std::memory_order_relaxed);
}
