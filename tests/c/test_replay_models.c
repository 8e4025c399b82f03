/* The what-if policies: rules of torch's allocator worked out by hand, random programs that check every byte for one
 * owner, the least memory, and every failure. */
#include "fault.h"
#include "models.h"

#include "replay/replay.h"

static void
test_native_rules(void) {
    struct bench b = open_bench(false, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
    struct pya_model_block *small = take(b, 1, 0);
    CHECK_EQ(pya_model_bytes(small), 512);
    CHECK_EQ(reserved(b), 2 * MIB); /* small segments are 2 MiB */
    struct pya_model_block *edge = take(b, MIB, 0);
    CHECK_EQ(reserved(b), 2 * MIB); /* 1 MiB is still small, and fits behind */
    struct pya_model_block *large = take(b, MIB + 1, 0);
    CHECK_EQ(reserved(b), 22 * MIB); /* large ones below 10 MiB share 20 MiB */
    CHECK_EQ(pya_model_bytes(large), MIB + 512);
    struct pya_model_block *own = take(b, 10 * MIB, 0);
    CHECK_EQ(reserved(b), 22 * MIB); /* best fit comes before a segment of its own */
    struct pya_model_block *more = take(b, 11 * MIB + 1, 0);
    CHECK_EQ(reserved(b), 34 * MIB);           /* 12 MiB: rounded to 2 MiB */
    CHECK_EQ(pya_model_bytes(more), 12 * MIB); /* less than 1 MiB left over: not split */
    give(b, own);
    give(b, more);
    struct pya_model_block *again = take(b, 11 * MIB, 0);
    /* 12 MiB is the best fit, and exactly 1 MiB remains: still not split */
    CHECK_EQ(pya_model_bytes(again), 12 * MIB);
    struct pya_model_block *other = take(b, 512, 1);
    CHECK_EQ(reserved(b), 36 * MIB); /* streams share nothing */
    give(b, again);
    give(b, small);
    give(b, edge);
    give(b, large);
    give(b, other);
    CHECK_OK(pya_model_empty_cache(b.model));
    CHECK_EQ(reserved(b), 0);
    close_bench(b);
}

/* The smallest request that gets a segment of its own. */
static void
test_native_segments_of_ten_mebibytes(void) {
    static const size_t bytes[][2] = {
        {10 * MIB - 512, 20 * MIB}, {10 * MIB, 10 * MIB}, {10 * MIB + 1, 12 * MIB}};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        struct bench b = open_bench(false, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
        give(b, take(b, bytes[i][0], 0));
        CHECK_EQ(reserved(b), bytes[i][1]);
        close_bench(b);
    }
}

static void
test_native_retries_before_oom(void) {
    struct bench b = open_bench(false, 40 * MIB, PYA_SIM_WORK_AT_ONCE);
    struct pya_model_block *a = take(b, 20 * MIB, 0);
    give(b, a);
    struct pya_model_block *c = take(b, 30 * MIB, 0); /* gives the cached 20 back first */
    CHECK_EQ(reserved(b), 30 * MIB);
    struct pya_model_block *refused = NULL;
    CHECK_EQ(pya_model_alloc(b.model, 20 * MIB, 0, &refused), PYA_E_NOMEM);
    CHECK(refused == NULL);
    CHECK_EQ(pya_model_alloc(b.model, 0, 0, &refused), PYA_E_INVAL);
    struct pya_model_stats stats;
    pya_model_query(b.model, &stats);
    CHECK_EQ(stats.n_retries, 2);
    give(b, c);
    close_bench(b);
}

static void
test_record_stream_waits(void) {
    struct bench b = open_bench(false, 256 * MIB, PYA_SIM_WORK_BY_HAND);
    struct pya_model_block *a = take(b, 20 * MIB, 0);
    CHECK_OK(pya_model_record_stream(a, 0)); /* its own stream: means nothing */
    CHECK_OK(pya_model_record_stream(a, 1));
    give(b, a);
    struct pya_model_block *c = take(b, 20 * MIB, 0);
    CHECK_EQ(reserved(b), 40 * MIB); /* a is not free yet */
    pya_sim_finish_all(b.sim);
    struct pya_model_block *d = take(b, 20 * MIB, 0);
    CHECK_EQ(reserved(b), 40 * MIB); /* now it is */
    give(b, c);
    give(b, d);
    close_bench(b);
}

static void
test_expandable_rules(void) {
    struct bench b = open_bench(true, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
    struct pya_model_block *small = take(b, 1, 0);
    CHECK_EQ(reserved(b), 2 * MIB);
    struct pya_model_block *large = take(b, 30 * MIB, 0);
    CHECK_EQ(reserved(b), 42 * MIB); /* in units of 20 MiB */
    CHECK_EQ(pya_model_bytes(large), 30 * MIB);
    struct pya_model_block *grown = take(b, 25 * MIB, 0);
    CHECK_EQ(reserved(b), 62 * MIB); /* the 10 MiB left over, and one more unit */
    CHECK_EQ(pya_model_addr(grown), pya_model_addr(large) + 30 * MIB);
    give(b, large);
    give(b, small);
    CHECK_OK(pya_model_empty_cache(b.model));
    /* 30 MiB free at the front hold one whole unit; the 5 at the end none */
    CHECK_EQ(reserved(b), 40 * MIB);
    struct pya_model_block *back = take(b, 30 * MIB, 0);
    CHECK_EQ(pya_model_addr(back) + 30 * MIB, pya_model_addr(grown));
    CHECK_EQ(reserved(b), 60 * MIB);
    give(b, back);
    give(b, grown);
    CHECK_OK(pya_model_empty_cache(b.model));
    CHECK_EQ(reserved(b), 0);
    close_bench(b);
}

/* A program of random requests, half of them small, some used on a second stream. */
static struct pya_program *
random_program(uint64_t seed, unsigned n_ops, unsigned n_streams, int n_devices) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    uint64_t rng = seed;
    struct pya_trace_event live[64];
    size_t n_live = 0;
    uint64_t next_addr = 512;
    for (unsigned i = 0; i < n_ops; i++) {
        uint64_t dice = check_below(&rng, 100);
        if (n_live < 64 && (dice < 50 || n_live == 0)) {
            struct pya_trace_event e = {.kind = PYA_TRACE_ALLOC, .addr = next_addr += 512};
            e.stream = check_below(&rng, n_streams);
            e.device = (int)check_below(&rng, (uint64_t)n_devices);
            e.bytes = check_log_size(&rng, 1, dice < 25 ? MIB : 64 * MIB);
            live[n_live++] = e;
            CHECK_OK(pya_program_add(program, &e));
        } else {
            size_t k = check_below(&rng, n_live);
            struct pya_trace_event e = live[k];
            if (dice < 60) {
                e.kind = PYA_TRACE_RECORD_STREAM;
                e.arg = check_below(&rng, n_streams);
            } else {
                e.kind = dice == 99 ? PYA_TRACE_EMPTY_CACHE : PYA_TRACE_FREE;
                live[k] = e.kind == PYA_TRACE_FREE ? live[--n_live] : live[k];
            }
            CHECK_OK(pya_program_add(program, &e));
        }
    }
    return program;
}

static void
test_random_programs(void) {
    uint64_t rounds = check_budget(4);
    for (uint64_t round = 0; round < rounds; round++) {
        uint64_t seed = check_seed() + round;
        struct pya_program *program =
            random_program(seed, 4000, 1 + (unsigned)(seed % 3), 1 + (int)(seed % 2));
        struct pya_program_info info;
        pya_program_query(program, &info);
        for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
            struct pya_replay_settings settings = {
                .policy = (enum pya_replay_policy)policy, .check = true, .work_delay = seed % 4};
            pya_options_init(&settings.options);
            struct pya_replay_result result;
            if (!CHECK_OK(pya_replay_run(program, &settings, &result))) {
                continue;
            }
            CHECK(result.completed);
            CHECK_EQ(result.n_violations, 0);
            CHECK(result.peak_bytes >= info.peak_live_bytes);
            CHECK(result.n_calls >= result.n_calls_second_half);
            /* little memory: requests may fail, but nothing may misbehave */
            settings.capacity_bytes = pya_round_up(info.peak_live_bytes, PYA_PAGE) + 4 * PYA_PAGE;
            CHECK_OK(pya_replay_run(program, &settings, &result));
            CHECK_EQ(result.n_violations, 0);
            CHECK(result.completed || result.failed_bytes > 0);
        }
        pya_program_destroy(program);
    }
}

static void
add(struct pya_program *program, int kind, uint64_t addr, size_t bytes) {
    struct pya_trace_event e = {.kind = kind, .addr = addr, .bytes = bytes};
    CHECK_OK(pya_program_add(program, &e));
}

/* 100 MiB, then 60 + 60 in its place: native with segments of exact size needs all of it, or a retry. */
static void
test_find_min(void) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    add(program, PYA_TRACE_ALLOC, 1, 100 * MIB);
    add(program, PYA_TRACE_FREE, 1, 0);
    add(program, PYA_TRACE_ALLOC, 2, 60 * MIB);
    add(program, PYA_TRACE_ALLOC, 3, 60 * MIB);
    struct pya_program_info info;
    pya_program_query(program, &info);
    CHECK_EQ(info.peak_live_bytes, 120 * MIB);
    struct pya_replay_settings settings = {.policy = PYA_REPLAY_NATIVE};
    pya_options_init(&settings.options);
    struct pya_replay_result result;
    CHECK_OK(pya_replay_run(program, &settings, &result));
    CHECK_EQ(result.peak_bytes, 160 * MIB); /* 100 is split for one 60 */
    CHECK_EQ(result.end_bytes, 160 * MIB);
    CHECK_EQ(result.n_calls, 2);
    struct pya_replay_min min;
    CHECK_OK(pya_replay_find_min(program, &settings, &min));
    CHECK_EQ(min.bytes, 160 * MIB); /* the 60 in the 100 leaves 40 stuck: 160 or nothing */
    CHECK_EQ(min.safe_bytes, 160 * MIB);
    CHECK_EQ(min.n_holes, 0);
    settings.policy = PYA_REPLAY_EXPANDABLE;
    CHECK_OK(pya_replay_find_min(program, &settings, &min));
    CHECK_EQ(min.bytes, 120 * MIB);
    settings.policy = PYA_REPLAY_PYALLOC;
    CHECK_OK(pya_replay_find_min(program, &settings, &min));
    CHECK_EQ(min.bytes, 120 * MIB);
    CHECK_EQ(min.n_replays, 2); /* ample memory, and how much of it that took */
    settings.capacity_bytes = 100 * MIB;
    CHECK_EQ(pya_replay_find_min(program, &settings, &min), PYA_E_NOMEM);
    pya_program_destroy(program);
}

/* With a little less memory than all of them need, the first segment is given back before the 90 could be put into it:
 * 206 are enough, 210 to 214 are not, and 216 are again. */
static void
test_find_min_tells_holes(void) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    add(program, PYA_TRACE_ALLOC, 1, 100 * MIB);
    add(program, PYA_TRACE_FREE, 1, 0);
    add(program, PYA_TRACE_ALLOC, 2, 110 * MIB);
    add(program, PYA_TRACE_ALLOC, 3, 90 * MIB);
    add(program, PYA_TRACE_FREE, 2, 0);
    add(program, PYA_TRACE_ALLOC, 4, 116 * MIB);
    struct pya_replay_settings settings = {.policy = PYA_REPLAY_NATIVE};
    pya_options_init(&settings.options);
    struct pya_replay_min min;
    CHECK_OK(pya_replay_find_min(program, &settings, &min));
    CHECK_EQ(min.bytes, 206 * MIB);
    CHECK_EQ(min.safe_bytes, 216 * MIB);
    CHECK_EQ(min.n_holes, 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(min.holes[i], (214 - 2 * i) * MIB);
    }
    for (size_t mib = 206; mib <= 218; mib += 2) {
        struct pya_replay_result result;
        settings.capacity_bytes = mib * MIB;
        CHECK_OK(pya_replay_run(program, &settings, &result));
        CHECK_EQ(result.completed, mib < 210 || mib > 214);
        CHECK_EQ(result.failed_bytes, result.completed ? 0 : 116 * MIB);
        CHECK_EQ(result.failed_op, result.completed ? 0 : 5);
    }
    pya_program_destroy(program);
}

/* What a pass leaves alive, in a pool too, is freed before the next: each pass finds the same memory. */
static void
test_passes(void) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    add(program, PYA_TRACE_POOL_BEGIN, 7, 0);
    add(program, PYA_TRACE_ALLOC, 1, 30 * MIB);
    add(program, PYA_TRACE_POOL_END, 7, 0);
    add(program, PYA_TRACE_ALLOC, 2, 60 * MIB);
    add(program, PYA_TRACE_ALLOC, 3, 100 * MIB);
    add(program, PYA_TRACE_FREE, 3, 0);
    add(program, PYA_TRACE_EMPTY_CACHE, 0, 0);
    for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
        struct pya_replay_settings settings = {.policy = (enum pya_replay_policy)policy};
        struct pya_replay_result once;
        struct pya_replay_result thrice;
        pya_options_init(&settings.options);
        CHECK_OK(pya_replay_run(program, &settings, &once));
        settings.n_passes = 3;
        CHECK_OK(pya_replay_run(program, &settings, &thrice));
        CHECK(thrice.completed);
        const size_t ahead =
            policy == PYA_REPLAY_NATIVE ? 0 : 10 * MIB; /* they grow by more at a time */
        CHECK(once.peak_bytes >= 190 * MIB && once.peak_bytes <= 190 * MIB + ahead);
        CHECK_EQ(thrice.peak_bytes, once.peak_bytes);
        CHECK(once.end_bytes >= 90 * MIB && once.end_bytes <= 90 * MIB + ahead);
        CHECK_EQ(thrice.end_bytes, once.end_bytes);
        CHECK_EQ(once.n_calls_last_pass, once.n_calls);
        CHECK(thrice.n_calls_last_pass > 0); /* the 100 go back each time */
        CHECK(thrice.n_calls_last_pass < once.n_calls);
        CHECK(thrice.device_ns_last_pass < once.device_ns);
    }
    pya_program_destroy(program);
}

static void
test_program_corners(void) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    add(program, PYA_TRACE_FREE, 5, 0);  /* of nothing */
    add(program, PYA_TRACE_ALLOC, 5, 0); /* of nothing */
    add(program, PYA_TRACE_ALLOC, 5, 1000);
    add(program, PYA_TRACE_ALLOC, 5, 2000); /* without a free */
    add(program, PYA_TRACE_STEP, 0, 0);
    struct pya_trace_event huge = {.kind = PYA_TRACE_ALLOC, .addr = 9, .bytes = UINT64_MAX};
    CHECK_EQ(pya_program_add(program, &huge), PYA_E_TOO_LARGE);
    huge.device = 64;
    CHECK_EQ(pya_program_add(program, &huge), PYA_E_INVAL);
    struct pya_program_info info;
    pya_program_query(program, &info);
    CHECK_EQ(info.n_ignored_frees, 1);
    CHECK_EQ(info.n_missing_frees, 1);
    CHECK_EQ(info.n_ops, 3);
    CHECK_EQ(info.peak_live_bytes, 2048);
    pya_program_destroy(program);
    /* nothing at all */
    CHECK_OK(pya_program_create(&program));
    for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
        struct pya_replay_settings settings = {.policy = (enum pya_replay_policy)policy};
        pya_options_init(&settings.options);
        struct pya_replay_result result;
        struct pya_replay_min min;
        CHECK_OK(pya_replay_run(program, &settings, &result));
        CHECK(result.completed);
        CHECK_OK(pya_replay_find_min(program, &settings, &min));
        CHECK_EQ(min.bytes, 0);
        CHECK(pya_replay_policy_name((enum pya_replay_policy)policy) != NULL);
    }
    pya_program_destroy(program);
}

static void
test_private_pools(void) {
    for (int expandable = 0; expandable < 2; expandable++) {
        struct bench b = open_bench(expandable != 0, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
        struct pya_model_block *eager = take(b, 20 * MIB, 0);
        give(b, eager);
        CHECK_EQ(pya_model_pool_begin(b.model, 0), PYA_E_INVAL);
        CHECK_OK(pya_model_pool_begin(b.model, 1));
        struct pya_model_block *inside = take(b, 20 * MIB, 0);
        CHECK_EQ(reserved(b), 40 * MIB); /* nothing of the default pool is used */
        give(b, inside);
        pya_model_pool_end(b.model);
        struct pya_model_block *again = take(b, 20 * MIB, 0);
        CHECK_EQ(reserved(b), 40 * MIB); /* and after it the default pool again */
        give(b, again);
        CHECK_OK(pya_model_empty_cache(b.model));
        CHECK_EQ(reserved(b), 20 * MIB); /* a pool in use keeps its memory */
        pya_model_pool_release(b.model, 1);
        CHECK_OK(pya_model_empty_cache(b.model));
        CHECK_EQ(reserved(b), 0);
        close_bench(b);
    }
}

/* Blocks of private pools and of two devices, on every policy. */
static void
test_pool_program(void) {
    struct pya_program *program = NULL;
    CHECK_OK(pya_program_create(&program));
    for (uint64_t pool = 1; pool <= 3; pool++) {
        struct pya_trace_event e = {.kind = PYA_TRACE_POOL_BEGIN, .addr = pool, .device = 1};
        CHECK_OK(pya_program_add(program, &e));
        for (uint64_t i = 0; i < 8; i++) {
            struct pya_trace_event block = {
                .kind = PYA_TRACE_ALLOC,
                .addr = pool * 100 + i,
                .bytes = (i + 1) * 3 * MIB,
                .device = (int)(i % 2)};
            CHECK_OK(pya_program_add(program, &block));
        }
        e.kind = PYA_TRACE_POOL_END;
        CHECK_OK(pya_program_add(program, &e));
        for (uint64_t i = 0; i < 8; i++) {
            struct pya_trace_event block = {
                .kind = PYA_TRACE_FREE, .addr = pool * 100 + i, .device = (int)(i % 2)};
            CHECK_OK(pya_program_add(program, &block));
        }
        e.kind = PYA_TRACE_POOL_RELEASE;
        CHECK_OK(pya_program_add(program, &e));
    }
    struct pya_program_info info;
    pya_program_query(program, &info);
    CHECK_EQ(info.n_pools, 3);
    CHECK_EQ(info.n_devices, 2);
    CHECK_EQ(info.peak_live_bytes, 36 * 3 * MIB);
    CHECK_EQ(info.device_live_bytes, 20 * 3 * MIB);
    for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
        struct pya_replay_settings settings = {
            .policy = (enum pya_replay_policy)policy, .check = true};
        struct pya_replay_result result;
        pya_options_init(&settings.options);
        CHECK_OK(pya_replay_run(program, &settings, &result));
        CHECK(result.completed);
        CHECK_EQ(result.n_violations, 0);
        /* One default pool of a device, three pools of another: torch keeps what the first two had, pyalloc does
         * not. */
        size_t n_kept = policy == PYA_REPLAY_PYALLOC ? 1 : 3;
        CHECK(result.peak_bytes >= (n_kept * 20 + 16) * 3 * MIB);
        CHECK(n_kept == 3 || result.peak_bytes < (2 * 20 + 16) * 3 * MIB);
    }
    pya_program_destroy(program);
}

/* Events that no allocator would write: whatever program they make, its replay is defined. */
static void
test_hostile_programs(void) {
    static const uint64_t sizes[] = {
        0, 1, 512, MIB, 33 * MIB, UINT64_C(1) << 40, UINT64_C(1) << 60, UINT64_MAX};
    uint64_t rng = check_seed();
    uint64_t rounds = check_budget(12);
    for (uint64_t round = 0; round < rounds; round++) {
        struct pya_program *program = NULL;
        CHECK_OK(pya_program_create(&program));
        uint64_t n_events = 1 + check_below(&rng, 40);
        for (uint64_t i = 0; i < n_events; i++) {
            struct pya_trace_event e = {
                .kind = (int)check_below(&rng, 25),
                .device = check_below(&rng, 4) == 0 ? (int)check_below(&rng, 70) - 3 : 0,
                .stream = check_below(&rng, 5),
                .addr = check_below(&rng, 6),
                .arg = check_below(&rng, 4),
                .bytes = sizes[check_below(&rng, sizeof sizes / sizeof *sizes)],
            };
            (void)!pya_program_add(program, &e);
        }
        for (int policy = 0; policy < PYA_REPLAY_N_POLICIES; policy++) {
            struct pya_replay_settings settings = {.policy = (enum pya_replay_policy)policy};
            struct pya_replay_result result = {0};
            pya_options_init(&settings.options);
            settings.capacity_bytes = check_below(&rng, 3) == 0   ? SIZE_MAX
                                      : check_below(&rng, 2) == 0 ? 64 * MIB
                                                                  : 0;
            (void)!pya_replay_run(program, &settings, &result);
            CHECK_EQ(result.n_violations, 0);
        }
        pya_program_destroy(program);
    }
}

static bool
stop_at_once(void *arg, uint64_t n_done, uint64_t n_all) {
    (void)n_done;
    (void)n_all;
    ++*(int *)arg;
    return false;
}

static void
test_stopping(void) {
    struct pya_program *program = random_program(3, 1000, 1, 1);
    int calls = 0;
    struct pya_replay_settings settings = {.progress = stop_at_once, .progress_arg = &calls};
    struct pya_replay_result result;
    CHECK_EQ(pya_replay_run(program, &settings, &result), PYA_E_BUSY);
    CHECK_EQ(calls, 1);
    pya_program_destroy(program);
}

/* Each host allocation of loading and replaying fails once. */
static void
test_host_memory_sweep(void) {
    for (int policy = 0; policy < PYA_REPLAY_PYALLOC; policy++) {
        for (unsigned nth = 1;; nth++) {
            size_t live = fault_live();
            struct pya_program *program = NULL;
            fault_arm(nth);
            pya_status status = pya_program_create(&program);
            for (uint64_t i = 1; i <= 600 && status == PYA_OK; i++) {
                struct pya_trace_event e = {
                    .kind = PYA_TRACE_ALLOC, .addr = i, .bytes = i * 8192, .stream = i % 2};
                status = pya_program_add(program, &e);
                e.kind = i % 3 == 0 ? PYA_TRACE_FREE : PYA_TRACE_RECORD_STREAM;
                e.arg = 0;
                status = status == PYA_OK ? pya_program_add(program, &e) : status;
            }
            struct pya_replay_settings settings = {.policy = (enum pya_replay_policy)policy};
            struct pya_replay_result result;
            status = status == PYA_OK ? pya_replay_run(program, &settings, &result) : status;
            pya_program_destroy(program);
            bool fired = fault_disarm();
            CHECK_EQ(fault_live(), live);
            CHECK_EQ(status, fired ? PYA_E_HOST_NOMEM : PYA_OK);
            if (!fired) {
                CHECK(nth > 100);
                break;
            }
            /* most differs at the two ends: at first every allocation, then every 13th */
            nth += nth > 40 ? 12 : 0;
        }
    }
}

/* Each device call fails once, out of memory and with an error. */
static void
test_device_sweep(void) {
    for (int expandable = 0; expandable < 2; expandable++) {
        for (unsigned nth = 1; nth < 400; nth++) {
            struct bench b = open_bench(expandable != 0, 256 * MIB, PYA_SIM_WORK_AT_ONCE);
            pya_status injected = nth % 2 == 0 ? PYA_E_NOMEM : PYA_E_DEVICE;
            pya_sim_fail(b.sim, PYA_SIM_ANY_CALL, nth, injected, false);
            struct pya_model_block *held[4] = {NULL};
            for (size_t i = 0; i < 24; i++) {
                struct pya_model_block **slot = &held[i % 4];
                if (*slot != NULL) {
                    CHECK_OK(pya_model_record_stream(*slot, (unsigned)i % 2));
                    (void)!pya_model_free(b.model, *slot);
                    *slot = NULL;
                }
                (void)!pya_model_alloc(b.model, (i * 7 % 5 + 1) * 9 * MIB, (unsigned)i / 12, slot);
            }
            bool fired = pya_sim_fail_clear(b.sim);
            CHECK_EQ(pya_model_check(b.model), 0);
            for (size_t i = 0; i < 4; i++) {
                if (held[i] != NULL) {
                    give(b, held[i]);
                }
            }
            pya_model_destroy(b.model);
            struct pya_sim_state state;
            pya_sim_query(b.sim, &state);
            CHECK_EQ(state.n_violations, 0);
            pya_device_close(pya_sim_device(b.sim));
            if (!fired) {
                break;
            }
        }
    }
}

static const struct check_case cases[] = {
    {"native_rules", test_native_rules},
    {"native_segments_of_ten_mebibytes", test_native_segments_of_ten_mebibytes},
    {"native_retries_before_oom", test_native_retries_before_oom},
    {"record_stream_waits", test_record_stream_waits},
    {"expandable_rules", test_expandable_rules},
    {"random_programs", test_random_programs},
    {"find_min", test_find_min},
    {"find_min_tells_holes", test_find_min_tells_holes},
    {"passes", test_passes},
    {"program_corners", test_program_corners},
    {"private_pools", test_private_pools},
    {"pool_program", test_pool_program},
    {"hostile_programs", test_hostile_programs},
    {"stopping", test_stopping},
    {"host_memory_sweep", test_host_memory_sweep},
    {"device_sweep", test_device_sweep},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
