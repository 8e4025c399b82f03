/* Real host pages under the simulated ones: a page is an offset in one memfd, so that mapping a page twice aliases. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_internal.h"

static void *
sim_host(pya_dptr addr) {
    return (void *)(uintptr_t)addr;
}

pya_status
sim_back_open(struct pya_sim *sim) {
    sim->fd = memfd_create("pyalloc-sim", MFD_CLOEXEC);
    if (sim->fd < 0) {
        return PYA_E_HOST_NOMEM;
    }
    /* Sparse: a page uses memory only once it is written. */
    if (ftruncate(sim->fd, (off_t)((uint64_t)SIM_MAX_PAGES << PYA_PAGE_SHIFT)) != 0) {
        goto close_fd;
    }
    /* One page more than requested, so that the base can be aligned. */
    size_t bytes = sim->config.address_bytes + PYA_PAGE;
    void *at = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        goto close_fd;
    }
    uint64_t start = (uint64_t)(uintptr_t)at;
    sim->base = pya_round_up(start, PYA_PAGE);
    if (sim->base > start) {
        munmap(at, sim->base - start);
    }
    munmap(sim_host(sim->base + sim->config.address_bytes), start + PYA_PAGE - sim->base);
    return PYA_OK;

close_fd:
    close(sim->fd);
    sim->fd = -1;
    return PYA_E_HOST_NOMEM;
}

void
sim_back_close(struct pya_sim *sim) {
    if (sim->fd >= 0) {
        munmap(sim_host(sim->base), sim->config.address_bytes);
        close(sim->fd);
    }
}

bool
sim_back_map(struct pya_sim *sim, uint32_t vpage, uint32_t page, uint32_t n) {
    if (sim->fd < 0) {
        return true;
    }
    void *at = sim_host(sim_address(sim, vpage));
    off_t offset = (off_t)((uint64_t)page << PYA_PAGE_SHIFT);
    int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    return mmap(at, (size_t)n << PYA_PAGE_SHIFT, PROT_NONE, flags, sim->fd, offset) == at;
}

void
sim_back_unmap(struct pya_sim *sim, uint32_t vpage, uint32_t n) {
    if (sim->fd >= 0) {
        void *at = sim_host(sim_address(sim, vpage));
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        if (mmap(at, (size_t)n << PYA_PAGE_SHIFT, PROT_NONE, flags, -1, 0) != at) {
            sim_misuse(sim, "host: a mapping could not be taken away", sim_address(sim, vpage));
        }
    }
}

bool
sim_back_access(struct pya_sim *sim, uint32_t vpage, uint32_t n) {
    return sim->fd < 0 || mprotect(
                              sim_host(sim_address(sim, vpage)), (size_t)n << PYA_PAGE_SHIFT,
                              PROT_READ | PROT_WRITE) == 0;
}

bool
sim_back_drop(struct pya_sim *sim, uint32_t page, uint32_t n) {
    if (sim->fd < 0) {
        return true;
    }
    off_t offset = (off_t)((uint64_t)page << PYA_PAGE_SHIFT);
    off_t bytes = (off_t)((uint64_t)n << PYA_PAGE_SHIFT);
    return fallocate(sim->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) == 0;
}
