/* One device's access to the memory of another.  Floor 5. */
#pragma once

#include <cstddef>
#include <cstdint>

#define PYA_TORCH_ENABLE_PEER PYA_TORCH_METHOD("16enablePeerAccessEaa")

/* Lets `device` access the memory of `other`. */
void pya_torch_enable_peer(void *self, int8_t device, int8_t other);
/* Returns a cudaError_t. */
int pya_torch_copy(
    void *self, void *to, int to_device, const void *from, int from_device, size_t bytes,
    void *stream, bool has_peer_access);
