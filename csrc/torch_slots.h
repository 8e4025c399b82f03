/* Virtual methods of torch's wrapper object that we answer ourselves.  Floor 5. */
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
/* Exported, and yet called directly from here. */
#define PYA_TORCH_EXPORT __attribute__((visibility("protected")))
/* What torch calls for memory; it finds them by name.  alloc throws torch's own exceptions. */
PYA_TORCH_EXPORT void *pya_torch_alloc(size_t bytes, int device, void *stream);
PYA_TORCH_EXPORT void pya_torch_free(void *ptr, size_t bytes, int device, void *stream);
/* The free behind it, with what came of it; never throws. */
pya_status pya_torch_give_back(void *ptr);
/* What a filter threw when no request asked it is nobody's: the thread's next request would raise it. */
void pya_torch_forget_filter_error(void);
/* The block is in use on the stream too; throws. */
void pya_torch_record(void *ptr, pya_stream stream);
/* Throws torch's out of memory, or a RuntimeError, with this text. */
[[noreturn]] void pya_torch_throw_text(const char *text, bool is_oom);
/* Remembers which allocator torch uses now, so that pya_torch_restore_allocator() can put it back. */
void pya_torch_remember_allocator(void);
bool pya_torch_slot_feature(size_t index, const char **name, bool *works, const char **detail);

#ifdef __cplusplus
}

/* torch's own allocator, and the one it uses now; NULL before pyalloc was registered, or where not found. */
void *pya_torch_native_allocator(void);
void *pya_torch_current_allocator(void);
/* What an object of any class of torch's allocators has where the wrapper has this method, or `after` further; NULL: the
 * wrapper does not have it. */
void *pya_torch_virtual(void *object, const char *method, size_t after = 0);
/* Names that differ between versions of torch. */
const char *pya_torch_record_history_name(void);
const char *pya_torch_snapshot_name(void);
#endif

#define PYA_TORCH_WRAPPER "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
#define PYA_TORCH_METHOD(rest) "_Z" PYA_TORCH_WRAPPER rest
