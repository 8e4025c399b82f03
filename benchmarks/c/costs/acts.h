/* What is done to the pages and streams at hand while others work: one thing each, so that it can be timed. */
#pragma once

#include "work.h"

enum { ACTS_MOST = 64 };

/* Pages that are mapped and open at home throughout, so that a call meets what it meets in the allocator. */
struct costs_at {
    size_t n; /* of the calls at hand */
    uint64_t pages[ACTS_MOST];
    uint64_t fresh[ACTS_MOST];
    pya_dptr home, view, range, plain;
    cuda_stream other; /* with nothing to do */
    cuda_event event;
};
extern struct costs_at at;

/* With what comes before and after, which is not timed. */
struct act {
    const char *what;
    void (*before)(void);
    void (*act)(void);
    void (*after)(void);
    bool has_pages;
    bool needs_vmm;
};

void act_open_standing(void);
void act_close_standing(void);
void act_nothing(void);
void act_reserve(void);
void act_unreserve(void);
void act_create(void);
void act_release(void);
void act_map(void);
void act_set_access(void);
void act_unmap(void);
void act_map_open(void);
void act_prepare_dropping(void);
void act_drop(void);
void act_alloc(void);
void act_free_plain(void);
void act_mem_info(void);
void act_record(void);
void act_query(void);
void act_record_and_wait(void);
void act_launch(void);
void act_launch_and_wait(void);
void act_sync_other(void);
