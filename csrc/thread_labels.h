/* Texts that a thread attaches to what it allocates from now on.  Floor 1. */
#pragma once

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The user's metadata; false when there is no host memory for it. */
bool pya_thread_set_metadata(const char *text);
/* Never NULL; valid until the thread sets another. */
const char *pya_thread_metadata(void);

/* What is being compiled, innermost last; a push that finds no host memory counts, and shows the text before it. */
void pya_thread_push_compile_context(const char *text);
void pya_thread_pop_compile_context(void);
/* NULL outside of any. */
const char *pya_thread_compile_context(void);

#ifdef __cplusplus
}
#endif
