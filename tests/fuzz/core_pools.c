/* Operations on private pools. */
#include "core_model.h"

static bool
filter_match(void *arg, pya_stream stream) {
    const struct pool *pool = arg;
    return pool->stream == UINT64_MAX || pool->stream == stream;
}

struct world *filter_world;

static void
filter_drop(void *arg) {
    (void)arg;
    REQUIRE(filter_world->n_filters > 0);
    filter_world->n_filters--;
}

/* A pool's own allocator.  It never fails to free, because its caller cannot be told. */
struct source {
    struct world *world;
    int device;
    size_t n_segments;
};

static pya_dptr
source_alloc(void *arg, size_t bytes) {
    struct source *source = arg;
    struct pya_device *dev = pya_sim_device(source->world->sims[source->device]);
    pya_dptr addr = 0;
    if (pya_device_plain_alloc(dev, bytes, &addr) != PYA_OK) {
        return 0;
    }
    SAY("source of device %d: %zu at 0x%llx\n", source->device, bytes, (unsigned long long)addr);
    source->n_segments++;
    if (source->world->is_wide) {
        world_meanwhile(source->world);
    }
    return addr;
}

static void
source_free(void *arg, pya_dptr addr) {
    struct source *source = arg;
    struct pya_sim *sim = source->world->sims[source->device];
    REQUIRE(source->n_segments > 0);
    source->n_segments--;
    while (pya_device_plain_free(pya_sim_device(sim), addr) != PYA_OK) {
        REQUIRE(pya_sim_fail_clear(sim));
    }
    if (source->world->is_wide) {
        world_meanwhile(source->world);
    }
}

static void
source_drop(void *arg) {
    const struct source *source = arg;
    REQUIRE(source->world->is_child || source->n_segments == 0);
    free(arg); /* only once: anything left over at the end of a run is found */
}

static void
pool_set_source(struct world *world, int device, int i) {
    (void)fault_disarm();
    struct source *source = malloc(sizeof *source);
    *source = (struct source){world, device, 0};
    const struct pya_segment_source calls = {source_alloc, source_free, source_drop, source};
    pya_status st = pya_pool_set_source(world->heap, device, pool_id(i), calls);
    SAY("pool %d of device %d: source -> %d\n", i, device, st);
    REQUIRE(st == PYA_OK || st == PYA_E_INVAL);
    world->no_split = world->no_split || st == PYA_OK;
}

struct pya_pool_id
pool_id(int i) {
    return (struct pya_pool_id){7, (uint64_t)i + 1};
}

static void
pool_begin(struct world *world, int device, int i, uint8_t how) {
    struct pool *pool = &world->pools[device][i];
    if (world->is_meanwhile) {
        return; /* waits until nobody waits for the device */
    }
    pya_stream stream = (how & 0x80) != 0 ? UINT64_MAX : stream_of(how >> 3);
    if (!pool->is_active) {
        pool->stream = stream;
    }
    /* A stream is captured once at a time. */
    bool capture =
        stream != UINT64_MAX && (how & 0x40) != 0 && !stream_is_capturing(world, device, stream);
    struct pya_stream_filter filter = {filter_match, filter_drop, pool, capture ? stream : 0};
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_begin(world->heap, device, pool_id(i), filter);
    if (pool->is_active) {
        REQUIRE(st == PYA_E_INVAL || world->has_host_fault);
    } else if (st == PYA_OK) {
        world->n_filters++;
        pool->n_users++;
        pool->is_active = true;
        pool->is_capturing = capture;
        if (capture) {
            pya_sim_set_destroyed(world->sims[device], stream, false);
            stream_move(world, device, stream, device);
            pya_sim_set_capturing(world->sims[device], stream, true);
        }
    } else if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
}

void
pool_end(struct world *world, int device, int i) {
    struct pool *pool = &world->pools[device][i];
    if (pool->is_capturing) {
        pya_sim_set_capturing(world->sims[device], pool->stream, false);
        pool->is_capturing = false;
    }
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_end(world->heap, device, pool_id(i));
    if (world->open_fails == open_fails && !world->has_host_fault) {
        REQUIRE_EQ(st, pool->is_active ? PYA_OK : PYA_E_INVAL);
    }
    pool->is_active = pool->is_active && st != PYA_OK;
}

void
pool_release(struct world *world, int device, int i) {
    struct pool *pool = &world->pools[device][i];
    unsigned open_fails = world->open_fails;
    pya_status st = pya_pool_release(world->heap, device, pool_id(i));
    if (world->open_fails == open_fails && !world->has_host_fault) {
        REQUIRE_EQ(st, pool->n_users > 0 ? PYA_OK : PYA_E_INVAL);
    }
    pool->n_users -= st == PYA_OK;
    if (pool->n_users == 0) {
        kernels_forget(world, device, pool_id(i));
    }
}

/* A capture as a whole, or a block of use_mem_pool: begun, some requests on its stream, ended.  What it leaves to those
 * that come after its end is reached by chance too rarely. */
static void
pool_life(struct world *world, int device, int i, uint8_t how) {
    const struct pool *pool = &world->pools[device][i];
    if (pool->is_active || world->is_meanwhile || world->has_host_fault) {
        return;
    }
    const bool is_capture = (how & 0x40) != 0;
    const uint8_t all_streams = (how & 0x20) != 0 ? 0x80 : 0;
    pool_begin(world, device, i, (how & 0x58) | all_streams);
    for (unsigned n = pool->is_active ? 1 + fuzz_byte(&world->in) % 4 : 0; n > 0; n--) {
        alloc_on(world, device, stream_of(how >> 3), size_of(&world->in), !is_capture);
    }
    if (pool->is_active) {
        pool_end(world, device, i);
    }
}

/* Whether live block k lies in the pool. */
static bool
pool_has(struct world *world, int device, int i, size_t k) {
    struct pya_block *block;
    struct pya_card *card = pya_heap_find(world->heap, world->live[k].ptr, &block);
    const struct pya_pool *pool = block->arena->pool;
    const bool has = card->index == device && pool != NULL && pool->id.second == pool_id(i).second;
    pya_lock_release(&card->lock);
    return has;
}

/* The device's next pool that has users is left by all of them, and its blocks are freed; some stay if !is_whole.
 * Another pool may come right after it. */
static void
pool_drop(struct world *world, int device, int i, uint8_t how) {
    const bool is_whole = (how & 0x40) != 0;
    const struct pool *pools = world->pools[device];
    if (world->is_meanwhile || world->has_host_fault) {
        return;
    }
    for (int n = 0; n < N_POOLS && pools[i].n_users == 0; n++) {
        i = (i + 1) % N_POOLS;
    }
    SAY("pool %d is dropped\n", i);
    for (size_t k = world->n_live; k > 0; k--) {
        if ((is_whole || k % 4 != 0) && pool_has(world, device, i, k - 1)) {
            free_live(world, k - 1);
        }
    }
    if (pools[i].is_active) {
        pool_end(world, device, i);
    }
    for (size_t n = pools[i].n_users; n > 0; n--) {
        pool_release(world, device, i);
    }
    if ((how & 0x20) != 0) {
        pool_life(world, device, (i + 1) % N_POOLS, fuzz_byte(&world->in));
    }
}

void
op_pool(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    uint8_t how = fuzz_byte(&world->in);
    int device = which % N_DEVICES;
    int i = (which >> 1) % N_POOLS;
    struct pya_pool_info infos[2];
    pya_status st;
    SAY("pool %d of device %d: %s, stream %d%s\n", i, device,
        (const char *const[]){
            "begin", "begin", "end", "end", "release", "retain", "trim", "set"}[how % 8],
        (how & 0x80) != 0 ? -1 : (int)stream_of(how >> 3), (how & 0x40) != 0 ? ", captured" : "");
    switch (how % 8) {
    case 0:
    case 1:
        pool_begin(world, device, i, how);
        return;
    case 2:
    case 3:
        pool_end(world, device, i);
        return;
    case 4:
        pool_release(world, device, i);
        return;
    case 5:
        if ((how & 0x80) != 0) {
            pool_life(world, device, i, how);
            return;
        }
        kernels_forget(world, device, pool_id(i)); /* it may lend from now on */
        st = pya_pool_retain(world->heap, device, pool_id(i), (how & 8) != 0);
        world->pools[device][i].n_users += st == PYA_OK;
        break;
    case 6:
        if ((how & 0x80) != 0) {
            pool_drop(world, device, i, how);
            return;
        }
        st = pya_pool_trim(world->heap, device, pool_id(i));
        break;
    default:
        kernels_forget(world, device, pool_id(i));
        (void)pya_pool_list(world->heap, device, infos, how % 3);
        (void)!pya_pool_set_on_oom(world->heap, device, pool_id(i), (how & 8) != 0);
        if ((how & 0x30) == 0x30) {
            pool_set_source(world, device, i);
        }
        return;
    }
    if (world->sims[device] != NULL) {
        require_status(world, device, st);
    }
}
