/* torch's private pools: MemPool, with or without its own allocator, and the checkpoints of CUDA-graph trees.  Floor 5. */
#pragma once

#include "core/pool_id.h"

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

int pya_torch_pool_users(void *self, int8_t device, pya_pool_id id);
/* allocator: the pool's own, or NULL; see the definition for its type. */
void pya_torch_pool_create(void *self, int8_t device, pya_pool_id id, void *const *allocator);
/* Does MemPool(allocator) work?  *detail says how this torch passes it. */
bool pya_torch_pool_takes_allocator(const char **detail);
/* The versions for torch 2.6 and 2.7.  pool_in_use: the pool that empty_cache() is meant for; {0, 0}: all memory. */
void pya_torch_pool_create_without(void *self, int8_t device, pya_pool_id id);
pya_pool_id pya_torch_pool_in_use(void);
/* Call it before requests are routed to a pool; throws if it has its own allocator and torch (2.6, 2.7) did not pass it. */
void pya_torch_pool_check_allocator(void);
/* Call it after requests were routed to a pool.  If cudaMalloc is watched, a pool without memory will use cudaMalloc. */
void pya_torch_pool_note_begun(int8_t device, pya_pool_id id);
void pya_torch_pool_use_on_oom(void *self, int8_t device, pya_pool_id id, bool flag);
/* This torch has setNoSplit, and its setUseOnOOM has a flag; without it, calling setUseOnOOM means true. */
void pya_torch_pool_has_no_split(void);
void pya_torch_pool_no_split(void *self, int8_t device, pya_pool_id id);
/* Empties the cache of one pool; {0, 0}: of all. */
void pya_torch_empty_cache(void *self, pya_pool_id id);
bool pya_torch_pool_has_exactly(
    void *self, int8_t device, pya_pool_id id, const std::unordered_set<void *> &expected);

/* c10's AllocatorState, of which we only need the virtual destructor. */
struct pya_torch_pool_state;
/* c10::DataPtr as four words, and the return type of setCheckpointPoolState. */
struct pya_torch_data_ptr {
    void *words[4];
};
struct pya_torch_delta {
    std::vector<void *> freed;
    std::vector<pya_torch_data_ptr> allocated;
};

std::shared_ptr<pya_torch_pool_state>
pya_torch_checkpoint_get(void *self, int8_t device, pya_pool_id id);
pya_torch_delta
pya_torch_checkpoint_set(void *self, int8_t device, std::shared_ptr<pya_torch_pool_state> state);
