/* Trace files: the requests to an allocator in order, compact, and readable up to the last whole chunk.  Floor 1.
 *
 * File:  magic "PYATRACE", u32 version, u32 0; then chunks.
 * Chunk: u32 magic "PYAC", u32 payload bytes, u32 events, u32 CRC-32 (zlib's), u64 time of the first
 *        event, u64 number of events before it; then the payload.  The CRC covers the other 28 header bytes, then
 *        the payload.  A chunk of 0 bytes ends a complete file.
 * Payload: records, each a byte (kind, and which of thread, device, stream differ from the previous record), then varints:
 *        nanoseconds since the previous record, [thread], [device], [stream], the fields of the kind (table below).
 *        Addresses are signed differences from the previous one.  thread, device, stream and address start at 0 in each
 *        chunk.  Records DEFINE_STRING (length, bytes) and DEFINE_STACK (parent, name, file, line) have no time; they
 *        are numbered from 1 in order of appearance.  A stack is a frame and its caller's stack.
 * All numbers little-endian.  1e8 events need memory only for the distinct strings and stacks. */
#pragma once

#include "../core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PYA_TRACE_VERSION 1

enum {
    PYA_TRACE_ADDR = 1,  /* addr */
    PYA_TRACE_BYTES = 2, /* bytes */
    PYA_TRACE_STACK = 4, /* stack */
    PYA_TRACE_ARG = 8,   /* arg */
    PYA_TRACE_TEXT = 16, /* text */
};

/* kind, number, name, fields, meaning.  Numbers are part of the format: never reuse one. */
#define PYA_TRACE_TABLE(X)                                                                         \
    X(ALLOC, 1, "alloc", PYA_TRACE_ADDR | PYA_TRACE_BYTES | PYA_TRACE_STACK,                       \
      "bytes (as requested) at addr on stream")                                                    \
    X(FREE, 2, "free_requested", PYA_TRACE_ADDR | PYA_TRACE_STACK, "the user gave addr back")      \
    X(FREE_COMPLETED, 3, "free_completed", PYA_TRACE_ADDR, "addr may be handed out again")         \
    X(RECORD_STREAM, 4, "record_stream", PYA_TRACE_ADDR | PYA_TRACE_ARG,                           \
      "addr is used on the stream in arg too")                                                     \
    X(SEGMENT_ALLOC, 5, "segment_alloc", PYA_TRACE_ADDR | PYA_TRACE_BYTES | PYA_TRACE_STACK,       \
      "device memory taken")                                                                       \
    X(SEGMENT_FREE, 6, "segment_free", PYA_TRACE_ADDR | PYA_TRACE_BYTES, "device memory returned") \
    X(SEGMENT_MAP, 7, "segment_map", PYA_TRACE_ADDR | PYA_TRACE_BYTES | PYA_TRACE_STACK,           \
      "device memory mapped")                                                                      \
    X(SEGMENT_UNMAP, 8, "segment_unmap", PYA_TRACE_ADDR | PYA_TRACE_BYTES, "and unmapped")         \
    X(OOM, 9, "oom", PYA_TRACE_BYTES | PYA_TRACE_STACK | PYA_TRACE_ARG,                            \
      "bytes were refused; arg: free bytes of the device")                                         \
    X(SNAPSHOT, 10, "snapshot", 0, "a snapshot was taken")                                         \
    X(EMPTY_CACHE, 11, "empty_cache", 0, "cached memory was asked back")                           \
    X(STREAM, 12, "stream", PYA_TRACE_ARG | PYA_TRACE_TEXT, "stream arg has this name")            \
    X(DEVICE, 13, "device", PYA_TRACE_BYTES | PYA_TRACE_TEXT, "device has this memory and name")   \
    X(POOL_BEGIN, 14, "pool_begin", PYA_TRACE_ADDR | PYA_TRACE_ARG,                                \
      "requests of this thread go to private pool (addr, arg)")                                    \
    X(POOL_END, 15, "pool_end", PYA_TRACE_ADDR | PYA_TRACE_ARG, "no longer")                       \
    X(POOL_RELEASE, 16, "pool_release", PYA_TRACE_ADDR | PYA_TRACE_ARG, "the pool lost a user")    \
    X(STEP, 17, "step", PYA_TRACE_ARG | PYA_TRACE_TEXT, "step arg begins")                         \
    X(PHASE_BEGIN, 18, "phase_begin", PYA_TRACE_TEXT, "a phase of this name begins")               \
    X(PHASE_END, 19, "phase_end", PYA_TRACE_TEXT, "the innermost phase of this name ends")         \
    X(CATEGORY, 20, "category", PYA_TRACE_ADDR | PYA_TRACE_TEXT, "what the block at addr holds")   \
    X(USER, 21, "user", PYA_TRACE_ARG | PYA_TRACE_TEXT, "a note; key=value describes the run")     \
    X(SYNC, 22, "sync", 0, "all work queued on stream so far is known to be done")                 \
    X(LABEL, 23, "label", PYA_TRACE_ADDR | PYA_TRACE_TEXT,                                         \
      "what the program calls the block at addr")                                                  \
    X(SEGMENT_POOL, 24, "segment_pool", PYA_TRACE_ADDR | PYA_TRACE_BYTES,                          \
      "device memory of the private pool that requests go to")                                     \
    X(THREAD, 25, "thread", PYA_TRACE_ARG | PYA_TRACE_TEXT, "thread arg has this name")

enum pya_trace_kind {
    PYA_TRACE_NONE = 0,
#define X(kind, number, name, fields, meaning) PYA_TRACE_##kind = number,
    PYA_TRACE_TABLE(X)
#undef X
};

#define PYA_TRACE_NOTES 4096 /* readers keep at most this many USER events of a file */

/* The writer ignores fields that the kind does not have; the reader sets them to 0. */
struct pya_trace_event {
    int kind;
    int device; /* below PYA_MAX_DEVICES */
    /* Never decreases within a file: an earlier time is written as the previous one. */
    uint64_t time_ns;
    uint64_t thread;
    pya_stream stream;
    pya_dptr addr;
    uint64_t bytes;
    uint64_t arg;
    uint32_t stack; /* 0: none */
    uint32_t text;  /* a string; 0: none */
};

struct pya_trace_frame {
    uint32_t parent; /* stack of the caller; 0: outermost */
    uint32_t name;   /* strings */
    uint32_t file;
    uint32_t line;
};

/* "alloc" and so on; NULL for a number that is not a kind. */
const char *pya_trace_kind_name(int kind);

/* ---- writing: any thread may call; the writer's own lock is taken inside every other.  After PYA_E_IO errno is that of
 * the first failed write, also if a later call returns PYA_E_IO again ---- */

struct pya_trace_writer;

/* Writes to "<path>.part" and renames it at close, so that a file under its own name is whole.  PYA_E_INVAL: path exists
 * and overwrite is false, or path or "<path>.part" is a device, a pipe, a socket or a folder.  PYA_E_BUSY: another writer
 * has the file.  In a forked child the writer does nothing. */
PYA_MUST_CHECK pya_status
pya_trace_create(const char *path, bool overwrite, struct pya_trace_writer **out);
/* The same text gives the same number. */
PYA_MUST_CHECK pya_status
pya_trace_string(struct pya_trace_writer *writer, const char *text, size_t bytes, uint32_t *out);
PYA_MUST_CHECK pya_status pya_trace_stack(
    struct pya_trace_writer *writer, const struct pya_trace_frame *frame, uint32_t *out);
PYA_MUST_CHECK pya_status
pya_trace_write(struct pya_trace_writer *writer, const struct pya_trace_event *event);
/* Returns once everything written so far is in the file. */
PYA_MUST_CHECK pya_status pya_trace_flush(struct pya_trace_writer *writer);
/* Always frees the writer; returns the first error of its life. */
pya_status pya_trace_close(struct pya_trace_writer *writer);

/* ---- reading: one thread per reader ---- */

struct pya_trace_reader;

/* PYA_E_IO: the file cannot be opened; PYA_E_CORRUPT: not a trace, or of another version, which is told in these words. */
#define PYA_TRACE_REFUSED                                                                          \
    "not a recording of this version of pyalloc; read it with the version that wrote it"
PYA_MUST_CHECK pya_status pya_trace_open(const char *path, struct pya_trace_reader **out);
/* Sets *more to false at the end.  PYA_E_CORRUPT: damage starts here; everything before it was good. */
PYA_MUST_CHECK pya_status
pya_trace_next(struct pya_trace_reader *reader, struct pya_trace_event *out, bool *more);
/* False before the end, and at the end of a file that was cut off. */
bool pya_trace_is_complete(const struct pya_trace_reader *reader);
/* How far the reader is, in bytes of the file. */
void pya_trace_position(const struct pya_trace_reader *reader, uint64_t *at, uint64_t *total);
/* NUL-terminated, valid until the next event is read; NULL for a number not defined so far. */
const char *pya_trace_text(const struct pya_trace_reader *reader, uint32_t string);
/* False for a number not defined so far. */
bool
pya_trace_frame(const struct pya_trace_reader *reader, uint32_t stack, struct pya_trace_frame *out);
/* Why the last call failed, with the offset in the file. */
const char *pya_trace_error(const struct pya_trace_reader *reader);
void pya_trace_reader_destroy(struct pya_trace_reader *reader);

#ifdef __cplusplus
}
#endif
