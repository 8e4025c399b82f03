/* Memory shared between processes: what leaves with a block, what comes in, and that failures lose nothing. */
#include <unistd.h>

#include "fault.h"
#include "pools.h"
#include "sender.h"
#include "sweep.h"

static void
world_backed(struct world *world, const char *options) {
    *world = (struct world){
        .config = {
            .capacity_bytes = 512 * MIB, .address_bytes = (uint64_t)1 << 34, .backed = true}};
    world_init(world, options);
}

/* The first and the last byte of a block are read under its import; what is written there is read under the block. */
static void
check_shared(struct world *world, pya_dptr ptr, size_t bytes) {
    struct pya_shared shared;
    pya_dptr base;
    size_t reserved_before = reserved(world);
    CHECK_OK(pya_share(world->heap, ptr, &shared));
    CHECK_EQ(shared.ptr, ptr);
    CHECK(shared.n_pages * PYA_PAGE >= shared.offset + bytes); /* in whole grains */
    if (!CHECK_OK(import_all(world->heap, &shared, &base))) {
        return;
    }
    volatile char *here = (volatile char *)(uintptr_t)ptr;
    volatile char *there = (volatile char *)(uintptr_t)(base + shared.offset);
    for (size_t at = 0; at<bytes; at += bytes> PYA_PAGE ? PYA_PAGE / 2 : 256) {
        here[at] = (char)(at / 256 + 1);
        CHECK_EQ(there[at], (char)(at / 256 + 1));
    }
    there[bytes - 1] = 77;
    CHECK_EQ(here[bytes - 1], 77);
    CHECK_EQ(reserved(world), reserved_before); /* memory that was there before */
    CHECK_OK(pya_import_close(world->heap, base));
    CHECK_EQ(pya_import_close(world->heap, base), PYA_E_FOREIGN);
}

/* At home, within a page and across several; stitched from pages that are not adjacent; stitched and partly used. */
static void
test_bytes_are_the_same(void) {
    struct world world;
    world_backed(&world, "");
    pya_dptr small[3], row[16];
    for (int i = 0; i < 3; i++) {
        small[i] = take(&world, 700, 0);
    }
    for (int i = 0; i < 16; i++) {
        row[i] = take(&world, 20 * MIB, 0);
    }
    check_shared(&world, small[1], 700);
    check_shared(&world, row[2], 20 * MIB);
    for (int i = 1; i < 16; i += 2) {
        give(&world, row[i]);
    }
    pya_dptr stitched = take(&world, 60 * MIB, 0);
    CHECK_EQ(stat_of(world.heap, 0, "pyalloc_stitches"), 1);
    check_shared(&world, stitched, 60 * MIB);
    give(&world, stitched);
    stitched = take(&world, 60 * MIB - 3 * 512, 0);
    check_shared(&world, stitched, 60 * MIB - 3 * 512);
    give(&world, stitched);
    for (int i = 0; i < 16; i += 2) {
        give(&world, row[i]);
    }
    for (int i = 0; i < 3; i++) {
        give(&world, small[i]);
    }
    world_fini(&world);
}

static void
test_what_cannot_be_shared(void) {
    struct world world;
    struct pya_shared shared;
    int fd;
    world_backed(&world, "");
    pya_dptr ptr = take(&world, 3 * MIB, 0);
    CHECK_EQ(pya_share(world.heap, ptr + 512, &shared), PYA_E_FOREIGN);
    CHECK_EQ(pya_share(world.heap, 12345, &shared), PYA_E_FOREIGN);
    CHECK_OK(pya_share(world.heap, ptr, &shared));
    CHECK_EQ(export_one(world.heap, &shared, shared.n_pages, &fd), PYA_E_FOREIGN);
    CHECK_EQ(export_one(world.heap, &shared, SIZE_MAX, &fd), PYA_E_FOREIGN);
    give(&world, ptr);
    CHECK_EQ(export_one(world.heap, &shared, 0, &fd), PYA_E_FOREIGN);
    for (size_t bytes = 3 * MIB; bytes > 0; bytes -= bytes > 2 * MIB ? MIB : bytes) {
        ptr = take(&world, bytes, 0);
        CHECK_OK(pya_share(world.heap, ptr, &shared));
        give(&world, ptr);
        CHECK_OK(pya_empty_cache(world.heap, 0));
        ptr = take(&world, bytes, 0); /* at the same address, but of other pages */
        CHECK_EQ(ptr, shared.ptr);
        CHECK_EQ(export_one(world.heap, &shared, 0, &fd), PYA_E_FOREIGN);
        give(&world, ptr);
    }
    ptr = take(&world, 3 * MIB, 0);
    pya_heap_open_card(world.heap, 0)->caps.has_export = false;
    CHECK_EQ(pya_share(world.heap, ptr, &shared), PYA_E_NOTSUP);
    give(&world, ptr);
    world_fini(&world);

    world_backed(&world, "vmm:False");
    ptr = take(&world, 3 * MIB, 0);
    CHECK_EQ(pya_share(world.heap, ptr, &shared), PYA_E_NOTSUP);
    give(&world, ptr);
    world_fini(&world);

    world = (struct world){.config = {.no_vmm = true}};
    world_init(&world, "");
    CHECK_EQ(import_all(world.heap, &shared, &ptr), PYA_E_NOTSUP);
    world_fini(&world);
}

/* A block that was freed and is still in use on another stream belongs to nobody. */
static void
test_pending_blocks_are_gone(void) {
    struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
    struct pya_shared shared;
    world_init(&world, "");
    pya_dptr ptr = take(&world, 3 * MIB, 0);
    CHECK_OK(pya_sim_use(world.sim, 7, ptr, 512));
    CHECK_OK(pya_record_stream(world.heap, ptr, 7));
    give(&world, ptr);
    CHECK_EQ(pya_share(world.heap, ptr, &shared), PYA_E_FOREIGN);
    world_fini(&world);
}

/* Unfinished work reads an import: the import ends once that is done, and not during a capture. */
static void
test_closing_waits(void) {
    struct world world = {.config = {.work = PYA_SIM_WORK_BY_HAND}};
    struct pya_shared shared;
    struct pya_sim_state state;
    pya_dptr first, second;
    world_init(&world, "");
    pya_dptr ptr = take(&world, 5 * MIB, 7);
    CHECK_OK(pya_share(world.heap, ptr, &shared));
    CHECK_OK(import_all(world.heap, &shared, &first));
    CHECK_OK(import_all(world.heap, &shared, &second));
    CHECK(first != second);
    pya_sim_query(world.sim, &state);
    size_t n_mapped = state.n_mappings;
    CHECK_OK(pya_sim_use(world.sim, 7, first, 5 * MIB));
    CHECK_OK(pya_import_close(
        world.heap, first)); /* without a wait, a violation of the simulated device */
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.n_mappings, n_mapped - shared.n_pages);

    pya_sim_set_capturing(world.sim, 7, true);
    CHECK_OK(pya_import_close(world.heap, second));
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.n_mappings, n_mapped - shared.n_pages);
    CHECK_EQ(pya_import_close(world.heap, second), PYA_E_FOREIGN); /* it is still in use */
    pya_sim_set_capturing(world.sim, 7, false);
    CHECK_OK(import_all(world.heap, &shared, &first));
    pya_sim_query(world.sim, &state);
    CHECK_EQ(state.n_mappings, n_mapped - shared.n_pages);
    give(&world, ptr);
    world_fini(&world); /* the open one ends with the heap */
}

static struct {
    struct world *world;
    struct pya_shared shared;
    bool is_asked;
} asking;

/* Work that goes on only once another process has what it asks this one for. */
static pya_status
sync_when_asked(struct pya_device *dev) {
    const struct pya_card *card = pya_heap_open_card(asking.world->heap, 0);
    if (!asking.is_asked && CHECK(!pya_lock_is_held(&card->lock))) {
        int fd = -1;
        CHECK_OK(export_one(asking.world->heap, &asking.shared, 0, &fd));
        CHECK_EQ(close(fd), 0);
    }
    asking.is_asked = true;
    return world_opened.ops->device_sync(dev);
}

static void
test_shared_memory_is_had_while_the_cache_is_emptied(void) {
    struct world world;
    world_backed(&world, "");
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    give(&world, take(&world, 7 * MIB, 0));
    world.ops.device_sync = sync_when_asked;
    asking.world = &world;
    CHECK_OK(pya_share(world.heap, ptr, &asking.shared));
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(asking.is_asked);
    CHECK_EQ(reserved(&world), asking.shared.n_pages * PYA_PAGE);
    give(&world, ptr);
    world_fini(&world);
}

/* Every other page is free. */
static void
make_gaps(struct world *world, pya_dptr *ptrs, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ptrs[i] = take(world, 2 * MIB, 0);
    }
    for (size_t i = 0; i < n; i += 2) {
        give(world, ptrs[i]);
    }
}

/* The same when memory is short, and when second addresses have become too many. */
static void
test_shared_memory_is_had_while_a_request_waits(void) {
    static const char *const options[] = {"limit:32MiB", "memory:tight,mappings_per_page:1"};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        pya_dptr ptrs[16], ptr;
        world_backed(&world, options[i]);
        make_gaps(&world, ptrs, 16);
        world.ops.device_sync = sync_when_asked;
        asking.world = &world;
        asking.is_asked = false;
        CHECK_OK(pya_share(world.heap, ptrs[1], &asking.shared));
        CHECK_EQ(
            pya_alloc(world.heap, 0, (i == 0 ? 20 : 8) * MIB, 0, &ptr),
            i == 0 ? PYA_E_NOMEM : PYA_OK);
        CHECK(asking.is_asked);
        world_fini(&world);
    }
}

/* Everything else can be shared too: whatever makes a request wait, its first and longest wait delays nobody. */
static struct {
    const struct pya_lock *lock;
    int n_waits;
} waiting;

static pya_status
sync_alone(struct pya_device *dev) {
    CHECK(waiting.n_waits++ > 0 || !pya_lock_is_held(waiting.lock));
    return world_opened.ops->device_sync(dev);
}

static void
test_requests_wait_without_the_lock(void) {
    static const struct {
        const char *options;
        bool is_of_the_pool, is_dropped, begins_another;
    } rows[] = {
        {"", false, true, false},
        {"", false, true, true},
        {"", true, false, false},
        {"vmm:False", false, false, false},
        {"vmm:False", true, false, false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct world world = {0};
        pools_init(&world, rows[i].options);
        pya_dptr held = take(&world, 600 * MIB, 0);
        pool_begin(&world);
        give(&world, take(&world, 300 * MIB, 16));
        if (!rows[i].is_of_the_pool) {
            pool_end(&world);
        }
        if (rows[i].is_dropped) {
            CHECK_OK(pya_pool_release(world.heap, 0, POOL));
        }
        waiting.lock = &world.heap->cards.open[0]->lock;
        waiting.n_waits = 0;
        world.ops.device_sync = sync_alone;
        if (rows[i].begins_another) {
            const struct pya_pool_id other = {5, 6};
            CHECK_OK(pya_pool_begin(world.heap, 0, other, (struct pya_stream_filter){0}));
            CHECK_OK(pya_pool_end(world.heap, 0, other));
            CHECK(waiting.n_waits > 0);
        }
        pya_dptr ptr = 0;
        pya_status st = pya_alloc(world.heap, 0, 350 * MIB, 0, &ptr);
        CHECK_EQ(st, rows[i].is_dropped ? PYA_OK : PYA_E_NOMEM);
        CHECK(waiting.n_waits > 0);
        CHECK_OK(pya_free(world.heap, ptr));
        give(&world, held);
        if (rows[i].is_of_the_pool) {
            pool_end(&world);
        }
        world_fini(&world);
    }
}

/* A pool may go while a request of its waits.  What the request works on stays until it is answered. */
static struct world *going;

static pya_status
sync_while_a_pool_goes(struct pya_device *dev) {
    struct world *world = going;
    going = NULL;
    if (world != NULL && CHECK(!pya_lock_is_held(&world->heap->cards.open[0]->lock))) {
        pool_end(world);
        CHECK_OK(pya_pool_release(world->heap, 0, POOL));
        CHECK_EQ(pya_pool_list(world->heap, 0, NULL, 0), 1);
    }
    return world_opened.ops->device_sync(dev);
}

static void
test_pool_that_goes_while_a_request_waits(void) {
    struct world world = {0};
    pya_dptr ptr;
    pools_init(&world, "");
    (void)take(&world, 960 * MIB, 0);
    pool_begin(&world);
    going = &world;
    world.ops.device_sync = sync_while_a_pool_goes;
    CHECK_EQ(pya_alloc(world.heap, 0, 80 * MIB, 0, &ptr), PYA_E_NOMEM);
    CHECK(going == NULL);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    world_fini(&world);
}

/* A new peer may use imports too. */
static void
test_peers_are_let_in(void) {
    struct world world = {.config = {.refused_peers = 1 << 2}};
    struct pya_shared shared;
    pya_dptr base;
    world_init(&world, "");
    pya_dptr ptr = take(&world, 5 * MIB, 0);
    CHECK_OK(pya_share(world.heap, ptr, &shared));
    CHECK_OK(import_all(world.heap, &shared, &base));
    uint64_t before = calls(&world, PYA_SIM_SET_ACCESS);
    CHECK_OK(pya_enable_peer(world.heap, 0, 1));
    CHECK_EQ(calls(&world, PYA_SIM_SET_ACCESS), before + 2); /* the arena's range and the import */
    CHECK(pya_enable_peer(world.heap, 0, 2) != PYA_OK);
    CHECK_OK(pya_import_close(world.heap, base));
    give(&world, ptr);
    world_fini(&world);
}

/* Finds the number that the next file gets; lower ones are all open. */
static int
next_file(void) {
    int fd = dup(0);
    CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

/* If a page's descriptor cannot be had, those before it are closed. */
static void
test_descriptors_come_all_or_none(void) {
    struct world world = {0};
    struct pya_shared shared;
    int fds[4];
    uint32_t n_pages[4];
    size_t n = 0;
    world_backed(&world, "");
    pya_dptr ptr = take(&world, 7 * MIB, 0);
    CHECK_OK(pya_share(world.heap, ptr, &shared));
    int before = next_file();
    CHECK_OK(pya_share_export(world.heap, &shared, 0, 4, fds, n_pages, &n));
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(close(fds[i]), 0);
    }
    CHECK(n > 0);
    for (uint64_t nth = 1; nth <= n; nth++) {
        size_t n_had;
        pya_sim_fail(world.sim, 1U << PYA_SIM_PAGE_EXPORT, nth, PYA_E_DEVICE, false);
        CHECK_EQ(pya_share_export(world.heap, &shared, 0, 4, fds, n_pages, &n_had), PYA_E_DEVICE);
        CHECK_EQ(next_file(), before);
    }
    give(&world, ptr);
    world_fini(&world);
}

static void
share_and_close(struct world *world, pya_dptr ptr) {
    struct pya_shared shared;
    pya_dptr base;
    CHECK_OK(pya_share(world->heap, ptr, &shared));
    CHECK_OK(import_all(world->heap, &shared, &base));
    CHECK_OK(pya_import_close(world->heap, base));
}

/* Each call and each host allocation of a share, an import and its end fails once. */
static bool
share_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {.config = {.quiet = true}};
    struct pya_shared shared;
    pya_dptr base = 0;
    world_init(&world, options);
    pya_dptr ptr = take(&world, 31 * MIB, 0);
    share_and_close(&world, ptr); /* the simulated device's own tables have grown by then */
    size_t live = fault_live();
    sweep_arm(world.sim, nth, host, with);
    pya_status st = pya_share(world.heap, ptr, &shared);
    if (st == PYA_OK) {
        st = import_all(world.heap, &shared, &base);
    }
    if (st == PYA_OK) {
        (void)!pya_import_close(world.heap, base);
    }
    bool fired = sweep_disarm(world.sim, host);
    CHECK(st == PYA_OK || fired);
    share_and_close(&world, ptr); /* what could not be given back then goes with the next */
    CHECK_EQ(fault_live(), live);
    give(&world, ptr);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    return fired;
}

static void
test_failures_lose_nothing(void) {
    unsigned long n = 1;
    for (; share_once("", n, false, PYA_E_DEVICE) && check_failures < 20; n += CHECK_ONE_IN) {
        (void)share_once("", n, false, PYA_E_NOMEM);
    }
    CHECK(n > 50);
    CHECK(share_once("", 1, true, PYA_OK));
    CHECK(!share_once("", 2, true, PYA_OK));
}

/* What cannot be given back or unmapped is kept until it can be. */
static void
test_failed_imports_go_later(void) {
    static const uint32_t kinds[] = {
        1U << PYA_SIM_PAGE_RELEASE, 1U << PYA_SIM_SET_ACCESS | 1U << PYA_SIM_UNMAP};
    for (size_t i = 0; i < 2; i++) {
        struct world world = {0};
        struct pya_shared shared;
        pya_dptr base;
        world_init(&world, "");
        pya_dptr ptr = take(&world, 5 * MIB, 0);
        CHECK_OK(pya_share(world.heap, ptr, &shared));
        pya_sim_fail(world.sim, kinds[i], 1, PYA_E_DEVICE, true);
        CHECK_EQ(import_all(world.heap, &shared, &base), PYA_E_DEVICE);
        CHECK_EQ(pya_import_close(world.heap, 1), PYA_E_FOREIGN); /* tries again, in vain */
        CHECK(pya_sim_fail_clear(world.sim));
        share_and_close(&world, ptr);
        give(&world, ptr);
        sweep_check_empty(world.heap, world.sim);
        world_fini(&world);
    }
}

static const struct check_case cases[] = {
    {"bytes_are_the_same", test_bytes_are_the_same},
    {"what_cannot_be_shared", test_what_cannot_be_shared},
    {"pending_blocks_are_gone", test_pending_blocks_are_gone},
    {"closing_waits", test_closing_waits},
    {"shared_memory_is_had_while_the_cache_is_emptied",
     test_shared_memory_is_had_while_the_cache_is_emptied},
    {"shared_memory_is_had_while_a_request_waits", test_shared_memory_is_had_while_a_request_waits},
    {"requests_wait_without_the_lock", test_requests_wait_without_the_lock},
    {"pool_that_goes_while_a_request_waits", test_pool_that_goes_while_a_request_waits},
    {"peers_are_let_in", test_peers_are_let_in},
    {"failures_lose_nothing", test_failures_lose_nothing},
    {"descriptors_come_all_or_none", test_descriptors_come_all_or_none},
    {"failed_imports_go_later", test_failed_imports_go_later},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
