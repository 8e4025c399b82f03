/* Layout shared by writer and reader of trace files.  Floor 2, private. */
#pragma once

#include "trace.h"
#include "varint.h"

#define TRACE_MAGIC UINT64_C(0x4543415254415950) /* "PYATRACE" */
#define TRACE_HEADER_BYTES 16
#define TRACE_CHUNK_MAGIC UINT32_C(0x43415950) /* "PYAC" */
#define TRACE_CHUNK_HEADER_BYTES 32
/* A chunk larger than this is damage, not data: the writer closes one at TRACE_CHUNK_BYTES. */
#define TRACE_CHUNK_MAX (UINT32_C(16) << 20)
#ifdef PYA_TEST_TINY
#define TRACE_CHUNK_BYTES 64
#else
#define TRACE_CHUNK_BYTES 65536
#endif
#define TRACE_STRING_MAX 65535

enum {
    TRACE_KIND_MASK = 0x1F,
    TRACE_NEW_THREAD = 0x20,
    TRACE_NEW_DEVICE = 0x40,
    TRACE_NEW_STREAM = 0x80,
    TRACE_DEFINE_STRING = 30,
    TRACE_DEFINE_STACK = 31,
};

/* kind byte, time, thread, device, stream, 5 fields */
#define TRACE_EVENT_MAX (1 + 9 * VARINT_MAX)
#define TRACE_STACK_MAX (1 + 4 * VARINT_MAX)

/* The values that records are relative to; at the start of a chunk all are 0 except time. */
struct trace_state {
    uint64_t time_ns;
    uint64_t thread;
    uint64_t device;
    uint64_t stream;
    uint64_t addr;
};

/* Covers the header without its CRC field, then the payload. */
static inline uint32_t
trace_chunk_crc(const uint8_t *header, const uint8_t *payload, size_t n) {
    uint32_t crc = varint_crc32(0, header, 12);
    crc = varint_crc32(crc, header + 16, TRACE_CHUNK_HEADER_BYTES - 16);
    return varint_crc32(crc, payload, n);
}

/* Fields of a kind, or -1. */
int trace_fields(int kind);

static inline void
trace_put32(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static inline void
trace_put64(uint8_t *at, uint64_t value) {
    trace_put32(at, (uint32_t)value);
    trace_put32(at + 4, (uint32_t)(value >> 32));
}

static inline uint32_t
trace_get32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t
trace_get64(const uint8_t *at) {
    return (uint64_t)trace_get32(at) | (uint64_t)trace_get32(at + 4) << 32;
}
