/* Captures and private pools while each call of the device, and each host allocation, fails once.  No capture is spoiled, what a
 * graph's kernels use stays mapped, and nothing is lost. */
#include "core/snapshot.h"
#include "pools.h"
#include "streams.h"
#include "sweep.h"

enum { N_BLOCKS = 32, N_KERNELS = 32 };

static const struct pya_pool_id NEXT = {3, 5}, WHOLE = {3, 6}, SOURCE = {3, 7}, LENT = {3, 8};

static struct {
    struct world world;
    pya_dptr blocks[N_BLOCKS];
    pya_dptr kernels[N_KERNELS]; /* what the kernels of a graph use, whether freed since or not */
    size_t kernel_bytes[N_KERNELS];
    size_t n_kernels;
    bool is_capturing;
    bool has_failed; /* a call of the source, which had to make it again */
    size_t n_waits;  /* during a capture */
    size_t n_segments;
    pya_dptr spare; /* freed when memory is short */
} f;

static pya_status
watched_device_sync(struct pya_device *dev) {
    f.n_waits += f.is_capturing;
    return world_opened.ops->device_sync(dev);
}

static pya_status
watched_stream_sync(struct pya_device *dev, pya_stream stream) {
    f.n_waits += f.is_capturing;
    return world_opened.ops->stream_sync(dev, stream);
}

static pya_status
watched_event_sync(struct pya_device *dev, pya_event event) {
    f.n_waits += f.is_capturing;
    return world_opened.ops->event_sync(dev, event);
}

static pya_status
watched_plain_free(struct pya_device *dev, pya_dptr addr) {
    f.n_waits += f.is_capturing;
    return world_opened.ops->plain_free(dev, addr);
}

/* On failure *ptr stays 0. */
static void
ask(size_t bytes, pya_stream stream, pya_dptr *ptr) {
    if (pya_alloc(f.world.heap, 0, bytes, stream, ptr) != PYA_OK) {
        return;
    }
    if (!f.is_capturing) {
        (void)!pya_sim_use(f.world.sim, stream, *ptr, bytes);
    } else if (stream == TWO) {
        f.kernels[f.n_kernels] = *ptr;
        f.kernel_bytes[f.n_kernels++] = bytes;
    }
}

static void
drop(pya_dptr *ptr) {
    give(&f.world, *ptr);
    *ptr = 0;
}

/* ---- captures ---- */

static bool
is_captured(void *arg, pya_stream stream) {
    (void)arg;
    return stream == TWO;
}

static bool
capture_begin(struct pya_pool_id id) {
    const struct pya_stream_filter filter = {.match = is_captured, .began_on = TWO};
    if (pya_pool_begin(f.world.heap, 0, id, filter) != PYA_OK) {
        return false;
    }
    pya_sim_set_capturing(f.world.sim, TWO, true);
    f.is_capturing = true;
    return true;
}

static void
capture_end(struct pya_pool_id id) {
    f.is_capturing = false;
    pya_sim_set_capturing(f.world.sim, TWO, false);
    CHECK_OK(pya_pool_end(f.world.heap, 0, id));
}

/* The sim reports what is not mapped.  It cannot queue work if the host has no memory. */
static void
replay(void) {
    for (size_t i = 0; i < f.n_kernels; i++) {
        (void)!pya_sim_use(f.world.sim, TWO, f.kernels[i], f.kernel_bytes[i]);
    }
    pya_sim_finish_all(f.world.sim);
}

/* Other streams use the graph's memory, and others use memory with the graph's stream; some asks for memory back. */
static void
capture_one(pya_dptr *blocks) {
    struct pya_heap *heap = f.world.heap;
    pya_dptr eager = 0;
    if (!capture_begin(POOL)) {
        return;
    }
    ask(8 * MIB, TWO, &blocks[0]);
    ask(3 * MIB, TWO, &blocks[1]);
    ask(512, TWO, &blocks[2]);
    ask(5 * MIB, TWO, &blocks[3]);
    (void)!pya_record_stream(heap, blocks[0], THREE);
    ask(6 * MIB, ONE, &eager);
    (void)!pya_record_stream(heap, eager, TWO);
    drop(&eager);
    drop(&blocks[1]);
    drop(&blocks[0]);
    (void)!pya_empty_cache(heap, 0);
    (void)!pya_trim(heap, 0, 4 * MIB);
    ask(9 * MIB, TWO, &blocks[0]);
    ask(13 * MIB, ONE, &blocks[4]);
    drop(&blocks[3]);
    ask(7 * MIB, TWO, &blocks[1]);
    capture_end(POOL);
    drop(&blocks[0]);
    replay();
}

/* As trees of graphs do it: the pool returns to an earlier state. */
static void
return_to(pya_dptr *block) {
    struct pya_snapshot snap;
    struct pya_claim claim = {0};
    if (*block == 0 || pya_snapshot_take(f.world.heap, &POOL, false, &snap) != PYA_OK) {
        return;
    }
    for (size_t i = 0; i < snap.n_blocks; i++) {
        const struct pya_snap_block *each = &snap.blocks[i];
        if (each->addr == *block) {
            claim = (struct pya_claim){each->addr, each->bytes, each->requested, TWO};
        }
    }
    pya_snapshot_fini(&snap);
    CHECK_EQ(claim.addr, *block);
    drop(block);
    if (pya_pool_claim(f.world.heap, 0, POOL, &claim) == PYA_OK) {
        *block = claim.addr;
    }
}

/* Two graphs in one pool; when they are gone, its memory serves the next pool. */
static void
graphs(pya_dptr *blocks) {
    struct pya_heap *heap = f.world.heap;
    capture_one(&blocks[0]);
    capture_one(&blocks[5]);
    (void)!pya_empty_cache(heap, 0);
    replay();
    return_to(&blocks[1]);
    replay();
    for (size_t i = 0; i < 10; i++) {
        drop(&blocks[i]);
    }
    (void)!pya_pool_release(heap, 0, POOL);
    (void)!pya_pool_release(heap, 0, POOL);
    (void)!pya_pool_trim(heap, 0, POOL);
    f.n_kernels = 0;
    if (capture_begin(NEXT)) {
        ask(8 * MIB, TWO, &blocks[0]);
        ask(30 * MIB, TWO, &blocks[1]);
        capture_end(NEXT);
        replay();
    }
}

/* ---- pools of a special kind ---- */

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    pya_dptr addr = 0;
    (void)arg;
    bool is_there =
        world_opened.ops->plain_alloc(pya_sim_device(f.world.sim), bytes, &addr) == PYA_OK;
    f.n_segments += is_there;
    return addr;
}

/* Cannot tell its caller that it failed. */
static void
source_free(void *arg, pya_dptr addr) {
    (void)arg;
    f.n_segments--;
    while (world_opened.ops->plain_free(pya_sim_device(f.world.sim), addr) != PYA_OK) {
        f.has_failed = pya_sim_fail_clear(f.world.sim);
        CHECK(f.has_failed);
    }
}

static void
use_pool(struct pya_pool_id id, pya_dptr *blocks) {
    if (pya_pool_begin(f.world.heap, 0, id, (struct pya_stream_filter){0}) == PYA_OK) {
        ask(13 * MIB, ONE, &blocks[0]);
        ask(5 * MIB, ONE, &blocks[1]);
        drop(&blocks[0]);
        ask(2 * MIB, ONE, &blocks[2]);
        CHECK_OK(pya_pool_end(f.world.heap, 0, id));
        CHECK_OK(pya_pool_release(f.world.heap, 0, id));
    }
}

static void
special_pools(pya_dptr *blocks) {
    struct pya_heap *heap = f.world.heap;
    const struct pya_segment_source source = {source_alloc, source_free, NULL, NULL};
    if (pya_pool_retain(heap, 0, WHOLE, false) == PYA_OK) {
        (void)!pya_pool_set_no_split(heap, 0, WHOLE);
        use_pool(WHOLE, &blocks[0]);
        CHECK_OK(pya_pool_release(heap, 0, WHOLE));
    }
    if (pya_pool_retain(heap, 0, SOURCE, false) == PYA_OK) {
        (void)!pya_pool_set_source(heap, 0, SOURCE, source);
        use_pool(SOURCE, &blocks[3]);
        CHECK_OK(pya_pool_release(heap, 0, SOURCE));
    }
    if (pya_pool_retain(heap, 0, LENT, true) == PYA_OK) {
        use_pool(LENT, &blocks[6]); /* stays in use */
    }
}

/* ---- running short ---- */

/* Takes and frees memory itself, and runs short within. */
static bool
on_pressure(void *arg, int device, size_t bytes) {
    pya_dptr small = 0;
    pya_dptr large = 0;
    (void)arg;
    (void)bytes;
    ask(3 * MIB, ONE, &small);
    ask(300 * MIB, ONE, &large);
    CHECK_EQ(large, 0);
    drop(&small);
    (void)!pya_empty_cache(f.world.heap, device);
    const bool helps = f.spare != 0;
    drop(&f.spare);
    return helps;
}

static void
run_short(pya_dptr *blocks) {
    struct pya_heap *heap = f.world.heap;
    (void)!pya_reserve(heap, 0, 150 * MIB, ONE);
    ask(20 * MIB, ONE, &f.spare);
    for (size_t i = 0; i < 6; i++) { /* one of them is served only with the spare's memory */
        ask(18 * MIB, i % 2 == 0 ? 0 : ONE, &blocks[i]);
    }
    if (capture_begin(NEXT)) {
        ask(24 * MIB, TWO, &blocks[6]);
        ask(60 * MIB, TWO, &blocks[7]);
        capture_end(NEXT);
        CHECK_OK(pya_pool_release(heap, 0, NEXT));
    }
    (void)!pya_trim(heap, 0, 0);
}

/* ---- the sweep ---- */

/* A failed query does not tell of a capture, and an event that was not destroyed is lost. */
#define FAILING ~(1U << PYA_SIM_IS_CAPTURING | 1U << PYA_SIM_EVENT_DESTROY)

static void
program(unsigned long nth, bool host, pya_status with) {
    for (pya_stream stream = ONE; stream <= THREE; stream += ONE) {
        pya_sim_set_capturing(f.world.sim, stream, false); /* later without host memory */
    }
    if (host) {
        fault_arm(nth);
    } else {
        pya_sim_fail(f.world.sim, FAILING, nth, with, false);
    }
    graphs(&f.blocks[1]);
    special_pools(&f.blocks[11]);
    run_short(&f.blocks[20]);
}

static void
release_all(void) {
    struct pya_pool_info infos[8];
    for (size_t i = 0; i < N_BLOCKS; i++) {
        drop(&f.blocks[i]);
    }
    drop(&f.spare);
    CHECK_OK(pya_reserve(f.world.heap, 0, 0, 0));
    size_t n = pya_pool_list(f.world.heap, 0, infos, 8);
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < infos[i].n_users; k++) {
            CHECK_OK(pya_pool_release(f.world.heap, 0, infos[i].id));
        }
    }
}

static bool
once(const char *options, unsigned long nth, bool host, pya_status with) {
    size_t live_before = fault_live();
    memset(&f, 0, sizeof f);
    f.world.config = (struct pya_sim_config){
        .capacity_bytes = 200 * MIB,
        .address_bytes = (uint64_t)1 << 34,
        .work = PYA_SIM_WORK_DELAYED,
        .work_delay = 3,
        .quiet = true};
    f.world.hooks.on_pressure = on_pressure;
    world_init(&f.world, options);
    ask(512, 0, &f.blocks[0]);
    f.world.ops.device_sync = watched_device_sync;
    f.world.ops.stream_sync = watched_stream_sync;
    f.world.ops.event_sync = watched_event_sync;
    f.world.ops.plain_free = watched_plain_free;
    program(nth, host, with);
    bool fired = sweep_disarm(f.world.sim, host) || f.has_failed;
    CHECK_EQ(f.n_waits, 0);
    CHECK_EQ(pya_heap_check(f.world.heap, 0), 0);
    CHECK(fired || stat_of(f.world.heap, 0, "pyalloc_saved_by_callback") > 0);
    release_all();
    sweep_check_empty(f.world.heap, f.world.sim);
    CHECK_EQ(pya_heap_check(f.world.heap, 0), 0);
    CHECK_EQ(f.n_segments, 0);
    CHECK_EQ(stat_of(f.world.heap, 0, "active.all.current"), 0);
    CHECK_EQ(pya_pool_list(f.world.heap, 0, NULL, 0), 0);
    world_fini(&f.world);
    CHECK_EQ(fault_live(), live_before);
    return fired;
}

static void
test_sweep(void) {
    static const char *const options[] = {
        "",          "memory:tight",       "memory:fast",
        "vmm:False", "shared_pages:False", "trim_after:0.001,soft_limit:40MiB"};
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        sweep_all(once, options[i]);
    }
}

static const struct check_case cases[] = {
    {"sweep", test_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
