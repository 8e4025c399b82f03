/* Writes trace files.  A writer has one lock, a leaf: no other is taken under it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "trace_format.h"

/* How often this process was forked.  A child must not write to the parent's file, nor wait for a lock that another thread
 * of the parent held. */
static uint32_t n_forks;
static pthread_once_t forks_once = PTHREAD_ONCE_INIT;

static void
forks_count(void) {
    __atomic_fetch_add(&n_forks, 1, __ATOMIC_RELAXED);
}

static void
forks_watch(void) {
    (void)pthread_atfork(NULL, NULL, forks_count);
}

/* An interned key and its number: a string by its bytes, a stack by its frame. */
struct trace_entry {
    uint64_t hash;
    uint32_t id; /* 0: empty */
    uint32_t bytes;
    union {
        char *text; /* owned */
        struct pya_trace_frame frame;
    } key;
};

struct trace_table {
    struct trace_entry *slots;
    uint32_t n_slots; /* power of two, or 0 */
    uint32_t n;       /* numbers given out: 1 .. n; n <= 3/4 n_slots */
};

struct pya_trace_writer {
    pthread_mutex_t lock; /* guards all below */
    int fd;
    uint32_t n_forks; /* at its creation */
    pya_status first_error;
    int first_errno; /* with PYA_E_IO: why */
    char *path;
    char *part;
    struct trace_state state;
    struct trace_table strings;
    struct trace_table stacks;
    uint64_t n_events;       /* in the file and the buffer */
    uint32_t n_chunk_events; /* in the buffer */
    uint64_t chunk_time;
    size_t n_buffered; /* header included */
    uint8_t buffer[TRACE_CHUNK_HEADER_BYTES + TRACE_CHUNK_BYTES + TRACE_STRING_MAX + 64];
};

/* By number; numbers that are not a kind have no name. */
static const struct {
    const char *name;
    int fields;
} trace_kinds[] = {
#define X(kind, number, text, mask, meaning) [number] = {text, mask},
    PYA_TRACE_TABLE(X)
#undef X
};

const char *
pya_trace_kind_name(int kind) {
    const int n = (int)(sizeof trace_kinds / sizeof *trace_kinds);
    return kind >= 0 && kind < n ? trace_kinds[kind].name : NULL;
}

int
trace_fields(int kind) {
    return pya_trace_kind_name(kind) == NULL ? -1 : trace_kinds[kind].fields;
}

/* ---- interning ---- */

static uint64_t
trace_hash(const void *data, size_t bytes) {
    const uint8_t *at = data;
    uint64_t hash = UINT64_C(0xCBF29CE484222325) ^ bytes;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001B3);
    }
    return hash ^ (hash >> 29);
}

static bool
trace_entry_is(
    const struct trace_entry *entry, uint64_t hash, const char *text,
    const struct pya_trace_frame *frame, size_t bytes) {
    if (entry->hash != hash || entry->bytes != bytes) {
        return false;
    }
    return frame == NULL ? memcmp(entry->key.text, text, bytes) == 0
                         : memcmp(&entry->key.frame, frame, sizeof *frame) == 0;
}

static bool
trace_table_grow(struct trace_table *table) {
    uint32_t n_slots = table->n_slots == 0 ? 256 : table->n_slots * 2;
    struct trace_entry *slots = calloc(n_slots, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < table->n_slots; i++) {
        if (table->slots[i].id != 0) {
            uint32_t at = (uint32_t)table->slots[i].hash & (n_slots - 1);
            while (slots[at].id != 0) {
                at = (at + 1) & (n_slots - 1);
            }
            slots[at] = table->slots[i];
        }
    }
    free(table->slots);
    table->slots = slots;
    table->n_slots = n_slots;
    return true;
}

/* The entry of the key, or the empty slot where it belongs; NULL: no host memory. */
static struct trace_entry *
trace_table_find(
    struct trace_table *table, uint64_t hash, const char *text, const struct pya_trace_frame *frame,
    size_t bytes) {
    if (table->n + 1 > table->n_slots / 4 * 3 && !trace_table_grow(table)) {
        return NULL;
    }
    uint32_t at = (uint32_t)hash & (table->n_slots - 1);
    while (table->slots[at].id != 0 &&
           !trace_entry_is(&table->slots[at], hash, text, frame, bytes)) {
        at = (at + 1) & (table->n_slots - 1);
    }
    return &table->slots[at];
}

/* ---- the buffer ---- */

static void
trace_begin_chunk(struct pya_trace_writer *w) {
    w->state = (struct trace_state){.time_ns = w->state.time_ns};
    w->n_buffered = TRACE_CHUNK_HEADER_BYTES;
    w->n_chunk_events = 0;
    w->chunk_time = w->state.time_ns;
}

static pya_status
trace_fail_io(struct pya_trace_writer *w) {
    w->first_error = PYA_E_IO;
    w->first_errno = errno;
    return PYA_E_IO;
}

static pya_status
trace_write_all(struct pya_trace_writer *w, const uint8_t *at, size_t n) {
    while (n > 0) {
        ssize_t done = write(w->fd, at, n);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return trace_fail_io(w);
        }
        at += done;
        n -= (size_t)done;
    }
    return PYA_OK;
}

static pya_status
trace_end_chunk(struct pya_trace_writer *w) {
    size_t payload = w->n_buffered - TRACE_CHUNK_HEADER_BYTES;
    uint8_t *header = w->buffer;
    trace_put32(header, TRACE_CHUNK_MAGIC);
    trace_put32(header + 4, (uint32_t)payload);
    trace_put32(header + 8, w->n_chunk_events);
    trace_put64(header + 16, w->chunk_time);
    trace_put64(header + 24, w->n_events - w->n_chunk_events);
    trace_put32(header + 12, trace_chunk_crc(header, header + TRACE_CHUNK_HEADER_BYTES, payload));
    pya_status status = trace_write_all(w, w->buffer, w->n_buffered);
    trace_begin_chunk(w);
    return status;
}

static bool
trace_is_ours(const struct pya_trace_writer *w) {
    return w->n_forks == __atomic_load_n(&n_forks, __ATOMIC_RELAXED);
}

/* Takes the lock.  Unless it returns PYA_OK, the lock is not held and nothing can be written. */
static pya_status
trace_enter(struct pya_trace_writer *w) {
    if (!trace_is_ours(w)) {
        return PYA_E_FORKED;
    }
    pthread_mutex_lock(&w->lock);
    pya_status status = w->first_error;
    if (status != PYA_OK) {
        errno = w->first_errno;
        pthread_mutex_unlock(&w->lock);
    }
    return status;
}

/* Makes room in the buffer for a record of this many bytes. */
static pya_status
trace_room(struct pya_trace_writer *w, size_t bytes) {
    if (w->n_buffered + bytes <= TRACE_CHUNK_HEADER_BYTES + TRACE_CHUNK_BYTES ||
        w->n_buffered == TRACE_CHUNK_HEADER_BYTES) {
        return PYA_OK;
    }
    return trace_end_chunk(w);
}

pya_status
pya_trace_string(struct pya_trace_writer *w, const char *text, size_t bytes, uint32_t *out) {
    bytes = bytes > TRACE_STRING_MAX ? TRACE_STRING_MAX : bytes;
    pya_status status = trace_enter(w);
    if (status != PYA_OK) {
        return status;
    }
    uint64_t hash = trace_hash(text, bytes);
    struct trace_entry *entry = trace_table_find(&w->strings, hash, text, NULL, bytes);
    if (entry == NULL) {
        status = PYA_E_HOST_NOMEM;
        goto unlock;
    }
    if (entry->id == 0) {
        char *copy = malloc(bytes + 1);
        if (copy == NULL) {
            status = PYA_E_HOST_NOMEM;
            goto unlock;
        }
        status = trace_room(w, 1 + VARINT_MAX + bytes);
        if (status != PYA_OK) {
            free(copy);
            goto unlock;
        }
        memcpy(copy, text, bytes);
        copy[bytes] = '\0';
        *entry = (struct trace_entry){
            .hash = hash, .id = ++w->strings.n, .bytes = (uint32_t)bytes, .key.text = copy};
        uint8_t *at = w->buffer + w->n_buffered;
        *at++ = TRACE_DEFINE_STRING;
        at = varint_put(at, bytes);
        memcpy(at, text, bytes);
        w->n_buffered = (size_t)(at + bytes - w->buffer);
    }
    *out = entry->id;
unlock:
    pthread_mutex_unlock(&w->lock);
    return status;
}

pya_status
pya_trace_stack(struct pya_trace_writer *w, const struct pya_trace_frame *frame, uint32_t *out) {
    pya_status status = trace_enter(w);
    if (status != PYA_OK) {
        return status;
    }
    if (frame->parent > w->stacks.n || frame->name > w->strings.n || frame->file > w->strings.n) {
        status = PYA_E_INVAL;
        goto unlock;
    }
    uint64_t hash = trace_hash(frame, sizeof *frame);
    struct trace_entry *entry = trace_table_find(&w->stacks, hash, NULL, frame, sizeof *frame);
    if (entry == NULL) {
        status = PYA_E_HOST_NOMEM;
        goto unlock;
    }
    if (entry->id == 0) {
        status = trace_room(w, TRACE_STACK_MAX);
        if (status != PYA_OK) {
            goto unlock;
        }
        *entry = (struct trace_entry){
            .hash = hash, .id = ++w->stacks.n, .bytes = sizeof *frame, .key.frame = *frame};
        uint8_t *at = w->buffer + w->n_buffered;
        *at++ = TRACE_DEFINE_STACK;
        at = varint_put(at, frame->parent);
        at = varint_put(at, frame->name);
        at = varint_put(at, frame->file);
        at = varint_put(at, frame->line);
        w->n_buffered = (size_t)(at - w->buffer);
    }
    *out = entry->id;
unlock:
    pthread_mutex_unlock(&w->lock);
    return status;
}

static uint8_t *
trace_put_event(
    struct trace_state *state, uint8_t *at, const struct pya_trace_event *e, int fields) {
    uint8_t *head = at++;
    *head = (uint8_t)e->kind;
    uint64_t now = e->time_ns > state->time_ns ? e->time_ns : state->time_ns;
    at = varint_put(at, now - state->time_ns);
    state->time_ns = now;
    if (e->thread != state->thread) {
        *head |= TRACE_NEW_THREAD;
        at = varint_put(at, e->thread);
        state->thread = e->thread;
    }
    if ((uint64_t)e->device != state->device) {
        *head |= TRACE_NEW_DEVICE;
        at = varint_put(at, (uint64_t)e->device);
        state->device = (uint64_t)e->device;
    }
    if (e->stream != state->stream) {
        *head |= TRACE_NEW_STREAM;
        at = varint_put(at, e->stream);
        state->stream = e->stream;
    }
    if ((fields & PYA_TRACE_ADDR) != 0) {
        at = varint_put(at, varint_from_delta(e->addr - state->addr));
        state->addr = e->addr;
    }
    if ((fields & PYA_TRACE_BYTES) != 0) {
        at = varint_put(at, e->bytes);
    }
    if ((fields & PYA_TRACE_STACK) != 0) {
        at = varint_put(at, e->stack);
    }
    if ((fields & PYA_TRACE_ARG) != 0) {
        at = varint_put(at, e->arg);
    }
    if ((fields & PYA_TRACE_TEXT) != 0) {
        at = varint_put(at, e->text);
    }
    return at;
}

pya_status
pya_trace_write(struct pya_trace_writer *w, const struct pya_trace_event *event) {
    int fields = trace_fields(event->kind);
    if (fields < 0 || event->device < 0 || event->device >= PYA_MAX_DEVICES) {
        return PYA_E_INVAL;
    }
    pya_status status = trace_enter(w);
    if (status != PYA_OK) {
        return status;
    }
    if (event->stack > w->stacks.n || event->text > w->strings.n) {
        status = PYA_E_INVAL;
        goto unlock;
    }
    status = trace_room(w, TRACE_EVENT_MAX);
    if (status == PYA_OK) {
        uint8_t *at = trace_put_event(&w->state, w->buffer + w->n_buffered, event, fields);
        w->n_buffered = (size_t)(at - w->buffer);
        w->n_events++;
        w->n_chunk_events++;
    }
unlock:
    pthread_mutex_unlock(&w->lock);
    return status;
}

pya_status
pya_trace_flush(struct pya_trace_writer *w) {
    pya_status status = trace_enter(w);
    if (status != PYA_OK) {
        return status;
    }
    if (w->n_buffered > TRACE_CHUNK_HEADER_BYTES) {
        status = trace_end_chunk(w);
    }
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* Sets errno to that of the first failed write. */
static void
trace_writer_free(struct pya_trace_writer *w) {
    int why = w->first_errno;
    for (uint32_t i = 0; i < w->strings.n_slots; i++) {
        if (w->strings.slots[i].id != 0) {
            free(w->strings.slots[i].key.text);
        }
    }
    free(w->strings.slots);
    free(w->stacks.slots);
    free(w->path);
    free(w->part);
    pthread_mutex_destroy(&w->lock);
    free(w);
    errno = why;
}

/* Is `part` still the name of this file?  No other writer takes it away while we hold its lock; who began to record and
 * could not go on does, and may close the file long after another has the name. */
static bool
part_is_named(int fd, const char *part) {
    struct stat ours;
    struct stat named;
    return fstat(fd, &ours) == 0 && lstat(part, &named) == 0 && ours.st_dev == named.st_dev &&
           ours.st_ino == named.st_ino;
}

pya_status
pya_trace_close(struct pya_trace_writer *w) {
    if (!trace_is_ours(w)) {
        close(w->fd); /* leak the rest: a thread of the parent may have been changing it */
        return PYA_E_FORKED;
    }
    pya_status status = w->first_error;
    if (status == PYA_OK && w->n_buffered > TRACE_CHUNK_HEADER_BYTES) {
        status = trace_end_chunk(w);
    }
    if (status == PYA_OK) {
        status = trace_end_chunk(w); /* an empty chunk marks a complete file */
    }
    /* A second descriptor keeps the lock until the file is renamed. */
    const int held = fcntl(w->fd, F_DUPFD_CLOEXEC, 0);
    const bool is_named = part_is_named(w->fd, w->part);
    if (close(w->fd) != 0 && status == PYA_OK) {
        status = trace_fail_io(w);
    }
    if (status == PYA_OK && (!is_named || rename(w->part, w->path) != 0)) {
        errno = is_named ? errno : ENOENT;
        status = trace_fail_io(w);
    }
    if (held >= 0) {
        close(held);
    }
    trace_writer_free(w);
    return status;
}

/* Does another open file description hold the lock, in this process or another one? */
static bool
part_is_locked(int fd) {
    return flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

/* A device, a pipe, a socket or a folder, which must not be replaced.  A symbolic link may be: only the link goes. */
static bool
path_is_special(const char *path) {
    struct stat info;
    return lstat(path, &info) == 0 && !S_ISREG(info.st_mode) && !S_ISLNK(info.st_mode);
}

/* Removes the file of a writer that was killed.  PYA_E_BUSY: it is still being written; PYA_E_INVAL: not a regular file.
 * Only who holds the lock of the file under this name may unlink it. */
static pya_status
part_remove(const char *part) {
    if (path_is_special(part)) {
        return PYA_E_INVAL;
    }
    const int fd = open(part, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        const bool is_removed = errno == ELOOP && unlink(part) == 0; /* a symbolic link */
        return is_removed || errno == ENOENT ? PYA_OK : PYA_E_IO;
    }
    pya_status status = part_is_locked(fd) ? PYA_E_BUSY : PYA_OK;
    if (status == PYA_OK && part_is_named(fd, part) && unlink(part) != 0) {
        status = PYA_E_IO;
    }
    const int why = errno;
    close(fd);
    errno = why;
    return status;
}

static bool
path_exists(const char *path) {
    struct stat info;
    return stat(path, &info) == 0;
}

/* Creates a new file and locks it.  PYA_E_BUSY: somebody else is creating it. */
static pya_status
part_create(const char *part, int *out) {
    pya_status status = PYA_OK;
    int fd = -1;
    while (fd < 0 && status == PYA_OK) {
        fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd < 0) {
            status = errno == EEXIST ? part_remove(part) : PYA_E_IO;
        }
    }
    if (fd >= 0) {
        (void)fchmod(fd, 0600); /* the umask may have removed the owner's rights */
    }
    if (fd >= 0 && (part_is_locked(fd) || !part_is_named(fd, part))) {
        close(fd);
        status = PYA_E_BUSY;
    }
    *out = fd;
    return status;
}

pya_status
pya_trace_create(const char *path, bool overwrite, struct pya_trace_writer **out) {
    if ((!overwrite && path_exists(path)) || path_is_special(path)) {
        return PYA_E_INVAL;
    }
    struct pya_trace_writer *w = calloc(1, sizeof *w);
    if (w == NULL) {
        return PYA_E_HOST_NOMEM;
    }
    pthread_mutex_init(&w->lock, NULL);
    pthread_once(&forks_once, forks_watch);
    w->n_forks = __atomic_load_n(&n_forks, __ATOMIC_RELAXED);
    size_t n = strlen(path);
    w->path = malloc(n + 1);
    w->part = malloc(n + sizeof ".part");
    pya_status status = PYA_E_HOST_NOMEM;
    if (w->path == NULL || w->part == NULL) {
        goto free_writer;
    }
    (void)snprintf(w->path, n + 1, "%s", path);
    (void)snprintf(w->part, n + sizeof ".part", "%s.part", path);
    status = part_create(w->part, &w->fd);
    if (status != PYA_OK) {
        w->first_errno = errno;
        goto free_writer;
    }
    if (!overwrite && path_exists(path)) { /* another writer has finished in the meantime */
        status = PYA_E_INVAL;
        goto close_file;
    }
    uint8_t header[TRACE_HEADER_BYTES] = {0};
    trace_put64(header, TRACE_MAGIC);
    trace_put32(header + 8, PYA_TRACE_VERSION);
    status = trace_write_all(w, header, sizeof header);
    if (status != PYA_OK) {
        goto close_file;
    }
    trace_begin_chunk(w);
    *out = w;
    return PYA_OK;

close_file:
    unlink(w->part); /* while we hold its lock */
    close(w->fd);
free_writer:
    trace_writer_free(w);
    return status;
}
