/* NCCL as one rank sees it alone: every other rank is taken to hold what this one holds.  Collectives
 * copy accordingly, so that shapes exchanged at start agree; nothing passes between processes. */
/* NOLINTBEGIN(readability-function-size,readability-non-const-parameter): NCCL's signatures. */

#include "stubs.h"

#include "copy.h"

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

int
ncclCommSplit(const struct nccl_comm *comm, int color, int key, struct nccl_comm **out) {
    COUNT();
    (void)key;
    if (color < 0) {
        *out = NULL;
        return NCCL_OK;
    }
    /* Who else asks for the same color is not known here: all do. */
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

/* torch gathers into a list by one broadcast from each rank, as a group: what the others send is what this rank sends. */
enum { MOST_BROADCASTS = 64 };

struct nccl_broadcast {
    void *receive;
    size_t count;
    unsigned type;
    const void *stream;
};

static _Thread_local struct nccl_group {
    int depth;
    const void *send; /* of this rank's own broadcast; NULL: none yet */
    size_t count;
    unsigned type;
    int n_others;
    struct nccl_broadcast others[MOST_BROADCASTS];
} group;

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
    if (group.depth++ == 0) {
        group.send = NULL;
        group.n_others = 0;
    }
    return NCCL_OK;
}

int
ncclGroupEnd(void) {
    COUNT();
    int error = NCCL_OK;
    if (group.depth == 0) {
        return NCCL_INVALID;
    }
    if (--group.depth > 0 || group.send == NULL) {
        return NCCL_OK;
    }
    for (int i = 0; i < group.n_others && error == NCCL_OK; i++) {
        const struct nccl_broadcast *other = &group.others[i];
        if (other->count == group.count && other->type == group.type) {
            error = nccl_copy(other->receive, group.send, other->count, other->type, other->stream);
        }
    }
    return error;
}

int
ncclBroadcast(
    const void *send, void *receive, size_t count, unsigned type, int root,
    const struct nccl_comm *comm, void *stream) {
    COUNT();
    if (root == comm->rank) { /* only the root's send buffer means anything */
        group.send = send;
        group.count = count;
        group.type = type;
        return nccl_copy(receive, send, count, type, stream);
    }
    if (group.depth > 0 && group.n_others < MOST_BROADCASTS) {
        group.others[group.n_others++] = (struct nccl_broadcast){receive, count, type, stream};
    }
    return nccl_copy(receive, receive, count, type, stream);
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

int
ncclAllGather(
    const void *send, void *receive, size_t count, unsigned type, const struct nccl_comm *comm,
    void *stream) {
    COUNT();
    int error = type < sizeof nccl_bytes / sizeof nccl_bytes[0] ? NCCL_OK : NCCL_INVALID;
    for (int rank = 0; rank < comm->n_ranks && error == NCCL_OK; rank++) {
        char *slot = (char *)receive + (size_t)rank * count * nccl_bytes[type];
        error = nccl_copy(slot, send, count, type, stream);
    }
    return error;
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

/* NOLINTEND(readability-function-size,readability-non-const-parameter) */
