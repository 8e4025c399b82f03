/* A program's operations, one after the other: the first in memory, those of very long programs in a file without a
 * name, so that 1e8 of them need no more memory than 2e7.  Floor 2, private. */
#pragma once

#include "../core/base.h"

enum program_op_kind {
    PROGRAM_ALLOC,
    PROGRAM_FREE,
    PROGRAM_RECORD_STREAM,
    PROGRAM_EMPTY_CACHE,
    PROGRAM_POOL_BEGIN, /* block is the number of a pool, here and below */
    PROGRAM_POOL_END,
    PROGRAM_POOL_RELEASE,
};

struct program_op {
    uint64_t bytes; /* alloc */
    uint32_t block;
    uint16_t stream;
    uint8_t kind;
    uint8_t device;
};

/* Chunks of equal size: n_chunks in memory, then those of the file, then the tail, which is being filled. */
struct op_store {
    struct program_op **chunks;
    size_t n_chunks;
    struct program_op *tail; /* NULL while memory is enough */
    int fd;                  /* valid where tail is not NULL */
    uint64_t n;
};

/* One reader for each thread. */
struct op_reader {
    const struct op_store *store;
    struct program_op *buffer; /* a chunk of the file; NULL: none yet */
    uint64_t chunk;            /* which */
};

/* PYA_E_HOST_NOMEM, or PYA_E_IO: the file cannot be written. */
PYA_MUST_CHECK pya_status op_store_push(struct op_store *store, struct program_op op);
void op_store_fini(struct op_store *store);

/* i < store->n, in ascending order to be fast; valid until the next call. */
PYA_MUST_CHECK pya_status
op_reader_get(struct op_reader *reader, uint64_t i, const struct program_op **out);
void op_reader_fini(struct op_reader *reader);
