#pragma once
/* Products of matrices that are split into parts (amx_factor.h).  Of the nine products of two floats' parts, x1 y2, x2 y1 and
 * x2 y2 are below 2^-26 of x y and left out.  The five other small ones are summed before x0 y0, so that their roundings do
 * not count: the result is as exact as one of floats.  Floor 2. */
#include "amx_beside.h"
#include "amx_factor.h"

/* Where a tile's parts begin, and how far the next tile of rows or lanes is. */
struct amx_side {
    const uint32_t *p;
    ptrdiff_t next;
};

/* Loads a part of one tile, or of two. */
#define AMX_LOAD(first, second, is_two, side, at, part)                                            \
    do {                                                                                           \
        amx_load(first, (at) + (part)*AMX_WORDS);                                                  \
        if (is_two) {                                                                              \
            amx_load(second, (at) + (side).next + (part)*AMX_WORDS);                               \
        }                                                                                          \
    } while (0)

/* Adds the products of the loaded tiles to the sums, tiles 0 to 3. */
#define AMX_ADD(two_rows, two_lanes)                                                               \
    do {                                                                                           \
        amx_multiply(0, 4, 6);                                                                     \
        if (two_lanes) {                                                                           \
            amx_multiply(1, 4, 7);                                                                 \
        }                                                                                          \
        if (two_rows) {                                                                            \
            amx_multiply(2, 5, 6);                                                                 \
        }                                                                                          \
        if ((two_rows) && (two_lanes)) {                                                           \
            amx_multiply(3, 5, 7);                                                                 \
        }                                                                                          \
        amx_step(beside);                                                                          \
    } while (0)

/* Sums one to two tiles of rows times one to two tiles of lanes; which, is constant at every call. */
static inline __attribute__((always_inline)) void
amx_sum(
    const bool two_rows, const bool two_lanes, struct amx_side left, struct amx_side right,
    ptrdiff_t chunks, struct amx_beside *beside) {
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    const uint32_t *a = left.p;
    const uint32_t *b = right.p;
    for (ptrdiff_t c = 0; c < chunks; c++, a += AMX_BLOCK, b += AMX_BLOCK) {
        AMX_LOAD(4, 5, two_rows, left, a, 0);
        AMX_LOAD(6, 7, two_lanes, right, b, 2);
        AMX_ADD(two_rows, two_lanes);
        AMX_LOAD(6, 7, two_lanes, right, b, 1);
        AMX_ADD(two_rows, two_lanes);
        AMX_LOAD(4, 5, two_rows, left, a, 1);
        AMX_ADD(two_rows, two_lanes);
        AMX_LOAD(6, 7, two_lanes, right, b, 0);
        AMX_ADD(two_rows, two_lanes);
        AMX_LOAD(4, 5, two_rows, left, a, 2);
        AMX_ADD(two_rows, two_lanes);
    }
    a = left.p;
    b = right.p;
    for (ptrdiff_t c = 0; c < chunks; c++, a += AMX_BLOCK, b += AMX_BLOCK) {
        AMX_LOAD(4, 5, two_rows, left, a, 0);
        AMX_LOAD(6, 7, two_lanes, right, b, 0);
        AMX_ADD(two_rows, two_lanes);
    }
}
#undef AMX_LOAD
#undef AMX_ADD

static inline void
amx_write(bool two_rows, bool two_lanes, real *dst, ptrdiff_t row) {
    amx_store(0, dst, row);
    if (two_lanes) {
        amx_store(1, dst + 16, row);
    }
    if (two_rows) {
        amx_store(2, dst + AMX_ROWS * row, row);
    }
    if (two_rows && two_lanes) {
        amx_store(3, dst + AMX_ROWS * row + 16, row);
    }
}

/* A factor of n rows (or lanes), which was packed with n_packed numbers to be summed in each. */
struct amx_factor {
    const uint32_t *p;
    ptrdiff_t n, n_packed;
};

/* How often amx_product() looks after what is beside it. */
static inline ptrdiff_t
amx_groups(ptrdiff_t rows, ptrdiff_t lanes, ptrdiff_t depth) {
    return (amx_tiles(rows) + 1) / 2 * ((amx_tiles(lanes) + 1) / 2) * amx_chunks(depth) * 6;
}

/* dst[rows][lanes] = left right, where the first depth numbers are summed; dst has whole tiles.  beside may be NULL. */
static inline void
amx_product(
    real *dst, ptrdiff_t dst_row, struct amx_factor left, struct amx_factor right, ptrdiff_t depth,
    struct amx_beside *beside) {
    struct amx_beside nothing = {.n = 0};
    beside = beside != NULL ? beside : &nothing;
    amx_written();
    const ptrdiff_t chunks = amx_chunks(depth);
    const ptrdiff_t left_tile = amx_chunks(left.n_packed) * AMX_BLOCK;
    const ptrdiff_t right_tile = amx_chunks(right.n_packed) * AMX_BLOCK;
    const ptrdiff_t n_r = amx_tiles(left.n);
    const ptrdiff_t n_l = amx_tiles(right.n);
    for (ptrdiff_t r = 0; r < n_r; r += 2) {
        const struct amx_side a = {left.p + r * left_tile, left_tile};
        for (ptrdiff_t l = 0; l < n_l; l += 2) {
            const struct amx_side b = {right.p + l * right_tile, right_tile};
            const bool two_rows = n_r - r > 1;
            const bool two_lanes = n_l - l > 1;
            if (two_rows && two_lanes) {
                amx_sum(true, true, a, b, chunks, beside);
            } else if (two_rows) {
                amx_sum(true, false, a, b, chunks, beside);
            } else if (two_lanes) {
                amx_sum(false, true, a, b, chunks, beside);
            } else {
                amx_sum(false, false, a, b, chunks, beside);
            }
            amx_write(two_rows, two_lanes, dst + r * AMX_ROWS * dst_row + l * 16, dst_row);
        }
    }
}
