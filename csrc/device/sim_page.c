/* Physical memory of the simulated device: runs of pages behind handles. */
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

/* The list of free runs of that length; created if there is none.  NULL: no host memory. */
static struct sim_runs *
page_runs(struct pya_sim *sim, uint32_t n_pages) {
    uint32_t i = 0;
    while (i < sim->n_run_slots && sim->runs[i].n_pages != 0) {
        if (sim->runs[i].n_pages == n_pages) {
            return &sim->runs[i];
        }
        i++;
    }
    if (i == sim->n_run_slots &&
        !sim_grow((void **)&sim->runs, &sim->n_run_slots, sizeof *sim->runs)) {
        return NULL;
    }
    sim->runs[i].n_pages = n_pages;
    return &sim->runs[i];
}

/* Slots that belonged to no run yet; SIM_SPACE_NONE: no host memory. */
static uint32_t
page_carve(struct pya_sim *sim, uint32_t n_pages) {
    while (sim->n_page_slots - sim->n_pages_used < n_pages) {
        if (!sim_grow((void **)&sim->pages, &sim->n_page_slots, sizeof *sim->pages)) {
            return SIM_SPACE_NONE;
        }
    }
    uint32_t first = sim->n_pages_used;
    sim->n_pages_used += n_pages;
    for (uint32_t i = 0; i < n_pages; i++) {
        sim->pages[first + i].first = first;
    }
    sim->pages[first].n_pages = n_pages;
    return first;
}

pya_status
sim_page_take(struct pya_sim *sim, uint64_t n_pages, uint32_t *out) {
    if (sim->config.capacity_bytes < sim->state.used_bytes ||
        n_pages > (sim->config.capacity_bytes - sim->state.used_bytes) / PYA_PAGE ||
        n_pages > SIM_MAX_PAGES - sim->n_pages_used) {
        return PYA_E_NOMEM;
    }
    struct sim_runs *runs = page_runs(sim, (uint32_t)n_pages);
    if (runs == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    uint32_t first;
    if (runs->head != 0) {
        first = runs->head - 1;
        runs->head = sim->pages[first].next_free;
    } else {
        first = page_carve(sim, (uint32_t)n_pages);
        if (first == SIM_SPACE_NONE) {
            return PYA_E_HOST_NOMEM;
        }
    }
    sim->pages[first].n_handles = 1;
    sim->state.n_pages += n_pages;
    sim->state.used_bytes += n_pages * PYA_PAGE;
    if (sim->state.used_bytes > sim->state.peak_bytes) {
        sim->state.peak_bytes = sim->state.used_bytes;
    }
    *out = first;
    return PYA_OK;
}

static void
page_forget(struct pya_sim *sim, uint32_t index) {
    struct sim_page *page = &sim->pages[index];
    if (page->n_owned > 0) {
        sim_misuse(sim, "a page goes back while a live block owns part of it", index);
        memset(page->owner, 0, SIM_OWNER_WORDS * sizeof *page->owner);
        page->n_owned = 0;
    }
    sim_drop_uses_locked(sim, index);
}

void
sim_page_settle(struct pya_sim *sim, uint32_t first) {
    struct sim_page *page = &sim->pages[first];
    if (page->n_handles > 0 || page->n_mappings > 0) {
        return;
    }
    for (uint32_t i = 0; i < page->n_pages; i++) {
        page_forget(sim, first + i);
    }
    if (!sim_back_drop(sim, first, page->n_pages)) {
        sim_misuse(sim, "host: memory of a page could not be given back", first);
    }
    struct sim_runs *runs = page_runs(sim, page->n_pages); /* exists since the run was taken */
    page->generation++;
    page->next_free = runs->head;
    runs->head = first + 1;
    sim->state.n_pages -= page->n_pages;
    sim->state.used_bytes -= page->n_pages * PYA_PAGE;
}

static pya_page_handle
page_handle(const struct pya_sim *sim, uint32_t first) {
    return ((uint64_t)sim->pages[first].generation << 32) | (first + 1);
}

uint32_t
sim_page_find(const struct pya_sim *sim, pya_page_handle handle) {
    uint32_t first = (uint32_t)handle - 1;
    if ((uint32_t)handle == 0 || first >= sim->n_pages_used || sim->pages[first].n_handles == 0 ||
        sim->pages[first].generation != (uint32_t)(handle >> 32)) {
        return SIM_SPACE_NONE;
    }
    return first;
}

pya_status
sim_page_create(struct pya_device *dev, size_t n_pages, pya_page_handle *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_CREATE);
    uint32_t first = 0;
    if (status == PYA_OK && n_pages == 0) {
        status = sim_misuse(sim, "a handle of no pages was asked for", 0);
    }
    if (status == PYA_OK) {
        status = sim_page_take(sim, n_pages, &first);
    }
    if (status == PYA_OK) {
        *out = page_handle(sim, first);
    }
    return sim_leave(sim, PYA_SIM_PAGE_CREATE, 1, n_pages, status);
}

pya_status
sim_page_release(struct pya_device *dev, pya_page_handle handle) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_RELEASE);
    uint64_t n_pages = 0;
    if (status == PYA_OK) {
        uint32_t first = sim_page_find(sim, handle);
        if (first == SIM_SPACE_NONE) {
            status =
                sim_misuse(sim, "release of a handle that is not one (released twice?)", handle);
        } else {
            n_pages = sim->pages[first].n_pages;
            sim->pages[first].n_handles--;
            sim_page_settle(sim, first);
        }
    }
    return sim_leave(sim, PYA_SIM_PAGE_RELEASE, 1, n_pages, status);
}
