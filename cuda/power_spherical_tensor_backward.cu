/* The PowerSpherical backward kernel for cards with fast tensor cores. */
#include "spherical_tensor.cuh"

#ifdef PYA_TENSOR

static __device__ inline double
shuffle_double(double x, int mask) {
    float part[2];
    memcpy(part, &x, sizeof part);
    part[0] = PYA_SHUFFLE(part[0], mask);
    part[1] = PYA_SHUFFLE(part[1], mask);
    memcpy(&x, part, sizeof part);
    return x;
}

/* Sums over the 8 lanes of one column; lane g gets the sum of x[g / 2]. */
static __device__ inline double
exchange_add(const double x[4]) {
    const bool upper = threadIdx.x & 16;
    const bool odd = threadIdx.x & 8;
    double mine[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        mine[n] = (upper ? x[2 + n] : x[n]) + shuffle_double(upper ? x[n] : x[2 + n], 16);
    }
    const double sum = (odd ? mine[1] : mine[0]) + shuffle_double(odd ? mine[0] : mine[1], 8);
    return sum + shuffle_double(sum, 4);
}

/* The same for the maximum; lane g gets that of x[g / 4]. */
static __device__ inline float
exchange_max(const float x[2]) {
    const bool upper = threadIdx.x & 16;
    float most = fmaxf(upper ? x[1] : x[0], PYA_SHUFFLE(upper ? x[0] : x[1], 16));
    most = fmaxf(most, PYA_SHUFFLE(most, 8));
    return fmaxf(most, PYA_SHUFFLE(most, 4));
}

/* The tiles that one block of the backward goes through (those that begin before the end), and the gradients that it
 * computes. */
struct task {
    int l_begin, l_end, m_begin, m_end; /* 32 bits suffice: the launcher accepts no more */
    bool of_value, of_loc, of_sums; /* of_sums: sees all samples, so it knows scale and weights */
    int t;                          /* kept here to save a register */
};

struct pair_tile {
    int l0, m0; /* its first sample and component */
};

/* G of 4 rows and 2 columns of a thread's part, zeros where there are none.  from: the address of the first; left:
 * rows and columns from there on; packed: both columns exist and are adjacent. */
static __device__ inline void
load_grads(
    float2 g[4], const struct pya_ops_ps &a, const float *from, int rows_left, int columns_left,
    bool packed) {
    if (packed && rows_left > 24) { /* nearly always */
#pragma unroll
        for (int r = 0; r < 4; r++) {
            g[r] = *(const float2 *)(from + 8 * r * a.grad_l);
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 4; r++, from += 8 * a.grad_l) {
        const float2 none = {0.0f, 0.0f};
        g[r] = none;
        if (8 * r >= rows_left) {
            continue;
        }
        g[r].x = columns_left > 0 ? from[0] : 0.0f;
        g[r].y = columns_left > 1 ? from[a.grad_m] : 0.0f;
    }
}

/* pair_weight of a cosine that is neither too coarse nor too near 1 for the far form; slope lacks slope_beside(). */
static __device__ inline float
fine_weight(float u, struct component c, struct sample s, bool mixture, float *g, float *slope) {
    if (!mixture) {
        *slope = log_beside(u, 1.0f);
        return *g * c.kappa * reciprocal_about(1.0f + u);
    }
    const float behind = __saturatef(fmaf(-0.5f, u, 0.5f)); /* (1 - u) / 2 */
    const float y = log_beside(-behind, 1.0f);
    *g = s.grad * exp_about(fmaf(c.kappa, y, c.h) - s.f);
    *slope = y;
    return *g * (0.5f * c.kappa) * reciprocal_about(1.0f - behind);
}

/* The part of the slope of scale that backward_weights() adds once per sum: it is the same for all samples of a
 * component. */
template <bool MIXTURE, bool FINE>
static __device__ inline double
slope_beside(const struct component &c) {
    return MIXTURE ? (double)c.near : FINE ? (double)c.far : 0.0;
}

/* Sums over a quarter of the rows, of G or of G times the slope of scale; n: 2 * quarter + which of them. */
static __device__ inline double *
tile_sums(float *w, int n) {
    static_assert(8 * BIG * 2 <= WEIGH_SLICE, "they lie where the second slice of a product will");
    return (double *)(w + W_ROOM + WEIGH_SLICE) + n * BIG;
}

/* Writes the weights W to w, in place of gaps or, if FINE, from cosines none of which is too coarse; and sums over
 * each component's samples to tile_sums(): two rows in float, all else in double, because gradients cancel. */
template <bool MIXTURE, bool FINE>
static __device__ inline void
backward_weights(
    const struct pya_ops_ps &a, const patch cosines, float *w, const struct component *comp,
    const struct sample *samp, largest_weights largest, const struct pair_tile &at, int t) {
    const struct place p = my_place();
    const int l = at.l0 + tensor_row(p, 0, 0);
    const int m = at.m0 + tensor_column(p, 0, 0);
    const bool packed =
        pairs_are_aligned(a.grad, a.grad_m, a.grad_l, a.grad_t) && a.n_m - at.m0 >= BIG;
    const float *from = (const float *)a.grad + l * a.grad_l + m * a.grad_m + t * a.grad_t;
    const int rows_left = (int)(a.n_l - l); /* may be negative */
    int columns_left = (int)(a.n_m - m);
    float of_row[4] = {}; /* the largest weights */
    /* computed here, or the compiler would keep eight addresses of each, and run out of registers */
    double *const sums_to =
        tile_sums(w, p.row / 32 * 2 + p.g / 4) + tensor_column(p, 0, 0) + p.g / 2 % 2;
    float *const largest_to = &largest[OF_COLUMNS + p.row / 32][tensor_column(p, 0, 0) + p.g / 4];
    float2 next[4];
    if (!MIXTURE) {
        load_grads(next, a, from, rows_left, columns_left, packed);
    }
#pragma unroll(FINE ? 8 : 1)
    for (int j = 0; j < 8; j++) {
        const int c = tensor_column(p, j, 0);
        struct component c0 = comp[c];
        struct component c1 = comp[c + 1];
        const double beside[2] = {slope_beside<MIXTURE, FINE>(c0), slope_beside<MIXTURE, FINE>(c1)};
        if (MIXTURE) {
            c0.near = c1.near = 0.0f;
        }
        float2 g[4];
#pragma unroll
        for (int r = 0; r < 4 && !MIXTURE; r++) {
            g[r] = next[r];
        }
        from += 8 * a.grad_m;
        columns_left -= 8;
        if (!MIXTURE && j < 7) { /* loaded while the current ones are used */
            load_grads(next, a, from, rows_left, columns_left, packed);
        }
        double all[4] = {}; /* for either column, G and G times the slope */
        float two[4];       /* the same for two rows */
        float of_column[2] = {};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int row = tensor_row(p, r / 2, r % 2 * 2);
            float2 *x = (float2 *)(w + row * W_STRIDE + c);
            float slope[2];
            float2 weights;
            if (FINE) {
                const float *u = &cosines[r / 2][j][r % 2 * 2];
                weights.x = fine_weight(u[0], c0, samp[row], MIXTURE, &g[r].x, &slope[0]);
                weights.y = fine_weight(u[1], c1, samp[row], MIXTURE, &g[r].y, &slope[1]);
            } else {
                const float2 gaps = *x;
                weights.x = pair_weight(gaps.x, c0, samp[row], MIXTURE, &g[r].x, &slope[0]);
                weights.y = pair_weight(gaps.y, c1, samp[row], MIXTURE, &g[r].y, &slope[1]);
            }
            *x = weights;
            two[0] = r % 2 == 0 ? g[r].x : two[0] + g[r].x;
            two[1] = r % 2 == 0 ? g[r].y : two[1] + g[r].y;
            two[2] = r % 2 == 0 ? g[r].x * slope[0] : fmaf(g[r].x, slope[0], two[2]);
            two[3] = r % 2 == 0 ? g[r].y * slope[1] : fmaf(g[r].y, slope[1], two[3]);
#pragma unroll
            for (int n = 0; n < 4 && r % 2 == 1; n++) {
                all[n] += (double)two[n];
            }
            of_row[r] = fmaxf(of_row[r], fmaxf(fabsf(weights.x), fabsf(weights.y)));
            of_column[0] = fmaxf(of_column[0], fabsf(weights.x));
            of_column[1] = fmaxf(of_column[1], fabsf(weights.y));
        }
        all[2] += beside[0] * all[0];
        all[3] += beside[1] * all[1];
        const double sum = exchange_add(all);
        const float most = exchange_max(of_column);
        if (p.g % 2 == 0) {
            sums_to[8 * j] = sum;
        }
        if (p.g % 4 == 0) {
            largest_to[8 * j] = most;
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float most = reduce4_max(of_row[r]);
        if (p.t == 0) {
            largest[OF_ROWS + p.column / 64][tensor_row(p, r / 2, r % 2 * 2)] = most;
        }
    }
}

/* The weights of a tile, from its cosines; wild as in put_gaps. */
template <bool MIXTURE>
static __device__ inline void
put_weights(
    const struct pya_ops_ps &a, const patch acc, float *w, const struct component *comp,
    const struct sample *samp, largest_weights largest, float low, const rows both[2],
    const struct pair_tile &at, int t, bool *wild) {
    if (any_lane(!none_is_coarse(acc, low, [&](int c) { return comp[c].high; }))) {
        put_gaps(w, acc, comp, low, both, (int)a.dim, wild);
        backward_weights<MIXTURE, false>(a, acc, w, comp, samp, largest, at, t);
    } else {
        backward_weights<MIXTURE, true>(a, acc, w, comp, samp, largest, at, t);
    }
}

/* Adds what is stored in the place of store_row(). */
static __device__ inline void
add_row(patch acc, const float *from, int r) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 before = *(const float2 *)(from + 8 * j);
        acc[r / 2][j][r % 2 * 2] += before.x;
        acc[r / 2][j][r % 2 * 2 + 1] += before.y;
    }
}

/* Writes 128 x 128 of a gradient; add: adds them to what this thread wrote there before. */
static __device__ inline void
write_gradient(
    struct pya_ops_view d, patch acc, int row0, int n_rows, int c0, int dim, int t, bool add) {
    const struct place p = my_place();
    const bool packed = pairs_are_aligned(d.p, 1, d.i, d.t);
    const int row = row0 + tensor_row(p, 0, 0);
    const int column = c0 + tensor_column(p, 0, 0);
    float *to = (float *)d.p + row * d.i + t * d.t + column;
    if (packed && dim - c0 >= BIG && n_rows - row0 >= BIG) { /* nearly always */
#pragma unroll
        for (int r = 0; r < 4; r++, to += 8 * d.i) {
            if (add) {
                add_row(acc, to, r);
            }
            store_row(to, acc, r);
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 4; r++, to += 8 * d.i) {
        if (row + 8 * r >= n_rows) {
            break;
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float x = acc[r / 2][n / 2][r % 2 * 2 + n % 2];
            float *at = to + n / 2 * 8 + n % 2;
            if (column + n / 2 * 8 + n % 2 < dim) {
                *at = add ? *at + x : x;
            }
        }
    }
}

/* Which gradient the n-th product of a tile contributes to, and which of its columns. */
static __device__ inline bool
product_is_value(const struct task &k, int n) {
    return k.of_value && (!k.of_loc || n % 2 == 0);
}

static __device__ inline int
product_column(const struct task &k, int n) {
    return n / (k.of_value && k.of_loc ? 2 : 1) * BIG;
}

static __device__ inline void
product_start(const struct task &k, float *room, const rows *both, int n, int dim) {
    const int c0 = product_column(k, n);
    if (c0 >= dim || !(k.of_value || k.of_loc)) {
        return;
    }
    if (product_is_value(k, n)) {
        weigh_start(room, both[1], c0, dim);
    } else {
        weigh_start(room, both[0], c0, dim);
    }
}

template <bool TRANSPOSED>
static __device__ inline void
weigh_either(
    patch acc, const float *w, float *room, const largest_weights largest, const rows &b, int c0,
    int dim, bool wild) {
    if (wild) {
        weigh_plain<TRANSPOSED>(acc, w, b, c0, dim);
    } else {
        weigh_finish<TRANSPOSED>(acc, w, room, largest, b, c0, dim);
    }
}

/* Advances to the first or the next tile: through the samples, then to the next components.  Puts its views where all
 * threads read them. */
static __device__ inline void
stage_tile(
    const struct pya_ops_ps &a, rows both[2], struct pair_tile *at, const struct task &k, bool first) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool is_last = first || at->l0 + BIG >= k.l_end;
        at->m0 = first ? k.m_begin : at->m0 + (is_last ? BIG : 0);
        at->l0 = is_last ? k.l_begin : at->l0 + BIG;
        both[0] = view_rows(a.value, at->l0, k.t, a.n_l - at->l0);
        both[1] = view_rows(a.loc, at->m0, k.t, a.n_m - at->m0);
    }
    __syncthreads();
}

/* Each tile's W is computed once, in shared memory, for both gradients.  If several tiles contribute to a gradient,
 * the same thread adds them in order. */
static __device__ inline void
backward_tiles(const struct pya_ops_ps &a, const struct task &k) {
    PYA_DYNAMIC(w);
    __shared__ struct component comp[BIG];
    __shared__ struct sample samp[BIG];
    __shared__ double totals[2][BIG];
    __shared__ rows both[2];
    __shared__ float low;
    __shared__ largest_weights largest;
    __shared__ bool wild;
    __shared__ struct pair_tile at; /* shared to save registers */
    float *room = w + W_ROOM;
    const int dim = (int)a.dim;
    const bool mixture = a.log_weights.p != 0;
    if (k.l_begin >= k.l_end) {
        return;
    }
    for (stage_tile(a, both, &at, k, true); at.m0 < k.m_end; stage_tile(a, both, &at, k, false)) {
        pair_start(w, both[0], both[1], dim);
        wild = false; /* a barrier follows before anybody sets it */
        if (threadIdx.x >= BIG) {
            samp[threadIdx.x - BIG] = load_sample(a, at.l0 + threadIdx.x - BIG, k.t, mixture);
            low = ps_low(a.dim); /* all threads write the same */
        } else if (at.l0 == k.l_begin) {
            comp[threadIdx.x] = load_component(a, at.m0 + threadIdx.x, k.t, mixture);
            totals[0][threadIdx.x] = 0.0;
            totals[1][threadIdx.x] = 0.0;
        }
        patch acc;
        pair_finish(acc, w, both[0], both[1], dim);
        product_start(k, room, both, 0, dim);
        if (mixture) {
            put_weights<true>(a, acc, w, comp, samp, largest, low, both, at, k.t, &wild);
        } else {
            put_weights<false>(a, acc, w, comp, samp, largest, low, both, at, k.t, &wild);
        }
        __syncthreads();
        if (threadIdx.x < BIG) {
            for (int n = 0; n < 8; n++) {
                totals[n % 2][threadIdx.x] += tile_sums(w, n)[threadIdx.x];
            }
        }
        for (int n = 0; product_column(k, n) < dim && (k.of_value || k.of_loc); n++) {
            const int c0 = product_column(k, n);
            if (product_is_value(k, n)) {
                weigh_either<false>(acc, w, room, largest, both[1], c0, dim, wild);
                product_start(k, room, both, n + 1, dim);
                write_gradient(a.d_value, acc, at.l0, a.n_l, c0, dim, k.t, at.m0 > k.m_begin);
            } else {
                weigh_either<true>(acc, w, room, largest, both[0], c0, dim, wild);
                product_start(k, room, both, n + 1, dim);
                write_gradient(a.d_loc, acc, at.m0, a.n_m, c0, dim, k.t, at.l0 > k.l_begin);
            }
        }
        const int m = at.m0 + threadIdx.x;
        if (!k.of_sums || at.l0 + BIG < k.l_end || threadIdx.x >= BIG || m >= a.n_m) {
            continue;
        }
        if (a.d_scale.p != 0) {
            ((float *)a.d_scale.p)[m * a.d_scale.i + k.t * a.d_scale.t] =
                (float)totals[1][threadIdx.x];
        }
        if (a.d_log_weights.p != 0) {
            ((float *)a.d_log_weights.p)[m * a.d_log_weights.i + k.t * a.d_log_weights.t] =
                (float)totals[0][threadIdx.x];
        }
    }
}

/* blocks: (1, t), each with all gradients, or (components / 128 + samples / 128, t), each with those of 128
 * components or samples (only the kinds that are wanted), looping over all of the other kind */
extern "C" __global__ void
__launch_bounds__(THREADS, 2) pya_ps_backward_tensor(struct pya_ops_ps a) {
    __shared__ struct task k;
    if (threadIdx.x == 0) {
        const bool of_value = a.d_value.p != 0;
        const bool of_loc = a.d_loc.p != 0;
        const bool of_sums = of_loc || a.d_scale.p != 0 || a.d_log_weights.p != 0;
        const int parts = of_sums ? (int)((a.n_m + BIG - 1) / BIG) : 0;
        const int own = blockIdx.x * BIG;
        const struct task all = {0, (int)a.n_l, 0, (int)a.n_m, of_value, of_loc, of_sums};
        const struct task components = {0, (int)a.n_l, own, own + 1, false, of_loc, true};
        const struct task samples = {
            own - parts * BIG, own - parts * BIG + 1, 0, (int)a.n_m, true, false, false};
        k = gridDim.x == 1 ? all : (int)blockIdx.x < parts ? components : samples;
    }
    __syncthreads();
    for (int t = blockIdx.y; t < (int)a.n_t; t = k.t + gridDim.y) {
        __syncthreads();
        k.t = t; /* all threads write the same */
        __syncthreads();
        backward_tiles(a, k);
    }
}

#endif
