/* Replacements for the wrapper's busiest methods.  Floor 5. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The calling thread's current stream; NULL, the default stream, also where torch cannot be asked. */
void *pya_torch_fast_stream(int8_t device);
/* A c10::DataPtr (four words) for memory that the wrapper's deleter frees; false: its layout is not known. */
bool pya_torch_fast_data_ptr(void **out, void *self, void *ptr, int8_t device);
/* Finds what they need of torch; false: leave the wrapper's methods alone. */
bool pya_torch_fast_prepare(void);
void *pya_torch_fast_raw_alloc(void *self, size_t bytes);
void *pya_torch_fast_raw_alloc_with_stream(void *self, size_t bytes, void *stream);
void pya_torch_fast_raw_delete(void *self, void *ptr);
/* c10::cuda::CUDAStream: device, then the stream's number. */
struct pya_torch_stream {
    uint64_t device;
    uint64_t number;
};
/* Can a stream's handle be asked for?  The next function needs it. */
bool pya_torch_fast_knows_streams(void);
/* The hook for it gets the handle alone, which does not say whose stream it is.  data: a c10::DataPtr. */
void pya_torch_fast_record_stream(void *self, void *const *data, struct pya_torch_stream stream);
/* To be called after the heap has heard of the thread's current stream: is it one that torch did not make? */
void pya_torch_fast_note_stream(int8_t device);
/* c10::DataPtr: the pointer, then context and deleter in an order that the first one made by torch tells.  Neither copied
 * nor destroyed bit by bit, as torch's: then every ABI returns it in the same place. */
struct pya_torch_made {
    void *data;
    void *second;
    void *third;
    uint64_t device;
    pya_torch_made(void *data, void *second, void *third, uint64_t device)
        : data(data), second(second), third(third), device(device) {}
    pya_torch_made(const pya_torch_made &other)
        : pya_torch_made(other.data, other.second, other.third, other.device) {}
    ~pya_torch_made() {} // NOLINT(modernize-use-equals-default): not a trivial one
};
pya_torch_made pya_torch_fast_allocate(void *self, size_t bytes);
