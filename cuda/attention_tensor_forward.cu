/* Attention forward on tensor cores: a running softmax over tiles of keys. */
#include "attention_scores.cuh"

#ifdef PYA_TENSOR

/* A running softmax of rows g and g + 8; each lane keeps its own part of the sum. */
struct att_running {
    float top[2], sum[2];
};

/* Turns scores into weights relative to the largest score so far, and returns the factor for earlier results. */
template <int N>
static __device__ inline void
att_soften(float s[N][4], struct att_running *run, float shrink[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float best = run->top[r];
#pragma unroll
        for (int n = 0; n < N; n++) {
            best = fmaxf(best, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        best = reduce4_max(best);
        shrink[r] = exp2_near(run->top[r] - best);
        run->top[r] = best;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            float *x = &s[n / 2][2 * r + n % 2];
            *x = exp2_near(*x - best);
            part += *x;
        }
        run->sum[r] = fmaf(run->sum[r], shrink[r], part);
    }
}

template <int D>
static __device__ inline void
att_shrink(float out[D / 32][4][4], const float shrink[2]) {
#pragma unroll
    for (int n = 0; n < D / 2; n++) {
        out[n / 16][n / 4 % 4][n % 4] *= shrink[n % 4 / 2];
    }
}

template <int D, int KEYS>
static __device__ inline void
att_forward(const struct pya_ops_attention &a, float *room) {
    const struct head_part block = block_head_part((a.n_q + ATT_ROWS - 1) / ATT_ROWS, a.n_h);
    const int q0 = att_first_query(a, block.part);
    const long long kv = block.h / (a.n_h / a.n_kv);
    const long long end = a.causal && q0 + ATT_ROWS < a.n_k ? q0 + ATT_ROWS : a.n_k;
    const struct att_side keys = att_side(a.k, block.b, kv, a.n_k, a.dim);
    const struct att_side values = att_side(a.v, block.b, kv, a.n_k, a.dim_v);
    float *tiles = room + ATT_ROWS * D;
    float out[D / 32][4][4] = {};
    struct att_running run = {{-1e37f, -1e37f}, {}};
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, block.b, block.h, a.n_q, a.dim), q0));
    const struct key_range seen = seen_keys<KEYS, ATT_THREADS>(a, block.b, block.h, end);
    float *first = tiles + seen.first / KEYS % 2 * (2 * KEYS * D);
    att_load<D, KEYS>(first, att_from(keys, seen.first));
    att_load<D, KEYS>(first + KEYS * D, att_from(values, seen.first));
    async_commit();
#pragma unroll 1
    for (int k0 = seen.first; k0 < seen.end; k0 += KEYS) {
        async_wait<0>();
        __syncthreads();
        if (k0 + KEYS < seen.end) {
            float *next = tiles + (k0 / KEYS + 1) % 2 * (2 * KEYS * D);
            att_load<D, KEYS>(next, att_from(keys, k0 + KEYS));
            att_load<D, KEYS>(next + KEYS * D, att_from(values, k0 + KEYS));
            async_commit();
        }
        const float *tile = tiles + k0 / KEYS % 2 * (2 * KEYS * D);
        const struct att_spot at = att_spot<false>(a, block.b, block.h, q0, ATT_ROWS, k0, KEYS);
        float s[KEYS / 8][4];
        float bias[KEYS / 8][4] = {};
        float shrink[2];
        att_fetch_bias<false, KEYS / 8>(bias, a, at);
        att_pairs<D, KEYS / 8>(s, room, tile, (int)a.dim);
        att_finish<false, KEYS / 8>(s, bias, a, at);
        att_soften<KEYS / 8>(s, &run, shrink);
        if (a.dropout > 0.0) {
            const unsigned kept = att_kept<false, KEYS / 8>(a, at);
#pragma unroll
            for (int n = 0; n < KEYS / 2; n++) {
                s[n / 4][n % 4] *= att_factor(a, kept, n);
            }
        }
        att_shrink<D>(out, shrink);
        att_weigh<D, KEYS / 8>(out, s, tile + KEYS * D, (int)a.dim_v);
    }
    const struct att_lane l = att_lane();
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = reduce4_add(run.sum[r]);
        const int q = q0 + l.row + 8 * r;
        inverse[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (l.t == 0 && q < a.n_q) {
            float *kept = (float *)a.stats + 2 * (block.b * a.n_h + block.h) * a.n_q + q;
            kept[0] = run.top[r];
            kept[a.n_q] = inverse[r];
        }
    }
    att_store<D>(a.out, block.b, block.h, q0 + l.row, a.n_q, (int)a.dim_v, out, inverse);
}

/* blocks, for all forward kernels: queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_forward_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_forward<64, ATT_KEYS_64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_forward_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_forward<128, ATT_KEYS_128>(a, room);
}

#endif
