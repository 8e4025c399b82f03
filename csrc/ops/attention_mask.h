#pragma once
/* The mask of a block of transposed scores: bytes become bits, one for each query of a key.  Floor 2. */
#include <string.h>

#include "attention_tile.h"

/* For each key of a block the queries that it is hidden from. */
struct att_hidden {
    uint64_t of[ATT_K];
};
_Static_assert(ATT_Q == 64 && ATT_K % 64 == 0, "a word has a bit for each query");

/* Which of n bytes, at most 64, are zero. */
static inline uint64_t
att_zeros(const uint8_t *p, int n) {
    if (n == 64) {
        return b_zeros(p);
    }
    uint8_t all[64];
    memset(all, 1, sizeof all);
    memcpy(all, p, (size_t)n);
    return b_zeros(all);
}

/* Bit j of word i goes to bit i of word j. */
static inline void
att_transpose_bits(uint64_t m[64]) {
    uint64_t low = 0x00000000ffffffff;
    for (int n = 32; n > 0; n /= 2, low ^= low << n) {
        for (int i = 0; i < 64; i = ((i | n) + 1) & ~n) {
            const uint64_t swapped = ((m[i] >> n) ^ m[i | n]) & low;
            m[i] ^= swapped << n;
            m[i | n] ^= swapped;
        }
    }
}

enum { ATT_FEW_HIDDEN = 300 }; /* as many set bits take as long as transposing all */

/* 64 keys from k on, of a mask in which keys lie side by side. */
static inline void
att_hidden_rows(const uint8_t *p, int64_t row, struct att_block x, int k, uint64_t of[64]) {
    const int n = x.nk - k < 64 ? x.nk - k : 64;
    uint64_t rows[64];
    int n_hidden = 0;
    for (int q = 0; q < x.nq; q++) {
        rows[q] = att_zeros(p + q * row + k, n);
        n_hidden += __builtin_popcountll(rows[q]);
    }
    if (n_hidden > ATT_FEW_HIDDEN) {
        memcpy(of, rows, (size_t)x.nq * sizeof *of);
        memset(of + x.nq, 0, (size_t)(64 - x.nq) * sizeof *of);
        att_transpose_bits(of);
        return;
    }
    memset(of, 0, 64 * sizeof *of);
    for (int q = 0; n_hidden > 0 && q < x.nq; q++) {
        for (uint64_t rest = rows[q]; rest != 0; rest &= rest - 1) {
            of[__builtin_ctzll(rest)] |= UINT64_C(1) << q;
        }
    }
}

/* Which queries a key is hidden from; p: its byte for the first of them. */
static inline uint64_t
att_hidden_from(const uint8_t *p, int64_t step, int n_q) {
    if (step == 0) {
        return *p == 0 ? UINT64_MAX : 0;
    }
    if (step == 1) {
        return att_zeros(p, n_q);
    }
    uint64_t bits = 0;
    for (int q = 0; q < n_q; q++) {
        bits |= (uint64_t)(p[q * step] == 0) << q;
    }
    return bits;
}

static inline void
att_find_hidden(const struct pya_ops_attention *a, struct att_block x, struct att_hidden *hidden) {
    const struct pya_ops_scores w = a->mask;
    const uint8_t *p = (const uint8_t *)w.p + att_first_score(w, x);
    if (w.q != 0 && w.k == 1) {
        for (int k = 0; k < x.nk; k += 64) {
            att_hidden_rows(p, w.q, x, k, hidden->of + k);
        }
        return;
    }
    for (int k = 0; k < x.nk; k++) {
        hidden->of[k] = att_hidden_from(p + k * w.k, w.q, x.nq);
    }
}

/* May the block be left out, because the mask hides all of it?  Mostly its first keys tell. */
static inline bool
att_is_hidden(const struct pya_ops_attention *a, struct att_block x) {
    const struct pya_ops_scores w = a->mask;
    if (!att_may_skip(a)) {
        return false;
    }
    const uint8_t *p = (const uint8_t *)w.p + att_first_score(w, x);
    for (int q = 0; q < (w.q == 0 ? 1 : x.nq); q++) {
        int k = 0;
        for (; w.k == 1 && k + 64 <= x.nk; k += 64) {
            if (b_zeros(p + q * w.q + k) != UINT64_MAX) {
                return false;
            }
        }
        for (; k < x.nk; k++) {
            if (p[q * w.q + k * w.k] != 0) {
                return false;
            }
        }
    }
    return true;
}

static inline void
att_apply_mask(const struct pya_ops_attention *a, struct att_block x, real *s) {
    struct att_hidden hidden;
    att_find_hidden(a, x, &hidden);
    const vr lowest = v_set((real)-INFINITY);
    for (int k = 0; k < x.nk; k++) {
        const uint64_t of = hidden.of[k];
        for (int q = 0; of != 0 && q < x.nq; q += VW) {
            v_st_where(s + k * ATT_LD + q, lowest, (unsigned)(of >> q));
        }
    }
}
