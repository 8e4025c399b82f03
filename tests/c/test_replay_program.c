/* A program read from a trace file: what it keeps, why one cannot be read, and every failure on the way. */
#include "check.h"
#include "fault.h"

#include "replay/program.h"

static char path[] = "/tmp/pya-program-XXXXXX";

/* n blocks one after the other, on the given number of streams, each after a note. */
static void
write_program(uint64_t n, uint64_t n_streams, uint64_t bytes) {
    struct pya_trace_writer *writer = NULL;
    if (!CHECK_OK(pya_trace_create(path, true, &writer))) {
        exit(1);
    }
    for (uint64_t i = 0; i < n; i++) {
        char note[32];
        uint32_t text = 0;
        snprintf(note, sizeof note, "note=%" PRIu64, i);
        CHECK_OK(pya_trace_string(writer, note, strlen(note), &text));
        const struct pya_trace_event events[] = {
            {.kind = PYA_TRACE_USER, .text = text},
            {.kind = PYA_TRACE_ALLOC, .addr = 512, .bytes = bytes, .stream = i % n_streams},
            {.kind = PYA_TRACE_FREE, .addr = 512}};
        for (size_t k = 0; k < 3; k++) {
            CHECK_OK(pya_trace_write(writer, &events[k]));
        }
    }
    CHECK_OK(pya_trace_close(writer));
}

static void
check_program(const struct pya_program *program, uint64_t n) {
    struct pya_program_info info;
    size_t n_notes = 0;
    char *const *notes = pya_program_notes(program, &n_notes);
    pya_program_query(program, &info);
    CHECK_EQ(info.n_allocs, n);
    CHECK_EQ(info.n_ops, 2 * n);
    CHECK_EQ(info.peak_live_bytes, 1024);
    CHECK(info.is_complete);
    CHECK_EQ(n_notes, n < PYA_TRACE_NOTES ? n : PYA_TRACE_NOTES);
    for (size_t i = 0; i < n_notes; i++) {
        CHECK_EQ(strtoull(notes[i] + strlen("note="), NULL, 10), i);
    }
}

static void
test_notes_are_kept(void) {
    static const uint64_t counts[] = {0, 3, PYA_TRACE_NOTES + 1};
    for (size_t i = 0; i < 3; i++) {
        struct pya_program *program = NULL;
        char message[200] = "";
        write_program(counts[i], 1, 1024);
        CHECK_OK(pya_program_load(path, NULL, &program, message, sizeof message));
        if (program != NULL && counts[i] > 0) {
            check_program(program, counts[i]);
        }
        pya_program_destroy(program);
    }
}

static void
test_no_host_memory(void) {
    bool fired = true;
    write_program(40, 1, 1024);
    for (unsigned long nth = 1; fired; nth++) {
        struct pya_program *program = NULL;
        char message[200] = "";
        const size_t live = fault_live();
        fault_arm(nth);
        const pya_status st = pya_program_load(path, NULL, &program, message, sizeof message);
        fired = fault_disarm();
        CHECK_EQ(st, fired ? PYA_E_HOST_NOMEM : PYA_OK);
        CHECK(st == PYA_OK ? program != NULL : program == NULL && message[0] != '\0');
        if (program != NULL) {
            check_program(program, 40);
        }
        pya_program_destroy(program);
        CHECK_EQ(fault_live(), live);
    }
}

static bool
stop(void *arg, uint64_t bytes_done, uint64_t bytes_all) {
    CHECK(bytes_done <= bytes_all);
    ++*(int *)arg;
    return false;
}

static void
check_refused(const struct pya_program_watch *watch, pya_status status, const char *why) {
    struct pya_program *program = NULL;
    char message[200] = "";
    const size_t live = fault_live();
    CHECK_EQ(pya_program_load(path, watch, &program, message, sizeof message), status);
    CHECK(program == NULL);
    if (!CHECK(strncmp(message, path, strlen(path)) == 0 && strstr(message, why) != NULL)) {
        fprintf(stderr, "    %s\n", message);
    }
    CHECK_EQ(fault_live(), live);
}

static void
test_why_it_cannot_be_read(void) {
    int n_told = 0;
    const struct pya_program_watch watch = {stop, &n_told};
    write_program(5000, 5000, 1024);
    check_refused(NULL, PYA_E_LIMIT, "more than 4096 streams");
    write_program(1, 1, UINT64_C(1) << 40);
    check_refused(NULL, PYA_E_TOO_LARGE, "more than 512 GiB");
    write_program(100000, 1, 1024);
    check_refused(&watch, PYA_E_BUSY, "");
    CHECK_EQ(n_told, 1);
    FILE *file = fopen(path, "r+");
    CHECK(file != NULL && fseek(file, 10000, SEEK_SET) == 0);
    CHECK(fputs("something else", file) != EOF && fclose(file) == 0);
    check_refused(NULL, PYA_E_CORRUPT, "near byte");
    CHECK_EQ(truncate(path, 3), 0);
    check_refused(NULL, PYA_E_CORRUPT, "not a recording");
    CHECK_EQ(unlink(path), 0);
    check_refused(NULL, PYA_E_IO, "No such file");
}

static const struct check_case cases[] = {
    {"notes_are_kept", test_notes_are_kept},
    {"no_host_memory", test_no_host_memory},
    {"why_it_cannot_be_read", test_why_it_cannot_be_read},
};

int
main(int argc, char **argv) {
    return check_main_with_file(argc, argv, cases, sizeof cases / sizeof *cases, path);
}
