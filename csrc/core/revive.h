/* Reviving dead addresses: a page whose home moved on is still mapped where it was, and may come back without
 * a device call.  Floor 7.
 *
 * Streams that take turns with the same memory hand pages back and forth this way for nothing. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Looks for a stretch of at least `bytes` of free and dead addresses of the arena whose pages are all wholly
 * free now, here or in an idle arena of the default pool, and brings them home.  *found: there is a run of
 * that size now.  PYA_E_HOST_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status pya_arena_revive(struct pya_arena *arena, size_t bytes, bool *found);

#ifdef __cplusplus
}
#endif
