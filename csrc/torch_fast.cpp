/* A short path from torch to the heap.  The wrapper's own raw_alloc, raw_delete and allocate take a global mutex and a
 * hash map lookup per call, which costs more than the allocation.  These ask torch for the current device and stream and go
 * straight to the heap. */
#include "torch_fast.h"

#include "core/pyalloc.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

namespace {

using cuda_stream = struct pya_torch_stream;

int8_t (*current_device)() = nullptr;
int (*get_device)(int8_t *device) = nullptr; /* NULL if this torch lacks it */
cuda_stream (*current_stream)(int8_t device) = nullptr;
void *(*stream_handle)(const cuda_stream *stream) = nullptr;
pya_torch_made (*torch_allocate)(void *self, size_t bytes) = nullptr;
void *(*torch_deleter)(const void *self) = nullptr;

/* What we learned from one of torch's own DataPtrs. */
enum layout { LAYOUT_UNKNOWN, LAYOUT_CONTEXT_FIRST, LAYOUT_DELETER_FIRST, LAYOUT_STRANGE };
std::atomic<int> known_layout{LAYOUT_UNKNOWN};
std::atomic<void *> known_deleter{nullptr}; /* the same for all blocks; stored before the layout */

template <typename F>
bool
find(F *&function, const char *symbol) {
    void *address = pya_torch_symbol(symbol);
    memcpy(&function, &address, sizeof function);
    return address != nullptr;
}

/* Stream number 0 is the default stream.  torch looks up its handle on every call, through two device guards.  Once seen to be
 * NULL it stays NULL, so we remember that. */
std::atomic<bool> default_is_null{false};

__attribute__((noinline)) void *
look_handle_up(cuda_stream stream) {
    void *handle = stream_handle(&stream);
    if (stream.number == 0 && handle == nullptr) {
        default_is_null.store(true, std::memory_order_relaxed);
    }
    return handle;
}

inline void *
handle_of(const cuda_stream &stream) {
    const bool is_null = stream.number == 0 && default_is_null.load(std::memory_order_relaxed);
    return PYA_LIKELY(is_null) ? nullptr : look_handle_up(stream);
}

/* True for torch.cuda.ExternalStream: torch numbers its own streams, but for others the number is the handle. */
bool
is_foreign(const cuda_stream &stream, const void *handle) {
    return stream.number != 0 && stream.number == reinterpret_cast<uintptr_t>(handle);
}

/* The last handle that was found to be one of torch's own streams.  The same few are asked for again and again, and they live
 * as long as the process. */
std::atomic<const void *> known_own{nullptr};

/* Is it a stream of torch's pools?  torch numbers those by priority and index.  False if this torch numbers them otherwise, or
 * has not created the device's pools. */
bool
is_of_pool(int8_t device, const void *handle) {
    constexpr uint64_t N_PRIORITIES = 4;
    constexpr uint64_t N_STREAMS = 32;
    const uint64_t where = 1 | static_cast<uint64_t>(static_cast<uint8_t>(device)) << 8U;
    try {
        for (uint64_t priority = 1; priority <= N_PRIORITIES; priority++) {
            for (uint64_t i = 0; i < N_STREAMS; i++) {
                const cuda_stream stream = {where, i << 5U | priority << 1U | 1};
                if (stream_handle(&stream) == handle) {
                    return !is_foreign(stream, handle);
                }
            }
        }
    } catch (const std::exception &) { // NOLINT(bugprone-empty-catch): there is no such number
    }
    return false;
}

/* A handle alone does not say whose stream it is: treat it as foreign unless it is torch's current stream or in its pools. */
__attribute__((noinline)) bool
is_unknown_foreign(int8_t device, const void *handle) {
    const cuda_stream stream = current_stream(device);
    const bool is_current = handle_of(stream) == handle && !is_foreign(stream, handle);
    if (!is_current && !is_of_pool(device, handle)) {
        return true;
    }
    known_own.store(handle, std::memory_order_relaxed);
    return false;
}

inline bool
is_handle_foreign(int8_t device, const void *handle) {
    return handle != nullptr && handle != known_own.load(std::memory_order_relaxed) &&
           is_unknown_foreign(device, handle);
}

__attribute__((noinline, cold)) bool
note_foreign(const void *handle, int device) {
    pya_heap *heap = pya_torch_heap();
    const bool is_known = heap != nullptr && pya_note_foreign_stream(
                                                 heap, reinterpret_cast<uintptr_t>(handle), device);
    pya_torch_forget_filter_error();
    return is_known;
}

/* current_device() is get_device() plus a check that costs as much again; on an error, only the former throws. */
inline __attribute__((always_inline)) int8_t
device_here() {
    int8_t device = -1;
    if (PYA_LIKELY(get_device != nullptr && get_device(&device) == 0)) {
        return device;
    }
    return current_device();
}

/* Surrounds a request on a stream, or a record_stream.  A foreign stream is noted before it, because this may be the first
 * request of a capture, in which we must not wait.  If the heap did not know the stream yet, it is noted again afterwards,
 * also on failure. */
class on_stream {
  public:
    on_stream(int8_t device, const void *handle, bool is_foreign)
        : handle(handle), device(device),
          is_new(PYA_UNLIKELY(is_foreign) && !note_foreign(handle, device)) {}
    ~on_stream() {
        if (PYA_UNLIKELY(is_new)) {
            (void)note_foreign(handle, device);
        }
    }
    on_stream(const on_stream &) = delete;
    on_stream &operator=(const on_stream &) = delete;

  private:
    const void *handle;
    int8_t device;
    bool is_new;
};

/* Out of line, so that other requests need not save registers for it. */
__attribute__((noinline, cold)) void *
alloc_on_foreign(int8_t device, void *handle, size_t bytes) {
    const on_stream around(device, handle, true);
    return pya_torch_alloc(bytes, device, handle);
}

inline void *
alloc_at(int8_t device, void *handle, bool is_foreign, size_t bytes) {
    return PYA_UNLIKELY(is_foreign) ? alloc_on_foreign(device, handle, bytes)
                                    : pya_torch_alloc(bytes, device, handle);
}

inline void *
alloc_here(int8_t device, size_t bytes) {
    const cuda_stream stream = current_stream(device);
    void *handle = handle_of(stream);
    return alloc_at(device, handle, is_foreign(stream, handle), bytes);
}

/* Through torch's own method. */
pya_torch_made
allocate_slowly(void *self, size_t bytes) {
    const int8_t device = device_here();
    const cuda_stream stream = current_stream(device);
    void *handle = handle_of(stream);
    const on_stream around(device, handle, is_foreign(stream, handle));
    return torch_allocate(self, bytes);
}

/* The same, and learns the layout of the DataPtr that torch returns. */
pya_torch_made
allocate_and_look(void *self, size_t bytes) {
    pya_torch_made made = allocate_slowly(self, bytes);
    void *deleter = torch_deleter(self);
    int layout = LAYOUT_STRANGE;
    if (made.data != nullptr && made.second == deleter && made.third == made.data) {
        layout = LAYOUT_DELETER_FIRST;
    } else if (made.data != nullptr && made.third == deleter && made.second == made.data) {
        layout = LAYOUT_CONTEXT_FIRST;
    } else if (made.data == nullptr) {
        layout = LAYOUT_UNKNOWN;
    }
    const uint16_t device = static_cast<uint16_t>(made.device);
    const bool is_cuda =
        (device & 0xff) == 1 && (device >> 8) == static_cast<uint8_t>(current_device());
    known_deleter.store(deleter, std::memory_order_relaxed);
    known_layout.store(
        is_cuda || layout == LAYOUT_UNKNOWN ? layout : static_cast<int>(LAYOUT_STRANGE));
    return made;
}

pya_torch_made
make(void *ptr, int8_t device, int layout) {
    void *deleter = known_deleter.load(std::memory_order_relaxed);
    const bool is_first = layout == LAYOUT_DELETER_FIRST;
    const uint64_t where = 1 | static_cast<uint64_t>(static_cast<uint8_t>(device)) << 8;
    return {ptr, is_first ? deleter : ptr, is_first ? ptr : deleter, where};
}

/* Has torch make a block to look at, if no layout is known yet. */
int
layout_or_look(void *self) {
    if (known_layout.load() == LAYOUT_UNKNOWN && pya_torch_fast_prepare()) {
        (void)!pya_torch_give_back(allocate_and_look(self, 1).data);
    }
    return known_layout.load();
}

bool
is_understood(int layout) {
    return layout == LAYOUT_CONTEXT_FIRST || layout == LAYOUT_DELETER_FIRST;
}

/* Can torch be asked for the thread's current stream? */
bool
knows_current() {
    return (current_stream != nullptr && stream_handle != nullptr) || pya_torch_fast_prepare();
}

/* For C callers, so it must not throw: if torch fails to tell, assume that the stream is foreign. */
bool
is_perhaps_foreign(int8_t device, const void *handle) {
    try {
        return knows_current() && is_handle_foreign(device, handle);
    } catch (...) {
        return true;
    }
}

} // namespace

bool
pya_torch_fast_knows_streams(void) {
    return find(stream_handle, "_ZNK3c104cuda10CUDAStream6streamEv");
}

bool
pya_torch_fast_prepare(void) {
    (void)find(get_device, "_ZN3c104cuda9GetDeviceEPa");
    return find(current_device, "_ZN3c104cuda14current_deviceEv") &&
           find(current_stream, "_ZN3c104cuda20getCurrentCUDAStreamEa") &&
           pya_torch_fast_knows_streams() &&
           find(torch_allocate, PYA_TORCH_METHOD("8allocateEm")) &&
           find(
               torch_deleter,
               "_ZNK5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator11raw_deleterEv");
}

void *
pya_torch_fast_raw_alloc(void *self, size_t bytes) {
    (void)self;
    return alloc_here(device_here(), bytes);
}

void *
pya_torch_fast_raw_alloc_with_stream(void *self, size_t bytes, void *stream) {
    (void)self;
    const int8_t device = device_here();
    return alloc_at(device, stream, is_handle_foreign(device, stream), bytes);
}

void
pya_torch_fast_raw_delete(void *self, void *ptr) {
    (void)self;
    const pya_status status = pya_torch_give_back(ptr);
    /* Throw, as torch's own does: only code that frees by hand can pass a pointer that is not ours. */
    if (PYA_UNLIKELY(status == PYA_E_FOREIGN || status == PYA_E_DOUBLE_FREE)) {
        char address[32];
        (void)snprintf(address, sizeof address, "%p", ptr);
        throw std::runtime_error(
            std::string("pyalloc: freeing ") + address +
            " was refused: " + pya_status_text(status));
    }
}

pya_torch_made
pya_torch_fast_allocate(void *self, size_t bytes) {
    const int layout = known_layout.load(std::memory_order_acquire);
    if (PYA_UNLIKELY(layout == LAYOUT_UNKNOWN)) {
        return allocate_and_look(self, bytes);
    }
    if (PYA_UNLIKELY(layout == LAYOUT_STRANGE)) {
        return allocate_slowly(self, bytes);
    }
    const int8_t device = device_here();
    return make(alloc_here(device, bytes), device, layout);
}

pya_torch_made
pya_torch_fast_allocate_at(void *self, size_t bytes, void *ptr) {
    const int8_t device = device_here();
    const int layout = layout_or_look(self);
    if (!is_understood(layout)) {
        throw std::runtime_error("pyalloc: the layout of this torch's DataPtr is not known");
    }
    const cuda_stream stream = current_stream(device);
    void *handle = handle_of(stream);
    const on_stream around(device, handle, is_foreign(stream, handle));
    return make(pya_torch_alloc_at(bytes, device, handle, ptr), device, layout);
}

void *
pya_torch_fast_stream(int8_t device) {
    return knows_current() ? handle_of(current_stream(device)) : nullptr;
}

void
pya_torch_fast_note_stream(int8_t device) {
    if (current_stream != nullptr && stream_handle != nullptr) {
        const cuda_stream stream = current_stream(device);
        const void *handle = handle_of(stream);
        if (is_foreign(stream, handle)) {
            (void)note_foreign(handle, device);
        }
    }
}

void
pya_torch_fast_record_stream(void *self, void *const *data, cuda_stream stream) {
    (void)self;
    void *handle = handle_of(stream);
    const auto device = static_cast<int8_t>(stream.device >> 8U); /* above the device type */
    const on_stream around(device, handle, is_foreign(stream, handle));
    pya_torch_record(*data, pya_stream_of_device(reinterpret_cast<uintptr_t>(handle), device));
}

extern "C" void
pya_torch_note_handle(pya_stream stream, int device) {
    const void *handle = reinterpret_cast<const void *>(static_cast<uintptr_t>(stream));
    if (is_perhaps_foreign(static_cast<int8_t>(device), handle)) {
        (void)note_foreign(handle, device);
    }
}

bool
pya_torch_fast_data_ptr(void **out, void *self, void *ptr, int8_t device) {
    const int layout = layout_or_look(self);
    if (!is_understood(layout)) {
        return false;
    }
    const pya_torch_made made = make(ptr, device, layout);
    out[0] = made.data;
    out[1] = made.second;
    out[2] = made.third;
    memcpy(&out[3], &made.device, sizeof made.device);
    return true;
}
