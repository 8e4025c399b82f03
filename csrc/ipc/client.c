/* The side that opens a name: requests the pages from the process that made it, some at a time. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "ipc.h"
#include "protocol.h"

/* A process that does not answer within this time is stopped or stuck. */
enum { CLIENT_PATIENCE_S = 60 };

struct client {
    const struct pya_ipc_name *name;
    int socket;
    size_t n_asked; /* pages so far */
    int fds[IPC_BATCH];
    uint32_t n_pages[IPC_BATCH]; /* of each descriptor */
    size_t n_fds, next;
    char *why;
};

__attribute__((format(printf, 3, 4))) static pya_status
client_fail(const struct client *client, pya_status status, const char *format, ...) {
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    (void)vsnprintf(client->why, PYA_IPC_WHY_BYTES, format, arguments);
    __builtin_va_end(arguments);
    return status;
}

/* Takes the descriptors that came with a packet. */
static size_t
packet_take_fds(struct ipc_packet *packet, int *fds) {
    size_t n = 0;
    for (struct cmsghdr *each = CMSG_FIRSTHDR(&packet->header); each != NULL;
         each = CMSG_NXTHDR(&packet->header, each)) {
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS) {
            n = (each->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(each), n * sizeof(int));
        }
    }
    return n;
}

static pya_status
client_receive(struct client *client) {
    struct ipc_packet packet;
    ipc_packet_init(&packet);
    ssize_t got = TEMP_FAILURE_RETRY(recvmsg(client->socket, &packet.header, MSG_CMSG_CLOEXEC));
    client->n_fds = got < 0 ? 0 : packet_take_fds(&packet, client->fds);
    client->next = 0;
    if (got != (ssize_t)sizeof packet.reply) {
        bool is_slow = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
        return client_fail(
            client, PYA_E_DEVICE, "the process that sent it (%d) %s", (int)client->name->pid,
            is_slow ? "does not answer" : "ended while it was asked for the memory");
    }
    if (packet.reply.status == (int32_t)PYA_E_FOREIGN) {
        return client_fail(
            client, PYA_E_FOREIGN, "the process that sent it (%d) has freed it since",
            (int)client->name->pid);
    }
    if (packet.reply.status != PYA_OK) {
        return client_fail(
            client, PYA_E_DEVICE, "the process that sent it (%d) could not hand it over: %s",
            (int)client->name->pid, pya_status_text((pya_status)packet.reply.status));
    }
    if (client->n_fds == 0 || client->n_fds != packet.reply.n ||
        (packet.header.msg_flags & MSG_CTRUNC) != 0) {
        return client_fail(
            client, PYA_E_HOST_NOMEM,
            "this process has reached its limit of open files (ulimit -n), and briefly needs up to %d more",
            IPC_BATCH);
    }
    memcpy(client->n_pages, packet.reply.n_pages, client->n_fds * sizeof(uint32_t));
    for (size_t i = 0; i < client->n_fds; i++) {
        client->n_asked += client->n_pages[i];
    }
    return PYA_OK;
}

static pya_status
client_ask(struct client *client) {
    struct ipc_request request = {
        .ptr = client->name->ptr,
        .key = client->name->key,
        .n_pages = client->name->n_pages,
        .first = client->n_asked,
    };
    size_t left = (size_t)client->name->n_pages - client->n_asked;
    request.n = (uint32_t)(left < IPC_BATCH ? left : IPC_BATCH);
    memcpy(request.secret, client->name->secret, sizeof request.secret);
    ssize_t sent = TEMP_FAILURE_RETRY(send(client->socket, &request, sizeof request, MSG_NOSIGNAL));
    if (sent != (ssize_t)sizeof request) {
        return client_fail(
            client, PYA_E_DEVICE, "the process that sent it (%d) has ended",
            (int)client->name->pid);
    }
    return client_receive(client);
}

static pya_status
client_next(void *arg, int *fd, uint32_t *n_pages) {
    struct client *client = arg;
    if (client->next == client->n_fds) {
        pya_status st = client_ask(client);
        if (st != PYA_OK) {
            return st;
        }
    }
    *n_pages = client->n_pages[client->next];
    *fd = client->fds[client->next++];
    return PYA_OK;
}

static pya_status
client_connect(struct client *client) {
    struct sockaddr_un address;
    const struct timeval patience = {.tv_sec = CLIENT_PATIENCE_S};
    socklen_t n = ipc_address(client->name->pid, client->name->secret, &address);
    client->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (client->socket < 0) {
        return client_fail(client, PYA_E_HOST_NOMEM, "no socket could be made");
    }
    (void)setsockopt(client->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    (void)setsockopt(client->socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (TEMP_FAILURE_RETRY(connect(client->socket, (const struct sockaddr *)&address, n)) != 0) {
        return client_fail(
            client, PYA_E_DEVICE, "the process that sent it (%d) %s", (int)client->name->pid,
            errno == EAGAIN ? "does not answer"
                            : "has ended, or is in a container with a network of its own");
    }
    if (!ipc_is_ours(client->socket)) {
        return client_fail(
            client, PYA_E_DEVICE, "the process that sent it (%d) belongs to another user",
            (int)client->name->pid);
    }
    return PYA_OK;
}

pya_status
pya_ipc_open(
    struct pya_heap *heap, int device, const struct pya_ipc_name *name, pya_dptr *out, char *why) {
    struct client client = {.name = name, .socket = -1, .why = why};
    const struct pya_import_source source = {.arg = &client, .next = client_next};
    why[0] = '\0';
    pya_status st = client_connect(&client);
    if (st == PYA_OK) {
        st = pya_import_open(heap, device, (size_t)name->n_pages, &source, out);
    }
    while (client.next < client.n_fds) {
        (void)close(client.fds[client.next++]);
    }
    if (client.socket >= 0) {
        (void)close(client.socket);
    }
    return st;
}
