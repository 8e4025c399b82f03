/* What is said over the socket: one packet each way for some of a block's pages.  Floor 13. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "../core/base.h"

/* Descriptors of handles in one packet; the kernel takes 253 at most, and the device's lock is held while they are made. */
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
    uint32_t n;                  /* descriptors with it */
    uint32_t n_pages[IPC_BATCH]; /* behind each of them */
};

/* A packet and its descriptors.  Initialised by ipc_packet_init(), which it must not be moved after. */
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
/* The abstract address (no file) of a process; its length. */
socklen_t ipc_address(int32_t pid, const unsigned char *secret, struct sockaddr_un *out);
/* Is the process at the other end this user's? */
bool ipc_is_ours(int fd);
