/* Callers that are hostile or unlucky, and what fuzzing found: each finding is a case here. */
#include "check.h"
#include "core/heap.h"
#include "device/sim.h"
#include "fault.h"

struct world {
    struct pya_heap *heap;
    struct pya_sim *sim;
    struct pya_sim_config config;
};

static pya_status
world_open(void *arg, int index, struct pya_device **out) {
    struct world *world = arg;
    pya_status st = pya_sim_create(&world->config, index, &world->sim);
    if (st == PYA_OK) {
        *out = pya_sim_device(world->sim);
    }
    return st;
}

static void
world_init(struct world *world, const char *text, size_t capacity) {
    char message[200] = "";
    struct pya_options options;
    struct pya_hooks hooks = {.arg = world, .open_device = world_open};
    *world =
        (struct world){.config = {.capacity_bytes = capacity, .address_bytes = (uint64_t)1 << 34}};
    pya_options_init(&options);
    CHECK_OK(pya_options_parse(&options, text, message, sizeof message));
    CHECK_OK(pya_heap_create(&options, &hooks, &world->heap));
}

static void
world_fini(struct world *world) {
    struct pya_sim_state state;
    CHECK_EQ(pya_heap_check(world->heap, 0), 0);
    CHECK_OK(pya_empty_cache(world->heap, -1));
    pya_sim_query(world->sim, &state);
    CHECK_EQ(state.n_violations, 0);
    CHECK_EQ(state.used_bytes, 0);
    pya_heap_destroy(world->heap);
}

/* A segment of 20 MiB is not "too large to split" for the request it was made for. */
static void
test_small_max_split(void) {
    static const char *const options[] = {
        "vmm:False,max_split_size:20MB", "vmm:False,max_split_size:1MB"};
    for (size_t i = 0; i < 2; i++) {
        struct world world;
        pya_dptr small, large;
        world_init(&world, options[i], (size_t)1 << 30);
        CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &small));
        CHECK_OK(pya_alloc(world.heap, 0, (size_t)7 << 20, 0, &large));
        CHECK_OK(pya_free(world.heap, small));
        CHECK_OK(pya_free(world.heap, large));
        world_fini(&world);
    }
}

/* More than the card has: out of device memory, whatever else there is, and not one page is asked for. */
static void
test_impossible_sizes(void) {
    static const size_t sizes[] = {
        ((size_t)1 << 30) + 1, (size_t)1 << 40, (size_t)1 << 50, (size_t)1 << 60};
    struct world world;
    pya_dptr one, two, ptr = 7;
    world_init(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &one));
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 16, &two));
    struct pya_sim_state before, after;
    pya_sim_query(world.sim, &before);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_EQ(pya_alloc(world.heap, 0, sizes[i], 16, &ptr), PYA_E_NOMEM);
    }
    CHECK_EQ(pya_alloc(world.heap, 0, ((size_t)1 << 60) + 1, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)1 << 63, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(pya_alloc(world.heap, 0, SIZE_MAX, 0, &ptr), PYA_E_TOO_LARGE);
    CHECK_EQ(ptr, 7);
    pya_sim_query(world.sim, &after);
    CHECK_EQ(after.n_calls[PYA_SIM_PAGE_CREATE], before.n_calls[PYA_SIM_PAGE_CREATE]);
    CHECK_OK(pya_free(world.heap, one));
    CHECK_OK(pya_free(world.heap, two));
    world_fini(&world);
}

/* A pool whose only user leaves between begin and end is gone after end. */
static void
test_release_before_end(void) {
    struct world world;
    struct pya_pool_id id = {7, 1};
    pya_dptr ptr;
    world_init(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_pool_begin(world.heap, 0, id, (struct pya_stream_filter){0}));
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 0, &ptr));
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_OK(pya_pool_trim(world.heap, 0, id));
    CHECK_OK(pya_pool_release(world.heap, 0, id));
    CHECK_EQ(pya_pool_release(world.heap, 0, id), PYA_E_INVAL);
    CHECK_OK(pya_pool_end(world.heap, 0, id));
    CHECK_EQ(pya_pool_list(world.heap, 0, NULL, 0), 0);
    CHECK_EQ(pya_pool_end(world.heap, 0, id), PYA_E_INVAL);
    world_fini(&world);
}

/* Pages whose move to another stream failed half way, and could not be undone, are mapped there without access:
 * nobody may be given that address later. */
static void
test_failed_move_is_not_revived(void) {
    struct world world;
    pya_dptr own, other, ptr;
    world_init(&world, "", (size_t)1 << 30);
    CHECK_OK(pya_alloc(world.heap, 0, 5000, 32, &own));
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)16 << 20, 16, &other));
    CHECK_OK(pya_free(world.heap, other));
    pya_sim_fail(world.sim, 1U << PYA_SIM_SET_ACCESS | 1U << PYA_SIM_UNMAP, 1, PYA_E_DEVICE, true);
    CHECK_EQ(pya_alloc(world.heap, 0, (size_t)8 << 20, 32, &ptr), PYA_E_DEVICE);
    CHECK(pya_sim_fail_clear(world.sim));
    CHECK_OK(pya_alloc(world.heap, 0, (size_t)8 << 20, 32, &ptr));
    CHECK_OK(pya_sim_own(world.sim, ptr, (size_t)8 << 20));
    pya_sim_disown(world.sim, ptr, (size_t)8 << 20);
    CHECK_OK(pya_free(world.heap, ptr));
    CHECK_OK(pya_free(world.heap, own));
    world_fini(&world);
}

static const struct check_case cases[] = {
    {"failed_move_is_not_revived", test_failed_move_is_not_revived},
    {"release_before_end", test_release_before_end},
    {"impossible_sizes", test_impossible_sizes},
    {"small_max_split", test_small_max_split},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
