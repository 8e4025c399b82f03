/* Plain segments.  Floor 5. */
#include "segment.h"

pya_status
pya_segment_alloc(struct pya_card *card, const struct pya_pool *pool, size_t bytes, pya_dptr *out) {
    if (pool == NULL || pool->source.alloc == NULL) {
        return pya_device_plain_alloc(card->dev, bytes, out);
    }
    pya_dptr addr = pool->source.alloc(pool->source.arg, bytes);
    if (addr == 0) {
        return PYA_E_NOMEM;
    }
    *out = addr;
    return PYA_OK;
}

pya_status
pya_segment_free(struct pya_card *card, const struct pya_pool *pool, pya_dptr addr) {
    if (pool == NULL || pool->source.alloc == NULL) {
        return pya_device_plain_free(card->dev, addr);
    }
    pool->source.free(pool->source.arg, addr);
    return PYA_OK;
}
