#include "copy.h"

#include "bytes.h"

/* Submits work; *captured: it became a graph node. */
static int
copy_submit(const void *handle, const struct pya_hc_action *action, bool waits, bool *captured) {
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    int error = stream == NULL ? CU_INVALID_HANDLE : CU_OK;
    if (error == CU_OK && waits) {
        error = pya_hc_capture_unsafe_stream_locked(stream);
    }
    if (error == CU_OK) {
        error = pya_hc_submit_locked(stream, action, captured);
    }
    if (error == CU_OK && waits) {
        stream->done = stream->ticket;
    }
    pya_hc_unlock();
    return error;
}

/* The stream's device does the work, so it must have access to both sides if they are on different devices. */
static int
copy_reach(const void *dst, const void *src, size_t size, const void *handle) {
    pya_hc_lock();
    const struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    bool is_open =
        stream == NULL || (pya_hc_is_open_to_locked((uintptr_t)dst, size, true, stream->device) &&
                           pya_hc_is_open_to_locked((uintptr_t)src, size, false, stream->device));
    pya_hc_unlock();
    return is_open ? CU_OK : CU_INVALID_VALUE;
}

static int
copy_direction(const void *dst, const void *src, size_t size, int *kind, const void *stream) {
    int dst_device;
    int src_device;
    int error = pya_hc_bytes_sides(dst, src, size, &dst_device, &src_device);
    if (error != CU_OK) {
        return error;
    }
    int actual = dst_device < 0 ? (src_device < 0 ? COPY_H2H : COPY_D2H)
                                : (src_device < 0 ? COPY_H2D : COPY_D2D);
    if (*kind < COPY_H2H || *kind > COPY_PEER) {
        return CU_INVALID_MEMCPY_DIRECTION;
    }
    if (actual == COPY_D2D && dst_device != src_device && *kind != COPY_PEER) {
        error = copy_reach(dst, src, size, stream);
        if (error != CU_OK) {
            return error;
        }
    }
    /* Pinned memory may be called host or device, so the only error is calling ordinary host memory "device". */
    bool src_named_device = *kind == COPY_D2H || *kind == COPY_D2D;
    bool dst_named_device = *kind == COPY_H2D || *kind == COPY_D2D;
    pya_hc_lock();
    bool src_known = pya_hc_region_at_locked((uintptr_t)src) != NULL;
    bool dst_known = pya_hc_region_at_locked((uintptr_t)dst) != NULL;
    pya_hc_unlock();
    if ((src_named_device && !src_known) || (dst_named_device && !dst_known)) {
        return CU_INVALID_VALUE;
    }
    *kind = actual;
    return CU_OK;
}

/* Six parameters, as in CUDA's own call. */
int /* NOLINTNEXTLINE(readability-function-size) */
pya_hc_copy(void *dst, const void *src, size_t size, int kind, const void *stream, bool waits) {
    if (size == 0) {
        return CU_OK;
    }
    if (dst == NULL || src == NULL) {
        return CU_INVALID_VALUE;
    }
    int error = copy_direction(dst, src, size, &kind, stream);
    if (error != CU_OK) {
        return error;
    }
    struct pya_hc_action action = {
        .type = NODE_MEMCPY, .dst = dst, .src = src, .size = size, .value = kind};
    bool captured = false;
    error = copy_submit(stream, &action, waits, &captured);
    if (error != CU_OK || captured) {
        return error;
    }
    if (kind == COPY_D2H) {
        pya_hc_bytes_note_dtoh(size);
    }
    return pya_hc_bytes_copy(dst, src, size);
}

int
pya_hc_copy2d(const struct pya_hc_copy2d *copy, int kind, const void *stream, bool waits) {
    if (copy->width > copy->dst_pitch || copy->width > copy->src_pitch) {
        return CU_INVALID_VALUE;
    }
    for (size_t row = 0; row < copy->height; row++) {
        int error = pya_hc_copy(
            (char *)copy->dst + row * copy->dst_pitch,
            (const char *)copy->src + row * copy->src_pitch, copy->width, kind, stream, waits);
        if (error != CU_OK) {
            return error;
        }
    }
    return CU_OK;
}

int /* NOLINTNEXTLINE(readability-function-size) */
pya_hc_fill(void *dst, int value, unsigned width, size_t count, const void *stream, bool waits) {
    struct pya_hc_action action = {
        .type = NODE_MEMSET, .dst = dst, .value = value, .size = count << 3 | width};
    bool captured = false;
    int error = copy_submit(stream, &action, waits, &captured);
    if (error != CU_OK || captured) {
        return error;
    }
    return pya_hc_bytes_set(dst, value, width, count);
}

int
pya_hc_launch(const void *stream) {
    struct pya_hc_action action = {.type = NODE_KERNEL};
    bool captured = false;
    return copy_submit(stream, &action, false, &captured);
}

int
pya_hc_host_function(const void *stream, pya_hc_host_fn fn, void *data) {
    if (fn == NULL) {
        return CU_INVALID_VALUE;
    }
    struct pya_hc_action action = {.type = NODE_HOST, .fn = fn, .data = data};
    bool captured = false;
    int error = copy_submit(stream, &action, false, &captured);
    if (error == CU_OK && !captured) {
        fn(data);
    }
    return error;
}
