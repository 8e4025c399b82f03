/* The side that shares: one thread per process, begun with the first name. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "ipc.h"
#include "protocol.h"

/* At once; more wait their turn. */
enum { SERVER_CLIENTS = 64, SERVER_PAUSE_NS = 10000000 };

static const char name_magic[8] = "pyalloc1";

/* Written under the lock, before the thread begins, and never again but in a forked child. */
static struct {
    pthread_mutex_t lock;
    int fd; /* listens; -1: not yet */
    int32_t pid;
    bool watches_forks;
    unsigned char secret[IPC_SECRET_BYTES];
    struct pya_heap *heap;
} server = {.lock = PTHREAD_MUTEX_INITIALIZER, .fd = -1};

/* ---- the thread ---- */

static void
packet_put_fds(struct ipc_packet *packet, const int *fds, size_t n) {
    if (n == 0) {
        packet->header.msg_control = NULL;
        packet->header.msg_controllen = 0;
        return;
    }
    packet->header.msg_controllen = CMSG_SPACE(n * sizeof(int));
    struct cmsghdr *control = CMSG_FIRSTHDR(&packet->header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(control), fds, n * sizeof(int));
}

/* False: the connection is of no more use. */
static bool
server_answer(int client, const struct ipc_request *request) {
    const struct pya_shared shared = {
        .ptr = request->ptr, .n_pages = request->n_pages, .key = request->key};
    int fds[IPC_BATCH];
    struct ipc_packet packet;
    if (memcmp(request->secret, server.secret, IPC_SECRET_BYTES) != 0 || request->n == 0 ||
        request->n > IPC_BATCH) {
        return false;
    }
    pya_status st = pya_share_export(server.heap, &shared, request->first, request->n, fds);
    size_t n = st == PYA_OK ? request->n : 0;
    ipc_packet_init(&packet);
    packet.reply = (struct ipc_reply){.status = (int32_t)st, .n = (uint32_t)n};
    packet_put_fds(&packet, fds, n);
    ssize_t sent = sendmsg(client, &packet.header, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n > 0) {
        (void)close(fds[--n]);
    }
    return sent == (ssize_t)sizeof packet.reply;
}

/* False: it has gone, or says what no client of ours does. */
static bool
server_hear(int client) {
    struct ipc_request request;
    ssize_t n = recv(client, &request, sizeof request, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return true;
    }
    return n == (ssize_t)sizeof request && server_answer(client, &request);
}

static void
server_accept(struct pollfd *clients, nfds_t *n) {
    int client = accept4(clients[0].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) { /* no more open files: the client is still there in a while */
        (void)nanosleep(&(struct timespec){.tv_nsec = SERVER_PAUSE_NS}, NULL);
        return;
    }
    if (!ipc_is_ours(client)) {
        (void)close(client);
        return;
    }
    clients[(*n)++] = (struct pollfd){.fd = client, .events = POLLIN};
}

static void *
server_run(void *arg) {
    struct pollfd clients[1 + SERVER_CLIENTS] = {{.fd = server.fd}};
    nfds_t n = 1;
    (void)arg;
    for (;;) {
        clients[0].events = n <= SERVER_CLIENTS ? POLLIN : 0;
        if (poll(clients, n, -1) < 0) {
            continue;
        }
        for (nfds_t i = n; i-- > 1;) {
            if (clients[i].revents != 0 && !server_hear(clients[i].fd)) {
                (void)close(clients[i].fd);
                clients[i] = clients[--n];
            }
        }
        if ((clients[0].revents & POLLIN) != 0) {
            server_accept(clients, &n);
        }
    }
    return NULL;
}

/* ---- its beginning ---- */

/* The thread is the parent's, and so is its memory. */
static void
server_after_fork(void) {
    if (server.fd >= 0) {
        (void)close(server.fd);
        server.fd = -1;
    }
    (void)pthread_mutex_init(&server.lock, NULL);
}

static bool
server_listen(int *out) {
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    socklen_t n = ipc_address(server.pid, server.secret, &address);
    if (bind(fd, (const struct sockaddr *)&address, n) != 0 || listen(fd, SERVER_CLIENTS) != 0) {
        int error = errno;
        (void)close(fd);
        errno = error;
        return false;
    }
    *out = fd;
    return true;
}

/* Signals are for the program's own threads. */
static bool
server_begin_thread(void) {
    sigset_t all;
    sigset_t before;
    pthread_t thread;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&thread, NULL, server_run, NULL);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) {
        errno = error;
        return false;
    }
    (void)pthread_detach(thread);
    return true;
}

static bool
server_begin(struct pya_heap *heap) {
    server.heap = heap;
    server.pid = (int32_t)getpid();
    if (!server.watches_forks) {
        server.watches_forks = pthread_atfork(NULL, NULL, server_after_fork) == 0;
    }
    if (getrandom(server.secret, sizeof server.secret, 0) != (ssize_t)sizeof server.secret ||
        !server_listen(&server.fd)) {
        return false;
    }
    if (!server_begin_thread()) {
        int error = errno;
        (void)close(server.fd);
        server.fd = -1;
        errno = error;
        return false;
    }
    return true;
}

pya_status
pya_ipc_share(
    struct pya_heap *heap, pya_dptr ptr, struct pya_ipc_name *name, size_t *offset, char *why) {
    struct pya_shared shared;
    why[0] = '\0';
    pya_status st = pya_share(heap, ptr, &shared);
    if (st != PYA_OK) {
        return st;
    }
    (void)pthread_mutex_lock(&server.lock);
    bool is_served = server.fd >= 0 || server_begin(heap);
    int error = errno;
    (void)pthread_mutex_unlock(&server.lock);
    if (!is_served) {
        char text[128];
        (void)snprintf(
            why, PYA_IPC_WHY_BYTES, "the socket over which other processes fetch it failed: %s",
            strerror_r(error, text, sizeof text));
        return PYA_E_HOST_NOMEM;
    }
    *offset = shared.offset;
    *name = (struct pya_ipc_name){
        .ptr = ptr, .key = shared.key, .n_pages = shared.n_pages, .pid = server.pid};
    memcpy(name->magic, name_magic, sizeof name_magic);
    memcpy(name->secret, server.secret, sizeof server.secret);
    return PYA_OK;
}

bool
pya_ipc_is_name(const void *name, size_t bytes) {
    return bytes == sizeof(struct pya_ipc_name) && memcmp(name, name_magic, sizeof name_magic) == 0;
}
