/* torch's private pools: MemPool, with an allocator of its own or not, and the checkpoints of CUDA-graph trees.  Floor 5. */
#pragma once

#include "core/pool_id.h"

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

int pya_torch_pool_users(void *self, int8_t device, pya_pool_id id);
/* allocator: of the pool's own, NULL for none; see the definition for its type. */
void pya_torch_pool_create(void *self, int8_t device, pya_pool_id id, void *const *allocator);
/* Does MemPool(allocator) work?  *detail says how this torch passes it. */
bool pya_torch_pool_takes_allocator(const char **detail);
/* As 2.6 and 2.7 have it, and what there is meant by an empty_cache(): {0, 0} for all memory. */
void pya_torch_pool_create_without(void *self, int8_t device, pya_pool_id id);
pya_pool_id pya_torch_pool_in_use(void);
/* Before requests go to a pool: throws where its own allocator is not known, as there. */
void pya_torch_pool_check_allocator(void);
/* After requests began to go to a pool: one that has no memory yet takes it from cudaMalloc where that is watched. */
void pya_torch_pool_note_begun(int8_t device, pya_pool_id id);
void pya_torch_pool_use_on_oom(void *self, int8_t device, pya_pool_id id, bool flag);
/* torch has setNoSplit, and with it a flag of setUseOnOOM; without, that call means true. */
void pya_torch_pool_has_no_split(void);
void pya_torch_pool_no_split(void *self, int8_t device, pya_pool_id id);
/* {0, 0}: all memory. */
void pya_torch_empty_cache(void *self, pya_pool_id id);
bool pya_torch_pool_has_exactly(
    void *self, int8_t device, pya_pool_id id, const std::unordered_set<void *> &expected);

/* c10's AllocatorState: anything with a virtual destructor. */
struct pya_torch_pool_state;
/* c10::DataPtr as four words, and what setCheckpointPoolState returns. */
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
