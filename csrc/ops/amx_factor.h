#pragma once
/* Matrices of floats as AMX multiplies them.  It multiplies numbers with 8 bits of mantissa (bfloat16) and adds in float.  So
 * the 24 bits of a float are split into three such numbers: x = x0 + x1 + x2 exactly, each the rounded rest of the one before.
 *
 * A factor is stored as tiles, three to each 16 x 32 numbers, one per part.  A tile's rows hold pairs: numbers j and j + 16 of
 * 32 neighbours along the dimension that is summed.  Which numbers make a pair does not matter as long as both factors agree.
 * Floor 1. */
#include <stddef.h>

#include "amx.h"
#include "simd.h"

enum { AMX_PARTS = 3, AMX_BLOCK = AMX_PARTS * AMX_WORDS };

static inline ptrdiff_t
amx_tiles(ptrdiff_t n) {
    return (n + AMX_ROWS - 1) / AMX_ROWS;
}

static inline ptrdiff_t
amx_chunks(ptrdiff_t n) {
    return (n + AMX_DEPTH - 1) / AMX_DEPTH;
}

/* Words of a factor of n rows (or lanes) and depth numbers in each. */
static inline size_t
amx_words(ptrdiff_t n, ptrdiff_t depth) {
    return (size_t)(amx_tiles(n) * amx_chunks(depth) * AMX_BLOCK);
}

struct amx_parts {
    vi part[AMX_PARTS]; /* in the upper 16 bits; the lower ones are zeros, except of NaN */
};

static inline __attribute__((always_inline)) struct amx_parts
amx_split(vr x) {
    const vi upper = i_set(0xffff0000u);
    const vi half = i_set(0x8000u);
    struct amx_parts s;
    s.part[0] = i_and(i_add(v_bits(x), half), upper);
    const vr rest = v_sub(x, i_real(s.part[0]));
    s.part[1] = i_and(i_add(v_bits(rest), half), upper);
    s.part[2] = v_bits(v_sub(rest, i_real(s.part[1])));
    return s;
}

/* Writes a row (or vector of VW lanes) of pairs to each of the three tiles that begin at dst. */
static inline __attribute__((always_inline)) void
amx_put(uint32_t *dst, struct amx_parts low, struct amx_parts high) {
    for (int i = 0; i < AMX_PARTS; i++) {
        i_st(
            dst + i * AMX_WORDS,
            i_or(i_shr(low.part[i], 16), i_and(high.part[i], i_set(0xffff0000u))));
    }
}

/* The same, of numbers; returns the largest sizes so far, in bits. */
static inline __attribute__((always_inline)) vi
amx_pack(uint32_t *dst, vr low, vr high, vi largest) {
    const vi size = i_set(0x7fffffffu);
    amx_put(dst, amx_split(low), amx_split(high));
    return i_max(largest, i_max(i_and(v_bits(low), size), i_and(v_bits(high), size)));
}

static inline vr
amx_ld(const real *p, ptrdiff_t n) {
    return n >= VW ? v_ld(p) : n > 0 ? v_ld_n(p, (int)n) : v_set(0);
}

/* The left factor: n rows of depth contiguous numbers, row apart.  Rows that are missing are zeros, as is all that is missing
 * from the last 32 numbers.  Returns the largest size among the numbers, in bits. */
static inline unsigned
amx_pack_rows(uint32_t *dst, const real *src, ptrdiff_t row, ptrdiff_t n, ptrdiff_t depth) {
    vi largest = i_set(0);
    for (ptrdiff_t r = 0; r < amx_tiles(n) * AMX_ROWS; r++) {
        const ptrdiff_t there = r < n ? depth : 0;
        const real *p = r < n ? src + r * row : src;
        uint32_t *to = dst + r / AMX_ROWS * amx_chunks(depth) * AMX_BLOCK + r % AMX_ROWS * 16;
        for (ptrdiff_t c = 0; c < depth; c += AMX_DEPTH, to += AMX_BLOCK) {
            for (ptrdiff_t j = c; j < c + 16; j += VW) {
                const vr low = amx_ld(p + j, there - j);
                const vr high = amx_ld(p + j + 16, there - j - 16);
                largest = amx_pack(to + (j - c), low, high, largest);
            }
        }
    }
    return i_hmax(largest);
}

/* The right factor: depth rows of n lanes, row apart. */
static inline unsigned
amx_pack_lanes(uint32_t *dst, const real *src, ptrdiff_t row, ptrdiff_t depth, ptrdiff_t n) {
    vi largest = i_set(0);
    for (ptrdiff_t l = 0; l < amx_tiles(n); l++) {
        for (ptrdiff_t c = 0; c < depth; c += AMX_DEPTH, dst += AMX_BLOCK) {
            for (ptrdiff_t j = c; j < c + 16; j++) {
                for (ptrdiff_t q = l * 16; q < l * 16 + 16; q += VW) {
                    const vr low = amx_ld(src + j * row + q, j < depth ? n - q : 0);
                    const vr high = amx_ld(src + (j + 16) * row + q, j + 16 < depth ? n - q : 0);
                    largest = amx_pack(dst + (j - c) * 16 + q % 16, low, high, largest);
                }
            }
        }
    }
    return i_hmax(largest);
}
