/* The model: what lives where, and what must hold of the heap and the device at any time. */
#include "core_model.h"

bool is_verbose;

bool
is_capturing(const struct world *world, int device) {
    for (int i = 0; i < N_POOLS; i++) {
        if (world->pools[device][i].is_capturing) {
            return true;
        }
    }
    return world->captured[device] != 0;
}

bool
stream_is_capturing(const struct world *world, int device, pya_stream stream) {
    for (int i = 0; i < N_POOLS; i++) {
        const struct pool *pool = &world->pools[device][i];
        if (pool->is_capturing && pool->stream == stream) {
            return true;
        }
    }
    return stream < stream_of(N_STREAMS - 1) + 1 &&
           (world->captured[device] >> (stream / 16) & 1) != 0;
}

void
require_status(struct world *world, int device, pya_status st) {
    bool good = st == PYA_OK;
    good = good || ((st == PYA_E_DEVICE || st == PYA_E_NOMEM) && world->may_fail);
    good = good || (st == PYA_E_HOST_NOMEM && world->has_host_fault);
    good = good || (st == PYA_E_CAPTURE && (is_capturing(world, device) || world->has_foreign));
    good = good || ((st == PYA_E_CAPTURE || st == PYA_E_NOTSUP) && world->may_refuse);
    if (!good) {
        fprintf(stderr, "status: %s\n", pya_status_text(st));
    }
    REQUIRE(good);
}

static void
check_device(struct world *world, int device, bool is_whole) {
    size_t n = 0, bytes = 0, requested = 0;
    for (size_t i = 0; i < world->n_live; i++) {
        if (world->live[i].device == device) {
            n++;
            bytes += world->live[i].bytes;
            requested += world->live[i].requested;
        }
    }
    REQUIRE(!is_whole || pya_heap_check(world->heap, device) == 0);
    REQUIRE(!is_whole || world->sims[device] == NULL || pya_sim_check(world->sims[device]) == 0);
    if (world->is_meanwhile) {
        return;
    }
    REQUIRE_EQ(stat_of(world->heap, device, "allocation.all.current"), n);
    REQUIRE_EQ(stat_of(world->heap, device, "allocated_bytes.all.current"), bytes);
    /* Blocks that wait for other streams are active and, as in torch, still count
   * as requested. */
    bool nothing_waits = stat_of(world->heap, device, "active.all.current") == (int64_t)n;
    int64_t requested_now = stat_of(world->heap, device, "requested_bytes.all.current");
    int64_t active_bytes = stat_of(world->heap, device, "active_bytes.all.current");
    REQUIRE(
        nothing_waits ? requested_now == (int64_t)requested : requested_now > (int64_t)requested);
    REQUIRE(nothing_waits ? active_bytes == (int64_t)bytes : active_bytes > (int64_t)bytes);
    if (world->sims[device] != NULL) {
        struct pya_sim_state state;
        pya_sim_query(world->sims[device], &state);
        if (state.n_violations != 0) {
            fprintf(stderr, "device %d: %s\n", device, pya_sim_violation(world->sims[device]));
        }
        REQUIRE_EQ(state.n_violations, 0);
        /* A page whose release failed is still on the device, and so is what an import shows. */
        if (!world->may_fail && !world->has_imported) {
            REQUIRE_EQ(
                stat_of(world->heap, device, "reserved_bytes.all.current"), state.used_bytes);
        }
    }
}

void
check_all(struct world *world, bool is_whole) {
    SAY("check\n");
    for (int d = 0; d < N_DEVICES; d++) {
        check_device(world, d, is_whole);
    }
    kernels_check(world);
}

void
live_add(struct world *world, struct live live) {
    pya_dptr base;
    int device;
    size_t rounded = pya_round_up(live.requested, PYA_ALIGN);
    (void)fault_disarm(); /* the rest is the model's and the sim's */
    REQUIRE_EQ(live.ptr % PYA_ALIGN, 0);
    REQUIRE_EQ(pya_block_info(world->heap, live.ptr, &base, &live.bytes, &device), PYA_OK);
    REQUIRE(base == live.ptr && device == live.device && live.bytes >= rounded);
    if (!world->configs[live.device].no_vmm && world->options.vmm && !world->no_split &&
        world->options.roundup_power2_divisions <= 1) {
        REQUIRE_EQ(live.bytes, rounded);
    }
    REQUIRE_EQ(pya_sim_own(world->sims[live.device], live.ptr, live.bytes), PYA_OK);
    for (size_t i = 0; i < N_GONE; i++) {
        world->gone[i] = world->gone[i] == live.ptr ? 0 : world->gone[i];
    }
    world->live[world->n_live++] = live;
    kernels_add(world, &live);
    plan_note(world, &world->live[world->n_live - 1]);
}

void
stream_move(struct world *world, int device, pya_stream stream, int context) {
    world->contexts[device][stream / 16] = context;
    if (world->sims[device] != NULL) {
        pya_sim_set_context(world->sims[device], stream, context);
    }
}

void
streams_finish_abroad(struct world *world, int device) {
    for (int d = 0; d < N_DEVICES; d++) {
        if (d == device || world->sims[d] == NULL) {
            continue;
        }
        for (unsigned i = 0; i < N_STREAMS; i++) {
            if (world->contexts[d][i] == device) {
                pya_sim_finish(world->sims[d], stream_of(i));
            }
        }
        pya_sim_finish(world->sims[d], pya_stream_of_device(0, device));
    }
}

void
live_use(struct world *world, struct live *live, pya_stream stream) {
    SAY("use 0x%llx on %d%s\n", (unsigned long long)live->ptr, (int)stream,
        live->is_used ? ": no" : "");
    if (!live->is_used && !stream_is_capturing(world, live->device, stream)) {
        live->is_used = true;
        if (live->stream != stream) {
            pya_sim_finish(world->sims[live->device], live->stream);
        } else {
            stream_move(world, live->device, stream, live->device);
        }
        pya_sim_set_destroyed(world->sims[live->device], stream, false);
        REQUIRE_EQ(pya_sim_use(world->sims[live->device], stream, live->ptr, live->bytes), PYA_OK);
    }
}

struct context {
    struct world *world;
    size_t n;
    unsigned place; /* the program's; 0: unknown */
};

void *
context_capture(void *arg, bool with_stack) {
    struct world *world = arg;
    if (world->has_host_fault || !with_stack) {
        return NULL;
    }
    struct context *context = malloc(sizeof *context);
    *context = (struct context){world, 1, (unsigned)(world->n_contexts % 5)};
    world->n_contexts++;
    return context;
}

void
context_retain(void *arg, void *context) {
    (void)arg;
    REQUIRE(((struct context *)context)->n > 0);
    ((struct context *)context)->n++;
}

void
context_release(void *arg, void *context) {
    struct world *world = arg;
    if (--((struct context *)context)->n == 0) {
        world->n_contexts--;
        free(context);
    }
}

void *
context_of_free(void *arg, void *here, void *allocation) {
    if (here == NULL) {
        context_retain(arg, allocation);
    }
    return here == NULL ? allocation : here;
}

uint64_t
context_key(void *arg, void *context) {
    (void)arg;
    return ((const struct context *)context)->place;
}

bool
context_describe(void *arg, void *context, char *text, size_t text_bytes) {
    (void)arg;
    const unsigned place = ((const struct context *)context)->place;
    (void)snprintf(text, text_bytes, "place %u", place);
    return place != 1;
}
