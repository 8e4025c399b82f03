/* The allocator's options: one table of names, kinds, defaults and help.  Floor 1.
 *
 * It serves to parse PYALLOC_CONF ("key:value,key:value"), for `pyalloc doctor` and for the documentation. */
#pragma once

#include "layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* kind, name, default, help.  Kinds: CHOICE (enum below), BOOL, BYTES (0 is "none"), REAL, SECONDS, COUNT. */
#define PYA_OPTION_TABLE(X)                                                                        \
    X(CHOICE, memory, PYA_MEMORY_BALANCED,                                                         \
      "tight|balanced|fast: how much work to spend on saving memory; balanced suits training, "    \
      "tight helps if the last percent decides whether it fits, fast if memory is plentiful")      \
    X(BOOL, vmm, 1,                                                                                \
      "use the driver's virtual memory calls if it has them; False for libraries that need one "   \
      "allocation behind an address")                                                              \
    X(REAL, per_process_memory_fraction, 1,                                                        \
      "share of each device's memory that this process may reserve")                               \
    X(BYTES, limit, 0, "maximum bytes to reserve on each device (0: all of its memory)")           \
    X(BYTES, soft_limit, 0,                                                                        \
      "bytes above which memory is reused and given back before more is reserved, on each device " \
      "(0: none)")                                                                                 \
    X(REAL, garbage_collection_threshold, 0,                                                       \
      "share of the limit above which idle cached memory is given back before growing (0: off)")   \
    X(BYTES, keep_free, 0,                                                                         \
      "bytes of each device to leave to other programs and libraries: if less is free, cached "    \
      "memory is given back before growing (0: none)")                                             \
    X(SECONDS, trim_after, 0,                                                                      \
      "seconds after which unused memory is given back, at the next request (0: never)")           \
    X(BYTES, max_split_size, 0,                                                                    \
      "without vmm: do not split blocks of this size or larger, which helps if pieces of them "    \
      "lie idle (0: no bound)")                                                                    \
    X(COUNT, roundup_power2_divisions, 0,                                                          \
      "round requests up to this many steps per power of two: fewer sizes, more memory (0: off)")  \
    X(BOOL, shared_pages, 1,                                                                       \
      "before running out of memory, let two live blocks share a page under two addresses")        \
    X(COUNT, mappings_per_page, 64,                                                                \
      "average number of addresses of a page before old ones are unmapped: fewer take less of "    \
      "the driver's memory and more of its time")

enum { PYA_MEMORY_TIGHT, PYA_MEMORY_BALANCED, PYA_MEMORY_FAST };

struct pya_options {
#define PYA_FIELD_CHOICE(name) int name;
#define PYA_FIELD_BOOL(name) int name;
#define PYA_FIELD_BYTES(name) size_t name;
#define PYA_FIELD_REAL(name) double name;
#define PYA_FIELD_SECONDS(name) double name;
#define PYA_FIELD_COUNT(name) size_t name;
#define X(kind, name, initial, help) PYA_FIELD_##kind(name)
    PYA_OPTION_TABLE(X)
#undef X
    /* Not in the table and not part of any text.  The caller keeps it alive as long as the heap.  NULL: none. */
    const struct pya_layout *layouts;
};

void pya_options_init(struct pya_options *options);
/* Parses "key:value,key:value".  On PYA_E_INVAL options is unchanged and message says what is wrong, with the nearest
 * known name if there is one.  torch's keys that have the same meaning here are understood (max_split_size_mb,
 * expandable_segments).  torch's documented keys without a meaning here are accepted and ignored (pinned_*,
 * backend:native, release_lock_on_cudamalloc, ...). */
PYA_MUST_CHECK pya_status pya_options_parse(
    struct pya_options *options, const char *text, char *message, size_t message_bytes);

/* For doctor and documentation.  index counts from 0; NULL past the end.  buffer receives the current value as text. */
const char *pya_option_name(size_t index);
const char *pya_option_help(size_t index);
int pya_option_format(const struct pya_options *options, size_t index, char *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif
