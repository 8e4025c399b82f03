/* The heap under test, its devices, and the naive model of what lives there. */
#pragma once

#include "core/heap.h"
#include "device/sim.h"
#include "fault.h"
#include "fuzz.h"
#include "stat.h"

enum {
    N_DEVICES = 2,
    N_STREAMS = 4,
    N_POOLS = 3,
    MAX_LIVE = 192,
    N_GONE = 8,
    MAX_OPS = 2000,
    HOOK_DEPTH = 3,
    MAX_IMPORTS = 4,
    MAX_KERNELS = 64,
    MAX_PLACES = 256
};

struct live {
    pya_dptr ptr;
    size_t requested, bytes; /* bytes: of the block, as the heap reports it */
    int device;
    pya_stream stream;
    bool is_used;   /* by one stream; another's work would be a race in the program */
    size_t n_place; /* in the device's plan, from 1 on; 0: none */
};

struct pool {
    size_t n_users;
    bool is_active, is_capturing;
    pya_stream stream; /* of the capture; UINT64_MAX: all of them */
};

struct kernel {
    int device;
    struct pya_pool_id pool;
    pya_dptr ptr;
    uint64_t page; /* there */
};

struct world {
    struct fuzz_input in;
    const uint8_t *begin;    /* of the input */
    const uint8_t *again_at; /* position of the latest op_again() */
    unsigned n_again;        /* how often it still goes back */
    struct pya_heap *heap;
    struct pya_sim *sims[N_DEVICES];
    struct pya_sim_config configs[N_DEVICES];
    struct pya_device_ops device_ops[N_DEVICES]; /* the sims' own, except for waiting */
    pya_status (*device_sync)(struct pya_device *dev);
    bool has_pressure;  /* hooks free and allocate during a request */
    bool has_meanwhile; /* others run while somebody waits */
    bool is_meanwhile;  /* they run: a live block's taker may not know of it yet */
    struct pya_options options;
    struct plan *plan; /* NULL: not in this run */
    bool is_rehearsal; /* the plan is being made */
    struct pya_layout layout;
    struct pya_layout_place places[MAX_PLACES];
    struct live live[MAX_LIVE + 2 * HOOK_DEPTH]; /* hooks allocate beyond */
    size_t n_live;
    pya_dptr gone[N_GONE];     /* freed lately */
    struct live freed[N_GONE]; /* the same, with their addresses */
    pya_dptr imports[MAX_IMPORTS];
    size_t n_imports;
    struct pool pools[N_DEVICES][N_POOLS];
    struct kernel kernels[MAX_KERNELS];
    size_t n_kernels;
    size_t n_filters; /* not dropped yet */
    size_t n_contexts;
    bool has_foreign;  /* streams that are not asked and may count as capturing */
    bool has_imported; /* at some time; the pages live as long as their imports */
    bool no_split;     /* of a pool: blocks may be larger than requested */
    bool may_fail;     /* device calls were made to fail at some time */
    bool may_refuse;   /* they were made to return "not supported" or "a capture forbids it" */
    bool is_wide;      /* the input also chooses rarer settings and operations */
    bool has_places;   /* contexts can be told apart and described */
    bool may_fork;     /* one child in a run */
    bool is_child;
    uint64_t kept[N_DEVICES];           /* pya_reserve() */
    uint32_t captured[N_DEVICES];       /* bit per stream: captured by hand */
    int contexts[N_DEVICES][N_STREAMS]; /* device of the stream that uses the first one's memory */
    uint32_t noted;                     /* bit per stream: the heap was told its device */
    bool has_host_fault;                /* now */
    unsigned open_fails;                /* openings of devices to go */
    unsigned depth;                     /* of hooks */
    size_t n_host;                      /* allocations before the run */
};

/* What one run requested, as the places for the next. */
struct plan {
    struct pya_layout_place places[N_DEVICES][MAX_PLACES];
    uint64_t freed[N_DEVICES][MAX_PLACES]; /* requests before it; 0: it stays */
    size_t n[N_DEVICES], n_large[N_DEVICES];
    pya_stream stream[N_DEVICES];
    struct pya_layout layouts[N_DEVICES];
};

static inline pya_stream
stream_of(unsigned i) {
    return 16 * (pya_stream)(i % N_STREAMS);
}
