/* There are two kinds of handle, both 64 bytes: pages are shared through csrc/ipc, plain segments by the CUDA runtime's
 * handles. A process may open a handle only once, so we keep it open while any tensor uses it. */
#include "torch_ipc.h"

#include "core/pyalloc.h"
#include "ipc/ipc.h"
#include "torch_guarded.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <unordered_map>

namespace {

/* cudaIpcMemHandle_t, which cudaIpcOpenMemHandle takes by value. */
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

/* Closes it on the device it was opened on.  The caller only drops a tensor, so its current device and the runtime's last
 * error stay as they were. */
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

void *
pointer_to(pya_dptr address) {
    return reinterpret_cast<void *>(static_cast<uintptr_t>(address));
}

pya_dptr
address_of(const void *pointer) {
    return static_cast<pya_dptr>(reinterpret_cast<uintptr_t>(pointer));
}

pya_torch_share
share_plain(pya_heap *heap, pya_dptr address) {
    struct pya_segment_info segment = {};
    if (pya_segment_info(heap, address, &segment) != PYA_OK) {
        throw std::runtime_error("pyalloc: only memory that pyalloc handed out can be shared");
    }
    ipc_handle handle = {};
    const ipc_functions &cuda = functions();
    const int error = cuda.get(&handle, pointer_to(segment.base));
    if (error != 0) {
        (void)cuda.last_error(); /* clear our error, so that no later caller finds it */
        throw std::runtime_error(
            "pyalloc: this memory cannot be shared with another process by CUDA IPC (cudaIpcGetMemHandle returned " +
            std::to_string(error) + "): " +
            (segment.is_plain
                 ? "the driver has no such handle for it. Send"
                 : "the driver cannot export memory of its virtual memory calls. Start the program with "
                   "PYALLOC_CONF=vmm:false, or send") +
            " a CPU copy of the tensor.");
    }
    return {
        static_cast<ptrdiff_t>(address - segment.base),
        std::string(handle.bytes, sizeof handle.bytes)};
}

[[noreturn]] void
fail(pya_heap *heap, pya_status status, const char *what, int device, const char *why) {
    char text[PYA_IPC_WHY_BYTES + 128] = "";
    if (why[0] == '\0') {
        (void)pya_heap_error_text(heap, status, what, device, text, sizeof text);
        throw std::runtime_error(std::string("pyalloc: ") + text);
    }
    throw std::runtime_error(std::string("pyalloc: ") + what + " failed: " + why);
}

std::shared_ptr<void>
open_plain(const std::string &handle) {
    ipc_handle raw = {};
    memcpy(raw.bytes, handle.data(), sizeof raw.bytes);
    const ipc_functions &cuda = functions();
    void *base = nullptr;
    int device = 0;
    int error = cuda.get_device(&device);
    error = error != 0 ? error : cuda.open(&base, raw, LAZY_PEER_ACCESS);
    if (error != 0) {
        (void)cuda.last_error();
        throw std::runtime_error(
            "pyalloc: opening another process's memory failed (cudaIpcOpenMemHandle returned " +
            std::to_string(error) + ")");
    }
    return {base, [device](void *opened) { close_on(device, opened); }};
}

std::shared_ptr<void>
open_pages(pya_heap *heap, const std::string &handle) {
    pya_ipc_name name = {};
    memcpy(&name, handle.data(), sizeof name);
    char why[PYA_IPC_WHY_BYTES];
    pya_dptr base = 0;
    int device = 0;
    if (functions().get_device(&device) != 0) {
        device = 0;
    }
    const pya_status status = pya_ipc_open(heap, device, &name, &base, why);
    if (status != PYA_OK) {
        fail(heap, status, "opening another process's memory", device, why);
    }
    /* The status is ignored: if the device is broken, the next call on it fails anyway. */
    return {pointer_to(base), [heap](void *opened) {
                (void)!pya_import_close(heap, address_of(opened));
            }};
}

std::shared_ptr<void>
open_here(const std::string &handle) {
    pya_heap *heap = pya_torch_heap();
    if (heap != nullptr && pya_ipc_is_name(handle.data(), handle.size())) {
        return open_pages(heap, handle);
    }
    if (handle.size() != sizeof(ipc_handle)) {
        throw std::runtime_error(
            "pyalloc: the sender of this tensor does not use pyalloc; install it in both processes (pyalloc run)");
    }
    return open_plain(handle);
}

/* A key for the pages in a handle: blocks of the same pages share one mapping, so the offset in the page is dropped. */
std::string
pages_of(const std::string &handle) {
    if (!pya_ipc_is_name(handle.data(), handle.size())) {
        return handle;
    }
    pya_ipc_name name = {};
    memcpy(&name, handle.data(), sizeof name);
    name.ptr -= name.ptr % PYA_PAGE;
    return {reinterpret_cast<const char *>(&name), sizeof name};
}

/* By pages_of() the sender's handle. */
using handle_map = std::unordered_map<std::string, std::weak_ptr<void>>;
pya_torch_guarded<handle_map> open_handles;

/* Called under the map's lock: a handle may be opened only once. */
std::shared_ptr<void>
open_once(handle_map &known, const std::string &handle) {
    for (auto each = known.begin(); each != known.end();) {
        each = each->second.expired() ? known.erase(each) : std::next(each);
    }
    const std::string pages = pages_of(handle);
    const auto found = known.find(pages);
    std::shared_ptr<void> opened = found == known.end() ? nullptr : found->second.lock();
    if (opened == nullptr) {
        opened = open_here(handle);
        known[pages] = opened;
    }
    return opened;
}

/* torch calls us with the GIL held.  We release it while opening: the sender may take a while, and may need those threads. */
struct python_functions {
    int (*is_held)();
    void *(*leave)();
    void (*enter)(void *thread);
};

const python_functions &
python() {
    static const python_functions found = [] {
        python_functions each = {};
        (void)pya_torch_find(each.is_held, "PyGILState_Check");
        (void)pya_torch_find(each.leave, "PyEval_SaveThread");
        (void)pya_torch_find(each.enter, "PyEval_RestoreThread");
        return each;
    }();
    return found;
}

void *
leave_python() {
    const python_functions &known = python();
    const bool is_known =
        known.is_held != nullptr && known.leave != nullptr && known.enter != nullptr;
    return is_known && known.is_held() != 0 ? known.leave() : nullptr;
}

} // namespace

pya_torch_share
pya_torch_ipc_share(void *self, void *ptr) {
    (void)self;
    pya_heap *heap = pya_torch_heap();
    pya_ipc_name name = {};
    char why[PYA_IPC_WHY_BYTES];
    size_t offset = 0;
    if (heap == nullptr) {
        throw std::runtime_error("pyalloc: only memory that pyalloc handed out can be shared");
    }
    const pya_status status = pya_ipc_share(heap, address_of(ptr), &name, &offset, why);
    if (status == PYA_E_NOTSUP || status == PYA_E_FOREIGN) {
        return share_plain(heap, address_of(ptr));
    }
    if (status != PYA_OK) {
        fail(heap, status, "sharing memory with another process", -1, why);
    }
    static_assert(sizeof name == sizeof(ipc_handle), "as long as what torch knows");
    return {
        static_cast<ptrdiff_t>(offset),
        std::string(reinterpret_cast<const char *>(&name), sizeof name)};
}

std::shared_ptr<void>
pya_torch_ipc_open(void *self, std::string handle) {
    (void)self;
    std::shared_ptr<void> opened;
    std::exception_ptr failed;
    void *thread = leave_python();
    try {
        opened =
            open_handles.with([&handle](handle_map &known) { return open_once(known, handle); });
    } catch (...) {
        failed = std::current_exception();
    }
    /* Not in a destructor: if the process is exiting, Python ends the thread in here, by unwinding, which destructors block. */
    if (thread != nullptr) {
        python().enter(thread);
    }
    if (failed != nullptr) {
        std::rethrow_exception(failed);
    }
    return opened;
}

pya_torch_old_share
pya_torch_ipc_share_old(void *self, void *ptr) {
    const pya_torch_share made = pya_torch_ipc_share(self, ptr);
    return {made.offset, {made.handle.data(), made.handle.size()}};
}

std::shared_ptr<void>
pya_torch_ipc_open_old(void *self, pya_torch_old_string handle) {
    return pya_torch_ipc_open(self, handle.copy());
}
