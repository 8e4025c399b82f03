/* Operations of the rarer calls: other libraries' streams, peers, memory shared
 * between processes, blocks claimed again. */
#include <unistd.h>

#include "core/gc.h"
#include "core_model.h"
#include "sender.h"

static void
op_foreign(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    pya_stream stream = stream_of(how >> 1);
    bool is_known = pya_note_foreign_stream(world->heap, stream, how % N_DEVICES);
    SAY("foreign stream %d of device %d%s\n", (int)stream, how % N_DEVICES,
        is_known ? "" : ", unknown");
    world->has_foreign = world->has_foreign || is_known;
    world->noted |= UINT32_C(1) << (stream / 16);
    (void)fault_disarm(); /* see op_host_fault() */
    for (int d = 0; d < N_DEVICES; d++) {
        if (!stream_is_capturing(world, d, stream)) {
            stream_move(world, d, stream, how % N_DEVICES);
        }
    }
}

static void
op_peer(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    unsigned open_fails = world->open_fails;
    const int device = how % N_DEVICES;
    int peer = (how / 2 & 1) != 0 ? N_DEVICES : 1 - device;
    pya_status st = pya_enable_peer(world->heap, device, peer);
    SAY("device %d: peer %d -> %d\n", device, peer, st);
    const bool is_refused = (world->configs[device].refused_peers >> peer & 1) != 0;
    if (is_refused && st == PYA_OK) { /* all its memory is from calls that know no peers */
        REQUIRE(world->configs[device].no_vmm || !world->options.vmm);
    } else if (
        st != PYA_E_NOTSUP && st != PYA_E_NOMEM && !is_refused && /* a page is tried */
        world->open_fails == open_fails) {
        require_status(world, device, st);
    }
}

/* A block goes to another process, which here is this one. */
static void
op_import(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    if (world->n_live == 0 || world->n_imports == MAX_IMPORTS || world->depth > 0) {
        return;
    }
    const struct live *live = &world->live[how % world->n_live];
    struct sender sender = {.heap = world->heap};
    const struct pya_import_source source = {.arg = &sender, .next = sender_next};
    pya_status st = pya_share(world->heap, live->ptr, &sender.shared);
    if (st != PYA_OK) {
        REQUIRE_EQ(st, PYA_E_NOTSUP);
        return;
    }
    REQUIRE(sender.shared.ptr == live->ptr && sender.shared.n_pages > 0);
    if ((how & 0x80) != 0) { /* what the receiver asks for has changed meanwhile */
        sender.shared.key++;
    }
    pya_dptr base;
    world->depth = HOOK_DEPTH; /* a block in transit is not given back by anybody */
    st = pya_import_open(world->heap, live->device, sender.shared.n_pages, &source, &base);
    world->depth = 0;
    SAY("import 0x%llx: %zu pages -> %d\n", (unsigned long long)live->ptr, sender.shared.n_pages,
        st);
    world->has_imported = true;
    if (st == PYA_OK) {
        world->imports[world->n_imports++] = base;
    }
    if (st == PYA_E_NOMEM) {
        return; /* of addresses */
    }
    if ((how & 0x80) != 0) {
        REQUIRE(st == PYA_E_FOREIGN || world->may_fail || world->has_host_fault);
    } else {
        require_status(world, live->device, st);
    }
}

static void
op_import_close(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    if (world->n_imports == 0 || how == 255) {
        REQUIRE_EQ(pya_import_close(world->heap, (pya_dptr)how + 1), PYA_E_FOREIGN);
    } else {
        import_close(world, how % world->n_imports);
    }
}

void
import_close(struct world *world, size_t i) {
    pya_dptr base = world->imports[i];
    world->imports[i] = world->imports[--world->n_imports];
    REQUIRE_EQ(pya_import_close(world->heap, base), PYA_OK);
}

/* A block that was freed lately comes back where it lay, or cannot. */
static void
op_claim(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    struct live live = world->freed[how % N_GONE];
    int i = how / N_GONE % N_POOLS;
    bool is_request = how >= 0xc0; /* on the block's stream, wherever such requests go now */
    bool has_pool = is_request || world->pools[live.device][i].n_users > 0;
    if (live.ptr == 0 || world->n_live >= MAX_LIVE || !has_pool) {
        return;
    }
    const struct pya_claim claim = {live.ptr, live.bytes, live.requested, live.stream};
    pya_status st =
        is_request ? pya_alloc_at(world->heap, live.device, live.requested, live.stream, live.ptr)
                   : pya_pool_claim(world->heap, live.device, pool_id(i), &claim);
    SAY("claim 0x%llx of pool %d -> %d\n", (unsigned long long)live.ptr, i, st);
    if (st == PYA_OK) {
        live.is_used = false;
        live_add(world, live);
    } else if (st != PYA_E_INVAL) {
        require_status(world, live.device, st);
    }
}

static void
op_tell(struct world *world) {
    uint8_t how = fuzz_byte(&world->in);
    char text[300];
    uint64_t allocs, frees;
    pya_heap_counts(world->heap, &allocs, &frees);
    REQUIRE(world->is_meanwhile || allocs - frees == world->n_live);
    int n = pya_heap_error_text(
        world->heap, (pya_status)(how % 18), "fuzz", how / 64 - 1, text, how % 3 * 100);
    REQUIRE(n > 0);
    pya_dptr ptr = world->n_live == 0 ? 1 : world->live[how % world->n_live].ptr;
    REQUIRE_EQ(pya_history_annotate(world->heap, ptr, NULL), ptr == 1 ? PYA_E_FOREIGN : PYA_OK);
}

/* A stream is captured by hand; nobody tells the heap. */
static void
op_capture(struct world *world) {
    const uint8_t how = fuzz_byte(&world->in);
    const int device = how % N_DEVICES;
    const pya_stream stream = stream_of(how >> 1);
    const uint32_t bit = UINT32_C(1) << (stream / 16);
    (void)fault_disarm(); /* see op_host_fault() */
    const bool is_on = (world->captured[device] & bit) == 0;
    if (world->sims[device] == NULL || (is_on && stream_is_capturing(world, device, stream))) {
        return;
    }
    SAY("capture of stream %d of device %d by hand: %s\n", (int)stream, device,
        is_on ? "begins" : "ends");
    pya_sim_set_destroyed(world->sims[device], stream, false);
    pya_sim_set_capturing(world->sims[device], stream, is_on);
    world->captured[device] ^= bit;
}

void
captures_end(struct world *world, int device) {
    for (unsigned i = 0; i < N_STREAMS; i++) {
        if ((world->captured[device] >> i & 1) != 0) {
            pya_sim_set_capturing(world->sims[device], stream_of(i), false);
        }
    }
    world->captured[device] = 0;
}

/* Another stream has the handle now, in this device's context or another's.  The earlier one has finished. */
static void
op_context(struct world *world) {
    const uint8_t how = fuzz_byte(&world->in);
    const int device = how % N_DEVICES;
    const pya_stream stream = stream_of(how >> 1);
    (void)fault_disarm();
    if (world->sims[device] != NULL && !stream_is_capturing(world, device, stream)) {
        const bool is_noted = (world->noted >> (stream / 16) & 1) != 0;
        const int context = is_noted ? device : how >> 6;
        SAY("stream %d of device %d is of context %d\n", (int)stream, device, context);
        pya_sim_set_destroyed(world->sims[device], stream, false);
        pya_sim_finish(world->sims[device], stream);
        stream_move(world, device, stream, context);
    }
}

/* Memory is collected, which a program gets to only indirectly. */
static void
op_collect(struct world *world) {
    const uint8_t how = fuzz_byte(&world->in);
    struct pya_card *card = pya_heap_open_card(world->heap, how % N_DEVICES);
    if (card != NULL) {
        pya_lock_acquire(&card->lock);
        size_t n_bytes = pya_gc_collect(card, how / N_DEVICES * PYA_PAGE / 2, NULL, 0);
        pya_lock_release(&card->lock);
        SAY("collect of device %d: %zu\n", how % N_DEVICES, n_bytes);
    }
}

/* What fails from now on cannot be undone either, until the next time. */
static void
op_fault_of_undo(struct world *world) {
    static const uint32_t kinds[] = {
        1U << PYA_SIM_SET_ACCESS | 1U << PYA_SIM_UNMAP, 1U << PYA_SIM_MAP | 1U << PYA_SIM_UNMAP,
        1U << PYA_SIM_PAGE_CREATE | 1U << PYA_SIM_PAGE_RELEASE,
        1U << PYA_SIM_PAGE_IMPORT | 1U << PYA_SIM_UNMAP | 1U << PYA_SIM_PAGE_RELEASE};
    const uint8_t how = fuzz_byte(&world->in);
    struct pya_sim *sim = world->sims[how % N_DEVICES];
    if (sim != NULL && !pya_sim_fail_clear(sim)) {
        SAY("device %d: call %d of kinds 0x%x fails, later too\n", how % N_DEVICES, 1 + (how >> 4),
            kinds[how >> 1 & 3]);
        world->may_fail = true;
        pya_sim_fail(
            sim, kinds[how >> 1 & 3], 1 + (how >> 4), (how & 8) != 0 ? PYA_E_NOMEM : PYA_E_DEVICE,
            true);
    }
}

/* So many requests that fail end a long program: thousands of them would take minutes under a sanitizer. */
enum { LONG_PROGRAM_FAILURES = 200 };

/* Hundreds of requests on one stream, each freed a few requests later.  Their sizes come again after a period, if at
 * all: what a program is noticed to do only after long would be reached by chance too rarely. */
static void
op_long_program(struct world *world) {
    const uint8_t how = fuzz_byte(&world->in);
    const uint8_t length = fuzz_byte(&world->in);
    const uint8_t step = fuzz_byte(&world->in);
    const unsigned n = length < 0xF0 ? 4U * length : 20000; /* in full size as well */
    const unsigned n_alive = 1 + how / 16 % 8;
    pya_dptr alive[8] = {0};
    unsigned n_failed = 0;
    SAY("program of %u requests, period %d\n", n, step);
    (void)fault_disarm(); /* see op_host_fault() */
    for (unsigned i = 0; i < n && n_failed < LONG_PROGRAM_FAILURES && world->depth == 0; i++) {
        const unsigned what = step == 0 ? i : i % step;
        const uint32_t mixed = (what + how) * UINT32_C(0x9E3779B1);
        const size_t step_bytes = (size_t)1 << (mixed >> 28 < 12 ? 21 : 15);
        const size_t bytes = step_bytes + mixed % step_bytes;
        alloc_on(world, how % N_DEVICES, stream_of(how >> 1), bytes, (how & 0x80) != 0);
        const struct live *last = world->n_live == 0 ? NULL : &world->live[world->n_live - 1];
        const pya_dptr ptr = last != NULL && last->requested == bytes ? last->ptr : 0;
        for (size_t k = 0; k < world->n_live; k++) {
            if (world->live[k].ptr == alive[i % n_alive]) {
                free_live(world, k);
                break;
            }
        }
        alive[i % n_alive] = ptr;
        n_failed += ptr == 0;
        struct pya_sim *sim = world->sims[how % N_DEVICES];
        if (i % 256 == 255 && sim != NULL) { /* it looks at all unfinished work on a page */
            pya_sim_finish_all(sim);
        }
    }
}

void
op_rare(struct world *world) {
    static void (*const ops[])(struct world *) = {op_foreign,      op_peer,  op_import, op_import,
                                                  op_import_close, op_claim, op_claim,  op_tell};
    static void (*const wide_ops[])(struct world *) = {
        op_capture,       op_collect,      op_context, op_fork,
        op_fault_of_undo, op_long_program, op_capture, op_fault_of_undo};
    const uint8_t kind = fuzz_byte(&world->in);
    if (world->is_wide && kind >= 0x80) {
        wide_ops[kind % (sizeof wide_ops / sizeof *wide_ops)](world);
    } else {
        ops[kind % (sizeof ops / sizeof *ops)](world);
    }
}
