/* Device memory shared between the processes of one user: names for live blocks, and mapping the memory behind a
 * name.  Floor 14.
 *
 * A name cannot contain descriptors.  When a name is opened, a thread of the sharing process sends them over a
 * socket.  So a shared block costs nothing until then, and no process needs permission to inspect another (as for
 * pidfd_getfd, which many systems refuse).  The socket and the names contain secrets that no other user can know, and
 * both sides check the other's identity. */
#pragma once

#include "../core/pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PYA_IPC_WHY_BYTES = 320 };

/* Travels between processes of one build.  It is as long as CUDA's own handles, and must not be mistaken for one. */
struct pya_ipc_name {
    char magic[8];
    unsigned char secret[16]; /* of the process; half of it names the socket */
    pya_dptr ptr;
    uint64_t key;
    uint64_t n_pages;
    int32_t pid;
    int32_t unused[3];
};

/* Makes a name for a block.  The block lies `offset` bytes into the memory that opening the name maps.  It must stay
 * live until the name was opened; torch sees to that.  Status as from pya_share(); why: any other obstacle. */
PYA_MUST_CHECK pya_status pya_ipc_share(
    struct pya_heap *heap, pya_dptr ptr, struct pya_ipc_name *name, size_t *offset, char *why);
/* Was this name made by pya_ipc_share(), in whatever process? */
bool pya_ipc_is_name(const void *name, size_t bytes);
/* Maps the pages on `device` until pya_import_close().  why: on failure a text of up to PYA_IPC_WHY_BYTES; "" if the
 * status and the device's last error say enough. */
PYA_MUST_CHECK pya_status pya_ipc_open(
    struct pya_heap *heap, int device, const struct pya_ipc_name *name, pya_dptr *out, char *why);

#ifdef __cplusplus
}
#endif
