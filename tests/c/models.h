#pragma once
/* A model of torch's allocator on a simulated device, for tests of the what-if policies. */
#include "check.h"

#include "device/sim.h"
#include "replay/model.h"

#define MIB ((size_t)1 << 20)

static const pya_stream two_streams[] = {0, 7};

struct bench {
    struct pya_sim *sim;
    struct pya_model *model;
};

static inline struct bench
bench_of(struct pya_model_config model, size_t capacity, enum pya_sim_work work) {
    struct bench bench = {NULL, NULL};
    struct pya_sim_config config = {
        .capacity_bytes = capacity, .address_bytes = UINT64_C(1) << 36, .work = work};
    CHECK_OK(pya_sim_create(&config, 0, &bench.sim));
    CHECK_OK(pya_model_create(pya_sim_device(bench.sim), &model, &bench.model));
    return bench;
}

static inline struct bench
open_bench(bool expandable, size_t capacity, enum pya_sim_work work) {
    const struct pya_model_config model = {
        .expandable = expandable, .n_streams = 2, .streams = two_streams};
    return bench_of(model, capacity, work);
}

static inline void
close_bench(struct bench bench) {
    CHECK_EQ(pya_model_check(bench.model), 0);
    pya_model_destroy(bench.model);
    struct pya_sim_state state;
    pya_sim_query(bench.sim, &state);
    CHECK_EQ(state.n_pages + state.n_mappings + state.n_ranges + state.n_plain + state.n_events, 0);
    CHECK_EQ(state.n_violations, 0);
    pya_device_close(pya_sim_device(bench.sim));
}

static inline uint64_t
reserved(struct bench bench) {
    struct pya_model_stats stats;
    pya_model_query(bench.model, &stats);
    return stats.reserved_bytes;
}

static inline struct pya_model_block *
take(struct bench bench, size_t bytes, unsigned stream) {
    struct pya_model_block *block = NULL;
    CHECK_OK(pya_model_alloc(bench.model, bytes, stream, &block));
    return block;
}

static inline void
give(struct bench bench, struct pya_model_block *block) {
    CHECK_OK(pya_model_free(bench.model, block));
}
