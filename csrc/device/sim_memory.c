/* Memory of the simulated device: address ranges, mappings, plain allocations. */
#include <string.h>

#include "sim_internal.h"

/* ---- address ranges and mappings ---- */

/* The first page and number of pages of [addr, addr + bytes); n is 0 if these are not whole pages within the space. */
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
    sim->pte[first] |= SIM_PTE_START;
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
    return sim_leave(sim, PYA_SIM_RANGE_RESERVE, 0, n, status);
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
    return sim_leave(sim, PYA_SIM_RANGE_RELEASE, 0, n, status);
}

/* Do the n addresses for a mapping lie in one range, with nothing mapped there? */
static pya_status
sim_check_room(struct pya_sim *sim, pya_dptr addr, uint32_t first, uint32_t n) {
    if (n == 0) {
        return sim_misuse(sim, "map at an address that is not reserved", addr);
    }
    for (uint32_t i = 0; i < n; i++) {
        uint64_t pte = sim->pte[first + i];
        pya_dptr at = sim_address(sim, first + i);
        if (pte == 0) {
            return sim_misuse(sim, "map at an address that is not reserved", at);
        }
        if ((pte & ~SIM_PTE_START) != SIM_PTE_RESERVED) {
            return sim_misuse(sim, "map at an address that is mapped", at);
        }
        if (i > 0 && (pte & SIM_PTE_START) != 0) {
            return sim_misuse(sim, "map beyond the end of a range", at);
        }
    }
    return PYA_OK;
}

static pya_status
sim_map_locked(struct pya_sim *sim, pya_dptr addr, pya_page_handle handle, size_t n_pages) {
    uint32_t page = sim_page_find(sim, handle);
    if (page == SIM_SPACE_NONE) {
        return sim_misuse(sim, "map of a handle that is not one", handle);
    }
    if (sim->pages[page].n_pages != n_pages) {
        return sim_misuse(sim, "map of other than the whole of a handle", handle);
    }
    uint32_t n = 0;
    uint32_t first = sim_span(sim, addr, n_pages << PYA_PAGE_SHIFT, &n);
    pya_status status = sim_check_room(sim, addr, first, n);
    if (status != PYA_OK) {
        return status;
    }
    if (!sim_back_map(sim, first, page, n)) {
        return PYA_E_HOST_NOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        sim->pte[first + i] |= page + i + 1;
        sim->pages[page + i].n_mappings++;
    }
    sim->state.n_mappings += n;
    return PYA_OK;
}

pya_status
sim_map(struct pya_device *dev, pya_dptr addr, pya_page_handle handle, size_t n_pages) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_MAP);
    if (status == PYA_OK) {
        status = sim_map_locked(sim, addr, handle, n_pages);
    }
    return sim_leave(sim, PYA_SIM_MAP, 1, n_pages, status);
}

/* The page mapped there; SIM_SPACE_NONE: none, or one of a plain allocation. */
static uint32_t
sim_mapped(const struct pya_sim *sim, uint32_t vpage) {
    uint64_t pte = sim->pte[vpage];
    return (pte & SIM_PTE_PAGE) == 0 || (pte & SIM_PTE_PLAIN) != 0
               ? SIM_SPACE_NONE
               : (uint32_t)(pte & SIM_PTE_PAGE) - 1;
}

/* The requirements on a row of mappings, each with the text of its violation. */
struct sim_asked {
    const char *of_unmapped;
    const char *of_part;
    const char *of_open; /* NULL: it may be accessible */
};

/* Is [first, first + n) a row of whole mappings?  *n_handles: their number. */
static pya_status
sim_check_mapped(
    struct pya_sim *sim, const struct sim_asked *asked, uint32_t first, uint32_t n,
    uint32_t *n_handles) {
    uint32_t n_seen = 0;
    uint32_t n_whole = 0; /* pages up to the end of the last mapping seen */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = sim_mapped(sim, first + i);
        if (page == SIM_SPACE_NONE) {
            return sim_misuse(sim, asked->of_unmapped, sim_address(sim, first + i));
        }
        if (asked->of_open != NULL && (sim->pte[first + i] & SIM_PTE_ACCESS) != 0) {
            return sim_misuse(sim, asked->of_open, sim_address(sim, first + i));
        }
        if (i == n_whole) {
            /* 0 pages where a mapping does not start */
            n_whole += sim->pages[page].n_pages;
            n_seen++;
        }
        if (i >= n_whole) {
            return sim_misuse(sim, asked->of_part, sim_address(sim, first + i));
        }
    }
    if (n_whole > n) {
        return sim_misuse(sim, asked->of_part, sim_address(sim, first + n));
    }
    *n_handles = n_seen;
    return PYA_OK;
}

/* Removes one mapping, of the run that starts at page, from the page table. */
static void
sim_unmap_run(struct pya_sim *sim, uint32_t vpage, uint32_t page) {
    uint32_t n = sim->pages[page].n_pages;
    for (uint32_t i = 0; i < n; i++) {
        if (sim_pending_uses_locked(sim, page + i, vpage + i) > 0) {
            /* The driver would do it, and the running kernel would fault. */
            sim_misuse(
                sim, "unmap while work that uses it is unfinished", sim_address(sim, vpage + i));
        }
        sim->pte[vpage + i] = SIM_PTE_RESERVED | (sim->pte[vpage + i] & SIM_PTE_START);
        sim->pages[page + i].n_mappings--;
    }
    sim->state.n_mappings -= n;
    sim_page_settle(sim, page);
}

static pya_status
sim_unmap_locked(struct pya_sim *sim, uint32_t first, uint32_t n, uint32_t *n_handles) {
    static const struct sim_asked asked = {
        .of_unmapped = "unmap of an address that is not mapped",
        .of_part = "unmap of a part of a mapping",
    };
    pya_status status = sim_check_mapped(sim, &asked, first, n, n_handles);
    if (status != PYA_OK) {
        return status;
    }
    for (uint32_t i = 0; i < n;) {
        uint32_t page = sim_mapped(sim, first + i);
        sim_unmap_run(sim, first + i, page);
        i += sim->pages[page].n_pages;
    }
    sim_back_unmap(sim, first, n);
    return PYA_OK;
}

pya_status
sim_unmap(struct pya_device *dev, pya_dptr addr, size_t bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_UNMAP);
    uint32_t n_handles = 0;
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_span(sim, addr, bytes, &n);
        status = n == 0 ? sim_misuse(sim, "unmap of other than whole pages", addr)
                        : sim_unmap_locked(sim, first, n, &n_handles);
    }
    return sim_leave(sim, PYA_SIM_UNMAP, n_handles, n, status);
}

static pya_status
sim_set_access_locked(struct pya_sim *sim, uint32_t first, uint32_t n, uint32_t *n_handles) {
    static const struct sim_asked asked = {
        .of_unmapped = "access asked for an address that is not mapped",
        .of_part = "access asked for a part of a mapping",
        .of_open = "access asked for what is open already",
    };
    pya_status status = sim_check_mapped(sim, &asked, first, n, n_handles);
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
        sim->pte[first + i] |= SIM_PTE_ACCESS | (sim->peers & SIM_PEERS) << SIM_PTE_PEERS;
    }
    return PYA_OK;
}

static pya_status
sim_open_peer_locked(
    struct pya_sim *sim, int peer, uint32_t first, uint32_t n, uint32_t *n_handles) {
    static const struct sim_asked asked = {
        .of_unmapped = "access asked for an address that is not mapped",
        .of_part = "access asked for a part of a mapping",
    };
    pya_status status = sim_check_mapped(sim, &asked, first, n, n_handles);
    const uint64_t bit = UINT64_C(1) << peer;
    if (status == PYA_OK && (sim->config.refused_peers & bit) != 0) {
        return PYA_E_DEVICE;
    }
    for (uint32_t i = 0; status == PYA_OK && i < n; i++) {
        sim->pte[first + i] |= (bit & SIM_PEERS) << SIM_PTE_PEERS;
    }
    return status;
}

/* For the device and its peers, or for one peer only. */
static pya_status
sim_open(struct pya_device *dev, const int *peer, pya_dptr addr, size_t bytes) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_SET_ACCESS);
    uint32_t n_handles = 0;
    uint32_t n = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_span(sim, addr, bytes, &n);
        if (n == 0) {
            status = sim_misuse(sim, "access asked for other than whole pages", addr);
        } else {
            status = peer == NULL ? sim_set_access_locked(sim, first, n, &n_handles)
                                  : sim_open_peer_locked(sim, *peer, first, n, &n_handles);
        }
    }
    if (status != PYA_OK) {
        sim->error.peers = peer == NULL ? sim->peers : UINT64_C(1) << *peer;
    }
    return sim_leave(sim, PYA_SIM_SET_ACCESS, n_handles, n, status);
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
        status = sim_page_take(sim, 1, &page);
        if (status != PYA_OK) {
            sim_plain_undo(sim, first, i, n);
            return status;
        }
        sim->pages[page].n_handles = 0;
        sim->pages[page].n_mappings = 1;
        sim->pte[first + i] |= page + 1;
        if (!sim_back_map(sim, first + i, page, 1)) {
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
    return sim_leave(sim, PYA_SIM_PLAIN_ALLOC, 0, n, status);
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
            sim_finish_own_locked(sim);
            sim_plain_undo(sim, first, n, n);
            sim->state.n_plain--;
        }
    }
    return sim_leave(sim, PYA_SIM_PLAIN_FREE, 0, n, status);
}
