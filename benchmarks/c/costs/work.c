#include "work.h"

/* A driver takes about a thousand pieces before its launches wait. */
enum { MOST_PIECES = 400 };

static void
queue_pieces(struct costs_work *work, int n) {
    WANT(cuEventRecord, work->begin, work->stream);
    for (int i = 0; i < n; i++) {
        if (work->is_gather) {
            (void)costs_gather(work->from, work->bytes / PYA_PAGE, PYA_PAGE, 1, work->stream);
        } else {
            WANT_MORE(cuMemcpyDtoDAsync, work->to, work->from, work->bytes, work->stream);
        }
    }
    WANT(cuEventRecord, work->end, work->stream);
}

void
costs_work_open(struct costs_work *work, bool is_gather) {
    const size_t bytes = (bench.is_small ? (size_t)16 : (size_t)1024) << 20;
    *work = (struct costs_work){.bytes = bytes, .is_gather = is_gather};
    work->stream = costs_stream();
    work->begin = costs_event();
    work->end = costs_event();
    work->from = costs_alloc(bytes);
    work->to = costs_alloc(bytes);
    WANT_MORE(cuMemsetD32Async, work->from, 1, bytes / 4, work->stream);
    enum { N = 8 };
    queue_pieces(work, N); /* the first time is no measure */
    queue_pieces(work, N);
    work->piece_ms = costs_work_wait(work) / N;
}

void
costs_work_queue(struct costs_work *work, double ms) {
    const double wanted = work->piece_ms > 0 ? ms / work->piece_ms + 1 : MOST_PIECES;
    const int most = bench.is_small ? 4 : MOST_PIECES;
    queue_pieces(work, wanted < most ? (int)wanted : most);
    while (bench.cu->cuEventQuery(work->begin) == CUDA_NOT_READY) {
    }
}

bool
costs_work_is_over(const struct costs_work *work) {
    const cuda_result result = bench.cu->cuEventQuery(work->end);
    if (result != CUDA_NOT_READY) {
        costs_want(result, "cuEventQuery");
    }
    return result == CUDA_OK;
}

double
costs_work_wait(const struct costs_work *work) {
    return costs_elapsed_ms(work->begin, work->end);
}

void
costs_work_close(struct costs_work *work) {
    WANT(cuStreamSynchronize, work->stream);
    if (work->is_gather && !costs_gather_was_right()) {
        costs_wrong("random reads beside other calls");
    }
    costs_free(work->from);
    costs_free(work->to);
    WANT(cuEventDestroy, work->begin);
    WANT(cuEventDestroy, work->end);
    WANT_MORE(cuStreamDestroy, work->stream);
}
