// The CUDA kernels on the CPU, behind the driver's own interface: the language features that they use, and the driver's
// functions that find and launch them.  It exposes reliance on what hardware does not promise: blocks take turns in a
// varying order, and pairs must be aligned.
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
static int emu_barrier_or(int x);
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
template <class T> static T emu_load_shared(const T *from);

#define PYA_EMULATE 1
#define PYA_SHUFFLE(x, mask) emu_shuffle(x, mask)
#define __global__
#define __device__
#define __shared__ static __attribute__((section("emu_shared")))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __syncthreads() emu_barrier()
#define __syncthreads_or(x) emu_barrier_or(x)
#define __fmul_rn(x, y) ((x) * (y))
#define __threadfence()
#define __syncwarp()
#define make_float4(...) (float4{__VA_ARGS__})
#define PYA_LOAD_ONCE(p) (*(p))
#define PYA_LOAD_SHARED(p) emu_load_shared(p)
#define PYA_STORE_ONCE(p, x) (*(p) = (x))
#define __fdividef(x, y) ((x) / (y))
#define __ffs(x) __builtin_ffs(x)
static float __int_as_float(int x);
static int __float_as_int(float x);
#include PYA_KERNELS

#include "emulate_races.hpp"
#include "emulate_tensor.hpp"
#include "emulate_threads.hpp"

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

// As with CUDA: the thread that opened this has a context, others have none until they set one.
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

// A kernel gets more than 48 KiB only if that was requested.
static std::map<void *, unsigned> allowed;
static int most = 227 << 10;

// The device's limit; tests lower it.
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

// The most blocks of a launch, and whether launches are only inspected.
static emu_dim largest;
static bool is_idle;

// As if a grid's second index ended there: blocks loop over what is beyond.
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
    race_begin(((const kernel *)function)->name);
    for (unsigned n = 0; n < block.n; n++) {
        const unsigned i = block[n];
        blockIdx = {i % x, i / x % y, i / x / y};
        emu_fill_shared(shared);
        race_enter(i);
        emu_block(threads);
        race_settle();
    }
    return 0;
}
