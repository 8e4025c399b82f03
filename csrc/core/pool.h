/* Private pools: memory of CUDA graphs and of torch.cuda.MemPool, kept apart.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_pool *pya_pool_find(struct pya_card *card, struct pya_pool_id id);
PYA_MUST_CHECK pya_status
pya_pool_get(struct pya_card *card, struct pya_pool_id id, struct pya_pool **out);
/* The pool an allocation on this stream goes to; NULL: the default pool.  A filter that accepts it ends its pool's
 * announcement: the capture has begun. */
struct pya_pool *pya_pool_route(struct pya_card *card, pya_stream stream);
/* Arena of (pool, stream), made at the first request. */
PYA_MUST_CHECK pya_status pya_pool_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out);
/* May memory of this arena be given back or moved to another arena? */
bool pya_pool_is_open(const struct pya_arena *arena);
/* Where a request of this stream goes, for the trace. */
struct pya_place pya_pool_place(struct pya_card *card, pya_stream stream);
/* Has the arena no live, pending or parked block?  It may still have free memory and dead addresses. */
bool pya_arena_is_vacant(const struct pya_arena *arena);
/* One more graph or MemPool uses it. */
void pya_pool_add_user(struct pya_card *card, struct pya_pool *pool);
/* One user fewer; there was at least one. */
void pya_pool_drop_user(struct pya_card *card, struct pya_pool *pool);
/* Others may take the pool's idle memory; called when its last user went, or when requests stop going there. */
void pya_pool_offer(struct pya_card *card, const struct pya_pool *pool);
/* Has a pool free memory that others could have after a wait for the device, because its last user went since the last
 * one?  False while a capture may be under way. */
bool pya_pools_are_unsettled(struct pya_card *card);
/* The device was waited for since anything was freed: the memory of such pools is open to all others. */
void pya_pools_note_wait(struct pya_card *card);
/* Drops what the pool holds of its caller's, and the pool; its arenas are gone. */
void pya_pool_free(struct pya_pool *pool);
/* Drops pools without users whose arenas hold nothing any more. */
void pya_pools_sweep(struct pya_card *card);

#ifdef __cplusplus
}
#endif
