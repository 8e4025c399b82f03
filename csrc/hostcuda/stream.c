#define _GNU_SOURCE
#include "stream.h"

#include "capture.h"

#include <stdlib.h>
#include <time.h>

static struct pya_hc_objects streams = {.object_bytes = sizeof(struct pya_hc_stream)};
static struct pya_hc_objects events = {.object_bytes = sizeof(struct pya_hc_event)};
static uint64_t last_stream_id;
static uint64_t n_stale;
static void (*after_sync)(void);

static struct pya_hc_stream *
stream_new_locked(int device, unsigned flags, int priority) {
    struct pya_hc_stream *stream = pya_hc_objects_get(&streams);
    if (stream != NULL) {
        stream->id = ++last_stream_id;
        stream->device = device;
        stream->flags = flags;
        /* Hopper's range: 0 is the lowest priority, -5 the highest. */
        stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    }
    return stream;
}

int
pya_hc_stream_create(unsigned flags, int priority, void **out) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    if (out == NULL || flags > STREAM_NON_BLOCKING) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct pya_hc_stream *stream = stream_new_locked(dev->ordinal, flags, priority);
    pya_hc_unlock();
    if (stream == NULL) {
        return CU_OUT_OF_MEMORY;
    }
    *out = stream;
    return CU_OK;
}

struct pya_hc_stream *
pya_hc_stream_find_locked(const void *handle) {
    if ((uintptr_t)handle > 2) {
        bool is_there = pya_hc_objects_has(&streams, handle);
        n_stale += !is_there;
        return is_there ? (struct pya_hc_stream *)(uintptr_t)handle : NULL;
    }
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return NULL;
    }
    bool is_legacy = (uintptr_t)handle < 2;
    struct pya_hc_stream **slot = &dev->streams[is_legacy ? 0 : 1];
    if (*slot == NULL) {
        *slot = stream_new_locked(dev->ordinal, 0, 0);
        if (*slot != NULL) {
            (*slot)->is_legacy = is_legacy;
            streams.n_live--; /* default streams are not the program's, so they are no leak */
        }
    }
    return *slot;
}

static void
stream_end_locked(struct pya_hc_stream *stream) {
    stream->id = 0; /* so that events recorded in it do not mistake the slot's next stream for it */
    pya_hc_objects_put(&streams, stream);
}

int
pya_hc_stream_destroy(void *handle) {
    int error = CU_INVALID_HANDLE;
    pya_hc_lock();
    struct pya_hc_stream *stream = (uintptr_t)handle > 2 ? pya_hc_stream_find_locked(handle) : NULL;
    if (stream != NULL && stream->capture != NULL) {
        error = pya_hc_capture_unsafe_stream_locked(stream);
    } else if (stream != NULL) {
        stream_end_locked(stream);
        error = CU_OK;
    }
    pya_hc_unlock();
    return error;
}

void
pya_hc_stream_work_locked(struct pya_hc_stream *stream, bool is_kernel) {
    struct pya_hc_device *dev = pya_hc_device(stream->device);
    if (is_kernel) {
        dev->n_launches++;
    }
    stream->ticket++;
    stream->last_launch = dev->n_launches;
}

/* Have event_delay more launches followed `launch`? */
static bool
stream_delay_passed(int device, uint64_t launch) {
    uint64_t delay = pya_hc_event_delay();
    const struct pya_hc_device *dev = pya_hc_device(device);
    return delay == 0 || dev == NULL || dev->n_launches - launch >= delay;
}

struct pya_hc_mark
pya_hc_mark_locked(struct pya_hc_stream *stream) {
    return (struct pya_hc_mark){
        .stream = stream,
        .stream_id = stream->id,
        .ticket = stream->ticket,
        .launch = stream->last_launch,
        .n_syncs = pya_hc_device(stream->device)->n_syncs,
        .device = stream->device,
    };
}

bool
pya_hc_mark_is_waited_locked(const struct pya_hc_mark *mark) {
    return mark->is_waited || mark->n_syncs < pya_hc_device(mark->device)->n_syncs ||
           (mark->stream->id == mark->stream_id && mark->stream->done >= mark->ticket);
}

bool
pya_hc_mark_is_done_locked(const struct pya_hc_mark *mark) {
    return stream_delay_passed(mark->device, mark->launch) || pya_hc_mark_is_waited_locked(mark);
}

bool
pya_hc_mark_is_before_locked(const struct pya_hc_mark *mark, const struct pya_hc_stream *stream) {
    bool is_before = mark->stream_id == stream->id;
    for (int i = 0; i < PYA_HC_MOST_WAITED && !is_before; i++) {
        const struct pya_hc_waited *waited = &stream->waited[i];
        is_before = waited->stream_id == mark->stream_id && waited->ticket >= mark->ticket;
    }
    return is_before;
}

void
pya_hc_after_sync_locked(void (*call)(void)) {
    after_sync = call;
}

static void
sync_note_locked(void) {
    if (after_sync != NULL) {
        after_sync();
    }
}

int
pya_hc_stream_sync(const void *handle) {
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    int error = stream == NULL ? CU_INVALID_HANDLE : pya_hc_capture_unsafe_stream_locked(stream);
    if (error == CU_OK) {
        stream->done = stream->ticket;
        sync_note_locked();
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_stream_query(const void *handle) {
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(handle);
    int error = stream == NULL ? CU_INVALID_HANDLE : pya_hc_capture_unsafe_stream_locked(stream);
    if (error == CU_OK && stream->done != stream->ticket &&
        !stream_delay_passed(stream->device, stream->last_launch)) {
        error = CU_NOT_READY;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_device_sync(void) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    pya_hc_lock();
    int error = pya_hc_capture_unsafe_device_locked(dev->ordinal);
    dev->n_syncs += error == CU_OK; /* also completes the work of destroyed streams */
    size_t cursor = 0;
    struct pya_hc_stream *stream = pya_hc_objects_next(&streams, &cursor);
    while (error == CU_OK && stream != NULL) {
        if (stream->device == dev->ordinal) {
            stream->done = stream->ticket;
        }
        stream = pya_hc_objects_next(&streams, &cursor);
    }
    if (error == CU_OK) {
        sync_note_locked();
    }
    pya_hc_unlock();
    return error;
}

static struct pya_hc_event *
event_find_locked(const void *handle) {
    return pya_hc_objects_has(&events, handle) ? (struct pya_hc_event *)(uintptr_t)handle : NULL;
}

int
pya_hc_event_create(unsigned flags, void **out) {
    struct pya_hc_device *dev = pya_hc_current_device();
    if (dev == NULL) {
        return CU_NO_DEVICE;
    }
    if (out == NULL) {
        return CU_INVALID_VALUE;
    }
    pya_hc_lock();
    struct pya_hc_event *event = pya_hc_objects_get(&events);
    if (event != NULL) {
        event->flags = flags;
        event->device = dev->ordinal;
        *out = event;
    }
    pya_hc_unlock();
    return event == NULL ? CU_OUT_OF_MEMORY : CU_OK;
}

static void
event_end_locked(struct pya_hc_event *event) {
    free(event->deps);
    pya_hc_objects_put(&events, event);
}

int
pya_hc_event_destroy(void *handle) {
    pya_hc_lock();
    struct pya_hc_event *event = event_find_locked(handle);
    if (event != NULL) {
        event_end_locked(event);
    }
    pya_hc_unlock();
    return event == NULL ? CU_INVALID_HANDLE : CU_OK;
}

static uint64_t
event_now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int
pya_hc_event_record(void *handle, const void *stream_handle) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_event *event = event_find_locked(handle);
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    if (event == NULL || stream == NULL || event->device != stream->device) {
        error = CU_INVALID_HANDLE;
    } else if (stream->capture != NULL) {
        error = pya_hc_capture_record_locked(stream, event);
    } else if ((error = pya_hc_capture_implicit_locked(stream)) == CU_OK) {
        pya_hc_stream_work_locked(stream, false);
        event->is_recorded = true;
        event->capture_id = 0;
        event->mark = pya_hc_mark_locked(stream);
        event->time_ns = event_now_ns();
    }
    pya_hc_unlock();
    return error;
}

static bool
event_is_done(const struct pya_hc_event *event) {
    return !event->is_recorded || pya_hc_mark_is_done_locked(&event->mark);
}

/* Finds an event that the host queries or waits for.  A captured event is refused, and its capture ends, in any mode. */
static int
event_for_host_locked(const void *handle, struct pya_hc_event **out) {
    *out = event_find_locked(handle);
    if (*out == NULL) {
        return CU_INVALID_HANDLE;
    }
    if ((*out)->capture_id != 0) {
        pya_hc_capture_spoil_locked((*out)->capture_id);
        return CU_CAPTURED_EVENT;
    }
    return CU_OK;
}

int
pya_hc_event_query(const void *handle) {
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    pya_hc_lock();
    struct pya_hc_event *event;
    error = event_for_host_locked(handle, &event);
    if (error == CU_OK && !event_is_done(event)) {
        error = CU_NOT_READY;
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_event_sync(const void *handle) {
    int error = pya_hc_capture_unsafe();
    if (error != CU_OK) {
        return error;
    }
    pya_hc_lock();
    struct pya_hc_event *event;
    error = event_for_host_locked(handle, &event);
    if (error == CU_OK && event->is_recorded) {
        struct pya_hc_mark *mark = &event->mark;
        if (mark->stream->id == mark->stream_id && mark->stream->done < mark->ticket) {
            mark->stream->done = mark->ticket;
        }
        mark->is_waited = true; /* whatever happens to its stream */
        sync_note_locked();
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_event_elapsed(float *ms, const void *start_handle, const void *end_handle) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_event *start = event_find_locked(start_handle);
    struct pya_hc_event *end = event_find_locked(end_handle);
    if (ms == NULL) {
        error = CU_INVALID_VALUE;
    } else if (
        start == NULL || end == NULL || !start->is_recorded || !end->is_recorded ||
        ((start->flags | end->flags) & EVENT_DISABLE_TIMING) != 0) {
        error = CU_INVALID_HANDLE;
    } else if (start->capture_id != 0 || end->capture_id != 0) {
        error = CU_CAPTURED_EVENT;
    } else if (!event_is_done(start) || !event_is_done(end)) {
        error = CU_NOT_READY;
    } else {
        *ms = (float)((double)(int64_t)(end->time_ns - start->time_ns) / 1e6);
    }
    pya_hc_unlock();
    return error;
}

int
pya_hc_stream_wait(const void *stream_handle, const void *event_handle) {
    int error = CU_OK;
    pya_hc_lock();
    struct pya_hc_stream *stream = pya_hc_stream_find_locked(stream_handle);
    struct pya_hc_event *event = event_find_locked(event_handle);
    if (stream == NULL || event == NULL) {
        error = CU_INVALID_HANDLE;
    } else if (event->capture_id != 0 || stream->capture != NULL) {
        error = pya_hc_capture_wait_locked(stream, event);
    } else if (event->is_recorded && (error = pya_hc_capture_implicit_locked(stream)) == CU_OK) {
        pya_hc_stream_work_locked(stream, false);
        stream->waited[stream->next_waited++ % PYA_HC_MOST_WAITED] =
            (struct pya_hc_waited){event->mark.stream_id, event->mark.ticket};
    }
    pya_hc_unlock();
    return error;
}

void
pya_hc_stream_reset_locked(int device) {
    const struct pya_hc_device *dev = pya_hc_device(device);
    size_t cursor = 0;
    struct pya_hc_stream *stream = pya_hc_objects_next(&streams, &cursor);
    for (; stream != NULL; stream = pya_hc_objects_next(&streams, &cursor)) {
        bool is_default = stream == dev->streams[0] || stream == dev->streams[1];
        if (stream->device == device && !is_default) {
            stream_end_locked(stream);
        }
    }
    cursor = 0;
    struct pya_hc_event *event = pya_hc_objects_next(&events, &cursor);
    for (; event != NULL; event = pya_hc_objects_next(&events, &cursor)) {
        if (event->device == device) {
            event_end_locked(event);
        }
    }
}

uint64_t
pya_hc_stream_stale_locked(void) {
    return n_stale;
}

uint64_t
pya_hc_stream_count_locked(void) {
    return streams.n_live;
}

uint64_t
pya_hc_event_count_locked(void) {
    return events.n_live;
}
