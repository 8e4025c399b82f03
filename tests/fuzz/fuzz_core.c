/* Long because one model answers for every operation.
 *
 * The allocator on the simulated device: the input is a settings byte or two, then operations, held against a naive
 * model after each.
 *
 * What must hold: no two live blocks share a byte, through whatever addresses (the sim's shadow); work of two streams
 * never meets in one block, nothing is unmapped under unfinished work (the sim's races); addresses are aligned; a call
 * fails only where something was made to fail; a failed call changes nothing; statistics are exact; after the last free
 * nothing is left, on the device or in host memory. */
#include "core/heap.h"
#include "core/snapshot.h"
#include "device/sim.h"
#include "fault.h"
#include "fuzz.h"

enum {
    N_DEVICES = 2,
    N_STREAMS = 4,
    N_POOLS = 3,
    MAX_LIVE = 192,
    N_GONE = 8,
    MAX_OPS = 2000,
    HOOK_DEPTH = 3
};

struct live {
    pya_dptr ptr;
    size_t requested, bytes; /* bytes: of the block, as the heap tells */
    int device;
    pya_stream stream;
    bool is_used; /* by work of one stream: another's beside it would be the program's own race */
};

struct pool {
    size_t n_users;
    bool is_active, is_capturing;
    pya_stream stream; /* of the capture; UINT64_MAX: every one */
};

struct world {
    struct fuzz_input in;
    struct pya_heap *heap;
    struct pya_sim *sims[N_DEVICES];
    struct pya_sim_config config;
    struct pya_options options;
    struct live live[MAX_LIVE + 2 * HOOK_DEPTH]; /* hooks allocate beyond */
    size_t n_live;
    pya_dptr gone[N_GONE]; /* freed lately */
    struct pool pools[N_DEVICES][N_POOLS];
    size_t n_filters; /* not dropped yet */
    size_t n_contexts;
    bool no_split;       /* a pool was told so: blocks may be larger than asked for */
    bool may_fail;       /* device calls were made to fail, at some time */
    bool has_host_fault; /* now */
    unsigned open_fails; /* so many openings of devices */
    unsigned depth;      /* of hooks */
};

static pya_stream
stream_of(unsigned i) {
    return 16 * (pya_stream)(i % N_STREAMS);
}

/* PYA_FUZZ_VERBOSE=1 prints what an input does. */
static bool is_verbose;

#define SAY(...) (is_verbose ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

/* ---- hooks ---- */

static pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    if (world->open_fails > 0) {
        world->open_fails--;
        return PYA_E_DEVICE;
    }
    pya_status st = pya_sim_create(&world->config, index, &world->sims[index]);
    if (st == PYA_OK) {
        *out = pya_sim_device(world->sims[index]);
    }
    return st;
}

struct context {
    struct world *world;
    size_t n;
};

static void *
context_capture(void *arg, bool with_stack) {
    struct world *world = arg;
    if (world->has_host_fault || !with_stack) {
        return NULL;
    }
    struct context *context = malloc(sizeof *context);
    *context = (struct context){world, 1};
    world->n_contexts++;
    return context;
}

static void
context_retain(void *arg, void *context) {
    (void)arg;
    REQUIRE(((struct context *)context)->n > 0);
    ((struct context *)context)->n++;
}

static void
context_release(void *arg, void *context) {
    struct world *world = arg;
    if (--((struct context *)context)->n == 0) {
        world->n_contexts--;
        free(context);
    }
}

static void op_alloc(struct world *world);
static void op_free(struct world *world);

/* A program may do anything from within: free, allocate. */
static bool
world_pressure(void *arg, int device, size_t bytes) {
    struct world *world = arg;
    REQUIRE(device >= 0 && device < N_DEVICES && bytes > 0);
    if (world->depth >= HOOK_DEPTH || world->n_live == 0 || fuzz_byte(&world->in) % 2 == 0) {
        return false;
    }
    world->depth++;
    op_free(world);
    if (fuzz_byte(&world->in) % 4 == 0) {
        op_alloc(world);
    }
    world->depth--;
    return true;
}

static void
world_oom(void *arg, int device, size_t bytes) {
    struct world *world = arg;
    REQUIRE(device >= 0 && device < N_DEVICES && bytes > 0);
    if (world->depth < HOOK_DEPTH && fuzz_byte(&world->in) % 8 == 1) {
        world->depth++;
        op_alloc(world);
        world->depth--;
    }
}

/* ---- the model ---- */

static int64_t
stat_of(struct world *world, int device, const char *key) {
    int64_t values[PYA_N_STATS];
    REQUIRE_EQ(pya_stats_get(world->heap, device, values), PYA_OK);
    for (size_t i = 0; i < PYA_N_STATS; i++) {
        if (strcmp(pya_stat_key(i), key) == 0) {
            return values[i];
        }
    }
    REQUIRE(false);
    return -1;
}

static bool
is_capturing(const struct world *world, int device) {
    for (int i = 0; i < N_POOLS; i++) {
        if (world->pools[device][i].is_capturing) {
            return true;
        }
    }
    return false;
}

static bool
stream_is_capturing(const struct world *world, int device, pya_stream stream) {
    for (int i = 0; i < N_POOLS; i++) {
        const struct pool *pool = &world->pools[device][i];
        if (pool->is_capturing && pool->stream == stream) {
            return true;
        }
    }
    return false;
}

/* Is this answer one that something gave a reason for? */
static void
require_status(struct world *world, int device, pya_status st) {
    bool good = st == PYA_OK;
    good = good || ((st == PYA_E_DEVICE || st == PYA_E_NOMEM) && world->may_fail);
    good = good || (st == PYA_E_HOST_NOMEM && world->has_host_fault);
    good = good || (st == PYA_E_CAPTURE && is_capturing(world, device));
    if (!good) {
        fprintf(stderr, "status: %s\n", pya_status_text(st));
    }
    REQUIRE(good);
}

/* is_whole: every structure too, which takes as long as hundreds of operations. */
static void
check_device(struct world *world, int device, bool is_whole) {
    size_t n = 0, bytes = 0, requested = 0;
    for (size_t i = 0; i < world->n_live; i++) {
        if (world->live[i].device == device) {
            n++;
            bytes += world->live[i].bytes;
            requested += world->live[i].requested;
        }
    }
    REQUIRE(!is_whole || pya_heap_check(world->heap, device) == 0);
    REQUIRE_EQ(stat_of(world, device, "allocation.all.current"), n);
    REQUIRE_EQ(stat_of(world, device, "allocated_bytes.all.current"), bytes);
    /* Blocks that wait for other streams are active and, as in torch, still count as requested. */
    bool nothing_waits = stat_of(world, device, "active.all.current") == (int64_t)n;
    int64_t requested_now = stat_of(world, device, "requested_bytes.all.current");
    int64_t active_bytes = stat_of(world, device, "active_bytes.all.current");
    REQUIRE(
        nothing_waits ? requested_now == (int64_t)requested : requested_now > (int64_t)requested);
    REQUIRE(nothing_waits ? active_bytes == (int64_t)bytes : active_bytes > (int64_t)bytes);
    if (world->sims[device] != NULL) {
        struct pya_sim_state state;
        pya_sim_query(world->sims[device], &state);
        if (state.n_violations != 0) {
            fprintf(stderr, "device %d: %s\n", device, pya_sim_violation(world->sims[device]));
        }
        REQUIRE_EQ(state.n_violations, 0);
        if (!world->may_fail) { /* a release that failed is still on the device */
            REQUIRE_EQ(stat_of(world, device, "reserved_bytes.all.current"), state.used_bytes);
        }
    }
}

static void
check_all(struct world *world, bool is_whole) {
    SAY("check\n");
    for (int d = 0; d < N_DEVICES; d++) {
        check_device(world, d, is_whole);
    }
}

/* ---- operations ---- */

/* Many of few sizes, as real programs have, so that exact fits and cached ranges occur; some of any. */
static size_t
size_of(struct fuzz_input *in) {
    uint8_t kind = fuzz_byte(in);
    switch (kind % 8) {
    case 0:
        return 1 + fuzz_number(in, 2);
    case 1:
        return 1 + fuzz_number(in, 3);
    case 2:
        return fuzz_number(in, 8);
    default:
        return ((size_t)1 + kind / 8) * PYA_PAGE / 2 + (kind % 8 == 3 ? 512 : 0);
    }
}

static void
live_add(struct world *world, struct live live) {
    pya_dptr base;
    int device;
    size_t rounded = pya_round_up(live.requested, PYA_ALIGN);
    (void)fault_disarm(); /* what follows is the model's and the sim's */
    REQUIRE_EQ(live.ptr % PYA_ALIGN, 0);
    REQUIRE_EQ(pya_block_info(world->heap, live.ptr, &base, &live.bytes, &device), PYA_OK);
    REQUIRE(base == live.ptr && device == live.device && live.bytes >= rounded);
    if (!world->config.no_vmm && world->options.vmm && !world->no_split &&
        world->options.roundup_power2_divisions <= 1) {
        REQUIRE_EQ(live.bytes, rounded);
    }
    REQUIRE_EQ(pya_sim_own(world->sims[live.device], live.ptr, live.bytes), PYA_OK);
    for (size_t i = 0; i < N_GONE; i++) {
        world->gone[i] = world->gone[i] == live.ptr ? 0 : world->gone[i];
    }
    world->live[world->n_live++] = live;
}

/* Work is queued that touches the block, on another stream only once its own is done with what it had before, as a
 * program sees to by an event; what is captured runs later. */
static void
live_use(struct world *world, struct live *live, pya_stream stream) {
    SAY("use 0x%llx on %d%s\n", (unsigned long long)live->ptr, (int)stream,
        live->is_used ? ": no" : "");
    if (!live->is_used && !stream_is_capturing(world, live->device, stream)) {
        live->is_used = true;
        if (live->stream != stream) {
            pya_sim_finish(world->sims[live->device], live->stream);
        }
        REQUIRE_EQ(pya_sim_use(world->sims[live->device], stream, live->ptr, live->bytes), PYA_OK);
    }
}

static void
op_alloc(struct world *world) {
    uint8_t where = fuzz_byte(&world->in);
    struct live live = {.requested = size_of(&world->in), .device = where % N_DEVICES};
    pya_stream stream = live.stream = stream_of(where >> 1);
    if (world->n_live == MAX_LIVE) {
        return;
    }
    unsigned open_fails = world->open_fails;
    pya_status st = pya_alloc(world->heap, live.device, live.requested, stream, &live.ptr);
    SAY("alloc device %d stream %d: %zu -> %d 0x%llx\n", live.device, (int)stream, live.requested,
        st, (unsigned long long)live.ptr);
    if (world->open_fails < open_fails) {
        REQUIRE_EQ(st, PYA_E_DEVICE);
    } else if (st == PYA_OK && live.requested == 0) {
        REQUIRE_EQ(live.ptr, 0);
    } else if (st == PYA_OK) {
        live_add(world, live);
        if ((where & 0x80) != 0) {
            live_use(world, &world->live[world->n_live - 1], stream);
        }
    } else if (st == PYA_E_TOO_LARGE) {
        REQUIRE(live.requested > PYA_REQUEST_MAX);
    } else if (st == PYA_E_NOMEM) {
        char text[700];
        struct pya_oom_info info;
        pya_heap_oom_info(world->heap, &info);
        REQUIRE(pya_oom_text(&info, text, sizeof text) > 0);
        REQUIRE(pya_oom_text(&info, text, where % 32) > 0);
    } else {
        require_status(world, live.device, st);
    }
}

static void
op_free(struct world *world) {
    if (world->n_live == 0) {
        return;
    }
    size_t i = fuzz_byte(&world->in) % world->n_live;
    struct live live = world->live[i];
    SAY("free 0x%llx\n", (unsigned long long)live.ptr);
    pya_sim_disown(world->sims[live.device], live.ptr, live.bytes);
    world->live[i] = world->live[--world->n_live];
    world->gone[live.ptr / PYA_ALIGN % N_GONE] = live.ptr;
    REQUIRE_EQ(pya_free(world->heap, live.ptr), PYA_OK);
}

/* Another stream works on a block, as its user declares. */
static void
op_record(struct world *world) {
    if (world->n_live == 0) {
        return;
    }
    struct live *live = &world->live[fuzz_byte(&world->in) % world->n_live];
    uint8_t how = fuzz_byte(&world->in);
    pya_stream stream = stream_of(how);
    pya_status st = pya_record_stream(world->heap, live->ptr, stream);
    SAY("record 0x%llx on %d -> %d\n", (unsigned long long)live->ptr, (int)stream, st);
    if (st != PYA_OK) {
        require_status(world, live->device, st);
    } else if ((how & 0x40) != 0) {
        live_use(world, live, stream);
    }
}

/* Pointers that are no block's: each is refused, and nothing changes. */
static void
op_bad_free(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    pya_dptr ptr = world->gone[which % N_GONE];
    if (which >= 0xC0) {
        ptr = fuzz_number(&world->in, 8) | 1;
    } else if (which >= 0x80 && world->n_live > 0) {
        ptr = world->live[which % world->n_live].ptr + 8;
    }
    if (ptr != 0) {
        pya_status st = pya_free(world->heap, ptr);
        REQUIRE(st == PYA_E_DOUBLE_FREE || st == PYA_E_FOREIGN);
        REQUIRE(ptr % PYA_ALIGN == 0 || st == PYA_E_FOREIGN);
    }
}

static void
op_finish(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    struct pya_sim *sim = world->sims[which % N_DEVICES];
    SAY("finish device %d %d\n", which % N_DEVICES,
        which >= 0x80 ? -1 : (int)stream_of(which >> 1));
    if (sim != NULL && which >= 0x80) {
        pya_sim_finish_all(sim);
    } else if (sim != NULL) {
        pya_sim_finish(sim, stream_of(which >> 1));
    }
}

static void
op_give_back(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    size_t bytes = ((size_t)how >> 3) << 24;
    pya_status st = (how & 4) != 0   ? pya_trim(world->heap, device, bytes)
                    : (how & 2) != 0 ? pya_empty_cache(world->heap, -1)
                                     : pya_empty_cache(world->heap, device);
    SAY("give back %s device %d -> %d\n", (how & 4) != 0 ? "some" : "all", device, st);
    if (st == PYA_E_CAPTURE) { /* -1: any device's */
        REQUIRE(is_capturing(world, 0) || is_capturing(world, 1));
    } else {
        require_status(world, device, st);
    }
}

static void
op_limit(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    if ((how & 2) != 0 && world->sims[device] != NULL) { /* other programs on the same card */
        pya_sim_set_capacity(world->sims[device], ((size_t)1 + how / 4) * PYA_PAGE * 2);
        return;
    }
    double fraction = (double)(how / 4) / 63;
    unsigned open_fails = world->open_fails;
    pya_status st = pya_set_fraction(world->heap, device, fraction);
    if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
    if (st == PYA_OK) {
        REQUIRE(pya_get_fraction(world->heap, device) == fraction);
    }
}

static bool
filter_match(void *arg, pya_stream stream) {
    const struct pool *pool = arg;
    return pool->stream == UINT64_MAX || pool->stream == stream;
}

static struct world *filter_world;

static void
filter_drop(void *arg) {
    (void)arg;
    REQUIRE(filter_world->n_filters > 0);
    filter_world->n_filters--;
}

static struct pya_pool_id
pool_id(int i) {
    return (struct pya_pool_id){7, (uint64_t)i + 1};
}

static void
pool_begin(struct world *world, int device, int i, uint8_t how) {
    struct pool *pool = &world->pools[device][i];
    pya_stream stream = (how & 0x80) != 0 ? UINT64_MAX : stream_of(how >> 3);
    if (!pool->is_active) {
        pool->stream = stream;
    }
    /* A stream is captured once at a time. */
    bool capture =
        stream != UINT64_MAX && (how & 0x40) != 0 && !stream_is_capturing(world, device, stream);
    struct pya_stream_filter filter = {filter_match, filter_drop, pool};
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_begin(world->heap, device, pool_id(i), filter);
    if (pool->is_active) {
        REQUIRE(st == PYA_E_INVAL || world->has_host_fault);
    } else if (st == PYA_OK) {
        world->n_filters++;
        pool->n_users++;
        pool->is_active = true;
        pool->is_capturing = capture;
        if (capture) {
            pya_sim_set_capturing(world->sims[device], stream, true);
        }
    } else if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
}

static void
pool_end(struct world *world, int device, int i) {
    struct pool *pool = &world->pools[device][i];
    if (pool->is_capturing) {
        pya_sim_set_capturing(world->sims[device], pool->stream, false);
        pool->is_capturing = false;
    }
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_end(world->heap, device, pool_id(i));
    if (world->open_fails == open_fails && !world->has_host_fault) {
        REQUIRE_EQ(st, pool->is_active ? PYA_OK : PYA_E_INVAL);
    }
    pool->is_active = pool->is_active && st != PYA_OK;
}

static void
pool_release(struct world *world, int device, int i) {
    struct pool *pool = &world->pools[device][i];
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_release(world->heap, device, pool_id(i));
    if (world->open_fails == open_fails && !world->has_host_fault) {
        REQUIRE_EQ(st, pool->n_users > 0 ? PYA_OK : PYA_E_INVAL);
    }
    pool->n_users -= st == PYA_OK;
}

static void
op_pool(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    uint8_t how = fuzz_byte(&world->in);
    int device = which % N_DEVICES;
    int i = (which >> 1) % N_POOLS;
    struct pya_pool_info infos[2];
    pya_status st;
    SAY("pool %d of device %d: %s, stream %d%s\n", i, device,
        (const char *const[]){
            "begin", "begin", "end", "end", "release", "retain", "trim", "set"}[how % 8],
        (how & 0x80) != 0 ? -1 : (int)stream_of(how >> 3), (how & 0x40) != 0 ? ", captured" : "");
    switch (how % 8) {
    case 0:
    case 1:
        pool_begin(world, device, i, how);
        return;
    case 2:
    case 3:
        pool_end(world, device, i);
        return;
    case 4:
        pool_release(world, device, i);
        return;
    case 5:
        st = pya_pool_retain(world->heap, device, pool_id(i), (how & 8) != 0);
        world->pools[device][i].n_users += st == PYA_OK;
        break;
    case 6:
        st = pya_pool_trim(world->heap, device, pool_id(i));
        break;
    default:
        (void)pya_pool_list(world->heap, device, infos, how % 3);
        (void)!pya_pool_set_on_oom(world->heap, device, pool_id(i), (how & 8) != 0);
        return;
    }
    if (world->sims[device] != NULL) {
        require_status(world, device, st);
    }
}

static void
op_fault(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    struct pya_sim *sim = world->sims[how % N_DEVICES];
    uint32_t kinds = (how & 2) != 0 ? PYA_SIM_ANY_CALL : (uint32_t)fuzz_number(&world->in, 3);
    if (sim == NULL) {
        return;
    }
    if ((how & 0xC0) == 0xC0) {
        (void)pya_sim_fail_clear(sim);
        return;
    }
    SAY("device %d: call %d of kinds 0x%x fails%s\n", how % N_DEVICES, 1 + (how >> 4), kinds,
        (how & 8) ? ", later too" : "");
    world->may_fail = true;
    pya_sim_fail(
        sim, kinds, 1 + (how >> 4), (how & 4) != 0 ? PYA_E_NOMEM : PYA_E_DEVICE, (how & 8) != 0);
}

static void
op_history(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    if (how % 4 == 3) {
        pya_history_stop(world->heap);
    } else if (how % 4 == 2) {
        pya_history_forget(world->heap);
    } else {
        enum pya_record_level level = (enum pya_record_level)(how >> 2 & 3);
        require_status(
            world, 0,
            pya_history_start(
                world->heap, level, how % 4 == 0, how >> 4, (uint32_t)how << 2 & 0x3FF));
    }
}

/* The entries are the caller's, oldest first by ring. */
static void
take_history(struct world *world, int device) {
    struct pya_history_part part;
    uint64_t now_ns;
    if (!pya_history_take(world->heap, device, &part, &now_ns)) {
        return;
    }
    for (size_t i = 0; i < part.n; i++) {
        REQUIRE(part.items[i].action < PYA_N_ACTIONS);
        if (part.items[i].context != NULL) {
            context_release(world, part.items[i].context);
        }
    }
    free(part.items);
}

/* Segments apart, their blocks end to end, sums as the statistics say. */
static void
op_snapshot(struct world *world) {
    struct pya_snapshot snap;
    size_t active[N_DEVICES] = {0}, total[N_DEVICES] = {0};
    pya_status st = pya_snapshot_take(world->heap, NULL, true, &snap);
    if (st != PYA_OK) {
        require_status(world, 0, st);
        return;
    }
    pya_dptr end = 0;
    for (size_t i = 0; i < snap.n_segments; i++) {
        const struct pya_snap_segment *segment = &snap.segments[i];
        pya_dptr addr = segment->addr;
        REQUIRE(i == 0 || segment->device != snap.segments[i - 1].device || addr >= end);
        for (size_t k = 0; k < segment->n_blocks; k++) {
            REQUIRE_EQ(snap.blocks[segment->first_block + k].addr, addr);
            addr += snap.blocks[segment->first_block + k].bytes;
        }
        end = addr;
        REQUIRE_EQ(end, segment->addr + segment->total_bytes);
        total[segment->device] += segment->total_bytes;
        active[segment->device] += segment->active_bytes;
    }
    for (int d = 0; d < N_DEVICES; d++) {
        REQUIRE_EQ(active[d], stat_of(world, d, "active_bytes.all.current"));
        if (!world->may_fail) {
            REQUIRE_EQ(total[d], stat_of(world, d, "reserved_bytes.all.current"));
        }
    }
    pya_snapshot_fini(&snap);
}

static void
op_query(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    struct pya_memory_info info;
    struct pya_device_error error;
    pya_dptr base;
    size_t bytes;
    if ((how & 2) != 0) {
        REQUIRE_EQ(pya_stats_reset_peak(world->heap, device), PYA_OK);
    }
    if ((how & 4) != 0) {
        REQUIRE_EQ(pya_stats_reset_accumulated(world->heap, device), PYA_OK);
    }
    if (world->n_live > 0) {
        const struct live *live = &world->live[how % world->n_live];
        REQUIRE_EQ(pya_segment_info(world->heap, live->ptr, &base, &bytes), PYA_OK);
        REQUIRE(base <= live->ptr && live->ptr + live->bytes <= base + bytes);
    }
    if (world->sims[device] != NULL) {
        pya_status st = pya_memory_info(world->heap, device, &info);
        require_status(world, device, st);
        REQUIRE(st != PYA_OK || info.free_bytes <= info.total_bytes);
        pya_heap_device_error(world->heap, device, &error);
        pya_sim_advance_clock(world->sims[device], how);
    }
}

static void
op_check(struct world *world) {
    check_all(world, fuzz_byte(&world->in) % 16 == 0);
}

/* Limits, reservations and what else a program may set while it runs. */
static void
op_steer(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    uint8_t which = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    int i = which % N_POOLS;
    bool has_pool = world->pools[device][i].n_users > 0 || world->pools[device][i].is_active;
    size_t bytes = (size_t)which << 22;
    unsigned open_fails = world->open_fails;
    pya_status st;
    switch (how / 2 % 8) {
    case 0:
        st = pya_set_limit(world->heap, device, PYA_LIMIT_HARD, bytes);
        break;
    case 1:
        st = pya_set_limit(world->heap, device, PYA_LIMIT_SOFT, bytes);
        REQUIRE(st != PYA_OK || pya_get_limit(world->heap, device, PYA_LIMIT_SOFT) == bytes);
        break;
    case 2:
    case 3:
        bytes = which == 255 ? (size_t)1 << 60 : bytes / 4;
        st = pya_reserve(world->heap, device, bytes, stream_of(how >> 4));
        REQUIRE(
            st != PYA_OK || stat_of(world, device, "reserved_bytes.all.current") >= (int64_t)bytes);
        st = st == PYA_E_NOMEM ? PYA_OK : st;
        break;
    case 4:
        st = pya_pool_set_limit(world->heap, device, pool_id(i), bytes);
        REQUIRE(st != PYA_E_INVAL || !has_pool);
        st = st == PYA_E_INVAL ? PYA_OK : st;
        break;
    case 5:
        (void)!pya_pool_set_no_split(world->heap, device, pool_id(i));
        world->no_split = true;
        st = PYA_OK;
        break;
    case 6:
        st = PYA_OK;
        if (world->sims[device] != NULL) { /* forth by up to 32 s, or back */
            uint64_t ns = (uint64_t)which << 27;
            pya_sim_advance_clock(world->sims[device], which % 8 == 7 ? 0 - ns : ns);
        }
        break;
    default:
        take_history(world, device);
        return;
    }
    SAY("steer %d: device %d, %zu -> %d\n", how / 2 % 8, device, bytes, st);
    if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
}

static void op_next(struct world *world, unsigned kind);

/* The operation that follows, with one of its host allocations failing. */
static void
op_host_fault(struct world *world) {
    uint8_t nth = fuzz_byte(&world->in);
    unsigned kind = fuzz_byte(&world->in) % 28;
    /* Not those whose own bookkeeping allocates in the model or the sim. */
    world->has_host_fault = true;
    fault_arm(1 + nth % 8);
    if (kind < 12) {
        uint8_t where = fuzz_byte(&world->in);
        size_t bytes = size_of(&world->in);
        struct live live = {
            .requested = bytes, .device = where % N_DEVICES, .stream = stream_of(where >> 1)};
        pya_status st = world->n_live < MAX_LIVE && bytes > 0
                            ? pya_alloc(world->heap, live.device, bytes, live.stream, &live.ptr)
                            : PYA_E_NOMEM;
        (void)fault_disarm();
        if (st == PYA_OK) {
            live_add(world, live);
        }
    } else if (kind < 14) {
        op_snapshot(world);
    } else if (kind < 18) {
        op_pool(world);
    } else if (kind < 20) {
        op_history(world);
    } else {
        op_give_back(world);
    }
    (void)fault_disarm();
    world->has_host_fault = false;
}

static void
op_next(struct world *world, unsigned kind) {
    /* So many of 64. */
    static const struct {
        unsigned n;
        void (*run)(struct world *);
    } ops[] = {{20, op_alloc},     {16, op_free},    {6, op_record},  {3, op_finish},
               {1, op_give_back},  {1, op_steer},    {2, op_limit},   {4, op_pool},
               {2, op_fault},      {1, op_query},    {1, op_history}, {1, op_snapshot},
               {2, op_host_fault}, {2, op_bad_free}, {2, op_check}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (kind < ops[i].n) {
            ops[i].run(world);
            return;
        }
        kind -= ops[i].n;
    }
    REQUIRE(false);
}

/* ---- a run ---- */

static void
world_init(struct world *world) {
    static const char *const options[] = {
        "",
        "memory:tight",
        "memory:fast",
        "vmm:False",
        "mappings_per_page:2",
        "memory:tight,mappings_per_page:1",
        "roundup_power2_divisions:4",
        "vmm:False,max_split_size:20MB",
        "limit:64MB",
        "per_process_memory_fraction:0.5,memory:tight",
        "shared_pages:True",
        "shared_pages:True,memory:tight,mappings_per_page:2",
        "soft_limit:40MB,garbage_collection_threshold:0.6",
        "keep_free:30MB,trim_after:2,limit:80MB",
    };
    uint8_t settings = fuzz_byte(&world->in);
    uint8_t device = fuzz_byte(&world->in);
    char message[200];
    pya_options_init(&world->options);
    REQUIRE_EQ(
        pya_options_parse(
            &world->options, options[settings % (sizeof options / sizeof *options)], message,
            sizeof message),
        PYA_OK);
    world->config = (struct pya_sim_config){
        .capacity_bytes = ((size_t)1 + device / 16) * 12 * PYA_PAGE,
        .address_bytes = (uint64_t)1 << 33,
        .work = device % 4 == 0   ? PYA_SIM_WORK_AT_ONCE
                : device % 4 == 1 ? PYA_SIM_WORK_DELAYED
                                  : PYA_SIM_WORK_BY_HAND,
        .work_delay = 3,
        .no_vmm = (device & 12) == 12,
        .quiet = !is_verbose,
    };
    world->open_fails = settings >= 0xF0 ? settings & 3U : 0;
    struct pya_hooks hooks = {
        .arg = world,
        .open_device = world_open,
        .capture_context = context_capture,
        .retain_context = context_retain,
        .release_context = context_release,
        .on_pressure = (settings & 0x40) != 0 ? world_pressure : NULL,
        .on_oom = (settings & 0x40) != 0 ? world_oom : NULL,
    };
    REQUIRE_EQ(pya_heap_create(&world->options, &hooks, &world->heap), PYA_OK);
}

/* Everything ends well, however it went before: all is given back, and the device was used by its rules. */
static void
world_end(struct world *world) {
    world->open_fails = 0;
    for (int d = 0; d < N_DEVICES; d++) {
        if (world->sims[d] != NULL) {
            (void)pya_sim_fail_clear(world->sims[d]);
            REQUIRE_EQ(pya_reserve(world->heap, d, 0, 0), PYA_OK);
        }
        for (int i = 0; i < N_POOLS; i++) {
            if (world->pools[d][i].is_active) {
                pool_end(world, d, i);
            }
            while (world->pools[d][i].n_users > 0) {
                pool_release(world, d, i);
            }
        }
    }
    check_all(world, false);
    while (world->n_live > 0) {
        op_free(world);
    }
    REQUIRE_EQ(pya_empty_cache(world->heap, -1), PYA_OK);
    check_all(world, true);
    for (int d = 0; d < N_DEVICES; d++) {
        struct pya_sim_state state;
        REQUIRE_EQ(stat_of(world, d, "reserved_bytes.all.current"), 0);
        REQUIRE_EQ(stat_of(world, d, "active.all.current"), 0);
        REQUIRE_EQ(stat_of(world, d, "segment.all.current"), 0);
        REQUIRE_EQ(pya_pool_list(world->heap, d, NULL, 0), 0);
        if (world->sims[d] != NULL) {
            pya_sim_query(world->sims[d], &state);
            REQUIRE_EQ(state.used_bytes, 0);
            REQUIRE_EQ(state.n_mappings, 0);
            REQUIRE_EQ(pya_sim_check(world->sims[d]), 0);
        }
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static struct world world;
    is_verbose = getenv("PYA_FUZZ_VERBOSE") != NULL;
    size_t n_host = fault_live();
    memset(&world, 0, sizeof world);
    filter_world = &world;
    world.in = (struct fuzz_input){data, data + n};
    world_init(&world);
    for (unsigned i = 0; i < MAX_OPS && fuzz_left(&world.in) > 0; i++) {
        op_next(&world, fuzz_byte(&world.in) % 64);
    }
    /* Half of the runs leave it to destroy; then only host memory can be looked at. */
    if (n % 2 == 0) {
        world_end(&world);
    }
    pya_heap_destroy(world.heap);
    REQUIRE_EQ(world.n_filters, 0);
    REQUIRE_EQ(world.n_contexts, 0);
    REQUIRE_EQ(fault_live(), n_host);
    return 0;
}
