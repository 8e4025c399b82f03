/* What the first bytes of an input choose, and plans: places for what the same input requested in an earlier run. */
#include "core_model.h"

/* Bits of an input's first byte.  Its value modulo the number of option sets chooses one of them. */
enum {
    SETTING_LAYOUT = 0x10,
    SETTING_MEANWHILE = 0x20,
    SETTING_PRESSURE = 0x40,
    SETTING_WIDE = 0x80
};
/* Bits of the third byte, which only wide inputs have. */
enum {
    WIDE_PLAN = 0x01,
    WIDE_NEXT_OPTIONS = 0x02, /* a second set of options, too */
    WIDE_UNLIKE = 0x04,       /* the second device differs from the first */
    WIDE_ADDRESSES = 0x08,    /* there are few addresses */
    WIDE_FORKS = 0x10,
    WIDE_PLACES = 0x20,
    WIDE_NO_PEERS = 0x40
};
enum { AT_WIDE = 2, AT_DRIFT = 3 };

static void
take_options(struct world *world, uint8_t which) {
    static const char *const options[] = {
        "",
        "memory:tight",
        "memory:fast",
        "vmm:False",
        "mappings_per_page:2",
        "memory:tight,mappings_per_page:1",
        "roundup_power2_divisions:4",
        "vmm:False,max_split_size:20MB",
        "limit:64MB",
        "per_process_memory_fraction:0.5,memory:tight",
        "shared_pages:False",
        "shared_pages:False,memory:tight,mappings_per_page:2",
        "soft_limit:40MB,garbage_collection_threshold:0.6",
        "keep_free:30MB,trim_after:2,limit:80MB",
    };
    char message[200];
    REQUIRE_EQ(
        pya_options_parse(
            &world->options, options[which % (sizeof options / sizeof *options)], message,
            sizeof message),
        PYA_OK);
}

static struct pya_sim_config
config_of(uint8_t device) {
    return (struct pya_sim_config){
        .capacity_bytes = ((size_t)1 + device / 16) * 12 * PYA_PAGE,
        .address_bytes = (uint64_t)1 << 33,
        .work = device % 4 == 0   ? PYA_SIM_WORK_AT_ONCE
                : device % 4 == 1 ? PYA_SIM_WORK_DELAYED
                                  : PYA_SIM_WORK_BY_HAND,
        .work_delay = 3,
        .no_vmm = (device & 12) == 12,
        .quiet = !is_verbose,
    };
}

/* A layout of what the input requests, as far as it is known beforehand.  Places follow one another, and then begin
 * again over the first ones. */
static void
take_layout(struct world *world) {
    struct fuzz_input in = world->in;
    uint64_t end = 0;
    size_t n = 0;
    while (n < MAX_PLACES / 2 && fuzz_left(&in) > 0) {
        if (fuzz_byte(&in) % 64 >= 20) { /* no op_alloc() */
            continue;
        }
        (void)fuzz_byte(&in);
        uint64_t bytes = pya_round_up(size_of(&in), PYA_ALIGN);
        if (bytes == 0 || bytes > PYA_REQUEST_MAX) {
            continue;
        }
        uint64_t offset = end % (16 * PYA_PAGE);
        end += bytes;
        offset = n % 8 == 7 ? PYA_LAYOUT_ANYWHERE : offset;
        world->places[n++] = (struct pya_layout_place){offset, bytes, bytes / PYA_ALIGN % 5};
    }
    world->layout = (struct pya_layout){world->places, n, n / 2, PYA_LAYOUT_EVERY_DEVICE, NULL};
    world->options.layouts = &world->layout;
}

static void
take_wide(struct world *world) {
    const uint8_t wide = fuzz_byte(&world->in);
    (void)fuzz_byte(&world->in); /* AT_DRIFT */
    const uint8_t options = fuzz_byte(&world->in);
    const uint8_t second = fuzz_byte(&world->in);
    const uint8_t addresses = fuzz_byte(&world->in);
    (void)fuzz_byte(&world->in); /* unused: the parity of an input's length decides how it ends */
    world->is_wide = true;
    if ((wide & WIDE_NEXT_OPTIONS) != 0) {
        take_options(world, options);
    }
    world->configs[1] = (wide & WIDE_UNLIKE) != 0 ? config_of(second) : world->configs[1];
    for (int d = 0; d < N_DEVICES; d++) {
        if ((wide & WIDE_ADDRESSES) != 0) {
            world->configs[d].address_bytes = ((uint64_t)1 + addresses % 64) << 24;
        }
        world->configs[d].refused_peers = (wide & WIDE_NO_PEERS) != 0 ? 1U << (addresses >> 6) : 0;
    }
    world->may_fork = (wide & WIDE_FORKS) != 0;
    world->has_places = (wide & WIDE_PLACES) != 0;
}

void
settings_take(struct world *world) {
    const uint8_t settings = fuzz_byte(&world->in);
    const uint8_t device = fuzz_byte(&world->in);
    pya_options_init(&world->options);
    take_options(world, settings);
    for (int d = 0; d < N_DEVICES; d++) {
        world->configs[d] = config_of(device);
    }
    if ((settings & SETTING_WIDE) != 0) {
        take_wide(world);
    }
    world->has_meanwhile = (settings & SETTING_MEANWHILE) != 0;
    world->has_pressure = (settings & SETTING_PRESSURE) != 0;
    if (world->plan != NULL && !world->is_rehearsal) {
        world->options.layouts = &world->plan->layouts[0];
    } else if ((settings & SETTING_LAYOUT) != 0) {
        take_layout(world);
    }
    world->open_fails = settings >= 0xF0 ? settings & 3U : 0;
}

/* ---- plans ---- */

bool
settings_want_plan(const uint8_t *data, size_t n) {
    return n > AT_DRIFT && (data[0] & SETTING_WIDE) != 0 && (data[AT_WIDE] & WIDE_PLAN) != 0;
}

static bool
is_large(const struct pya_layout_place *place) {
    return place->bytes >= PYA_REPEAT_FROM;
}

void
plan_note(struct world *world, struct live *live) {
    struct plan *plan = world->plan;
    const int d = live->device;
    struct pya_block *block;
    if (plan == NULL || !world->is_rehearsal || plan->n[d] == MAX_PLACES) {
        return;
    }
    struct pya_card *card = pya_heap_find(world->heap, live->ptr, &block);
    bool is_common = block->arena->pool == NULL;
    pya_lock_release(&card->lock);
    plan->stream[d] = plan->n[d] == 0 ? live->stream : plan->stream[d];
    if (!is_common || live->stream != plan->stream[d]) {
        return;
    }
    struct pya_layout_place *place = &plan->places[d][plan->n[d]++];
    *place = (struct pya_layout_place){.bytes = live->bytes};
    plan->n_large[d] += is_large(place);
    place->life = plan->n_large[d]; /* from its allocation to its free */
    live->n_place = plan->n[d];
}

void
plan_note_free(struct world *world, const struct live *live) {
    struct plan *plan = world->plan;
    if (plan == NULL || !world->is_rehearsal || live->n_place == 0) {
        return;
    }
    struct pya_layout_place *place = &plan->places[live->device][live->n_place - 1];
    place->life = plan->n_large[live->device] - place->life + is_large(place);
    plan->freed[live->device][live->n_place - 1] = plan->n[live->device];
}

/* Does the earlier request still live when the later one comes? */
static bool
plan_overlap(const struct plan *plan, int d, size_t earlier, size_t later) {
    return plan->freed[d][earlier] == 0 || plan->freed[d][earlier] > later;
}

/* The lowest place that is free as long as the request lives. */
static uint64_t
plan_place(const struct plan *plan, int d, size_t i) {
    uint64_t offset = 0;
    for (size_t k = 0; k < i; k++) {
        const struct pya_layout_place *other = &plan->places[d][k];
        if (plan_overlap(plan, d, k, i) && other->offset < offset + plan->places[d][i].bytes &&
            offset < other->offset + other->bytes) {
            offset = other->offset + other->bytes;
            k = SIZE_MAX; /* starting over with the first */
        }
    }
    return offset;
}

/* Some requests are larger now, or gone, or lie where another does. */
static void
plan_drift(struct plan *plan, int d, uint8_t drift) {
    size_t n = 0;
    for (size_t i = 0; i < plan->n[d]; i++) {
        struct pya_layout_place place = plan->places[d][i];
        const unsigned how = (unsigned)(i * 7 + drift) % 64;
        if (drift != 0 && how == 0) {
            place.bytes += PYA_ALIGN * (drift % 8 * 512 + 1);
        } else if (drift != 0 && how == 1) {
            place.offset = drift % 2 == 0 ? PYA_LAYOUT_ANYWHERE : 0;
        }
        if (drift == 0 || how != 2) {
            plan->places[d][n++] = place;
        }
    }
    plan->n[d] = n;
}

void
plan_finish(struct plan *plan, const uint8_t *data) {
    const uint8_t drift = data[AT_DRIFT];
    for (int d = 0; d < N_DEVICES; d++) {
        for (size_t i = 0; i < plan->n[d]; i++) {
            struct pya_layout_place *place = &plan->places[d][i];
            place->offset = plan_place(plan, d, i);
            place->life = plan->freed[d][i] == 0 ? 0 : place->life;
        }
        plan_drift(plan, d, drift);
        const size_t n = plan->n[d];
        plan->layouts[d] = (struct pya_layout){
            plan->places[d], n, drift % 3 == 0 ? 0 : n / (drift % 3), d,
            d + 1 < N_DEVICES ? &plan->layouts[d + 1] : NULL};
    }
}
