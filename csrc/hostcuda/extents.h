#pragma once
/* First-fit allocation of ranges on an unbounded line, in 2 MiB steps: for file offsets and for addresses.
 * Floor 0. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pya_hc_extent {
    uint64_t start, size;
};

/* Free ranges: `holes`, which are sorted, disjoint, never adjacent and below `end`, and everything from `end` on.
 * Checked by pya_hc_extents_check(). */
struct pya_hc_extents {
    struct pya_hc_extent *holes;
    size_t n_holes, capacity;
    uint64_t end;
    uint64_t limit; /* no range may extend beyond it */
};

/* False if host memory or the line is exhausted.  `align` is a power of two. */
bool
pya_hc_extents_take(struct pya_hc_extents *line, uint64_t size, uint64_t align, uint64_t *start);
/* Takes exactly this range; false if part of it is in use. */
bool pya_hc_extents_take_at(struct pya_hc_extents *line, uint64_t start, uint64_t size);
/* Returns a range.  False if host memory is out: the range is then lost, but nothing breaks. */
bool pya_hc_extents_give(struct pya_hc_extents *line, uint64_t start, uint64_t size);
/* Number of violated invariants. */
int pya_hc_extents_check(const struct pya_hc_extents *line);
