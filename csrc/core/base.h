/* Types, status codes and checked size arithmetic that every floor uses.  Floor 0. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A device address.  An integer on purpose: host code cannot dereference it. */
typedef uint64_t pya_dptr;
/* A CUDA stream handle as an integer; 0 is the legacy default stream. */
typedef uint64_t pya_stream;
/* Handles up to this value are default streams.  They are the same numbers on all devices. */
#define PYA_STREAM_DEFAULT 2

#define PYA_MUST_CHECK __attribute__((warn_unused_result))
#define PYA_LIKELY(x) __builtin_expect(!!(x), 1)
#define PYA_UNLIKELY(x) __builtin_expect(!!(x), 0)
/* For conditions that branch prediction cannot guess: asks the compiler for a conditional move instead of a branch. */
#define PYA_RANDOM(x) __builtin_expect_with_probability(!!(x), 1, 0.5)

/* Every request is rounded up to this; every address handed out is a multiple of it. */
#define PYA_ALIGN ((size_t)512)
/* One physical page: the granularity of the driver's virtual memory calls. */
#define PYA_PAGE_SHIFT 21
#define PYA_PAGE ((size_t)1 << PYA_PAGE_SHIFT)
/* Requests up to this are torch's "small pool", larger ones its "large pool". */
#define PYA_SMALL_MAX ((size_t)1 << 20)
/* Larger requests are refused before any arithmetic can overflow (from 1 EiB on, as torch does). */
#define PYA_REQUEST_MAX (((size_t)1 << 60) - 1)
#define PYA_MAX_DEVICES 64

/* name, value, text a user may read */
#define PYA_STATUS_TABLE(X)                                                                        \
    X(OK, 0, "success")                                                                            \
    X(E_NOMEM, 1, "out of device memory")                                                          \
    X(E_HOST_NOMEM, 2, "out of host memory")                                                       \
    X(E_INVAL, 3, "invalid argument")                                                              \
    X(E_DEVICE, 4, "a device call failed")                                                         \
    X(E_NOTSUP, 5, "not supported by this device or driver")                                       \
    X(E_FORKED, 6, "used in a forked child; CUDA memory cannot be used after fork")                \
    X(E_BUSY, 7, "busy: work that uses it has not finished")                                       \
    X(E_CAPTURE, 8, "not allowed while a CUDA graph is being captured")                            \
    X(E_LIMIT, 9, "a limit set by the user is reached")                                            \
    X(E_IO, 10, "reading or writing a file failed")                                                \
    X(E_CORRUPT, 11, "the data is damaged or not in this format")                                  \
    X(E_TOO_LARGE, 12, "1 EiB or more was requested")                                              \
    X(E_FOREIGN, 13, "the pointer was not handed out by this allocator")                           \
    X(E_DOUBLE_FREE, 14, "the pointer was already freed")                                          \
    X(E_STREAM, 15, "there is no such stream; it was destroyed or never existed")

typedef enum {
#define X(name, value, text) PYA_##name = value,
    PYA_STATUS_TABLE(X)
#undef X
} pya_status;

/* Tells apart the default streams of different devices: puts the device's number plus one into the top byte. */
static inline pya_stream
pya_stream_of_device(pya_stream handle, int device) {
    return handle > PYA_STREAM_DEFAULT ? handle : handle | (pya_stream)(device + 1) << 56;
}

/* The device number that pya_stream_of_device() put in; -1: a plain handle. */
static inline int
pya_stream_device(pya_stream stream) {
    return (stream << 8 >> 8) > PYA_STREAM_DEFAULT ? -1 : (int)(stream >> 56) - 1;
}

static inline pya_stream
pya_stream_handle(pya_stream stream) {
    return pya_stream_device(stream) < 0 ? stream : stream << 8 >> 8;
}

/* Never NULL; unknown codes give "unknown status". */
const char *pya_status_text(pya_status status);

/* These three return false on overflow and leave *out unchanged. */
static inline bool
pya_size_add(size_t a, size_t b, size_t *out) {
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

static inline bool
pya_size_mul(size_t a, size_t b, size_t *out) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

/* unit: a power of two. */
static inline bool
pya_size_round_up(size_t bytes, size_t unit, size_t *out) {
    size_t sum;
    if (!pya_size_add(bytes, unit - 1, &sum)) {
        return false;
    }
    *out = sum & ~(unit - 1);
    return true;
}

/* Did the request fail because the device, or a limit, has no memory left? */
static inline bool
pya_is_shortage(pya_status st) {
    return st == PYA_E_NOMEM || st == PYA_E_LIMIT;
}

/* For values already known to be far from the top of the address space. */
static inline uint64_t
pya_round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) & ~(unit - 1);
}

static inline uint64_t
pya_round_down(uint64_t value, uint64_t unit) {
    return value & ~(unit - 1);
}

#ifdef __cplusplus
}
#endif
