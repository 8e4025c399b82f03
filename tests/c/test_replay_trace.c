/* Trace files: what is written is read back, cut files are read to the last whole chunk, damage is found, and no input,
 * however hostile, crashes the reader. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fault.h"
#include "folder.h"

#include "replay/trace.h"
#include "replay/varint.h"

static char folder[64] = "/tmp/pya-trace-XXXXXX";

static const char *
in_folder(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static uint8_t *
slurp(const char *path, size_t *n) {
    FILE *file = fopen(path, "rb");
    if (!CHECK(file != NULL)) {
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    *n = (size_t)ftell(file);
    fseek(file, 0, SEEK_SET);
    uint8_t *data = malloc(*n + 1);
    CHECK_EQ(fread(data, 1, *n, file), *n);
    fclose(file);
    return data;
}

static void
spill(const char *path, const uint8_t *data, size_t n) {
    FILE *file = fopen(path, "wb");
    if (!CHECK(file != NULL)) {
        exit(1);
    }
    CHECK_EQ(fwrite(data, 1, n, file), n);
    fclose(file);
}

/* A random event with the fields that its kind carries. */
static struct pya_trace_event
random_event(uint64_t *rng, uint64_t *time, uint32_t n_stacks, uint32_t n_strings) {
    static const int masks[] = {
#define X(kind, number, name, fields, meaning) fields,
        PYA_TRACE_TABLE(X)
#undef X
    };
    struct pya_trace_event e = {.kind = 1 + (int)check_below(rng, sizeof masks / sizeof *masks)};
    int fields = masks[e.kind - 1];
    *time += check_below(rng, 3) == 0 ? 0 : check_log_size(rng, 1, UINT64_C(1) << 40);
    e.time_ns = *time;
    e.device = check_below(rng, 5) == 0 ? (int)check_below(rng, PYA_MAX_DEVICES) : 0;
    e.thread = check_below(rng, 5) == 0 ? check_random(rng) : 1;
    e.stream = check_below(rng, 5) == 0 ? check_random(rng) : 0;
    e.addr = (fields & PYA_TRACE_ADDR) != 0 ? check_random(rng) >> check_below(rng, 64) : 0;
    e.bytes = (fields & PYA_TRACE_BYTES) != 0 ? check_random(rng) >> check_below(rng, 64) : 0;
    e.arg = (fields & PYA_TRACE_ARG) != 0 ? check_random(rng) >> check_below(rng, 64) : 0;
    e.stack = (fields & PYA_TRACE_STACK) != 0 ? (uint32_t)check_below(rng, n_stacks + 1) : 0;
    e.text = (fields & PYA_TRACE_TEXT) != 0 ? (uint32_t)check_below(rng, n_strings + 1) : 0;
    return e;
}

/* Writes n random events; the same seed gives the same file. */
static void
write_random(const char *path, uint64_t seed, unsigned n) {
    struct pya_trace_writer *writer = NULL;
    CHECK_OK(pya_trace_create(path, true, &writer));
    uint64_t rng = seed;
    uint64_t time = 0;
    uint32_t n_strings = 0;
    uint32_t n_stacks = 0;
    for (unsigned i = 0; i < n; i++) {
        char text[32];
        uint32_t id = 0;
        if (check_below(&rng, 4) == 0) {
            int length = snprintf(text, sizeof text, "text %u", (unsigned)check_below(&rng, 300));
            CHECK_OK(pya_trace_string(writer, text, (size_t)length, &id));
            n_strings = id > n_strings ? id : n_strings;
        }
        if (check_below(&rng, 4) == 0) {
            struct pya_trace_frame frame = {
                .parent = (uint32_t)check_below(&rng, n_stacks + 1),
                .name = (uint32_t)check_below(&rng, n_strings + 1),
                .line = (uint32_t)check_below(&rng, 9)};
            CHECK_OK(pya_trace_stack(writer, &frame, &id));
            n_stacks = id > n_stacks ? id : n_stacks;
        }
        struct pya_trace_event e = random_event(&rng, &time, n_stacks, n_strings);
        CHECK_OK(pya_trace_write(writer, &e));
    }
    CHECK_OK(pya_trace_close(writer));
}

static bool
same_event(const struct pya_trace_event *a, const struct pya_trace_event *b) {
    return a->kind == b->kind && a->device == b->device && a->time_ns == b->time_ns &&
           a->thread == b->thread && a->stream == b->stream && a->addr == b->addr &&
           a->bytes == b->bytes && a->arg == b->arg && a->stack == b->stack && a->text == b->text;
}

/* Reads until the end or an error.  Returns how many of the seed's events came; all of them must be equal. */
static unsigned
read_random(const char *path, uint64_t seed, pya_status *status, bool *complete) {
    struct pya_trace_reader *reader = NULL;
    *status = pya_trace_open(path, &reader);
    *complete = false;
    if (*status != PYA_OK) {
        return 0;
    }
    uint64_t rng = seed;
    uint64_t time = 0;
    uint32_t n_strings = 0;
    uint32_t n_stacks = 0;
    unsigned n = 0;
    bool more = true;
    while (more) {
        struct pya_trace_event got;
        *status = pya_trace_next(reader, &got, &more);
        if (*status != PYA_OK || !more) {
            break;
        }
        if (check_below(&rng, 4) == 0) {
            char text[32];
            snprintf(text, sizeof text, "text %u", (unsigned)check_below(&rng, 300));
            /* new strings are numbered in order */
            uint32_t id = 1;
            while (id <= n_strings && strcmp(pya_trace_text(reader, id), text) != 0) {
                id++;
            }
            CHECK(
                pya_trace_text(reader, id) != NULL &&
                strcmp(pya_trace_text(reader, id), text) == 0);
            n_strings = id > n_strings ? id : n_strings;
        }
        if (check_below(&rng, 4) == 0) {
            struct pya_trace_frame want = {
                .parent = (uint32_t)check_below(&rng, n_stacks + 1),
                .name = (uint32_t)check_below(&rng, n_strings + 1),
                .line = (uint32_t)check_below(&rng, 9)};
            struct pya_trace_frame have;
            uint32_t id = 1;
            while (pya_trace_frame(reader, id, &have) && memcmp(&have, &want, sizeof want) != 0) {
                id++;
            }
            CHECK(pya_trace_frame(reader, id, &have));
            n_stacks = id > n_stacks ? id : n_stacks;
        }
        struct pya_trace_event want = random_event(&rng, &time, n_stacks, n_strings);
        if (!CHECK(same_event(&got, &want))) {
            break;
        }
        n++;
    }
    *complete = pya_trace_is_complete(reader);
    CHECK(*status == PYA_OK || pya_trace_error(reader)[0] != '\0');
    pya_trace_reader_destroy(reader);
    return n;
}

static void
test_round_trip(void) {
    for (uint64_t seed = check_seed(); seed < check_seed() + 3; seed++) {
        pya_status status;
        bool complete;
        write_random(in_folder("a.pya"), seed, 20000);
        CHECK_EQ(read_random(in_folder("a.pya"), seed, &status, &complete), 20000);
        CHECK_OK(status);
        CHECK(complete);
    }
    struct pya_trace_writer *writer = NULL;
    CHECK_EQ(pya_trace_create(in_folder("a.pya"), false, &writer), PYA_E_INVAL);
    CHECK_EQ(pya_trace_create("/nonexistent/a.pya", false, &writer), PYA_E_IO);
    struct pya_trace_reader *reader = NULL;
    CHECK_EQ(pya_trace_open("/nonexistent/a.pya", &reader), PYA_E_IO);
    CHECK(writer == NULL && reader == NULL);
}

static void
test_crc_is_zlibs(void) {
    CHECK_EQ(varint_crc32(0, (const uint8_t *)"123456789", 9), 0xCBF43926U);
    CHECK_EQ(varint_crc32(0, (const uint8_t *)"", 0), 0);
}

/* Cut anywhere: everything read is right, nothing is an error, and the file does not claim to be complete. */
static void
test_cut_off(void) {
    write_random(in_folder("c.pya"), 7, 400);
    size_t n = 0;
    uint8_t *data = slurp(in_folder("c.pya"), &n);
    unsigned last = 0;
    for (size_t cut = 16; cut < n; cut += cut + 97 < n ? 13 : 1) {
        pya_status status;
        bool complete;
        spill(in_folder("d.pya"), data, cut);
        unsigned got = read_random(in_folder("d.pya"), 7, &status, &complete);
        CHECK_OK(status);
        CHECK(!complete);
        CHECK(got >= last);
        last = got;
    }
    free(data);
}

static void
test_damage(void) {
    write_random(in_folder("c.pya"), 8, 3000);
    size_t n = 0;
    uint8_t *data = slurp(in_folder("c.pya"), &n);
    uint64_t rng = check_seed();
    uint64_t rounds = check_budget(300);
    for (uint64_t i = 0; i < rounds; i++) {
        size_t at = 12 + check_below(&rng, n - 12);
        uint8_t bit = (uint8_t)(1 << check_below(&rng, 8));
        data[at] ^= bit;
        spill(in_folder("d.pya"), data, n);
        data[at] ^= bit;
        pya_status status;
        bool complete;
        unsigned got = read_random(in_folder("d.pya"), 8, &status, &complete);
        CHECK(status == PYA_E_CORRUPT || !complete);
        CHECK(got <= 3000);
    }
    memcpy(data, "PYATRACF", 8);
    spill(in_folder("d.pya"), data, n);
    struct pya_trace_reader *reader = NULL;
    CHECK_EQ(pya_trace_open(in_folder("d.pya"), &reader), PYA_E_CORRUPT);
    memcpy(data, "PYATRACE\2", 9);
    spill(in_folder("d.pya"), data, n);
    CHECK_EQ(pya_trace_open(in_folder("d.pya"), &reader), PYA_E_CORRUPT);
    spill(in_folder("d.pya"), data, 3);
    CHECK_EQ(pya_trace_open(in_folder("d.pya"), &reader), PYA_E_CORRUPT);
    free(data);
}

/* Random payloads under a right checksum: what a hostile author would write. */
static void
test_hostile(void) {
    uint64_t rng = check_seed();
    uint64_t rounds = check_budget(3000);
    for (uint64_t i = 0; i < rounds; i++) {
        uint8_t data[16 + 32 + 256] = "PYATRACE\1";
        uint32_t bytes = 1 + (uint32_t)check_below(&rng, 256);
        uint8_t *payload = data + 48;
        for (uint32_t k = 0; k < bytes; k++) {
            uint64_t dice = check_random(&rng);
            payload[k] = (dice & 3) == 0   ? 0xFF
                         : (dice & 3) == 1 ? (uint8_t)(dice >> 8 & 31)
                                           : (uint8_t)(dice >> 8);
        }
        uint32_t head[3] = {0x43415950, bytes, 1 + (uint32_t)check_below(&rng, 40)};
        memcpy(data + 16, head, sizeof head);
        uint32_t crc = varint_crc32(0, data + 16, 12);
        crc = varint_crc32(crc, data + 32, 16);
        crc = varint_crc32(crc, payload, bytes);
        memcpy(data + 28, &crc, sizeof crc);
        spill(in_folder("h.pya"), data, 48 + bytes);
        struct pya_trace_reader *reader = NULL;
        CHECK_OK(pya_trace_open(in_folder("h.pya"), &reader));
        struct pya_trace_event e;
        bool more = true;
        unsigned n = 0;
        while (pya_trace_next(reader, &e, &more) == PYA_OK && more) {
            struct pya_trace_frame frame;
            uint32_t stack = e.stack;
            while (pya_trace_frame(reader, stack, &frame)) {
                CHECK(frame.parent < stack);
                stack = frame.parent;
            }
            CHECK(e.text == 0 || pya_trace_text(reader, e.text) != NULL);
            n++;
        }
        CHECK(n <= bytes);
        pya_trace_reader_destroy(reader);
    }
}

static void
test_writer_refuses(void) {
    struct pya_trace_writer *writer = NULL;
    CHECK_OK(pya_trace_create(in_folder("w.pya"), true, &writer));
    struct pya_trace_event e = {.kind = 26}; /* the first one that does not exist */
    CHECK_EQ(pya_trace_write(writer, &e), PYA_E_INVAL);
    e = (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .stack = 1};
    CHECK_EQ(pya_trace_write(writer, &e), PYA_E_INVAL);
    e = (struct pya_trace_event){.kind = PYA_TRACE_ALLOC, .device = PYA_MAX_DEVICES};
    CHECK_EQ(pya_trace_write(writer, &e), PYA_E_INVAL); /* the reader would call the file damaged */
    struct pya_trace_frame frame = {.parent = 1};
    uint32_t id = 0;
    CHECK_EQ(pya_trace_stack(writer, &frame, &id), PYA_E_INVAL);
    char *large = malloc(100000);
    memset(large, 'x', 100000);
    CHECK_OK(pya_trace_string(writer, large, 100000, &id)); /* cut to what the format holds */
    e = (struct pya_trace_event){.kind = PYA_TRACE_USER, .text = id, .time_ns = 9};
    CHECK_OK(pya_trace_write(writer, &e));
    e.time_ns = 3; /* a clock that goes back */
    CHECK_OK(pya_trace_write(writer, &e));
    CHECK_OK(pya_trace_close(writer));
    struct pya_trace_reader *reader = NULL;
    CHECK_OK(pya_trace_open(in_folder("w.pya"), &reader));
    bool more = false;
    CHECK_OK(pya_trace_next(reader, &e, &more));
    CHECK_EQ(strlen(pya_trace_text(reader, e.text)), 65535);
    CHECK_OK(pya_trace_next(reader, &e, &more));
    CHECK_EQ(e.time_ns, 9);
    pya_trace_reader_destroy(reader);
    free(large);
}

/* A file that could not grow is reported as that, also by the calls that follow, whatever happened since. */
static void
test_errno_of_the_first_failure_stays(void) {
    struct rlimit before;
    struct rlimit small;
    struct pya_trace_writer *writer = NULL;
    static char text[60000];
    uint32_t id = 0;
    memset(text, 'x', sizeof text);
    CHECK_OK(pya_trace_create(in_folder("e.pya"), true, &writer));
    CHECK_OK(pya_trace_string(writer, text, sizeof text, &id));
    fflush(stdout);
    CHECK_OK(getrlimit(RLIMIT_FSIZE, &before));
    small = before;
    small.rlim_cur = 4096;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    CHECK_OK(setrlimit(RLIMIT_FSIZE, &small));
    pya_status flushed = pya_trace_flush(writer);
    int flush_errno = errno;
    errno = 0;
    pya_status defined = pya_trace_string(writer, "y", 1, &id);
    int define_errno = errno;
    errno = 0;
    pya_status closed = pya_trace_close(writer);
    int close_errno = errno;
    CHECK_OK(setrlimit(RLIMIT_FSIZE, &before));
    (void)signal(SIGXFSZ, handler);
    CHECK_EQ(flushed, PYA_E_IO);
    CHECK_EQ(defined, PYA_E_IO);
    CHECK_EQ(closed, PYA_E_IO);
    CHECK_EQ(flush_errno, EFBIG);
    CHECK_EQ(define_errno, EFBIG);
    CHECK_EQ(close_errno, EFBIG);
}

struct author {
    struct pya_trace_writer *writer;
    uint64_t number;
    pthread_t thread;
};

static void *
author_run(void *arg) {
    struct author *me = arg;
    for (unsigned i = 0; i < 5000; i++) {
        char text[32];
        int n = snprintf(text, sizeof text, "%u", i % 100);
        struct pya_trace_event e = {
            .kind = PYA_TRACE_USER, .thread = me->number, .arg = i, .time_ns = i};
        if (pya_trace_string(me->writer, text, (size_t)n, &e.text) != PYA_OK ||
            pya_trace_write(me->writer, &e) != PYA_OK) {
            return NULL;
        }
    }
    return NULL;
}

static void
check_authors(const char *name, uint64_t n_events) {
    struct pya_trace_reader *reader = NULL;
    uint64_t next[5] = {0};
    struct pya_trace_event e;
    bool more = true;
    CHECK_OK(pya_trace_open(in_folder(name), &reader));
    while (CHECK_OK(pya_trace_next(reader, &e, &more)) && more) {
        CHECK_EQ(e.arg, next[e.thread]); /* each thread's events in its order */
        CHECK_EQ(atoi(pya_trace_text(reader, e.text)), e.arg % 100);
        next[e.thread]++;
    }
    CHECK_EQ(next[1] + next[2] + next[3] + next[4], n_events);
    pya_trace_reader_destroy(reader);
}

static void
test_threads(void) {
    struct pya_trace_writer *writer = NULL;
    CHECK_OK(pya_trace_create(in_folder("t.pya"), true, &writer));
    struct author authors[4];
    for (uint64_t i = 0; i < 4; i++) {
        authors[i] = (struct author){.writer = writer, .number = i + 1};
        CHECK_EQ(pthread_create(&authors[i].thread, NULL, author_run, &authors[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(authors[i].thread, NULL);
    }
    CHECK_OK(pya_trace_close(writer));
    check_authors("t.pya", 20000);
}

/* A child does nothing and waits for nobody: a thread of its parent may have been writing. */
static void
test_fork(void) {
    struct author author = {.number = 1};
    struct pya_trace_event e = {.kind = PYA_TRACE_SNAPSHOT};
    CHECK_OK(pya_trace_create(in_folder("f.pya"), true, &author.writer));
    CHECK_EQ(pthread_create(&author.thread, NULL, author_run, &author), 0);
    for (int i = 0; i < 20; i++) {
        const pid_t child = fork();
        if (child == 0) {
            (void)alarm(60);
            const bool good = pya_trace_string(author.writer, "a", 1, &e.text) == PYA_E_FORKED &&
                              pya_trace_write(author.writer, &e) == PYA_E_FORKED &&
                              pya_trace_flush(author.writer) == PYA_E_FORKED &&
                              pya_trace_close(author.writer) == PYA_E_FORKED;
            syscall(SYS_exit_group, good ? 0 : 1); /* after _exit TSan would miss the thread */
        }
        int status = 1;
        waitpid(child, &status, 0);
        CHECK_EQ(status, 0);
    }
    pthread_join(author.thread, NULL);
    CHECK_OK(pya_trace_close(author.writer));
    check_authors("f.pya", 5000);
}

static void
test_host_memory_sweep(void) {
    for (unsigned nth = 1;; nth++) {
        size_t live = fault_live();
        struct pya_trace_writer *writer = NULL;
        struct pya_trace_reader *reader = NULL;
        fault_arm(nth);
        pya_status status = pya_trace_create(in_folder("s.pya"), true, &writer);
        uint32_t id = 0;
        for (int i = 0; i < 300 && status == PYA_OK; i++) {
            char text[16];
            int n = snprintf(text, sizeof text, "%d", i);
            status = pya_trace_string(writer, text, (size_t)n, &id);
            struct pya_trace_frame frame = {.name = id};
            status = status == PYA_OK ? pya_trace_stack(writer, &frame, &id) : status;
        }
        if (writer != NULL) {
            pya_status closed = pya_trace_close(writer);
            status = status == PYA_OK ? closed : status;
        }
        if (status == PYA_OK) {
            status = pya_trace_open(in_folder("s.pya"), &reader);
        }
        struct pya_trace_event e;
        bool more = true;
        while (status == PYA_OK && more) {
            status = pya_trace_next(reader, &e, &more);
        }
        pya_trace_reader_destroy(reader);
        bool fired = fault_disarm();
        CHECK_EQ(fault_live(), live);
        CHECK_EQ(status, fired ? PYA_E_HOST_NOMEM : PYA_OK);
        if (!fired) {
            CHECK(nth > 300);
            break;
        }
    }
}

static const struct check_case cases[] = {
    {"round_trip", test_round_trip},
    {"crc_is_zlibs", test_crc_is_zlibs},
    {"cut_off", test_cut_off},
    {"damage", test_damage},
    {"hostile", test_hostile},
    {"writer_refuses", test_writer_refuses},
    {"errno_stays", test_errno_of_the_first_failure_stays},
    {"threads", test_threads},
    {"fork", test_fork},
    {"host_memory_sweep", test_host_memory_sweep},
};

int
main(int argc, char **argv) {
    return check_main_in_folder(argc, argv, cases, sizeof cases / sizeof *cases, folder);
}
