#pragma once
// Part of emulate.cpp: single instructions, above all those of tensor cores, rounding as the harshest of cards does.
#include "emulate_threads.hpp"

static float
reciprocal_about(float x) {
    return 1.0f / x;
}

// No number is flushed to zero, as on the card.
static float
__saturatef(float x) {
    return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
}

static uint32_t
emu_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float
emu_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float
__int_as_float(int x) {
    return emu_float((uint32_t)x);
}

static int
__float_as_int(float x) {
    return (int)emu_bits(x);
}

static int
emu_exponent(float x) {
    return (int)(emu_bits(x) >> 23 & 255) - 127;
}

// c + four products as measured on cards ("Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330)
// and on the harsh side of it: products are exact, all terms are aligned to the largest exponent, and what lies below
// its 24 bits is cut off, of the terms and of the sum.
static float
emu_add_four(float c, const float *a, const float *b) {
    int top = c != 0 ? emu_exponent(c) : -300;
    double plain = c;
    for (int k = 0; k < 4; k++) {
        plain += (double)a[k] * b[k];
        if (a[k] != 0 && b[k] != 0) {
            const int e = emu_exponent(a[k]) + emu_exponent(b[k]);
            top = e > top ? e : top;
        }
    }
    if (!std::isfinite(plain) || top == -300) {
        return (float)plain;
    }
    double sum = std::trunc(std::ldexp((double)c, 23 - top));
    for (int k = 0; k < 4; k++) {
        sum += std::trunc(std::ldexp((double)a[k] * b[k], 23 - top));
    }
    while (std::fabs(sum) >= 1 << 24) {
        sum = std::trunc(sum / 2);
        top++;
    }
    return (float)std::ldexp(sum, top - 23);
}

// The lanes' parts of a, b and c lie as the PTX manual says for mma.m16n8k8 with .tf32; the 13 lowest bits of an operand
// are not read.
static void
tf32_multiply(float c[4], const float a[4], const float b[2]) {
    lane mine = {};
    for (int n = 0; n < 4; n++) {
        mine.a[n] = emu_float(emu_bits(a[n]) & ~0x1fffu);
    }
    for (int n = 0; n < 2; n++) {
        mine.b[n] = emu_float(emu_bits(b[n]) & ~0x1fffu);
    }
    const lane *all = emu_exchange(mine);
    const unsigned me = current % LANES;
    for (unsigned n = 0; n < 4; n++) {
        const unsigned row = me / 4 + n / 2 * 8;
        const unsigned column = me % 4 * 2 + n % 2;
        float x[8];
        float y[8];
        for (unsigned k = 0; k < 8; k++) {
            x[k] = all[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2];
            y[k] = all[column * 4 + k % 4].b[k / 4];
        }
        c[n] = emu_add_four(emu_add_four(c[n], x, y), x + 4, y + 4);
    }
}

// To half precision, to nearest, ties to even; above its largest number it becomes infinite.
static unsigned
emu_half(float x) {
    const unsigned sign = emu_bits(x) >> 16 & 0x8000u;
    const double size = std::fabs((double)x);
    if (x != x) {
        return 0x7fff;
    }
    if (size >= 65520) {
        return sign | 0x7c00u;
    }
    const int e = std::max(size > 0 ? emu_exponent(x) : -127, -14);
    const unsigned steps =
        (unsigned)std::nearbyint(std::ldexp(size, 10 - e)); // 1024 and over: a leading 1
    return sign | ((unsigned)(e + 14) << 10) + steps;
}

static float
emu_of_half(unsigned bits) {
    const int e = (int)(bits >> 10 & 31);
    const float part = (float)(bits & 1023);
    float size = e == 0 ? std::ldexp(part, -24) : std::ldexp(part + 1024, e - 25);
    if (e == 31) {
        size = part == 0 ? INFINITY : NAN;
    }
    return (bits & 0x8000u) != 0 ? -size : size;
}

static unsigned
half_pack(float low, float high) {
    return emu_half(low) | emu_half(high) << 16;
}

static void
half_unpack(unsigned both, float *low, float *high) {
    *low = emu_of_half(both & 0xffffu);
    *high = emu_of_half(both >> 16);
}

// As the PTX manual says for mma.m16n8k16 with .f16.  Cards with this instruction add 8 or 16 products at once, so
// adding four at a time cuts off more than they do.
static void
half_multiply(float c[4], const unsigned a[4], const unsigned b[2]) {
    lane mine = {};
    memcpy(mine.words, a, 16);
    memcpy(mine.words + 4, b, 8);
    const lane *all = emu_exchange(mine);
    const unsigned me = current % LANES;
    for (unsigned n = 0; n < 4; n++) {
        const unsigned row = me / 4 + n / 2 * 8;
        const unsigned column = me % 4 * 2 + n % 2;
        float x[16];
        float y[16];
        for (unsigned k = 0; k < 16; k += 2) {
            const unsigned t = k / 2 % 4;
            half_unpack(all[row % 8 * 4 + t].words[row / 8 + k / 8 * 2], x + k, x + k + 1);
            half_unpack(all[column * 4 + t].words[4 + k / 8], y + k, y + k + 1);
        }
        for (unsigned k = 0; k < 16; k += 4) {
            c[n] = emu_add_four(c[n], x + k, y + k);
        }
    }
}

template <bool TRANSPOSED>
static void
matrix_load(unsigned out[4], const unsigned *row) {
    if ((uintptr_t)row % 16 != 0) {
        fprintf(stderr, "emulation: a misaligned row of a matrix\n");
        abort();
    }
    lane mine = {};
    mine.row = row;
    const lane *all = emu_exchange(mine);
    const unsigned g = current % LANES / 4;
    const unsigned t = current % LANES % 4;
    for (unsigned n = 0; n < 4; n++) {
        const auto at = [&](unsigned i, unsigned j) {
            return all[n * 8 + i].row[j / 2] >> j % 2 * 16 & 0xffffu;
        };
        out[n] = TRANSPOSED ? at(2 * t, g) | at(2 * t + 1, g) << 16
                            : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
}
