/* Names for blocks, and the socket that brings their pages.  Here both sides are one process. */
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/ipc.h"
#include "ipc/protocol.h"
#include "world.h"

/* One for all cases: the thread that hands out pages serves one heap for the life of a process. */
static struct world the_world;
static size_t n_at_rest; /* files open while nobody is connected */

static void
world_share(pya_dptr ptr, struct pya_ipc_name *name, size_t *offset) {
    char why[PYA_IPC_WHY_BYTES];
    CHECK_OK(pya_ipc_share(the_world.heap, ptr, name, offset, why));
    CHECK(pya_ipc_is_name(name, sizeof *name));
    CHECK_EQ(name->pid, getpid());
    CHECK(why[0] == '\0');
}

static size_t
n_open_files(void) {
    DIR *folder = opendir("/proc/self/fd");
    size_t n = 0;
    while (CHECK(folder != NULL) && readdir(folder) != NULL) {
        n++;
    }
    (void)closedir(folder);
    return n;
}

/* Waits until the server has accepted or closed all that it will: n files more than at rest. */
static bool
wait_for_files(size_t n) {
    for (int i = 0; i < 5000 && n_open_files() != n_at_rest + n; i++) {
        (void)usleep(1000);
    }
    return n_open_files() == n_at_rest + n;
}

/* More pages than one packet brings. */
static void
test_bytes_are_the_same(void) {
    struct pya_ipc_name name;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    pya_dptr small = take(&the_world, 700, 0);
    pya_dptr ptr = take(&the_world, (2 * IPC_BATCH + 1) * PYA_PAGE + 512, 0);
    world_share(ptr, &name, &offset);
    CHECK_OK(pya_ipc_open(the_world.heap, 0, &name, &base, why));
    volatile char *here = (volatile char *)(uintptr_t)ptr;
    volatile char *there = (volatile char *)(uintptr_t)(base + offset);
    for (size_t i = 0; i <= 2 * IPC_BATCH; i++) {
        here[i * PYA_PAGE] = (char)(i + 1);
        CHECK_EQ(there[i * PYA_PAGE], (char)(i + 1));
    }
    CHECK_OK(pya_import_close(the_world.heap, base));
    CHECK(wait_for_files(0));
    give(&the_world, ptr);
    give(&the_world, small);
}

static void
test_what_cannot_be_opened(void) {
    struct pya_ipc_name name;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base = 5;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    CHECK_EQ(pya_ipc_share(the_world.heap, ptr + 512, &name, &offset, why), PYA_E_FOREIGN);
    world_share(ptr, &name, &offset);
    struct pya_ipc_name wrong = name;
    wrong.secret[15] ^= 1;
    CHECK(pya_ipc_open(the_world.heap, 0, &wrong, &base, why) != PYA_OK);
    CHECK(strstr(why, "ended") != NULL);
    wrong = name;
    wrong.secret[0] ^= 1;
    CHECK(pya_ipc_open(the_world.heap, 0, &wrong, &base, why) != PYA_OK);
    CHECK(strstr(why, "has ended, or is in a container") != NULL);
    wrong = name;
    wrong.n_pages = UINT64_MAX / PYA_PAGE;
    CHECK(pya_ipc_open(the_world.heap, 0, &wrong, &base, why) != PYA_OK);
    wrong.n_pages = name.n_pages + 1;
    CHECK_EQ(pya_ipc_open(the_world.heap, 0, &wrong, &base, why), PYA_E_FOREIGN);
    wrong.n_pages = 0;
    CHECK_EQ(pya_ipc_open(the_world.heap, 0, &wrong, &base, why), PYA_E_INVAL);
    give(&the_world, ptr);
    CHECK_EQ(pya_ipc_open(the_world.heap, 0, &name, &base, why), PYA_E_FOREIGN);
    CHECK(strstr(why, "has freed it since") != NULL);
    CHECK_EQ(base, 5);
    CHECK(!pya_ipc_is_name("pyalloc2", 8));
    memset(&name, 'x', sizeof name);
    CHECK(!pya_ipc_is_name(&name, sizeof name));
}

/* A page that cannot be handed out, and one that cannot be mapped: no descriptor stays open on either side. */
static void
test_failures_leave_no_files_open(void) {
    static const enum pya_sim_call kinds[] = {PYA_SIM_PAGE_EXPORT, PYA_SIM_PAGE_IMPORT};
    struct pya_ipc_name name;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    pya_dptr ptr = take(&the_world, 7 * MIB, 0);
    world_share(ptr, &name, &offset);
    for (size_t i = 0; i < 2; i++) {
        pya_sim_fail(the_world.sim, 1U << kinds[i], 2, PYA_E_DEVICE, false);
        CHECK_EQ(pya_ipc_open(the_world.heap, 0, &name, &base, why), PYA_E_DEVICE);
        CHECK(pya_sim_fail_clear(the_world.sim));
        CHECK_EQ(strstr(why, "could not hand it over") != NULL, i == 0);
        CHECK(wait_for_files(0));
    }
    give(&the_world, ptr);
}

/* A client that sends nonsense is dropped.  Others are served meanwhile, also one that has said nothing yet. */
static void
test_strangers_are_put_off(void) {
    enum { NO_SECRET, MANY, NONE, SHORT, QUIET, N };
    struct pya_ipc_name name;
    struct sockaddr_un address;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    int fds[N];
    world_share(ptr, &name, &offset);
    socklen_t n = ipc_address(name.pid, name.secret, &address);
    for (int i = 0; i < N; i++) {
        fds[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        CHECK_EQ(connect(fds[i], (const struct sockaddr *)&address, n), 0);
    }
    struct ipc_request said = {.ptr = name.ptr, .key = name.key, .n_pages = 2, .n = 1};
    size_t bytes = sizeof said;
    CHECK_EQ(send(fds[NO_SECRET], &said, bytes, 0), (ssize_t)bytes);
    memcpy(said.secret, name.secret, sizeof said.secret);
    CHECK_EQ(send(fds[SHORT], &said, bytes - 4, 0), (ssize_t)bytes - 4);
    said.n = IPC_BATCH + 1;
    CHECK_EQ(send(fds[MANY], &said, bytes, 0), (ssize_t)bytes);
    said.n = 0;
    CHECK_EQ(send(fds[NONE], &said, bytes, 0), (ssize_t)bytes);
    CHECK_OK(pya_ipc_open(the_world.heap, 0, &name, &base, why));
    CHECK_OK(pya_import_close(the_world.heap, base));
    struct ipc_reply reply;
    for (int i = 0; i < QUIET; i++) {
        CHECK_EQ(recv(fds[i], &reply, sizeof reply, 0), 0); /* closed */
    }
    CHECK_EQ(recv(fds[QUIET], &reply, sizeof reply, MSG_DONTWAIT), -1); /* says nothing, and may */
    said.n = 2;
    CHECK_EQ(send(fds[QUIET], &said, bytes, 0), (ssize_t)bytes);
    CHECK_EQ(recv(fds[QUIET], &reply, sizeof reply, 0), (ssize_t)sizeof reply);
    CHECK(reply.status == PYA_OK && reply.n == 2);
    for (int i = 0; i < N; i++) {
        CHECK_EQ(close(fds[i]), 0);
    }
    CHECK(wait_for_files(0)); /* including those that were handed out */
    give(&the_world, ptr);
}

/* Sends less than a reply to the first client, with an open file of its own. */
static void *
answer_short(void *arg) {
    struct ipc_packet packet;
    struct ipc_request request;
    int listening = *(int *)arg;
    int client = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    CHECK_EQ(recv(client, &request, sizeof request, 0), (ssize_t)sizeof request);
    ipc_packet_init(&packet);
    packet.body.iov_len = 1;
    packet.header.msg_controllen = CMSG_SPACE(sizeof listening);
    packet.control.align = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof listening)};
    memcpy(CMSG_DATA(&packet.control.align), &listening, sizeof listening);
    CHECK_EQ(sendmsg(client, &packet.header, 0), 1);
    CHECK_EQ(close(client), 0);
    return NULL;
}

/* A reply of another length is refused, and the files that came with it are closed. */
static void
test_short_reply(void) {
    struct pya_ipc_name name;
    struct sockaddr_un address;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    pthread_t thread;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    world_share(ptr, &name, &offset);
    name.secret[0] ^= 1; /* not the server's socket */
    socklen_t n = ipc_address(name.pid, name.secret, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK_EQ(bind(fd, (const struct sockaddr *)&address, n), 0);
    CHECK_EQ(listen(fd, 1), 0);
    CHECK_EQ(pthread_create(&thread, NULL, answer_short, &fd), 0);
    CHECK_EQ(pya_ipc_open(the_world.heap, 0, &name, &base, why), PYA_E_DEVICE);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(close(fd), 0);
    CHECK(wait_for_files(0));
    give(&the_world, ptr);
}

/* Another user who knows the secret. */
static void
test_other_users_are_put_off(void) {
    enum { NOBODY = 65534 };
    struct pya_ipc_name name;
    struct sockaddr_un address;
    size_t offset;
    int status = -1;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    world_share(ptr, &name, &offset);
    struct ipc_request request = {.ptr = name.ptr, .key = name.key, .n_pages = 2, .n = 1};
    memcpy(request.secret, name.secret, sizeof request.secret);
    socklen_t n = ipc_address(name.pid, name.secret, &address);
    pid_t child = fork();
    if (child == 0) {
        struct ipc_reply reply;
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (getuid() == NOBODY || setuid(NOBODY) != 0) { /* needs root */
            _exit(0);
        }
        bool is_in = connect(fd, (const struct sockaddr *)&address, n) == 0;
        (void)!send(fd, &request, sizeof request, MSG_NOSIGNAL);
        _exit(is_in && recv(fd, &reply, sizeof reply, 0) <= 0 ? 0 : 1);
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(wait_for_files(0));
    give(&the_world, ptr);
}

/* So many are served at once; the others once those have gone. */
static void
test_too_many_wait_their_turn(void) {
    enum { N_SERVED = 64, N = N_SERVED + 6 };
    struct pya_ipc_name name;
    struct sockaddr_un address;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    int fds[N];
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    world_share(ptr, &name, &offset);
    socklen_t n = ipc_address(name.pid, name.secret, &address);
    CHECK(wait_for_files(0));
    for (int i = 0; i < N; i++) {
        fds[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        CHECK_EQ(connect(fds[i], (const struct sockaddr *)&address, n), 0);
    }
    CHECK(wait_for_files(N + N_SERVED));
    for (int i = 0; i < N; i++) {
        CHECK_EQ(close(fds[i]), 0);
    }
    CHECK(wait_for_files(0));
    CHECK_OK(pya_ipc_open(the_world.heap, 0, &name, &base, why));
    CHECK_OK(pya_import_close(the_world.heap, base));
    give(&the_world, ptr);
}

static void *
open_often(void *arg) {
    const struct pya_ipc_name *name = arg;
    char why[PYA_IPC_WHY_BYTES];
    for (int i = 0; i < 20; i++) {
        pya_dptr base;
        if (CHECK_OK(pya_ipc_open(the_world.heap, 0, name, &base, why))) {
            CHECK_OK(pya_import_close(the_world.heap, base));
        }
    }
    return NULL;
}

static void
test_several_at_once(void) {
    enum { N_THREADS = 4 };
    pthread_t threads[N_THREADS];
    struct pya_ipc_name name;
    size_t offset;
    pya_dptr ptr = take(&the_world, 9 * MIB, 0);
    world_share(ptr, &name, &offset);
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, open_often, &name), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    give(&the_world, ptr);
}

/* Files of this thread alone; 0, 1 or 2 more can be opened: too few for the connection, for any page, for all pages. */
static void *
open_with_few_files(void *arg) {
    static const char *const reasons[] = {"no socket", "ulimit -n", "ulimit -n"};
    const struct pya_ipc_name *name = arg;
    char why[PYA_IPC_WHY_BYTES];
    pya_dptr base;
    int fds[256];
    size_t n = 0;
    CHECK_EQ(unshare(CLONE_FILES), 0);
    while (n < 256 && (fds[n] = dup(0)) >= 0) {
        n++;
    }
    CHECK(n > 2 && n < 256);
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(pya_ipc_open(the_world.heap, 0, name, &base, why), PYA_E_HOST_NOMEM);
        CHECK(strstr(why, reasons[i]) != NULL);
        const int fd = dup(0); /* none stays open */
        CHECK_EQ(fd >= 0, i > 0);
        CHECK(i == 0 || close(fd) == 0);
        CHECK_EQ(close(fds[--n]), 0);
    }
    while (n > 0) {
        CHECK_EQ(close(fds[--n]), 0);
    }
    CHECK_OK(pya_ipc_open(the_world.heap, 0, name, &base, why));
    CHECK_OK(pya_import_close(the_world.heap, base));
    return NULL;
}

static void
test_few_files(void) {
    struct rlimit files;
    struct pya_ipc_name name;
    pthread_t thread;
    size_t offset;
    if (CHECK_ONE_IN > 1) {
        return; /* ThreadSanitizer takes the files of all threads for one set */
    }
    pya_dptr ptr = take(&the_world, 9 * MIB, 0);
    world_share(ptr, &name, &offset);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
    const struct rlimit few = {.rlim_cur = 200, .rlim_max = files.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    CHECK_EQ(pthread_create(&thread, NULL, open_with_few_files, &name), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
    CHECK(wait_for_files(0));
    give(&the_world, ptr);
}

static void
on_alarm(int number) {
    (void)number;
}

/* Signals whose handlers do not restart system calls. */
static void
test_signals_in_between(void) {
    struct sigaction action = {.sa_handler = on_alarm};
    const struct itimerval often = {.it_interval = {.tv_usec = 50}, .it_value = {.tv_usec = 50}};
    const struct itimerval never = {.it_value = {.tv_usec = 0}};
    struct pya_ipc_name name;
    size_t offset;
    pya_dptr ptr = take(&the_world, 9 * MIB, 0);
    world_share(ptr, &name, &offset);
    CHECK_EQ(sigaction(SIGALRM, &action, NULL), 0);
    CHECK_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    (void)open_often(&name);
    CHECK_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    give(&the_world, ptr);
}

/* A forked child owns nothing, neither to share nor to map at, and it does not keep the parent's socket. */
static void
test_forked_children(void) {
    struct pya_ipc_name name;
    struct pya_ipc_name other;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr base;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    world_share(ptr, &name, &offset);
    size_t n_files = n_open_files();
    pid_t child = fork();
    if (child == 0) {
        bool is_right = pya_ipc_share(the_world.heap, ptr, &other, &offset, why) == PYA_E_FORKED &&
                        pya_ipc_open(the_world.heap, 0, &name, &base, why) == PYA_E_FORKED &&
                        n_open_files() < n_files; /* the listening one and those of clients */
        _exit(is_right ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(pya_ipc_open(the_world.heap, 0, &name, &base, why));
    CHECK_OK(pya_import_close(the_world.heap, base));
    give(&the_world, ptr);
}

/* A process that may open no more files says so, and shares once it may again.  The server begins then, and blocks no
 * signal of the program. */
static void
server_begin_late(void) {
    struct rlimit files;
    struct pya_ipc_name name;
    char why[PYA_IPC_WHY_BYTES];
    size_t offset;
    pya_dptr ptr = take(&the_world, 3 * MIB, 0);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = files.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK_EQ(pya_ipc_share(the_world.heap, ptr, &name, &offset, why), PYA_E_HOST_NOMEM);
    CHECK(strstr(why, "Too many open files") != NULL);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
    world_share(ptr, &name, &offset);
    sigset_t blocked;
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, NULL, &blocked), 0);
    CHECK_EQ(sigismember(&blocked, SIGINT), 0);
    give(&the_world, ptr);
}

static const struct check_case cases[] = {
    {"bytes_are_the_same", test_bytes_are_the_same},
    {"what_cannot_be_opened", test_what_cannot_be_opened},
    {"failures_leave_no_files_open", test_failures_leave_no_files_open},
    {"strangers_are_put_off", test_strangers_are_put_off},
    {"short_reply", test_short_reply},
    {"other_users_are_put_off", test_other_users_are_put_off},
    {"too_many_wait_their_turn", test_too_many_wait_their_turn},
    {"several_at_once", test_several_at_once},
    {"few_files", test_few_files},
    {"signals_in_between", test_signals_in_between},
    {"forked_children", test_forked_children},
};

int
main(int argc, char **argv) {
    the_world = (struct world){
        .config = {
            .capacity_bytes = 512 * MIB, .address_bytes = (uint64_t)1 << 34, .backed = true}};
    world_init(&the_world, "");
    server_begin_late();
    n_at_rest = n_open_files();
    return check_main(argc, argv, cases, sizeof cases / sizeof *cases);
}
