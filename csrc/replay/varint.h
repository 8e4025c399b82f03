/* Variable-length numbers and CRC-32 of the trace format.  Floor 0. */
#pragma once

#include "../core/base.h"

#define VARINT_MAX 10 /* bytes of the longest one */

static inline uint8_t *
varint_put(uint8_t *at, uint64_t value) {
    while (value >= 0x80) {
        *at++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *at++ = (uint8_t)value;
    return at;
}

/* Returns the position after the number, or NULL if the bytes end first or the number has more than 64 bits. */
static inline const uint8_t *
varint_get(const uint8_t *at, const uint8_t *end, uint64_t *out) {
    uint64_t value = 0;
    for (unsigned shift = 0; at < end && shift < 64; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1) {
            return NULL;
        }
        value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *out = value;
            return at;
        }
    }
    return NULL;
}

/* Zigzag: small differences of either sign become small numbers. */
static inline uint64_t
varint_from_delta(uint64_t delta) {
    return (delta << 1) ^ (0 - (delta >> 63));
}

static inline uint64_t
varint_to_delta(uint64_t value) {
    return (value >> 1) ^ (0 - (value & 1));
}

/* crc: 0, or the result for the preceding bytes. */
uint32_t varint_crc32(uint32_t crc, const uint8_t *at, size_t n);
