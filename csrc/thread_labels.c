/* Labels live as long as their thread, and are lost with it: a few bytes.  Floor 1. */
#include "thread_labels.h"

#include <stdlib.h>
#include <string.h>

struct context {
    struct context *outer;
    char text[];
};

static _Thread_local char *metadata; /* owned; NULL is "" */
static _Thread_local struct context *innermost;
static _Thread_local unsigned n_lost; /* pushes without memory, above innermost */

bool
pya_thread_set_metadata(const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, text, bytes);
    free(metadata);
    metadata = copy;
    return true;
}

const char *
pya_thread_metadata(void) {
    return metadata == NULL ? "" : metadata;
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
