/* The clock of the benchmarks. */
#pragma once

#include <time.h>

static inline double
now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}
