#pragma once
/* Copies, fills, kernels and host functions as streams see them.  Floor 5 (uses graph.h, bytes.h). */

#include "graph.h"

/* kind: COPY_*.  `waits`: a synchronous form, which a capture forbids. */
int pya_hc_copy(void *dst, const void *src, size_t size, int kind, const void *stream, bool waits);
struct pya_hc_copy2d {
    void *dst;
    size_t dst_pitch;
    const void *src;
    size_t src_pitch, width, height;
};
int pya_hc_copy2d(const struct pya_hc_copy2d *copy, int kind, const void *stream, bool waits);
int pya_hc_fill(void *dst, int value, unsigned width, size_t count, const void *stream, bool waits);
/* A kernel launch: counted, does nothing. */
int pya_hc_launch(const void *stream);
int pya_hc_host_function(const void *stream, pya_hc_host_fn fn, void *data);
