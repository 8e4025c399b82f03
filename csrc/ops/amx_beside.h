#pragma once
/* Vector work beside products by tiles.  Floor 0. */
#include <stddef.h>

/* Work for the vector units in small steps, spread among the instructions for tiles.  The tiles' unit is busy for 16 cycles
 * with each of those, and the processor looks ahead over few of them only. */
struct amx_beside {
    void (*step)(void *of);
    void *of;
    ptrdiff_t n; /* steps left */
    int rate;    /* steps per group of products, in 1 / AMX_RATE */
    int due;     /* likewise */
};
enum { AMX_RATE = 256 };

static inline __attribute__((always_inline)) void
amx_step(struct amx_beside *beside) {
    for (beside->due += beside->rate; beside->due >= AMX_RATE && beside->n > 0;
         beside->due -= AMX_RATE) {
        beside->n--;
        beside->step(beside->of);
    }
}

static inline void
amx_finish(struct amx_beside *beside) {
    for (; beside->n > 0; beside->n--) {
        beside->step(beside->of);
    }
}

/* Spreads n steps over so many groups. */
static inline struct amx_beside
amx_spread(void (*step)(void *of), void *of, ptrdiff_t n, ptrdiff_t groups) {
    const ptrdiff_t rate = groups > 0 ? (n * AMX_RATE + groups - 1) / groups : 0;
    return (struct amx_beside){step, of, n, (int)rate, 0};
}
