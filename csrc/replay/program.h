/* A trace prepared for replay: 16-byte operations on numbered blocks, loaded once and replayed many times.  Floor 2. */
#pragma once

#include "trace.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_program;

struct pya_program_info {
    uint64_t n_ops;
    uint64_t n_allocs;
    uint64_t n_events;         /* added; only those that matter to an allocator become ops */
    uint64_t n_ignored_frees;  /* of addresses that were not alive */
    uint64_t n_missing_frees;  /* an address was allocated again while alive: we free it first */
    uint64_t n_ooms;           /* refused requests in the recording; they become no op */
    uint64_t n_record_streams; /* added, whether the block was alive or not */
    uint64_t n_asked_streams;  /* sum over devices of the streams that allocated there */
    unsigned n_devices;
    unsigned n_streams;
    unsigned n_pools;                      /* private ones */
    uint64_t n_blocks;                     /* peak number of live blocks */
    uint64_t peak_live_bytes;              /* sum of device_peak */
    uint64_t device_live_bytes;            /* largest device_peak: capacities are per device */
    uint64_t device_peak[PYA_MAX_DEVICES]; /* peak live bytes, each request rounded to 512 */
    bool is_complete;                      /* false: the file was cut off */
};

PYA_MUST_CHECK pya_status pya_program_create(struct pya_program **out);
/* Call it in the order of the events.  PYA_E_LIMIT: too many streams or pools; PYA_E_TOO_LARGE: more is alive than any
 * device has.  Kinds of event that do not matter to an allocator are only counted. */
PYA_MUST_CHECK pya_status
pya_program_add(struct pya_program *program, const struct pya_trace_event *event);
/* The text for PYA_E_LIMIT from a program or its replay. */
const char *pya_program_limits(void);
/* Called now and then while a file is read; false stops (PYA_E_BUSY). */
struct pya_program_watch {
    bool (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all);
    void *arg;
};

/* Creates a program from a whole file.  watch may be NULL.  message: the reason on failure; damage inside the file fails. */
PYA_MUST_CHECK pya_status pya_program_load(
    const char *path, const struct pya_program_watch *watch, struct pya_program **out,
    char *message, size_t message_bytes);
void pya_program_query(const struct pya_program *program, struct pya_program_info *out);
/* Texts of the file's notes (USER events), at most PYA_TRACE_NOTES; *n of them, owned by the program. */
char *const *pya_program_notes(const struct pya_program *program, size_t *n);
void pya_program_destroy(struct pya_program *program);

#ifdef __cplusplus
}
#endif
