/* The protocol on the socket: one packet each way for some of a block's pages.  Floor 13. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "../core/base.h"

/* Descriptors in one packet.  The kernel allows at most 253, and the device's lock is held while they are created. */
enum { IPC_BATCH = 32, IPC_SECRET_BYTES = 16 };

struct ipc_request {
    unsigned char secret[IPC_SECRET_BYTES];
    pya_dptr ptr;
    uint64_t key;
    uint64_t n_pages;
    uint64_t first; /* page */
    uint32_t n;     /* handles at most: 1 .. IPC_BATCH */
    uint32_t unused;
};

struct ipc_reply {
    int32_t status;
    uint32_t n;                  /* descriptors sent with the reply */
    uint32_t n_pages[IPC_BATCH]; /* of each handle */
};

/* A packet with its descriptors.  Do not move it after ipc_packet_init(). */
struct ipc_packet {
    struct msghdr header;
    struct iovec body;
    struct ipc_reply reply;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(IPC_BATCH * sizeof(int))];
    } control;
};

void ipc_packet_init(struct ipc_packet *packet);
/* Writes the abstract address (no file) of a process and returns its length. */
socklen_t ipc_address(int32_t pid, const unsigned char *secret, struct sockaddr_un *out);
/* Does the process at the other end belong to this user? */
bool ipc_is_ours(int fd);
