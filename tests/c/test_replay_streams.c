/* Replays, and the models of torch's allocators, with as many streams as a program may have. */
#include "check.h"

#include "device/sim.h"
#include "replay/model.h"
#include "replay/replay.h"

#define MIB ((size_t)1 << 20)

static pya_stream streams[PYA_MODEL_STREAMS];

static struct pya_sim *
open_sim(void) {
    struct pya_sim_config config = {
        .capacity_bytes = 512 * MIB,
        .address_bytes = UINT64_C(1) << 36,
        .work = PYA_SIM_WORK_BY_HAND};
    struct pya_sim *sim = NULL;
    CHECK_OK(pya_sim_create(&config, 0, &sim));
    return sim;
}

static struct pya_model *
open_model(struct pya_sim *sim, bool expandable) {
    struct pya_model_config config = {
        .expandable = expandable, .n_streams = PYA_MODEL_STREAMS, .streams = streams};
    struct pya_model *model = NULL;
    for (unsigned s = 0; s < PYA_MODEL_STREAMS; s++) {
        streams[s] = 7 * s;
    }
    CHECK_OK(pya_model_create(pya_sim_device(sim), &config, &model));
    return model;
}

static struct pya_model_block *
take(struct pya_model *model, unsigned stream) {
    struct pya_model_block *block = NULL;
    CHECK_OK(pya_model_alloc(model, 20 * MIB, stream, &block));
    return block;
}

/* A block waits for each stream that it was used on, however many there are, and for each once. */
static void
test_uses(void) {
    static const unsigned used[] = {PYA_MODEL_STREAMS - 1, 63, 64, 1, 64};
    for (int expandable = 0; expandable < 2; expandable++) {
        struct pya_sim *sim = open_sim();
        struct pya_model *model = open_model(sim, expandable != 0);
        struct pya_model_block *on_last = take(model, PYA_MODEL_STREAMS - 1);
        struct pya_model_block *waiting = take(model, 0);
        for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
            CHECK_OK(pya_model_record_stream(waiting, used[i]));
        }
        CHECK_OK(pya_model_free(model, waiting));
        struct pya_sim_state state;
        pya_sim_query(sim, &state);
        CHECK_EQ(state.n_events, 4);
        for (size_t i = 0; i < 4; i++) {
            struct pya_model_block *more = take(model, 0);
            struct pya_model_stats stats;
            pya_model_query(model, &stats);
            CHECK_EQ(stats.reserved_bytes, (60 + 20 * i) * MIB); /* it is not free yet */
            CHECK_OK(pya_model_record_stream(more, 2)); /* and destroyed with a use unrecorded */
            pya_sim_finish(sim, streams[used[i]]);
        }
        CHECK(take(model, 0) == waiting);
        CHECK_OK(pya_model_free(model, on_last));
        CHECK(take(model, PYA_MODEL_STREAMS - 1) == on_last);
        CHECK_EQ(pya_model_check(model), 0);
        pya_model_destroy(model);
        pya_sim_query(sim, &state);
        CHECK_EQ(state.n_pages + state.n_ranges + state.n_plain + state.n_events, 0);
        pya_device_close(pya_sim_device(sim));
    }
}

static void
test_too_many(void) {
    static const unsigned wrong[] = {0, PYA_MODEL_STREAMS + 1};
    struct pya_sim *sim = open_sim();
    for (size_t i = 0; i < 2; i++) {
        struct pya_model_config config = {.n_streams = wrong[i], .streams = streams};
        struct pya_model *none = NULL;
        CHECK_EQ(pya_model_create(pya_sim_device(sim), &config, &none), PYA_E_INVAL);
        CHECK(none == NULL);
    }
    pya_device_close(pya_sim_device(sim));
}

/* Each stream gets its memory under each policy, with ample memory and with little more than is needed. */
static void
test_replays(void) {
    const size_t capacities[] = {0, PYA_MODEL_STREAMS * 4 * MIB * 17 / 16};
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    for (uint64_t s = 0; s < PYA_MODEL_STREAMS; s++) {
        const struct pya_trace_event e = {
            .kind = PYA_TRACE_ALLOC, .addr = 512 * s, .bytes = 3 * MIB, .stream = 7 * s};
        CHECK_OK(pya_program_add(program, &e));
    }
    for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
        struct pya_replay_settings settings = {.policy = (enum pya_replay_policy)policy};
        pya_options_init(&settings.options);
        for (size_t i = 0; i < (policy == PYA_REPLAY_PYALLOC ? 2 : 1); i++) {
            struct pya_replay_result result = {0};
            settings.capacity_bytes = capacities[i];
            CHECK_OK(pya_replay_run(program, &settings, &result));
            CHECK(result.completed);
            CHECK_EQ(result.failed_op, 0);
        }
    }
    pya_program_destroy(program);
}

static const struct check_case cases[] = {
    {"uses", test_uses},
    {"too_many", test_too_many},
    {"replays", test_replays},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
