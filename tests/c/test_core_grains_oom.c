/* Real shortage: no random program is out of memory as long as its free whole grains and the pages that can still be
 * made are as much as it requests.  On several streams, with limits, and beside another process. */
#include "core/move.h"
#include "world.h"

#define GIB ((size_t)1 << 30)

struct tally {
    size_t n_ooms;
    size_t n_false;
    size_t n_broken;  /* enough with the pages of broken grains */
    size_t n_grained; /* if there were larger grains at all */
};

/* pya_alloc() just failed. */
static void
tally_oom(struct tally *tally, struct world *world, size_t bytes) {
    struct pya_card *card = world->heap->cards.open[0];
    const size_t n_wanted = pya_pages_for(bytes);
    size_t free_bytes, total_bytes;
    size_t n_whole = 0;
    size_t n_free = 0;
    pya_lock_acquire(&card->lock);
    for (const struct pya_arena *arena = card->arenas; arena != NULL; arena = arena->next) {
        n_free += arena->free_pages;
        n_whole += pya_pages_to_pick(arena, SIZE_MAX, false);
    }
    CHECK_OK(pya_device_mem_info(card->dev, &free_bytes, &total_bytes));
    size_t room = pya_card_room(card);
    pya_lock_release(&card->lock);
    room = room < free_bytes ? room : free_bytes;
    tally->n_ooms++;
    tally->n_grained += card->pages.n_grained > 0;
    tally->n_false += n_whole + room / PYA_PAGE >= n_wanted;
    tally->n_broken += n_free + room / PYA_PAGE >= n_wanted;
}

/* Another process has a share of the card's memory. */
static void
random_program(struct tally *tally, const char *options, uint64_t seed, int n_operations) {
    enum { N = 96 };
    const size_t bytes_there = 2 * GIB + check_below(&seed, 512) * PYA_PAGE;
    const uint64_t n_streams = 1 + 2 * check_below(&seed, 2);
    struct world world = {
        .config = {
            .capacity_bytes = bytes_there + check_below(&seed, 4) * bytes_there / 3,
            .address_bytes = (uint64_t)1 << 36}};
    pya_dptr ptrs[N] = {0};
    world_init(&world, options);
    CHECK_OK(pya_reserve(world.heap, 0, 0, 0)); /* opens the card */
    pya_sim_set_capacity(world.sim, bytes_there);
    for (int i = 0; i < n_operations; i++) {
        size_t k = check_below(&seed, N);
        if (ptrs[k] != 0) {
            if (check_below(&seed, 3) != 0) {
                give(&world, ptrs[k]);
                ptrs[k] = 0;
            }
            continue;
        }
        size_t bytes = (1 + check_below(&seed, 60)) * PYA_PAGE;
        if (check_below(&seed, 2) != 0) {
            bytes = (size_t)512 << check_below(&seed, 20);
            bytes += check_below(&seed, 2) != 0 ? check_below(&seed, bytes) : 0;
        }
        pya_status st = pya_alloc(world.heap, 0, bytes, check_below(&seed, n_streams), &ptrs[k]);
        if (st == PYA_E_NOMEM) {
            ptrs[k] = 0;
            tally_oom(tally, &world, bytes);
        } else {
            CHECK_OK(st);
        }
        if (i % 256 == 0) {
            CHECK_EQ(pya_heap_check(world.heap, 0), 0);
        }
    }
    for (size_t k = 0; k < N; k++) {
        if (ptrs[k] != 0) {
            give(&world, ptrs[k]);
        }
    }
    world_fini(&world);
}

static void
test_out_of_memory_is_never_false(void) {
    static const char *const options[] = {
        "",
        "memory:fast",
        "memory:tight",
        "memory:fast,soft_limit:500MiB",
        "memory:fast,shared_pages:False",
        "memory:fast,limit:1700MiB",
        "memory:fast,limit:1701MiB,shared_pages:False",
    };
    const int n_programs = (int)check_budget(24);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        struct tally tally = {0};
        for (int r = 0; r < n_programs; r++) {
            random_program(&tally, options[i], check_seed() + (uint64_t)r * 977 + i, 2500);
        }
        printf(
            "\"%s\": %zu times out of memory, %zu with larger grains, %zu falsely, %zu with enough free in broken ones\n",
            options[i], tally.n_ooms, tally.n_grained, tally.n_false, tally.n_broken);
        CHECK(tally.n_grained > 0 || strstr(options[i], "tight") != NULL);
        CHECK_EQ(tally.n_false, 0);
    }
}

static const struct check_case cases[] = {
    {"out_of_memory_is_never_false", test_out_of_memory_is_never_false},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
