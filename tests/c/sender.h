/* Memory shared with another process, which is this one: the pages' descriptors as a connection would hand them out. */
#pragma once

#include "core/pyalloc.h"

/* Descriptors of the pages of one block. */
struct sender {
    struct pya_heap *heap;
    struct pya_shared shared;
    size_t next;
};

static inline pya_status
sender_next(void *arg, int *fd) {
    struct sender *sender = arg;
    pya_status st = pya_share_export(sender->heap, &sender->shared, sender->next, 1, fd);
    sender->next += st == PYA_OK;
    return st;
}
