#include "program.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program_internal.h"

#define PROGRESS_EVENTS (UINT64_C(1) << 18)

static uint32_t *
program_chain(const struct pya_program *program, uint64_t addr, int device) {
    uint64_t hash = (addr + (uint64_t)device) * UINT64_C(0x9E3779B97F4A7C15);
    return &program->chains[(uint32_t)(hash >> 32) & (program->n_chains - 1)];
}

/* The link to the block alive at addr; the link is 0 if there is none. */
static uint32_t *
program_find(const struct pya_program *program, uint64_t addr, int device) {
    uint32_t *link = program_chain(program, addr, device);
    while (*link != 0 && (program->blocks[*link - 1].addr != addr ||
                          program->blocks[*link - 1].device != device)) {
        link = &program->blocks[*link - 1].next;
    }
    return link;
}

/* Doubles the blocks and the hash chains. */
static pya_status
program_grow_blocks(struct pya_program *program) {
    uint32_t n = program->n_block_slots * 2;
    uint32_t *chains = calloc(n, sizeof *chains);
    struct program_block *blocks = realloc(program->blocks, n * sizeof *blocks);
    if (blocks != NULL) {
        program->blocks = blocks;
    }
    if (chains == NULL || blocks == NULL || n > UINT32_MAX / 4) {
        free(chains);
        return PYA_E_HOST_NOMEM;
    }
    uint32_t *old = program->chains;
    uint32_t n_old = program->n_chains;
    program->chains = chains;
    program->n_chains = n;
    for (uint32_t i = 0; i < n_old; i++) {
        uint32_t at = old[i];
        while (at != 0) {
            struct program_block *block = &blocks[at - 1];
            uint32_t next = block->next;
            uint32_t *link = program_chain(program, block->addr, block->device);
            block->next = *link;
            *link = at;
            at = next;
        }
    }
    free(old);
    for (uint32_t i = n; i-- > program->n_block_slots;) {
        blocks[i].next = program->free_block;
        program->free_block = i + 1;
    }
    program->n_block_slots = n;
    return PYA_OK;
}

static pya_status
program_push(struct pya_program *program, struct program_op op) {
    pya_status status = op_store_push(&program->ops, op);
    if (status != PYA_OK) {
        return status;
    }
    program->info.n_ops++;
    const unsigned n_devices = op.device + 1U;
    if (n_devices > program->info.n_devices) {
        program->info.n_devices = n_devices;
    }
    return PYA_OK;
}

/* Numbers streams in order of appearance. */
static pya_status
program_stream(struct pya_program *program, pya_stream stream, uint16_t *out) {
    unsigned i = 0;
    while (i < program->info.n_streams && program->streams[i] != stream) {
        i++;
    }
    if (i == PROGRAM_STREAMS) {
        return PYA_E_LIMIT;
    }
    if (i == program->info.n_streams) {
        program->streams[program->info.n_streams++] = stream;
    }
    *out = (uint16_t)i;
    return PYA_OK;
}

static pya_status
program_add_free(struct pya_program *program, uint64_t addr, int device) {
    uint32_t *link = program_find(program, addr, device);
    if (*link == 0) {
        program->info.n_ignored_frees++;
        return PYA_OK;
    }
    uint32_t index = *link - 1;
    struct program_block *block = &program->blocks[index];
    struct program_op op = {.kind = PROGRAM_FREE, .block = index, .device = (uint8_t)device};
    pya_status status = program_push(program, op);
    if (status != PYA_OK) {
        return status;
    }
    program->live_bytes[device] -= block->bytes;
    *link = block->next;
    block->next = program->free_block;
    program->free_block = index + 1;
    return PYA_OK;
}

static pya_status
program_add_alloc(struct pya_program *program, const struct pya_trace_event *e) {
    int device = e->device;
    size_t rounded = 0;
    if (e->bytes == 0) {
        return PYA_OK; /* torch allocates nothing for 0 bytes */
    }
    if (e->bytes > PYA_REQUEST_MAX || !pya_size_round_up(e->bytes, PYA_ALIGN, &rounded)) {
        return PYA_E_TOO_LARGE;
    }
    if (*program_find(program, e->addr, device) != 0) {
        program->info.n_missing_frees++;
        pya_status status = program_add_free(program, e->addr, device);
        if (status != PYA_OK) {
            return status;
        }
    }
    if (program->live_bytes[device] + rounded > PROGRAM_LIVE_MAX) {
        return PYA_E_TOO_LARGE;
    }
    if (program->free_block == 0) {
        pya_status status = program_grow_blocks(program);
        if (status != PYA_OK) {
            return status;
        }
    }
    uint32_t index = program->free_block - 1;
    struct program_op op = {
        .kind = PROGRAM_ALLOC, .block = index, .device = (uint8_t)device, .bytes = e->bytes};
    pya_status status = program_stream(program, e->stream, &op.stream);
    if (status == PYA_OK) {
        status = program_push(program, op);
    }
    if (status != PYA_OK) {
        return status;
    }
    struct program_block *block = &program->blocks[index];
    program->free_block = block->next;
    uint32_t *link = program_chain(program, e->addr, device);
    *block = (struct program_block){
        .addr = e->addr, .bytes = rounded, .device = (uint8_t)device, .next = *link};
    *link = index + 1;
    program->live_bytes[device] += rounded;
    struct pya_program_info *info = &program->info;
    if (program->live_bytes[device] > info->device_peak[device]) {
        info->device_peak[device] = program->live_bytes[device];
    }
    const uint64_t asked = UINT64_C(1) << device;
    info->n_asked_streams += (program->asked[op.stream] & asked) == 0;
    program->asked[op.stream] |= asked;
    info->n_allocs++;
    info->n_blocks = index + 1 > info->n_blocks ? index + 1 : info->n_blocks;
    return PYA_OK;
}

static pya_status
program_add_record(struct pya_program *program, const struct pya_trace_event *e) {
    program->info.n_record_streams++;
    uint32_t at = *program_find(program, e->addr, e->device);
    if (at == 0) {
        return PYA_OK; /* ignore foreign pointers, as torch does */
    }
    struct program_op op = {
        .kind = PROGRAM_RECORD_STREAM, .block = at - 1, .device = (uint8_t)e->device};
    pya_status status = program_stream(program, e->arg, &op.stream);
    return status == PYA_OK ? program_push(program, op) : status;
}

/* Numbers private pools in order of appearance, from 1. */
static pya_status
program_add_pool(
    struct pya_program *program, const struct pya_trace_event *e, enum program_op_kind kind) {
    unsigned i = 1;
    while (i <= program->info.n_pools &&
           (program->pools[i].first != e->addr || program->pools[i].second != e->arg)) {
        i++;
    }
    if (i == PROGRAM_POOLS) {
        return PYA_E_LIMIT;
    }
    if (i > program->info.n_pools) {
        program->info.n_pools = i;
        program->pools[i] = (struct program_pool){e->addr, e->arg};
    }
    struct program_op op = {.kind = (uint8_t)kind, .block = i, .device = (uint8_t)e->device};
    return program_push(program, op);
}

pya_status
pya_program_add(struct pya_program *program, const struct pya_trace_event *e) {
    if (e->device < 0 || e->device >= PYA_MAX_DEVICES) {
        return PYA_E_INVAL;
    }
    program->info.n_events++;
    if (e->kind == PYA_TRACE_ALLOC) {
        return program_add_alloc(program, e);
    }
    if (e->kind == PYA_TRACE_FREE) {
        return program_add_free(program, e->addr, e->device);
    }
    if (e->kind == PYA_TRACE_RECORD_STREAM) {
        return program_add_record(program, e);
    }
    if (e->kind == PYA_TRACE_POOL_BEGIN) {
        return program_add_pool(program, e, PROGRAM_POOL_BEGIN);
    }
    if (e->kind == PYA_TRACE_POOL_END) {
        return program_add_pool(program, e, PROGRAM_POOL_END);
    }
    if (e->kind == PYA_TRACE_POOL_RELEASE) {
        return program_add_pool(program, e, PROGRAM_POOL_RELEASE);
    }
    program->info.n_ooms += e->kind == PYA_TRACE_OOM;
    if (e->kind == PYA_TRACE_EMPTY_CACHE) {
        struct program_op op = {.kind = PROGRAM_EMPTY_CACHE, .device = (uint8_t)e->device};
        return program_push(program, op);
    }
    return PYA_OK;
}

void
pya_program_query(const struct pya_program *program, struct pya_program_info *out) {
    *out = program->info;
    out->peak_live_bytes = 0;
    out->device_live_bytes = 0;
    for (int i = 0; i < PYA_MAX_DEVICES; i++) {
        const uint64_t peak = program->info.device_peak[i];
        out->peak_live_bytes += peak;
        out->device_live_bytes = peak > out->device_live_bytes ? peak : out->device_live_bytes;
    }
}

char *const *
pya_program_notes(const struct pya_program *program, size_t *n) {
    *n = program->n_notes;
    return program->notes;
}

pya_status
pya_program_create(struct pya_program **out) {
    struct pya_program *program = calloc(1, sizeof *program);
    if (program == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    program->n_block_slots = 256;
    program->n_chains = 256;
    program->info.is_complete = true;
    program->info.n_streams = 1; /* the default stream, whether used or not */
    program->blocks = malloc(program->n_block_slots * sizeof *program->blocks);
    program->chains = calloc(program->n_chains, sizeof *program->chains);
    if (program->blocks == NULL || program->chains == NULL) {
        pya_program_destroy(program);
        return PYA_E_HOST_NOMEM;
    }
    for (uint32_t i = program->n_block_slots; i-- > 0;) {
        program->blocks[i].next = program->free_block;
        program->free_block = i + 1;
    }
    *out = program;
    return PYA_OK;
}

void
pya_program_destroy(struct pya_program *program) {
    if (program != NULL) {
        op_store_fini(&program->ops);
        free(program->blocks);
        free(program->chains);
        for (size_t i = 0; i < program->n_notes; i++) {
            free(program->notes[i]);
        }
        free(program->notes);
        free(program);
    }
}

static pya_status
program_add_note(struct pya_program *program, const char *text) {
    if (text == NULL || program->n_notes == PYA_TRACE_NOTES) {
        return PYA_OK;
    }
    char **notes = realloc(program->notes, (program->n_notes + 1) * sizeof *notes);
    if (notes == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    program->notes = notes;
    const size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (copy == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    memcpy(copy, text, bytes);
    notes[program->n_notes++] = copy;
    return PYA_OK;
}

static bool
program_goes_on(
    const struct pya_program *program, const struct pya_trace_reader *reader,
    const struct pya_program_watch *watch) {
    if (watch == NULL || program->info.n_events % PROGRESS_EVENTS != 0) {
        return true;
    }
    uint64_t at = 0;
    uint64_t total = 0;
    pya_trace_position(reader, &at, &total);
    return watch->progress(watch->arg, at, total);
}

static pya_status
program_read(
    struct pya_program *program, struct pya_trace_reader *reader,
    const struct pya_program_watch *watch) {
    bool more = true;
    while (more) {
        struct pya_trace_event event;
        pya_status status = pya_trace_next(reader, &event, &more);
        if (status == PYA_OK && more) {
            status = pya_program_add(program, &event);
        }
        if (status == PYA_OK && more && event.kind == PYA_TRACE_USER) {
            status = program_add_note(program, pya_trace_text(reader, event.text));
        }
        if (status == PYA_OK && more && !program_goes_on(program, reader, watch)) {
            status = PYA_E_BUSY;
        }
        if (status != PYA_OK) {
            return status;
        }
    }
    program->info.is_complete = pya_trace_is_complete(reader);
    return PYA_OK;
}

#define TEXT_OF(number) #number
#define TEXT(macro) TEXT_OF(macro)

const char *
pya_program_limits(void) {
    return "more than " TEXT(PROGRAM_STREAMS) " streams or " TEXT(PROGRAM_POOLS) " pools";
}

pya_status
pya_program_load(
    const char *path, const struct pya_program_watch *watch, struct pya_program **out,
    char *message, size_t message_bytes) {
    struct pya_trace_reader *reader = NULL;
    struct pya_program *program = NULL;
    pya_status status = pya_trace_open(path, &reader);
    if (status != PYA_OK) {
        snprintf(
            message, message_bytes, "%s: %s", path,
            status == PYA_E_IO        ? strerror(errno)
            : status == PYA_E_CORRUPT ? PYA_TRACE_REFUSED
                                      : pya_status_text(status));
        return status;
    }
    status = pya_program_create(&program);
    if (status != PYA_OK) {
        snprintf(message, message_bytes, "%s", pya_status_text(status));
        goto destroy_reader;
    }
    status = program_read(program, reader, watch);
    if (status != PYA_OK) {
        const char *why = pya_trace_error(reader);
        const char *text = status == PYA_E_LIMIT ? pya_program_limits()
                           : status == PYA_E_IO
                               ? "no room in TMPDIR for the operations of a long recording"
                           : status == PYA_E_TOO_LARGE ? "more than 512 GiB are alive on one device"
                                                       : pya_status_text(status);
        snprintf(message, message_bytes, "%s: %s", path, why[0] != '\0' ? why : text);
        pya_program_destroy(program);
        goto destroy_reader;
    }
    *out = program;

destroy_reader:
    pya_trace_reader_destroy(reader);
    return status;
}
