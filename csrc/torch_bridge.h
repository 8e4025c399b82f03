/* What the Python module may ask of the torch bridge; plain C, no torch type appears.  Floor 5.
 *
 * The bridge gives torch the functions of torch.cuda.memory.CUDAPluggableAllocator.  It links nothing of torch: what it
 * needs is looked up in the libraries the process has loaded, and what is not found is left out and reported. */
#pragma once

#include "core/pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The heap that torch's calls reach from now on; NULL detaches.  The caller keeps the heap alive meanwhile. */
void pya_torch_attach(struct pya_heap *heap);

/* Functions to register, by the name of the setter of CUDAPluggableAllocator; NULL past the end.  The allocation and
 * free functions are exported as pya_torch_alloc and pya_torch_free instead: torch looks them up by name. */
const char *pya_torch_hook_setter(size_t index);
uintptr_t pya_torch_hook_address(size_t index);

/* Looks up torch's symbols and tries out what was found; safe to call again after more libraries were loaded. */
void pya_torch_find_symbols(void);
/* Gives torch back the allocator it had before pyalloc was registered; only before CUDA was used.  False where torch's
 * variable was not found. */
bool pya_torch_restore_allocator(void);
/* Takes virtual methods of torch's wrapper object, each only where its slot is found by address. */
void pya_torch_take_slots(void);

/* Were all methods taken whose feature begins so? */
bool pya_torch_has_slots(const char *feature);
/* While set, this thread's calls of torch's history and snapshot functions come from pyalloc's own Python. */
void pya_torch_ask(bool is_asking);
/* While set, other threads' and C++'s calls of torch's history function change nothing: a recording would lose events. */
void pya_torch_hold_history(bool is_held);
/* false: every allocation goes to the device, and back to it when freed. */
void pya_torch_set_cached(bool is_cached);

/* Told of every cached allocation, and before every free, while torch's GPU trace is on; called with no lock held. */
typedef void (*pya_torch_tracer)(bool is_allocation, uint64_t address);
void pya_torch_set_tracer(pya_torch_tracer tracer);

/* To be called after a request on, or record of, a stream of the device of which only the handle is known, and so not whether
 * it is torch's or another library's. */
void pya_torch_note_handle(pya_stream stream, int device);

/* What was found and what was not: index from 0, false past the end.  Both texts are static. */
bool pya_torch_feature(size_t index, const char **name, bool *works, const char **detail);
/* Frees torch asked for that were refused. */
uint64_t pya_torch_refused_frees(void);

/* False before torch has told us that CUDA is in use. */
bool pya_torch_is_initialized(void);

#ifdef __cplusplus
}
#endif
