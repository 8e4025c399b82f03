/* Chunks of records.  Floor 1. */
#include "slab.h"

#include <stdlib.h>

#ifdef PYA_TEST_TINY
enum { SLAB_CHUNK_NODES = 4 };
#else
enum { SLAB_CHUNK_NODES = 256 };
#endif

struct slab_chunk {
    struct slab_chunk *next;
    size_t pad; /* keeps the nodes 16-byte aligned */
};

void
pya_slab_init(struct pya_slab *slab, size_t node_bytes) {
    *slab = (struct pya_slab){.node_bytes = pya_round_up(node_bytes, 16)};
}

void
pya_slab_fini(struct pya_slab *slab) {
    struct slab_chunk *chunk = slab->chunks;
    while (chunk != NULL) {
        struct slab_chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    pya_slab_init(slab, slab->node_bytes);
}

pya_status
pya_slab_grow(struct pya_slab *slab, size_t n_free) {
    while (slab->n_free < n_free) {
        size_t missing = n_free - slab->n_free;
        size_t n = missing > SLAB_CHUNK_NODES ? missing : SLAB_CHUNK_NODES;
        size_t bytes;
        if (!pya_size_mul(n, slab->node_bytes, &bytes) ||
            !pya_size_add(bytes, sizeof(struct slab_chunk), &bytes)) {
            return PYA_E_HOST_NOMEM;
        }
        struct slab_chunk *chunk = malloc(bytes);
        if (chunk == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        chunk->next = slab->chunks;
        slab->chunks = chunk;
        slab->host_bytes += bytes;
        slab->n_nodes += n;
        char *node = (char *)(chunk + 1);
        for (size_t i = n; i-- > 0;) {
            pya_slab_put(slab, node + i * slab->node_bytes);
        }
    }
    return PYA_OK;
}
