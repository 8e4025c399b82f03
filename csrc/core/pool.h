/* Private pools: memory of CUDA graphs and of torch.cuda.MemPool, kept apart.  Floor 7. */
#pragma once

#include "arena.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_pool *pya_pool_find(struct pya_card *card, struct pya_pool_id id);
PYA_MUST_CHECK pya_status
pya_pool_get(struct pya_card *card, struct pya_pool_id id, struct pya_pool **out);
/* The pool for a request on this stream; NULL: the default pool.  If a pool's filter accepts the stream, its
 * announced capture has begun, and the announcement ends. */
struct pya_pool *pya_pool_route(struct pya_card *card, pya_stream stream);
/* The arena of (pool, stream); created at the first request. */
PYA_MUST_CHECK pya_status pya_pool_arena(
    struct pya_card *card, struct pya_pool *pool, pya_stream stream, struct pya_arena **out);
/* May this arena's memory be given back or moved to another arena? */
bool pya_pool_is_open(const struct pya_arena *arena);
/* The pool and stream of a request on this stream, for the trace. */
struct pya_place pya_pool_place(struct pya_card *card, pya_stream stream);
/* Has the arena no live, pending or parked block?  It may still have free memory and dead addresses. */
bool pya_arena_is_vacant(const struct pya_arena *arena);
/* Adds a user: a graph or a MemPool. */
void pya_pool_add_user(struct pya_card *card, struct pya_pool *pool);
/* Removes a user.  There must be one. */
void pya_pool_drop_user(struct pya_card *card, struct pya_pool *pool);
/* Lets others take the pool's idle memory.  Called when its last user left, or when requests stop going there. */
void pya_pool_offer(struct pya_card *card, const struct pya_pool *pool);
/* Is there a pool that lost its last user since the last wait, and whose free memory others could have after a new
 * wait?  False while a capture may be in progress. */
bool pya_pools_are_unsettled(struct pya_card *card);
/* Call when the device was waited for and nothing was freed since: opens the memory of pools without users to all
 * others. */
void pya_pools_note_wait(struct pya_card *card);
/* Frees the pool and drops what it holds of its caller's.  Its arenas are gone already. */
void pya_pool_free(struct pya_pool *pool);
/* Frees pools without users whose arenas are empty. */
void pya_pools_sweep(struct pya_card *card);

#ifdef __cplusplus
}
#endif
