/* Giving memory back to the device.  Floor 9. */
#pragma once

#include "pending.h"
#include "plain.h"
#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pya_trim_scope {
    PYA_TRIM_OPEN, /* the default pool, and pools without users */
    PYA_TRIM_POOL, /* one pool */
};

/* Gives back wholly free pages (highest address first) and idle segments until n_bytes are released.  The device was
 * waited for.  *n_freed is correct also on failure.  Memory that could not be unmapped still counts and is tried
 * again next time. */
PYA_MUST_CHECK pya_status pya_trim_card(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t n_bytes,
    size_t *n_freed);
/* Gives back the wholly free pages ids[0..n), adjacent ones together.  No queued work uses them.  has_waited: the
 * device was waited for, so no queued work uses anything free.  Returns the bytes given back.  Never waits. */
size_t pya_trim_pages(struct pya_card *card, const pya_page_id *ids, size_t n, bool has_waited);
/* Stitching makes new mappings and moving leaves old ones behind.  If the card has more than its options allow,
 * unmaps dead addresses and the least recently used stitched ranges until few are left.  It waits for the device, so
 * it is done rarely and in bulk, and releases the lock meanwhile.  A failure does no harm. */
void pya_trim_mappings(struct pya_card *card);
/* Settles pools that lost their last user: waits for the device, so that their free memory is open to all, and gives
 * back the addresses of pools without memory.  Releases the lock like pya_fences_wait_meanwhile(); a pool that the
 * caller does not use may be gone afterwards.  PYA_E_HOST_NOMEM: the map of live blocks has no room. */
PYA_MUST_CHECK pya_status pya_trim_settle_meanwhile(struct pya_card *card);
/* If addresses have run out since the last call: unmaps everything dead or idle, except in pools in use, and releases
 * address space in which nothing is mapped.  The device was waited for.  True: addresses had run out. */
bool pya_trim_addresses(struct pya_card *card);

#ifdef __cplusplus
}
#endif
