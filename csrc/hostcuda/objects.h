#pragma once
/* Slabs of equal-sized objects behind opaque CUDA handles: a stale or foreign pointer is recognised instead of
 * dereferenced.  Floor 0; the caller locks. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pya_hc_objects {
    size_t object_bytes; /* set by the owner */
    char **slabs;
    size_t n_slabs;
    void *free_list;
    uint64_t n_live;
};

/* A zeroed object, or NULL if host memory is out. */
void *pya_hc_objects_get(struct pya_hc_objects *objects);
void pya_hc_objects_put(struct pya_hc_objects *objects, void *object);
/* The next live object; *cursor starts at 0.  NULL at the end. */
void *pya_hc_objects_next(const struct pya_hc_objects *objects, size_t *cursor);
bool pya_hc_objects_has(const struct pya_hc_objects *objects, const void *pointer);
