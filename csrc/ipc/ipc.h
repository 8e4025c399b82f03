/* Device memory shared between the processes of one user: names for live blocks, and what such a name maps.  Floor 14.
 *
 * Descriptors cannot travel in a name.  A thread of the process that shares hands them out over a socket when the
 * name is opened, so a shared block costs it nothing until then, and nobody needs leave to inspect the other (as for
 * pidfd_getfd, which many systems refuse).  Socket and names hold what no other user may know, and both sides look at who
 * the other is. */
#pragma once

#include "../core/pyalloc.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PYA_IPC_WHY_BYTES = 320 };

/* Travels between processes of one build: as long as CUDA's own handles, with which it must not be confused. */
struct pya_ipc_name {
    char magic[8];
    unsigned char secret[16]; /* of the process; half of it is the socket's name */
    pya_dptr ptr;
    uint64_t key;
    uint64_t n_pages;
    int32_t pid;
    int32_t unused[3];
};

/* The block lies `offset` bytes into what opening the name maps.  It must stay live until that is done, as torch sees to.
 * As pya_share(); why: what else was in the way. */
PYA_MUST_CHECK pya_status pya_ipc_share(
    struct pya_heap *heap, pya_dptr ptr, struct pya_ipc_name *name, size_t *offset, char *why);
/* Is it a name made by this function, whoever made it? */
bool pya_ipc_is_name(const void *name, size_t bytes);
/* Maps the pages on `device`; pya_import_close() ends it.  why: PYA_IPC_WHY_BYTES of text on failure, "" where the status
 * and the device's last error say it. */
PYA_MUST_CHECK pya_status pya_ipc_open(
    struct pya_heap *heap, int device, const struct pya_ipc_name *name, pya_dptr *out, char *why);

#ifdef __cplusplus
}
#endif
