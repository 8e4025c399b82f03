#pragma once
/* Streams and events.  Floor 4 (uses objects.h, state.h).
 *
 * Work is done the moment it is submitted; only its completion may be reported late.  With an event delay of n, an event or
 * a stream counts as done only after n more kernel launches on the device, or once somebody synchronises. */

#include "objects.h"
#include "state.h"

struct pya_hc_node;
struct pya_hc_capture;

/* A moment in a stream's work. */
struct pya_hc_mark {
    struct pya_hc_stream *stream; /* its slot may belong to another stream by now */
    uint64_t stream_id, ticket;
    uint64_t launch;  /* the device's n_launches then */
    uint64_t n_syncs; /* the device's n_syncs then */
    int device;
    bool is_waited; /* the host waited for it; says nothing about later work */
};

/* The ticket up to which another stream's work was waited for. */
struct pya_hc_waited {
    uint64_t stream_id, ticket;
};
enum { PYA_HC_MOST_WAITED = 16 };

struct pya_hc_stream {
    uint64_t id; /* from 1, never reused */
    int device;
    unsigned flags;
    int priority;
    bool is_legacy;       /* the default stream: others wait for it implicitly */
    uint64_t ticket;      /* number of the last work submitted */
    uint64_t done;        /* complete up to here, because somebody synchronised */
    uint64_t last_launch; /* the device's n_launches at the last work */
    struct pya_hc_waited waited[PYA_HC_MOST_WAITED]; /* for other streams, the latest ones */
    unsigned next_waited;
    struct pya_hc_capture *capture;
    struct pya_hc_node **deps; /* while capturing: what the next node depends on */
    size_t n_deps;
};

struct pya_hc_event {
    unsigned flags;
    int device;
    bool is_recorded;
    struct pya_hc_mark mark;
    uint64_t time_ns;
    uint64_t capture_id; /* not 0: recorded in this capture, with dependencies deps */
    struct pya_hc_node **deps;
    size_t n_deps;
};

int pya_hc_stream_create(unsigned flags, int priority, void **out);
int pya_hc_stream_destroy(void *handle);
/* NULL and 1 are the legacy stream of the current device, 2 is the per-thread one.  Returns NULL for an invalid
 * handle. */
struct pya_hc_stream *pya_hc_stream_find_locked(const void *handle);
/* Notes work on the stream; a kernel also advances the device's clock. */
void pya_hc_stream_work_locked(struct pya_hc_stream *stream, bool is_kernel);

/* A mark of the stream's work so far. */
struct pya_hc_mark pya_hc_mark_locked(struct pya_hc_stream *stream);
/* Did the host wait for the work?  Is it done, with or without that?  Did `stream` wait for it by an event? */
bool pya_hc_mark_is_waited_locked(const struct pya_hc_mark *mark);
bool pya_hc_mark_is_done_locked(const struct pya_hc_mark *mark);
bool
pya_hc_mark_is_before_locked(const struct pya_hc_mark *mark, const struct pya_hc_stream *stream);
/* Called, with the lock held, whenever the host has waited for a stream, an event or a device. */
void pya_hc_after_sync_locked(void (*call)(void));

int pya_hc_stream_sync(const void *handle);
int pya_hc_stream_query(const void *handle);
int pya_hc_stream_wait(const void *handle, const void *event);
int pya_hc_device_sync(void);

/* Ends the device's streams, except its default ones, and its events. */
void pya_hc_stream_reset_locked(int device);

int pya_hc_event_create(unsigned flags, void **out);
int pya_hc_event_destroy(void *handle);
int pya_hc_event_record(void *handle, const void *stream);
int pya_hc_event_query(const void *handle);
int pya_hc_event_sync(const void *handle);
int pya_hc_event_elapsed(float *ms, const void *start, const void *end);

uint64_t pya_hc_stream_count_locked(void);
/* Calls with streams that do not exist (any more), which may crash a real driver. */
uint64_t pya_hc_stream_stale_locked(void);
uint64_t pya_hc_event_count_locked(void);
