#pragma once
// Part of emulate.cpp: blocks and their threads, which are fibers that switch at barriers and warp shuffles.  A barrier
// that not all threads of a block reach, or a shuffle that not all lanes of a warp reach, aborts.  To expose reliance on
// what hardware does not promise, warps take turns in a varying order, and shared memory begins as NaN and ends at a
// page that nobody may touch.

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
    unsigned votes;
    bool vote[2];
    std::vector<std::vector<copy>> groups; // of copies in flight; the last group is open
};
static std::vector<fiber> fibers;
static jmp_buf scheduler_place; // switches without the kernel, unlike swapcontext
static unsigned current;
struct lane {
    float x;
    float a[4], b[2];
    unsigned words[6];
    const unsigned *row;
};
static lane lanes[1024 / LANES][2][LANES];
static float *dynamic;
static unsigned dynamic_bytes;
extern "C" char __start_emu_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((visibility("hidden")));
static void (*entry)(const void *);
static const void *argument;

// Whether a kernel is running, and not the emulation: emulate_races.hpp checks only kernels, and must not check itself.
#define RACE_UNSEEN __attribute__((no_sanitize("thread")))
static volatile bool is_kernel;
static unsigned barriers_passed; // by the thread that runs
static const char *stack_now;
struct emulating {
    RACE_UNSEEN emulating() {
        is_kernel = false;
    }
    RACE_UNSEEN ~emulating() {
        is_kernel = true;
    }
};
static void race_look(const void *at, int bytes, bool writes);

static void
emu_yield() {
    if (_setjmp(fibers[current].place) == 0) {
        _longjmp(scheduler_place, 1);
    }
}

static void
emu_barrier() {
    const emulating here;
    fibers[current].barriers++;
    emu_yield();
}

// Others may read a vote until the barrier after this one, so there is room for two.
static int
emu_barrier_or(int x) {
    const unsigned turn = fibers[current].votes++ % 2;
    {
        const emulating here;
        fibers[current].vote[turn] = x != 0;
    }
    emu_barrier();
    const emulating here;
    return std::any_of(
        fibers.begin(), fibers.end(), [=](const fiber &one) { return one.vote[turn]; });
}

// What all lanes of the warp passed, once all have arrived.
static const lane *
emu_exchange(const lane &mine) {
    const emulating here;
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

static float *
emu_dynamic() {
    return dynamic;
}

// Copies arrive as late as they may: at the wait.  Until then the target holds NaN, which exposes a read that comes too
// early, or that still wants what the copy replaces.
static void
async_copy(float *to, const float *from, int n) {
    const emulating here;
    race_look(to, sizeof(float4), true);
    race_look(from, n * (int)sizeof(float), false);
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
    const emulating here;
    fibers[current].groups.emplace_back();
}

template <int N>
static void
async_wait() {
    const emulating here;
    std::vector<std::vector<copy>> &groups = fibers[current].groups;
    while (groups.size() > N + 1) {
        for (const copy &c : groups.front()) {
            race_look(c.to, sizeof c.value, true);
            memcpy(c.to, c.value, sizeof c.value);
        }
        groups.erase(groups.begin());
    }
}

// What other blocks wrote that took their tickets earlier.
template <class T>
static T
emu_load_shared(const T *from) {
    const emulating here;
    return *from;
}

// Blocks run one after another.
static unsigned long long
atomicCAS(unsigned long long *at, unsigned long long seen, unsigned long long next) {
    const emulating here;
    const unsigned long long found = *at;
    *at = found == seen ? next : found;
    return found;
}

static void
emu_thread() {
    is_kernel = true;
    entry(argument);
    is_kernel = false;
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
    barriers_passed = fibers[n].barriers;
    stack_now = fibers[n].stack.data();
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

// Begins anywhere and goes in either direction, a different order each time.
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

// Runs a warp until no thread can go on without passing a barrier; returns whether any thread moved.
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
        f.barriers = f.shuffles = f.votes = 0;
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

// A block finds there what the previous one left: nothing that a kernel could use.
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
    dynamic_bytes = shared;
    memset(dynamic, 0xff, shared);
    memset(__start_emu_shared, 0xff, (size_t)(__stop_emu_shared - __start_emu_shared));
}
