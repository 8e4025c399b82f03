/* Who may write a trace file: one process at a time, whoever else tries, and whatever a killed process left. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "folder.h"

#include "replay/trace.h"

static char folder[64] = "/tmp/pya-writers-XXXXXX";

/* The same as before: everything opened since is closed. */
static int
next_descriptor(void) {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

/* A trace, and its name while it is written. */
struct file {
    char path[128];
    char part[256];
};

static struct file
file_called(const char *name) {
    struct file file;
    snprintf(file.path, sizeof file.path, "%s/%s", folder, name);
    snprintf(file.part, sizeof file.part, "%s.part", file.path);
    return file;
}

/* A file that is being written stays its writer's, with or without overwriting, also if the other may not read it and
 * so cannot see that.  A file that nobody writes any more is replaced. */
static void
test_one_writer_for_each_file(void) {
    const struct file file = file_called("shared.pya");
    struct pya_trace_writer *first = NULL;
    struct pya_trace_writer *second = NULL;
    const int descriptor = next_descriptor();
    CHECK_OK(pya_trace_create(file.path, false, &first));
    CHECK_EQ(pya_trace_create(file.path, false, &second), PYA_E_BUSY);
    CHECK_EQ(pya_trace_create(file.path, true, &second), PYA_E_BUSY);
    CHECK(chmod(folder, 0777) == 0 && chmod(file.part, 0) == 0);
    const bool is_root = geteuid() == 0;
    if (!is_root || seteuid(65534) == 0) { /* nobody; some containers have one user only */
        CHECK_EQ(pya_trace_create(file.path, true, &second), PYA_E_IO);
        CHECK_EQ(errno, EACCES);
        CHECK(!is_root || seteuid(0) == 0);
    }
    struct pya_trace_event event = {.kind = PYA_TRACE_SNAPSHOT};
    CHECK_OK(pya_trace_write(first, &event));
    CHECK_OK(pya_trace_close(first));
    CHECK_OK(pya_trace_create(file.path, true, &second));
    CHECK_OK(pya_trace_close(second));
    FILE *left = fopen(file.part, "w");
    CHECK(left != NULL && fclose(left) == 0);
    CHECK_OK(pya_trace_create(file.path, true, &second));
    CHECK_OK(pya_trace_close(second));
    CHECK_EQ(access(file.part, F_OK), -1);
    CHECK_EQ(next_descriptor(), descriptor);
}

/* A recording that was given up removes its file; its writer may be closed when another one has that name. */
static void
test_a_name_that_has_passed_on(void) {
    const struct file file = file_called("passed.pya");
    struct pya_trace_writer *first = NULL;
    struct pya_trace_writer *second = NULL;
    const int descriptor = next_descriptor();
    CHECK_OK(pya_trace_create(file.path, false, &first));
    CHECK_EQ(unlink(file.part), 0);
    CHECK_OK(pya_trace_create(file.path, false, &second));
    CHECK_EQ(pya_trace_close(first), PYA_E_IO);
    CHECK_EQ(errno, ENOENT);
    CHECK_EQ(access(file.path, F_OK), -1);
    CHECK_OK(pya_trace_close(second));
    CHECK_EQ(access(file.path, F_OK), 0);
    CHECK_EQ(next_descriptor(), descriptor);
}

/* Two processes that begin at once, distinguished by their locks like two threads: one of them gets the name. */
enum { N_RACES = 2000 };
static pthread_barrier_t race_begins;
static char race_path[128];
static pya_status race_ends[2];

static void *
race_once(void *number) {
    pya_status *end = &race_ends[(uintptr_t)number];
    struct pya_trace_writer *writer = NULL;
    (void)pthread_barrier_wait(&race_begins);
    *end = pya_trace_create(race_path, false, &writer);
    if (*end == PYA_OK) {
        *end = pya_trace_close(writer);
    }
    return NULL;
}

static void
test_two_at_once(void) {
    (void)snprintf(race_path, sizeof race_path, "%s/race.pya", folder);
    CHECK_EQ(pthread_barrier_init(&race_begins, NULL, 2), 0);
    const int descriptor = next_descriptor();
    int n_lost = 0;
    int n_failed = 0;
    for (int i = 0; i < N_RACES; i++) {
        pthread_t other;
        if (!CHECK_EQ(pthread_create(&other, NULL, race_once, (void *)1), 0)) {
            break;
        }
        (void)race_once((void *)0);
        CHECK_EQ(pthread_join(other, NULL), 0);
        int n_done = 0;
        for (int k = 0; k < 2; k++) {
            n_done += race_ends[k] == PYA_OK;
            n_failed +=
                race_ends[k] != PYA_OK && race_ends[k] != PYA_E_INVAL && race_ends[k] != PYA_E_BUSY;
        }
        n_lost += n_done > 1; /* the second has replaced the first */
        CHECK_EQ(unlink(race_path), n_done > 0 ? 0 : -1);
    }
    CHECK_EQ(n_lost, 0);
    CHECK_EQ(n_failed, 0);
    CHECK_EQ(next_descriptor(), descriptor);
    CHECK_EQ(pthread_barrier_destroy(&race_begins), 0);
}

static const struct check_case cases[] = {
    {"one_writer", test_one_writer_for_each_file},
    {"a_name_that_has_passed_on", test_a_name_that_has_passed_on},
    {"two_at_once", test_two_at_once},
};

int
main(int argc, char **argv) {
    return check_main_in_folder(argc, argv, cases, sizeof cases / sizeof *cases, folder);
}
