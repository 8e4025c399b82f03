#include "replay.h"

#include <stdlib.h>
#include <string.h>

#include "../device/sim.h"
#include "model.h"
#include "program_internal.h"

/* Ample memory: at least a large card, and far more than any policy wastes. */
#define REPLAY_AMPLE_MIN ((size_t)80 << 30)
#define REPLAY_AMPLE_FACTOR 4
/* No card has more, and the simulated device's tables grow with it. */
#define REPLAY_CAPACITY_MAX ((size_t)2 << 40)
#define REPLAY_ADDRESS_FACTOR 128
/* Expandable segments reserve 9/8 of the device for the small and the large blocks of each stream and pool. */
#define REPLAY_ADDRESS_EACH 3
#define REPLAY_ADDRESS_MAX (UINT64_C(64) << 40)
#define REPLAY_PROGRESS_OPS 65536
enum { REPLAY_NOT_LIVE = UINT8_MAX };

/* One replay: a simulated device and an allocator per device of the program. */
struct replay {
    const struct pya_program *program;
    struct pya_replay_settings settings;
    struct pya_sim *sims[PYA_MAX_DEVICES];
    struct pya_model *models[PYA_MAX_DEVICES]; /* for the models */
    struct pya_heap *heap;                     /* for pyalloc */
    union replay_block {
        struct pya_model_block *block;
        pya_dptr addr;
    } * blocks;         /* by number */
    size_t *bytes;      /* by number, only with check */
    uint8_t *device_of; /* by number; REPLAY_NOT_LIVE */
    size_t n_blocks;
    uint32_t (*n_users)[PYA_MAX_DEVICES]; /* by pool */
    uint64_t *routed;                     /* by pool: bit per device whose requests go to it */
};

const char *
pya_replay_policy_name(enum pya_replay_policy policy) {
    switch (policy) {
#define X(name, text, help)                                                                        \
    case PYA_REPLAY_##name:                                                                        \
        return text;
        PYA_REPLAY_POLICY_TABLE(X)
#undef X
    case PYA_REPLAY_N_POLICIES:
        break;
    }
    return NULL;
}

/* ---- setting up ---- */

static pya_status
replay_open_device(void *arg, int index, struct pya_device **out) {
    struct replay *replay = arg;
    const struct pya_replay_settings *settings = &replay->settings;
    const struct pya_program_info *info = &replay->program->info;
    uint64_t factor = REPLAY_ADDRESS_FACTOR;
    if (settings->policy == PYA_REPLAY_EXPANDABLE) {
        factor += (uint64_t)REPLAY_ADDRESS_EACH * (info->n_streams + info->n_pools);
    }
    const uint64_t addresses =
        pya_round_up((uint64_t)settings->capacity_bytes * factor, UINT64_C(1) << 40);
    struct pya_sim_config config = {
        .capacity_bytes = settings->capacity_bytes,
        /* Many mappings of each page, plus ranges: more address space than any policy asks for. */
        .address_bytes = addresses < REPLAY_ADDRESS_MAX ? addresses : REPLAY_ADDRESS_MAX,
        .cost = settings->cost,
        .work = settings->work_delay == 0 ? PYA_SIM_WORK_AT_ONCE : PYA_SIM_WORK_DELAYED,
        .work_delay = settings->work_delay,
        .no_vmm = settings->no_vmm,
        .quiet = true,
    };
    pya_status status = pya_sim_create(&config, index, &replay->sims[index]);
    if (status == PYA_OK) {
        *out = pya_sim_device(replay->sims[index]);
    }
    return status;
}

/* The model of a device, created on first use: a trace may name devices that it hardly uses. */
static pya_status
replay_model(struct replay *replay, int device, struct pya_model **out) {
    struct pya_model **model = &replay->models[device];
    pya_status status = PYA_OK;
    if (*model == NULL) {
        struct pya_model_config config = {
            .expandable = replay->settings.policy == PYA_REPLAY_EXPANDABLE,
            .n_streams = replay->program->info.n_streams,
            .streams = replay->program->streams,
        };
        struct pya_device *dev = NULL;
        status = replay_open_device(replay, device, &dev);
        if (status == PYA_OK) {
            status = pya_model_create(dev, &config, model);
        }
    }
    if (status == PYA_OK) {
        *out = *model;
    }
    return status;
}

static pya_status
replay_open(struct replay *replay) {
    /* Pool operations keep a pool number (below PROGRAM_POOLS) in the same field as a block number. */
    size_t n = replay->program->info.n_blocks + PROGRAM_POOLS;
    replay->blocks = calloc(n, sizeof *replay->blocks);
    replay->bytes = calloc(n, sizeof *replay->bytes);
    replay->device_of = malloc(n);
    replay->n_users = calloc(replay->program->info.n_pools + 1, sizeof *replay->n_users);
    replay->routed = calloc(replay->program->info.n_pools + 1, sizeof *replay->routed);
    if (replay->blocks == NULL || replay->bytes == NULL || replay->device_of == NULL ||
        replay->n_users == NULL || replay->routed == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    memset(replay->device_of, REPLAY_NOT_LIVE, n);
    replay->n_blocks = n;
    if (replay->settings.policy != PYA_REPLAY_PYALLOC) {
        return PYA_OK;
    }
    struct pya_hooks hooks = {.arg = replay, .open_device = replay_open_device};
    return pya_heap_create(&replay->settings.options, &hooks, &replay->heap);
}

static void
replay_close(struct replay *replay) {
    if (replay->heap != NULL) {
        pya_heap_destroy(replay->heap); /* closes the devices it opened */
    } else {
        for (int i = 0; i < PYA_MAX_DEVICES; i++) {
            if (replay->models[i] != NULL) {
                pya_model_destroy(replay->models[i]);
            }
            if (replay->sims[i] != NULL) {
                pya_device_close(pya_sim_device(replay->sims[i]));
            }
        }
    }
    free(replay->blocks);
    free(replay->bytes);
    free(replay->device_of);
    free(replay->n_users);
    free(replay->routed);
}

/* ---- operations ---- */

static pya_status
replay_step_heap(struct replay *replay, const struct program_op *op) {
    struct pya_heap *heap = replay->heap;
    pya_dptr *addr = &replay->blocks[op->block].addr;
    const struct program_pool *pool = &replay->program->pools[op->block % PROGRAM_POOLS];
    const struct pya_pool_id id = {pool->first, pool->second};
    const struct pya_stream_filter every = {0};
    const pya_stream stream = replay->program->streams[op->stream];
    switch ((enum program_op_kind)op->kind) {
    case PROGRAM_ALLOC:
        return pya_alloc(heap, op->device, op->bytes, stream, addr);
    case PROGRAM_FREE:
        return pya_free(heap, *addr);
    case PROGRAM_RECORD_STREAM:
        return pya_record_stream(heap, *addr, stream);
    case PROGRAM_POOL_BEGIN:
        return pya_pool_begin(heap, op->device, id, every);
    case PROGRAM_POOL_END:
        return pya_pool_end(heap, op->device, id);
    case PROGRAM_POOL_RELEASE:
        return pya_pool_release(heap, op->device, id);
    case PROGRAM_EMPTY_CACHE:
        return pya_empty_cache(heap, op->device);
    }
    return PYA_E_INVAL;
}

static pya_status
replay_step_model(struct replay *replay, const struct program_op *op) {
    struct pya_model *model = NULL;
    struct pya_model_block **block = &replay->blocks[op->block].block;
    pya_status status = replay_model(replay, op->device, &model);
    if (status != PYA_OK) {
        return status;
    }
    switch ((enum program_op_kind)op->kind) {
    case PROGRAM_ALLOC:
        return pya_model_alloc(model, op->bytes, op->stream, block);
    case PROGRAM_FREE:
        return pya_model_free(model, *block);
    case PROGRAM_RECORD_STREAM:
        return pya_model_record_stream(*block, op->stream);
    case PROGRAM_POOL_BEGIN:
        return pya_model_pool_begin(model, op->block);
    case PROGRAM_POOL_END:
        pya_model_pool_end(model);
        return PYA_OK;
    case PROGRAM_POOL_RELEASE:
        pya_model_pool_release(model, op->block);
        return PYA_OK;
    case PROGRAM_EMPTY_CACHE:
        return pya_model_empty_cache(model);
    }
    return PYA_E_INVAL;
}

static pya_dptr
replay_addr(const struct replay *replay, uint32_t number) {
    const union replay_block *block = &replay->blocks[number];
    return replay->heap != NULL ? block->addr : pya_model_addr(block->block);
}

/* Is it an operation that torch refuses?  torch raises if a pool is begun twice, or ended or released without a begin, and the
 * program goes on.  A recording that starts late or has a gap lacks the other half of such pairs. */
static bool
replay_is_refused(const struct replay *replay, const struct program_op *op) {
    const bool is_routed = (replay->routed[op->block] >> op->device & 1) != 0;
    return (op->kind == PROGRAM_POOL_BEGIN && is_routed) ||
           (op->kind == PROGRAM_POOL_END && !is_routed) ||
           (op->kind == PROGRAM_POOL_RELEASE && replay->n_users[op->block][op->device] == 0);
}

static pya_status
replay_step(struct replay *replay, const struct program_op *op) {
    const bool check = replay->settings.check;
    if (op->kind >= PROGRAM_POOL_BEGIN && replay_is_refused(replay, op)) {
        return PYA_OK;
    }
    if (check && op->kind == PROGRAM_FREE) {
        pya_sim_disown(
            replay->sims[op->device], replay_addr(replay, op->block), replay->bytes[op->block]);
    }
    pya_status status =
        replay->heap != NULL ? replay_step_heap(replay, op) : replay_step_model(replay, op);
    if (status == PYA_OK && op->kind == PROGRAM_ALLOC) {
        replay->device_of[op->block] = op->device;
    } else if (status == PYA_OK && op->kind == PROGRAM_FREE) {
        replay->device_of[op->block] = REPLAY_NOT_LIVE;
    } else if (status == PYA_OK && op->kind == PROGRAM_POOL_BEGIN) {
        replay->n_users[op->block][op->device]++;
        replay->routed[op->block] |= UINT64_C(1) << op->device;
    } else if (status == PYA_OK && op->kind == PROGRAM_POOL_END) {
        replay->routed[op->block] &= ~(UINT64_C(1) << op->device);
    } else if (status == PYA_OK && op->kind == PROGRAM_POOL_RELEASE) {
        replay->n_users[op->block][op->device]--;
    }
    if (check && status == PYA_OK && op->kind == PROGRAM_ALLOC) {
        replay->bytes[op->block] = op->bytes;
        status = pya_sim_own(replay->sims[op->device], replay_addr(replay, op->block), op->bytes);
    }
    return status;
}

/* ---- results ---- */

/* Sums over devices; each device's peak is at its own time. */
static void
replay_sum(const struct replay *replay, struct pya_replay_result *out) {
    *out = (struct pya_replay_result){
        .completed = out->completed,
        .failed_op = out->failed_op,
        .failed_bytes = out->failed_bytes};
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        if (replay->sims[i] == NULL) {
            continue;
        }
        struct pya_sim_state state;
        pya_sim_query(replay->sims[i], &state);
        out->peak_bytes += state.peak_bytes;
        out->end_bytes += state.used_bytes;
        out->n_calls += state.n_memory_calls;
        out->device_ns += state.device_ns;
        out->n_violations += state.n_violations;
        for (int k = 0; k < PYA_SIM_N_CALLS; k++) {
            out->n_calls_by_kind[k] += state.n_calls[k];
        }
    }
}

/* Ends the routing of the device's requests to the pool, and releases its users (graphs). */
static pya_status
replay_rewind_pool(struct replay *replay, uint32_t pool, unsigned device) {
    struct program_op op = {.kind = PROGRAM_POOL_END, .device = (uint8_t)device, .block = pool};
    const bool is_routed = (replay->routed[pool] >> device & 1) != 0;
    pya_status status = is_routed ? replay_step(replay, &op) : PYA_OK;
    op.kind = PROGRAM_POOL_RELEASE;
    while (status == PYA_OK && replay->n_users[pool][device] > 0) {
        status = replay_step(replay, &op);
    }
    return status;
}

/* Undoes what a pass left of pools, so that none has a user at the start of the next pass. */
static pya_status
replay_rewind_pools(struct replay *replay) {
    pya_status status = PYA_OK;
    for (uint32_t pool = 1; pool <= replay->program->info.n_pools; pool++) {
        for (unsigned device = 0; device < replay->program->info.n_devices; device++) {
            status = status == PYA_OK ? replay_rewind_pool(replay, pool, device) : status;
        }
    }
    return status;
}

/* Frees what a pass left alive. */
static pya_status
replay_rewind(struct replay *replay) {
    pya_status status = PYA_OK;
    for (size_t i = 0; i < replay->n_blocks && status == PYA_OK; i++) {
        if (replay->device_of[i] != REPLAY_NOT_LIVE) {
            const struct program_op op = {
                .kind = PROGRAM_FREE, .device = replay->device_of[i], .block = (uint32_t)i};
            status = replay_step(replay, &op);
        }
    }
    return status == PYA_OK ? replay_rewind_pools(replay) : status;
}

static pya_status
replay_ops(struct replay *replay, struct op_reader *reader, struct pya_replay_result *out) {
    uint64_t n_pass = replay->program->info.n_ops;
    unsigned n_passes = replay->settings.n_passes > 0 ? replay->settings.n_passes : 1;
    uint64_t n = n_pass * n_passes;
    struct pya_replay_result half = {0};
    struct pya_replay_result last = {0};
    *out = (struct pya_replay_result){.completed = true};
    for (uint64_t i = 0; i < n; i++) {
        if (i == n / 2) {
            replay_sum(replay, &half);
        }
        if (i > 0 && i % n_pass == 0) {
            pya_status status = replay_rewind(replay);
            if (status != PYA_OK) {
                return status;
            }
            replay_sum(replay, &last);
        }
        if (i % REPLAY_PROGRESS_OPS == 0 && replay->settings.progress != NULL &&
            !replay->settings.progress(replay->settings.progress_arg, i, n)) {
            return PYA_E_BUSY;
        }
        const struct program_op *op;
        pya_status status = op_reader_get(reader, i % n_pass, &op);
        if (status == PYA_OK) {
            status = replay_step(replay, op);
        }
        if (status == PYA_E_NOMEM) {
            out->completed = false;
            out->failed_op = i;
            out->failed_bytes = op->bytes;
            break;
        }
        if (status != PYA_OK) {
            return status;
        }
    }
    replay_sum(replay, out);
    if (out->completed) {
        out->n_calls_second_half = out->n_calls - half.n_calls;
        out->device_ns_second_half = out->device_ns - half.device_ns;
        out->n_calls_last_pass = out->n_calls - last.n_calls;
        out->device_ns_last_pass = out->device_ns - last.device_ns;
    }
    return PYA_OK;
}

static pya_status
replay_all(struct replay *replay, struct pya_replay_result *out) {
    struct op_reader reader = {.store = &replay->program->ops};
    pya_status status = replay_ops(replay, &reader, out);
    op_reader_fini(&reader);
    return status;
}

static size_t
replay_ample(const struct pya_program *program) {
    struct pya_program_info info;
    pya_program_query(program, &info);
    size_t wanted = pya_round_up(info.device_live_bytes, PYA_PAGE) * REPLAY_AMPLE_FACTOR;
    return wanted > REPLAY_AMPLE_MIN ? wanted : REPLAY_AMPLE_MIN;
}

pya_status
pya_replay_run(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_result *out) {
    struct replay replay = {.program = program, .settings = *settings};
    if (replay.settings.capacity_bytes == 0) {
        replay.settings.capacity_bytes = replay_ample(program);
    }
    if (replay.settings.capacity_bytes > REPLAY_CAPACITY_MAX) {
        replay.settings.capacity_bytes = REPLAY_CAPACITY_MAX;
    }
    struct pya_replay_result result;
    pya_status status = replay_open(&replay);
    if (status == PYA_OK) {
        status = replay_all(&replay, &result);
    }
    if (status == PYA_OK) {
        *out = result;
    }
    replay_close(&replay);
    return status;
}

/* ---- the least memory ---- */

static pya_status
replay_fits(
    const struct pya_program *program, const struct pya_replay_settings *settings, uint64_t pages,
    struct pya_replay_min *min, bool *fits) {
    struct pya_replay_settings mine = *settings;
    struct pya_replay_result result;
    mine.capacity_bytes = pages << PYA_PAGE_SHIFT;
    pya_status status = pya_replay_run(program, &mine, &result);
    if (status == PYA_OK) {
        min->n_replays++;
        *fits = result.completed;
    }
    return status;
}

/* The live peak of the device with the largest one, in pages: a lower bound for every policy. */
static uint64_t
replay_floor(const struct pya_program *program) {
    struct pya_program_info info;
    pya_program_query(program, &info);
    return (info.device_live_bytes + PYA_PAGE - 1) >> PYA_PAGE_SHIFT;
}

/* Tries the sizes just below `from`.  The least that completes becomes the minimum; failing sizes above it are holes. */
static pya_status
replay_neighbours(
    const struct pya_program *program, const struct pya_replay_settings *settings, uint64_t from,
    uint64_t floor, struct pya_replay_min *min) {
    bool fit[PYA_REPLAY_N_NEIGHBOURS] = {false};
    uint64_t least = from;
    unsigned n = 0;
    for (; n < PYA_REPLAY_N_NEIGHBOURS && from > n + 1 && from - n - 1 >= floor; n++) {
        pya_status status = replay_fits(program, settings, from - n - 1, min, &fit[n]);
        if (status != PYA_OK) {
            return status;
        }
        least = fit[n] ? from - n - 1 : least;
    }
    min->bytes = least << PYA_PAGE_SHIFT;
    min->safe_bytes = from << PYA_PAGE_SHIFT;
    for (unsigned i = 0; i < n && from - i - 1 > least; i++) {
        if (!fit[i]) {
            min->holes[min->n_holes++] = (from - i - 1) << PYA_PAGE_SHIFT;
        } else if (min->n_holes == 0) {
            min->safe_bytes = (from - i - 1) << PYA_PAGE_SHIFT;
        }
    }
    if (min->n_holes == 0) {
        min->safe_bytes = min->bytes;
    }
    return PYA_OK;
}

pya_status
pya_replay_find_min(
    const struct pya_program *program, const struct pya_replay_settings *settings,
    struct pya_replay_min *out) {
    struct pya_replay_result ample;
    pya_status status = pya_replay_run(program, settings, &ample);
    if (status != PYA_OK) {
        return status;
    }
    if (!ample.completed) {
        return PYA_E_NOMEM;
    }
    struct pya_replay_min min = {.n_replays = 1};
    uint64_t floor = replay_floor(program);
    uint64_t low = floor == 0 ? 0 : floor - 1; /* known to fail */
    uint64_t high = (ample.peak_bytes + PYA_PAGE - 1) >> PYA_PAGE_SHIFT;
    bool fits = false;
    /* What was taken with ample memory should suffice; a policy that behaves differently near its limit needs a little more. */
    while (status == PYA_OK && high > 0) {
        status = replay_fits(program, settings, high, &min, &fits);
        if (status != PYA_OK || fits) {
            break;
        }
        low = high;
        high += high / 64 + 1;
    }
    while (status == PYA_OK && high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        status = replay_fits(program, settings, middle, &min, &fits);
        if (fits) {
            high = middle;
        } else {
            low = middle;
        }
    }
    if (status == PYA_OK) {
        status = replay_neighbours(program, settings, high, floor, &min);
    }
    if (status == PYA_OK) {
        *out = min;
    }
    return status;
}
