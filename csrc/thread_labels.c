/* Labels are not freed when their thread ends: a few bytes each.  Floor 1. */
#include "thread_labels.h"

#include <stdlib.h>
#include <string.h>

struct context {
    struct context *outer;
    char text[];
};

static _Thread_local struct pya_text *metadata; /* owned; NULL: none */
static _Thread_local struct context *innermost;
static _Thread_local unsigned n_lost; /* pushes without host memory, on top of innermost */

struct pya_text *
pya_text_copy(const char *bytes, size_t n_bytes) {
    struct pya_text *text = n_bytes == 0 ? NULL : malloc(sizeof *text + n_bytes + 1);
    if (text != NULL) {
        text->n_bytes = n_bytes;
        memcpy(text->bytes, bytes, n_bytes);
        text->bytes[n_bytes] = '\0';
    }
    return text;
}

bool
pya_thread_set_metadata(const char *bytes, size_t n_bytes) {
    struct pya_text *copy = pya_text_copy(bytes, n_bytes);
    if (copy == NULL && n_bytes > 0) {
        return false;
    }
    free(metadata);
    metadata = copy;
    return true;
}

const struct pya_text *
pya_thread_metadata(void) {
    return metadata;
}

void
pya_thread_push_compile_context(const char *text) {
    const size_t bytes = strlen(text) + 1;
    struct context *context = n_lost > 0 ? NULL : malloc(sizeof *context + bytes);
    if (context == NULL) {
        n_lost++;
        return;
    }
    memcpy(context->text, text, bytes);
    context->outer = innermost;
    innermost = context;
}

void
pya_thread_pop_compile_context(void) {
    if (n_lost > 0) {
        n_lost--;
    } else if (innermost != NULL) {
        struct context *context = innermost;
        innermost = context->outer;
        free(context);
    }
}

const char *
pya_thread_compile_context(void) {
    return innermost == NULL ? NULL : innermost->text;
}
