/* What the Python module calls in the torch bridge; plain C, without torch's types.  Floor 5.
 *
 * The bridge provides the functions that torch.cuda.memory.CUDAPluggableAllocator calls.  It does not link against torch: it
 * looks up what it needs in the libraries that the process has loaded, and reports as missing what it does not find. */
#pragma once

#include "core/pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Directs torch's calls to this heap; NULL detaches.  The heap must stay alive while it is attached. */
void pya_torch_attach(struct pya_heap *heap);

/* The hooks to register: entry `index` names a setter of CUDAPluggableAllocator, NULL past the end.  Alloc and free are not
 * among them: torch finds those by their exported names, pya_torch_alloc and pya_torch_free. */
const char *pya_torch_hook_setter(size_t index);
uintptr_t pya_torch_hook_address(size_t index);

/* Looks up torch's symbols and tests what it finds.  Safe to call again after more libraries were loaded. */
void pya_torch_find_symbols(void);
/* Puts torch's previous allocator back in place of pyalloc.  Only before CUDA is first used.  False where torch's variable
 * was not found. */
bool pya_torch_restore_allocator(void);
/* Overrides virtual methods of torch's wrapper object, each only if its vtable slot can be found by address. */
void pya_torch_take_slots(void);

/* True if every method whose feature name starts with `feature` was overridden. */
bool pya_torch_has_slots(const char *feature);
/* While set, calls of torch's history and snapshot functions on this thread come from pyalloc's own Python code. */
void pya_torch_ask(bool is_asking);
/* While set, torch's history function does nothing for other threads and C++ code: a recording would lose events. */
void pya_torch_hold_history(bool is_held);
/* false: no caching; every allocation comes from the device and goes back to it when freed. */
void pya_torch_set_cached(bool is_cached);

/* Called after every cached allocation and before every free while torch's GPU trace is on; no lock is held. */
typedef void (*pya_torch_tracer)(bool is_allocation, uint64_t address);
void pya_torch_set_tracer(pya_torch_tracer tracer);

/* Call this after an allocation or record_stream on a stream of which only the handle is known: the handle alone does not say
 * whether torch made the stream or another library did. */
void pya_torch_note_handle(pya_stream stream, int device);

/* Enumerates what was found and what was not, index from 0; false past the end.  Both texts are static. */
bool pya_torch_feature(size_t index, const char **name, bool *works, const char **detail);
/* Number of frees by torch that were refused. */
uint64_t pya_torch_refused_frees(void);

/* True once torch has told us that CUDA is in use. */
bool pya_torch_is_initialized(void);

#ifdef __cplusplus
}
#endif
