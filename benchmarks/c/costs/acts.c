#include "acts.h"

struct costs_at at;

void
act_open_standing(void) {
    at.other = costs_stream();
    at.event = costs_event();
    at.plain = costs_alloc(PYA_PAGE);
    if (bench.has_vmm) {
        at.home = costs_reserve(ACTS_MOST * PYA_PAGE);
        at.view = costs_reserve(ACTS_MOST * PYA_PAGE);
        for (size_t i = 0; i < ACTS_MOST; i++) {
            at.pages[i] = costs_create(PYA_PAGE);
            costs_map(at.home + i * PYA_PAGE, PYA_PAGE, at.pages[i]);
        }
        costs_set_access(at.home, ACTS_MOST * PYA_PAGE);
    }
}

void
act_close_standing(void) {
    if (bench.has_vmm) {
        costs_unmap(at.home, ACTS_MOST * PYA_PAGE);
        for (size_t i = 0; i < ACTS_MOST; i++) {
            costs_release(at.pages[i]);
        }
        costs_unreserve(at.home, ACTS_MOST * PYA_PAGE);
        costs_unreserve(at.view, ACTS_MOST * PYA_PAGE);
    }
    costs_free(at.plain);
    WANT(cuEventDestroy, at.event);
    WANT_MORE(cuStreamDestroy, at.other);
}

/* ---- acts: each with what comes before and after, which is not timed ---- */

void
act_nothing(void) {}

void
act_reserve(void) {
    at.range = costs_reserve(at.n * PYA_PAGE);
}

void
act_unreserve(void) {
    costs_unreserve(at.range, at.n * PYA_PAGE);
}

void
act_create(void) {
    for (size_t i = 0; i < at.n; i++) {
        at.fresh[i] = costs_create(PYA_PAGE);
    }
}

void
act_release(void) {
    for (size_t i = 0; i < at.n; i++) {
        costs_release(at.fresh[i]);
    }
}

void
act_map(void) {
    for (size_t i = 0; i < at.n; i++) {
        costs_map(at.view + i * PYA_PAGE, PYA_PAGE, at.pages[at.n - 1 - i]);
    }
}

void
act_set_access(void) {
    costs_set_access(at.view, at.n * PYA_PAGE);
}

void
act_unmap(void) {
    costs_unmap(at.view, at.n * PYA_PAGE);
}

void
act_map_open(void) {
    act_map();
    act_set_access();
}

/* Memory that was in use, given back: its last mapping goes, too. */
void
act_prepare_dropping(void) {
    act_reserve();
    act_create();
    for (size_t i = 0; i < at.n; i++) {
        costs_map(at.range + i * PYA_PAGE, PYA_PAGE, at.fresh[i]);
    }
    costs_set_access(at.range, at.n * PYA_PAGE);
    WANT_MORE(cuMemsetD32Async, at.range, 1, at.n * PYA_PAGE / 4, at.other);
    WANT(cuStreamSynchronize, at.other);
}

void
act_drop(void) {
    costs_unmap(at.range, at.n * PYA_PAGE);
    act_release();
}

void
act_alloc(void) {
    at.range = costs_alloc(at.n * PYA_PAGE);
}

void
act_free_plain(void) {
    costs_free(at.range);
}

void
act_mem_info(void) {
    size_t free_bytes;
    size_t total;
    WANT(cuMemGetInfo, &free_bytes, &total);
}

void
act_record(void) {
    WANT(cuEventRecord, at.event, at.other);
}

void
act_query(void) {
    const cuda_result result = bench.cu->cuEventQuery(at.event);
    if (result != CUDA_NOT_READY) {
        costs_want(result, "cuEventQuery");
    }
}

void
act_record_and_wait(void) {
    act_record();
    WANT(cuEventSynchronize, at.event);
}

void
act_launch(void) {
    WANT_MORE(cuMemsetD32Async, at.plain, 1, 1024, at.other);
}

void
act_launch_and_wait(void) {
    act_launch();
    WANT(cuStreamSynchronize, at.other);
}

void
act_sync_other(void) {
    WANT(cuStreamSynchronize, at.other);
}
