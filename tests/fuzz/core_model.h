/* What the parts of fuzz_core share: the heap under test and the naive model of it. */
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
    MAX_PLACES = 128
};

struct live {
    pya_dptr ptr;
    size_t requested, bytes; /* bytes: of the block, as the heap tells */
    int device;
    pya_stream stream;
    bool is_used; /* by work of one stream: another's beside it would be the
                   program's own race */
};

struct pool {
    size_t n_users;
    bool is_active, is_capturing;
    pya_stream stream; /* of the capture; UINT64_MAX: every one */
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
    const uint8_t *again_at; /* where the latest op_again() stands */
    unsigned n_again;        /* and how often it still goes back */
    struct pya_heap *heap;
    struct pya_sim *sims[N_DEVICES];
    struct pya_sim_config config;
    struct pya_device_ops device_ops; /* the sims', but for waiting */
    pya_status (*device_sync)(struct pya_device *dev);
    bool has_pressure;  /* hooks free and allocate in the midst of a request */
    bool has_meanwhile; /* others go on while somebody waits */
    bool is_meanwhile;  /* they do: a block may be live that its taker does not know of yet */
    struct pya_options options;
    struct pya_layout layout;
    struct pya_layout_place places[MAX_PLACES];
    struct live live[MAX_LIVE + 2 * HOOK_DEPTH]; /* hooks allocate beyond */
    size_t n_live;
    pya_dptr gone[N_GONE];     /* freed lately */
    struct live freed[N_GONE]; /* the same, and where it lay */
    pya_dptr imports[MAX_IMPORTS];
    size_t n_imports;
    struct pool pools[N_DEVICES][N_POOLS];
    struct kernel kernels[MAX_KERNELS];
    size_t n_kernels;
    size_t n_filters; /* not dropped yet */
    size_t n_contexts;
    bool has_foreign;    /* streams that are not asked, and taken to be capturing for
                       a while after they were */
    bool has_imported;   /* at some time: the pages live as long as their imports */
    bool no_split;       /* a pool was told so: blocks may be larger than asked for */
    bool may_fail;       /* device calls were made to fail, at some time */
    bool has_host_fault; /* now */
    unsigned open_fails; /* so many openings of devices */
    unsigned depth;      /* of hooks */
};

static inline pya_stream
stream_of(unsigned i) {
    return 16 * (pya_stream)(i % N_STREAMS);
}

/* PYA_FUZZ_VERBOSE=1 prints what an input does. */
extern bool is_verbose;

#define SAY(...) (is_verbose ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

/* ---- core_model.c ---- */

bool is_capturing(const struct world *world, int device);
bool stream_is_capturing(const struct world *world, int device, pya_stream stream);
/* Is this answer one that something gave a reason for? */
void require_status(struct world *world, int device, pya_status st);
/* is_whole: every structure too, which takes as long as hundreds of operations.
 */
void check_all(struct world *world, bool is_whole);
/* A block was handed out. */
void live_add(struct world *world, struct live live);
/* Work is queued that touches the block, on another stream only once its own is
 * done with what it had before, as a program sees to by an event; what is
 * captured runs later. */
void live_use(struct world *world, struct live *live, pya_stream stream);
/* Contexts as the heap's hooks, counted. */
void *context_capture(void *arg, bool with_stack);
void context_retain(void *arg, void *context);
void context_release(void *arg, void *context);

/* ---- core_graphs.c ---- */

/* A block was handed out. */
void kernels_add(struct world *world, const struct live *live);
/* The pool has no users, or lends its memory. */
void kernels_forget(struct world *world, int device, struct pya_pool_id id);
void kernels_check(const struct world *world);

/* ---- core_pools.c ---- */

struct pya_pool_id pool_id(int i);
void pool_end(struct world *world, int device, int i);
void pool_release(struct world *world, int device, int i);
void op_pool(struct world *world);
extern struct world *filter_world; /* whose filters are dropped */

/* ---- core_calls.c ---- */

void import_close(struct world *world, size_t i);
void op_rare(struct world *world);

/* ---- core_ops.c: each takes what it needs off the input ---- */

/* Many of few sizes, as real programs have, so that exact fits and cached
 * ranges occur; some of any. */
size_t size_of(struct fuzz_input *in);
void op_alloc(struct world *world);
void op_free(struct world *world);
void op_record(struct world *world);
void op_bad_free(struct world *world);
void op_finish(struct world *world);
void op_give_back(struct world *world);
void op_limit(struct world *world);
void op_fault(struct world *world);
void op_history(struct world *world);
void op_snapshot(struct world *world);
void op_query(struct world *world);
void op_steer(struct world *world);
void op_check(struct world *world);
