/* Status texts and the one place that may abort (a failed assertion in a debug build).  Floor 0. */
#include "base.h"

#include "debug.h"

#if PYA_ASSERT_LEVEL >= 1
#include <stdio.h>
#include <stdlib.h>

void
pya_assert_failed(const char *text, const char *file, int line) {
    (void)fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, text);
    abort();
}
#endif

#if PYA_ASSERT_LEVEL >= 2
_Thread_local unsigned long pya_debug_steps;
#endif

const char *
pya_status_text(pya_status status) {
    switch (status) {
#define X(name, value, text)                                                                       \
    case PYA_##name:                                                                               \
        return text;
        PYA_STATUS_TABLE(X)
#undef X
    }
    return "unknown status";
}
