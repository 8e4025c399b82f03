/* Virtual methods of torch's wrapper object that we override.  Floor 5. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "core/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap;

/* The heap set by pya_torch_attach(), or NULL. */
struct pya_heap *pya_torch_heap(void);
/* Exported, but calls from this library go directly to it. */
#define PYA_TORCH_EXPORT __attribute__((visibility("protected")))
/* torch's entry points for memory, which it finds by name.  alloc throws torch's own exceptions. */
PYA_TORCH_EXPORT void *pya_torch_alloc(size_t bytes, int device, void *stream);
PYA_TORCH_EXPORT void pya_torch_free(void *ptr, size_t bytes, int device, void *stream);
/* The same at this address, or throws a RuntimeError. */
void *pya_torch_alloc_at(size_t bytes, int device, void *stream, void *ptr);
/* Like pya_torch_free(), but returns the status; never throws. */
pya_status pya_torch_give_back(void *ptr);
/* Drops an exception that a filter threw while no request was waiting for it: the thread's next request would rethrow it. */
void pya_torch_forget_filter_error(void);
/* Records that the stream uses the block too; throws on failure. */
void pya_torch_record(void *ptr, pya_stream stream);
/* Throws torch's OutOfMemoryError, or a RuntimeError, with this text. */
[[noreturn]] void pya_torch_throw_text(const char *text, bool is_oom);
/* Remembers torch's current allocator, for pya_torch_restore_allocator(). */
void pya_torch_remember_allocator(void);
bool pya_torch_slot_feature(size_t index, const char **name, bool *works, const char **detail);

#ifdef __cplusplus
}

/* torch's own allocator, and its current one; NULL before pyalloc was registered or if not found. */
void *pya_torch_native_allocator(void);
void *pya_torch_current_allocator(void);
/* The entry in object's vtable at the slot of the wrapper's method, or `after` slots further.  object is of any class of
 * torch's allocators.  NULL: the wrapper does not have the method. */
void *pya_torch_virtual(void *object, const char *method, size_t after = 0);
/* Symbol names that differ between versions of torch. */
const char *pya_torch_record_history_name(void);
const char *pya_torch_snapshot_name(void);
#endif

#define PYA_TORCH_WRAPPER "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
#define PYA_TORCH_METHOD(rest) "_Z" PYA_TORCH_WRAPPER rest
