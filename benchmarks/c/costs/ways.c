/* As much memory in different ways: pages of ours, one handle as torch's expandable segments take them (20 MiB, 2 MiB
 * of small blocks), and cudaMalloc. */
#include "costs.h"

#include <stdio.h>
#include <string.h>

enum { MOST = 512 };

struct way {
    const char *what;    /* a section of its own among the figures: "way, ..." */
    size_t handle_bytes; /* 0: cuMemAlloc */
    size_t n;
    bool is_bare; /* neither for other processes nor for network cards */
};

static const struct way ways[] = {
    {"way, 2 MiB: a page", PYA_PAGE, 1, false},
    {"way, 2 MiB: a page of no export", PYA_PAGE, 1, true},
    {"way, 2 MiB: cuMemAlloc", 0, 1, false},
    {"way, 20 MiB: 10 pages", PYA_PAGE, 10, false},
    {"way, 20 MiB: 10 pages of no export", PYA_PAGE, 10, true},
    {"way, 20 MiB: one handle", 10 * PYA_PAGE, 1, false},
    {"way, 20 MiB: one handle of no export", 10 * PYA_PAGE, 1, true},
    {"way, 20 MiB: cuMemAlloc", 0, 10, false},
    {"way, 1 GiB: 512 pages", PYA_PAGE, MOST, false},
    {"way, 1 GiB: 64 handles", 8 * PYA_PAGE, 64, false},
    {"way, 1 GiB: one handle", MOST *PYA_PAGE, 1, false},
    {"way, 1 GiB: one handle of no export", MOST *PYA_PAGE, 1, true},
    {"way, 1 GiB: cuMemAlloc", 0, MOST, false},
};
enum { N_WAYS = sizeof ways / sizeof *ways };

static const char *const parts[] = {"create", "map", "set access", "unmap", "release"};
enum { N_PARTS = sizeof parts / sizeof *parts };

static double part_began_ns;

static void
part(const struct way *way, int which) {
    const double now = now_ns();
    costs_add(way->what, parts[which], 0, "us", (now - part_began_ns) / 1e3);
    part_began_ns = now_ns();
}

static void
measure_handles(const struct way *way) {
    static uint64_t handles[MOST];
    const size_t bytes = way->n * way->handle_bytes;
    struct cuda_allocation_prop prop = bench.prop;
    if (way->is_bare) {
        prop.gpu_direct_rdma_capable = 0;
        prop.requested_handle_types = 0;
    }
    const pya_dptr addr = costs_reserve(bytes);
    part_began_ns = now_ns();
    for (size_t i = 0; i < way->n; i++) {
        WANT(cuMemCreate, &handles[i], way->handle_bytes, &prop, 0);
    }
    part(way, 0);
    for (size_t i = 0; i < way->n; i++) {
        costs_map(addr + i * way->handle_bytes, way->handle_bytes, handles[i]);
    }
    part(way, 1);
    costs_set_access(addr, bytes);
    part(way, 2);
    costs_unmap(addr, bytes);
    part(way, 3);
    for (size_t i = 0; i < way->n; i++) {
        costs_release(handles[i]);
    }
    part(way, 4);
    costs_unreserve(addr, bytes);
}

static void
measure_plain(const struct way *way) {
    part_began_ns = now_ns();
    const pya_dptr addr = costs_alloc(way->n * PYA_PAGE);
    part(way, 0);
    costs_free(addr);
    part(way, 4);
}

void
costs_ways(void) {
    const double end = now_ns() + 4e9;
    const int rounds = bench.is_small ? 2 : 9;
    for (int round = 0; round < rounds && (round < 3 || now_ns() < end); round++) {
        for (size_t i = 0; i < N_WAYS; i++) {
            const struct way *way = &ways[i];
            const size_t each = way->handle_bytes == 0 ? PYA_PAGE : way->handle_bytes;
            if (bench.is_small && way->n * each > 10 * PYA_PAGE) {
                continue;
            }
            if (way->handle_bytes == 0) {
                measure_plain(way);
            } else if (bench.has_vmm) {
                measure_handles(way);
            }
        }
    }
    printf("us in all; create and release of cuMemAlloc are itself and cuMemFree\n\n");
    printf("| way | create | map | set access | unmap | release |\n|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < N_WAYS; i++) {
        printf("| %s |", ways[i].what + strlen("way, "));
        for (int which = 0; which < N_PARTS; which++) {
            printf(" %s |", costs_cell(ways[i].what, parts[which], 0, "us", 1));
        }
        printf("\n");
    }
}
