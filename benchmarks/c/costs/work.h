/* Work that keeps the card busy for a known time: copies of one plain allocation to another, or reads of its lines in
 * any order. */
#pragma once

#include "costs.h"

struct costs_work {
    cuda_stream stream;
    cuda_event begin, end; /* of what was queued last */
    pya_dptr from, to;
    size_t bytes;
    bool is_gather;
    double piece_ms; /* what one copy, or one kernel, takes */
};

/* is_gather: costs_gather_load() was true. */
void costs_work_open(struct costs_work *work, bool is_gather);
/* Queues about so many ms, and comes back once it has begun. */
void costs_work_queue(struct costs_work *work, double ms);
bool costs_work_is_over(const struct costs_work *work);
/* Waits for the end; what it took, in ms. */
double costs_work_wait(const struct costs_work *work);
void costs_work_close(struct costs_work *work);
