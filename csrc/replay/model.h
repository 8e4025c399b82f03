/* Models of torch's own allocator, for what-if: its rules (512-byte rounding, two pools, best fit by size then address,
 * when blocks split and join, what happens on a miss), with plain segments or with expandable ones.  Floor 2.
 *
 * One model is one device.  Not locked: one thread at a time. */
#pragma once

#include "../device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_model;
struct pya_model_block;

struct pya_model_config {
    bool expandable;
    unsigned n_streams; /* requests name streams 0 .. n_streams - 1; at most PYA_MODEL_STREAMS */
    const pya_stream *streams; /* what the device is told for each */
};

#define PYA_MODEL_STREAMS 4096
#define PYA_MODEL_POOLS 4096 /* the default one among them */

struct pya_model_stats {
    uint64_t reserved_bytes;
    uint64_t peak_reserved_bytes;
    uint64_t n_retries; /* times cached memory was released to go on */
};

PYA_MUST_CHECK pya_status pya_model_create(
    struct pya_device *dev, const struct pya_model_config *config, struct pya_model **out);
/* Gives all memory back. */
void pya_model_destroy(struct pya_model *model);
/* bytes > 0.  PYA_E_NOMEM only after the model has released its cache, as the real allocator does. */
PYA_MUST_CHECK pya_status pya_model_alloc(
    struct pya_model *model, size_t bytes, unsigned stream, struct pya_model_block **out);
PYA_MUST_CHECK pya_status pya_model_free(struct pya_model *model, struct pya_model_block *block);
PYA_MUST_CHECK pya_status pya_model_record_stream(struct pya_model_block *block, unsigned stream);
/* From begin to end, requests go to this private pool (numbered from 1).  Its cache is released only after pool_release. */
PYA_MUST_CHECK pya_status pya_model_pool_begin(struct pya_model *model, unsigned pool);
void pya_model_pool_end(struct pya_model *model);
void pya_model_pool_release(struct pya_model *model, unsigned pool);
PYA_MUST_CHECK pya_status pya_model_empty_cache(struct pya_model *model);
pya_dptr pya_model_addr(const struct pya_model_block *block);
size_t pya_model_bytes(const struct pya_model_block *block);
void pya_model_query(const struct pya_model *model, struct pya_model_stats *out);
/* Checks the invariants by recounting; prints each violation and returns how many there are. */
size_t pya_model_check(const struct pya_model *model);

#ifdef __cplusplus
}
#endif
