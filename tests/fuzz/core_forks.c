/* Forked children: the heap is their parent's.  Their calls are refused or answered, but never wait. */
#include <sys/wait.h>
#include <unistd.h>

#include "core/snapshot.h"
#include "core_model.h"

/* Also with a card that another thread was changing. */
static void
child_looks(struct world *world) {
    static int64_t values[1024];
    struct pya_heap *heap = world->heap;
    struct pya_memory_info info;
    struct pya_snapshot snap;
    struct pya_pool_info pools[N_POOLS];
    struct pya_oom_info oom;
    pya_dptr ptr = world->n_live == 0 ? PYA_ALIGN : world->live[0].ptr;
    pya_dptr base;
    size_t bytes;
    uint64_t n_allocs, n_frees;
    for (int d = 0; d < N_DEVICES; d++) {
        pya_status st = pya_stats_get(heap, d, values);
        REQUIRE(st == PYA_OK || st == PYA_E_FORKED);
        REQUIRE(pya_pool_list(heap, d, pools, N_POOLS) <= N_POOLS);
        (void)pya_get_limit(heap, d, PYA_LIMIT_HARD);
        (void)pya_get_fraction(heap, d);
        (void)!pya_memory_info(heap, d, &info);
    }
    pya_heap_counts(heap, &n_allocs, &n_frees);
    pya_heap_oom_info(heap, &oom);
    (void)!pya_block_info(heap, ptr, &base, &bytes, &(int){0});
    if (pya_snapshot_take(heap, NULL, true, &snap) == PYA_OK) {
        pya_snapshot_fini(&snap);
    }
}

static void
child_asks(struct world *world, int d) {
    struct pya_heap *heap = world->heap;
    struct pya_stream_filter filter = {NULL, NULL, NULL, 0};
    pya_dptr ptr = world->n_live == 0 ? PYA_ALIGN : world->live[0].ptr;
    REQUIRE_EQ(pya_alloc(heap, d, 512, 0, &(pya_dptr){0}), PYA_E_FORKED);
    REQUIRE_EQ(pya_free(heap, ptr), PYA_E_FORKED);
    REQUIRE_EQ(pya_record_stream(heap, ptr, 16), PYA_OK);
    REQUIRE_EQ(pya_share(heap, ptr, &(struct pya_shared){0}), PYA_E_FORKED);
    REQUIRE_EQ(pya_import_close(heap, 1), PYA_E_FORKED);
    REQUIRE_EQ(pya_empty_cache(heap, -1), PYA_E_FORKED);
    REQUIRE_EQ(pya_trim(heap, d, 1 << 20), PYA_E_FORKED);
    REQUIRE_EQ(pya_reserve(heap, d, 1 << 20, 0), PYA_E_FORKED);
    REQUIRE_EQ(pya_set_limit(heap, d, PYA_LIMIT_SOFT, 1 << 20), PYA_E_FORKED);
    REQUIRE_EQ(pya_set_fraction(heap, d, 0.5), PYA_E_FORKED);
    REQUIRE_EQ(pya_enable_peer(heap, d, 1 - d), PYA_E_FORKED);
    REQUIRE_EQ(pya_pool_begin(heap, d, pool_id(0), filter), PYA_E_FORKED);
    REQUIRE_EQ(pya_pool_end(heap, d, pool_id(0)), PYA_E_FORKED);
    REQUIRE_EQ(pya_pool_release(heap, d, pool_id(0)), PYA_E_FORKED);
    REQUIRE_EQ(pya_pool_retain(heap, d, pool_id(1), false), PYA_E_FORKED);
    REQUIRE_EQ(pya_pool_trim(heap, d, pool_id(1)), PYA_E_FORKED);
    (void)pya_note_foreign_stream(heap, 16, d);
}

static void
child_run(struct world *world, bool is_within) {
    world->is_child = true;
    (void)alarm(20 * 60); /* the parent's is not the child's; a loaded machine takes long */
    world->has_pressure = world->has_meanwhile = false;
    child_looks(world);
    for (int d = 0; d < N_DEVICES; d++) {
        child_asks(world, d);
    }
    child_looks(world);
    const bool is_torn = world->heap->torn_cards != 0;
    pya_heap_destroy(world->heap);
    if (is_torn || is_within) {
        return; /* what another thread or this call was changing is left alone */
    }
    REQUIRE_EQ(world->n_contexts, 0);
    REQUIRE_EQ(world->n_filters, 0);
    REQUIRE_EQ(fault_live(), world->n_host);
}

static void
fork_child(struct world *world, bool is_within) {
    const bool is_used =
        world->sims[0] != NULL || world->sims[1] != NULL; /* otherwise it is the child's as well */
    if (!world->may_fork || !is_used || world->is_rehearsal || world->has_host_fault) {
        return;
    }
    world->may_fork = false;
    pid_t child = fork();
    if (child == 0) {
        child_run(world, is_within);
        _exit(0);
    }
    int status = -1;
    REQUIRE_EQ(waitpid(child, &status, 0), child);
    REQUIRE_EQ(status, 0);
}

void
op_fork(struct world *world) {
    fork_child(world, world->depth > 0);
}

void
world_fork(struct world *world) {
    fork_child(world, true);
}
