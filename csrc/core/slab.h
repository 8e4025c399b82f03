/* Host memory for records of one size, in chunks that are freed only at the end.  Floor 1.
 *
 * take() cannot fail after reserve().  So an operation that must not stop half-way reserves all its records before it
 * changes anything. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n_free + n_used == n_nodes.  Guarded by whatever guards the owner. */
struct pya_slab {
    size_t node_bytes;
    void *free; /* chain through the first word of each node */
    void *chunks;
    size_t n_free;
    size_t n_nodes;
    size_t host_bytes;
};

void pya_slab_init(struct pya_slab *slab, size_t node_bytes);
void pya_slab_fini(struct pya_slab *slab);
PYA_MUST_CHECK pya_status pya_slab_grow(struct pya_slab *slab, size_t n_free);

static inline pya_status PYA_MUST_CHECK
pya_slab_reserve(struct pya_slab *slab, size_t n) {
    return PYA_LIKELY(slab->n_free >= n) ? PYA_OK : pya_slab_grow(slab, n);
}

static inline void *
pya_slab_take(struct pya_slab *slab) {
    void *node = slab->free;
    slab->free = *(void **)node;
    slab->n_free--;
    return node;
}

static inline void
pya_slab_put(struct pya_slab *slab, void *node) {
    *(void **)node = slab->free;
    slab->free = node;
    slab->n_free++;
}

#ifdef __cplusplus
}
#endif
