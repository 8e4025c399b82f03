/* Where plain segments come from: the device, or what the pool has instead.  Floor 5. */
#pragma once

#include "card.h"

#ifdef __cplusplus
extern "C" {
#endif

PYA_MUST_CHECK pya_status
pya_segment_alloc(struct pya_card *card, const struct pya_pool *pool, size_t bytes, pya_dptr *out);
/* By the pool it was made for. */
PYA_MUST_CHECK pya_status
pya_segment_free(struct pya_card *card, const struct pya_pool *pool, pya_dptr addr);

#ifdef __cplusplus
}
#endif
