// Part of emulate.cpp: kernels for the tests only, which run single products.
#ifdef PYA_TENSOR
// out (16 x 8) = value (16 x 8) times loc (8 x 8), both row by row, for 32 threads; with dim 1, two
// places of a lane's part of value are swapped, with dim 2 of loc, with dim 3 of out.
static void
test_multiply(struct pya_ops_ps o) {
    const float *x = (const float *)o.value.p;
    const float *y = (const float *)o.loc.p;
    const int g = threadIdx.x / 4;
    const int t = threadIdx.x % 4;
    float a[4] = {x[g * 8 + t], x[(g + 8) * 8 + t], x[g * 8 + t + 4], x[(g + 8) * 8 + t + 4]};
    float b[2] = {y[t * 8 + g], y[(t + 4) * 8 + g]};
    float c[4] = {};
    if (o.dim == 1) {
        std::swap(a[1], a[2]);
    } else if (o.dim == 2) {
        std::swap(b[0], b[1]);
    }
    tf32_multiply(c, a, b);
    if (o.dim == 3) {
        std::swap(c[1], c[2]);
    }
    for (int n = 0; n < 4; n++) {
        ((float *)o.out)[(g + n / 2 * 8) * 8 + 2 * t + n % 2] = c[n];
    }
}

// The same in half precision, value 16 x 16 and loc 16 x 8.
static void
test_half_multiply(struct pya_ops_ps o) {
    const float *x = (const float *)o.value.p;
    const float *y = (const float *)o.loc.p;
    const int g = threadIdx.x / 4;
    const int t = threadIdx.x % 4;
    unsigned a[4];
    unsigned b[2];
    for (int n = 0; n < 4; n++) {
        const float *at = x + (g + n % 2 * 8) * 16 + 2 * t + n / 2 * 8;
        a[n] = half_pack(at[0], at[1]);
    }
    for (int n = 0; n < 2; n++) {
        const float *at = y + (2 * t + n * 8) * 8 + g;
        b[n] = half_pack(at[0], at[8]);
    }
    float c[4] = {};
    if (o.dim == 1) {
        std::swap(a[1], a[2]);
    } else if (o.dim == 2) {
        std::swap(b[0], b[1]);
    }
    half_multiply(c, a, b);
    if (o.dim == 3) {
        std::swap(c[1], c[2]);
    }
    for (int n = 0; n < 4; n++) {
        ((float *)o.out)[(g + n / 2 * 8) * 8 + 2 * t + n % 2] = c[n];
    }
}

// out (4 x 8 x 8), in half precision, = value likewise, each transposed if dim is 1, by matrix_load
static void
test_matrices(struct pya_ops_ps o) {
    __shared__ __align__(16) unsigned x[32][4];
    unsigned got[4];
    for (int k = 0; k < 4; k++) {
        const float *from = (const float *)o.value.p + threadIdx.x * 8 + 2 * k;
        x[threadIdx.x][k] = half_pack(from[0], from[1]);
    }
    __syncthreads();
    if (o.dim == 1) {
        matrix_load<true>(got, x[threadIdx.x]);
    } else {
        matrix_load<false>(got, x[threadIdx.x]);
    }
    for (int n = 0; n < 4; n++) {
        float *to = (float *)o.out + n * 64 + threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2;
        half_unpack(got[n], to, to + 1);
    }
}

// out (2 x n) = the numbers of value to half precision, by the low and by the high half
static void
test_halves(struct pya_ops_ps o) {
    float *const out = (float *)o.out;
    for (int n = threadIdx.x; n < o.n_l; n += THREADS) {
        const float x = ((const float *)o.value.p)[n];
        float other;
        half_unpack(half_pack(x, 1.0f), out + n, &other);
        half_unpack(half_pack(1.0f, x), &other, out + o.n_l + n);
    }
}

static void
test_store(struct pya_ops_ps o, const patch acc) {
    const struct place p = my_place();
    for (int n = 0; n < 64; n++) {
        const int row = tensor_row(p, n / 32, n % 4);
        ((float *)o.out)[row * BIG + tensor_column(p, n / 4 % 8, n % 4)] =
            acc[n / 32][n / 4 % 8][n % 4];
    }
}

// out (128 x 128) = value (n_l x dim) times loc (n_m x dim) transposed
static void
test_pairs(struct pya_ops_ps o) {
    const rows a = view_rows(o.value, 0, 0, o.n_l);
    const rows b = view_rows(o.loc, 0, 0, o.n_m);
    patch acc;
    pair_start(emu_dynamic(), a, b, (int)o.dim);
    pair_finish(acc, emu_dynamic(), a, b, (int)o.dim);
    test_store(o, acc);
}

// out = value (128 x 128) or its transposed times loc (n_m x dim), the first 128 columns
template <bool TRANSPOSED, bool PLAIN>
static void
test_weigh(struct pya_ops_ps o) {
    float *w = emu_dynamic();
    for (int n = threadIdx.x; n < BIG * BIG; n += THREADS) {
        w[n / BIG * W_STRIDE + n % BIG] = ((const float *)o.value.p)[n];
    }
    const rows b = view_rows(o.loc, 0, 0, o.n_m);
    patch acc;
    __syncthreads();
    weigh_start(w + W_ROOM, b, 0, (int)o.dim);
    if (PLAIN) {
        weigh_plain<TRANSPOSED>(acc, w, b, 0, (int)o.dim);
    } else {
        __shared__ largest_weights largest;
        for (int n = threadIdx.x; n < N_LARGEST * BIG; n += THREADS) {
            largest[n / BIG][n % BIG] = 0.0f;
        }
        __syncthreads();
        for (int n = 0; n < BIG && threadIdx.x < BIG; n++) {
            const int i = threadIdx.x;
            float *row = &largest[OF_ROWS + n / (BIG / 2)][i];
            float *column = &largest[OF_COLUMNS + n / (BIG / 4)][i];
            *row = fmaxf(*row, fabsf(w[i * W_STRIDE + n]));
            *column = fmaxf(*column, fabsf(w[n * W_STRIDE + i]));
        }
        __syncthreads();
        weigh_finish<TRANSPOSED>(acc, w, w + W_ROOM, largest, b, 0, (int)o.dim);
    }
    test_store(o, acc);
}

// as test_pairs, in fp32
static void
test_big(struct pya_ops_ps o) {
    float acc[8][8];
    big_multiply(acc, view_rows(o.value, 0, 0, o.n_l), view_rows(o.loc, 0, 0, o.n_m), (int)o.dim);
    for (int n = 0; n < 64; n++) {
        ((float *)o.out)[big_row(n / 8) * BIG + big_column(n % 8)] = acc[n / 8][n % 8];
    }
}

// out = what a thread of the next warp wrote, as a kernel that forgot its barrier reads it
static void
test_forgotten_barrier(struct pya_ops_ps o) {
    __shared__ float x[THREADS];
    for (int n = 0; n < 2; n++) { // in the second round the first one's numbers are there
        x[threadIdx.x] = (float)n;
        ((float *)o.out)[n * THREADS + threadIdx.x] = x[(threadIdx.x + 32) % THREADS];
        __syncthreads();
    }
}

static const auto test_weigh_rows = test_weigh<false, false>;
static const auto test_weigh_columns = test_weigh<true, false>;
static const auto test_weigh_rows_plainly = test_weigh<false, true>;
static const auto test_weigh_columns_plainly = test_weigh<true, true>;
#endif
