/* Replacements for the wrapper's busiest methods.  Floor 5. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The calling thread's current stream.  NULL is the default stream, also returned if torch cannot be asked. */
void *pya_torch_fast_stream(int8_t device);
/* Writes a c10::DataPtr (four words) whose deleter is the wrapper's; false if DataPtr's layout is unknown. */
bool pya_torch_fast_data_ptr(void **out, void *self, void *ptr, int8_t device);
/* Looks up what the functions below need of torch; false: do not override the wrapper's methods. */
bool pya_torch_fast_prepare(void);
void *pya_torch_fast_raw_alloc(void *self, size_t bytes);
void *pya_torch_fast_raw_alloc_with_stream(void *self, size_t bytes, void *stream);
void pya_torch_fast_raw_delete(void *self, void *ptr);
/* c10::cuda::CUDAStream: device, then the stream's number. */
struct pya_torch_stream {
    uint64_t device;
    uint64_t number;
};
/* Can we get the handle of a torch stream?  The next function needs it. */
bool pya_torch_fast_knows_streams(void);
/* Used instead of torch's hook, which gets only the handle: that does not say whose stream it is.  data: a c10::DataPtr. */
void pya_torch_fast_record_stream(void *self, void *const *data, struct pya_torch_stream stream);
/* Call it after a request on the thread's current stream: checks whether the stream was made by someone other than torch. */
void pya_torch_fast_note_stream(int8_t device);
/* A c10::DataPtr: the pointer, then context and deleter in an order that we learn from the first one torch makes.  Copying and
 * destroying are non-trivial, as in torch's class, so that every ABI returns it through memory. */
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
/* Memory at this address; throws if it cannot be had. */
pya_torch_made pya_torch_fast_allocate_at(void *self, size_t bytes, void *ptr);
