/* Virtual methods of torch's wrapper object that we answer ourselves.  Floor 5. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct pya_heap;

/* The heap set by pya_torch_attach(), or NULL. */
struct pya_heap *pya_torch_heap(void);
/* Remembers which allocator torch uses now, so that pya_torch_restore_allocator() can put it back. */
void pya_torch_remember_allocator(void);
bool pya_torch_slot_feature(size_t index, const char **name, bool *works, const char **detail);

#ifdef __cplusplus
}
#endif
