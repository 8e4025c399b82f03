/* The PowerSpherical kernels for cards whose tensor cores pay, used from 64 dimensions on. */
#include "args.h"
#include "spherical.cuh"
#include "tensor.cuh"

#ifdef PYA_TENSOR

static_assert(
    (PAIR_ROOM > W_ROOM ? PAIR_ROOM : W_ROOM) * sizeof(float) == PYA_OPS_PAIR_BYTES,
    "the launcher knows the room");
static_assert((W_ROOM + WEIGH_ROOM) * sizeof(float) == PYA_OPS_WEIGH_BYTES, "and this one");
static_assert(PAIR_ROOM <= W_ROOM + WEIGH_ROOM, "gaps and weights take the place of the factors");

static __device__ inline double
shuffle_double(double x, int mask) {
    float part[2];
    memcpy(part, &x, sizeof part);
    part[0] = PYA_SHUFFLE(part[0], mask);
    part[1] = PYA_SHUFFLE(part[1], mask);
    memcpy(&x, part, sizeof part);
    return x;
}

/* Over the 8 lanes of one column, of which lane g gets the sum of x[g / 2]. */
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

/* The same of the largest: that of x[g / 4]. */
static __device__ inline float
exchange_max(const float x[2]) {
    const bool upper = threadIdx.x & 16;
    float most = fmaxf(upper ? x[1] : x[0], PYA_SHUFFLE(upper ? x[0] : x[1], 16));
    most = fmaxf(most, PYA_SHUFFLE(most, 8));
    return fmaxf(most, PYA_SHUFFLE(most, 4));
}

/* Whether neighbours (an even index and the next) can be moved as one. */
static __device__ inline bool
pairs_are_aligned(const void *p, long long step, long long a, long long b) {
    return step == 1 && ((unsigned long long)p | (unsigned long long)((a | b) * 4)) % 8 == 0;
}

/* The views of a tile's samples and components, for all threads to read: held in shared memory, they
 * hold no registers. */
static __device__ inline void
stage_views(const struct pya_ops_ps &a, rows both[2], int l0, int m0, int t) {
    __syncthreads();
    if (threadIdx.x == 0) {
        both[0] = view_rows(a.value, l0, t, a.n_l - l0);
        both[1] = view_rows(a.loc, m0, t, a.n_m - m0);
    }
    __syncthreads();
}

/* Which of each thread's cosines were too coarse: bit 4 j + e of part i is acc[i][j][e].  In shared memory,
 * where it holds no registers. */
typedef unsigned marks[2][THREADS];

/* Also what is no number: the halves of a number that is too large for one make none. */
static __device__ inline bool
is_to_be_made_again(float u, float low, float high) {
    return !(u >= low && u <= high);
}

/* Whether none of the thread's cosines is to be made again, as it nearly always is; few instructions say so.
 * high(column): the cosine above which it is. */
template <class High>
static __device__ inline bool
none_is_coarse(const patch acc, float low, const High &high) {
    const struct place p = my_place();
    float most = -low;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        most = fminf(most, high(tensor_column(p, n / 2, n % 2)));
    }
    bool none = true;
#pragma unroll
    for (int n = 0; n < 64; n++) {
        none &= fabsf(acc[n / 32][n / 4 % 8][n % 4]) <= most;
    }
    return none;
}

/* log((1 + u) / 2) of a cosine that is not too coarse, the same bit for bit as of its gap; of others anything. */
static __device__ inline float
log_half(float u) {
    return log_beside(-__saturatef(fmaf(-0.5f, u, 0.5f)), 1.0f);
}

/* Cosines to log-probabilities, and the marks; those marked are to be made again. */
static __device__ inline void
pair_log_probs(patch acc, const struct columns &of, marks coarse) {
    const struct place p = my_place();
    const bool none = none_is_coarse(acc, of.low, [&](int c) { return of.high[c]; });
#pragma unroll
    for (int part = 0; part < 2; part++) {
        unsigned found = 0;
#pragma unroll
        for (int n = 0; n < 32 && !none; n++) {
            const int c = tensor_column(p, n / 4, n % 4);
            found |= is_to_be_made_again(acc[part][n / 4][n % 4], of.low, of.high[c]) ? 1u << n : 0;
        }
        coarse[part][threadIdx.x] = found;
    }
#pragma unroll
    for (int n = 0; n < 64; n++) {
        const int c = tensor_column(p, n / 4 % 8, n % 4);
        float *x = &acc[n / 32][n / 4 % 8][n % 4];
        *x = fmaf(of.kappa[c], log_half(*x), of.h[c]);
    }
}

/* Calls make(row, column, whether they exist) for each pair of a part that the thread found. */
template <class Make>
static __device__ inline void
for_marked(unsigned found, int part, const rows both[2], const Make &make) {
    const struct place p = my_place();
    while (found != 0) {
        const int n = take_lowest(&found);
        const int row = tensor_row(p, part, n % 4);
        const int column = tensor_column(p, n / 4, n % 4);
        make(row, column, row < both[0].n && column < both[1].n);
    }
}

/* A thread's part of a row of the result, r from 0 to 3; all of it is there and aligned. */
static __device__ inline void
store_row(float *to, const patch acc, int r) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float *x = &acc[r / 2][j][r % 2 * 2];
        const float2 both = {x[0], x[1]};
        *(float2 *)(to + 8 * j) = both;
    }
}

/* From the thread's first result on, whose place the others' are steps from: registers are scarce. */
static __device__ inline void
forward_store(const struct pya_ops_ps &a, const patch acc, int l0, int m0, int t) {
    const struct place p = my_place();
    const bool packed = pairs_are_aligned(a.out, a.out_m, a.out_l, a.out_t);
    const int l = l0 + tensor_row(p, 0, 0);
    const int m = m0 + tensor_column(p, 0, 0);
    const int n_l = a.n_l - l < BIG ? (int)(a.n_l - l) : BIG;
    const int n_m = a.n_m - m < BIG ? (int)(a.n_m - m) : BIG;
    float *out = (float *)a.out + l * a.out_l + m * a.out_m + t * a.out_t;
    const bool whole = packed && a.n_m - m0 >= BIG;
    if (whole && a.n_l - l0 >= BIG) { /* nearly always */
#pragma unroll
        for (int r = 0; r < 4; r++, out += 8 * a.out_l) {
            store_row(out, acc, r);
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 4; r++, out += 8 * a.out_l) {
        if (8 * r >= n_l) {
            break;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float *x = &acc[r / 2][j][r % 2 * 2];
            if (8 * j < n_m) {
                out[8 * j * a.out_m] = x[0];
            }
            if (8 * j + 1 < n_m) {
                out[(8 * j + 1) * a.out_m] = x[1];
            }
        }
    }
}

/* blocks: (components / 128 * samples / 128, t) */
extern "C" __global__ void
__launch_bounds__(THREADS, 2) pya_ps_forward_tensor(struct pya_ops_ps a) {
    PYA_DYNAMIC(room);
    __shared__ struct columns of;
    __shared__ marks coarse;
    __shared__ rows both[2];
    const int dim = (int)a.dim;
    __shared__ int first[2]; /* sample and component of the block; no registers either */
    if (threadIdx.x == 0) {
        const struct parted block = block_part((a.n_m + BIG - 1) / BIG);
        first[0] = block.rest * BIG;
        first[1] = block.part * BIG;
    }
    __syncthreads();
    for (int t = blockIdx.y; t < (int)a.n_t; t += gridDim.y) {
        stage_views(a, both, first[0], first[1], t);
        pair_start(room, both[0], both[1], dim);
        put_columns(&of, a, first[1], t, false);
        patch acc;
        pair_finish(acc, room, both[0], both[1], dim);
        pair_log_probs(acc, of, coarse);
        forward_store(a, acc, first[0], first[1], t);
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            for_marked(coarse[part][threadIdx.x], part, both, [&](int row, int c, bool is_there) {
                if (!is_there) {
                    return;
                }
                float *out = (float *)a.out + t * a.out_t;
                out[(first[0] + row) * a.out_l + (first[1] + c) * a.out_m] =
                    sharp_log_prob(of, both, row, c, dim);
            });
        }
    }
}

/* Cosines to gaps, in w, where the same thread finds them: loops after this need not be unrolled for it, and the
 * registers are free.  The coarse ones are sharp.  Some cosine being no number makes *wild true. */
static __device__ inline void
put_gaps(
    float *w, const patch acc, const struct component *comp, float low, const rows both[2], int dim,
    bool *wild) {
    const struct place p = my_place();
    unsigned found[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int n = 0; n < 32; n += 2) {
            const int c = tensor_column(p, n / 4, 0);
            const float *u = &acc[part][n / 4][n % 4];
            found[part] |= is_to_be_made_again(u[0], low, comp[c].high) ? 1u << n : 0;
            found[part] |= is_to_be_made_again(u[1], low, comp[c + 1].high) ? 2u << n : 0;
            const float2 gaps = {gap_of(u[0]), gap_of(u[1])};
            *(float2 *)(w + tensor_row(p, part, n % 4) * W_STRIDE + c) = gaps;
        }
    }
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
        const unsigned here = part == 0 ? found[0] : found[1];
        for_marked(here, part, both, [&](int row, int c, bool is_there) {
            float *gap = w + row * W_STRIDE + c;
            if (is_there && *gap != *gap) {
                *wild = true; /* whoever comes, says the same */
            }
            *gap = is_there ? sharp_gap(both[0], both[1], row, c, dim) : 0.0f;
        });
    }
}

/* e^x, whose share of error grows with x as that of a sum would. */
static __device__ inline float
exp_about(float x) {
    return exp2_near(x * 1.44269504f);
}

/* Adds 16 components' terms to the running logsumexp of a row: of all columns of the warp. */
static __device__ inline void
mixture_add(float terms[16], float *top, float *sum) {
    float best = *top;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        best = fmaxf(best, terms[n]);
    }
    best = reduce4_max(best);
    float s = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        /* its error grows with what it is small beside */
        s += exp_about(terms[n] - best);
    }
    *sum = *sum * expf(*top - best) + reduce4_add(s);
    *top = best;
}

/* Adds a row's terms to what is in shared memory for it. */
static __device__ inline void
mixture_row(float terms[16], float2 *at) {
    /* only the lane that writes reads: lanes are not ordered by a shuffle */
    const bool is_mine = threadIdx.x % 4 == 0;
    const float2 none = {-1e37f, 0.0f};
    float2 value = is_mine ? *at : none;
    mixture_add(terms, &value.x, &value.y);
    if (is_mine) {
        *at = value;
    }
}

/* Adds 128 components, by their gaps, to the running logsumexp of the rows. */
static __device__ inline void
mixture_tile(const float *gaps, const struct component *comp, float2 (*running)[BIG]) {
    const struct place p = my_place();
    float kappa[16];
    float h[16];
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const int c = tensor_column(p, n / 2, n % 2);
        kappa[n] = comp[c].kappa;
        h[n] = comp[c].h;
    }
#pragma unroll 1
    for (int r = 0; r < 4; r++) {
        const int row = p.row + p.g + r * 8;
        float terms[16];
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            get_pair(gaps + row * W_STRIDE + tensor_column(p, n / 2, 0), terms + n, terms + n + 1);
        }
#pragma unroll
        for (int n = 0; n < 16; n++) {
            terms[n] = fmaf(kappa[n], gap_log_half(terms[n], bottom_of(kappa[n])), h[n]);
        }
        mixture_row(terms, &running[p.column / 64][row]);
    }
}

/* The same from cosines of which none is too coarse. */
static __device__ inline void
mixture_fine(const patch acc, const struct component *comp, float2 (*running)[BIG]) {
    const struct place p = my_place();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float terms[16];
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const struct component c = comp[tensor_column(p, n / 2, n % 2)];
            terms[n] = fmaf(c.kappa, log_half(acc[r / 2][n / 2][r % 2 * 2 + n % 2]), c.h);
        }
        mixture_row(terms, &running[p.column / 64][p.row + p.g + r * 8]);
    }
}

/* blocks: (samples / 128, t); components pass by 128 at a time */
extern "C" __global__ void
__launch_bounds__(THREADS, 2) pya_ps_mixture_forward_tensor(struct pya_ops_ps a) {
    PYA_DYNAMIC(room);
    __shared__ struct component comp[BIG];
    __shared__ float low;
    __shared__ float2
        running[2][BIG]; /* of each warp's columns: largest term, sum of the rest to it */
    __shared__ bool wild;
    __shared__ rows both[2];
    const int dim = (int)a.dim;
    const int l0 = blockIdx.x * BIG;
    for (int t = blockIdx.y; t < (int)a.n_t; t += gridDim.y) {
        __syncthreads();
        const float2 none = {-1e37f, 0.0f};
        running[threadIdx.x / BIG][threadIdx.x % BIG] = none;
        for (int m0 = 0; m0 < (int)a.n_m; m0 += BIG) {
            stage_views(a, both, l0, m0, t);
            pair_start(room, both[0], both[1], dim);
            if (threadIdx.x < BIG) {
                comp[threadIdx.x] = load_component(a, m0 + threadIdx.x, t, true);
            } else {
                low = ps_low(a.dim); /* all write the same */
            }
            patch acc;
            pair_finish(acc, room, both[0], both[1], dim);
            if (any_lane(!none_is_coarse(acc, low, [&](int c) { return comp[c].high; }))) {
                put_gaps(room, acc, comp, low, both, dim, &wild);
                mixture_tile(room, comp, running);
            } else {
                mixture_fine(acc, comp, running);
            }
        }
        __syncthreads();
        const int l = l0 + threadIdx.x;
        if (threadIdx.x < BIG && l < a.n_l) {
            float best = -1e37f;
            for (int n = 0; n < 2; n++) {
                best = fmaxf(best, running[n][threadIdx.x].x);
            }
            float s = 0.0f;
            for (int n = 0; n < 2; n++) {
                s += running[n][threadIdx.x].y * expf(running[n][threadIdx.x].x - best);
            }
            ((float *)a.out)[l * a.out_l + t * a.out_t] = s == 0.0f ? -INFINITY : best + logf(s);
        }
    }
}

/* The tiles one block of the backward goes through (those that begin before the end), and whose
 * gradients it makes. */
struct task {
    int l_begin, l_end, m_begin, m_end; /* 32 bits do: the launcher takes no more */
    bool of_value, of_loc, of_sums; /* of_sums: all samples pass by, scale and weights are known */
    int t;                          /* here it holds no register */
};

struct pair_tile {
    int l0, m0; /* its first sample and component */
};

/* G of 4 rows and 2 columns of a thread's part, zeros where there are none.  from: where the first is; left:
 * rows and columns from there on; packed: both columns are there, side by side. */
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

/* pair_weight of a cosine that is not too coarse, nor too near 1 to be far; slope is without slope_beside(). */
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

/* What the slope of scale has beside what is summed: it is the same for all of a component. */
template <bool MIXTURE, bool FINE>
static __device__ inline double
slope_beside(const struct component &c) {
    return MIXTURE ? (double)c.near : FINE ? (double)c.far : 0.0;
}

/* Where sums of G and of G times the slope of scale over a quarter of the rows are: number 2 quarter + which. */
static __device__ inline double *
tile_sums(float *w, int n) {
    static_assert(8 * BIG * 2 <= WEIGH_SLICE, "they lie where the second slice of a product will");
    return (double *)(w + W_ROOM + WEIGH_SLICE) + n * BIG;
}

/* Puts weights W into w, in place of gaps or, if FINE, from cosines of which none is too coarse; and sums over the
 * samples of each component to tile_sums(): two rows in float, all else in double, as gradients cancel. */
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
    const int rows_left = (int)(a.n_l - l); /* or less than none */
    int columns_left = (int)(a.n_m - m);
    float of_row[4] = {}; /* the largest weights */
    /* made here, or there are eight addresses of each, for which there are no registers */
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
        if (!MIXTURE && j < 7) { /* they come while these are used */
            load_grads(next, a, from, rows_left, columns_left, packed);
        }
        double all[4] = {}; /* of either column, G and G times the slope */
        float two[4];       /* the same of two rows */
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

/* The weights of a tile, from its cosines; wild as put_gaps has it. */
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

/* What store_row would put there, and what is there. */
static __device__ inline void
add_row(patch acc, const float *from, int r) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 before = *(const float2 *)(from + 8 * j);
        acc[r / 2][j][r % 2 * 2] += before.x;
        acc[r / 2][j][r % 2 * 2 + 1] += before.y;
    }
}

/* 128 x 128 of a gradient; add: to what this same thread wrote there before. */
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

/* Which gradient the n-th product of a tile makes, and of which columns. */
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

/* W of each tile is made once, in shared memory, and serves both gradients.  Where a gradient gets
 * parts from several tiles, the same thread adds them in order. */
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
    __shared__ struct pair_tile at; /* where the loops are: there it holds no registers */
    float *room = w + W_ROOM;
    const int dim = (int)a.dim;
    const bool mixture = a.log_weights.p != 0;
    for (int m0 = k.m_begin; m0 < k.m_end && k.l_begin < k.l_end; m0 = at.m0 + BIG) {
        for (int l0 = k.l_begin; l0 < k.l_end; l0 = at.l0 + BIG) {
            stage_views(a, both, l0, m0, k.t);
            at.l0 = l0; /* all write the same, after a barrier and before one */
            at.m0 = m0;
            pair_start(w, both[0], both[1], dim);
            wild = false; /* barriers are ahead */
            if (threadIdx.x >= BIG) {
                samp[threadIdx.x - BIG] = load_sample(a, l0 + threadIdx.x - BIG, k.t, mixture);
                low = ps_low(a.dim); /* all write the same */
            } else if (l0 == k.l_begin) {
                comp[threadIdx.x] = load_component(a, m0 + threadIdx.x, k.t, mixture);
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
        }
        const int m = at.m0 + threadIdx.x;
        if (!k.of_sums || threadIdx.x >= BIG || m >= a.n_m) {
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

/* blocks: (1, t), each with all gradients, or (components / 128 + samples / 128, t), each with those
 * of 128 components or samples (only the kinds that are wanted), all of the other kind passing by */
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
        k.t = t; /* all write the same */
        __syncthreads();
        backward_tiles(a, k);
    }
}

#endif
