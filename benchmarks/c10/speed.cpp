/* What one request costs through c10's interface: patterns of live sets, threads, and the slowest of many. */
#include "interface.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

namespace {

using clock_type = std::chrono::steady_clock;

constexpr size_t BATCH = 200; /* operations timed together: the clock costs as much as a request */

double
since(clock_type::time_point began) {
    return std::chrono::duration<double, std::nano>(clock_type::now() - began).count();
}

/* Processor time of this thread: in wall time the slowest of a million pairs is another process's turn. */
double
thread_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

/* splitmix64 */
uint64_t
random_next(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A block held through one of the two interfaces. */
struct held {
    void *ptr;
    c10_deleter_fn deleter; /* of a DataPtr; nullptr for a raw block */
};

held
take(size_t bytes, bool data_ptr) {
    if (!data_ptr) {
        return {
            c10_method<c10_alloc_fn>(c10_it.raw_alloc_with_stream)(c10_it.object, bytes, nullptr),
            nullptr};
    }
    c10_data_ptr made;
    c10_method<c10_allocate_fn>(c10_it.allocate)(&made, c10_it.object, bytes);
    void *deleter = c10_it.deleter_is_third ? made.third : made.second;
    held block = {c10_it.deleter_is_third ? made.second : made.third, nullptr};
    std::memcpy(&block.deleter, &deleter, sizeof deleter);
    return block;
}

void
give(const held &block) {
    if (block.deleter != nullptr) {
        block.deleter(block.ptr);
    } else {
        c10_method<c10_delete_fn>(c10_it.raw_delete)(c10_it.object, block.ptr);
    }
}

/* Which block a step replaces, and how large the new one is: drawn before the clock starts. */
struct choice {
    size_t index;
    size_t bytes;
};

/* n_live blocks of 1 .. max_bytes bytes (equal: all of max_bytes); a step replaces a random one, or with lifo the
 * whole set is freed backwards and taken again. */
struct workload {
    uint64_t n_live;
    uint64_t max_bytes;
    int equal;
    int lifo;
    int data_ptr;

    size_t size(uint64_t *rng) const {
        return equal != 0 ? max_bytes : 1 + random_next(rng) % max_bytes;
    }

    choice choose(uint64_t *rng) const {
        size_t index = lifo != 0 ? n_live - 1 : random_next(rng) % n_live;
        return {index, size(rng)};
    }

    void step(std::vector<held> &blocks, const choice &chosen) const {
        held &block = blocks[chosen.index];
        give(block);
        block = take(chosen.bytes, data_ptr != 0);
    }
};

void
fill(const workload &work, std::vector<held> &blocks, uint64_t *rng) {
    while (blocks.size() < work.n_live) {
        blocks.push_back(take(work.size(rng), work.data_ptr != 0));
    }
}

void
empty(std::vector<held> &blocks) {
    while (!blocks.empty()) {
        give(blocks.back());
        blocks.pop_back();
    }
}

/* The 99.999th percentile of n steps, each timed alone. */
template <typename Step>
double
slowest_ns(uint64_t n, Step step) {
    std::vector<double> single(n);
    for (double &ns : single) {
        ns = step();
    }
    std::sort(single.begin(), single.end());
    return single[n - 1 - n / 100000];
}

/* The same of steps that last as long but ask no allocator: what interrupts and other processes do to any program. */
double
machine_ns(uint64_t n, double step_ns, const std::vector<held> &blocks, uint64_t *rng) {
    constexpr uint64_t TRIAL = 100000;
    uintptr_t sum = 0;
    auto read = [&](uint64_t times) {
        double began = thread_ns();
        for (uint64_t i = 0; i < times; i++) {
            sum += reinterpret_cast<uintptr_t>(blocks[random_next(rng) % blocks.size()].ptr);
        }
        return thread_ns() - began;
    };
    auto times = static_cast<uint64_t>(step_ns * TRIAL / read(TRIAL)) + 1;
    double slowest = slowest_ns(n, [&] { return read(times); });
    static volatile uintptr_t used; /* else the reads might be left out */
    used = sum;
    return slowest;
}

/* Threads with a live set each, for a time: adds what each has done to pairs; wall time x cores in use over all pairs. */
double
threads_turn(const workload *work, unsigned n_cores, double seconds, std::vector<uint64_t> &pairs) {
    std::atomic<bool> stop{false};
    std::atomic<uint64_t> all{0};
    std::vector<std::thread> threads;
    auto n_threads = static_cast<unsigned>(pairs.size());
    auto began = clock_type::now();
    for (unsigned t = 0; t < n_threads; t++) {
        threads.emplace_back([&, t] {
            uint64_t rng = t + 1;
            uint64_t done = 0;
            std::vector<held> blocks;
            fill(*work, blocks, &rng);
            while (!stop.load(std::memory_order_relaxed)) {
                work->step(blocks, work->choose(&rng));
                done++;
            }
            empty(blocks);
            pairs[t] += done;
            all += done;
        });
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop.store(true);
    for (std::thread &thread : threads) {
        thread.join();
    }
    return since(began) * std::min(n_threads, n_cores) / static_cast<double>(all.load());
}

} // namespace

/* Several allocators in processes of their own take turns: wait() returns when the next one is ours. */
struct c10_turns {
    uint64_t n;
    void (*wait)();
    double *ns; /* of each: one allocate and one free together */
};

struct c10_speed {
    double p99_ns;      /* of batches */
    double worst_ns;    /* single pair, processor time: 99.999th percentile, only with tail */
    double machine_ns;  /* the same of as long a step that asks no allocator */
    double least_share; /* threads: pairs of the slowest over the mean */
    uint64_t n;
};

/* n pairs in batches, after as many to settle; a turn's figure is the median of its batches. */
EXPORT void
c10_pairs(
    const workload *work, uint64_t n, uint64_t seed, int tail, const c10_turns *turns,
    c10_speed *out) {
    uint64_t rng = seed;
    std::vector<held> blocks;
    fill(*work, blocks, &rng);
    for (uint64_t i = 0; i < n; i++) {
        work->step(blocks, work->choose(&rng));
    }
    std::vector<double> batches;
    std::vector<choice> chosen(BATCH);
    for (uint64_t turn = 0; turn < turns->n; turn++) {
        turns->wait();
        auto first = static_cast<std::ptrdiff_t>(batches.size());
        for (uint64_t i = 0; i < n / turns->n; i += BATCH) {
            for (choice &one : chosen) {
                one = work->choose(&rng);
            }
            auto began = clock_type::now();
            for (const choice &one : chosen) {
                work->step(blocks, one);
            }
            batches.push_back(since(began) / BATCH);
        }
        std::sort(batches.begin() + first, batches.end());
        turns->ns[turn] = batches[(static_cast<size_t>(first) + batches.size()) / 2];
    }
    std::sort(batches.begin(), batches.end());
    *out = {batches[batches.size() * 99 / 100], 0, 0, 0, n};
    if (tail != 0) {
        out->worst_ns = slowest_ns(n, [&] {
            const choice one = work->choose(&rng);
            double began = thread_ns();
            work->step(blocks, one);
            return thread_ns() - began;
        });
        out->machine_ns = machine_ns(n, batches[batches.size() / 2], blocks, &rng);
    }
    empty(blocks);
}

EXPORT void
c10_threads(
    const workload *work, unsigned n_threads, unsigned n_cores, double seconds,
    const c10_turns *turns, c10_speed *out) {
    std::vector<uint64_t> pairs(n_threads);
    for (uint64_t turn = 0; turn < turns->n; turn++) {
        turns->wait();
        turns->ns[turn] =
            threads_turn(work, n_cores, seconds / static_cast<double>(turns->n), pairs);
    }
    uint64_t all = 0;
    for (uint64_t n : pairs) {
        all += n;
    }
    double mean = static_cast<double>(all) / n_threads;
    double least = static_cast<double>(*std::min_element(pairs.begin(), pairs.end()));
    *out = {0, 0, 0, least / mean, all};
}
