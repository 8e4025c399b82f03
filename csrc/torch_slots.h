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
/* What torch calls for memory (exported; torch finds them by name).  alloc throws torch's own exceptions. */
__attribute__((visibility("default"))) void *
pya_torch_alloc(size_t bytes, int device, void *stream);
__attribute__((visibility("default"))) void
pya_torch_free(void *ptr, size_t bytes, int device, void *stream);
/* The free behind it, with what came of it; never throws. */
pya_status pya_torch_give_back(void *ptr);
/* Remembers which allocator torch uses now, so that pya_torch_restore_allocator() can put it back. */
void pya_torch_remember_allocator(void);
bool pya_torch_slot_feature(size_t index, const char **name, bool *works, const char **detail);

#ifdef __cplusplus
}
#endif
