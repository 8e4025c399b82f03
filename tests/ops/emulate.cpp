// The CUDA kernels on the CPU, behind the driver's own interface: blocks run one after another, the
// threads of a block are fibers that switch at barriers and warp shuffles.  A barrier that not all
// threads of a block reach, or a shuffle that not all lanes of a warp reach, aborts.  So that what
// hardware does not promise shows: warps and blocks take turns in an order that changes, shared memory
// begins as NaN and ends at a page that nobody may touch, pairs have to be aligned.
// Long because it is all that the kernels use of CUDA.
#include <algorithm>
#include <climits>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

struct emu_dim {
    unsigned x, y, z;
};
static emu_dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static float emu_shuffle(float x, int mask);
static void emu_barrier();
static float *emu_dynamic();
static void tf32_multiply(float c[4], const float a[4], const float b[2]);
static void half_multiply(float c[4], const unsigned a[4], const unsigned b[2]);
static float
exp2_near(float x) {
    return exp2f(x);
}
static unsigned half_pack(float low, float high);
static void half_unpack(unsigned both, float *low, float *high);
template <bool TRANSPOSED> static void matrix_load(unsigned out[4], const unsigned *row);
static bool any_lane(bool x);
static float reciprocal_about(float x);
static float __saturatef(float x);
static void async_copy(float *to, const float *from, int n);
static void async_commit();
template <int N> static void async_wait();
static unsigned long long
atomicCAS(unsigned long long *at, unsigned long long seen, unsigned long long next);

#define PYA_EMULATE 1
#define PYA_SHUFFLE(x, mask) emu_shuffle(x, mask)
#define __global__
#define __device__
#define __shared__ static __attribute__((section("emu_shared")))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __syncthreads() emu_barrier()
#define __fmul_rn(x, y) ((x) * (y))
#define __threadfence()
#define __syncwarp()
#define make_float4(...) (float4{__VA_ARGS__})
#define PYA_LOAD_ONCE(p) (*(p))
#define PYA_LOAD_SHARED(p) (*(p))
#define PYA_STORE_ONCE(p, x) (*(p) = (x))
#define __fdividef(x, y) ((x) / (y))
#define __expf(x) expf(x)
#define __ffs(x) __builtin_ffs(x)
static float __int_as_float(int x);
static int __float_as_int(float x);
#include PYA_KERNELS

enum { STACK = 96 << 10, LANES = 32 };

struct copy {
    float *to;
    float value[4];
};
struct fiber {
    ucontext_t context; // to start in
    jmp_buf place;      // to go on from
    std::vector<char> stack;
    bool started, done;
    unsigned barriers; // reached so far
    unsigned shuffles;
    std::vector<std::vector<copy>> groups; // of copies under way; the last is open
};
static std::vector<fiber> fibers;
static jmp_buf scheduler_place; // switching by these asks nothing of the kernel, swapcontext does
static unsigned current;
struct lane {
    float x;
    float a[4], b[2];
    unsigned words[6];
    const unsigned *row;
};
static lane lanes[1024 / LANES][2][LANES];
static float *dynamic;
extern "C" char __start_emu_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((visibility("hidden")));
static void (*entry)(const void *);
static const void *argument;

static void
emu_yield() {
    if (_setjmp(fibers[current].place) == 0) {
        _longjmp(scheduler_place, 1);
    }
}

static void
emu_barrier() {
    fibers[current].barriers++;
    emu_yield();
}

// What all lanes of the warp gave, once they are all here.
static const lane *
emu_exchange(const lane &mine) {
    const unsigned warp = current / LANES;
    const unsigned turn = fibers[current].shuffles % 2;
    lanes[warp][turn][current % LANES] = mine;
    fibers[current].shuffles++;
    emu_yield();
    return lanes[warp][turn];
}

static float
emu_shuffle(float x, int mask) {
    lane mine = {};
    mine.x = x;
    const lane *all = emu_exchange(mine);
    return all[(current % LANES) ^ (unsigned)mask].x;
}

static bool
any_lane(bool x) {
    lane mine = {};
    mine.x = x ? 1.0f : 0.0f;
    const lane *all = emu_exchange(mine);
    return std::any_of(all, all + LANES, [](const lane &one) { return one.x != 0.0f; });
}

static float
reciprocal_about(float x) {
    return 1.0f / x;
}

// No number becomes zero, as on the card.
static float
__saturatef(float x) {
    return x > 0.0f ? fminf(x, 1.0f) : 0.0f;
}

static float *
emu_dynamic() {
    return dynamic;
}

// Copies arrive as late as they may: at the wait.  Until then the place holds NaN, so that who reads
// too early, or still reads what a copy replaces, is found out.
static void
async_copy(float *to, const float *from, int n) {
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0 || n < 0 || n > 4) {
        fprintf(stderr, "emulation: async_copy of %d numbers, or misaligned\n", n);
        abort();
    }
    copy c = {to, {}};
    for (int i = 0; i < 4; i++) {
        c.value[i] = i < n ? from[i] : 0.0f;
        to[i] = NAN;
    }
    fibers[current].groups.back().push_back(c);
}

static void
async_commit() {
    fibers[current].groups.emplace_back();
}

template <int N>
static void
async_wait() {
    std::vector<std::vector<copy>> &groups = fibers[current].groups;
    while (groups.size() > N + 1) {
        for (const copy &c : groups.front()) {
            memcpy(c.to, c.value, sizeof c.value);
        }
        groups.erase(groups.begin());
    }
}

// Blocks run one after another.
static unsigned long long
atomicCAS(unsigned long long *at, unsigned long long seen, unsigned long long next) {
    const unsigned long long found = *at;
    *at = found == seen ? next : found;
    return found;
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
// and on the harsh side of it: products are exact, all terms are lined up under the largest exponent,
// what lies below its 24 bits is cut off, and so is what the sum has more.
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

// The lanes' parts of a, b and c lie as the PTX manual says for mma.m16n8k8 with .tf32; of an operand
// the 13 lowest bits are not read.
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

// To half precision, to nearest, ties to even; what is over its largest number becomes infinite.
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

// As the PTX manual says for mma.m16n8k16 with .f16.  Cards that have it here add 8 or 16 products at once,
// so that four at a time cut off more than they do.
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

static void
emu_thread() {
    entry(argument);
    fibers[current].done = true;
    emu_yield();
}

// Whether the lanes of its warp that still run have all come as far as this thread.
static bool
emu_may_run(unsigned n) {
    const size_t warp = n / LANES * LANES;
    for (size_t i = warp; i < warp + LANES && i < fibers.size(); i++) {
        if (!fibers[i].done && fibers[i].shuffles < fibers[n].shuffles) {
            return false;
        }
    }
    return true;
}

static void
emu_resume(unsigned n) {
    current = n;
    threadIdx = {n, 0, 0};
    if (_setjmp(scheduler_place) != 0) {
        return;
    }
    if (fibers[n].started) {
        _longjmp(fibers[n].place, 1);
    }
    fibers[n].started = true;
    setcontext(&fibers[n].context);
}

// Begins anywhere and goes either way, another one each time.
struct order {
    unsigned first, step, n;
    explicit order(unsigned n_all) {
        static uint32_t state = 1;
        state = state * 1664525u + 1013904223u;
        n = n_all;
        first = (state >> 8) % n;
        step = state >> 31 != 0 ? 1 : n - 1;
    }
    unsigned operator[](unsigned i) const {
        return (unsigned)((first + (uint64_t)i * step) % n);
    }
};

// Runs a warp as far as it gets without passing a barrier; whether any thread moved.
static bool
emu_warp(unsigned first, unsigned barriers) {
    const order lane(LANES);
    bool moved = false;
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = 0; i < LANES; i++) {
            const unsigned n = first + lane[i];
            if (n < fibers.size() && !fibers[n].done && fibers[n].barriers == barriers &&
                emu_may_run(n)) {
                emu_resume(n);
                again = moved = true;
            }
        }
    }
    return moved;
}

static void
emu_block(unsigned n_threads) {
    fibers.resize(n_threads);
    for (fiber &f : fibers) {
        f.started = f.done = false;
        f.barriers = f.shuffles = 0;
        f.groups.assign(1, {});
        f.stack.resize(STACK);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, emu_thread, 0);
    }
    for (;;) {
        unsigned least = UINT_MAX; // barriers reached by whoever still runs
        for (const fiber &f : fibers) {
            least = !f.done && f.barriers < least ? f.barriers : least;
        }
        if (least == UINT_MAX) {
            return;
        }
        bool moved = false;
        const order warp((n_threads + LANES - 1) / LANES);
        for (unsigned i = 0; i < warp.n; i++) {
            moved |= emu_warp(warp[i] * LANES, least);
        }
        if (!moved) {
            fprintf(stderr, "emulation: a barrier or shuffle that not all threads reach\n");
            abort();
        }
    }
}

#include "emulate_products.cpp"

struct kernel {
    const char *name;
    void (*run)(const void *);
};
#define EMU_KERNEL(name, type)                                                                     \
    {                                                                                              \
#name, [](const void *p) { name(*(const struct type *)p); }                                \
    }
static const kernel kernels[] = {
    EMU_KERNEL(pya_ps_forward, pya_ops_ps),
    EMU_KERNEL(pya_ps_mixture_forward, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_loc, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_value, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_sum, pya_ops_ps),
    EMU_KERNEL(pya_ps_forward_thin, pya_ops_ps),
    EMU_KERNEL(pya_ps_forward_few, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_thin, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_few, pya_ops_ps),
#ifdef PYA_TENSOR
    EMU_KERNEL(pya_ps_forward_tensor, pya_ops_ps),
    EMU_KERNEL(pya_ps_mixture_forward_tensor, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_tensor, pya_ops_ps),
    EMU_KERNEL(test_multiply, pya_ops_ps),
    EMU_KERNEL(test_pairs, pya_ops_ps),
    EMU_KERNEL(test_half_multiply, pya_ops_ps),
    EMU_KERNEL(test_matrices, pya_ops_ps),
    EMU_KERNEL(test_halves, pya_ops_ps),
    EMU_KERNEL(test_weigh_rows, pya_ops_ps),
    EMU_KERNEL(test_weigh_columns, pya_ops_ps),
    EMU_KERNEL(test_weigh_rows_plainly, pya_ops_ps),
    EMU_KERNEL(test_weigh_columns_plainly, pya_ops_ps),
    EMU_KERNEL(test_big, pya_ops_ps),
    EMU_KERNEL(test_forgotten_barrier, pya_ops_ps),
    EMU_KERNEL(pya_attention_forward_64_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_forward_128_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_q_64_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_q_128_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_keys_64_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_keys_128_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_bias_64_tensor, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_bias_128_tensor, pya_ops_attention),
#endif
    EMU_KERNEL(pya_additive_forward, pya_ops_additive),
    EMU_KERNEL(pya_additive_merge, pya_ops_additive),
    EMU_KERNEL(pya_additive_backward_values, pya_ops_additive),
    EMU_KERNEL(pya_additive_backward_keys, pya_ops_additive),
    EMU_KERNEL(pya_attention_forward, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_delta, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_q, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_k, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_v, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_bias, pya_ops_attention),
};

// As with CUDA: the thread that opened this has a context, others have none until one is set.
enum { INVALID_CONTEXT = 201 };
static thread_local void *context;
static const bool opened = (context = (void *)kernels) != nullptr;

extern "C" int
cuCtxGetCurrent(void **out) {
    *out = context;
    return 0;
}

extern "C" int
cuCtxSetCurrent(void *to) {
    context = to;
    return 0;
}

extern "C" int
cuModuleLoadData(void **module, const void *) {
    if (context == nullptr) {
        return INVALID_CONTEXT;
    }
    *module = (void *)kernels;
    return 0;
}

extern "C" int
cuModuleGetFunction(void **function, void *, const char *name) {
    for (const kernel &k : kernels) {
        if (strcmp(k.name, name) == 0) {
            *function = (void *)&k;
            return 0;
        }
    }
    return 500;
}

// A kernel gets more than 48 KiB only if it was asked for.
static std::map<void *, unsigned> allowed;
static int most = 227 << 10;

// How much the device has: tests make it smaller.
extern "C" void
emu_limit_shared(int bytes) {
    most = bytes;
}

extern "C" int
cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > most) {
        return 1;
    }
    allowed[function] = (unsigned)value;
    return 0;
}

// What a block finds there is whatever the one before left, so nothing that a kernel could use.
static void
emu_fill_shared(unsigned shared) {
    enum { MOST = 256 << 10, PAGE = 4096 };
    static char *const room = (char *)mmap(
        nullptr, MOST + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static const int guarded = mprotect(room + MOST, PAGE, PROT_NONE);
    if (room == MAP_FAILED || guarded != 0 || shared > MOST || shared % 16 != 0) {
        abort();
    }
    dynamic = (float *)(room + MOST - shared);
    memset(dynamic, 0xff, shared);
    memset(__start_emu_shared, 0xff, (size_t)(__stop_emu_shared - __start_emu_shared));
}

// The most blocks of a launch, and whether launches are only looked at.
static emu_dim largest;
static bool is_idle;

// As if a grid's second index ended there: what is beyond, blocks walk.
static unsigned most_y = 65535;

extern "C" void
emu_limit_y(unsigned blocks) {
    most_y = blocks;
}

extern "C" void
emu_only_look(bool is_on) {
    is_idle = is_on;
    largest = {};
}

extern "C" unsigned
emu_blocks(int of_y) {
    return of_y ? largest.y : largest.x;
}

extern "C" int
cuLaunchKernel(
    void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
    unsigned shared, void *, void **arguments, void **) {
    if (context == nullptr) {
        return INVALID_CONTEXT;
    }
    if ((shared > 48 << 10 && shared > allowed[function]) || x > INT_MAX || y > 65535 ||
        z > 65535) {
        return 1;
    }
    y = y < most_y ? y : most_y;
    largest = {x > largest.x ? x : largest.x, y > largest.y ? y : largest.y, z};
    if (is_idle) {
        return 0;
    }
    entry = ((const kernel *)function)->run;
    argument = arguments[0];
    gridDim = {x, y, z};
    blockDim = {threads, 1, 1};
    const order block(x * y * z);
    for (unsigned n = 0; n < block.n; n++) {
        const unsigned i = block[n];
        blockIdx = {i % x, i / x % y, i / x / y};
        emu_fill_shared(shared);
        emu_block(threads);
    }
    return 0;
}
