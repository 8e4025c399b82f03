/* A pluggable allocator for torch that serves every request from one large block and writes what it was asked to a
 * trace: exact sizes, streams, record_stream and empty_cache, in order.
 *
 * Addresses in the trace are numbers of blocks (reused last-in first-out) times 512 and times are numbers of events: the
 * trace of a deterministic loop is the same each time and compresses well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/replay/trace.h"

#define EXPORT __attribute__((visibility("default")))
#define STREAMS 64

struct recorder_block {
    size_t bytes; /* rounded */
    uint32_t number;
    struct recorder_block *next; /* in its chain, or free with the same size */
    char *addr;
};

static pthread_mutex_t recorder_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pya_trace_writer *recorder_writer;
static char *recorder_base;
static size_t recorder_used;
static size_t recorder_bytes;
static uint64_t recorder_clock;
static uint32_t recorder_spare[1 << 22];
static uint32_t recorder_n_spare;
static uint32_t recorder_n_numbers;
static struct recorder_block *recorder_live[1 << 16];
static struct recorder_block *recorder_free[1 << 16];
static void *recorder_streams[STREAMS];
static uint64_t recorder_n_events;

EXPORT int recorder_open(const char *path, size_t bytes);
EXPORT int recorder_close(void);
EXPORT uint64_t recorder_count(void);
EXPORT int recorder_mark(int kind, uint64_t arg, const char *text);
EXPORT void *recorder_alloc(size_t bytes, int device, void *stream);
EXPORT void recorder_release(void *ptr, size_t bytes, int device, void *stream);
EXPORT void recorder_record_stream(void *ptr, void *stream);
EXPORT void recorder_reset(void);

static struct recorder_block **
recorder_chain(struct recorder_block **table, uint64_t key) {
    return &table[(key * UINT64_C(0x9E3779B97F4A7C15)) >> 48];
}

/* Streams by order of appearance, the default one first: addresses of stream objects differ from run to run. */
static uint64_t
recorder_stream(void *stream) {
    for (uint64_t i = 1; stream != NULL && i < STREAMS; i++) {
        if (recorder_streams[i] == NULL || recorder_streams[i] == stream) {
            recorder_streams[i] = stream;
            return i;
        }
    }
    return 0;
}

static void
recorder_put(struct pya_trace_event event) {
    event.time_ns = ++recorder_clock;
    if (recorder_writer != NULL && pya_trace_write(recorder_writer, &event) != PYA_OK) {
        fprintf(stderr, "recorder: the trace could not be written\n");
        abort();
    }
    recorder_n_events++;
}

int
recorder_open(const char *path, size_t bytes) {
    int (*cuda_malloc)(void **, size_t) = NULL;
    void *symbol = dlsym(RTLD_DEFAULT, "cudaMalloc");
    memcpy(&cuda_malloc, &symbol, sizeof symbol);
    void *base = NULL;
    if (cuda_malloc == NULL || cuda_malloc(&base, bytes) != 0) {
        return 1;
    }
    recorder_base = base;
    recorder_bytes = bytes;
    return (int)pya_trace_create(path, true, &recorder_writer);
}

int
recorder_close(void) {
    int status = (int)pya_trace_close(recorder_writer);
    recorder_writer = NULL;
    return status;
}

uint64_t
recorder_count(void) {
    return recorder_n_events;
}

int
recorder_mark(int kind, uint64_t arg, const char *text) {
    pthread_mutex_lock(&recorder_lock);
    struct pya_trace_event event = {.kind = kind, .arg = arg};
    int status = (int)pya_trace_string(recorder_writer, text, strlen(text), &event.text);
    if (status == 0) {
        recorder_put(event);
    }
    pthread_mutex_unlock(&recorder_lock);
    return status;
}

static struct recorder_block *
recorder_take(size_t bytes) {
    struct recorder_block **link = recorder_chain(recorder_free, bytes);
    while (*link != NULL && (*link)->bytes != bytes) {
        link = &(*link)->next;
    }
    struct recorder_block *block = *link;
    if (block != NULL) {
        *link = block->next;
        return block;
    }
    if (recorder_bytes - recorder_used < bytes) {
        return NULL;
    }
    block = calloc(1, sizeof *block);
    if (block != NULL) {
        block->bytes = bytes;
        block->addr = recorder_base + recorder_used;
        recorder_used += bytes;
    }
    return block;
}

void *
recorder_alloc(size_t bytes, int device, void *stream) {
    if (bytes == 0) {
        return NULL;
    }
    pthread_mutex_lock(&recorder_lock);
    struct recorder_block *block = recorder_take((bytes + 511) & ~(size_t)511);
    if (block == NULL) {
        fprintf(stderr, "recorder: the block of memory to record in is used up\n");
        abort();
    }
    block->number =
        recorder_n_spare > 0 ? recorder_spare[--recorder_n_spare] : ++recorder_n_numbers;
    struct recorder_block **link = recorder_chain(recorder_live, (uint64_t)(uintptr_t)block->addr);
    block->next = *link;
    *link = block;
    recorder_put((struct pya_trace_event){
        .kind = PYA_TRACE_ALLOC,
        .device = device,
        .stream = recorder_stream(stream),
        .addr = (uint64_t)block->number * 512,
        .bytes = bytes});
    pthread_mutex_unlock(&recorder_lock);
    return block->addr;
}

static struct recorder_block **
recorder_find(const void *ptr) {
    struct recorder_block **link = recorder_chain(recorder_live, (uint64_t)(uintptr_t)ptr);
    while (*link != NULL && (*link)->addr != ptr) {
        link = &(*link)->next;
    }
    return link;
}

void
recorder_release(void *ptr, size_t bytes, int device, void *stream) {
    (void)bytes;
    pthread_mutex_lock(&recorder_lock);
    struct recorder_block **link = recorder_find(ptr);
    struct recorder_block *block = *link;
    if (block != NULL) {
        *link = block->next;
        struct recorder_block **list = recorder_chain(recorder_free, block->bytes);
        block->next = *list;
        *list = block;
        recorder_spare[recorder_n_spare++] = block->number;
        recorder_put((struct pya_trace_event){
            .kind = PYA_TRACE_FREE,
            .device = device,
            .stream = recorder_stream(stream),
            .addr = (uint64_t)block->number * 512});
    }
    pthread_mutex_unlock(&recorder_lock);
}

void
recorder_record_stream(void *ptr, void *stream) {
    pthread_mutex_lock(&recorder_lock);
    struct recorder_block *block = *recorder_find(ptr);
    if (block != NULL) {
        recorder_put((struct pya_trace_event){
            .kind = PYA_TRACE_RECORD_STREAM,
            .addr = (uint64_t)block->number * 512,
            .arg = recorder_stream(stream)});
    }
    pthread_mutex_unlock(&recorder_lock);
}

void
recorder_reset(void) {
    pthread_mutex_lock(&recorder_lock);
    recorder_put((struct pya_trace_event){.kind = PYA_TRACE_EMPTY_CACHE});
    pthread_mutex_unlock(&recorder_lock);
}
