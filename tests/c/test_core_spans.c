/* Spans of addresses, compared with a map of every address. */
#include "core/spans.h"

#include <stdlib.h>

#include "check.h"
#include "fault.h"

enum { N_ADDRESSES = 64, N_MOST = 12, N_ROUNDS = 20000 };

/* The number of addresses from `at` on, before `end`, that nobody wants. */
static size_t
left_at(const bool *is_wanted, size_t at, size_t end) {
    size_t n = 0;
    while (at + n < end && !is_wanted[at + n]) {
        n++;
    }
    return n;
}

static struct pya_span
leave_naively(const bool *is_wanted, struct pya_span all, size_t bytes) {
    struct pya_span best = {0, 0};
    for (size_t at = all.addr; at < all.end; at++) {
        size_t n = left_at(is_wanted, at, all.end);
        if (n >= bytes && (best.end == 0 || n < best.end - best.addr)) {
            best = (struct pya_span){at, at + n};
        }
        at += n;
    }
    return best;
}

static void
check_joined(const struct pya_spans *spans, const bool *is_wanted) {
    bool is_in[N_ADDRESSES] = {false};
    for (size_t i = 0; i < spans->n; i++) {
        CHECK(i == 0 || spans->items[i].addr > spans->items[i - 1].end);
        for (pya_dptr at = spans->items[i].addr; at < spans->items[i].end; at++) {
            is_in[at] = true;
        }
    }
    CHECK_EQ(memcmp(is_in, is_wanted, sizeof is_in), 0);
}

static void
test_as_a_map_says(void) {
    uint64_t seed = check_seed();
    for (size_t round = 0; round < check_budget(N_ROUNDS); round++) {
        struct pya_spans spans = {.is_whole = true};
        bool is_wanted[N_ADDRESSES] = {false};
        size_t n = check_random(&seed) % N_MOST;
        for (size_t i = 0; i < n; i++) {
            size_t addr = check_random(&seed) % N_ADDRESSES;
            size_t bytes = 1 + check_random(&seed) % 10;
            bytes = bytes < N_ADDRESSES - addr ? bytes : N_ADDRESSES - addr;
            memset(is_wanted + addr, true, bytes);
            pya_spans_add(&spans, addr, bytes);
        }
        CHECK_EQ(spans.n_added, n);
        pya_spans_join(&spans);
        check_joined(&spans, is_wanted);
        struct pya_span all = {.addr = check_random(&seed) % N_ADDRESSES};
        all.end = all.addr + 1 + check_random(&seed) % (N_ADDRESSES - all.addr);
        size_t bytes = 1 + check_random(&seed) % 8;
        struct pya_span left = pya_spans_leave(&spans, all, bytes);
        struct pya_span naive = leave_naively(is_wanted, all, bytes);
        CHECK_EQ(left.addr, naive.addr);
        CHECK_EQ(left.end, naive.end);
        free(spans.items);
    }
}

/* Only spans that meet one of some others are kept, and those whole. */
static void
test_within_others(void) {
    uint64_t seed = check_seed();
    for (size_t round = 0; round < check_budget(N_ROUNDS); round++) {
        struct pya_spans others = {.is_whole = true};
        struct pya_spans spans = {.is_whole = true, .within = &others};
        bool is_other[N_ADDRESSES] = {false};
        bool is_wanted[N_ADDRESSES] = {false};
        for (size_t i = 0; i < 4; i++) {
            size_t addr = check_random(&seed) % (N_ADDRESSES - 8);
            memset(is_other + addr, true, 8);
            pya_spans_add(&others, addr, 8);
        }
        pya_spans_join(&others);
        for (size_t i = 0; i < N_MOST; i++) {
            size_t addr = check_random(&seed) % (N_ADDRESSES - 4);
            bool meets = memchr(is_other + addr, true, 4) != NULL;
            memset(is_wanted + addr, true, meets ? 4 : 0);
            pya_spans_add(&spans, addr, 4);
        }
        CHECK_EQ(spans.n_added, N_MOST);
        pya_spans_join(&spans);
        check_joined(&spans, is_wanted);
        free(spans.items);
        free(others.items);
    }
}

/* A span for which there was no host memory is not forgotten silently. */
static void
test_no_host_memory(void) {
    struct pya_spans spans = {.is_whole = true};
    pya_spans_add(&spans, 0, 1);
    CHECK(spans.is_whole && spans.n == 1);
    while (spans.n < spans.n_room) {
        pya_spans_add(&spans, 2 * spans.n, 1);
    }
    fault_arm(1);
    pya_spans_add(&spans, 2 * spans.n, 1);
    CHECK(fault_disarm());
    CHECK(!spans.is_whole);
    size_t n = spans.n;
    pya_spans_join(&spans);
    CHECK_EQ(spans.n, n);
    free(spans.items);
}

static const struct check_case cases[] = {
    {"as_a_map_says", test_as_a_map_says},
    {"within_others", test_within_others},
    {"no_host_memory", test_no_host_memory},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
