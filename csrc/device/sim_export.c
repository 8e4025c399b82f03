/* Pages of the simulated device as file descriptors.  There is no simulated device in another process, so pages can
 * only be imported into this one, as a second handle of the same page. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_internal.h"

/* The contents of one of our descriptors. */
struct sim_ticket {
    char magic[8];
    uint64_t sim;
    uint64_t handle;
};

static const char sim_magic[8] = {'p', 'y', 'a', 's', 'i', 'm', 'p', 'g'};

static bool
sim_ticket_write(const struct pya_sim *sim, pya_page_handle handle, int *out) {
    struct sim_ticket ticket = {.sim = (uint64_t)(uintptr_t)sim, .handle = handle};
    memcpy(ticket.magic, sim_magic, sizeof sim_magic);
    int fd = memfd_create("pyalloc-sim-page", MFD_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    if (write(fd, &ticket, sizeof ticket) != (ssize_t)sizeof ticket) {
        (void)close(fd);
        return false;
    }
    *out = fd;
    return true;
}

pya_status
sim_page_export(struct pya_device *dev, pya_page_handle handle, int *fd) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_EXPORT);
    uint32_t page = status == PYA_OK ? sim_page_find(sim, handle) : SIM_SPACE_NONE;
    if (status == PYA_OK && page == SIM_SPACE_NONE) {
        status = sim_misuse(sim, "export of a handle that is not one", handle);
    }
    if (status == PYA_OK && !sim_ticket_write(sim, handle, fd)) {
        status = PYA_E_HOST_NOMEM;
    }
    uint64_t n_pages = page == SIM_SPACE_NONE ? 0 : sim->pages[page].n_pages;
    return sim_leave(sim, PYA_SIM_PAGE_EXPORT, 1, n_pages, status);
}

pya_status
sim_page_import(struct pya_device *dev, int fd, pya_page_handle *out) {
    struct pya_sim *sim = sim_from(dev);
    struct sim_ticket ticket = {.sim = 0};
    uint64_t n_pages = 0;
    pya_status status = sim_enter(sim, PYA_SIM_PAGE_IMPORT);
    if (status == PYA_OK) {
        uint32_t page = SIM_SPACE_NONE;
        if (pread(fd, &ticket, sizeof ticket, 0) == (ssize_t)sizeof ticket &&
            memcmp(ticket.magic, sim_magic, sizeof sim_magic) == 0 &&
            ticket.sim == (uint64_t)(uintptr_t)sim) {
            page = sim_page_find(sim, ticket.handle);
        }
        if (page == SIM_SPACE_NONE) {
            status = PYA_E_DEVICE;
        } else {
            n_pages = sim->pages[page].n_pages;
            sim->pages[page].n_handles++;
            *out = ticket.handle;
        }
    }
    return sim_leave(sim, PYA_SIM_PAGE_IMPORT, 1, n_pages, status);
}
