/* One statistic of a heap by its name, for tests. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/heap.h"

/* An unknown key ends the program: then the test itself is wrong. */
static inline int64_t
stat_of(struct pya_heap *heap, int device, const char *key) {
    int64_t values[PYA_N_STATS];
    pya_status st = pya_stats_get(heap, device, values);
    for (size_t i = 0; st == PYA_OK && i < PYA_N_STATS; i++) {
        if (strcmp(pya_stat_key(i), key) == 0) {
            return values[i];
        }
    }
    fprintf(stderr, "%s of device %d: %s\n", key, device, pya_status_text(st));
    abort();
}
