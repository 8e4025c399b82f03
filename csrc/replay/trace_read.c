/* Reads trace files, including damaged and hostile ones: every number is checked before it is used. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trace_format.h"

struct pya_trace_reader {
    FILE *file;
    uint64_t total; /* bytes of the file */
    uint64_t at;    /* offset of the first byte not yet read */
    bool is_complete;
    bool is_broken;
    uint8_t *payload; /* TRACE_CHUNK_MAX at most */
    size_t payload_room;
    const uint8_t *next; /* in payload */
    const uint8_t *end;
    uint32_t n_left; /* events left in the chunk, according to its header */
    uint64_t n_events;
    struct trace_state state;
    char *text; /* all strings, each NUL-terminated */
    size_t n_text;
    size_t text_room;
    size_t *strings; /* offsets in text */
    uint32_t n_strings;
    uint32_t strings_room;
    struct pya_trace_frame *stacks;
    uint32_t n_stacks;
    uint32_t stacks_room;
    char error[192];
};

static pya_status
reader_fail(struct pya_trace_reader *r, pya_status status, const char *why) {
    r->is_broken = true;
    snprintf(
        r->error, sizeof r->error, "%s (near byte %llu of %llu)", why, (unsigned long long)r->at,
        (unsigned long long)r->total);
    return status;
}

static pya_status
reader_fail_damaged(struct pya_trace_reader *r, const char *why) {
    pya_status status = reader_fail(r, PYA_E_CORRUPT, why);
    size_t n = strlen(r->error);
    snprintf(
        r->error + n, sizeof r->error - n,
        "; if it was copied, copy it again, otherwise record again");
    return status;
}

static bool
reader_read(struct pya_trace_reader *r, void *to, size_t n) {
    size_t got = fread(to, 1, n, r->file);
    r->at += got;
    return got == n;
}

/* Doubles an array until it has room for n elements. */
static bool
reader_reserve(void **array, uint32_t *room, size_t n, size_t element_bytes) {
    if (n <= *room) {
        return true;
    }
    size_t more = *room == 0 ? 256 : *room;
    while (more < n) {
        more *= 2;
    }
    void *bigger = more > UINT32_MAX ? NULL : realloc(*array, more * element_bytes);
    if (bigger == NULL) {
        return false;
    }
    *array = bigger;
    *room = (uint32_t)more;
    return true;
}

/* ---- chunks ---- */

static pya_status
reader_chunk(struct pya_trace_reader *r, bool *more) {
    uint8_t header[TRACE_CHUNK_HEADER_BYTES];
    if (r->at == r->total) {
        *more = false; /* cut off between two chunks */
        return PYA_OK;
    }
    if (r->total - r->at < sizeof header) {
        *more = false; /* cut off inside a header */
        r->at = r->total;
        return PYA_OK;
    }
    if (!reader_read(r, header, sizeof header)) {
        return reader_fail(r, PYA_E_IO, "the file cannot be read");
    }
    uint32_t bytes = trace_get32(header + 4);
    if (trace_get32(header) != TRACE_CHUNK_MAGIC || bytes > TRACE_CHUNK_MAX ||
        trace_get64(header + 24) != r->n_events) {
        return reader_fail_damaged(r, "no chunk begins here");
    }
    if (bytes == 0) {
        if (trace_chunk_crc(header, NULL, 0) != trace_get32(header + 12)) {
            return reader_fail_damaged(r, "the checksum of the last chunk is wrong");
        }
        *more = false;
        r->is_complete = true;
        return PYA_OK;
    }
    if (bytes > r->total - r->at) {
        *more = false; /* cut off inside a chunk */
        r->at = r->total;
        return PYA_OK;
    }
    if (bytes > r->payload_room) {
        uint8_t *bigger = realloc(r->payload, bytes);
        if (bigger == NULL) {
            return reader_fail(r, PYA_E_HOST_NOMEM, "no host memory for a chunk");
        }
        r->payload = bigger;
        r->payload_room = bytes;
    }
    if (!reader_read(r, r->payload, bytes)) {
        return reader_fail(r, PYA_E_IO, "the file cannot be read");
    }
    if (trace_chunk_crc(header, r->payload, bytes) != trace_get32(header + 12)) {
        return reader_fail_damaged(r, "the checksum of a chunk is wrong");
    }
    r->next = r->payload;
    r->end = r->payload + bytes;
    r->n_left = trace_get32(header + 8);
    r->state = (struct trace_state){.time_ns = trace_get64(header + 16)};
    *more = true;
    return PYA_OK;
}

/* ---- definitions ---- */

static pya_status
reader_string(struct pya_trace_reader *r) {
    uint64_t bytes = 0;
    const uint8_t *at = varint_get(r->next, r->end, &bytes);
    if (at == NULL || bytes > (uint64_t)(r->end - at)) {
        return reader_fail_damaged(r, "a string is longer than its chunk");
    }
    if (r->n_text + bytes + 1 > r->text_room) {
        size_t room = (r->text_room + bytes + 4096) * 2;
        char *bigger = realloc(r->text, room);
        if (bigger == NULL) {
            return reader_fail(r, PYA_E_HOST_NOMEM, "no host memory for strings");
        }
        r->text = bigger;
        r->text_room = room;
    }
    if (!reader_reserve(
            (void **)&r->strings, &r->strings_room, (size_t)r->n_strings + 1, sizeof *r->strings)) {
        return reader_fail(r, PYA_E_HOST_NOMEM, "no host memory for strings");
    }
    r->strings[r->n_strings++] = r->n_text;
    memcpy(r->text + r->n_text, at, bytes);
    r->text[r->n_text + bytes] = '\0';
    r->n_text += bytes + 1;
    r->next = at + bytes;
    return PYA_OK;
}

static pya_status
reader_stack(struct pya_trace_reader *r) {
    uint64_t field[4] = {0};
    const uint8_t *at = r->next;
    for (int i = 0; i < 4 && at != NULL; i++) {
        at = varint_get(at, r->end, &field[i]);
    }
    /* A parent must precede its child, so walking up always ends. */
    if (at == NULL || field[0] > r->n_stacks || field[1] > r->n_strings ||
        field[2] > r->n_strings || field[3] > UINT32_MAX) {
        return reader_fail_damaged(r, "a stack refers to something undefined");
    }
    if (!reader_reserve(
            (void **)&r->stacks, &r->stacks_room, (size_t)r->n_stacks + 1, sizeof *r->stacks)) {
        return reader_fail(r, PYA_E_HOST_NOMEM, "no host memory for stacks");
    }
    r->stacks[r->n_stacks++] = (struct pya_trace_frame){
        .parent = (uint32_t)field[0],
        .name = (uint32_t)field[1],
        .file = (uint32_t)field[2],
        .line = (uint32_t)field[3],
    };
    r->next = at;
    return PYA_OK;
}

/* ---- events ---- */

/* Reads one varint if wanted; sets *at to NULL on an error, and leaves it there. */
static uint64_t
reader_field(
    const struct pya_trace_reader *r, const uint8_t **at, bool wanted, uint64_t otherwise) {
    uint64_t value = otherwise;
    if (wanted && *at != NULL) {
        *at = varint_get(*at, r->end, &value);
    }
    return value;
}

static pya_status
reader_event(struct pya_trace_reader *r, uint8_t head, struct pya_trace_event *out) {
    int kind = head & TRACE_KIND_MASK;
    int fields = trace_fields(kind);
    if (fields < 0 && kind > 0 && kind < TRACE_DEFINE_STRING) { /* kinds are consecutive */
        char why[64];
        snprintf(why, sizeof why, "made by a newer pyalloc (event kind %d): update this one", kind);
        return reader_fail(r, PYA_E_CORRUPT, why);
    }
    if (fields < 0 || r->n_left == 0) {
        return reader_fail_damaged(r, "an event of unknown kind");
    }
    struct trace_state *state = &r->state;
    const uint8_t *at = r->next;
    state->time_ns += reader_field(r, &at, true, 0);
    state->thread = reader_field(r, &at, (head & TRACE_NEW_THREAD) != 0, state->thread);
    state->device = reader_field(r, &at, (head & TRACE_NEW_DEVICE) != 0, state->device);
    state->stream = reader_field(r, &at, (head & TRACE_NEW_STREAM) != 0, state->stream);
    if ((fields & PYA_TRACE_ADDR) != 0) {
        state->addr += varint_to_delta(reader_field(r, &at, true, 0));
    }
    uint64_t bytes = reader_field(r, &at, (fields & PYA_TRACE_BYTES) != 0, 0);
    uint64_t stack = reader_field(r, &at, (fields & PYA_TRACE_STACK) != 0, 0);
    uint64_t arg = reader_field(r, &at, (fields & PYA_TRACE_ARG) != 0, 0);
    uint64_t text = reader_field(r, &at, (fields & PYA_TRACE_TEXT) != 0, 0);
    if (at == NULL || state->device >= PYA_MAX_DEVICES || stack > r->n_stacks ||
        text > r->n_strings) {
        return reader_fail_damaged(r, "an event refers to something undefined");
    }
    *out = (struct pya_trace_event){
        .kind = kind,
        .device = (int)state->device,
        .time_ns = state->time_ns,
        .thread = state->thread,
        .stream = state->stream,
        .addr = (fields & PYA_TRACE_ADDR) != 0 ? state->addr : 0,
        .bytes = bytes,
        .arg = arg,
        .stack = (uint32_t)stack,
        .text = (uint32_t)text,
    };
    r->next = at;
    r->n_left--;
    r->n_events++;
    return PYA_OK;
}

pya_status
pya_trace_next(struct pya_trace_reader *r, struct pya_trace_event *out, bool *more) {
    if (r->is_broken) {
        return PYA_E_CORRUPT;
    }
    for (;;) {
        pya_status status = PYA_OK;
        if (r->next == r->end) {
            bool chunk = false;
            if (r->n_left != 0) {
                return reader_fail_damaged(r, "a chunk has fewer events than it says");
            }
            if (r->is_complete) {
                *more = false;
                return PYA_OK;
            }
            status = reader_chunk(r, &chunk);
            if (status != PYA_OK || !chunk) {
                *more = status == PYA_OK ? false : *more;
                return status;
            }
            continue;
        }
        uint8_t head = *r->next++;
        if (head == TRACE_DEFINE_STRING) {
            status = reader_string(r);
        } else if (head == TRACE_DEFINE_STACK) {
            status = reader_stack(r);
        } else {
            status = reader_event(r, head, out);
            *more = status == PYA_OK ? true : *more;
            return status;
        }
        if (status != PYA_OK) {
            return status;
        }
    }
}

/* ---- the rest ---- */

bool
pya_trace_is_complete(const struct pya_trace_reader *r) {
    return r->is_complete;
}

void
pya_trace_position(const struct pya_trace_reader *r, uint64_t *at, uint64_t *total) {
    *at = r->at;
    *total = r->total;
}

const char *
pya_trace_text(const struct pya_trace_reader *r, uint32_t string) {
    return string == 0 || string > r->n_strings ? NULL : r->text + r->strings[string - 1];
}

bool
pya_trace_frame(const struct pya_trace_reader *r, uint32_t stack, struct pya_trace_frame *out) {
    if (stack == 0 || stack > r->n_stacks) {
        return false;
    }
    *out = r->stacks[stack - 1];
    return true;
}

const char *
pya_trace_error(const struct pya_trace_reader *r) {
    return r->error;
}

void
pya_trace_reader_destroy(struct pya_trace_reader *r) {
    if (r == NULL) {
        return;
    }
    if (r->file != NULL) {
        fclose(r->file);
    }
    free(r->payload);
    free(r->text);
    free(r->strings);
    free(r->stacks);
    free(r);
}

pya_status
pya_trace_open(const char *path, struct pya_trace_reader **out) {
    struct pya_trace_reader *r = calloc(1, sizeof *r);
    if (r == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pya_status status = PYA_E_IO;
    int why;
    long end = -1;
    uint8_t header[TRACE_HEADER_BYTES];
    r->file = fopen(path, "rb");
    if (r->file == NULL || fseek(r->file, 0, SEEK_END) != 0) {
        goto destroy;
    }
    end = ftell(r->file);
    if (end < 0 || fseek(r->file, 0, SEEK_SET) != 0) {
        goto destroy;
    }
    r->total = (uint64_t)end;
    status = PYA_E_CORRUPT;
    if (r->total < sizeof header || !reader_read(r, header, sizeof header) ||
        trace_get64(header) != TRACE_MAGIC || trace_get32(header + 8) != PYA_TRACE_VERSION ||
        trace_get32(header + 12) != 0) {
        goto destroy;
    }
    *out = r;
    return PYA_OK;

destroy:
    why = errno; /* for the caller's message about PYA_E_IO */
    pya_trace_reader_destroy(r);
    errno = why;
    return status;
}
