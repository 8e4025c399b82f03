/* A layout: where the requests of a program are to lie, worked out beforehand from a recording of it.  Floor 1.
 *
 * Users know it as a plan (`pyalloc plan`).  It serves a device's first stream, in the default pool. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most requests of each kind, below PYA_REPEAT_FROM and from there on: what repeat.h remembers, less its two ends. */
#ifdef PYA_TEST_TINY
enum { PYA_LAYOUT_MOST = 500 };
#else
enum { PYA_LAYOUT_MOST = 16000 };
#endif

/* Smaller requests fit in anywhere, and tell little about where the program is. */
enum { PYA_REPEAT_FROM = 64 << 10 };

#define PYA_LAYOUT_ANYWHERE UINT64_MAX

enum { PYA_LAYOUT_EVERY_DEVICE = -1 };

struct pya_layout_place {
    uint64_t
        offset; /* from the beginning of the layout, in steps of PYA_ALIGN; PYA_LAYOUT_ANYWHERE: none is foreseen */
    uint64_t bytes; /* of the request, rounded to PYA_ALIGN */
    uint64_t
        life; /* requests from PYA_REPEAT_FROM on between it, if it is one, and its free; 0: it stays */
};

struct pya_layout {
    const struct pya_layout_place *places; /* in the order of the requests */
    size_t n;
    /* So many at the end come again and again; 0: none do.  The first of them should be a large one: small ones are found by
     * the large one before them. */
    size_t n_period;
    int device;                    /* whose requests; PYA_LAYOUT_EVERY_DEVICE */
    const struct pya_layout *next; /* of another device; NULL: this is the last one */
};

/* Bytes from the beginning to the end of the last place; false: a place cannot be, or there are too many. */
bool pya_layout_measure(const struct pya_layout *layout, size_t *bytes);

/* Can all of them be? */
bool pya_layouts_are_sound(const struct pya_layout *first);

/* The first one that is for this device; NULL: none is. */
const struct pya_layout *pya_layout_of(const struct pya_layout *first, int device);

#ifdef __cplusplus
}
#endif
