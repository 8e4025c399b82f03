/* Texts that a thread attaches to what it allocates from now on.  Floor 1. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a program says may be any bytes, zeros too; one more follows the last. */
struct pya_text {
    size_t n_bytes; /* at least 1 */
    char bytes[];
};
/* For free(); NULL without host memory, and for no bytes. */
struct pya_text *pya_text_copy(const char *bytes, size_t n_bytes);

/* The user's metadata; false when there is no host memory for it. */
bool pya_thread_set_metadata(const char *bytes, size_t n_bytes);
/* NULL: none; valid until the thread sets another. */
const struct pya_text *pya_thread_metadata(void);

/* What is being compiled, innermost last; a push that finds no host memory counts, and shows the text before it. */
void pya_thread_push_compile_context(const char *text);
void pya_thread_pop_compile_context(void);
/* NULL outside of any. */
const char *pya_thread_compile_context(void);

#ifdef __cplusplus
}
#endif
