/* The sharing side: one thread per process, started with the first name. */
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

/* Clients served at once; more wait their turn. */
enum { SERVER_CLIENTS = 64, SERVER_PAUSE_NS = 10000000 };

static const char name_magic[8] = {'p', 'y', 'a', 'l', 'l', 'o', 'c', '2'};

/* Written under the lock before the thread starts, and afterwards only in a forked child. */
static struct {
    pthread_mutex_t lock;
    int32_t pid;
    bool watches_forks;
    unsigned char secret[IPC_SECRET_BYTES];
    struct pya_heap *heap;
    /* Used by the thread only, except the first descriptor.  A forked child closes all of them. */
    struct pollfd clients[1 + SERVER_CLIENTS]; /* the first one listens; -1: not yet */
    nfds_t n_clients;
    int fds[IPC_BATCH];
    size_t n_fds;
    uint32_t n_pages[IPC_BATCH]; /* of each descriptor */
} server = {.lock = PTHREAD_MUTEX_INITIALIZER, .clients = {{.fd = -1}}};

/* ---- the thread ---- */

static void
packet_put_fds(struct ipc_packet *packet, const int *fds, size_t n) {
    if (n == 0) {
        packet->header.msg_control = NULL;
        packet->header.msg_controllen = 0;
        return;
    }
    packet->header.msg_controllen = CMSG_SPACE(n * sizeof(int));
    struct cmsghdr *control = &packet->control.align; /* CMSG_FIRSTHDR() */
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(control), fds, n * sizeof(int));
}

/* Sends the status with the descriptors in server.fds. */
static bool
server_send(int client, pya_status status) {
    struct ipc_packet packet;
    ipc_packet_init(&packet);
    packet.reply = (struct ipc_reply){.status = (int32_t)status, .n = (uint32_t)server.n_fds};
    memcpy(packet.reply.n_pages, server.n_pages, server.n_fds * sizeof(uint32_t));
    packet_put_fds(&packet, server.fds, server.n_fds);
    return sendmsg(client, &packet.header, MSG_NOSIGNAL | MSG_DONTWAIT) ==
           (ssize_t)sizeof packet.reply;
}

static void
server_drop_fds(void) {
    while (server.n_fds > 0) {
        (void)close(server.fds[--server.n_fds]);
    }
}

/* False: the connection cannot be used any more. */
static bool
server_answer(int client, const struct ipc_request *request) {
    const struct pya_shared shared = {
        .ptr = request->ptr, .n_pages = request->n_pages, .key = request->key};
    if (memcmp(request->secret, server.secret, IPC_SECRET_BYTES) != 0 || request->n == 0 ||
        request->n > IPC_BATCH) {
        return false;
    }
    size_t n = 0;
    pya_status st = pya_share_export(
        server.heap, &shared, request->first, request->n, server.fds, server.n_pages, &n);
    server.n_fds = st == PYA_OK ? n : 0;
    bool is_sent = server_send(client, st);
    if (!is_sent && server.n_fds > 0) { /* too many of the user's descriptors are in flight */
        server_drop_fds();
        is_sent = server_send(client, PYA_E_HOST_NOMEM);
    }
    server_drop_fds();
    return is_sent;
}

/* False: the client has gone, or sends what no client of ours would. */
static bool
server_hear(int client) {
    struct ipc_request request;
    ssize_t n = recv(client, &request, sizeof request, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return true;
    }
    return n == (ssize_t)sizeof request && server_answer(client, &request);
}

/* Another thread may fork at any moment, and the child closes the descriptors that are counted.  So each descriptor
 * is counted, in the worst case twice, from its entry until just before it is closed.  After that its number may
 * belong to another file, which the child must keep: it is better that the child leaves a descriptor open. */
static void
server_count(nfds_t n) {
    __atomic_store_n(&server.n_clients, n, __ATOMIC_RELEASE);
}

static void
server_accept(void) {
    int client = accept4(server.clients[0].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) { /* no descriptors left: the client waits */
        (void)nanosleep(&(struct timespec){.tv_nsec = SERVER_PAUSE_NS}, NULL);
        return;
    }
    if (!ipc_is_ours(client)) {
        (void)close(client);
        return;
    }
    server.clients[server.n_clients] = (struct pollfd){.fd = client, .events = POLLIN};
    server_count(server.n_clients + 1);
}

static void *
server_run(void *arg) {
    struct pollfd *clients = server.clients;
    (void)arg;
    for (;;) {
        clients[0].events = server.n_clients <= SERVER_CLIENTS ? POLLIN : 0;
        if (poll(clients, server.n_clients, -1) < 0) {
            continue;
        }
        for (nfds_t i = server.n_clients; i-- > 1;) {
            int fd = clients[i].fd;
            if (clients[i].revents != 0 && !server_hear(fd)) {
                clients[i] = clients[server.n_clients - 1];
                server_count(server.n_clients - 1);
                (void)close(fd);
            }
        }
        if ((clients[0].revents & POLLIN) != 0) {
            server_accept();
        }
    }
    return NULL;
}

/* ---- its beginning ---- */

/* In a forked child: the thread and its memory are the parent's. */
static void
server_after_fork(void) {
    while (server.n_clients > 0) {
        (void)close(server.clients[--server.n_clients].fd);
    }
    server_drop_fds();
    server.clients[0].fd = -1;
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
        !server_listen(&server.clients[0].fd)) {
        return false;
    }
    server.n_clients = 1;
    if (!server_begin_thread()) {
        int error = errno;
        (void)close(server.clients[0].fd);
        server.clients[0].fd = -1;
        server.n_clients = 0;
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
    bool is_served = server.clients[0].fd >= 0 || server_begin(heap);
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
