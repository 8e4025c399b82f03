/* torch's allocator as c10 calls it: the virtual methods of whatever object torch uses now, without torch's headers and
 * without its Python functions in between.
 *
 * Slots are found in the exported vtable of the pluggable wrapper, by the addresses of its exported methods: native has
 * the same base class, so the same slots.  What is not found is reported and nothing is called. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

/* c10::DataPtr as torch makes one; the order of the middle words is checked at run time. */
struct c10_data_ptr {
    void *data;
    void *second;
    void *third;
    uint16_t device; /* type 1 is CUDA, index in the upper byte */
};

struct c10_allocator {
    void **object;
    size_t raw_alloc_with_stream;
    size_t raw_delete;
    size_t record_stream;
    size_t allocate;
    size_t empty_cache;
    void *deleter; /* of DataPtrs that allocate() makes */
    bool deleter_is_third;
};

/* Set by c10_open(). */
extern c10_allocator c10_it;

template <typename Function>
Function
c10_method(size_t slot) {
    Function function;
    void **vtable = *reinterpret_cast<void ***>(c10_it.object);
    std::memcpy(&function, &vtable[slot], sizeof function);
    return function;
}

/* The signatures, by the mangled names of the wrapper's methods. */
using c10_alloc_fn = void *(*)(void *self, size_t bytes, void *stream);
using c10_delete_fn = void (*)(void *self, void *ptr);
using c10_allocate_fn = c10_data_ptr *(*)(c10_data_ptr *out, void *self, size_t bytes);
using c10_empty_fn = void (*)(void *self, uint64_t first, uint64_t second);
using c10_deleter_fn = void (*)(void *context);
