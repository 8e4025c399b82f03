/* Reads and writes numbers with a decimal point, whatever the program's locale uses.  Floor 1. */
#pragma once

#include <locale.h>

struct pya_numerals {
    locale_t plain, before;
};

/* Applies to this thread until pya_numerals_end(). */
static inline struct pya_numerals
pya_numerals_begin(void) {
    struct pya_numerals numerals = {newlocale(LC_ALL_MASK, "C", (locale_t)0), (locale_t)0};
    if (numerals.plain != (locale_t)0) {
        numerals.before = uselocale(numerals.plain);
    }
    return numerals;
}

static inline void
pya_numerals_end(struct pya_numerals numerals) {
    if (numerals.plain != (locale_t)0) {
        (void)uselocale(numerals.before);
        freelocale(numerals.plain);
    }
}
