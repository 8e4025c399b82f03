/* Views of float32 tensors on the CPU as the arguments of scaled attention's kernels.  Floor 7. */
#pragma once

#include <limits.h>
#include <stdbool.h>

#include "module_dlpack.h"
#include "ops/ops.h"

enum { VIEW_DIMS = 4 };

static inline bool
view_is_on_cpu(const struct pya_dlpack_view *view, int kind, int bits) {
    return view->device_kind == PYA_DLPACK_CPU && view->dtype_kind == kind &&
           view->dtype_bits == bits;
}

/* The sizes of one with four dimensions; false: it is another, or empty. */
static inline bool
view_sizes(const struct pya_dlpack_view *view, long long n[VIEW_DIMS]) {
    if (view->n_dims != VIEW_DIMS || !view_is_on_cpu(view, PYA_DLPACK_FLOAT, 32)) {
        return false;
    }
    for (int i = 0; i < VIEW_DIMS; i++) {
        n[i] = view->shape[i];
        if (n[i] <= 0 || n[i] >= INT_MAX) {
            return false;
        }
    }
    return view->strides != NULL;
}

static inline void *
view_data(const struct pya_dlpack_view *view) {
    return (char *)view->data + view->byte_offset;
}

static inline struct pya_ops_heads
view_heads(const struct pya_dlpack_view *view) {
    const int64_t *step = view->strides;
    return (struct pya_ops_heads){view_data(view), step[0], step[1], step[2]};
}

/* A bias or mask; false: it does not broadcast to these sizes. */
static inline bool
view_scores(
    const struct pya_dlpack_view *view, const long long n[VIEW_DIMS], struct pya_ops_scores *x) {
    int64_t *const steps[VIEW_DIMS] = {&x->b, &x->h, &x->q, &x->k};
    const int first = VIEW_DIMS - view->n_dims;
    if (first < 0 || (view->n_dims > 0 && view->strides == NULL)) {
        return false;
    }
    for (int i = 0; i < view->n_dims; i++) {
        if (view->shape[i] != 1 && view->shape[i] != n[first + i]) {
            return false;
        }
        *steps[first + i] = view->shape[i] == 1 ? 0 : view->strides[i];
    }
    x->p = view_data(view);
    return true;
}
