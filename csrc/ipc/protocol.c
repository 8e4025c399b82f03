#define _GNU_SOURCE
#include "protocol.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void
ipc_packet_init(struct ipc_packet *packet) {
    memset(packet, 0, sizeof *packet);
    packet->body.iov_base = &packet->reply;
    packet->body.iov_len = sizeof packet->reply;
    packet->header.msg_iov = &packet->body;
    packet->header.msg_iovlen = 1;
    packet->header.msg_control = packet->control.bytes;
    packet->header.msg_controllen = sizeof packet->control.bytes;
}

socklen_t
ipc_address(int32_t pid, const unsigned char *secret, struct sockaddr_un *out) {
    uint64_t half;
    memset(out, 0, sizeof *out);
    memcpy(&half, secret, sizeof half);
    out->sun_family = AF_UNIX;
    int n = snprintf(
        out->sun_path + 1, sizeof out->sun_path - 1, "pyalloc.%d.%016llx", (int)pid,
        (unsigned long long)half);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

bool
ipc_is_ours(int fd) {
    struct ucred who;
    socklen_t n = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 && who.uid == geteuid();
}
