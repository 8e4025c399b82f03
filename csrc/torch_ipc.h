/* CUDA IPC for torch: a tensor's memory opened in another process.  Floor 5. */
#pragma once

#include "torch_old_string.h"

#include <cstddef>
#include <memory>
#include <string>

/* torch's ShareableHandle: the allocation's handle, and the pointer's offset in the allocation. */
struct pya_torch_share {
    ptrdiff_t offset;
    std::string handle;
};

/* Implement the virtual methods shareIpcHandle and getIpcDevPtr.  Both throw std::runtime_error that says what to do. */
pya_torch_share pya_torch_ipc_share(void *self, void *ptr);
std::shared_ptr<void> pya_torch_ipc_open(void *self, std::string handle);
/* The same for a torch built with old strings. */
struct pya_torch_old_share {
    ptrdiff_t offset;
    pya_torch_old_string handle;
};
pya_torch_old_share pya_torch_ipc_share_old(void *self, void *ptr);
std::shared_ptr<void> pya_torch_ipc_open_old(void *self, pya_torch_old_string handle);
