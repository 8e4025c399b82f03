#include "sim_space.h"

#include <stdio.h>
#include <stdlib.h>

pya_status
sim_space_init(struct sim_space *space, uint32_t n_pages) {
    /* Large and mostly untouched: calloc leaves the zero pages to the kernel. */
    *space = (struct sim_space){.n_pages = n_pages};
    space->span = calloc(n_pages, sizeof *space->span);
    space->next = calloc(n_pages, sizeof *space->next);
    space->head = calloc((size_t)n_pages + 1, sizeof *space->head);
    if (space->span == NULL || space->next == NULL || space->head == NULL) {
        sim_space_fini(space);
        return PYA_E_HOST_NOMEM;
    }
    return PYA_OK;
}

void
sim_space_fini(struct sim_space *space) {
    free(space->span);
    free(space->next);
    free(space->head);
    *space = (struct sim_space){0};
}

static void
space_push(struct sim_space *space, uint32_t first, uint32_t n) {
    space->span[first] = n | SIM_SPACE_FREE;
    space->next[first] = space->head[n];
    space->head[n] = first + 1;
}

/* Joins adjacent free ranges and rebuilds the lists. */
static void
space_join(struct sim_space *space) {
    for (uint32_t at = 0; at < space->n_used; at += space->span[at] & ~SIM_SPACE_FREE) {
        space->head[space->span[at] & ~SIM_SPACE_FREE] = 0;
    }
    uint32_t at = 0;
    while (at < space->n_used) {
        uint32_t n = space->span[at] & ~SIM_SPACE_FREE;
        if ((space->span[at] & SIM_SPACE_FREE) == 0) {
            at += n;
            continue;
        }
        while (at + n < space->n_used && (space->span[at + n] & SIM_SPACE_FREE) != 0) {
            n += space->span[at + n] & ~SIM_SPACE_FREE;
        }
        space_push(space, at, n);
        at += n;
    }
}

/* The first free range of at least n pages, cut to n; SIM_SPACE_NONE: there is none. */
static uint32_t
space_first_fit(struct sim_space *space, uint32_t n) {
    uint32_t at = 0;
    while (at < space->n_used) {
        uint32_t span = space->span[at];
        if ((span & SIM_SPACE_FREE) != 0 && (span & ~SIM_SPACE_FREE) >= n) {
            break;
        }
        at += span & ~SIM_SPACE_FREE;
    }
    if (at >= space->n_used) {
        return SIM_SPACE_NONE;
    }
    uint32_t size = space->span[at] & ~SIM_SPACE_FREE;
    uint32_t *link = &space->head[size];
    while (*link != at + 1) {
        link = &space->next[*link - 1];
    }
    *link = space->next[at];
    if (size > n) {
        space_push(space, at + n, size - n);
    }
    return at;
}

uint32_t
sim_space_reserve(struct sim_space *space, uint32_t n) {
    if (n == 0 || n > space->n_pages) {
        return SIM_SPACE_NONE;
    }
    uint32_t at = SIM_SPACE_NONE;
    if (space->head[n] != 0) {
        at = space->head[n] - 1;
        space->head[n] = space->next[at];
    } else if (space->n_pages - space->n_used >= n) {
        at = space->n_used;
        space->n_used += n;
    } else {
        space_join(space);
        at = space_first_fit(space, n);
        if (at == SIM_SPACE_NONE) {
            return SIM_SPACE_NONE;
        }
    }
    space->span[at] = n;
    space->n_ranges++;
    return at;
}

uint32_t
sim_space_query(const struct sim_space *space, uint32_t first) {
    if (first >= space->n_used || (space->span[first] & SIM_SPACE_FREE) != 0) {
        return 0;
    }
    return space->span[first];
}

bool
sim_space_release(struct sim_space *space, uint32_t first, uint32_t n) {
    if (n == 0 || sim_space_query(space, first) != n) {
        return false;
    }
    space_push(space, first, n);
    space->n_ranges--;
    return true;
}

size_t
sim_space_check(const struct sim_space *space) {
    size_t bad = 0;
    size_t n_ranges = 0;
    uint32_t at = 0;
    while (at < space->n_used) {
        uint32_t n = space->span[at] & ~SIM_SPACE_FREE;
        if (n == 0) {
            fprintf(stderr, "sim_space: page %u starts no range\n", at);
            return bad + 1;
        }
        n_ranges += (space->span[at] & SIM_SPACE_FREE) == 0;
        at += n;
    }
    if (at != space->n_used || n_ranges != space->n_ranges) {
        fprintf(stderr, "sim_space: %zu ranges walked, %zu counted\n", n_ranges, space->n_ranges);
        bad++;
    }
    return bad;
}
