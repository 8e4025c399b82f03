/* What every device promises (device.h), on each device there is: the simulated one, counting and backed, with and
 * without virtual memory, and the CUDA driver if libcuda.so.1 can be opened (a card, or the host-memory runtime:
 * LD_LIBRARY_PATH=<its folder>).  Long because it is all they promise. */
#include <pthread.h>
#include <unistd.h>

#include "check.h"
#include "subject.h"

static void
suite_caps(const struct subject *subject, struct pya_device *dev) {
    (void)subject;
    struct pya_device_caps caps;
    CHECK_OK(pya_device_caps(dev, &caps));
    CHECK(caps.total_bytes >= 64 * PYA_PAGE);
    CHECK(caps.address_bytes >= caps.total_bytes);
    CHECK_EQ(dev->index, 0);
    CHECK(dev->ops->name != NULL);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    CHECK_OK(pya_device_mem_info(dev, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && free_bytes <= total_bytes);
    CHECK(pya_device_clock_ns(dev) <= pya_device_clock_ns(dev));
}

static void
suite_plain(const struct subject *subject, struct pya_device *dev) {
    pya_dptr a = 0;
    pya_dptr b = 0;
    CHECK_OK(pya_device_plain_alloc(dev, 3 * PYA_PAGE, &a));
    CHECK_OK(pya_device_plain_alloc(dev, 512, &b));
    CHECK(a != 0 && a % PYA_ALIGN == 0 && b % PYA_ALIGN == 0);
    CHECK(b >= a + 3 * PYA_PAGE || a >= b + 512);
    if (subject->copy_in != NULL) {
        char text[16] = "";
        subject->copy_in(a + 3 * PYA_PAGE - 16, "0123456789abcde", 16);
        subject->copy_out(text, a + 3 * PYA_PAGE - 16, 16);
        CHECK(memcmp(text, "0123456789abcde", 16) == 0);
    }
    CHECK_OK(pya_device_plain_free(dev, a));
    CHECK_OK(pya_device_plain_free(dev, b));
    struct pya_device_caps caps;
    pya_dptr untouched = 5;
    CHECK_OK(pya_device_caps(dev, &caps));
    CHECK_EQ(
        pya_device_plain_alloc(dev, caps.total_bytes + (UINT64_C(1) << 30), &untouched),
        PYA_E_NOMEM);
    CHECK_EQ(untouched, 5);
    struct pya_device_error error;
    pya_device_error(dev, &error);
    CHECK(error.code != 0 && error.call[0] != '\0' && error.text[0] != '\0');
    CHECK(error.bytes > caps.total_bytes);
}

static void
suite_events(const struct subject *subject, struct pya_device *dev) {
    (void)subject;
    pya_event event = 0;
    bool done = false;
    bool capturing = true;
    CHECK_OK(pya_device_event_create(dev, 0, &event));
    CHECK(event != 0);
    CHECK_OK(pya_device_event_record(dev, event, 0));
    CHECK_OK(pya_device_event_sync(dev, event));
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done);
    CHECK_OK(pya_device_event_record(dev, event, 0));
    CHECK_OK(pya_device_stream_sync(dev, 0));
    done = false;
    CHECK_OK(pya_device_event_query(dev, event, &done));
    CHECK(done);
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_event_destroy(dev, event));
    CHECK_OK(pya_device_is_capturing(dev, 0, &capturing));
    CHECK(!capturing);
    pya_status status = pya_device_set_peer(dev, dev->index, true);
    CHECK(status != PYA_OK); /* a device is no peer of itself */
}

typedef int cuda_stream_create(void **stream, unsigned flags);
typedef int cuda_stream_destroy(void *stream);

/* A stream of the program's own. */
static pya_stream
stream_make(const struct subject *subject) {
    cuda_stream_create *create = NULL;
    void *stream = NULL;
    void *symbol = cuda_symbol("cuStreamCreate");
    memcpy(&create, &symbol, sizeof symbol);
    if (subject->copy_in == cuda_in) {
        CHECK(create != NULL && create(&stream, 1) == 0);
    }
    return subject->copy_in == cuda_in ? (pya_stream)(uintptr_t)stream : 77;
}

static void
stream_unmake(const struct subject *subject, struct pya_device *dev, pya_stream stream) {
    cuda_stream_destroy *destroy = NULL;
    void *symbol = cuda_symbol("cuStreamDestroy_v2");
    memcpy(&destroy, &symbol, sizeof symbol);
    if (subject->copy_in != cuda_in) {
        pya_sim_set_destroyed(pya_sim_of(dev), stream, true);
    } else {
        void *handle;
        memcpy(&handle, &stream, sizeof handle);
        CHECK(destroy != NULL && destroy(handle) == 0);
    }
}

/* Of a destroyed stream, a device says that there is no such stream; waiting for all work still works. */
static void
suite_destroyed_stream(const struct subject *subject, struct pya_device *dev) {
    bool capturing = true;
    pya_event event = 0;
    struct pya_device_error error;
    void *before = cuda_current();
    pya_device_begin(dev);
    CHECK_OK(pya_device_is_capturing(dev, 0, &capturing)); /* enters its context */
    pya_stream stream = stream_make(subject);
    CHECK_OK(pya_device_event_create(dev, stream, &event));
    CHECK(cuda_current() != before || subject->copy_in != cuda_in);
    CHECK_OK(pya_device_is_capturing(dev, stream, &capturing));
    CHECK(!capturing);
    CHECK_OK(pya_device_event_record(dev, event, stream));
    stream_unmake(subject, dev, stream);
    CHECK_EQ(pya_device_is_capturing(dev, stream, &capturing), PYA_E_STREAM);
    pya_device_error(dev, &error);
    CHECK(error.code != 0 && !error.is_sticky);
    CHECK_EQ(pya_device_stream_sync(dev, stream), PYA_E_STREAM);
    CHECK_EQ(pya_device_event_record(dev, event, stream), PYA_E_DEVICE);
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_event_destroy(dev, event));
    pya_device_end(dev);
    CHECK(cuda_current() == before);
}

/* Work on the default stream would end the capture of a stream that waits for it, so it counts as capturing too. */
static void
suite_blocking_capture(const struct subject *subject, struct pya_device *dev) {
    cuda_stream_create *create = NULL;
    int (*begin)(void *stream, int mode) = NULL;
    int (*end)(void *stream, void **graph) = NULL;
    int (*destroy_graph)(void *graph) = NULL;
    void *stream = NULL;
    void *graph = NULL;
    bool capturing = false;
    void *symbol = cuda_symbol("cuStreamCreate");
    memcpy(&create, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuStreamBeginCapture_v2");
    memcpy(&begin, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuStreamEndCapture");
    memcpy(&end, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuGraphDestroy");
    memcpy(&destroy_graph, &symbol, sizeof symbol);
    if (subject->copy_in != cuda_in) {
        return;
    }
    pya_device_begin(dev);
    CHECK_OK(pya_device_sync(dev)); /* enters its context */
    CHECK(create != NULL && create(&stream, 0) == 0);
    CHECK(begin != NULL && begin(stream, 0) == 0);
    CHECK_OK(pya_device_is_capturing(dev, 0, &capturing));
    CHECK(capturing);
    CHECK(end != NULL && end(stream, &graph) == 0);
    CHECK_OK(pya_device_is_capturing(dev, 0, &capturing));
    CHECK(!capturing);
    CHECK(destroy_graph != NULL && destroy_graph(graph) == 0);
    stream_unmake(subject, dev, (pya_stream)(uintptr_t)stream);
    pya_device_end(dev);
}

/* Calls between begin and end, which may be nested.  Afterwards the thread has the context that it had before. */
static void
suite_visits(const struct subject *subject, struct pya_device *dev) {
    void *before = cuda_current();
    pya_device_begin(dev);
    pya_device_end(dev);
    pya_device_begin(dev);
    CHECK(cuda_current() == before);
    suite_events(subject, dev);
    bool has_entered = cuda_current() != before;
    CHECK_EQ(has_entered, subject->copy_in == cuda_in);
    pya_device_begin(dev);
    suite_events(subject, dev);
    pya_device_end(dev);
    CHECK_EQ(cuda_current() != before, has_entered);
    suite_events(subject, dev);
    pya_device_end(dev);
    CHECK(cuda_current() == before);
    suite_events(subject, dev);
    CHECK(cuda_current() == before);
}

/* Two pages seen at two ranges, in opposite order. */
static void
suite_aliases(const struct subject *subject, struct pya_device *dev) {
    pya_page_handle page[2] = {0, 0};
    pya_dptr home = 0;
    pya_dptr view = 0;
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &home));
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &view));
    CHECK(home % PYA_PAGE == 0 && view % PYA_PAGE == 0);
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(pya_device_page_create(dev, 1, &page[i]));
        CHECK_OK(pya_device_map(dev, home + i * PYA_PAGE, page[i], 1));
        CHECK_OK(pya_device_map(dev, view + (1 - i) * PYA_PAGE, page[i], 1));
    }
    CHECK(page[0] != 0 && page[0] != page[1]);
    CHECK_OK(pya_device_set_access(dev, home, 2 * PYA_PAGE));
    CHECK_OK(pya_device_set_access(dev, view, 2 * PYA_PAGE));
    if (subject->copy_in != NULL) {
        char text[8] = "";
        subject->copy_in(home + 100, "page 0!", 8);
        subject->copy_in(view + 100, "page 1!", 8);
        subject->copy_out(text, view + PYA_PAGE + 100, 8);
        CHECK(memcmp(text, "page 0!", 8) == 0);
        subject->copy_out(text, home + PYA_PAGE + 100, 8);
        CHECK(memcmp(text, "page 1!", 8) == 0);
    }
    /* Released while mapped: the memory stays until the last mapping goes. */
    CHECK_OK(pya_device_page_release(dev, page[0]));
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, home, 2 * PYA_PAGE));
    if (subject->copy_out != NULL) {
        char text[8] = "";
        subject->copy_out(text, view + PYA_PAGE + 100, 8);
        CHECK(memcmp(text, "page 0!", 8) == 0);
    }
    /* One page is unmapped from the middle and mapped again at the same address. */
    CHECK_OK(pya_device_unmap(dev, view, PYA_PAGE));
    CHECK_OK(pya_device_map(dev, view, page[1], 1));
    CHECK_OK(pya_device_set_access(dev, view, PYA_PAGE));
    if (subject->copy_out != NULL) {
        char text[8] = "";
        subject->copy_out(text, view + 100, 8);
        CHECK(memcmp(text, "page 1!", 8) == 0);
    }
    CHECK_OK(pya_device_unmap(dev, view, PYA_PAGE));
    CHECK_OK(pya_device_unmap(dev, view + PYA_PAGE, PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, page[1]));
    CHECK_OK(pya_device_range_release(dev, home, 2 * PYA_PAGE));
    CHECK_OK(pya_device_range_release(dev, view, 2 * PYA_PAGE));
}

/* A page as a descriptor: the same bytes under a second handle, which outlives the first. */
static void
suite_export(const struct subject *subject, struct pya_device *dev) {
    pya_page_handle page = 0;
    pya_page_handle again = 0;
    pya_dptr addr = 0;
    int fd = -1;
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &addr));
    CHECK_OK(pya_device_map(dev, addr, page, 1));
    CHECK_OK(pya_device_set_access(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_page_export(dev, page, &fd));
    CHECK_OK(pya_device_page_import(dev, fd, &again));
    CHECK_EQ(close(fd), 0);
    CHECK_OK(pya_device_map(dev, addr + PYA_PAGE, again, 1));
    CHECK_OK(pya_device_set_access(dev, addr + PYA_PAGE, PYA_PAGE));
    if (subject->copy_in != NULL) {
        subject->copy_in(addr + 100, "page 0!", 8);
    }
    CHECK_OK(pya_device_page_release(dev, page));
    CHECK_OK(pya_device_sync(dev));
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    if (subject->copy_out != NULL) {
        char text[8] = "";
        subject->copy_out(text, addr + PYA_PAGE + 100, 8);
        CHECK(memcmp(text, "page 0!", 8) == 0);
    }
    CHECK_OK(pya_device_unmap(dev, addr + PYA_PAGE, PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, again));
    CHECK_OK(pya_device_range_release(dev, addr, 2 * PYA_PAGE));
    again = 5;
    CHECK(pya_device_page_import(dev, STDIN_FILENO, &again) != PYA_OK);
    CHECK(pya_device_page_import(dev, -1, &again) != PYA_OK && again == 5);
}

static void
suite_refusals(const struct subject *subject, struct pya_device *dev) {
    pya_page_handle page = 0;
    pya_dptr addr = 0;
    CHECK_OK(pya_device_page_create(dev, 1, &page));
    CHECK_OK(pya_device_range_reserve(dev, 2 * PYA_PAGE, &addr));
    CHECK(pya_device_set_access(dev, addr, PYA_PAGE) != PYA_OK);
    CHECK_OK(pya_device_map(dev, addr, page, 1));
    CHECK(pya_device_map(dev, addr, page, 1) != PYA_OK);
    if (subject->open != open_cuda) { /* a card's driver (580.159, H200) claims that it is done */
        CHECK(pya_device_unmap(dev, addr + PYA_PAGE, PYA_PAGE) != PYA_OK);
    }
    CHECK_OK(pya_device_set_access(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_unmap(dev, addr, PYA_PAGE));
    CHECK_OK(pya_device_page_release(dev, page));
    CHECK_OK(pya_device_range_release(dev, addr, 2 * PYA_PAGE));
}

static void
suite_no_vmm(const struct subject *subject, struct pya_device *dev) {
    (void)subject;
    pya_dptr addr = 5;
    pya_page_handle page = 5;
    CHECK_EQ(pya_device_page_create(dev, 1, &page), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_page_release(dev, 5), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_range_reserve(dev, PYA_PAGE, &addr), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_range_release(dev, 5, PYA_PAGE), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_map(dev, 5, 5, 1), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_unmap(dev, 5, PYA_PAGE), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_set_access(dev, 5, PYA_PAGE), PYA_E_NOTSUP);
    int fd = 5;
    CHECK_EQ(pya_device_page_export(dev, 5, &fd), PYA_E_NOTSUP);
    CHECK_EQ(pya_device_page_import(dev, 5, &page), PYA_E_NOTSUP);
    CHECK(addr == 5 && page == 5 && fd == 5);
}

struct worker {
    struct pya_device *dev;
    bool has_vmm;
    pya_stream stream; /* is asked whether it is captured */
    bool is_captured;
    unsigned long failures;
};

static void
worker_check(struct worker *worker, pya_status status) {
    worker->failures += status != PYA_OK;
}

static void *
worker_run(void *arg) {
    struct worker *worker = arg;
    struct pya_device *dev = worker->dev;
    for (int i = 0; i < 50; i++) {
        pya_dptr plain = 0;
        pya_event event = 0;
        bool is_done = false, is_capturing = false;
        size_t free_bytes = 0, total_bytes = 0;
        if (i % 2 == 0) {
            pya_device_begin(dev);
        }
        worker_check(worker, pya_device_mem_info(dev, &free_bytes, &total_bytes));
        worker_check(worker, pya_device_is_capturing(dev, worker->stream, &is_capturing));
        worker->failures += is_capturing != worker->is_captured;
        worker_check(worker, pya_device_plain_alloc(dev, 2 * PYA_PAGE, &plain));
        worker_check(worker, pya_device_event_create(dev, 0, &event));
        worker_check(worker, pya_device_event_record(dev, event, 0));
        worker_check(worker, pya_device_event_query(dev, event, &is_done));
        worker_check(worker, pya_device_event_sync(dev, event));
        worker_check(worker, pya_device_event_destroy(dev, event));
        worker_check(worker, pya_device_plain_free(dev, plain));
        if (worker->has_vmm) {
            pya_page_handle page = 0;
            pya_dptr addr = 0;
            worker_check(worker, pya_device_page_create(dev, 1, &page));
            worker_check(worker, pya_device_range_reserve(dev, PYA_PAGE, &addr));
            worker_check(worker, pya_device_map(dev, addr, page, 1));
            worker_check(worker, pya_device_set_access(dev, addr, PYA_PAGE));
            worker_check(worker, pya_device_unmap(dev, addr, PYA_PAGE));
            worker_check(worker, pya_device_range_release(dev, addr, PYA_PAGE));
            worker_check(worker, pya_device_page_release(dev, page));
        }
        if (i % 2 == 0) {
            pya_device_end(dev);
        }
    }
    return NULL;
}

static void
suite_threads(const struct subject *subject, struct pya_device *dev) {
    (void)subject;
    struct pya_device_caps caps;
    CHECK_OK(pya_device_caps(dev, &caps));
    struct worker workers[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){.dev = dev, .has_vmm = caps.has_vmm};
        CHECK_EQ(pthread_create(&threads[i], NULL, worker_run, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(workers[i].failures, 0);
    }
}

/* Nothing that the allocator asks for ends a capture, in the strictest mode, of its own thread or of another. */
static void
suite_during_capture(const struct subject *subject, struct pya_device *dev) {
    int (*begin)(void *stream, int mode) = NULL;
    int (*end)(void *stream, void **graph) = NULL;
    int (*destroy_graph)(void *graph) = NULL;
    void *graph = NULL;
    void *symbol = cuda_symbol("cuStreamBeginCapture_v2");
    memcpy(&begin, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuStreamEndCapture");
    memcpy(&end, &symbol, sizeof symbol);
    symbol = cuda_symbol("cuGraphDestroy");
    memcpy(&destroy_graph, &symbol, sizeof symbol);
    struct pya_device_caps caps;
    if (subject->copy_in != cuda_in || !CHECK_OK(pya_device_caps(dev, &caps))) {
        return;
    }
    cuda_make_current(true);
    const pya_stream stream = stream_make(subject);
    void *handle;
    memcpy(&handle, &stream, sizeof handle);
    for (int is_other = 0; is_other < 2; is_other++) {
        struct worker worker = {
            .dev = dev, .has_vmm = caps.has_vmm, .stream = stream, .is_captured = true};
        pthread_t thread;
        CHECK(begin != NULL && begin(handle, 0) == 0);
        if (is_other == 0) {
            (void)worker_run(&worker);
        } else if (CHECK_EQ(pthread_create(&thread, NULL, worker_run, &worker), 0)) {
            pthread_join(thread, NULL);
        }
        CHECK_EQ(worker.failures, 0);
        CHECK(end != NULL && end(handle, &graph) == 0);
        CHECK(destroy_graph != NULL && destroy_graph(graph) == 0);
    }
    stream_unmake(subject, dev, stream);
    cuda_make_current(false);
}

static void
test_all(void) {
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++) {
        struct pya_device *dev = subjects[i].open();
        if (dev == NULL) {
            continue;
        }
        printf("device: %s\n", subjects[i].name);
        struct pya_device_caps caps;
        CHECK_OK(pya_device_caps(dev, &caps));
        suite_caps(&subjects[i], dev);
        suite_plain(&subjects[i], dev);
        suite_events(&subjects[i], dev);
        suite_visits(&subjects[i], dev);
        suite_blocking_capture(&subjects[i], dev);
        if (caps.has_vmm) {
            suite_aliases(&subjects[i], dev);
            suite_export(&subjects[i], dev);
            suite_refusals(&subjects[i], dev);
        } else {
            suite_no_vmm(&subjects[i], dev);
        }
        suite_threads(&subjects[i], dev);
        suite_during_capture(&subjects[i], dev);
        check_sim_clean(dev);
        pya_device_close(dev);
    }
}

static void
test_open_refuses(void) {
    struct pya_device *dev = NULL;
    CHECK(pya_cuda_open(-1, &dev) != PYA_OK);
    CHECK(pya_cuda_open(PYA_MAX_DEVICES, &dev) != PYA_OK);
    CHECK(dev == NULL);
    pya_device_close(NULL);
}

/* Opens the card of the host-memory runtime while every call of that name, or only the first, returns the error. */
static bool
open_failing(uint64_t n, const char *call, int error, struct pya_device_caps *caps) {
    void *live_symbol = cuda_symbol("pya_hostcuda_live");
    uint64_t (*live)(const char *) = NULL;
    struct pya_device *dev = NULL;
    if (!fail_nth(n, call, error)) {
        return false;
    }
    memcpy(&live, &live_symbol, sizeof live);
    pya_status status = pya_cuda_open(0, &dev);
    (void)fail_nth(0, NULL, 0);
    CHECK_EQ(live("handles") + live("mappings") + live("reservations"), 0);
    if (CHECK_OK(status) && CHECK_OK(pya_device_caps(dev, caps))) {
        pya_dptr addr = 0;
        if (caps->has_vmm) {
            suite_aliases(&(struct subject){.name = "cuda"}, dev);
        }
        CHECK_OK(pya_device_plain_alloc(dev, PYA_PAGE, &addr));
        CHECK_OK(pya_device_plain_free(dev, addr));
        pya_device_close(dev);
    }
    return true;
}

/* A driver that promises virtual memory and refuses it: the device works without the refused part, or without any. */
static void
test_vmm_is_tried_out(void) {
    static const struct {
        uint64_t n;
        const char *call;
        int error;
        bool has_vmm;
    } each[] = {
        {1, "cuMemSetAccess", 999, true}, /* WSL2: memory for network cards alone is refused */
        {1, "cuMemCreate", 801, true},
        {UINT64_MAX, "cuMemSetAccess", 999, false},
        {UINT64_MAX, "cuMemCreate", 801, false},
        {UINT64_MAX, "cuMemAddressReserve", 801, false},
        {UINT64_MAX, "cuMemMap", 1, false},
        {UINT64_MAX, "cuMemCreate", 2, true}, /* full: it says nothing */
        {UINT64_MAX, "cuMemCreate", 700, true},
    };
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        struct pya_device_caps caps;
        if (!open_failing(each[i].n, each[i].call, each[i].error, &caps)) {
            return;
        }
        CHECK_EQ(caps.has_vmm, each[i].has_vmm);
    }
}

/* The last case, because a card's driver may crash here.  torch destroys none of its streams, and other libraries'
 * streams are asked nothing. */
static void
test_destroyed_streams(void) {
    for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++) {
        struct pya_device *dev = subjects[i].open();
        if (dev != NULL) {
            printf("device: %s\n", subjects[i].name);
            (void)fflush(stdout);
            suite_destroyed_stream(&subjects[i], dev);
            check_sim_clean(dev);
            pya_device_close(dev);
        }
    }
}

static const struct check_case cases[] = {
    {"all", test_all},
    {"vmm_is_tried_out", test_vmm_is_tried_out},
    {"open_refuses", test_open_refuses},
    {"destroyed_streams", test_destroyed_streams},
};

int
main(int argc, char **argv) {
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
