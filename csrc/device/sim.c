/* The simulated device: its table, counts, injected failures, and what tests read from it. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

#define SIM_DEFAULT_CAPACITY (UINT64_C(80) << 30)
#define SIM_DEFAULT_ADDRESSES (UINT64_C(1) << 44)
/* The clock starts at an arbitrary point. */
#define SIM_CLOCK_FIRST_NS (UINT64_C(3600) * 1000 * 1000 * 1000)

/* The driver's codes, so that messages read as on a real card. */
enum {
    SIM_CODE_INVALID = 1,
    SIM_CODE_NOMEM = 2,
    SIM_CODE_NOTSUP = 801,
    SIM_CODE_CAPTURE = 900,
    SIM_CODE_OTHER = 999
};

static int
sim_code(pya_status status) {
    if (status == PYA_E_NOMEM) {
        return SIM_CODE_NOMEM;
    }
    if (status == PYA_E_NOTSUP) {
        return SIM_CODE_NOTSUP;
    }
    return status == PYA_E_CAPTURE ? SIM_CODE_CAPTURE : SIM_CODE_OTHER;
}

pya_status
sim_enter(struct pya_sim *sim, enum pya_sim_call call) {
    pthread_mutex_lock(&sim->lock);
    sim->state.n_calls[call]++;
    sim->state.n_memory_calls += pya_sim_calls[call].is_memory;
    sim->is_told = false;
    if (sim->fail_left == 0 || (sim->fail_kinds & (UINT32_C(1) << call)) == 0) {
        return PYA_OK;
    }
    if (sim->fail_left > 1) {
        sim->fail_left--;
        return PYA_OK;
    }
    sim->fail_left = sim->fail_sticky ? 1 : 0;
    sim->fail_fired = true;
    return sim->fail_status;
}

pya_status
sim_leave(
    struct pya_sim *sim, enum pya_sim_call call, uint64_t n_handles, uint64_t n_pages,
    pya_status status) {
    if (status == PYA_OK) {
        sim->state.device_ns += pya_sim_call_ns(sim->config.cost, call, n_handles, n_pages);
    } else {
        struct pya_device_error *error = &sim->error;
        if (!sim->is_told) {
            error->code = sim_code(status);
            snprintf(error->text, sizeof error->text, "%s", pya_status_text(status));
        }
        snprintf(error->call, sizeof error->call, "%s", pya_sim_calls[call].name);
        error->is_sticky = status == PYA_E_DEVICE && sim->fail_sticky && sim->fail_left > 0;
        error->bytes = n_pages * PYA_PAGE;
        error->peers = call == PYA_SIM_SET_ACCESS ? error->peers : 0;
    }
    pthread_mutex_unlock(&sim->lock);
    return status;
}

pya_status
sim_misuse(struct pya_sim *sim, const char *what, uint64_t value) {
    sim->state.n_violations++;
    snprintf(sim->violation, sizeof sim->violation, "%s (0x%llx)", what, (unsigned long long)value);
    if (!sim->config.quiet) {
        fprintf(stderr, "sim device %d: %s\n", sim->device.index, sim->violation);
    }
    sim->is_told = true;
    sim->error.code = SIM_CODE_INVALID;
    snprintf(sim->error.text, sizeof sim->error.text, "%s", sim->violation);
    return PYA_E_DEVICE;
}

uint32_t
sim_vpage(const struct pya_sim *sim, pya_dptr addr) {
    uint64_t page = (addr - sim->base) >> PYA_PAGE_SHIFT;
    return addr < sim->base || page >= sim->space.n_pages ? SIM_SPACE_NONE : (uint32_t)page;
}

static pya_status
sim_caps(struct pya_device *dev, struct pya_device_caps *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_CAPS);
    if (status == PYA_OK) {
        out->has_vmm = !sim->config.no_vmm;
        out->has_export = out->has_vmm;
        out->total_bytes = sim->config.capacity_bytes;
        out->address_bytes = sim->config.address_bytes;
    }
    return sim_leave(sim, PYA_SIM_CAPS, 0, 0, status);
}

static pya_status
sim_mem_info(struct pya_device *dev, size_t *free_bytes, size_t *total_bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_MEM_INFO);
    if (status == PYA_OK) {
        size_t total = sim->config.capacity_bytes;
        *total_bytes = total;
        *free_bytes = sim->state.used_bytes > total ? 0 : total - sim->state.used_bytes;
    }
    return sim_leave(sim, PYA_SIM_MEM_INFO, 0, 0, status);
}

static pya_status
sim_set_peer(struct pya_device *dev, int peer, bool on) {
    struct pya_sim *sim = sim_from(dev);
    bool is_peer = peer >= 0 && peer < PYA_MAX_DEVICES && peer != dev->index;
    if (is_peer && !on) { /* no call of the driver */
        pthread_mutex_lock(&sim->lock);
        sim->peers &= ~(UINT64_C(1) << peer);
        pthread_mutex_unlock(&sim->lock);
        return PYA_OK;
    }
    pya_status status = sim_enter(sim, PYA_SIM_ENABLE_PEER);
    if (status == PYA_OK && !is_peer) {
        status = sim_misuse(sim, "not a peer device", (uint64_t)(int64_t)peer);
    } else if (status == PYA_OK) {
        sim->peers |= UINT64_C(1) << peer;
    }
    return sim_leave(sim, PYA_SIM_ENABLE_PEER, 0, 0, status);
}

static uint64_t
sim_clock_ns(struct pya_device *dev) {
    struct pya_sim *sim = sim_from(dev);
    pthread_mutex_lock(&sim->lock);
    uint64_t now = sim->clock_ns;
    pthread_mutex_unlock(&sim->lock);
    return now;
}

static void
sim_last_error(struct pya_device *dev, struct pya_device_error *out) {
    struct pya_sim *sim = sim_from(dev);
    pthread_mutex_lock(&sim->lock);
    *out = sim->error;
    pthread_mutex_unlock(&sim->lock);
}

static void
sim_close(struct pya_device *dev) {
    struct pya_sim *sim = sim_from(dev);
    sim_back_close(sim);
    for (uint32_t i = 0; i < sim->n_page_slots; i++) {
        free(sim->pages[i].owner);
    }
    sim_space_fini(&sim->space);
    pthread_mutex_destroy(&sim->lock);
    free(sim->pte);
    free(sim->pages);
    free(sim->runs);
    free(sim->streams);
    free(sim->events);
    free(sim->uses);
    free(sim);
}

/* The slots that work without virtual memory too.  The others are then NULL and are never called. */
#define SIM_OPS_PLAIN                                                                              \
    .name = "sim", .caps = sim_caps, .plain_alloc = sim_plain_alloc, .plain_free = sim_plain_free, \
    .event_create = sim_event_create, .event_record = sim_event_record,                            \
    .event_query = sim_event_query, .event_sync = sim_event_sync,                                  \
    .event_destroy = sim_event_destroy, .stream_sync = sim_stream_sync,                            \
    .device_sync = sim_device_sync, .mem_info = sim_mem_info, .is_capturing = sim_is_capturing,    \
    .set_peer = sim_set_peer, .clock_ns = sim_clock_ns, .last_error = sim_last_error,              \
    .close = sim_close

static const struct pya_device_ops sim_ops_plain = {SIM_OPS_PLAIN};

static const struct pya_device_ops sim_ops_vmm = {
    SIM_OPS_PLAIN,
    .page_create = sim_page_create,
    .page_release = sim_page_release,
    .page_export = sim_page_export,
    .page_import = sim_page_import,
    .range_reserve = sim_range_reserve,
    .range_release = sim_range_release,
    .map = sim_map,
    .unmap = sim_unmap,
    .set_access = sim_set_access,
    .open_peer = sim_open_peer,
};

pya_status
pya_sim_create(const struct pya_sim_config *config, int index, struct pya_sim **out) {
    struct pya_sim *sim = calloc(1, sizeof *sim);
    if (sim == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    sim->device =
        (struct pya_device){.ops = config->no_vmm ? &sim_ops_plain : &sim_ops_vmm, .index = index};
    sim->config = *config;
    sim->fd = -1;
    sim->clock_ns = SIM_CLOCK_FIRST_NS;
    if (sim->config.capacity_bytes == 0) {
        sim->config.capacity_bytes = SIM_DEFAULT_CAPACITY;
    }
    if (sim->config.address_bytes == 0) {
        sim->config.address_bytes = SIM_DEFAULT_ADDRESSES;
    }
    pya_status status = PYA_E_INVAL;
    uint64_t n_vpages = sim->config.address_bytes >> PYA_PAGE_SHIFT;
    if (n_vpages == 0 || n_vpages >= SIM_SPACE_FREE ||
        (sim->config.address_bytes & (PYA_PAGE - 1)) != 0 || index < 0) {
        goto free_sim;
    }
    /* Never 0, and no two devices of a process share an address. */
    sim->base = ((uint64_t)index + 1) * sim->config.address_bytes;
    status = sim_space_init(&sim->space, (uint32_t)n_vpages);
    if (status != PYA_OK) {
        goto free_sim;
    }
    sim->pte = calloc(n_vpages, sizeof *sim->pte);
    if (sim->pte == NULL) {
        status = PYA_E_HOST_NOMEM;
        goto fini_space;
    }
    if (config->backed) {
        status = sim_back_open(sim);
        if (status != PYA_OK) {
            goto free_pte;
        }
    }
    pthread_mutex_init(&sim->lock, NULL);
    *out = sim;
    return PYA_OK;

free_pte:
    free(sim->pte);
fini_space:
    sim_space_fini(&sim->space);
free_sim:
    free(sim);
    return status;
}

struct pya_device *
pya_sim_device(struct pya_sim *sim) {
    return &sim->device;
}

struct pya_sim *
pya_sim_of(struct pya_device *dev) {
    return dev->ops == &sim_ops_plain || dev->ops == &sim_ops_vmm ? sim_from(dev) : NULL;
}

void
pya_sim_query(struct pya_sim *sim, struct pya_sim_state *out) {
    pthread_mutex_lock(&sim->lock);
    *out = sim->state;
    out->n_ranges = sim->space.n_ranges - sim->state.n_plain;
    pthread_mutex_unlock(&sim->lock);
}

const char *
pya_sim_violation(struct pya_sim *sim) {
    return sim->violation;
}

void
pya_sim_reset_counts(struct pya_sim *sim) {
    pthread_mutex_lock(&sim->lock);
    memset(sim->state.n_calls, 0, sizeof sim->state.n_calls);
    sim->state.n_memory_calls = 0;
    sim->state.device_ns = 0;
    sim->state.peak_bytes = sim->state.used_bytes;
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_set_capacity(struct pya_sim *sim, size_t bytes) {
    pthread_mutex_lock(&sim->lock);
    sim->config.capacity_bytes = bytes;
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_fail(struct pya_sim *sim, uint32_t kinds, uint64_t nth, pya_status status, bool sticky) {
    pthread_mutex_lock(&sim->lock);
    sim->fail_kinds = kinds;
    sim->fail_left = nth;
    sim->fail_status = status;
    sim->fail_sticky = sticky;
    sim->fail_fired = false;
    pthread_mutex_unlock(&sim->lock);
}

bool
pya_sim_fail_clear(struct pya_sim *sim) {
    pthread_mutex_lock(&sim->lock);
    bool fired = sim->fail_fired;
    sim->fail_left = 0;
    pthread_mutex_unlock(&sim->lock);
    return fired;
}

void
pya_sim_advance_clock(struct pya_sim *sim, uint64_t ns) {
    pthread_mutex_lock(&sim->lock);
    sim->clock_ns += ns;
    pthread_mutex_unlock(&sim->lock);
}

/* Is the page at vpage adjacent to the others of its run? */
static bool
sim_is_beside(const struct pya_sim *sim, uint32_t vpage, uint32_t page) {
    uint32_t first = sim->pages[page].first;
    bool is_last = page + 1 == first + sim->pages[first].n_pages;
    return (page == first ||
            (vpage > 0 && (uint32_t)(sim->pte[vpage - 1] & SIM_PTE_PAGE) == page)) &&
           (is_last || (vpage + 1 < sim->space.n_used &&
                        (uint32_t)(sim->pte[vpage + 1] & SIM_PTE_PAGE) == page + 2));
}

/* Does an enabled peer lack access to what the device itself may access?  Plain memory is another call's business. */
static bool
sim_lacks_peer(const struct pya_sim *sim, uint64_t pte) {
    bool is_own = (pte & (SIM_PTE_ACCESS | SIM_PTE_PLAIN)) == SIM_PTE_ACCESS;
    return is_own && (sim->peers & SIM_PEERS & ~(pte >> SIM_PTE_PEERS)) != 0;
}

/* n_mappings of each page == page table entries that name it, each adjacent to those of the rest of its run;
 * used_bytes == live pages x PYA_PAGE; live == the run has a handle or a mapping; enabled peers have access to all. */
size_t
pya_sim_check(struct pya_sim *sim) {
    pthread_mutex_lock(&sim->lock);
    size_t bad = sim_space_check(&sim->space);
    size_t n_mappings = 0;
    size_t n_alive = 0;
    uint32_t *seen = calloc((size_t)sim->n_page_slots + 1, sizeof *seen);
    for (uint32_t i = 0; seen != NULL && i < sim->space.n_used; i++) {
        uint32_t page = (uint32_t)(sim->pte[i] & SIM_PTE_PAGE);
        if (page != 0) {
            seen[page - 1]++;
            n_mappings += (sim->pte[i] & SIM_PTE_PLAIN) == 0;
            if (sim_lacks_peer(sim, sim->pte[i])) {
                fprintf(stderr, "sim: a peer has no access to virtual page %u\n", i);
                bad++;
            }
            if (!sim_is_beside(sim, i, page - 1)) {
                fprintf(stderr, "sim: page %u is mapped without the rest of its run\n", page - 1);
                bad++;
            }
        }
    }
    for (uint32_t i = 0; seen != NULL && i < sim->n_page_slots; i++) {
        bool is_alive = sim->pages[i].n_handles > 0 || seen[i] > 0;
        n_alive += is_alive ? sim->pages[i].n_pages : 0; /* 0 but at the first of a run */
        if (seen[i] != sim->pages[i].n_mappings) {
            fprintf(
                stderr, "sim: page %u has %u mappings, counted %u\n", i, seen[i],
                sim->pages[i].n_mappings);
            bad++;
        }
    }
    if (seen != NULL && (n_mappings != sim->state.n_mappings || n_alive != sim->state.n_pages ||
                         sim->state.used_bytes != n_alive * PYA_PAGE)) {
        fprintf(
            stderr, "sim: %zu mappings and %zu pages, counted %zu and %zu\n", n_mappings, n_alive,
            sim->state.n_mappings, sim->state.n_pages);
        bad++;
    }
    free(seen);
    pthread_mutex_unlock(&sim->lock);
    return bad + (seen == NULL);
}
