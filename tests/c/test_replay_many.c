/* The what-if policies with more streams and pools than a program has. */
#include "models.h"

#include "core/debug.h"

/* More streams than the addresses hold ranges of 9/8 of the device. */
static void
test_expandable_with_few_addresses(void) {
    enum { N_STREAMS = 64 };
    pya_stream streams[N_STREAMS];
    struct pya_model_block *held[N_STREAMS][2];
    for (unsigned s = 0; s < N_STREAMS; s++) {
        streams[s] = 16 * s;
    }
    const struct pya_model_config model = {
        .expandable = true, .n_streams = N_STREAMS, .streams = streams};
    struct bench b = bench_of(model, 4096 * MIB, PYA_SIM_WORK_AT_ONCE);
    for (unsigned s = 0; s < N_STREAMS; s++) {
        held[s][0] = take(b, 512, s);
        held[s][1] = take(b, 30 * MIB, s);
    }
    CHECK_EQ(reserved(b), N_STREAMS * 42 * MIB);
    for (unsigned s = 0; s < N_STREAMS; s++) {
        give(b, held[s][0]);
        give(b, held[s][1]);
    }
    CHECK_OK(pya_model_empty_cache(b.model));
    CHECK_EQ(reserved(b), 0);
    give(b, take(b, 4000 * MIB, N_STREAMS - 1)); /* beyond the range it has */
    close_bench(b);
}

/* However many pools and streams there are: only those that have something are asked for it. */
static void
test_emptying_an_empty_cache(void) {
    static pya_stream streams[PYA_MODEL_STREAMS];
    const struct pya_model_config model = {.n_streams = PYA_MODEL_STREAMS, .streams = streams};
    for (unsigned s = 0; s < PYA_MODEL_STREAMS; s++) {
        streams[s] = 16 * s;
    }
    struct bench b = bench_of(model, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
    for (unsigned p = 1; p < 64; p++) {
        CHECK_OK(pya_model_pool_begin(b.model, p));
        give(b, take(b, 512, PYA_MODEL_STREAMS - p));
        pya_model_pool_end(b.model);
        CHECK_EQ(reserved(b), 2 * MIB);
        CHECK_OK(pya_model_empty_cache(b.model));
        CHECK_EQ(reserved(b), 2 * MIB); /* it has a user */
        pya_model_pool_release(b.model, p);
        CHECK_OK(pya_model_empty_cache(b.model));
        CHECK_EQ(reserved(b), 0);
    }
#if PYA_ASSERT_LEVEL >= 2
    unsigned long before = pya_debug_steps;
    CHECK_OK(pya_model_empty_cache(b.model));
    CHECK(pya_debug_steps - before <= PYA_MODEL_POOLS);
#endif
    close_bench(b);
}

static const struct check_case cases[] = {
    {"expandable_with_few_addresses", test_expandable_with_few_addresses},
    {"emptying_an_empty_cache", test_emptying_an_empty_cache},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
