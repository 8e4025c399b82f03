/* Sharing memory within this process as if with another one: supplies the pages' descriptors as a connection would. */
#pragma once

#include "core/pyalloc.h"

/* Supplies the descriptors of one block's pages. */
struct sender {
    struct pya_heap *heap;
    struct pya_shared shared;
    size_t next; /* page */
};

/* Exports the handle that begins with page `first`. */
static inline pya_status
export_one(struct pya_heap *heap, const struct pya_shared *shared, size_t first, int *fd) {
    uint32_t n_pages;
    size_t n;
    return pya_share_export(heap, shared, first, 1, fd, &n_pages, &n);
}

static inline pya_status
sender_next(void *arg, int *fd, uint32_t *n_pages) {
    struct sender *sender = arg;
    size_t n = 0;
    pya_status st =
        pya_share_export(sender->heap, &sender->shared, sender->next, 1, fd, n_pages, &n);
    sender->next += st == PYA_OK ? *n_pages : 0;
    return st;
}

/* Maps all of a block's pages, as the receiver does. */
static inline pya_status
import_all(struct pya_heap *heap, const struct pya_shared *shared, pya_dptr *out) {
    struct sender sender = {.heap = heap, .shared = *shared};
    const struct pya_import_source source = {.arg = &sender, .next = sender_next};
    return pya_import_open(heap, 0, shared->n_pages, &source, out);
}
