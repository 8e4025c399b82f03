/* Operations on blocks and on the heap, each compared with the model. */
#include "core/move.h"
#include "core/pool.h"
#include "core/snapshot.h"
#include "core_model.h"

size_t
size_of(struct fuzz_input *in) {
    uint8_t kind = fuzz_byte(in);
    switch (kind % 8) {
    case 0:
        return 1 + fuzz_number(in, 2);
    case 1:
        return 1 + fuzz_number(in, 3);
    case 2:
        return fuzz_number(in, 8);
    default:
        return ((size_t)1 + kind / 8) * PYA_PAGE / 2 + (kind % 8 == 3 ? 512 : 0);
    }
}

/* If the device is out of memory, its free whole grains and what can still be made must be less than what was
 * requested. Not checked if something else could be short, or memory may have come back since. */
static void
check_shortage(struct world *world, int device, size_t bytes) {
    struct pya_card *card = pya_heap_open_card(world->heap, device);
    size_t n_there = 0;
    size_t free_bytes, total_bytes;
    if (card == NULL || world->may_fail || world->has_meanwhile || world->has_pressure ||
        world->has_foreign || world->has_imported || is_capturing(world, device) ||
        world->configs[device].no_vmm || !world->options.vmm || card->n_active > 0 ||
        card->lacks_addresses || world->options.roundup_power2_divisions > 1) {
        return;
    }
    pya_lock_acquire(&card->lock);
    for (const struct pya_arena *a = card->arenas; a != NULL; a = a->next) {
        n_there += pya_pool_is_open(a) ? pya_pages_to_pick(a, SIZE_MAX, false) : 0;
    }
    size_t room = pya_card_room(card);
    REQUIRE_EQ(pya_device_mem_info(card->dev, &free_bytes, &total_bytes), PYA_OK);
    pya_lock_release(&card->lock);
    room = room < free_bytes ? room : free_bytes;
    REQUIRE(bytes > card->caps.total_bytes || n_there + room / PYA_PAGE < pya_pages_for(bytes));
}

/* Reserved bytes of a device that may not be open yet. */
static int64_t
reserved_of(struct world *world, int device) {
    return stat_of(world->heap, device, "reserved_bytes.all.current");
}

/* If it grew, then not past what the device may hold. */
static void
check_limit(struct world *world, int device, int64_t before) {
    const int64_t after = reserved_of(world, device);
    const struct pya_card *card = pya_heap_open_card(world->heap, device);
    const size_t limit = pya_get_limit(world->heap, device, PYA_LIMIT_HARD);
    if (card != NULL && after > before && !world->has_meanwhile && !world->has_pressure) {
        const double fraction = pya_get_fraction(world->heap, device);
        REQUIRE(limit == 0 || after <= (int64_t)limit);
        REQUIRE(fraction >= 1 || (double)after <= fraction * (double)card->caps.total_bytes);
    }
}

/* uses: work that touches the block is queued. */
void
alloc_on(struct world *world, int device, pya_stream stream, size_t bytes, bool uses) {
    struct live live = {.requested = bytes, .device = device, .stream = stream};
    if (world->n_live >= MAX_LIVE) {
        return;
    }
    const int64_t before = reserved_of(world, live.device);
    unsigned open_fails = world->open_fails;
    pya_status st = pya_alloc(world->heap, live.device, live.requested, stream, &live.ptr);
    SAY("alloc device %d stream %d: %zu -> %d 0x%llx\n", live.device, (int)stream, live.requested,
        st, (unsigned long long)live.ptr);
    check_limit(world, live.device, before);
    if (world->open_fails < open_fails) {
        REQUIRE_EQ(st, PYA_E_DEVICE);
    } else if (st == PYA_OK && live.requested == 0) {
        REQUIRE_EQ(live.ptr, 0);
    } else if (st == PYA_OK) {
        live_add(world, live);
        if (uses) {
            live_use(world, &world->live[world->n_live - 1], stream);
        }
    } else if (st == PYA_E_TOO_LARGE) {
        REQUIRE(live.requested > PYA_REQUEST_MAX);
    } else if (st == PYA_E_NOMEM) {
        char text[700];
        struct pya_oom_info info;
        pya_heap_oom_info(world->heap, &info);
        REQUIRE(pya_oom_text(&info, text, sizeof text) > 0);
        REQUIRE(pya_oom_text(&info, text, bytes % 32) > 0);
        check_shortage(world, live.device, live.requested);
    } else {
        require_status(world, live.device, st);
    }
}

void
op_alloc(struct world *world) {
    uint8_t where = fuzz_byte(&world->in);
    size_t bytes = size_of(&world->in);
    alloc_on(world, where % N_DEVICES, stream_of(where >> 1), bytes, (where & 0x80) != 0);
}

void
free_live(struct world *world, size_t i) {
    struct live live = world->live[i];
    SAY("free 0x%llx\n", (unsigned long long)live.ptr);
    pya_sim_disown(world->sims[live.device], live.ptr, live.bytes);
    plan_note_free(world, &live);
    world->live[i] = world->live[--world->n_live];
    world->gone[live.ptr / PYA_ALIGN % N_GONE] = live.ptr;
    world->freed[live.ptr / PYA_ALIGN % N_GONE] = live;
    REQUIRE_EQ(pya_free(world->heap, live.ptr), PYA_OK);
}

void
op_free(struct world *world) {
    if (world->n_live > 0) {
        free_live(world, fuzz_byte(&world->in) % world->n_live);
    }
}

/* Another stream works on a block, and its user declares that. */
void
op_record(struct world *world) {
    if (world->n_live == 0) {
        return;
    }
    struct live *live = &world->live[fuzz_byte(&world->in) % world->n_live];
    uint8_t how = fuzz_byte(&world->in);
    pya_stream stream = stream_of(how);
    pya_stream said = stream;
    if ((how & 0x20) != 0) { /* a default stream, of this device or another */
        said = pya_stream_of_device(0, how >> 7);
        stream = how >> 7 == live->device ? 0 : said;
    }
    pya_status st = pya_record_stream(world->heap, live->ptr, said);
    (void)fault_disarm(); /* see op_host_fault() */
    SAY("record 0x%llx on %d -> %d\n", (unsigned long long)live->ptr, (int)stream, st);
    if (st != PYA_OK) {
        require_status(world, live->device, st);
    } else if ((how & 0x40) != 0) {
        live_use(world, live, stream);
    }
}

/* Pointers to no block: each is refused, and nothing changes. */
void
op_bad_free(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    pya_dptr ptr = world->gone[which % N_GONE];
    if (which >= 0xC0) {
        ptr = fuzz_number(&world->in, 8) | 1;
    } else if (which >= 0x80 && world->n_live > 0) {
        ptr = world->live[which % world->n_live].ptr + 8;
    }
    if (ptr != 0) {
        pya_status st = pya_free(world->heap, ptr);
        REQUIRE(st == PYA_E_DOUBLE_FREE || st == PYA_E_FOREIGN);
        REQUIRE(ptr % PYA_ALIGN == 0 || st == PYA_E_FOREIGN);
    }
}

void
op_finish(struct world *world) {
    uint8_t which = fuzz_byte(&world->in);
    struct pya_sim *sim = world->sims[which % N_DEVICES];
    pya_stream stream = stream_of(which >> 1);
    /* Nothing would tell of the work of another device's stream. */
    const bool is_own = world->contexts[which % N_DEVICES][stream / 16] == which % N_DEVICES;
    bool destroys = which >= 0x60 && stream != 0 && is_own &&
                    !stream_is_capturing(world, which % N_DEVICES, stream);
    SAY("%s device %d %d\n", which < 0x80 && destroys ? "destroy" : "finish", which % N_DEVICES,
        which >= 0x80 ? -1 : (int)stream);
    if (sim != NULL && which >= 0x80) {
        pya_sim_finish_all(sim);
    } else if (sim != NULL && destroys) {
        pya_sim_set_destroyed(
            sim, stream, true); /* until it is used again, as a new stream with that handle */
    } else if (sim != NULL) {
        pya_sim_finish(sim, stream);
    }
}

void
op_give_back(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    size_t bytes = ((size_t)how >> 3) << 24;
    const int64_t before = reserved_of(world, device);
    pya_status st = (how & 4) != 0   ? pya_trim(world->heap, device, bytes)
                    : (how & 2) != 0 ? pya_empty_cache(world->heap, -1)
                                     : pya_empty_cache(world->heap, device);
    SAY("give back %s device %d -> %d\n", (how & 4) != 0 ? "some" : "all", device, st);
    if (!world->may_fail && !world->has_meanwhile && !world->configs[device].no_vmm) {
        const int64_t kept = (int64_t)world->kept[device];
        REQUIRE(reserved_of(world, device) >= (before < kept ? before : kept));
    }
    if (st == PYA_E_CAPTURE) { /* -1: any device */
        REQUIRE(
            is_capturing(world, 0) || is_capturing(world, 1) || world->has_foreign ||
            world->may_refuse);
    } else {
        require_status(world, device, st);
    }
}

void
op_limit(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    if ((how & 2) != 0 && world->sims[device] != NULL) { /* other programs on the same card */
        pya_sim_set_capacity(world->sims[device], ((size_t)1 + how / 4) * PYA_PAGE * 2);
        return;
    }
    double fraction = (double)(how / 4) / 63;
    unsigned open_fails = world->open_fails;
    pya_status st = pya_set_fraction(world->heap, device, fraction);
    if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
    if (st == PYA_OK) {
        REQUIRE(pya_get_fraction(world->heap, device) == fraction);
    }
}

void
op_fault(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    struct pya_sim *sim = world->sims[how % N_DEVICES];
    uint32_t kinds = (how & 2) != 0 ? PYA_SIM_ANY_CALL : (uint32_t)fuzz_number(&world->in, 3);
    if (sim == NULL) {
        return;
    }
    if ((how & 0xC0) == 0xC0) {
        (void)pya_sim_fail_clear(sim);
        return;
    }
    pya_status st = (how & 4) != 0 ? PYA_E_NOMEM : PYA_E_DEVICE;
    if (world->is_wide && (how & 2) == 0 && (kinds >> 22) % 4 != 0) {
        st = (kinds >> 22) % 4 == 1 ? PYA_E_NOTSUP : PYA_E_CAPTURE;
        world->may_refuse = true;
    }
    SAY("device %d: call %d of kinds 0x%x fails%s: %s\n", how % N_DEVICES, 1 + (how >> 4), kinds,
        (how & 8) ? ", later too" : "", pya_status_text(st));
    world->may_fail = true;
    pya_sim_fail(sim, kinds, 1 + (how >> 4), st, (how & 8) != 0);
}

void
op_history(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    if (how % 4 == 3) {
        pya_history_stop(world->heap);
    } else if (how % 4 == 2) {
        pya_history_forget(world->heap);
    } else {
        enum pya_record_level level = (enum pya_record_level)(how >> 2 & 3);
        require_status(
            world, 0,
            pya_history_start(
                world->heap, level, how % 4 == 0, how >> 4, (uint32_t)how << 2 & 0x3FF));
    }
}

/* The caller owns the entries, oldest first by ring. */
static void
take_history(struct world *world, int device) {
    struct pya_history_part part;
    uint64_t now_ns;
    if (!pya_history_take(world->heap, device, &part, &now_ns)) {
        return;
    }
    for (size_t i = 0; i < part.n; i++) {
        REQUIRE(part.items[i].action < PYA_N_ACTIONS);
        if (part.items[i].context != NULL) {
            context_release(world, part.items[i].context);
        }
    }
    free(part.items);
}

/* Segments do not overlap, their blocks are contiguous, and the sums match the statistics. */
void
op_snapshot(struct world *world) {
    struct pya_snapshot snap;
    size_t active[N_DEVICES] = {0}, total[N_DEVICES] = {0};
    pya_status st = pya_snapshot_take(world->heap, NULL, true, &snap);
    if (st != PYA_OK) {
        require_status(world, 0, st);
        return;
    }
    pya_dptr end = 0;
    for (size_t i = 0; i < snap.n_segments; i++) {
        const struct pya_snap_segment *segment = &snap.segments[i];
        pya_dptr addr = segment->addr;
        REQUIRE(i == 0 || segment->device != snap.segments[i - 1].device || addr >= end);
        for (size_t k = 0; k < segment->n_blocks; k++) {
            REQUIRE_EQ(snap.blocks[segment->first_block + k].addr, addr);
            addr += snap.blocks[segment->first_block + k].bytes;
        }
        end = addr;
        REQUIRE_EQ(end, segment->addr + segment->total_bytes);
        total[segment->device] += segment->total_bytes;
        active[segment->device] += segment->active_bytes;
    }
    for (int d = 0; d < N_DEVICES; d++) {
        REQUIRE_EQ(active[d], stat_of(world->heap, d, "active_bytes.all.current"));
        if (!world->may_fail) {
            REQUIRE_EQ(total[d], stat_of(world->heap, d, "reserved_bytes.all.current"));
        }
    }
    pya_snapshot_fini(&snap);
}

void
op_query(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    struct pya_memory_info info;
    if ((how & 2) != 0) {
        REQUIRE_EQ(pya_stats_reset_peak(world->heap, device), PYA_OK);
    }
    if ((how & 4) != 0) {
        REQUIRE_EQ(pya_stats_reset_accumulated(world->heap, device), PYA_OK);
    }
    if (world->n_live > 0) {
        const struct live *live = &world->live[how % world->n_live];
        struct pya_segment_info segment;
        REQUIRE_EQ(pya_segment_info(world->heap, live->ptr, &segment), PYA_OK);
        REQUIRE(
            segment.base <= live->ptr && live->ptr + live->bytes <= segment.base + segment.bytes);
    }
    if (world->is_wide && (how & 0x80) != 0) {
        struct pya_snapshot snap;
        const struct pya_pool_id id = pool_id(how % N_POOLS);
        const pya_status st = pya_snapshot_take(world->heap, &id, (how & 0x40) != 0, &snap);
        for (size_t i = 0; st == PYA_OK && i < snap.n_segments; i++) {
            REQUIRE_EQ(snap.segments[i].pool.second, id.second);
        }
        if (st == PYA_OK) {
            pya_snapshot_fini(&snap);
        }
    }
    if (world->sims[device] != NULL) {
        pya_status st = pya_memory_info(world->heap, device, &info);
        require_status(world, device, st);
        REQUIRE(st != PYA_OK || info.free_bytes <= info.total_bytes);
        pya_sim_advance_clock(world->sims[device], how);
    }
}

/* Limits, reservations and what else a program may set while it runs. */
void
op_steer(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    uint8_t which = fuzz_byte(&world->in);
    int device = how % N_DEVICES;
    int i = which % N_POOLS;
    bool has_pool = world->pools[device][i].n_users > 0 || world->pools[device][i].is_active;
    size_t bytes = (size_t)which << 22;
    unsigned open_fails = world->open_fails;
    pya_status st;
    switch (how / 2 % 8) {
    case 0:
        st = pya_set_limit(world->heap, device, PYA_LIMIT_HARD, bytes);
        break;
    case 1:
        st = pya_set_limit(world->heap, device, PYA_LIMIT_SOFT, bytes);
        REQUIRE(st != PYA_OK || pya_get_limit(world->heap, device, PYA_LIMIT_SOFT) == bytes);
        break;
    case 2:
    case 3:
        bytes = which == 255 ? PYA_REQUEST_MAX : bytes / 4;
        st = pya_reserve(world->heap, device, bytes, stream_of(how >> 4));
        REQUIRE(st != PYA_OK || reserved_of(world, device) >= (int64_t)bytes);
        world->kept[device] = st == PYA_OK ? bytes : world->kept[device];
        st = st == PYA_E_NOMEM ? PYA_OK : st;
        break;
    case 4:
        st = pya_pool_set_limit(world->heap, device, pool_id(i), bytes);
        REQUIRE(st != PYA_E_INVAL || !has_pool);
        st = st == PYA_E_INVAL ? PYA_OK : st;
        break;
    case 5:
        (void)!pya_pool_set_no_split(world->heap, device, pool_id(i));
        world->no_split = true;
        st = PYA_OK;
        break;
    case 6:
        st = PYA_OK;
        if (world->sims[device] != NULL) { /* forward by up to 32 s, or back */
            uint64_t ns = (uint64_t)which << 27;
            pya_sim_advance_clock(world->sims[device], which % 8 == 7 ? 0 - ns : ns);
        }
        break;
    default:
        take_history(world, device);
        return;
    }
    SAY("steer %d: device %d, %zu -> %d\n", how / 2 % 8, device, bytes, st);
    if (world->open_fails == open_fails) {
        require_status(world, device, st);
    }
}

void
op_check(struct world *world) {
    check_all(world, fuzz_byte(&world->in) % 16 == 0);
}
