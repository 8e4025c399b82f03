#define _GNU_SOURCE
#include "op_store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef PYA_TEST_TINY
enum { CHUNK_OPS = 4, MEMORY_CHUNKS = 2 };
#else
enum { CHUNK_OPS = 1 << 20, MEMORY_CHUNKS = 20 }; /* 16 MiB each */
#endif
#define CHUNK_BYTES (CHUNK_OPS * sizeof(struct program_op))

static pya_status
chunk_add(struct op_store *store) {
    struct program_op **chunks =
        realloc(store->chunks, (store->n_chunks + 1) * sizeof(struct program_op *));
    if (chunks == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    store->chunks = chunks;
    /* Not zeroed: pages that a short program does not use cost nothing. */
    struct program_op *chunk = malloc(CHUNK_BYTES);
    if (chunk == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    store->chunks[store->n_chunks++] = chunk;
    return PYA_OK;
}

static int
nameless_file(void) {
    const char *folder = getenv("TMPDIR");
    char path[4096];
    const int n = snprintf(
        path, sizeof path, "%s/pyalloc-XXXXXX",
        folder != NULL && folder[0] != '\0' ? folder : P_tmpdir);
    if (n < 0 || (size_t)n >= sizeof path) {
        return -1;
    }
    const int fd = mkostemp(path, O_CLOEXEC);
    if (fd >= 0) {
        (void)unlink(path);
    }
    return fd;
}

/* Moves a whole chunk: to the file if `out` is NULL, else from the file into `out`. */
static pya_status
chunk_move(const struct op_store *store, uint64_t number, struct program_op *out) {
    const off_t start = (off_t)((number - store->n_chunks) * CHUNK_BYTES);
    size_t done = 0;
    while (done < CHUNK_BYTES) {
        const off_t at = start + (off_t)done;
        const size_t left = CHUNK_BYTES - done;
        const ssize_t n = out != NULL ? pread(store->fd, (char *)out + done, left, at)
                                      : pwrite(store->fd, (char *)store->tail + done, left, at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return PYA_E_IO;
        }
        done += (size_t)n;
    }
    return PYA_OK;
}

/* Makes room for the first operation of a new chunk. */
static pya_status
store_next_chunk(struct op_store *store) {
    const uint64_t number = store->n / CHUNK_OPS;
    if (store->tail != NULL) {
        return chunk_move(store, number - 1, NULL);
    }
    if (number < MEMORY_CHUNKS) {
        return chunk_add(store);
    }
    struct program_op *tail = malloc(CHUNK_BYTES);
    if (tail == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    const int fd = nameless_file();
    if (fd < 0) {
        free(tail);
        return PYA_E_IO;
    }
    store->tail = tail;
    store->fd = fd;
    return PYA_OK;
}

pya_status
op_store_push(struct op_store *store, struct program_op op) {
    const uint64_t place = store->n % CHUNK_OPS;
    if (place == 0) {
        pya_status status = store_next_chunk(store);
        if (status != PYA_OK) {
            return status;
        }
    }
    struct program_op *chunk =
        store->tail != NULL ? store->tail : store->chunks[store->n_chunks - 1];
    chunk[place] = op;
    store->n++;
    return PYA_OK;
}

void
op_store_fini(struct op_store *store) {
    for (size_t i = 0; i < store->n_chunks; i++) {
        free(store->chunks[i]);
    }
    free(store->chunks);
    if (store->tail != NULL) {
        free(store->tail);
        (void)close(store->fd);
    }
}

pya_status
op_reader_get(struct op_reader *reader, uint64_t i, const struct program_op **out) {
    const struct op_store *store = reader->store;
    const uint64_t number = i / CHUNK_OPS;
    const uint64_t last = (store->n - 1) / CHUNK_OPS;
    const struct program_op *chunk;
    if (number < store->n_chunks) {
        chunk = store->chunks[number];
    } else if (number == last) {
        chunk = store->tail;
    } else {
        if (reader->buffer == NULL) {
            reader->buffer = malloc(CHUNK_BYTES);
            reader->chunk = UINT64_MAX;
        }
        if (reader->buffer == NULL) {
            return PYA_E_HOST_NOMEM;
        }
        if (reader->chunk != number) {
            pya_status status = chunk_move(store, number, reader->buffer);
            if (status != PYA_OK) {
                return status;
            }
            reader->chunk = number;
        }
        chunk = reader->buffer;
    }
    *out = &chunk[i % CHUNK_OPS];
    return PYA_OK;
}

void
op_reader_fini(struct op_reader *reader) {
    free(reader->buffer);
}
