// The CUDA kernels on the CPU, behind the driver's own interface: blocks run one after another, the
// threads of a block are fibers that switch at barriers and warp shuffles.  A barrier that not all
// threads of a block reach, or a shuffle that not all lanes of a warp reach, aborts.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct emu_dim {
    unsigned x, y, z;
};
static emu_dim threadIdx, blockIdx, gridDim;
static float emu_shuffle(float x, int mask);
static void emu_barrier();

#define PYA_EMULATE 1
#define PYA_SHUFFLE(x, mask) emu_shuffle(x, mask)
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() emu_barrier()
#include PYA_KERNELS

enum { STACK = 96 << 10, LANES = 32 };

struct fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    unsigned barriers; // reached so far
    unsigned shuffles;
};
static std::vector<fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static float lanes[1024 / LANES][2][LANES];
static void (*entry)(const void *);
static const void *argument;

static void
emu_yield() {
    swapcontext(&fibers[current].context, &scheduler);
}

static void
emu_barrier() {
    fibers[current].barriers++;
    emu_yield();
}

static float
emu_shuffle(float x, int mask) {
    const unsigned warp = current / LANES;
    const unsigned turn = fibers[current].shuffles % 2;
    lanes[warp][turn][current % LANES] = x;
    fibers[current].shuffles++;
    emu_yield();
    return lanes[warp][turn][(current % LANES) ^ (unsigned)mask];
}

static void
emu_thread() {
    entry(argument);
    fibers[current].done = true;
    emu_yield();
}

// Runs a thread only when whoever it waits for has caught up with it.
static bool
emu_may_run(unsigned n) {
    const fiber &f = fibers[n];
    const size_t warp = n / LANES * LANES;
    for (size_t i = 0; i < fibers.size(); i++) {
        if (!fibers[i].done && fibers[i].barriers < f.barriers) {
            return false;
        }
    }
    for (size_t i = warp; i < warp + LANES && i < fibers.size(); i++) {
        if (!fibers[i].done && fibers[i].shuffles < f.shuffles) {
            return false;
        }
    }
    return true;
}

static void
emu_block(unsigned n_threads) {
    fibers.resize(n_threads);
    for (fiber &f : fibers) {
        f.done = false;
        f.barriers = f.shuffles = 0;
        f.stack.resize(STACK);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, emu_thread, 0);
    }
    for (bool left = true; left;) {
        left = false;
        bool moved = false;
        for (unsigned n = 0; n < n_threads; n++) {
            if (fibers[n].done) {
                continue;
            }
            left = true;
            if (!emu_may_run(n)) {
                continue;
            }
            moved = true;
            current = n;
            threadIdx = {n, 0, 0};
            swapcontext(&scheduler, &fibers[n].context);
        }
        if (left && !moved) {
            fprintf(stderr, "emulation: a barrier or shuffle that not all threads reach\n");
            abort();
        }
    }
}

struct kernel {
    const char *name;
    void (*run)(const void *);
};
#define EMU_KERNEL(name, type)                                                                     \
    { #name, [](const void *p) { name(*(const struct type *)p); } }
static const kernel kernels[] = {
    EMU_KERNEL(pya_ps_forward, pya_ops_ps),
    EMU_KERNEL(pya_ps_mixture_forward, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_loc, pya_ops_ps),
    EMU_KERNEL(pya_ps_backward_value, pya_ops_ps),
    EMU_KERNEL(pya_additive_forward, pya_ops_additive),
    EMU_KERNEL(pya_additive_backward_scores, pya_ops_additive),
    EMU_KERNEL(pya_additive_backward_keys, pya_ops_additive),
    EMU_KERNEL(pya_additive_backward_values, pya_ops_additive),
    EMU_KERNEL(pya_attention_forward, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_delta, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_q, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_k, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_v, pya_ops_attention),
    EMU_KERNEL(pya_attention_backward_bias, pya_ops_attention),
};

extern "C" int
cuModuleLoadData(void **module, const void *) {
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

extern "C" int
cuLaunchKernel(
    void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
    unsigned, void *, void **arguments, void **) {
    entry = ((const kernel *)function)->run;
    argument = arguments[0];
    gridDim = {x, y, z};
    for (unsigned k = 0; k < z; k++) {
        for (unsigned j = 0; j < y; j++) {
            for (unsigned i = 0; i < x; i++) {
                blockIdx = {i, j, k};
                emu_block(threads);
            }
        }
    }
    return 0;
}
