/* Attention backward on tensor cores: the gradients of queries, of keys and values, and of a shared bias. */
#include "attention_scores.cuh"

#ifdef PYA_TENSOR

/* What the backward needs of a query. */
struct att_query {
    float top, inverse, delta;
};

static __device__ inline struct att_query
att_query(const struct pya_ops_attention &a, long long b, long long h, int q) {
    const long long base = (b * a.n_h + h) * a.n_q;
    struct att_query of = {INFINITY, 0.0f, 0.0f};
    if (q < a.n_q) {
        of.top = ((const float *)a.stats)[2 * base + q];
        of.inverse = ((const float *)a.stats)[2 * base + a.n_q + q];
        of.delta = ((const float *)a.workspace)[base + q];
    }
    return of;
}

/* Turns scores into probabilities after dropout, and dP into dS; of(n, e) is the query of a score. */
template <bool TRANSPOSED, int N, class Of>
static __device__ inline void
att_gradients(
    float p[N][4], float ds[N][4], const float bias[N][4], const struct pya_ops_attention &a,
    const struct att_spot &at, const Of &of) {
    att_finish<TRANSPOSED, N>(p, bias, a, at);
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        const struct att_query query = of(n / 4, n % 4);
        p[n / 4][n % 4] = exp2_near(p[n / 4][n % 4] - query.top) * query.inverse;
    }
    if (a.dropout > 0.0) {
        const unsigned kept = att_kept<TRANSPOSED, N>(a, at);
#pragma unroll
        for (int n = 0; n < 4 * N; n++) {
            const float factor = att_factor(a, kept, n);
            const float delta = of(n / 4, n % 4).delta;
            float *x = &p[n / 4][n % 4];
            ds[n / 4][n % 4] = *x * fmaf(ds[n / 4][n % 4], factor, -delta);
            *x *= factor;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        ds[n / 4][n % 4] = p[n / 4][n % 4] * (ds[n / 4][n % 4] - of(n / 4, n % 4).delta);
    }
}

/* delta = sum dO * O of a query, computed by the four lanes of its row; also stored for the kernels after this one. */
static __device__ inline float
att_make_delta(const struct pya_ops_attention &a, long long b, long long h, int q) {
    const int t = threadIdx.x % 4;
    float sum = 0.0f;
    if (q < a.n_q) {
        const float *o = (const float *)a.out.p + b * a.out.b + h * a.out.h + q * a.out.s;
        const float *g = (const float *)a.grad.p + b * a.grad.b + h * a.grad.h + q * a.grad.s;
#pragma unroll 8
        for (int c = t; c < (int)a.dim_v; c += 4) {
            sum = fmaf(o[c], g[c], sum);
        }
    }
    sum = reduce4_add(sum);
    if (t == 0 && q < a.n_q) {
        ((float *)a.workspace)[(b * a.n_h + h) * a.n_q + q] = sum;
    }
    return sum;
}

template <int N>
static __device__ inline void
att_store_bias(const float ds[N][4], const struct pya_ops_attention &a, const struct att_spot &at) {
    const struct pya_ops_scores &o = a.d_bias;
    float *p = (float *)o.p;
    if (at.is_whole && att_is_packed(o)) {
        p += at.b * o.b + at.h * o.h + at.row * o.q + at.column;
#pragma unroll
        for (int n = 0; n < 2 * N; n++) {
            const float2 both = {ds[n % N][n / N * 2], ds[n % N][n / N * 2 + 1]};
            *(float2 *)(p + n / N * 8 * o.q + n % N * 8) = both;
        }
        return;
    }
    att_each<false, N>(a, o, p, at, [&](int n, int e, float *to) { *to = ds[n][e]; });
}

/* dQ, delta, and the gradient of a bias of which no two scores share an element.  While tiles are in flight, there is
 * room for the next keys beside the current ones; the next values are requested once the current ones are read. */
template <int D>
static __device__ inline void
att_backward_q(const struct pya_ops_attention &a, float *room) {
    const int N = ATT_SPAN / 8;
    const struct head_part block = block_head_part((a.n_q + ATT_ROWS - 1) / ATT_ROWS, a.n_h);
    const struct att_lane l = att_lane();
    const int q0 = att_first_query(a, block.part);
    const long long kv = block.h / (a.n_h / a.n_kv);
    const long long end = a.causal && q0 + ATT_ROWS < a.n_k ? q0 + ATT_ROWS : a.n_k;
    const struct att_side keys = att_side(a.k, block.b, kv, a.n_k, a.dim);
    const struct att_side values = att_side(a.v, block.b, kv, a.n_k, a.dim_v);
    float *grad_tile = room + ATT_ROWS * D;
    float *key_tiles = grad_tile + ATT_ROWS * D;
    float *value_tile = key_tiles + 2 * ATT_SPAN * D;
    float out[D / 32][4][4] = {};
    struct att_query of[2];
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, block.b, block.h, a.n_q, a.dim), q0));
    att_load<D, ATT_ROWS>(
        grad_tile, att_from(att_side(a.grad, block.b, block.h, a.n_q, a.dim_v), q0));
    struct key_range seen = {0, (int)end};
    if (!a.owns_bias) { /* its gradient is stored for hidden keys, too */
        seen = seen_keys<ATT_SPAN, ATT_THREADS>(a, block.b, block.h, end);
    }
    att_load<D, ATT_SPAN>(
        key_tiles + seen.first / ATT_SPAN % 2 * (ATT_SPAN * D), att_from(keys, seen.first));
    att_load<D, ATT_SPAN>(value_tile, att_from(values, seen.first));
    async_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int q = q0 + l.row + 8 * r;
        const float *kept = (const float *)a.stats + 2 * (block.b * a.n_h + block.h) * a.n_q + q;
        of[r].top = q < a.n_q ? kept[0] : INFINITY;
        of[r].inverse = q < a.n_q ? kept[a.n_q] : 0.0f;
        of[r].delta = att_make_delta(a, block.b, block.h, q);
    }
#pragma unroll 1
    for (int k0 = seen.first; k0 < seen.end; k0 += ATT_SPAN) {
        const int next = k0 + ATT_SPAN;
        const float *tile = key_tiles + k0 / ATT_SPAN % 2 * (ATT_SPAN * D);
        async_wait<0>();
        __syncthreads();
        if (next < seen.end) {
            att_load<D, ATT_SPAN>(
                key_tiles + next / ATT_SPAN % 2 * (ATT_SPAN * D), att_from(keys, next));
            async_commit();
        }
        const struct att_spot at = att_spot<false>(a, block.b, block.h, q0, ATT_ROWS, k0, ATT_SPAN);
        float p[N][4];
        float ds[N][4];
        float bias[N][4] = {};
        att_fetch_bias<false, N>(bias, a, at);
        att_pairs_two<D>(p, room, tile, (int)a.dim, ds, grad_tile, value_tile, (int)a.dim_v);
        __syncthreads();
        if (next < seen.end) {
            att_load<D, ATT_SPAN>(value_tile, att_from(values, next));
            async_commit();
        }
        att_gradients<false, N>(p, ds, bias, a, at, [&](int, int e) { return of[e / 2]; });
        if (a.owns_bias) { /* its gradient is dS */
            att_store_bias<N>(ds, a, at);
        }
        att_weigh<D, N>(out, ds, tile, (int)a.dim);
    }
    const float scale[2] = {(float)a.scale, (float)a.scale};
    att_store<D>(a.d_q, block.b, block.h, q0 + l.row, a.n_q, (int)a.dim, out, scale);
}

/* blocks: queries / 64 * heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_q_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_q<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_q_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_q<128>(a, room);
}

/* The tiles of queries that a block of keys goes through: those of all query heads in its group, in order. */
struct att_walk {
    long long h;
    int q0;
};

static __device__ inline struct att_walk
att_walk(const struct pya_ops_attention &a, long long kv, int first, int n_tiles, int i) {
    struct att_walk w = {kv * (a.n_h / a.n_kv) + i / n_tiles, first + i % n_tiles * ATT_SPAN};
    return w;
}

/* One of the three numbers per query of a tile: first one number of all queries, then the next. */
static __device__ inline float
att_number(const struct pya_ops_attention &a, long long b, struct att_walk w) {
    const struct att_query of = att_query(a, b, w.h, w.q0 + (int)threadIdx.x % ATT_SPAN);
    const int n = threadIdx.x / ATT_SPAN;
    return n == 0 ? of.top : n == 1 ? of.inverse : of.delta;
}

/* dK and dV: everything is transposed, with keys as rows. */
template <int D>
static __device__ inline void
att_backward_keys(const struct pya_ops_attention &a, float *room) {
    __shared__ float numbers[2][ATT_THREADS / ATT_SPAN][ATT_SPAN];
    const int N = ATT_SPAN / 8;
    const struct head_part block = block_head_part((a.n_k + ATT_ROWS - 1) / ATT_ROWS, a.n_kv);
    const struct att_lane l = att_lane();
    const long long b = block.b;
    const long long kv = block.h;
    const int k0 = (int)block.part * ATT_ROWS;
    const int first = a.causal ? k0 : 0;
    const int n_tiles = first < a.n_q ? ((int)a.n_q - first + ATT_SPAN - 1) / ATT_SPAN : 0;
    const int group = (int)(a.n_h / a.n_kv);
    const bool is_seen = (a.mask.h != 0 && group > 1) || /* these heads may see others */
                         may_see<ATT_THREADS>(a, b, kv * group, k0, ATT_ROWS);
    const int n = is_seen ? n_tiles * group : 0;
    const int dim = (int)a.dim;
    const int dim_v = (int)a.dim_v;
    float *values = room + ATT_ROWS * D;
    float *queries = values + ATT_ROWS * D;
    float *grads = queries + 2 * ATT_SPAN * D;
    float d_k[D / 32][4][4] = {};
    float d_v[D / 32][4][4] = {};
    if (n > 0) {
        const struct att_walk w = att_walk(a, kv, first, n_tiles, 0);
        att_load<D, ATT_ROWS>(room, att_from(att_side(a.k, b, kv, a.n_k, dim), k0));
        att_load<D, ATT_ROWS>(values, att_from(att_side(a.v, b, kv, a.n_k, dim_v), k0));
        att_load<D, ATT_SPAN>(queries, att_from(att_side(a.q, b, w.h, a.n_q, dim), w.q0));
        att_load<D, ATT_SPAN>(grads, att_from(att_side(a.grad, b, w.h, a.n_q, dim_v), w.q0));
        async_commit();
        numbers[0][threadIdx.x / ATT_SPAN][threadIdx.x % ATT_SPAN] = att_number(a, b, w);
    }
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        const struct att_walk w = att_walk(a, kv, first, n_tiles, i);
        const struct att_walk next = att_walk(a, kv, first, n_tiles, i + 1);
        const float *tile = queries + i % 2 * (ATT_SPAN * D);
        float number = 0.0f;
        async_wait<0>();
        __syncthreads();
        if (i + 1 < n) {
            att_load<D, ATT_SPAN>(
                queries + (i + 1) % 2 * (ATT_SPAN * D),
                att_from(att_side(a.q, b, next.h, a.n_q, dim), next.q0));
            async_commit();
            number = att_number(a, b, next);
        }
        const struct att_spot at = att_spot<true>(a, b, w.h, w.q0, ATT_SPAN, k0, ATT_ROWS);
        float p[N][4];
        float ds[N][4];
        float bias[N][4] = {};
        att_fetch_bias<true, N>(bias, a, at);
        if (D == 64) { /* with the larger heads there are not enough registers for both */
            att_pairs_two<D>(p, room, tile, dim, ds, values, grads, dim_v);
        } else {
            att_pairs<D, N>(p, room, tile, dim);
            att_pairs<D, N>(ds, values, grads, dim_v);
        }
        att_gradients<true, N>(p, ds, bias, a, at, [&](int m, int e) {
            const int column = 8 * m + 2 * l.t + e % 2;
            struct att_query of = {
                numbers[i % 2][0][column], numbers[i % 2][1][column], numbers[i % 2][2][column]};
            return of;
        });
        numbers[(i + 1) % 2][threadIdx.x / ATT_SPAN][threadIdx.x % ATT_SPAN] = number;
        att_weigh<D, N, D == 64>(d_v, p, grads, dim_v);
        __syncthreads();
        if (i + 1 < n) {
            att_load<D, ATT_SPAN>(
                grads, att_from(att_side(a.grad, b, next.h, a.n_q, dim_v), next.q0));
            async_commit();
        }
        att_weigh<D, N, D == 64>(d_k, ds, tile, dim);
    }
    const float scale[2] = {(float)a.scale, (float)a.scale};
    const float one[2] = {1.0f, 1.0f};
    att_store<D>(a.d_k, b, kv, k0 + l.row, a.n_k, dim, d_k, scale);
    att_store<D>(a.d_v, b, kv, k0 + l.row, a.n_k, dim_v, d_v, one);
}

/* blocks: keys / 64 * key heads * batch */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_keys_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_keys<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_keys_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_keys<128>(a, room);
}

/* sum += dS of one tile */
template <int D>
static __device__ inline void
att_add_bias(
    float sum[ATT_SPAN / 8][4], const struct pya_ops_attention &a, float *room, long long b,
    long long h, int q0, int k0) {
    const int N = ATT_SPAN / 8;
    const struct att_lane l = att_lane();
    const long long kv = h / (a.n_h / a.n_kv);
    float *grads = room + ATT_ROWS * D;
    float *keys = grads + ATT_ROWS * D;
    float *values = keys + ATT_SPAN * D;
    const struct att_spot at = att_spot<false>(a, b, h, q0, ATT_ROWS, k0, ATT_SPAN);
    float p[N][4];
    float ds[N][4];
    float bias[N][4] = {};
    __syncthreads();
    att_load<D, ATT_ROWS>(room, att_from(att_side(a.q, b, h, a.n_q, a.dim), q0));
    att_load<D, ATT_SPAN>(keys, att_from(att_side(a.k, b, kv, a.n_k, a.dim), k0));
    async_commit();
    att_load<D, ATT_ROWS>(grads, att_from(att_side(a.grad, b, h, a.n_q, a.dim_v), q0));
    att_load<D, ATT_SPAN>(values, att_from(att_side(a.v, b, kv, a.n_k, a.dim_v), k0));
    async_commit();
    att_fetch_bias<false, N>(bias, a, at);
    const struct att_query of[2] = {
        att_query(a, b, h, q0 + l.row), att_query(a, b, h, q0 + l.row + 8)};
    async_wait<1>();
    __syncthreads();
    att_pairs<D, N>(p, room, keys, (int)a.dim);
    async_wait<0>();
    __syncthreads();
    att_pairs<D, N>(ds, grads, values, (int)a.dim_v);
    att_gradients<false, N>(p, ds, bias, a, at, [&](int, int e) { return of[e / 2]; });
#pragma unroll
    for (int n = 0; n < 4 * N; n++) {
        sum[n / 4][n % 4] += ds[n / 4][n % 4];
    }
}

/* The gradient of a shared bias: one block owns 64 queries x 32 keys of a bias slice (all queries or keys if the bias is
 * shared along them) and adds what shares it in a fixed order. */
template <int D>
static __device__ inline void
att_backward_bias(const struct pya_ops_attention &a, float *room) {
    const struct pya_ops_scores o = a.d_bias;
    const unsigned n_kb = o.k != 0 ? (unsigned)((a.n_k + ATT_SPAN - 1) / ATT_SPAN) : 1;
    const long long n_qb = o.q != 0 ? (a.n_q + ATT_ROWS - 1) / ATT_ROWS : 1;
    const struct head_part block = block_head_part(n_kb * n_qb, o.h != 0 ? a.n_h : 1);
    const int q1 = (int)(block.part / n_kb) * ATT_ROWS;
    const int k1 = (int)(block.part % n_kb) * ATT_SPAN;
    const int q_end = o.q != 0 ? q1 + 1 : (int)a.n_q;
    const int k_end = o.k != 0 ? k1 + 1 : (int)a.n_k;
    float sum[ATT_SPAN / 8][4] = {};
    for (long long b = o.b != 0 ? block.b : 0; b < (o.b != 0 ? block.b + 1 : a.n_b); b++) {
        for (long long h = o.h != 0 ? block.h : 0; h < (o.h != 0 ? block.h + 1 : a.n_h); h++) {
            for (int q0 = q1; q0 < q_end; q0 += ATT_ROWS) {
                const int seen = a.causal && q0 + ATT_ROWS < k_end ? q0 + ATT_ROWS : k_end;
                for (int k0 = k1; k0 < seen; k0 += ATT_SPAN) {
                    if (may_see<ATT_THREADS>(a, b, h, k0, ATT_SPAN)) {
                        att_add_bias<D>(sum, a, room, b, h, q0, k0);
                    }
                }
            }
        }
    }
    const struct att_lane l = att_lane();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < ATT_SPAN / 2; n++) {
        const int row = l.row + n % 4 / 2 * 8;
        room[row * (ATT_SPAN + 1) + n / 4 * 8 + 2 * l.t + n % 2] = sum[n / 4][n % 4];
    }
    __syncthreads();
    put_bias_gradient<ATT_ROWS, ATT_SPAN, ATT_THREADS>(a, room, block.b, block.h, q1, k1);
}

/* blocks: keys / 32 * queries / 64 * heads * batch, each 1 where shared */
extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_bias_64_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_bias<64>(a, room);
}

extern "C" __global__ void __launch_bounds__(ATT_THREADS, 2)
pya_attention_backward_bias_128_tensor(struct pya_ops_attention a) {
    PYA_DYNAMIC(room);
    att_backward_bias<128>(a, room);
}

#endif
