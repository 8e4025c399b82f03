/* cudaDeviceEnablePeerAccess opens only memory of cudaMalloc.  Memory of the driver's virtual memory calls is opened range by
 * range; where it is not, only cudaMemcpyPeerAsync can copy it. */
#include "torch_peers.h"

#include "core/pyalloc.h"
#include "torch_slots.h"
#include "torch_symbols.h"

#include <stdexcept>
#include <string>

namespace {

constexpr int DEVICE_TO_DEVICE = 3;      /* cudaMemcpyDeviceToDevice */
constexpr int ERROR_NOT_SUPPORTED = 801; /* cudaErrorNotSupported */

} // namespace

void
pya_torch_enable_peer(void *self, int8_t device, int8_t other) {
    void (*torch_enable)(void *, int8_t, int8_t) = nullptr;
    if (pya_torch_find(torch_enable, PYA_TORCH_ENABLE_PEER)) {
        torch_enable(self, device, other);
    }
    pya_heap *heap = pya_torch_heap();
    const pya_status status = heap == nullptr ? PYA_OK : pya_enable_peer(heap, other, device);
    if (status != PYA_OK) {
        const std::string what = "opening the memory of device " + std::to_string(other) +
                                 " to device " + std::to_string(device) + " failed";
        char text[512];
        (void)pya_heap_error_text(heap, status, what.c_str(), other, text, sizeof text);
        throw std::runtime_error(std::string("pyalloc: ") + text);
    }
}

/* The parameters are torch's.  If torch has enabled access to the peer (above), copies by address: these go directly from card
 * to card, as with torch's own allocator.  torch asks for access once, and believes to have it even if that failed. */
int
pya_torch_copy( // NOLINT(readability-function-size)
    void *self, void *to, int to_device, const void *from, int from_device, size_t bytes,
    void *stream, bool has_peer_access) {
    int (*peer)(void *, int, const void *, int, size_t, void *) = nullptr;
    int (*copy)(void *, const void *, size_t, int, void *) = nullptr;
    (void)self;
    pya_heap *heap = pya_torch_heap();
    const bool has_access =
        has_peer_access && (heap == nullptr || !pya_lacks_peer(heap, to_device, from_device));
    if (to_device != from_device && !has_access && pya_torch_find(peer, "cudaMemcpyPeerAsync")) {
        return peer(to, to_device, from, from_device, bytes, stream);
    }
    return pya_torch_find(copy, "cudaMemcpyAsync") ? copy(to, from, bytes, DEVICE_TO_DEVICE, stream)
                                                   : ERROR_NOT_SUPPORTED;
}
