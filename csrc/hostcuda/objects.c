/* Each object is preceded by a header that says whether it is live.  Slabs are never freed, so that checking a stale
 * handle is always safe. */

#include "objects.h"

#include <stdlib.h>
#include <string.h>

#define SLAB_OBJECTS 256

struct object_header {
    uint64_t is_live;
    struct object_header *next_free;
};

static size_t
object_stride(const struct pya_hc_objects *objects) {
    return sizeof(struct object_header) + ((objects->object_bytes + 15) & ~(size_t)15);
}

static bool
objects_grow(struct pya_hc_objects *objects) {
    size_t stride = object_stride(objects);
    char **slabs = realloc(objects->slabs, (objects->n_slabs + 1) * sizeof(void *));
    if (slabs == NULL) {
        return false;
    }
    objects->slabs = slabs;
    char *slab = calloc(SLAB_OBJECTS, stride);
    if (slab == NULL) {
        return false;
    }
    slabs[objects->n_slabs++] = slab;
    for (size_t i = SLAB_OBJECTS; i-- > 0;) {
        struct object_header *header = (void *)(slab + i * stride);
        header->next_free = objects->free_list;
        objects->free_list = header;
    }
    return true;
}

void *
pya_hc_objects_get(struct pya_hc_objects *objects) {
    if (objects->free_list == NULL && !objects_grow(objects)) {
        return NULL;
    }
    struct object_header *header = objects->free_list;
    objects->free_list = header->next_free;
    header->is_live = 1;
    objects->n_live++;
    memset(header + 1, 0, objects->object_bytes);
    return header + 1;
}

void
pya_hc_objects_put(struct pya_hc_objects *objects, void *object) {
    struct object_header *header = (struct object_header *)object - 1;
    header->is_live = 0;
    header->next_free = objects->free_list;
    objects->free_list = header;
    objects->n_live--;
}

bool
pya_hc_objects_has(const struct pya_hc_objects *objects, const void *pointer) {
    size_t stride = object_stride(objects);
    uintptr_t at = (uintptr_t)pointer;
    for (size_t i = 0; i < objects->n_slabs; i++) {
        uintptr_t first = (uintptr_t)objects->slabs[i] + sizeof(struct object_header);
        if (at >= first && at < first + SLAB_OBJECTS * stride && (at - first) % stride == 0) {
            return ((const struct object_header *)pointer - 1)->is_live == 1;
        }
    }
    return false;
}

void *
pya_hc_objects_next(const struct pya_hc_objects *objects, size_t *cursor) {
    size_t stride = object_stride(objects);
    while (*cursor < objects->n_slabs * SLAB_OBJECTS) {
        size_t i = (*cursor)++;
        struct object_header *header =
            (void *)(objects->slabs[i / SLAB_OBJECTS] + i % SLAB_OBJECTS * stride);
        if (header->is_live == 1) {
            return header + 1;
        }
    }
    return NULL;
}
