#pragma once
/* First-fit ranges of an endless line of 2 MiB steps: used for file offsets and for addresses.
 * Floor 0. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pya_hc_extent {
    uint64_t start, size;
};

/* holes are sorted, disjoint, never touching, and all lie below `end`; everything from `end` on is
 * free.  Checked by pya_hc_extents_check(). */
struct pya_hc_extents {
    struct pya_hc_extent *holes;
    size_t n_holes, capacity;
    uint64_t end;
    uint64_t limit; /* no range may pass it */
};

/* False when memory or the line is exhausted.  `align` is a power of two. */
bool
pya_hc_extents_take(struct pya_hc_extents *line, uint64_t size, uint64_t align, uint64_t *start);
/* Takes exactly this range; false when part of it is in use. */
bool pya_hc_extents_take_at(struct pya_hc_extents *line, uint64_t start, uint64_t size);
/* Gives a range back.  False when host memory ran out: the range then stays lost, nothing breaks. */
bool pya_hc_extents_give(struct pya_hc_extents *line, uint64_t start, uint64_t size);
/* Number of violated invariants. */
int pya_hc_extents_check(const struct pya_hc_extents *line);
