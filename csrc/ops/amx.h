#pragma once
/* Matrix tiles of 16 rows of 64 bytes: those of AMX with PYA_HAVE_AMX, else the same in plain C, so that any machine can test
 * the kernels that use them.  Tiles 0 to 3 collect sums, 4 and 5 hold rows of the left factor, 6 and 7 of the right one.
 * Floor 0. */
#include <stdint.h>
#include <string.h>

enum {
    AMX_ROWS = 16,
    AMX_DEPTH = 32,      /* numbers of a row of a factor: 16 pairs */
    AMX_WORDS = 16 * 16, /* pairs of a tile, or its sums */
    AMX_ROW_BYTES = 16 * sizeof(uint32_t),
};

#ifdef PYA_HAVE_AMX /* not __AMX_TILE__: clang 14 calls it otherwise */
#include <immintrin.h>

/* To be called by each thread before its first tile. */
static inline void
amx_begin(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = AMX_ROW_BYTES;
        shape.rows[i] = AMX_ROWS;
    }
    /* GCC 12 tells its optimizer only of the first eight bytes that the next instruction reads. */
    __asm__ volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
}

/* After its last one: the kernel then need not save tiles when it switches threads. */
static inline void
amx_end(void) {
    _tile_release();
}

/* Between stores to a factor and its loads: GCC's own do not say that they read memory. */
static inline void
amx_written(void) {
    __asm__ volatile("" : : : "memory");
}

#define amx_zero(t) _tile_zero(t)
#define amx_load(t, p) _tile_loadd(t, p, AMX_ROW_BYTES)
#define amx_store(t, p, row) _tile_stored(t, p, (size_t)(row) * sizeof(float))
#define amx_multiply(sum, left, right) _tile_dpbf16ps(sum, left, right)

#else
static _Thread_local union {
    float sum[AMX_WORDS];
    uint32_t pair[AMX_WORDS];
} amx_tile[8];

static inline void
amx_begin(void) {
    memset(amx_tile, 0, sizeof amx_tile);
}

static inline void
amx_end(void) {}

static inline void
amx_written(void) {}

static inline void
amx_zero(int t) {
    memset(&amx_tile[t], 0, sizeof amx_tile[t]);
}

static inline void
amx_load(int t, const uint32_t *p) {
    memcpy(amx_tile[t].pair, p, sizeof amx_tile[t].pair);
}

static inline void
amx_store(int t, float *p, ptrdiff_t row) {
    for (int i = 0; i < AMX_ROWS; i++) {
        memcpy(p + i * row, amx_tile[t].sum + i * 16, AMX_ROW_BYTES);
    }
}

/* The number in the upper 16 bits; AMX reads denormal ones as zero. */
static inline float
amx_number(uint32_t bits) {
    bits &= 0xffff0000u;
    if ((bits & 0x7f800000u) == 0) {
        bits &= 0x80000000u;
    }
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* As Intel's manual describes it: the first and the second numbers of the pairs are summed apart. */
static inline void
amx_multiply(int sum, int left, int right) {
    for (int i = 0; i < AMX_ROWS; i++) {
        for (int j = 0; j < 16; j++) {
            float first = 0;
            float second = 0;
            for (int k = 0; k < 16; k++) {
                const uint32_t a = amx_tile[left].pair[i * 16 + k];
                const uint32_t b = amx_tile[right].pair[k * 16 + j];
                first += amx_number(a << 16) * amx_number(b << 16);
                second += amx_number(a) * amx_number(b);
            }
            amx_tile[sum].sum[i * 16 + j] += first + second;
        }
    }
}
#endif
