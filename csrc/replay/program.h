/* A trace made ready for replay: operations on numbered blocks, 16 bytes each, loaded once and replayed often.  Floor 2. */
#pragma once

#include "trace.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_program;

struct pya_program_info {
    uint64_t n_ops;
    uint64_t n_allocs;
    uint64_t n_events;         /* fed, of which ops are those that matter to an allocator */
    uint64_t n_ignored_frees;  /* of addresses not alive */
    uint64_t n_missing_frees;  /* an address was handed out again while alive: freed first */
    uint64_t n_ooms;           /* errors while it was recorded: what was refused is in no op */
    uint64_t n_record_streams; /* fed, of blocks alive or not */
    uint64_t n_asked_streams;  /* of each device those that were asked for memory, added up */
    unsigned n_devices;
    unsigned n_streams;
    unsigned n_pools;                      /* private ones */
    uint64_t n_blocks;                     /* most alive at once */
    uint64_t peak_live_bytes;              /* sum of device_peak */
    uint64_t device_live_bytes;            /* largest device_peak: capacities are of one device */
    uint64_t device_peak[PYA_MAX_DEVICES]; /* most alive there, each request rounded to 512 */
    bool is_complete;                      /* false: the file was cut off */
};

PYA_MUST_CHECK pya_status pya_program_create(struct pya_program **out);
/* In order.  PYA_E_LIMIT: too many streams or pools; PYA_E_TOO_LARGE: more alive than any device has.  Kinds that mean
 * nothing to an allocator are counted only. */
PYA_MUST_CHECK pya_status
pya_program_add(struct pya_program *program, const struct pya_trace_event *event);
/* What PYA_E_LIMIT means, of a program or of its replay. */
const char *pya_program_limits(void);
/* Called now and then while a file is read; false stops (PYA_E_BUSY). */
struct pya_program_watch {
    bool (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_all);
    void *arg;
};

/* Create and add all of a file.  watch: may be NULL.  message: why not, when it fails; damage in the middle is a failure. */
PYA_MUST_CHECK pya_status pya_program_load(
    const char *path, const struct pya_program_watch *watch, struct pya_program **out,
    char *message, size_t message_bytes);
void pya_program_query(const struct pya_program *program, struct pya_program_info *out);
/* Texts of a file's notes (USER events), the first PYA_TRACE_NOTES of them; n of them, owned by the program. */
char *const *pya_program_notes(const struct pya_program *program, size_t *n);
void pya_program_destroy(struct pya_program *program);

#ifdef __cplusplus
}
#endif
