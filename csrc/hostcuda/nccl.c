/* NCCL for a single rank: every other rank is assumed to hold what this one holds.  Collectives copy accordingly, so that
 * shapes exchanged at startup agree; nothing passes between processes. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter): NCCL's signatures. */

#include "stubs.h"

#include "copy.h"
#include "memory.h"

#include <stdlib.h>

enum { NCCL_OK = 0, NCCL_UNHANDLED = 1, NCCL_INVALID = 4 };

struct nccl_comm {
    int n_ranks, rank;
};

struct nccl_id {
    char bytes[128];
};

/* ncclDataType_t */
static const size_t nccl_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static int
comm_new(struct nccl_comm **out, int n_ranks, int rank) {
    if (out == NULL || n_ranks <= 0 || rank < 0 || rank >= n_ranks) {
        return NCCL_INVALID;
    }
    *out = malloc(sizeof **out);
    if (*out == NULL) {
        return NCCL_UNHANDLED;
    }
    **out = (struct nccl_comm){n_ranks, rank};
    return NCCL_OK;
}

int
ncclCommInitRank(struct nccl_comm **out, int n_ranks, struct nccl_id id, int rank) {
    COUNT();
    (void)id;
    return comm_new(out, n_ranks, rank);
}

int
ncclCommInitRankConfig(
    struct nccl_comm **out, int n_ranks, struct nccl_id id, int rank, const void *config) {
    COUNT();
    (void)id;
    (void)config;
    return comm_new(out, n_ranks, rank);
}

int
ncclCommInitRankScalable(struct nccl_comm **out, int n_ranks, int rank) {
    COUNT();
    return comm_new(out, n_ranks, rank);
}

/* One process with one communicator per device, as DataParallel uses it. */
int
ncclCommInitAll(struct nccl_comm **out, int n_devices, const int *devices) {
    COUNT();
    (void)devices;
    int error = out == NULL || n_devices <= 0 ? NCCL_INVALID : NCCL_OK;
    for (int rank = 0; rank < n_devices && error == NCCL_OK; rank++) {
        error = comm_new(&out[rank], n_devices, rank);
    }
    return error;
}

int
ncclCommSplit(const struct nccl_comm *comm, int color, int key, struct nccl_comm **out) {
    COUNT();
    (void)key;
    if (color < 0) {
        *out = NULL;
        return NCCL_OK;
    }
    /* We cannot know which ranks choose the same color; assume all of them. */
    return comm_new(out, comm->n_ranks, comm->rank);
}

int
ncclCommDestroy(struct nccl_comm *comm) {
    COUNT();
    free(comm);
    return NCCL_OK;
}

int
ncclCommAbort(struct nccl_comm *comm) {
    COUNT();
    free(comm);
    return NCCL_OK;
}

int
ncclCommCount(const struct nccl_comm *comm, int *out) {
    COUNT();
    *out = comm->n_ranks;
    return NCCL_OK;
}

int
ncclCommUserRank(const struct nccl_comm *comm, int *out) {
    COUNT();
    *out = comm->rank;
    return NCCL_OK;
}

/* One transfer of a group.  torch gathers into a list by one broadcast per rank, and exchanges by one send and one receive per
 * rank, each as a group.  What other ranks send is taken from what this rank sends. */
struct nccl_transfer {
    void *at;
    size_t count;
    unsigned type;
    bool is_own; /* sent to everybody, or to this rank itself */
    const void *stream;
};

struct nccl_transfers {
    int n, room;
    struct nccl_transfer *each;
};

static _Thread_local struct nccl_group {
    int depth;
    struct nccl_transfers sends, receives;
} group;

/* NCCL_UNHANDLED: host memory is out. */
static int
group_note(struct nccl_transfers *transfers, struct nccl_transfer one) {
    if (group.depth == 0) {
        return NCCL_OK;
    }
    if (transfers->n == transfers->room) {
        const int room = 2 * transfers->room + 16;
        struct nccl_transfer *each = realloc(transfers->each, (size_t)room * sizeof *each);
        if (each == NULL) {
            return NCCL_UNHANDLED;
        }
        transfers->each = each;
        transfers->room = room;
    }
    transfers->each[transfers->n++] = one;
    return NCCL_OK;
}

static void
transfers_end(struct nccl_transfers *transfers) {
    free(transfers->each);
    *transfers = (struct nccl_transfers){0};
}

/* The send that stands for what the peer sends: preferably one to this rank.  NULL: unknown. */
static const struct nccl_transfer *
group_match(const struct nccl_transfer *receive) {
    const struct nccl_transfer *found = NULL;
    for (int i = group.sends.n; i-- > 0;) {
        const struct nccl_transfer *send = &group.sends.each[i];
        bool is_alike = send->count == receive->count && send->type == receive->type;
        if (is_alike && (send->is_own || found == NULL || !found->is_own)) {
            found = send;
        }
    }
    return found;
}

/* Copies `count` elements, as work on the stream. */
static int
nccl_copy(void *to, const void *from, size_t count, unsigned type, const void *stream) {
    if (type >= sizeof nccl_bytes / sizeof nccl_bytes[0]) {
        return NCCL_INVALID;
    }
    int error = pya_hc_launch(stream);
    if (error == CU_OK && to != from) {
        error = pya_hc_copy(to, from, count * nccl_bytes[type], COPY_DEFAULT, stream, false);
    }
    return error == CU_OK ? NCCL_OK : NCCL_UNHANDLED;
}

int
ncclAllReduce(
    const void *send, void *receive, size_t count, unsigned type, int operation,
    const struct nccl_comm *comm, void *stream) {
    COUNT();
    (void)operation;
    (void)comm;
    return nccl_copy(receive, send, count, type, stream);
}

int
ncclGroupStart(void) {
    COUNT();
    group.depth++;
    return NCCL_OK;
}

int
ncclGroupEnd(void) {
    COUNT();
    if (group.depth == 0) {
        return NCCL_INVALID;
    }
    group.depth--;
    int error = NCCL_OK;
    for (int i = 0; group.depth == 0 && i < group.receives.n && error == NCCL_OK; i++) {
        const struct nccl_transfer *to = &group.receives.each[i];
        const struct nccl_transfer *from = group_match(to);
        if (from != NULL) {
            error = nccl_copy(to->at, from->at, to->count, to->type, to->stream);
        }
    }
    if (group.depth == 0) {
        transfers_end(&group.sends);
        transfers_end(&group.receives);
    }
    return error;
}

int
ncclSend(
    const void *send, size_t count, unsigned type, int peer, const struct nccl_comm *comm,
    void *stream) {
    COUNT();
    void *at = (void *)(uintptr_t)send;
    const bool is_own = peer == comm->rank;
    int error = group_note(&group.sends, (struct nccl_transfer){at, count, type, is_own, stream});
    return error == NCCL_OK ? nccl_copy(at, at, count, type, stream) : error;
}

int
ncclRecv(
    void *receive, size_t count, unsigned type, int peer, const struct nccl_comm *comm,
    void *stream) {
    COUNT();
    (void)peer;
    (void)comm;
    int error =
        group_note(&group.receives, (struct nccl_transfer){receive, count, type, false, stream});
    return error == NCCL_OK ? nccl_copy(receive, receive, count, type, stream) : error;
}

int
ncclBroadcast(
    const void *send, void *receive, size_t count, unsigned type, int root,
    const struct nccl_comm *comm, void *stream) {
    COUNT();
    const bool is_root = root == comm->rank; /* only the root's send buffer is valid */
    void *from = is_root ? (void *)(uintptr_t)send : receive;
    int error = group_note(
        is_root ? &group.sends : &group.receives,
        (struct nccl_transfer){from, count, type, is_root, stream});
    return error == NCCL_OK ? nccl_copy(receive, from, count, type, stream) : error;
}

int
ncclReduce(
    const void *send, void *receive, size_t count, unsigned type, int operation, int root,
    const struct nccl_comm *comm, void *stream) {
    COUNT();
    (void)operation;
    bool is_root = root == comm->rank;
    return nccl_copy(is_root ? receive : NULL, is_root ? send : NULL, count, type, stream);
}

/* Fills every slot of the receive buffer with the same: what each rank is assumed to send. */
static int
nccl_fill_slots(
    char *receive, const void *send, size_t count, unsigned type, int n_slots, const void *stream) {
    int error = type < sizeof nccl_bytes / sizeof nccl_bytes[0] ? NCCL_OK : NCCL_INVALID;
    for (int slot = 0; slot < n_slots && error == NCCL_OK; slot++) {
        char *at = receive + (size_t)slot * count * nccl_bytes[type];
        error = nccl_copy(at, send, count, type, stream);
    }
    return error;
}

int
ncclAllGather(
    const void *send, void *receive, size_t count, unsigned type, const struct nccl_comm *comm,
    void *stream) {
    COUNT();
    return nccl_fill_slots(receive, send, count, type, comm->n_ranks, stream);
}

int
ncclAlltoAll(
    const void *send, void *receive, size_t count, unsigned type, const struct nccl_comm *comm,
    void *stream) {
    COUNT();
    if (type >= sizeof nccl_bytes / sizeof nccl_bytes[0]) {
        return NCCL_INVALID;
    }
    const char *slot = (const char *)send + (size_t)comm->rank * count * nccl_bytes[type];
    return nccl_fill_slots(receive, slot, count, type, comm->n_ranks, stream);
}

int
ncclReduceScatter(
    const void *send, void *receive, size_t count, unsigned type, int operation,
    const struct nccl_comm *comm, void *stream) {
    COUNT();
    (void)operation;
    if (type >= sizeof nccl_bytes / sizeof nccl_bytes[0]) {
        return NCCL_INVALID;
    }
    const char *slot = (const char *)send + (size_t)comm->rank * count * nccl_bytes[type];
    return nccl_copy(receive, slot, count, type, stream);
}

/* Buffers that a program has NCCL allocate are charged like any others. */

int
ncclMemAlloc(void **out, size_t size) {
    COUNT();
    return pya_hc_memory_alloc(REGION_PLAIN, size, out) == CU_OK ? NCCL_OK : NCCL_UNHANDLED;
}

int
ncclMemFree(void *ptr) {
    COUNT();
    return pya_hc_memory_free(ptr) == CU_OK ? NCCL_OK : NCCL_UNHANDLED;
}

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
