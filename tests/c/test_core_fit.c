/* Which free run a request gets: the smallest that is large enough, for every size that a card can have. */
#include "core/move.h"
#include "world.h"

#define KIB ((size_t)1 << 10)
#define GIB ((size_t)1 << 30)

/* In ascending order: small and large sizes, neighbours, and sizes beyond the largest that has a treap of its own. */
static const size_t sizes[] = {
    4 * KIB,       768 * KIB,      1 * MIB - 512, 1 * MIB,        1 * MIB + 512, 3 * MIB,
    3 * MIB + 512, 3 * MIB + 1024, 30 * MIB,      30 * MIB + 512, 50 * MIB,      GIB,
    GIB + 512,     64 * GIB - 512, 64 * GIB,      65 * GIB,       66 * GIB,
};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static size_t
smallest_for(size_t bytes) {
    size_t i = 0;
    while (sizes[i] < bytes) {
        i++;
    }
    return i;
}

static void
test_smallest_run_is_taken(void) {
    struct world world = {.config = {.capacity_bytes = 512 * GIB}};
    pya_dptr holes[N_SIZES];
    pya_dptr between[N_SIZES];
    world_init(&world, "");
    /* Made in no order of size, with a live block between two runs. */
    for (size_t i = 0; i < N_SIZES; i++) {
        size_t k = i * 7 % N_SIZES;
        holes[k] = take(&world, sizes[k], 0);
        between[k] = take(&world, 512, 0);
    }
    for (size_t i = 0; i < N_SIZES; i++) {
        give(&world, holes[i * 5 % N_SIZES]);
    }
    give(&world, take(&world, 512, 0)); /* no run is put aside for a request of its size */
    for (size_t i = 0; i < N_SIZES; i++) {
        for (size_t less = 0; less <= 1024; less += 512) {
            size_t bytes = sizes[i] - less;
            size_t k = smallest_for(bytes);
            pya_dptr ptr = take(&world, bytes, 0);
            CHECK(ptr >= holes[k] && ptr + bytes <= holes[k] + sizes[k]);
            CHECK_EQ(pya_heap_check(world.heap, 0), 0);
            give(&world, ptr);
        }
    }
    for (size_t i = 0; i < N_SIZES; i++) {
        give(&world, between[i]);
    }
    world_fini(&world);
}

/* Of runs of equal size, the lowest. */
static void
test_lowest_of_equals(void) {
    static const size_t equal[] = {64 * KIB, 5 * MIB, 40 * MIB};
    enum { N = 6 };
    struct world world = {.config = {.capacity_bytes = GIB}};
    world_init(&world, "");
    for (size_t s = 0; s < sizeof equal / sizeof *equal; s++) {
        pya_dptr ptrs[N];
        pya_dptr between[N];
        for (size_t i = 0; i < N; i++) {
            ptrs[i] = take(&world, equal[s], 0);
            between[i] = take(&world, 512, 0);
        }
        pya_dptr lowest = ptrs[0];
        for (size_t i = 0; i < N; i++) {
            lowest = ptrs[i] < lowest ? ptrs[i] : lowest;
        }
        for (size_t i = 0; i < N; i++) {
            give(&world, ptrs[i * 5 % N]);
        }
        give(&world, take(&world, 1536, 0));
        CHECK_EQ(take(&world, equal[s], 0), lowest);
        give(&world, lowest);
        for (size_t i = 0; i < N; i++) {
            give(&world, between[i]);
        }
    }
    world_fini(&world);
}

/* Of all free pages, the lowest, however many are requested and in whatever order they became free. */
static void
test_lowest_pages_are_picked(void) {
    enum { N = 60, N_EACH = 9 };
    struct world world = {.config = {.capacity_bytes = 2 * GIB}};
    pya_dptr ptrs[2 * N];
    pya_page_id ids[N * N_EACH];
    pya_dptr pages[N * N_EACH];
    size_t n_pages = 0;
    size_t n;
    uint64_t seed = check_seed();
    world_init(&world, "memory:tight"); /* without grains, which the pick may have to pass over */
    for (size_t i = 0; i < 2 * (size_t)N; i++) {
        ptrs[i] = take(&world, i % 2 != 0 ? 512 : MIB + check_below(&seed, 32) * (MIB / 2), 0);
    }
    for (size_t i = 0; i < N; i++) {
        give(&world, ptrs[2 * (i * 7 % N)]);
    }
    CHECK_EQ(pya_heap_check(world.heap, 0), 0); /* no run is put aside */
    struct pya_arena *arena = pya_heap_open_card(world.heap, 0)->common;
    const struct pya_range *range = arena->ranges;
    struct pya_block *except = NULL;
    for (struct pya_block *run = range->first; run != NULL; run = run->next) {
        size_t n_here = pya_run_pages(run->addr, run->bytes);
        if (run->state == PYA_BLOCK_FREE && n_here > 1 && except == NULL) {
            except = run;
        } else if (run->state == PYA_BLOCK_FREE) {
            for (size_t i = 0; i < n_here; i++) {
                pages[n_pages++] = pya_round_up(run->addr, PYA_PAGE) + i * PYA_PAGE;
            }
        }
    }
    CHECK(n_pages > N && except != NULL);
    for (size_t n_most = 0; n_most <= n_pages + 1; n_most++) {
        CHECK_OK(pya_pages_pick(arena, n_most, NULL, except, ids, &n));
        CHECK_EQ(n, n_most < n_pages ? n_most : n_pages);
        for (size_t i = 0; i < n; i++) {
            CHECK_EQ(pya_range_addr(range, arena->card->pages.items[ids[i]].slot), pages[i]);
        }
    }
    world_fini(&world);
}

/* A run that is alone in its ring but has links would leave the ring as if it were one of two. */
static void
test_links_of_one_alone_are_noticed(void) {
    static struct pya_fit fit;
    struct pya_block run = {.addr = PYA_PAGE, .bytes = 512, .state = PYA_BLOCK_FREE};
    pya_fit_init(&fit);
    pya_fit_insert(&fit, &run);
    CHECK_EQ(pya_fit_check(&fit), 0);
    run.before = &run;
    CHECK_EQ(pya_fit_check(&fit), 1);
    run.after = &run;
    CHECK_EQ(pya_fit_check(&fit), 1);
}

static const struct check_case cases[] = {
    {"smallest_run_is_taken", test_smallest_run_is_taken},
    {"lowest_of_equals", test_lowest_of_equals},
    {"lowest_pages_are_picked", test_lowest_pages_are_picked},
    {"links_of_one_alone_are_noticed", test_links_of_one_alone_are_noticed},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
