/* A tensor that grows by appending, among what each step makes besides: enough is free for that only in the pages that
 * the tensor needs again. */
#include "fault.h"
#include "sweep.h"
#include "world.h"

enum { N_TEMPORARIES = 3, FROM = 60, STEPS = 300 };

struct append {
    size_t row, temporaries[N_TEMPORARIES]; /* bytes */
    bool keeps;                             /* temporaries live until the tensor has grown */
};

/* One step; *last is the tensor. */
static pya_status
append(struct world *world, const struct append *how, size_t step, pya_dptr *last) {
    pya_dptr temporaries[N_TEMPORARIES] = {0};
    pya_dptr row = 0;
    pya_dptr next = 0;
    pya_status st = PYA_OK;
    for (size_t i = 0; i < N_TEMPORARIES && st == PYA_OK; i++) {
        st = pya_alloc(world->heap, 0, how->temporaries[i], 0, &temporaries[i]);
    }
    st = st == PYA_OK ? pya_alloc(world->heap, 0, how->row, 0, &row) : st;
    for (size_t i = 0; i < N_TEMPORARIES && !how->keeps; i++) {
        CHECK_OK(pya_free(world->heap, temporaries[i]));
    }
    st = st == PYA_OK ? pya_alloc(world->heap, 0, (step + 1) * how->row, 0, &next) : st;
    if (st == PYA_OK) {
        CHECK_OK(pya_free(world->heap, *last));
        *last = next;
    }
    CHECK_OK(pya_free(world->heap, row));
    for (size_t i = 0; i < N_TEMPORARIES && how->keeps; i++) {
        CHECK_OK(pya_free(world->heap, temporaries[i]));
    }
    return st;
}

static void
append_all(struct world *world, const struct append *how, size_t n_steps, pya_dptr *last) {
    for (size_t step = 0; step < n_steps; step++) {
        CHECK_OK(append(world, how, step, last));
        CHECK_EQ(step % 8 == 0 ? pya_heap_check(world->heap, 0) : 0, 0);
    }
}

static size_t
peak_live(struct world *world) {
    return (size_t)stat_of(world->heap, 0, "allocated_bytes.all.peak");
}

/* Bytes of the nest that no request has. */
static size_t
hidden(struct world *world) {
    size_t bytes = 0;
    const struct pya_block *block = world->heap->cards.open[0]->hidden;
    for (; block != NULL; block = block->next_piece) {
        bytes += block->bytes;
    }
    return bytes;
}

static const struct append small_rows = {MIB / 2 + 4096, {MIB, 2 * MIB, MIB / 2}, true};
static const struct append rows = {3 * MIB - 4096, {3 * MIB, 6 * MIB, MIB + MIB / 2}, true};
static const struct append rows_alone = {3 * MIB - 4096, {3 * MIB, 6 * MIB, MIB + MIB / 2}, false};
static const struct append large = {3 * MIB - 4096, {20 * MIB, 30 * MIB, 12 * MIB}, true};
static const struct append large_alone = {3 * MIB - 4096, {20 * MIB, 30 * MIB, 12 * MIB}, false};
static const struct append *const appends[] = {
    &small_rows, &rows, &rows_alone, &large, &large_alone,
};

/* Without a nest: 1.08 to 1.5 of peak live, and up to 80 mappings a page. */
static void
test_ranges_stay_whole(void) {
    for (size_t i = 0; i < sizeof appends / sizeof *appends; i++) {
        struct world world = {.config = {.capacity_bytes = 4096 * MIB}};
        pya_dptr last = 0;
        world_init(&world, "");
        append_all(&world, appends[i], STEPS, &last);
        CHECK(reserved(&world) <= peak_live(&world) + peak_live(&world) / 32);
        CHECK(calls(&world, PYA_SIM_MAP) <= 16 * calls(&world, PYA_SIM_PAGE_CREATE));
        CHECK(hidden(&world) > 0);
        give(&world, last);
        world_fini(&world);
    }
}

/* A card that is hardly larger than what is live: what is hidden serves any request that would fail otherwise. */
static void
test_no_memory_is_lost(void) {
    for (size_t i = 0; i < sizeof appends / sizeof *appends; i++) {
        struct world world = {.config = {.capacity_bytes = 4096 * MIB}};
        pya_dptr last = 0;
        world_init(&world, "");
        append_all(&world, appends[i], STEPS, &last);
        struct world full = {.config = {.capacity_bytes = peak_live(&world) / PYA_PAGE * PYA_PAGE}};
        give(&world, last);
        world_fini(&world);
        full.config.capacity_bytes += 4 * PYA_PAGE;
        last = 0;
        world_init(&full, "");
        append_all(&full, appends[i], STEPS, &last);
        give(&full, last);
        world_fini(&full);
    }
}

/* What is hidden can be given back, is described as free, and other streams may take it. */
static void
test_hidden_memory_is_free(void) {
    struct world world = {.config = {.capacity_bytes = 2048 * MIB}};
    struct pya_memory_info info;
    pya_dptr last = 0;
    world_init(&world, "");
    append_all(&world, &rows, STEPS / 2, &last);
    CHECK(hidden(&world) >= 400 * MIB);
    size_t before = reserved(&world);
    CHECK_OK(pya_memory_info(world.heap, 0, &info));
    CHECK(info.cached_bytes >= before / 2 - 16 * MIB);
    CHECK_EQ(hidden(&world), 0);

    append_all(&world, &rows, 1, &last); /* small again */
    append_all(&world, &rows, STEPS / 2, &last);
    CHECK(hidden(&world) >= 400 * MIB);
    before = reserved(&world);
    pya_dptr other = take(&world, 400 * MIB, 16);
    CHECK_EQ(hidden(&world), 0);
    CHECK_EQ(reserved(&world), before);
    give(&world, other);

    append_all(&world, &rows, 1, &last);
    CHECK_OK(pya_empty_cache(world.heap, 0));
    CHECK(reserved(&world) <= 4 * MIB);
    give(&world, last);
    world_fini(&world);
}

/* Statistics do not tell whether bytes are hidden. */
static void
test_hidden_memory_is_inactive(void) {
    static const char key[] = "inactive_split_bytes.all.current";
    for (size_t i = 0; i < sizeof appends / sizeof *appends; i++) {
        struct world world = {.config = {.capacity_bytes = 4096 * MIB}};
        struct pya_memory_info info;
        pya_dptr last = 0;
        world_init(&world, "");
        append_all(&world, appends[i], STEPS, &last);
        pya_dptr row = take(&world, 5 * MIB / 2, 0); /* of a page, a part */
        CHECK(hidden(&world) > 0);
        const int64_t split = stat_of(world.heap, 0, key);
        CHECK_OK(pya_memory_info(world.heap, 0, &info));
        CHECK_EQ(hidden(&world), 0);
        CHECK_EQ(stat_of(world.heap, 0, key), split);
        give(&world, row);
        give(&world, last);
        world_fini(&world);
    }
}

/* Where the tensor no longer grows, the rest of the program has all memory again. */
static void
test_nest_is_left(void) {
    struct world world = {.config = {.capacity_bytes = 2048 * MIB}};
    pya_dptr ptrs[90];
    pya_dptr last = 0;
    world_init(&world, "");
    append_all(&world, &rows, STEPS / 2, &last);
    const size_t before = reserved(&world);
    CHECK(hidden(&world) >= 400 * MIB);
    for (size_t i = 0; i < 90; i++) {
        ptrs[i] = take(&world, 4 * MIB, 0);
    }
    CHECK_EQ(hidden(&world), 0);
    CHECK(reserved(&world) <= before + before / 32);
    for (size_t i = 0; i < 90; i++) {
        give(&world, ptrs[i]);
    }
    CHECK_EQ(hidden(&world), 0);
    give(&world, last);
    world_fini(&world);
}

/* Results that are larger in each step, but none of which lives while the next one is made: nothing is hidden from what
 * the rest of a step makes. */
static void
test_larger_steps_hide_nothing(void) {
    enum { KEPT = 40, LARGER_STEPS = 40 };
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    pya_dptr kept[KEPT];
    world_init(&world, "");
    for (size_t step = 0; step < LARGER_STEPS; step++) {
        for (size_t i = 0; i < KEPT; i++) {
            kept[i] = take(&world, 5 * MIB + step * MIB / 4, 0);
        }
        for (size_t i = 0; i < KEPT; i += 2) {
            give(&world, kept[i]);
        }
        pya_dptr result = take(&world, 150 * MIB + step * 9 * MIB, 0);
        give(&world, result);
        CHECK_EQ(hidden(&world), 0);
        for (size_t i = 1; i < KEPT; i += 2) {
            give(&world, kept[i]);
        }
    }
    CHECK(stat_of(world.heap, 0, "pyalloc_stitches") > LARGER_STEPS / 2);
    world_fini(&world);
}

/* Several tensors that grow in turn need what the one before left: soon hardly any of it is hidden.  Once only one of
 * them grows, its range is hidden again. */
static void
test_tensors_in_turn(void) {
    enum { N = 3, IN_TURN = 150 };
    static const size_t rows_of[N] = {3 * MIB - 4096, 5 * MIB / 2, 9 * MIB / 4};
    struct world world = {.config = {.capacity_bytes = 8192 * MIB}};
    pya_dptr last[N] = {0};
    size_t n_hidden = 0;
    world_init(&world, "");
    for (size_t step = 0; step < IN_TURN; step++) {
        for (size_t i = 0; i < N; i++) {
            struct append how = rows_alone;
            how.row = rows_of[i];
            CHECK_OK(append(&world, &how, step, &last[i]));
            n_hidden += hidden(&world) > 0;
        }
        CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    }
    CHECK(n_hidden < IN_TURN / 4);
    n_hidden = 0;
    for (size_t step = IN_TURN; step < STEPS; step++) {
        CHECK_OK(append(&world, &rows_alone, step, &last[0]));
        n_hidden += hidden(&world) > 0;
    }
    CHECK(n_hidden > (STEPS - IN_TURN) / 2);
    for (size_t i = 0; i < N; i++) {
        give(&world, last[i]);
    }
    world_fini(&world);
}

static pya_status
append_some(struct world *world, size_t step, size_t n_steps, pya_dptr *last) {
    pya_status st = PYA_OK;
    for (size_t i = 0; i < n_steps && st == PYA_OK; i++) {
        st = append(world, i % 4 == 3 ? &large_alone : &rows, step + i, last);
    }
    return st;
}

static bool
sweep_once(const char *options, unsigned long nth, bool host, pya_status with) {
    struct world world = {
        .config = {
            .capacity_bytes = 1024 * MIB, .address_bytes = (uint64_t)1 << 34, .quiet = true}};
    pya_dptr last = 0;
    size_t live_before = fault_live();
    world_init(&world, options);
    CHECK_OK(append_some(&world, FROM, 9, &last));
    CHECK(hidden(&world) > 0);
    sweep_arm(world.sim, nth, host, with);
    pya_status st = append_some(&world, FROM + 9, 8, &last);
    bool fired = sweep_disarm(world.sim, host);
    CHECK(fired || st == PYA_OK);
    CHECK_EQ(pya_heap_check(world.heap, 0), 0);
    CHECK_OK(append_some(&world, FROM + 9, 8, &last));
    give(&world, last);
    sweep_check_empty(world.heap, world.sim);
    world_fini(&world);
    CHECK_EQ(fault_live(), live_before);
    return fired;
}

static void
test_sweep(void) {
    sweep_all(sweep_once, "");
}

static const struct check_case cases[] = {
    {"ranges_stay_whole", test_ranges_stay_whole},
    {"no_memory_is_lost", test_no_memory_is_lost},
    {"hidden_memory_is_free", test_hidden_memory_is_free},
    {"hidden_memory_is_inactive", test_hidden_memory_is_inactive},
    {"nest_is_left", test_nest_is_left},
    {"larger_steps_hide_nothing", test_larger_steps_hide_nothing},
    {"tensors_in_turn", test_tensors_in_turn},
    {"sweep", test_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
