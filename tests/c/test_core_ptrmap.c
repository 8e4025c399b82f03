/* The map of live blocks against a plain array: with spread addresses, and with addresses that all want the same few
 * buckets, so that full buckets, long ways past them and saturated counts come often. */
#include <stdlib.h>

#include "check.h"
#include "core/ptrmap.h"

enum { N_BLOCKS = 4000 };

static struct pya_block blocks[N_BLOCKS];
static bool is_in[N_BLOCKS];
static size_t n_in;

/* Distinct addresses; crowded: only such as have a hash that begins with the same byte. */
static void
choose_addresses(uint64_t *rng, bool crowded) {
    for (size_t i = 0; i < N_BLOCKS; i++) {
        uint64_t unit;
        do {
            unit = check_below(rng, UINT64_C(1) << 30) * N_BLOCKS + i + 1;
        } while (crowded && (unit * UINT64_C(0x9E3779B97F4A7C15)) >> 56 != 7);
        blocks[i].addr = unit * PYA_ALIGN;
        is_in[i] = false;
    }
    n_in = 0;
}

static void
check_find(struct pya_ptrmap *map, size_t i) {
    struct pya_ptrmap_slot slot;
    const struct pya_block *found = pya_ptrmap_find(map, blocks[i].addr, &slot);
    CHECK(found == (is_in[i] ? &blocks[i] : NULL));
    CHECK(pya_ptrmap_find(map, blocks[i].addr + 256, &slot) == NULL);
}

static void
toggle(struct pya_ptrmap *map, size_t i) {
    if (!is_in[i]) {
        CHECK_OK(pya_ptrmap_reserve(map));
        pya_ptrmap_insert(map, &blocks[i]);
        n_in++;
    } else {
        struct pya_ptrmap_slot slot;
        if (CHECK(pya_ptrmap_find(map, blocks[i].addr, &slot) == &blocks[i])) {
            pya_ptrmap_remove_at(map, slot);
        }
        n_in--;
    }
    is_in[i] = !is_in[i];
    check_find(map, i);
}

static void
count_visit(void *arg, struct pya_block *block) {
    size_t *n = arg;
    size_t i = (size_t)(block - blocks);
    CHECK(i < N_BLOCKS && is_in[i]);
    ++*n;
}

static void
check_all(struct pya_ptrmap *map) {
    size_t n = 0;
    pya_ptrmap_each(map, count_visit, &n);
    CHECK_EQ(n, n_in);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        check_find(map, i);
    }
}

/* In waves: mostly insertions, then mostly removals. */
static void
check_waves(bool crowded) {
    uint64_t rng = check_seed();
    struct pya_ptrmap map;
    pya_ptrmap_init(&map);
    choose_addresses(&rng, crowded);
    for (size_t wave = 0; wave < check_budget(4); wave++) {
        for (size_t step = 0; step < 3 * N_BLOCKS; step++) {
            size_t i = check_below(&rng, N_BLOCKS);
            bool is_wanted = wave % 2 == 0;
            if (is_in[i] != is_wanted || check_below(&rng, 4) == 0) {
                toggle(&map, i);
            }
            check_find(&map, check_below(&rng, N_BLOCKS));
        }
        check_all(&map);
    }
    for (size_t i = 0; i < N_BLOCKS; i++) {
        if (is_in[i]) {
            toggle(&map, i);
        }
    }
    check_all(&map);
    CHECK(pya_ptrmap_host_bytes(&map) > 0);
    pya_ptrmap_fini(&map);
    CHECK_EQ(pya_ptrmap_host_bytes(&map), 0);
}

static void
test_spread(void) {
    check_waves(false);
}

static void
test_crowded(void) {
    check_waves(true);
}

/* While a table grows, it stays below the bytes that a live block may cost. */
static void
test_host_bytes(void) {
    uint64_t rng = check_seed();
    struct pya_ptrmap map;
    pya_ptrmap_init(&map);
    choose_addresses(&rng, false);
    for (size_t i = 0; i < N_BLOCKS; i++) {
        toggle(&map, i);
        CHECK(i < 1000 || pya_ptrmap_host_bytes(&map) <= 48 * n_in);
    }
    pya_ptrmap_fini(&map);
}

/* A table that became empty goes back to the system in pieces, whether its entries were moved or removed. */
static void
check_pieces(bool is_taken_out) {
    enum { N = 60000, N_OUT = 36000, MOST = 256 << 10 };
    struct pya_block *many = calloc(N, sizeof *many);
    struct pya_ptrmap map;
    size_t before = 0;
    pya_ptrmap_init(&map);
    for (size_t i = 0; i < N; i++) {
        many[i].addr = (i + 1) * PYA_ALIGN;
        CHECK_OK(pya_ptrmap_reserve(&map));
        pya_ptrmap_insert(&map, &many[i]);
        size_t bytes = pya_ptrmap_host_bytes(&map);
        CHECK(bytes + MOST >= before);
        before = bytes;
        if (i % 1000 == 999 && i < N_OUT) {
            struct pya_ptrmap_slot slot;
            CHECK(pya_ptrmap_find(&map, many[i / 2].addr, &slot) == &many[i / 2]);
        }
        for (size_t k = 0; is_taken_out && i == N_OUT && k < N_OUT; k++) {
            struct pya_ptrmap_slot slot;
            CHECK(pya_ptrmap_find(&map, many[k].addr, &slot) == &many[k]);
            pya_ptrmap_remove_at(&map, slot);
        }
    }
    for (size_t i = is_taken_out ? N_OUT : 0; i < N; i++) {
        struct pya_ptrmap_slot slot;
        CHECK(pya_ptrmap_find(&map, many[i].addr, &slot) == &many[i]);
    }
    pya_ptrmap_fini(&map);
    free(many);
}

static void
test_pieces(void) {
    check_pieces(false);
    check_pieces(true);
}

static const struct check_case cases[] = {
    {"spread", test_spread},
    {"crowded", test_crowded},
    {"host_bytes", test_host_bytes},
    {"pieces", test_pieces},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
