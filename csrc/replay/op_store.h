/* A program's operations in order.  The first ones stay in memory; those of very long programs spill to an unnamed file, so
 * that 1e8 operations need no more memory than 2e7.  Floor 2, private. */
#pragma once

#include "../core/base.h"

enum program_op_kind {
    PROGRAM_ALLOC,
    PROGRAM_FREE,
    PROGRAM_RECORD_STREAM,
    PROGRAM_EMPTY_CACHE,
    PROGRAM_POOL_BEGIN, /* for the three POOL kinds, `block` is the number of the pool */
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

/* Chunks of equal size: n_chunks in memory, then those in the file, then the tail, which is being filled. */
struct op_store {
    struct program_op **chunks;
    size_t n_chunks;
    struct program_op *tail; /* NULL as long as all fits in memory */
    int fd;                  /* valid if tail is not NULL */
    uint64_t n;
};

/* One reader for each thread. */
struct op_reader {
    const struct op_store *store;
    struct program_op *buffer; /* a chunk read from the file; NULL: none yet */
    uint64_t chunk;            /* its number */
};

/* PYA_E_HOST_NOMEM, or PYA_E_IO: the file cannot be written. */
PYA_MUST_CHECK pya_status op_store_push(struct op_store *store, struct program_op op);
void op_store_fini(struct op_store *store);

/* i < store->n; fast if i ascends.  *out is valid until the next call. */
PYA_MUST_CHECK pya_status
op_reader_get(struct op_reader *reader, uint64_t i, const struct program_op **out);
void op_reader_fini(struct op_reader *reader);
