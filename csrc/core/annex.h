/* Annexation: free memory of other streams changes hands with its addresses.  Floor 7.
 *
 * Nothing is mapped and nothing unmapped, so it costs no device call.  A range then holds blocks of several
 * arenas; a grain always belongs to one. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a free run of at least `bytes` out of idle runs of other arenas of the default pool and the arena's own
 * beside them.  *found false: there is none.  PYA_E_HOST_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status pya_arena_annex(struct pya_arena *arena, size_t bytes, bool *found);

#ifdef __cplusplus
}
#endif
