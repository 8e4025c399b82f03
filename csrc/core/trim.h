/* Giving memory back to the device.  Floor 9. */
#pragma once

#include "pending.h"
#include "plain.h"
#include "pool.h"

#ifdef __cplusplus
extern "C" {
#endif

enum pya_trim_scope {
    PYA_TRIM_OPEN, /* the default pool and pools without users */
    PYA_TRIM_POOL, /* one pool */
};

/* Gives back wholly free pages (highest address first) and idle segments until n_bytes went back; the device was waited
 * for.  *n_freed is true also on failure; memory whose mapping could not be undone stays counted and is tried again next
 * time. */
PYA_MUST_CHECK pya_status pya_trim_card(
    struct pya_card *card, enum pya_trim_scope scope, const struct pya_pool *pool, size_t n_bytes,
    size_t *n_freed);
/* Gives back the wholly free pages ids[0..n), those side by side one after another; nothing queued on any stream
 * uses them any more.  Returns the bytes that went back.  Never waits. */
size_t pya_trim_pages(struct pya_card *card, const pya_page_id *ids, size_t n);
/* Stitching made new mappings, moving left old ones behind: where the card has more than its options allow, unmaps dead
 * addresses and the least recently used stitched ranges until it has few again.  Waits for the device, so that is rare and
 * in bulk, and gives up the lock meanwhile.  Failing is nobody's problem. */
void pya_trim_mappings(struct pya_card *card);
/* Settles pools that lost their last user: waits for the device, so that their free memory is open to all, and gives back
 * the addresses of those that have no memory left.  Gives up the lock meanwhile, as pya_fences_wait_meanwhile() does; a pool
 * that the caller is no user of may be gone afterwards.  PYA_E_HOST_NOMEM: the map of live blocks has no room. */
PYA_MUST_CHECK pya_status pya_trim_settle_meanwhile(struct pya_card *card);
/* Where addresses ran out since the last call: unmaps all that is dead or idle but what pools in use have, and gives back
 * address space in which nothing is mapped.  The device was waited for.  True: they had run out. */
bool pya_trim_addresses(struct pya_card *card);

#ifdef __cplusplus
}
#endif
