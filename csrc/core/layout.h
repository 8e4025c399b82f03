/* A layout: where a program's requests will lie, computed in advance from a recording of it.  Floor 1.
 *
 * Users know it as a plan (`pyalloc plan`).  It applies to a device's first stream, in the default pool. */
#pragma once

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limit for the requests of each kind, below PYA_REPEAT_FROM and from there on: what repeat.h remembers, minus both
 * ends. */
#ifdef PYA_TEST_TINY
enum { PYA_LAYOUT_MOST = 500 };
#else
enum { PYA_LAYOUT_MOST = 16000 };
#endif

/* Smaller requests fit anywhere and say little about where the program is. */
enum { PYA_REPEAT_FROM = 64 << 10 };

#define PYA_LAYOUT_ANYWHERE UINT64_MAX

enum { PYA_LAYOUT_EVERY_DEVICE = -1 };

struct pya_layout_place {
    uint64_t offset; /* in bytes from the layout's start, aligned; or PYA_LAYOUT_ANYWHERE */
    uint64_t bytes;  /* of the request, rounded to PYA_ALIGN */
    uint64_t life;   /* large requests from it, itself included, to its free; 0: it stays */
};

struct pya_layout {
    const struct pya_layout_place *places; /* in the order of the requests */
    size_t n;
    /* The last n_period requests repeat; 0: none do.  The first of them should be a large one, because small requests
     * are found by the large request before them. */
    size_t n_period;
    int device;                    /* that made the requests; or PYA_LAYOUT_EVERY_DEVICE */
    const struct pya_layout *next; /* for another device; NULL: this is the last one */
};

/* Sets *bytes to the length of the layout, up to the end of its last place.  False: a place is invalid, or there are
 * too many. */
bool pya_layout_measure(const struct pya_layout *layout, size_t *bytes);

/* Is every layout of the list valid? */
bool pya_layouts_are_sound(const struct pya_layout *first);

/* The first layout for this device; NULL: there is none. */
const struct pya_layout *pya_layout_of(const struct pya_layout *first, int device);

#ifdef __cplusplus
}
#endif
