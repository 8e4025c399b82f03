/* Scaled dot-product attention on plain fp32 FMA, for every card and heads of up to 256 numbers. */
#include "attention.cuh"

enum { MAX_WIDE = 256 / WIDE };

/* blocks: queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_attention_forward(struct pya_ops_attention a) {
    __shared__ float p[SMALL][SMALL + 1];
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const struct head_part block = block_head_part((a.n_q + SMALL - 1) / SMALL, a.n_h);
    const long long q0 = (long long)block.part * SMALL;
    const long long h = block.h;
    const long long b = block.b;
    const long long kv = h / (a.n_h / a.n_kv);
    const long long end = a.causal && q0 + SMALL < a.n_k ? q0 + SMALL : a.n_k;
    float out[MAX_WIDE][4][4] = {};
    float top[4] = {-1e37f, -1e37f, -1e37f, -1e37f};
    float sum[4] = {};
    const struct key_range seen = seen_keys<SMALL, THREADS>(a, b, h, end);
    for (long long k0 = seen.first; k0 < seen.end; k0 += SMALL) {
        float s[4][4];
        small_multiply(
            s, head_rows(a.q, b, h, q0, a.n_q - q0), head_rows(a.k, b, kv, k0, a.n_k - k0),
            (int)a.dim);
        float shrink[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float best = top[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[i][j] = finish_score(a, s[i][j], b, h, q0 + ty + i, k0 + tx + j);
                best = fmaxf(best, s[i][j]);
            }
            best = reduce16_max(best);
            shrink[i] = exp2f(top[i] - best);
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float e = exp2f(s[i][j] - best);
                part += e;
                p[ty + i][tx + j] = e * keep(a, b, h, q0 + ty + i, k0 + tx + j);
            }
            sum[i] = fmaf(sum[i], shrink[i], reduce16_add(part));
            top[i] = best;
        }
#pragma unroll
        for (int n = 0; n < MAX_WIDE; n++) {
            if (n * WIDE < a.dim_v) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        out[n][i][j] *= shrink[i];
                    }
                }
                wide_add(
                    out[n], p, head_rows(a.v, b, kv, k0, a.n_k - k0), n * WIDE, (int)a.dim_v);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const long long q = q0 + ty + i;
        if (q >= a.n_q) {
            continue;
        }
        const float inverse = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
        float *dst = (float *)a.out.p + b * a.out.b + h * a.out.h + q * a.out.s;
#pragma unroll
        for (int n = 0; n < MAX_WIDE; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int c = n * WIDE + tx + j;
                if (c < a.dim_v) {
                    dst[c] = out[n][i][j] * inverse;
                }
            }
        }
        if (tx == 0) {
            float *kept = (float *)a.stats + 2 * (b * a.n_h + h) * a.n_q + q;
            kept[0] = top[i];
            kept[a.n_q] = inverse;
        }
    }
}

/* delta = sum dO * O for each query, into the workspace [B][H][Lq].  blocks: queries * heads * batch,
 * one warp each */
extern "C" __global__ void __launch_bounds__(32)
pya_attention_backward_delta(struct pya_ops_attention a) {
    const struct head_part block = block_head_part(a.n_q, a.n_h);
    const rows o = head_rows(a.out, block.b, block.h, block.part, 1);
    const rows g = head_rows(a.grad, block.b, block.h, block.part, 1);
    float sum = 0.0f;
    for (int c = threadIdx.x; c < a.dim_v; c += 32) {
        sum = fmaf(o.p[c], g.p[c], sum);
    }
    sum = reduce32_add(sum);
    if (threadIdx.x == 0) {
        ((float *)a.workspace)[blockIdx.x] = sum;
    }
}

/* One block of 64 queries (rows) and 64 keys (columns): this thread's 4 x 4 of P, after dropout, and of dS. */
static __device__ inline void
backward_block(
    const struct pya_ops_attention &a, long long b, long long h, long long q0, long long k0,
    float p[4][4], float ds[4][4]) {
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const long long kv = h / (a.n_h / a.n_kv);
    const long long base = (b * a.n_h + h) * a.n_q;
    small_multiply(
        p, head_rows(a.q, b, h, q0, a.n_q - q0), head_rows(a.k, b, kv, k0, a.n_k - k0),
        (int)a.dim);
    small_multiply(
        ds, head_rows(a.grad, b, h, q0, a.n_q - q0), head_rows(a.v, b, kv, k0, a.n_k - k0),
        (int)a.dim_v);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const long long q = q0 + ty + i;
        const float *kept = (const float *)a.stats + 2 * base + q;
        const float top = q < a.n_q ? kept[0] : INFINITY;
        const float inverse = q < a.n_q ? kept[a.n_q] : 0.0f;
        const float delta = q < a.n_q ? ((const float *)a.workspace)[base + q] : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const long long k = k0 + tx + j;
            const float x = exp2f(finish_score(a, p[i][j], b, h, q, k) - top) * inverse;
            const float factor = keep(a, b, h, q, k);
            ds[i][j] = x * (ds[i][j] * factor - delta);
            p[i][j] = x * factor;
        }
    }
}

static __device__ inline void
write_rows(
    struct pya_ops_heads x, long long b, long long h, long long s0, long long n_s, int c0,
    long long n_c, const float acc[4][4], float scale) {
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (s0 + ty + i < n_s && c0 + tx + j < n_c) {
                ((float *)x.p)[b * x.b + h * x.h + (s0 + ty + i) * x.s + c0 + tx + j] =
                    acc[i][j] * scale;
            }
        }
    }
}

/* dQ.  blocks: dim / 64 * queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_attention_backward_q(struct pya_ops_attention a) {
    __shared__ float w[SMALL][SMALL + 1];
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const unsigned n_c = (unsigned)((a.dim + WIDE - 1) / WIDE);
    const struct head_part block = block_head_part((a.n_q + SMALL - 1) / SMALL * n_c, a.n_h);
    const long long q0 = (long long)(block.part / n_c) * SMALL;
    const int c0 = (int)(block.part % n_c) * WIDE;
    const long long h = block.h;
    const long long b = block.b;
    const long long kv = h / (a.n_h / a.n_kv);
    const long long end = a.causal && q0 + SMALL < a.n_k ? q0 + SMALL : a.n_k;
    float d[4][4] = {};
    const struct key_range seen = seen_keys<SMALL, THREADS>(a, b, h, end);
    for (long long k0 = seen.first; k0 < seen.end; k0 += SMALL) {
        float p[4][4];
        float ds[4][4];
        backward_block(a, b, h, q0, k0, p, ds);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                w[ty + i][tx + j] = ds[i][j];
            }
        }
        wide_add(d, w, head_rows(a.k, b, kv, k0, a.n_k - k0), c0, (int)a.dim);
    }
    write_rows(a.d_q, b, h, q0, a.n_q, c0, a.dim, d, (float)a.scale);
}

/* dK (of_value false) or dV: the weights are transposed, with keys in rows.
 * blocks: columns / 64 * keys / 64 * key heads * batch; query heads of a group in order */
static __device__ inline void
backward_keys(const struct pya_ops_attention &a, bool of_value) {
    __shared__ float w[SMALL][SMALL + 1];
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const long long dim = of_value ? a.dim_v : a.dim;
    const unsigned n_c = (unsigned)((dim + WIDE - 1) / WIDE);
    const struct head_part block = block_head_part((a.n_k + SMALL - 1) / SMALL * n_c, a.n_kv);
    const long long k0 = (long long)(block.part / n_c) * SMALL;
    const int c0 = (int)(block.part % n_c) * WIDE;
    const long long kv = block.h;
    const long long b = block.b;
    const long long group = a.n_h / a.n_kv;
    float d[4][4] = {};
    for (long long h = kv * group; h < (kv + 1) * group; h++) {
        if (!may_see<THREADS>(a, b, h, k0, SMALL)) {
            continue;
        }
        for (long long q0 = a.causal ? k0 : 0; q0 < a.n_q; q0 += SMALL) {
            float p[4][4];
            float ds[4][4];
            backward_block(a, b, h, q0, k0, p, ds);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    w[tx + j][ty + i] = of_value ? p[i][j] : ds[i][j];
                }
            }
            wide_add(
                d, w, head_rows(of_value ? a.grad : a.q, b, h, q0, a.n_q - q0), c0, (int)dim);
        }
    }
    write_rows(
        of_value ? a.d_v : a.d_k, b, kv, k0, a.n_k, c0, dim, d,
        of_value ? 1.0f : (float)a.scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_attention_backward_k(struct pya_ops_attention a) {
    backward_keys(a, false);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_attention_backward_v(struct pya_ops_attention a) {
    backward_keys(a, true);
}

/* The gradient of the bias: one block owns 64 x 64 of a bias slice (all queries or keys if the bias is shared along
 * them) and adds what shares it in a fixed order.
 * blocks: keys / 64 * queries / 64 * heads * batch, each 1 where shared */
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pya_attention_backward_bias(struct pya_ops_attention a) {
    __shared__ float w[SMALL][SMALL + 1];
    const struct pya_ops_scores o = a.d_bias;
    const int ty = threadIdx.x / 16 * 4;
    const int tx = threadIdx.x % 16 * 4;
    const unsigned n_kb = o.k != 0 ? (unsigned)((a.n_k + SMALL - 1) / SMALL) : 1;
    const long long n_qb = o.q != 0 ? (a.n_q + SMALL - 1) / SMALL : 1;
    const struct head_part block = block_head_part(n_kb * n_qb, o.h != 0 ? a.n_h : 1);
    const long long b1 = block.b;
    const long long h1 = block.h;
    const long long q1 = (long long)(block.part / n_kb) * SMALL;
    const long long k1 = (long long)(block.part % n_kb) * SMALL;
    float sum[4][4] = {};
    for (long long b = o.b != 0 ? b1 : 0; b < (o.b != 0 ? b1 + 1 : a.n_b); b++) {
        for (long long h = o.h != 0 ? h1 : 0; h < (o.h != 0 ? h1 + 1 : a.n_h); h++) {
            for (long long q0 = q1; q0 < (o.q != 0 ? q1 + 1 : a.n_q); q0 += SMALL) {
                for (long long k0 = k1; k0 < (o.k != 0 ? k1 + 1 : a.n_k); k0 += SMALL) {
                    if (!may_see<THREADS>(a, b, h, k0, SMALL)) {
                        continue;
                    }
                    float p[4][4];
                    float ds[4][4];
                    backward_block(a, b, h, q0, k0, p, ds);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            sum[i][j] += ds[i][j];
                        }
                    }
                }
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            w[ty + i][tx + j] = sum[i][j];
        }
    }
    __syncthreads();
    put_bias_gradient<SMALL, SMALL, THREADS>(a, &w[0][0], b1, h1, q1, k1);
}
