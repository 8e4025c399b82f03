/* Memory of the simulated device: physical pages, address ranges, mappings, plain allocations. */
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

bool
sim_grow(void **array, uint32_t *n_slots, size_t element_bytes) {
    uint32_t n = *n_slots == 0 ? 64 : *n_slots * 2;
    void *bigger = realloc(*array, n * element_bytes);
    if (bigger == NULL) {
        return false;
    }
    memset((char *)bigger + *n_slots * element_bytes, 0, (n - *n_slots) * element_bytes);
    *array = bigger;
    *n_slots = n;
    return true;
}

/* ---- physical pages ---- */

static pya_status
sim_page_take(struct pya_sim *sim, uint32_t *out) {
    if (sim->state.used_bytes + PYA_PAGE > sim->config.capacity_bytes) {
        return PYA_E_NOMEM;
    }
    if (sim->free_page == 0) {
        uint32_t old = sim->n_page_slots;
        if (!sim_grow((void **)&sim->pages, &sim->n_page_slots, sizeof *sim->pages)) {
            return PYA_E_HOST_NOMEM;
        }
        for (uint32_t i = sim->n_page_slots; i-- > old;) {
            sim->pages[i].next_free = sim->free_page;
            sim->free_page = i + 1;
        }
    }
    uint32_t page = sim->free_page - 1;
    sim->free_page = sim->pages[page].next_free;
    sim->pages[page].n_handles = 1;
    sim->state.n_pages++;
    sim->state.used_bytes += PYA_PAGE;
    if (sim->state.used_bytes > sim->state.peak_bytes) {
        sim->state.peak_bytes = sim->state.used_bytes;
    }
    *out = page;
    return PYA_OK;
}

/* Gives the page back when neither a handle nor a mapping holds it. */
static void
sim_page_settle(struct pya_sim *sim, uint32_t index) {
    struct sim_page *page = &sim->pages[index];
    if (page->n_handles > 0 || page->n_mappings > 0) {
        return;
    }
    if (page->n_owned > 0) {
        sim_misuse(sim, "a page goes back while a live block owns part of it", index);
        memset(page->owner, 0, SIM_OWNER_WORDS * sizeof *page->owner);
        page->n_owned = 0;
    }
    sim_drop_uses_locked(sim, index);
    if (!sim_back_drop(sim, index)) {
        sim_misuse(sim, "host: memory of a page could not be given back", index);
    }
    page->generation++;
    page->next_free = sim->free_page;
    sim->free_page = index + 1;
    sim->state.n_pages--;
    sim->state.used_bytes -= PYA_PAGE;
}

static pya_page_handle
sim_page_handle(const struct pya_sim *sim, uint32_t page) {
    return ((uint64_t)sim->pages[page].generation << 32) | (page + 1);
}

uint32_t
sim_page_find(const struct pya_sim *sim, pya_page_handle handle) {
    uint32_t page = (uint32_t)handle - 1;
    if ((uint32_t)handle == 0 || page >= sim->n_page_slots || sim->pages[page].n_handles == 0 ||
        sim->pages[page].generation != (uint32_t)(handle >> 32)) {
        return SIM_SPACE_NONE;
    }
    return page;
}

pya_status
sim_page_create(struct pya_device *dev, pya_page_handle *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_CREATE);
    uint32_t page = 0;
    if (status == PYA_OK) {
        status = sim_page_take(sim, &page);
    }
    if (status == PYA_OK) {
        *out = sim_page_handle(sim, page);
    }
    return sim_leave(sim, PYA_SIM_PAGE_CREATE, 1, status);
}

pya_status
sim_page_release(struct pya_device *dev, pya_page_handle handle) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_RELEASE);
    if (status == PYA_OK) {
        uint32_t page = sim_page_find(sim, handle);
        if (page == SIM_SPACE_NONE) {
            status =
                sim_misuse(sim, "release of a handle that is not one (released twice?)", handle);
        } else {
            sim->pages[page].n_handles--;
            sim_page_settle(sim, page);
        }
    }
    return sim_leave(sim, PYA_SIM_PAGE_RELEASE, 1, status);
}

/* ---- address ranges and mappings ---- */

/* first page and number of [addr, addr + bytes); n is 0 when it is not whole pages inside the space. */
static uint32_t
sim_span(const struct pya_sim *sim, pya_dptr addr, size_t bytes, uint32_t *n) {
    uint32_t first = sim_vpage(sim, addr);
    uint64_t count = bytes >> PYA_PAGE_SHIFT;
    bool whole = ((addr | bytes) & (PYA_PAGE - 1)) == 0;
    *n = first != SIM_SPACE_NONE && whole && count <= sim->space.n_pages - first ? (uint32_t)count
                                                                                 : 0;
    return first;
}

static pya_status
sim_reserve_locked(struct pya_sim *sim, uint64_t n, uint64_t flags, uint32_t *out) {
    if (n == 0 || n > sim->space.n_pages) {
        return n == 0 ? sim_misuse(sim, "an empty range was asked for", 0) : PYA_E_NOMEM;
    }
    uint32_t first = sim_space_reserve(&sim->space, (uint32_t)n);
    if (first == SIM_SPACE_NONE) {
        return PYA_E_NOMEM;
    }
    for (uint32_t i = 0; i < (uint32_t)n; i++) {
        sim->pte[first + i] = flags;
    }
    *out = first;
    return PYA_OK;
}

pya_status
sim_range_reserve(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_RANGE_RESERVE);
    uint64_t n = bytes >> PYA_PAGE_SHIFT;
    uint32_t first = 0;
    if (status == PYA_OK && (bytes & (PYA_PAGE - 1)) != 0) {
        status = sim_misuse(sim, "a range of other than whole pages was asked for", bytes);
    }
    if (status == PYA_OK) {
        status = sim_reserve_locked(sim, n, SIM_PTE_RESERVED, &first);
    }
    if (status == PYA_OK) {
        *out = sim_address(sim, first);
    }
    return sim_leave(sim, PYA_SIM_RANGE_RESERVE, n, status);
}

static pya_status
sim_range_release_locked(struct pya_sim *sim, uint32_t first, uint32_t n) {
    if (n == 0 || sim_space_query(&sim->space, first) != n ||
        (sim->pte[first] & SIM_PTE_PLAIN) != 0) {
        return sim_misuse(
            sim, "release of a range that was not reserved so", sim_address(sim, first));
    }
    for (uint32_t i = 0; i < n; i++) {
        if ((sim->pte[first + i] & SIM_PTE_PAGE) != 0) {
            return sim_misuse(
                sim, "release of a range that is still mapped", sim_address(sim, first + i));
        }
    }
    memset(&sim->pte[first], 0, n * sizeof *sim->pte);
    sim_space_release(&sim->space, first, n);
    return PYA_OK;
}

pya_status
sim_range_release(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_RANGE_RELEASE);
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_span(sim, addr, bytes, &n);
        status = n == 0 ? sim_misuse(sim, "release of a range that was not reserved so", addr)
                        : sim_range_release_locked(sim, first, n);
    }
    return sim_leave(sim, PYA_SIM_RANGE_RELEASE, n, status);
}

static pya_status
sim_map_locked(struct pya_sim *sim, pya_dptr addr, pya_page_handle handle) {
    uint32_t vpage = sim_vpage(sim, addr);
    uint32_t page = sim_page_find(sim, handle);
    if (page == SIM_SPACE_NONE) {
        return sim_misuse(sim, "map of a handle that is not one", handle);
    }
    if ((addr & (PYA_PAGE - 1)) != 0 || vpage == SIM_SPACE_NONE || sim->pte[vpage] == 0) {
        return sim_misuse(sim, "map at an address that is not reserved", addr);
    }
    if (sim->pte[vpage] != SIM_PTE_RESERVED) {
        return sim_misuse(sim, "map at an address that is mapped", addr);
    }
    if (!sim_back_map(sim, vpage, page)) {
        return PYA_E_HOST_NOMEM;
    }
    sim->pte[vpage] |= page + 1;
    sim->pages[page].n_mappings++;
    sim->state.n_mappings++;
    return PYA_OK;
}

pya_status
sim_map(struct pya_device *dev, pya_dptr addr, pya_page_handle handle) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_MAP);
    if (status == PYA_OK) {
        status = sim_map_locked(sim, addr, handle);
    }
    return sim_leave(sim, PYA_SIM_MAP, 1, status);
}

static pya_status
sim_unmap_locked(struct pya_sim *sim, uint32_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t pte = sim->pte[first + i];
        if ((pte & SIM_PTE_PAGE) == 0 || (pte & SIM_PTE_PLAIN) != 0) {
            return sim_misuse(
                sim, "unmap of an address that is not mapped", sim_address(sim, first + i));
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = (uint32_t)(sim->pte[first + i] & SIM_PTE_PAGE) - 1;
        if (sim_pending_uses_locked(sim, page, first + i) > 0) {
            /* The driver would do it, and the running kernel would fault. */
            sim_misuse(
                sim, "unmap while work that uses it is unfinished", sim_address(sim, first + i));
        }
        sim->pte[first + i] = SIM_PTE_RESERVED;
        sim->pages[page].n_mappings--;
        sim->state.n_mappings--;
        sim_page_settle(sim, page);
    }
    sim_back_unmap(sim, first, n);
    return PYA_OK;
}

pya_status
sim_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_UNMAP);
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_span(sim, addr, bytes, &n);
        status = n == 0 ? sim_misuse(sim, "unmap of other than whole pages", addr)
                        : sim_unmap_locked(sim, first, n);
    }
    return sim_leave(sim, PYA_SIM_UNMAP, n, status);
}

/* Mapped, and fresh if it has to be? */
static pya_status
sim_check_mapped(struct pya_sim *sim, uint32_t first, uint32_t n, bool is_fresh) {
    for (uint32_t i = 0; i < n; i++) {
        uint64_t pte = sim->pte[first + i];
        if ((pte & SIM_PTE_PAGE) == 0 || (pte & SIM_PTE_PLAIN) != 0) {
            return sim_misuse(
                sim, "access asked for an address that is not mapped", sim_address(sim, first + i));
        }
        if (is_fresh && (pte & SIM_PTE_ACCESS) != 0) {
            return sim_misuse(
                sim, "access asked for what is open already", sim_address(sim, first + i));
        }
    }
    return PYA_OK;
}

static pya_status
sim_set_access_locked(struct pya_sim *sim, uint32_t first, uint32_t n) {
    pya_status status = sim_check_mapped(sim, first, n, true);
    if (status != PYA_OK) {
        return status;
    }
    if ((sim->peers & sim->config.refused_peers) != 0) {
        return PYA_E_DEVICE;
    }
    if (!sim_back_access(sim, first, n)) {
        return PYA_E_HOST_NOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        sim->pte[first + i] |= SIM_PTE_ACCESS;
    }
    return PYA_OK;
}

static pya_status
sim_open_peer_locked(struct pya_sim *sim, int peer, uint32_t first, uint32_t n) {
    pya_status status = sim_check_mapped(sim, first, n, false);
    bool is_refused = (sim->config.refused_peers >> peer & 1) != 0;
    return status == PYA_OK && is_refused ? PYA_E_DEVICE : status;
}

/* For the device and its peers, or for one peer alone. */
static pya_status
sim_open(struct pya_device *dev, const int *peer, pya_dptr addr, size_t bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_SET_ACCESS);
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_span(sim, addr, bytes, &n);
        if (n == 0) {
            status = sim_misuse(sim, "access asked for other than whole pages", addr);
        } else {
            status = peer == NULL ? sim_set_access_locked(sim, first, n)
                                  : sim_open_peer_locked(sim, *peer, first, n);
        }
    }
    return sim_leave(sim, PYA_SIM_SET_ACCESS, n, status);
}

pya_status
sim_set_access(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    return sim_open(dev, NULL, addr, bytes);
}

pya_status
sim_open_peer(struct pya_device *dev, int peer, pya_dptr addr, size_t bytes) {
    return sim_open(dev, &peer, addr, bytes);
}

/* ---- plain allocations: pages and a range of their own ---- */

static void
sim_plain_undo(struct pya_sim *sim, uint32_t first, uint32_t n_mapped, uint32_t n) {
    for (uint32_t i = 0; i < n_mapped; i++) {
        uint32_t page = (uint32_t)(sim->pte[first + i] & SIM_PTE_PAGE) - 1;
        sim->pages[page].n_mappings--;
        sim_page_settle(sim, page);
    }
    sim_back_unmap(sim, first, n);
    memset(&sim->pte[first], 0, n * sizeof *sim->pte);
    sim_space_release(&sim->space, first, n);
}

static pya_status
sim_plain_alloc_locked(struct pya_sim *sim, uint32_t n, uint32_t *out) {
    if (sim->config.capacity_bytes < sim->state.used_bytes ||
        (uint64_t)n << PYA_PAGE_SHIFT > sim->config.capacity_bytes - sim->state.used_bytes) {
        return PYA_E_NOMEM;
    }
    uint32_t first = 0;
    pya_status status =
        sim_reserve_locked(sim, n, SIM_PTE_RESERVED | SIM_PTE_PLAIN | SIM_PTE_ACCESS, &first);
    if (status != PYA_OK) {
        return status;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = 0;
        status = sim_page_take(sim, &page);
        if (status != PYA_OK) {
            sim_plain_undo(sim, first, i, n);
            return status;
        }
        sim->pages[page].n_handles = 0;
        sim->pages[page].n_mappings = 1;
        sim->pte[first + i] |= page + 1;
        if (!sim_back_map(sim, first + i, page)) {
            sim_plain_undo(sim, first, i + 1, n);
            return PYA_E_HOST_NOMEM;
        }
    }
    if (!sim_back_access(sim, first, n)) {
        sim_plain_undo(sim, first, n, n);
        return PYA_E_HOST_NOMEM;
    }
    sim->state.n_plain++;
    *out = first;
    return PYA_OK;
}

pya_status
sim_plain_alloc(struct pya_device *dev, size_t bytes, pya_dptr *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PLAIN_ALLOC);
    size_t rounded = 0;
    uint64_t n = 0;
    uint32_t first = 0;
    if (status == PYA_OK && bytes == 0) {
        status = sim_misuse(sim, "a plain allocation of 0 bytes was asked for", 0);
    }
    if (status == PYA_OK) {
        n = pya_size_round_up(bytes, PYA_PAGE, &rounded) ? rounded >> PYA_PAGE_SHIFT : UINT64_MAX;
        status =
            n > sim->space.n_pages ? PYA_E_NOMEM : sim_plain_alloc_locked(sim, (uint32_t)n, &first);
    }
    if (status == PYA_OK) {
        *out = sim_address(sim, first);
    }
    return sim_leave(sim, PYA_SIM_PLAIN_ALLOC, n, status);
}

pya_status
sim_plain_free(struct pya_device *dev, pya_dptr addr) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PLAIN_FREE);
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_vpage(sim, addr);
        n = first == SIM_SPACE_NONE || (addr & (PYA_PAGE - 1)) != 0
                ? 0
                : sim_space_query(&sim->space, first);
        if (n == 0 || (sim->pte[first] & SIM_PTE_PLAIN) == 0) {
            status = sim_misuse(sim, "free of an address that is not a plain allocation", addr);
        } else {
            sim_finish_all_locked(sim);
            sim_plain_undo(sim, first, n, n);
            sim->state.n_plain--;
        }
    }
    return sim_leave(sim, PYA_SIM_PLAIN_FREE, n, status);
}
