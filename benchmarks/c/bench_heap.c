/* The allocator alone, without torch: nanoseconds per allocate + free pair on the simulated device.
 *
 * Each row is checked first: the statistics must come back to where they were.  The figures that count are
 * those of `python -m benchmarks.speed`, through torch; this is for work on the core. */
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "core/pyalloc.h"
#include "device/sim.h"

enum { MAX_BLOCKS = 1 << 20, ROUNDS = 5 };

static struct pya_heap *heap;
static pya_dptr blocks[MAX_BLOCKS];

static pya_status
open_sim(void *arg, int index, struct pya_device **out) {
    const struct pya_sim_config config = {
        .capacity_bytes = (size_t)1 << 40, .address_bytes = (uint64_t)1 << 45};
    struct pya_sim *sim;
    (void)arg;
    pya_status st = pya_sim_create(&config, index, &sim);
    if (st == PYA_OK) {
        *out = pya_sim_device(sim);
    }
    return st;
}

static uint64_t
random_next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static int
compare_doubles(const void *a, const void *b) {
    const double *x = a;
    const double *y = b;
    return (*x > *y) - (*x < *y);
}

/* n_live blocks of random sizes up to max_bytes stay; each step frees one and allocates another. */
static void
bench(const char *name, size_t n_live, size_t max_bytes, bool is_lifo, size_t n_steps) {
    double ns[ROUNDS];
    uint64_t seed = 88172645463325252U;
    for (size_t i = 0; i < n_live; i++) {
        size_t bytes = is_lifo ? max_bytes : 1 + random_next(&seed) % max_bytes;
        if (pya_alloc(heap, 0, bytes, 0, &blocks[i]) != PYA_OK) {
            exit(1);
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        double start = now_ns();
        for (size_t i = 0; i < n_steps; i++) {
            size_t k = is_lifo ? i % n_live : random_next(&seed) % n_live;
            size_t bytes = is_lifo ? max_bytes : 1 + random_next(&seed) % max_bytes;
            if (pya_free(heap, blocks[k]) != PYA_OK ||
                pya_alloc(heap, 0, bytes, 0, &blocks[k]) != PYA_OK) {
                exit(1);
            }
        }
        ns[round] = (now_ns() - start) / (double)n_steps;
    }
    for (size_t i = 0; i < n_live; i++) {
        if (pya_free(heap, blocks[i]) != PYA_OK) {
            exit(1);
        }
    }
    if (pya_heap_check(heap, 0) != 0 || pya_empty_cache(heap, 0) != PYA_OK) {
        exit(1);
    }
    qsort(ns, ROUNDS, sizeof ns[0], compare_doubles);
    printf("%-34s %8.1f ns/pair (%.1f to %.1f)\n", name, ns[ROUNDS / 2], ns[0], ns[ROUNDS - 1]);
}

int
main(void) {
    struct pya_options options;
    struct pya_hooks hooks = {.open_device = open_sim};
    pya_options_init(&options);
    if (pya_heap_create(&options, &hooks, &heap) != PYA_OK) {
        return 1;
    }
    bench("one size (4 KiB)", 1, 4096, true, 2000000);
    bench("64 live, one size", 64, 4096, true, 2000000);
    bench("1000 live random up to 1 MiB", 1000, 1 << 20, false, 500000);
    bench("300 live random up to 32 MiB", 300, 32 << 20, false, 500000);
    bench("100000 live random up to 1 MiB", 100000, 1 << 20, false, 500000);
    bench("1000000 live random up to 64 KiB", 1000000, 1 << 16, false, 500000);
    pya_heap_destroy(heap);
    return 0;
}
