/* Annexation: taking free memory of other streams together with its addresses.  Floor 7.
 *
 * Nothing is mapped or unmapped, so there is no device call.  Afterwards a range holds blocks of several arenas, but
 * each grain belongs to one arena only. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a free run of at least `bytes` from idle runs of other arenas in the default pool and the arena's own runs
 * next to them. *found false: there is no such run.  PYA_E_HOST_NOMEM changes nothing. */
PYA_MUST_CHECK pya_status pya_arena_annex(struct pya_arena *arena, size_t bytes, bool *found);

#ifdef __cplusplus
}
#endif
