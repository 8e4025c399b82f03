/* Work of the simulated device: streams, events, what unfinished work touches, and the shadow of live blocks. */
#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* ---- streams ---- */

/* The stream's index; UINT32_MAX: no host memory. */
static uint32_t
work_stream(struct pya_sim *sim, pya_stream id) {
    const uint64_t hash = id * UINT64_C(0x9E3779B97F4A7C15);
    uint32_t *head = &sim->stream_heads[hash >> (64 - SIM_STREAM_BITS)];
    for (uint32_t at = *head; at != 0; at = sim->streams[at - 1].next) {
        if (sim->streams[at - 1].id == id) {
            return at - 1;
        }
    }
    struct sim_stream *bigger = realloc(sim->streams, (sim->n_streams + 1) * sizeof *bigger);
    if (bigger == NULL) {
        return UINT32_MAX;
    }
    sim->streams = bigger;
    const int device = pya_stream_device(id);
    bigger[sim->n_streams] = (struct sim_stream){
        .id = id, .next = *head, .context = device < 0 ? sim->device.index : device};
    *head = ++sim->n_streams;
    return sim->n_streams - 1;
}

static void
work_finish(struct sim_stream *stream, uint64_t work) {
    stream->n_finished = work > stream->n_finished ? work : stream->n_finished;
}

static bool
work_is_own(const struct pya_sim *sim, const struct sim_stream *stream) {
    return stream->context == sim->device.index;
}

void
sim_finish_own_locked(struct pya_sim *sim) {
    for (uint32_t i = 0; i < sim->n_streams; i++) {
        if (work_is_own(sim, &sim->streams[i])) {
            sim->streams[i].n_finished = sim->streams[i].n_queued;
        }
    }
}

void
pya_sim_finish(struct pya_sim *sim, pya_stream stream) {
    pthread_mutex_lock(&sim->lock);
    for (uint32_t i = 0; i < sim->n_streams; i++) {
        if (sim->streams[i].id == stream) {
            sim->streams[i].n_finished = sim->streams[i].n_queued;
        }
    }
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_finish_all(struct pya_sim *sim) {
    pthread_mutex_lock(&sim->lock);
    for (uint32_t i = 0; i < sim->n_streams; i++) {
        sim->streams[i].n_finished = sim->streams[i].n_queued;
    }
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_set_capturing(struct pya_sim *sim, pya_stream stream, bool on) {
    pthread_mutex_lock(&sim->lock);
    uint32_t i = work_stream(sim, stream);
    if (i != UINT32_MAX) {
        sim->streams[i].is_capturing = on;
    }
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_set_destroyed(struct pya_sim *sim, pya_stream stream, bool on) {
    pthread_mutex_lock(&sim->lock);
    uint32_t i = work_stream(sim, stream);
    if (i != UINT32_MAX) {
        sim->streams[i].is_destroyed = on;
    }
    pthread_mutex_unlock(&sim->lock);
}

void
pya_sim_set_context(struct pya_sim *sim, pya_stream stream, int context) {
    pthread_mutex_lock(&sim->lock);
    uint32_t i = work_stream(sim, stream);
    if (i != UINT32_MAX) {
        sim->streams[i].context = context;
    }
    pthread_mutex_unlock(&sim->lock);
}

static bool
work_any_capturing(const struct pya_sim *sim) {
    for (uint32_t i = 0; i < sim->n_streams; i++) {
        if (sim->streams[i].is_capturing && work_is_own(sim, &sim->streams[i])) {
            return true;
        }
    }
    return false;
}

pya_status
sim_is_capturing(struct pya_device *dev, pya_stream stream, bool *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_IS_CAPTURING);
    uint32_t i = status == PYA_OK ? work_stream(sim, stream) : 0;
    if (i == UINT32_MAX) {
        status = PYA_E_HOST_NOMEM;
    } else if (status == PYA_OK && sim->streams[i].is_destroyed) {
        status = PYA_E_STREAM;
        sim->state.n_stale++;
    }
    if (status == PYA_OK) {
        *out = sim->streams[i].is_capturing;
    }
    return sim_leave(sim, PYA_SIM_IS_CAPTURING, 0, 0, status);
}

pya_status
sim_stream_sync(struct pya_device *dev, pya_stream stream) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_STREAM_SYNC);
    uint32_t i = status == PYA_OK ? work_stream(sim, stream) : 0;
    if (i == UINT32_MAX) {
        status = PYA_E_HOST_NOMEM;
    } else if (status == PYA_OK && sim->streams[i].is_destroyed) {
        status = PYA_E_STREAM;
        sim->state.n_stale++;
    } else if (status == PYA_OK && sim->streams[i].is_capturing) {
        status = PYA_E_CAPTURE;
    }
    if (status == PYA_OK) {
        sim->streams[i].n_finished = sim->streams[i].n_queued;
    }
    return sim_leave(sim, PYA_SIM_STREAM_SYNC, 0, 0, status);
}

pya_status
sim_device_sync(struct pya_device *dev) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_DEVICE_SYNC);
    if (status == PYA_OK && work_any_capturing(sim)) {
        status = PYA_E_CAPTURE;
    }
    if (status == PYA_OK) {
        sim_finish_own_locked(sim);
    }
    return sim_leave(sim, PYA_SIM_DEVICE_SYNC, 0, 0, status);
}

/* ---- events ---- */

static struct sim_event *
work_event(struct pya_sim *sim, pya_event handle) {
    uint32_t slot = (uint32_t)handle - 1;
    if ((uint32_t)handle == 0 || slot >= sim->n_event_slots || !sim->events[slot].is_alive ||
        sim->events[slot].generation != (uint32_t)(handle >> 32)) {
        return NULL;
    }
    return &sim->events[slot];
}

/* The event for a call that has *status so far.  NULL: the call has failed, or the handle is no event; *status
 * tells. */
static struct sim_event *
work_event_for(struct pya_sim *sim, pya_event handle, const char *misuse, pya_status *status) {
    struct sim_event *event = *status == PYA_OK ? work_event(sim, handle) : NULL;
    if (*status == PYA_OK && event == NULL) {
        *status = sim_misuse(sim, misuse, handle);
    }
    return event;
}

static bool
work_event_done(struct pya_sim *sim, const struct sim_event *event) {
    if (event->stream == 0) {
        return true; /* never recorded: CUDA says done */
    }
    struct sim_stream *stream = &sim->streams[event->stream - 1];
    if (sim->config.work == PYA_SIM_WORK_DELAYED &&
        sim->n_records - event->record >= sim->config.work_delay) {
        work_finish(stream, event->work);
    }
    return stream->n_finished >= event->work;
}

pya_status
sim_event_create(struct pya_device *dev, pya_stream stream, pya_event *out) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_EVENT_CREATE);
    uint32_t i = status == PYA_OK ? work_stream(sim, stream) : 0;
    if (i == UINT32_MAX) {
        status = PYA_E_HOST_NOMEM;
    }
    if (status == PYA_OK && sim->free_event == 0) {
        uint32_t old = sim->n_event_slots;
        if (!sim_grow((void **)&sim->events, &sim->n_event_slots, sizeof *sim->events)) {
            status = PYA_E_HOST_NOMEM;
        }
        for (uint32_t slot = sim->n_event_slots; slot-- > old;) {
            sim->events[slot].next_free = sim->free_event;
            sim->free_event = slot + 1;
        }
    }
    if (status == PYA_OK) {
        uint32_t slot = sim->free_event - 1;
        struct sim_event *event = &sim->events[slot];
        sim->free_event = event->next_free;
        event->is_alive = true;
        event->stream = 0;
        event->context = sim->streams[i].context;
        sim->state.n_events++;
        *out = ((uint64_t)event->generation << 32) | (slot + 1);
    }
    return sim_leave(sim, PYA_SIM_EVENT_CREATE, 0, 0, status);
}

static pya_status
work_record_locked(struct pya_sim *sim, pya_event handle, pya_stream id) {
    struct sim_event *event = work_event(sim, handle);
    if (event == NULL) {
        return sim_misuse(sim, "record of an event that is not one", handle);
    }
    uint32_t i = work_stream(sim, id);
    if (i == UINT32_MAX) {
        return PYA_E_HOST_NOMEM;
    }
    struct sim_stream *stream = &sim->streams[i];
    sim->state.n_stale += stream->is_destroyed;
    if (stream->is_capturing || stream->is_destroyed) {
        return stream->is_capturing ? PYA_E_CAPTURE
                                    : PYA_E_DEVICE; /* the event may be the culprit */
    }
    if (event->context != stream->context) {
        return PYA_E_DEVICE;
    }
    event->stream = i + 1;
    /* The record is work too; otherwise an event on an idle stream would be done too early. */
    event->work = ++stream->n_queued;
    event->record = ++sim->n_records;
    if (sim->config.work == PYA_SIM_WORK_AT_ONCE) {
        stream->n_finished = stream->n_queued;
    }
    return PYA_OK;
}

pya_status
sim_event_record(struct pya_device *dev, pya_event event, pya_stream stream) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_EVENT_RECORD);
    if (status == PYA_OK) {
        status = work_record_locked(sim, event, stream);
    }
    return sim_leave(sim, PYA_SIM_EVENT_RECORD, 0, 0, status);
}

pya_status
sim_event_query(struct pya_device *dev, pya_event event, bool *done) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_EVENT_QUERY);
    const struct sim_event *known =
        work_event_for(sim, event, "query of an event that is not one", &status);
    if (known != NULL) {
        *done = work_event_done(sim, known);
    }
    return sim_leave(sim, PYA_SIM_EVENT_QUERY, 0, 0, status);
}

pya_status
sim_event_sync(struct pya_device *dev, pya_event event) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_EVENT_SYNC);
    const struct sim_event *known =
        work_event_for(sim, event, "wait for an event that is not one", &status);
    if (known != NULL && known->stream != 0) {
        work_finish(&sim->streams[known->stream - 1], known->work);
    }
    return sim_leave(sim, PYA_SIM_EVENT_SYNC, 0, 0, status);
}

pya_status
sim_event_destroy(struct pya_device *dev, pya_event event) {
    struct pya_sim *sim = sim_from(dev);
    pya_status status = sim_enter(sim, PYA_SIM_EVENT_DESTROY);
    struct sim_event *known =
        work_event_for(sim, event, "destruction of an event that is not one", &status);
    if (known != NULL) {
        known->is_alive = false;
        known->generation++;
        known->next_free = sim->free_event;
        sim->free_event = (uint32_t)event;
        sim->state.n_events--;
    }
    return sim_leave(sim, PYA_SIM_EVENT_DESTROY, 0, 0, status);
}

/* ---- what unfinished work touches ---- */

static bool
work_use_done(const struct pya_sim *sim, const struct sim_use *use) {
    return sim->streams[use->stream].n_finished >= use->work;
}

static void
work_use_free(struct pya_sim *sim, uint32_t *link) {
    uint32_t slot = *link - 1;
    *link = sim->uses[slot].next;
    sim->uses[slot].next = sim->free_use;
    sim->free_use = slot + 1;
}

void
sim_drop_uses_locked(struct pya_sim *sim, uint32_t page) {
    while (sim->pages[page].first_use != 0) {
        work_use_free(sim, &sim->pages[page].first_use);
    }
}

uint32_t
sim_pending_uses_locked(struct pya_sim *sim, uint32_t page, uint32_t vpage) {
    uint32_t n = 0;
    uint32_t *link = &sim->pages[page].first_use;
    while (*link != 0) {
        struct sim_use *use = &sim->uses[*link - 1];
        if (work_use_done(sim, use)) {
            work_use_free(sim, link);
            continue;
        }
        n += use->vpage == vpage;
        link = &use->next;
    }
    return n;
}

/* Does unfinished work of another stream touch the same bytes? */
static void
work_check_race(struct pya_sim *sim, uint32_t page, const struct sim_use *mine) {
    for (uint32_t at = sim->pages[page].first_use; at != 0; at = sim->uses[at - 1].next) {
        const struct sim_use *use = &sim->uses[at - 1];
        if (use->stream != mine->stream && !work_use_done(sim, use) && use->first <= mine->last &&
            mine->first <= use->last) {
            sim_misuse(
                sim, "work of two streams touches the same bytes", sim_address(sim, mine->vpage));
            return;
        }
    }
}

static pya_status
work_use_add(struct pya_sim *sim, uint32_t page, struct sim_use use) {
    work_check_race(sim, page, &use);
    (void)sim_pending_uses_locked(sim, page, use.vpage); /* drops the finished ones */
    if (sim->free_use == 0) {
        uint32_t old = sim->n_use_slots;
        if (!sim_grow((void **)&sim->uses, &sim->n_use_slots, sizeof *sim->uses)) {
            return PYA_E_HOST_NOMEM;
        }
        for (uint32_t i = sim->n_use_slots; i-- > old;) {
            sim->uses[i].next = sim->free_use;
            sim->free_use = i + 1;
        }
    }
    uint32_t slot = sim->free_use - 1;
    sim->free_use = sim->uses[slot].next;
    use.next = sim->pages[page].first_use;
    sim->uses[slot] = use;
    sim->pages[page].first_use = slot + 1;
    return PYA_OK;
}

/* One page's part of a byte range. */
struct work_piece {
    uint32_t vpage;
    uint32_t page;
    uint16_t first; /* steps, both inclusive */
    uint16_t last;
};

/* False: the end, or a misuse was reported. */
static bool
work_next_piece(struct pya_sim *sim, pya_dptr *addr, pya_dptr end, struct work_piece *out) {
    if (*addr >= end) {
        return false;
    }
    uint32_t vpage = sim_vpage(sim, *addr);
    uint64_t pte = vpage == SIM_SPACE_NONE ? 0 : sim->pte[vpage];
    if ((pte & SIM_PTE_PAGE) == 0 || (pte & SIM_PTE_ACCESS) == 0) {
        sim_misuse(sim, "memory is touched that is not mapped and accessible", *addr);
        return false;
    }
    pya_dptr page_at = sim_address(sim, vpage);
    pya_dptr stop = end < page_at + PYA_PAGE ? end : page_at + PYA_PAGE;
    out->vpage = vpage;
    out->page = (uint32_t)(pte & SIM_PTE_PAGE) - 1;
    out->first = (uint16_t)((*addr - page_at) / PYA_ALIGN);
    out->last = (uint16_t)((stop - 1 - page_at) / PYA_ALIGN);
    *addr = stop;
    return true;
}

pya_status
pya_sim_use(struct pya_sim *sim, pya_stream stream, pya_dptr addr, size_t bytes) {
    pthread_mutex_lock(&sim->lock);
    pya_status status = PYA_OK;
    uint32_t i = work_stream(sim, stream);
    if (i == UINT32_MAX) {
        status = PYA_E_HOST_NOMEM;
        goto unlock;
    }
    uint64_t work = ++sim->streams[i].n_queued;
    pya_dptr end = addr + bytes;
    struct work_piece piece;
    while (status == PYA_OK && work_next_piece(sim, &addr, end, &piece)) {
        struct sim_use use = {
            .stream = i,
            .vpage = piece.vpage,
            .first = piece.first,
            .last = piece.last,
            .work = work};
        status = work_use_add(sim, piece.page, use);
    }
    if (sim->config.work == PYA_SIM_WORK_AT_ONCE) {
        sim->streams[i].n_finished = work;
    }
unlock:
    pthread_mutex_unlock(&sim->lock);
    return status;
}

/* ---- the shadow ---- */

/* Sets or clears the owner bits of the piece.  Returns how many had that value already. */
static uint32_t
work_mark(struct sim_page *page, const struct work_piece *piece, bool own) {
    uint32_t n_already = 0;
    for (uint32_t word = piece->first / 64U; word <= piece->last / 64U; word++) {
        uint64_t mask = UINT64_MAX;
        if (word == piece->first / 64U) {
            mask &= UINT64_MAX << (piece->first % 64U);
        }
        if (word == piece->last / 64U) {
            mask &= UINT64_MAX >> (63U - piece->last % 64U);
        }
        uint64_t old = page->owner[word];
        n_already += (uint32_t)__builtin_popcountll(own ? old & mask : ~old & mask);
        page->owner[word] = own ? old | mask : old & ~mask;
    }
    uint32_t n_changed = (uint32_t)(piece->last - piece->first + 1) - n_already;
    page->n_owned = own ? page->n_owned + n_changed : page->n_owned - n_changed;
    return n_already;
}

pya_status
pya_sim_own(struct pya_sim *sim, pya_dptr addr, size_t bytes) {
    pthread_mutex_lock(&sim->lock);
    pya_status status = PYA_OK;
    pya_dptr end = addr + bytes;
    struct work_piece piece;
    while (work_next_piece(sim, &addr, end, &piece)) {
        struct sim_page *page = &sim->pages[piece.page];
        if (page->owner == NULL) {
            page->owner = calloc(SIM_OWNER_WORDS, sizeof *page->owner);
        }
        if (page->owner == NULL) {
            status = PYA_E_HOST_NOMEM;
            break;
        }
        if (work_mark(page, &piece, true) > 0) {
            sim_misuse(sim, "a byte belongs to two live blocks", sim_address(sim, piece.vpage));
        }
    }
    pthread_mutex_unlock(&sim->lock);
    return status;
}

void
pya_sim_disown(struct pya_sim *sim, pya_dptr addr, size_t bytes) {
    pthread_mutex_lock(&sim->lock);
    pya_dptr end = addr + bytes;
    struct work_piece piece;
    while (work_next_piece(sim, &addr, end, &piece)) {
        struct sim_page *page = &sim->pages[piece.page];
        if (page->owner == NULL || work_mark(page, &piece, false) > 0) {
            sim_misuse(
                sim, "a byte is given up that no live block owned", sim_address(sim, piece.vpage));
        }
    }
    pthread_mutex_unlock(&sim->lock);
}
