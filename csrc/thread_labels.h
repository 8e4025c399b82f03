/* Texts that a thread attaches to its allocations from now on.  Floor 1. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The bytes may be anything, zeros included; a terminating 0 follows the last. */
struct pya_text {
    size_t n_bytes; /* at least 1 */
    char bytes[];
};
/* For free().  NULL if n_bytes is 0 or host memory is out. */
struct pya_text *pya_text_copy(const char *bytes, size_t n_bytes);

/* Sets the user's metadata; false if host memory is out. */
bool pya_thread_set_metadata(const char *bytes, size_t n_bytes);
/* NULL: none.  Valid until the thread sets another. */
const struct pya_text *pya_thread_metadata(void);

/* A stack of what is being compiled.  A push without host memory still needs its pop; the text below it stays visible. */
void pya_thread_push_compile_context(const char *text);
void pya_thread_pop_compile_context(void);
/* The innermost text; NULL if nothing is being compiled. */
const char *pya_thread_compile_context(void);

#ifdef __cplusplus
}
#endif
