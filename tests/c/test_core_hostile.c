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
    *world = (struct world){.config = {.capacity_bytes = capacity, .address_bytes = (uint64_t)1 << 34}};
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
    static const char *const options[] = {"vmm:False,max_split_size:20MB", "vmm:False,max_split_size:1MB"};
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
    static const size_t sizes[] = {((size_t)1 << 30) + 1, (size_t)1 << 40, (size_t)1 << 50, (size_t)1 << 60};
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

static const struct check_case cases[] = {
    {"impossible_sizes", test_impossible_sizes},
    {"small_max_split", test_small_max_split},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
