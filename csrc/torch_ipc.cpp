/* The driver gives legacy IPC handles only for plain allocations, so sharing works with vmm:false, and says so where it
 * does not.  A handle may be open once per process: it is kept while any tensor uses it. */
#include "torch_ipc.h"

#include "core/pyalloc.h"
#include "torch_bridge.h"
#include "torch_guarded.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <cstdint>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <unordered_map>

namespace {

/* cudaIpcMemHandle_t, by value in cudaIpcOpenMemHandle. */
struct ipc_handle {
    char bytes[64];
};
constexpr unsigned LAZY_PEER_ACCESS = 1;

struct ipc_functions {
    int (*get)(ipc_handle *handle, void *base);
    int (*open)(void **base, ipc_handle handle, unsigned flags);
    int (*close)(void *base);
    int (*last_error)();
    int (*get_device)(int *device);
    int (*set_device)(int device);
};

const ipc_functions &
functions() {
    static const ipc_functions found = [] {
        ipc_functions each = {};
        (void)pya_torch_find(each.get, "cudaIpcGetMemHandle");
        (void)pya_torch_find(each.open, "cudaIpcOpenMemHandle");
        (void)pya_torch_find(each.close, "cudaIpcCloseMemHandle");
        (void)pya_torch_find(each.last_error, "cudaGetLastError");
        (void)pya_torch_find(each.get_device, "cudaGetDevice");
        (void)pya_torch_find(each.set_device, "cudaSetDevice");
        return each;
    }();
    if (found.get == nullptr || found.open == nullptr || found.close == nullptr ||
        found.last_error == nullptr || found.get_device == nullptr || found.set_device == nullptr) {
        throw std::runtime_error("pyalloc: the CUDA runtime's IPC functions were not found");
    }
    return found;
}

/* On the device it was opened on; the caller's, who only drops a tensor, stays as it was, and so does what the runtime
 * says went wrong last. */
void
close_on(int device, void *base) {
    const ipc_functions &cuda = functions();
    int current = device;
    const bool moves = cuda.get_device(&current) == 0 && current != device;
    const bool is_there = !moves || cuda.set_device(device) == 0;
    const bool is_closed = is_there && cuda.close(base) == 0;
    const bool is_back = !moves || cuda.set_device(current) == 0;
    if (!is_closed || !is_back) {
        (void)cuda.last_error();
    }
}

/* By what the sender's cudaIpcGetMemHandle gave. */
using handle_map = std::unordered_map<std::string, std::weak_ptr<void>>;
pya_torch_guarded<handle_map> open_handles;

std::shared_ptr<void>
open_here(const std::string &handle) {
    ipc_handle raw = {};
    if (handle.size() != sizeof raw.bytes) {
        throw std::runtime_error(
            "pyalloc: the sender of this tensor does not use pyalloc; install it in both processes (pyalloc run)");
    }
    memcpy(raw.bytes, handle.data(), sizeof raw.bytes);
    const ipc_functions &cuda = functions();
    void *base = nullptr;
    int device = 0;
    int error = cuda.get_device(&device);
    error = error != 0 ? error : cuda.open(&base, raw, LAZY_PEER_ACCESS);
    if (error != 0) {
        (void)cuda.last_error();
        throw std::runtime_error(
            "pyalloc: opening another process's memory failed (cudaIpcOpenMemHandle gave " +
            std::to_string(error) + ")");
    }
    return {base, [device](void *opened) { close_on(device, opened); }};
}

/* Under the map's lock: it may be open once. */
std::shared_ptr<void>
open_once(handle_map &known, const std::string &handle) {
    for (auto each = known.begin(); each != known.end();) {
        each = each->second.expired() ? known.erase(each) : std::next(each);
    }
    const auto found = known.find(handle);
    std::shared_ptr<void> opened = found == known.end() ? nullptr : found->second.lock();
    if (opened == nullptr) {
        opened = open_here(handle);
        known[handle] = opened;
    }
    return opened;
}

} // namespace

pya_torch_share
pya_torch_ipc_share(void *self, void *ptr) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    struct pya_segment_info segment = {};
    const auto address = static_cast<pya_dptr>(reinterpret_cast<uintptr_t>(ptr));
    if (heap == nullptr || pya_segment_info(heap, address, &segment) != PYA_OK) {
        throw std::runtime_error("pyalloc: only memory that pyalloc handed out can be shared");
    }
    ipc_handle handle = {};
    const ipc_functions &cuda = functions();
    const int error =
        cuda.get(&handle, reinterpret_cast<void *>(static_cast<uintptr_t>(segment.base)));
    if (error != 0) {
        (void)cuda.last_error(); /* ours, not to be found by whoever asks next */
        throw std::runtime_error(
            "pyalloc: this memory cannot be shared with another process by CUDA IPC (cudaIpcGetMemHandle gave " +
            std::to_string(error) + "): " +
            (segment.is_plain
                 ? "the driver has no such handle for it. Send"
                 : "memory from the driver's virtual memory calls has no such handle. Start the program with "
                   "PYALLOC_CONF=vmm:false, or send") +
            " a CPU copy of the tensor.");
    }
    return {
        static_cast<ptrdiff_t>(address - segment.base),
        std::string(handle.bytes, sizeof handle.bytes)};
}

std::shared_ptr<void>
pya_torch_ipc_open(void *self, std::string handle) {
    (void)self;
    return open_handles.with([&handle](handle_map &known) { return open_once(known, handle); });
}
