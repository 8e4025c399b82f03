/* The source of plain segments: the device, or the pool's own source.  Floor 5. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

PYA_MUST_CHECK pya_status
pya_segment_alloc(struct pya_card *card, const struct pya_pool *pool, size_t bytes, pya_dptr *out);
/* pool: the pool that the segment was allocated for. */
PYA_MUST_CHECK pya_status
pya_segment_free(struct pya_card *card, const struct pya_pool *pool, pya_dptr addr);

#ifdef __cplusplus
}
#endif
